"""What makes two runs the same experiment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image
from support.tiny_cli import fit, run, summary

from cfl.papers.definition import papers
from cfl.papers.kept import RESULTS
from cfl.reporting.compare.settings import settings_of
from cfl.reporting.experiment import (
    benchmark_name,
    class_of,
    config_hash,
    differences,
    differences_on_resuming,
    experiment_of,
    with_defaults,
)
from cfl.reporting.former_names import MOVED, with_renamed_options


def config(*methods: str) -> dict[str, Any]:
    return {
        "seed_everything": 0,
        "model": {},
        "data": {},
        "schedule": {},
        "federated": {},
        "methods": {name: {"class_path": f"cfl.methods.{name}", "init_args": {}} for name in methods},
    }


def test_differences_within_lists_are_named_alone() -> None:
    """Of several data sets only the option that differs is named; a list of plain numbers is shown whole."""
    sets = [{"class_path": "Arrays", "init_args": {"path": f"{name}.npz"}} for name in "ab"]
    other = [sets[0], {"class_path": "Arrays", "init_args": {"path": "c.npz"}}]
    assert differences({"sources": sets, "hidden": [1, 2]}, {"sources": other, "hidden": [1, 3]}) == [
        "hidden: [1, 2], in the checkpoint [1, 3]",
        "sources.1.init_args.path: 'b.npz', in the checkpoint 'c.npz'",
    ]
    assert differences({"sources": sets}, {"sources": sets[:1]}) == [
        "sources.1.class_path: 'Arrays', in the checkpoint '(absent)'",
        "sources.1.init_args.path: 'b.npz', in the checkpoint '(absent)'",
    ]


def test_the_order_of_methods_makes_another_experiment() -> None:
    one, other = experiment_of(config("AGEM", "GPM")), experiment_of(config("GPM", "AGEM"))
    assert config_hash(one) != config_hash(other)
    assert differences(one, other) == ["methods_order: ['AGEM', 'GPM'], in the checkpoint ['GPM', 'AGEM']"]
    assert config_hash(one) == config_hash(experiment_of(config("AGEM", "GPM")))


@pytest.mark.parametrize("methods", [(), ("GPM",)])
def test_fewer_than_two_methods_have_none(methods: tuple[str, ...]) -> None:
    assert "methods_order" not in experiment_of(config(*methods))


@pytest.mark.parametrize(
    "alike",
    [
        [{}, {"precision": 32}, {"precision": "32-true"}, {"gradient_clip_val": 0}, {"gradient_clip_val": 0.0}],
        [{"precision": "bf16"}, {"precision": "bf16-mixed"}, {"precision": "bf16", "gradient_clip_algorithm": "value"}],
        [{"precision": 16}, {"precision": "16"}, {"precision": "16-mixed"}],
        [{"precision": 64}, {"precision": "64-true"}],
        [
            {"gradient_clip_val": 1},
            {"gradient_clip_val": 1.0},
            {"gradient_clip_val": 1, "gradient_clip_algorithm": "norm"},
        ],
        [{"gradient_clip_val": 1, "gradient_clip_algorithm": "value"}],
        [{"precision": "bf16-true"}],
    ],
    ids=lambda alike: str(alike[-1]),
)
def test_what_the_trainer_is_told_in_other_words_is_the_same_experiment(alike: list[dict[str, Any]]) -> None:
    experiments = [experiment_of({"trainer": trainer}) for trainer in alike]
    assert len({config_hash(experiment) for experiment in experiments}) == 1
    assert len({str(settings_of({"trainer": trainer})) for trainer in alike}) == 1
    for trainer in alike:  # of a checkpoint that holds the option as it was written
        stored = {**experiments[0], "trainer": {**experiments[0]["trainer"], **trainer}}
        assert differences_on_resuming(experiments[0], stored) == []
    other = {"precision": "64-true", "gradient_clip_val": 3.0}
    assert config_hash(experiment_of({"trainer": other})) != config_hash(experiments[0])


def test_only_a_reduced_precision_of_products_makes_another_experiment() -> None:
    plain = config_hash(experiment_of(config()))
    assert plain == config_hash(experiment_of({**config(), "engine": {"matmul_precision": "highest", "kind": "vmap"}}))
    assert plain != config_hash(experiment_of({**config(), "engine": {"matmul_precision": "medium"}}))


def source(name: str, **options: Any) -> dict[str, Any]:
    return {"class_path": f"cfl.data.sources.{name}", "init_args": options}


@pytest.mark.parametrize(
    ("sources", "name"),
    [
        ([source("MNIST")], "permuted-mnist"),
        ([source("Arrays", path="~/my data/X rays.v2.npz")], "permuted-X-rays.v2"),
        ([source("ImageFolder", path="birds.2021/")], "permuted-birds.2021"),
        ([source("BinarySet", set="dna"), source("Digits")], "permuted-dna-digits"),
        ([source("Arrays", path="???")], "permuted-arrays"),
        ([{"class_path": "elsewhere.Own", "init_args": {"path": "x"}}], "permuted-own"),
    ],
)
def test_a_benchmark_is_called_by_its_data_sets(sources: list[dict[str, Any]], name: str) -> None:
    """A benchmark is named after its data sets, so that runs on different files are in different tables."""
    options = {"source": sources[0]} if len(sources) == 1 else {"sources": sources}
    stream = {"class_path": "cfl.data.streams.Permuted", "init_args": options}
    assert benchmark_name({"data": {"stream": stream}}) == name


def test_a_run_is_continued_in_its_order_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prox, ewc = ("--methods.prox", "FedProx"), ("--methods.ewc", "EWC")
    assert fit(tmp_path / "run", *prox, *ewc) == 0
    assert list(yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["methods"]) == ["prox", "ewc"]
    last = ("--ckpt_path", str(tmp_path / "run" / "last.ckpt"))
    assert fit(tmp_path / "same", *prox, *ewc, *last) == 0
    capsys.readouterr()
    assert fit(tmp_path / "swapped", *ewc, *prox, *last) == 2
    assert "methods_order: ['ewc', 'prox'], in the checkpoint ['prox', 'ewc']" in capsys.readouterr().err


# Classes that have moved.

FORMER = "cfl.gaussian.GaussianMechanism"


def test_every_class_that_moved_is_where_the_table_says() -> None:
    for path, now in MOVED.items():
        found = class_of({"class_path": path})
        assert found is not None
        assert found is class_of({"class_path": now})
        assert f"{found.__module__}.{found.__name__}" == now


def test_kept_results_have_the_hashes_of_their_experiments() -> None:
    """The project's kept results keep the former paths of classes that moved, and their hashes."""
    moved = 0
    for path in (file for paper in papers() for file in (paper.folder / RESULTS).glob("*-seed*.json")):
        kept = json.loads(path.read_text())
        assert config_hash(kept["experiment"]) == kept["config_hash"], path
        assert with_defaults(kept["experiment"], kept["experiment"], {}) == kept["experiment"]
        moved += FORMER in json.dumps(kept["experiment"])
        assert not any(now in json.dumps(kept["experiment"]) for now in MOVED.values())
    assert moved == 2


def test_a_class_that_moved_goes_by_either_path_into_one_experiment(tmp_path: Path) -> None:
    """A class by its former or its new path makes the same experiment, on the command line, in a file and inline.

    A run is also scored if its configuration has the path that its checkpoint lacks.
    """
    fot = ("--methods.fot", "FOT", "--methods.fot.threshold", "0.9")
    noise = {"epsilon": 0.5, "delta": 1e-3}
    options = tuple(part for key, value in noise.items() for part in (f"--methods.fot.mechanism.{key}", str(value)))
    for number, name in enumerate(("GaussianMechanism", FORMER, MOVED[FORMER])):
        assert fit(tmp_path / f"words{number}", *fot, "--methods.fot.mechanism", name, *options) == 0
        mechanism = {"class_path": name, "init_args": noise}
        method = {"class_path": "FOT", "init_args": {"threshold": 0.9, "mechanism": mechanism}}
        content = yaml.safe_dump({"methods": {"fot": method}})
        (tmp_path / "fot.yaml").write_text(content)
        assert fit(tmp_path / f"file{number}", "--config", str(tmp_path / "fot.yaml")) == 0
        assert fit(tmp_path / f"inline{number}", "--config", content) == 0
    found = [summary(folder) for folder in sorted(tmp_path.iterdir()) if folder.is_dir()]
    assert len(found) == 9
    assert len({one["config_hash"] for one in found}) == 1
    assert len({one["acc"] for one in found}) == 1
    last = tmp_path / "words2" / "last.ckpt"
    held = torch.load(last, weights_only=True)["experiment"]
    assert held["methods"]["fot"]["init_args"]["mechanism"]["class_path"] == FORMER
    kept = tmp_path / "words2" / "config.yaml"
    assert MOVED[FORMER] in kept.read_text()
    kept.write_text(kept.read_text().replace(MOVED[FORMER], FORMER))
    assert run("validate", "--ckpt_path", str(last)) == 0


def test_an_option_that_was_renamed_goes_by_either_name_into_one_experiment(tmp_path: Path) -> None:
    """An option by its former or its new name makes the same experiment, in a file, inline and in a run's folder."""
    for number in range(24):
        for part in ("train", "test"):
            place = tmp_path / "pets" / part / "abcd"[number % 4] / f"{number}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (5, 4), 10 * number).save(place)
    found = []
    for option in ("path", "folder"):
        pets = {"class_path": "ImageFolder", "init_args": {option: str(tmp_path / "pets"), "shape": [1, 4, 4]}}
        stream = {"class_path": "Permuted", "init_args": {"source": pets, "num_tasks": 2}}
        content = yaml.safe_dump({"data": {"stream": stream, "partition": "IID"}})
        (tmp_path / "pets.yaml").write_text(content)
        for name, given in (("file", str(tmp_path / "pets.yaml")), ("inline", content)):
            folder = tmp_path / f"{name}-{option}"
            assert fit(folder, "--config", given) == 0
            found.append(summary(folder))
    assert len({(one["config_hash"], one["acc"], one["benchmark"]) for one in found}) == 1
    assert found[0]["benchmark"] == "permuted-pets"
    kept = tmp_path / "file-path" / "config.yaml"
    now, former = f"path: {tmp_path / 'pets'}", f"folder: {tmp_path / 'pets'}"
    assert kept.read_text() == (tmp_path / "file-folder" / "config.yaml").read_text().replace(
        "file-folder", "file-path"
    )
    kept.write_text(kept.read_text().replace(now, former))
    assert run("validate", "--ckpt_path", str(kept.parent / "last.ckpt")) == 0


def test_an_option_of_a_foreign_class_keeps_its_name() -> None:
    tree = [{"class_path": path, "init_args": {"folder": "x"}} for path in ("ImageFolder", "mine.ImageFolder")]
    ours, theirs = with_renamed_options(tree)
    assert (ours["init_args"], theirs["init_args"]) == ({"path": "x"}, {"folder": "x"})


def test_a_removed_option_counts_as_before_and_is_refused_at_other_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hashes of kept results contain the option. A run folder's configuration with it still loads."""
    trained = tmp_path / "run"
    assert fit(trained, "--methods.ewc", "EWC", "--methods.ewc.strength", "1") == 0
    config_file = trained / "config.yaml"
    written = config_file.read_text()
    assert "fisher_clients" not in written
    assert "scope" not in written
    experiment = experiment_of(yaml.safe_load(written))
    assert experiment["methods"]["ewc"]["init_args"]["fisher_clients"] == "all"
    assert experiment["methods"]["ewc"]["init_args"]["scope"] == "client"
    assert summary(trained)["config_hash"] == config_hash(experiment)
    for value, status in (("all", 0), ("sampled", 2)):
        config_file.write_text(written.replace("strength: 1.0\n", f"strength: 1.0\n      fisher_clients: {value}\n"))
        assert f"fisher_clients: {value}" in config_file.read_text()
        assert run("validate", "--ckpt_path", str(trained / "last.ckpt")) == status
    removed = "methods.ewc.fisher_clients was removed; leave it out: EWC does what its value all meant"
    assert removed in capsys.readouterr().err
    assert fit(tmp_path / "typed", "--methods.ewc", "EWC", "--methods.ewc.fisher_clients", "all") == 2
    assert removed in capsys.readouterr().err


def test_what_classes_say_of_themselves_is_found_by_their_former_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class by its former path is known to replay, or to name a data set by its path, without building it."""
    monkeypatch.setitem(MOVED, "once.AGEM", "cfl.methods.AGEM")
    monkeypatch.setitem(MOVED, "once.Arrays", "cfl.data.sources.Arrays")
    once = {**config(), "methods": {"agem": {"class_path": "once.AGEM", "init_args": {}}}, "buffer": {"size": 3}}
    assert experiment_of(once)["buffer"] == {"size": 3}
    options = {"source": {"class_path": "once.Arrays", "init_args": {"path": "rays.npz"}}}
    assert benchmark_name({"data": {"stream": {"class_path": "cfl.data.streams.Permuted", "init_args": options}}}) == (
        "permuted-rays"
    )
