"""Files are replaced in one step or left as they are, and errors name the file and the disk."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from support.full_disk import FullDisk

from cfl.data.report import write_partition_csv
from cfl.federation.row_store import FileRows
from cfl.papers.command import main
from cfl.reporting.compare.command import write_report
from cfl.reporting.compare.writing import write_differences_csv, write_means_csv, write_runs_csv
from cfl.reporting.figures import save
from cfl.reporting.matrix_file import write_matrix_csv
from cfl.runtime import atomic_write
from cfl.runtime.atomic_write import append, replacing, write_all, write_whole
from cfl.runtime.checkpoint_file import read_checkpoint, write_checkpoint
from cfl.runtime.disk import existing, mount_of, why
from cfl.runtime.errors import NotWritten

FULL = "no space is left on the disk at /"


def checkpoint(path: Path) -> None:
    with replacing(path) as file:
        write_checkpoint({"federation": {"rows": torch.ones(1000)}, "state_dict": {}}, file.path)


def arrays(path: Path) -> None:
    with replacing(path) as file:
        np.savez(file, values=np.ones(1000))


Writer = Callable[[Path], object]
WRITERS: dict[str, Writer] = {
    "text": lambda path: write_whole(path, "all of it"),
    "matrix": lambda path: write_matrix_csv(path, torch.eye(2)),
    "runs": lambda path: write_runs_csv(path, []),
    "means": lambda path: write_means_csv(path, []),
    "differences": lambda path: write_differences_csv(path, []),
    "comparison.md": lambda path: write_report(path.parent, []),
    "report.html": lambda path: write_report(path.parent, []),
    "picture.png": lambda path: save(Figure(), path),
    "partition.csv": lambda path: write_partition_csv(path, [], []),
    "some.ckpt": checkpoint,
    "arrays.npz": arrays,
}


@pytest.mark.parametrize("name", WRITERS)
def test_what_cannot_be_written_leaves_what_was_there(name: str, tmp_path: Path) -> None:
    """A writer that fails leaves the former file, and no other file in the folder."""
    path = tmp_path / name
    WRITERS[name](path)
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    assert before[path]
    with FullDisk(), pytest.raises(NotWritten, match=f"{tmp_path}.* cannot be written: {FULL}"):
        WRITERS[name](path)
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_the_page_of_all_tables_is_written_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "page.md"
    path.write_text("before")
    monkeypatch.setattr("cfl.papers.command.page", lambda *_: "afterwards")
    assert main(["reproducibility", "--out", str(path)]) == 0
    assert path.read_text() == "afterwards"
    monkeypatch.setattr("cfl.papers.command.page", lambda *_: "another")
    with FullDisk():
        assert main(["reproducibility", "--out", str(path)]) == 2
    assert path.read_text() == "afterwards"


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="a folder in memory that Linux has")
def test_files_in_memory_are_files() -> None:
    """A link in a run folder there is replaced, and its target left as it was."""
    with TemporaryDirectory(dir="/dev/shm") as folder:
        target, link, pipe = (Path(folder, name) for name in ("target", "link", "pipe"))
        target.write_text("as it was")
        link.symlink_to(target)
        os.mkfifo(pipe)
        for path in (link, pipe):
            write_whole(path, "1")
            write_whole(path, "2")
            assert path.is_file()
            assert path.read_text() == "2"
        assert target.read_text() == "as it was"


def test_a_device_is_written_to_and_stays_one(tmp_path: Path) -> None:
    """As root, renaming a file to ``/dev/null`` would take the device from all other programs."""
    reading, writing = os.pipe()
    in_file = os.open(tmp_path / "redirected.txt", os.O_WRONLY | os.O_CREAT)
    os.write(in_file, b"said before\n")
    for descriptor in (writing, in_file):
        path = Path(f"/dev/fd/{descriptor}")
        write_whole(path, "a,b\n")
        write_whole(path, "1,2\n")
        os.close(descriptor)
    with open(reading, "rb") as pipe:
        assert pipe.read() == b"a,b\n1,2\n"
    assert (tmp_path / "redirected.txt").read_text() == "said before\na,b\n1,2\n"


def test_lines_are_added_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    append(path, "a,b\n")
    with FullDisk(), pytest.raises(NotWritten):
        append(path, "1,2\n")
    assert path.read_text() == "a,b\n"
    append(path, "1,2\n")
    assert path.read_text() == "a,b\n1,2\n"


def test_a_checkpoint_says_how_much_it_needs(tmp_path: Path) -> None:
    """The error names the size of the whole checkpoint."""
    content = {"federation": {"rows": torch.ones(100_000)}, "state_dict": {}}
    write_checkpoint(content, tmp_path / "whole")
    size = (tmp_path / "whole").stat().st_size
    assert size > 400_000
    with FullDisk(), pytest.raises(NotWritten, match=rf" free, {size / 1000:.1f} kB needed\)$"):
        write_checkpoint(content, tmp_path / "other")
    last = tmp_path / "last.ckpt"
    said = rf"^{last} cannot be written: .* free, {size / 1000:.1f} kB needed\)$"
    with FullDisk(), pytest.raises(NotWritten, match=said), replacing(last) as file:  # as a run writes it
        write_checkpoint(content, file.path)


def test_a_file_of_its_digest_is_read_back(tmp_path: Path) -> None:
    checkpoint(tmp_path / "a")
    assert read_checkpoint(tmp_path / "a")["federation"]["rows"].sum() == 1000


def test_rows_of_clients_name_their_folder(tmp_path: Path) -> None:
    rows = FileRows(100, torch.float32, tmp_path)
    said = f"the file of what clients keep, in {tmp_path}, cannot be written: {FULL}.* 1.2 kB needed"
    with FullDisk(), pytest.raises(NotWritten, match=said):
        rows.write(np.arange(3), torch.ones(3, 100))
    rows.write(np.array([0, 2]), torch.ones(2, 100))
    assert rows.read(np.array([2])).sum() == 100


def test_a_file_that_must_survive_is_on_disk_before_its_name_and_its_name_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, synced, sync = tmp_path / "last.ckpt", [], os.fsync

    def noted(descriptor: int) -> None:
        synced.append((os.readlink(f"/proc/self/fd/{descriptor}"), path.exists()))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    with replacing(path, sync=True) as file:
        file.write(b"whole")
        temporary = str(file.path)
    assert synced == [(temporary, False), (str(tmp_path), True)]
    synced.clear()
    with replacing(path) as file:
        file.write(b"new")
    assert synced == []


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the system writes only a part of the data, the rest is written by further calls."""
    write, taken = os.write, []

    def short(descriptor: int, data: memoryview) -> int:
        taken.append(write(descriptor, data[:3]))
        return taken[-1]

    monkeypatch.setattr(os, "write", short)
    write_whole(tmp_path / "a", "0123456789")
    assert (tmp_path / "a").read_text() == "0123456789"
    assert taken == [3, 3, 3, 1]
    monkeypatch.setattr(os, "write", lambda *_: 0)  # never writes anything
    with pytest.raises(OSError, match="Input/output error"):
        write_all(1, memoryview(b"x"))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (errno.ENOSPC, "no space is left on the disk at /"),
        (errno.EDQUOT, "the disk quota at /"),
        (errno.EROFS, "the file system at /"),
        (errno.EIO, "the disk at /"),
        (errno.EFBIG, r"ulimit -f"),
        (errno.EACCES, "permission denied"),
    ],
)
def test_every_reason_is_a_sentence(error: int, said: str, tmp_path: Path) -> None:
    with FullDisk(error=error), pytest.raises(NotWritten, match=f"^{tmp_path}/a cannot be written: .*{said}"):
        write_whole(tmp_path / "a", "text")


def test_the_limit_of_the_system_is_named(tmp_path: Path) -> None:
    """A real full device, /dev/full, gives the error that names the disk."""
    descriptor = os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(OSError, match="No space left on device") as raised:
        write_all(descriptor, memoryview(b"x"))
    os.close(descriptor)
    place = mount_of(existing(tmp_path / "no" / "such"))
    assert os.path.ismount(place)
    assert f"{tmp_path}/".startswith(f"{place}".rstrip("/") + "/")
    assert why(tmp_path / "no" / "such", raised.value).startswith(f"no space is left on the disk at {place} (")


# Temporary files of killed processes.


def left(folder: Path, name: str) -> Path:
    path = folder / name
    path.write_text("a part")
    return path


def test_only_files_of_processes_that_have_ended_are_removed(tmp_path: Path) -> None:
    """Temporary files are removed unless a living writer holds a lock on them. Files with other names stay."""
    dead = left(tmp_path, ".cfl-0123abcd-last.ckpt")
    alive = left(tmp_path, ".cfl-89abcdef-last.ckpt")
    others = [left(tmp_path, name) for name in (".cfl-notes", ".cfl-0123abcd", "cfl-0123abcd-x", ".cfl-0123ABCD-x")]
    (tmp_path / ".cfl-01234567-folder").mkdir()
    elsewhere = left(tmp_path.parent, "elsewhere")
    (tmp_path / ".cfl-76543210-link").symlink_to(elsewhere)
    with alive.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        write_whole(tmp_path / "a", "text")
        assert not dead.exists()
        assert alive.read_text() == "a part"
    assert all(path.exists() for path in [*others, tmp_path / ".cfl-01234567-folder", elsewhere])


def test_a_file_that_is_being_written_is_never_taken_for_a_dead_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is being written is not removed as a dead process's while another process tidies the folder."""
    with replacing(tmp_path / "a") as file:
        file.write(b"one ")
        monkeypatch.setattr(atomic_write, "_tidied", set())
        write_whole(tmp_path / "b", "text")
        file.write(b"two")
    assert (tmp_path / "a").read_text() == "one two"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
