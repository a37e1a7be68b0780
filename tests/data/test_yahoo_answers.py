"""Yahoo! Answers: CSV files read, texts embedded once, features as network inputs, and a run from CSV to accuracy."""

from __future__ import annotations

import csv
import hashlib
import json
import logging
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import tiny_cli

from cfl.data import embed, sentence_encoders
from cfl.data.sentence_encoders import SentenceTransformersFolder, WordLlama, sentence_encoder
from cfl.data.sources import YahooAnswers
from cfl.data.streams import ClassSplit
from cfl.data.yahoo_csv import FIELDS, questions
from cfl.runtime.errors import ConfigError, DataFilesMissing

BENCHMARK = Path(__file__).resolve().parents[2] / "configs" / "benchmarks" / "fedagem-yahooqa.yaml"

WORDS = [
    "church prayer faith bible culture religion",
    "physics equation chemistry theorem algebra molecule",
    "doctor medicine headache vitamin diet symptom",
    "school teacher homework college exam grammar",
    "computer software internet browser laptop virus",
    "football soccer baseball team coach tournament",
    "bank loan tax salary business invoice",
    "movie song actor album concert celebrity",
    "wedding baby boyfriend marriage sister divorce",
    "senator election police government military law",
]


def write_csv(root: Path, part: str, per_topic: int) -> None:
    """Write questions made of their topic's words, the ten topics alternating, quoted as in the published files."""
    rng = np.random.default_rng(len(part))
    folder = root / "yahoo_answers_csv"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{part}.csv").open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, quoting=csv.QUOTE_ALL)
        for _ in range(per_topic):
            for topic, words in enumerate(WORDS):
                texts = [" ".join(rng.choice(words.split(), 4)) for _ in FIELDS]
                writer.writerow([topic + 1, f"what about {texts[0]}?", texts[1], f"{texts[2]}\\nthat is it"])


def wordllama() -> WordLlama:
    pytest.importorskip("wordllama", reason="needs the optional package wordllama: pip install wordllama")
    return WordLlama(64)


class Letters:
    """An encoder that counts a few letters. ``asked`` is the number of texts it has encoded."""

    name, version = "letters", "1"

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, texts: list[str]) -> np.ndarray:
        self.asked += len(texts)
        return np.array([[text.count(letter) for letter in "aeiot"] for text in texts], dtype=np.float32)


# Texts


def test_questions_are_read_as_they_are_written(tmp_path: Path) -> None:
    file = tmp_path / "train.csv"
    long = "x" * 200_000
    file.write_text(
        '"5","why doesn""t, it\\nwork?","","An LED, and\\na camera \\"\n'
        f'"10","Ünïcode","second line","{long}"\n"1","","",""\n',
        encoding="utf-8",
    )
    assert list(questions(file)) == [
        ('why doesn"t, it work? An LED, and a camera \\', 4),
        (f"Ünïcode second line {long}", 9),
        ("", 0),
    ]
    assert [text for text, _ in questions(file, ["content", "title"])] == [
        'why doesn"t, it work?',
        "second line Ünïcode",
        "",
    ]


@pytest.mark.parametrize("line", ['"0","a","b","c"', '"11","a","b","c"', '"x","a","b","c"', '"1","a","b"', '"1"'])
def test_lines_of_another_kind_are_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "train.csv"
    file.write_text(f'"1","a","b","c"\n{line}\n')
    with pytest.raises(DataFilesMissing, match=r"train\.csv, line 2: expected a topic from 1 to 10"):
        list(questions(file))


# Features


def test_features_are_written_once(tmp_path: Path) -> None:
    write_csv(tmp_path, "train", 3)
    encoder = Letters()
    file, written = embed.embed_part(tmp_path, "train", encoder)
    assert (written, encoder.asked) == (True, 30)
    assert file == tmp_path / "yahoo_answers_csv" / "train.letters.npz"
    with np.load(file) as stored:
        features, labels, note = stored["features"], stored["labels"], json.loads(str(stored["note"]))
    lines = list(questions(tmp_path / "yahoo_answers_csv" / "train.csv"))
    assert features.dtype == np.float32
    assert features.tolist() == [[text.count(letter) for letter in "aeiot"] for text, _ in lines]
    assert labels.tolist() == [label for _, label in lines] == list(range(10)) * 3
    digest = hashlib.sha256((tmp_path / "yahoo_answers_csv" / "train.csv").read_bytes()).hexdigest()
    assert note == {"encoder": "letters", "version": "1", "fields": list(FIELDS), "csv_sha256": digest}
    assert embed.embed_part(tmp_path, "train", encoder) == (file, False)
    assert encoder.asked == 30
    assert [path.name for path in file.parent.iterdir() if "unfinished" in path.name] == []


@pytest.mark.parametrize("kept", [0, 100])
def test_damaged_features_are_written_anew(tmp_path: Path, kept: int) -> None:
    write_csv(tmp_path, "train", 2)
    file, _ = embed.embed_part(tmp_path, "train", Letters())
    whole = file.read_bytes()
    file.write_bytes(whole[:kept])
    assert embed.embed_part(tmp_path, "train", Letters()) == (file, True)
    assert file.read_bytes() == whole


def test_features_are_written_anew_where_anything_differs(tmp_path: Path) -> None:
    write_csv(tmp_path, "train", 2)
    encoder = Letters()

    def again(fields: Any = FIELDS) -> bool:
        return embed.embed_part(tmp_path, "train", encoder, fields)[1]

    assert again()
    assert again(["title"])
    assert not again(["title"])
    write_csv(tmp_path, "train", 3)
    assert again(["title"])
    encoder.version = "2"
    assert again(["title"])


def test_many_texts_are_embedded_a_part_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_csv(tmp_path, "test", 2)
    whole, _ = embed.embed_part(tmp_path, "test", Letters())
    with np.load(whole) as stored:
        expected = stored["features"]
    whole.unlink()
    monkeypatch.setattr(embed, "_AT_A_TIME", 7)
    with np.load(embed.embed_part(tmp_path, "test", Letters())[0]) as stored:
        assert np.array_equal(stored["features"], expected)


def test_the_command_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(embed, "sentence_encoder", lambda name: Letters())
    assert embed.main(["--root", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "yahoo_answers_csv/train.csv is missing" in error
    assert "yahoo_answers_csv.tgz" in error
    assert "a line per question: its topic, 1 to 10, title, content, answer" in error
    assert "with --root or the environment variable CFL_DATA_ROOT" in error
    write_csv(tmp_path, "train", 1)
    write_csv(tmp_path, "test", 1)
    assert embed.main(["--root", str(tmp_path), "--fields", "title"]) == 0
    assert capsys.readouterr().out.count("written") == 2
    assert embed.main(["--root", str(tmp_path), "--fields", "title"]) == 0
    assert capsys.readouterr().out.count("is up to date") == 2


@pytest.mark.parametrize("name", ["wordllama-100", "nowhere", "wordllama"])
def test_unknown_encoders_are_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert embed.main(["--root", str(tmp_path), "--encoder", name]) == 2
    assert f"--encoder = '{name}'" in (error := capsys.readouterr().err)
    assert "wordllama-256" in error


@pytest.mark.parametrize(
    ("module", "how"), [("wordllama", r"pip install 'continual-fl\[text\]'"), ("sentence_transformers", "sentence-tr")]
)
def test_absent_packages_are_named(module: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # an import then fails
    with pytest.raises(ConfigError, match=how):
        sentence_encoder("wordllama-64" if module == "wordllama" else str(tmp_path))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments passed to the package ``sentence-transformers``, which a fake without a model replaces."""
    asked: dict[str, Any] = {}

    class Model:
        def __init__(self, path: str, local_files_only: bool) -> None:
            asked.update(path=path, local_files_only=local_files_only)

        def encode(self, texts: list[str], convert_to_numpy: bool, **_: Any) -> Any:
            assert convert_to_numpy
            return np.full((len(texts), 3), 0.5, dtype=np.float64)

    module = types.SimpleNamespace(SentenceTransformer=Model)
    monkeypatch.setitem(sys.modules, "sentence_transformers", module)
    monkeypatch.setattr(sentence_encoders.importlib.metadata, "version", lambda name: "9.9")
    return asked


def test_a_folder_of_sentence_transformers(tmp_path: Path, asked: dict[str, Any]) -> None:
    """A folder is loaded without downloads, and gives float32 arrays (checked with a fake package)."""
    (tmp_path / "distilbert").mkdir()
    encoder = sentence_encoder(str(tmp_path / "distilbert"))
    assert isinstance(encoder, SentenceTransformersFolder)
    empty = hashlib.sha256().hexdigest()
    assert (encoder.name, encoder.version) == ("distilbert", f"9.9, files {empty}")
    assert asked == {"path": str(tmp_path / "distilbert"), "local_files_only": True}
    assert encoder(["a", "b"]).dtype == np.float32


def test_a_folder_without_a_model_is_refused(
    tmp_path: Path, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise ValueError("unrecognised\nmodel")

    monkeypatch.setattr(sys.modules["sentence_transformers"], "SentenceTransformer", fails)
    with pytest.raises(ConfigError, match=r"--encoder = .* sentence-transformers \(unrecognised model\)"):
        sentence_encoder(str(tmp_path))


def test_another_model_of_the_same_name_is_another_version(tmp_path: Path, asked: dict[str, Any]) -> None:
    """The version depends on the model's files, so that features of a fine-tuned model do not pass for its own."""
    for place in ("here", "there"):
        (tmp_path / place / "distilbert" / "1_Pooling").mkdir(parents=True)
        (tmp_path / place / "distilbert" / "model.safetensors").write_bytes(b"weights")
        (tmp_path / place / "distilbert" / "1_Pooling" / "config.json").write_bytes(b"{}")

    def version(place: str) -> str:
        return sentence_encoder(str(tmp_path / place / "distilbert")).version

    first = version("here")
    assert version("there") == first, "the same files, wherever they lie"
    weights, pooling = (tmp_path / "there" / "distilbert" / name for name in ("model.safetensors", "1_Pooling"))
    weights.write_bytes(b"weighed")
    assert version("there") != first
    weights.write_bytes(b"weights")
    (pooling / "config.json").rename(pooling / "other.json")
    assert version("there") != first
    (pooling / "other.json").unlink()
    pooling.rmdir()
    pooling.symlink_to(tmp_path / "here" / "distilbert" / "1_Pooling")
    assert version("there") == first, "links, as in caches of models"


def test_wordllama_gives_like_texts_like_vectors() -> None:
    small = wordllama()
    texts = ["my laptop has a virus", "the computer's software is infected", "a prayer in church", ""]
    vectors = small(texts)
    assert vectors.shape == (4, 64)
    assert vectors.dtype == np.float32
    assert np.isfinite(vectors).all()
    unit = vectors[:3] / np.linalg.norm(vectors[:3], axis=1, keepdims=True)
    assert unit[0] @ unit[1] > unit[0] @ unit[2] + 0.2
    np.testing.assert_allclose(small(texts[:1])[0], vectors[0], atol=1e-5)
    np.testing.assert_allclose(WordLlama(256)(texts)[:, :64], vectors, atol=1e-6)
    assert (small.name, sentence_encoder("wordllama-64").name) == ("wordllama-64", "wordllama-64")


# The data set


def write_features(root: Path, encoder: str = "made", **replaced: Any) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    whole = {}
    (root / "yahoo_answers_csv").mkdir(parents=True, exist_ok=True)
    for part, size in (("train", 400), ("test", 50)):
        features = (rng.standard_normal((size, 6)) * [1, 0.01, 50, 3, 1, 0] + [0, 1, -7, 4, 2, 9]).astype(np.float32)
        stored = {"features": features, "labels": np.arange(size) % 10}
        stored |= {k.partition("_")[2]: v for k, v in replaced.items() if k.startswith(part)}
        np.savez(root / "yahoo_answers_csv" / f"{part}.{encoder}.npz", **stored)
        whole |= {f"{part}_{kind}": values for kind, values in stored.items()}
    return whole


def test_network_input_is_the_standardised_feature(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = write_features(tmp_path)
    source = YahooAnswers("made", 6)
    with caplog.at_level(logging.WARNING):
        train, test = source.load(tmp_path)
    assert source.shape == tuple(train.images.shape[1:]) == (1, 1, 6)
    reference = whole["train_features"].astype(np.float64)
    deviation = np.where(reference.std(0) > 0, reference.std(0), 1.0)
    for part, images in (("train", train), ("test", test)):
        exact = (whole[f"{part}_features"] - reference.mean(0)) / deviation
        found = source.transform()(images.images).squeeze().double().numpy()
        assert np.abs(found - exact.clip(-4, 4)).max() <= 4 / 127 / 2 + 1e-5
        assert (found[:, 5] == 0).all()  # a constant feature
        assert images.labels.tolist() == whole[f"{part}_labels"].tolist()
    assert "has 400 training and 50 test samples; the published set has 1400000 and 60000" in caplog.text
    extreme = {"test_features": np.full((50, 6), 1e6, np.float32) * [1, -1, 1, -1, 1, 0]}
    write_features(tmp_path, "extreme", test_features=extreme["test_features"].astype(np.float32))
    _, far = YahooAnswers("extreme", 6).load(tmp_path)
    assert source.transform()(far.images)[0].flatten()[:5].tolist() == pytest.approx([4, -4, 4, -4, 4])


@pytest.mark.parametrize(
    ("what", "said"), [("fields", r"fields is \['title'\] in train"), ("version", "version is 2 in")]
)
def test_both_parts_are_embedded_alike(what: str, said: str, tmp_path: Path) -> None:
    """As if the command had been stopped after the training set: its features are of another kind than the tests'."""
    encoder = Letters()
    for part in ("train", "test"):
        write_csv(tmp_path, part, 3)
        embed.embed_part(tmp_path, part, encoder)
    source = YahooAnswers("letters", 5)
    source.load(tmp_path)  # their texts differ
    if what == "version":
        encoder.version = "2"
    fields = ["title"] if what == "fields" else FIELDS
    embed.embed_part(tmp_path, "train", encoder, fields)
    with pytest.raises(DataFilesMissing, match=rf"{said}.*embed --root .* writes both alike"):
        source.load(tmp_path)
    embed.embed_part(tmp_path, "test", encoder, fields)
    source.load(tmp_path)


def test_training_samples_can_be_limited_and_split_into_topics(tmp_path: Path) -> None:
    write_features(tmp_path)
    tasks = ClassSplit(YahooAnswers("made", 6, max_train=100), 5).tasks(tmp_path, seed=0)
    assert [task.name for task in tasks][:2] == ["yahoo-answers classes 0-1", "yahoo-answers classes 2-3"]
    assert [torch.bincount(task.train.labels).tolist() for task in tasks] == [[10, 10]] * 5


@pytest.mark.parametrize(
    ("replaced", "reason"),
    [
        ({"train_features": np.zeros((400, 6))}, r"train\.made\.npz holds features float64"),
        ({"test_labels": np.zeros(49, np.int64)}, r"test\.made\.npz holds .*labels \[49\]"),
        ({"train_features": np.full((400, 6), np.nan, np.float32)}, r"train\.made\.npz holds NaN"),
        ({"train_labels": np.full(400, 10)}, "train.* labels run from 10 to 10"),
    ],
)
def test_files_of_another_kind(tmp_path: Path, replaced: dict[str, Any], reason: str) -> None:
    write_features(tmp_path, **replaced)
    with pytest.raises(DataFilesMissing, match=reason):
        YahooAnswers("made", 6).load(tmp_path)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    write_features(tmp_path)
    (tmp_path / "yahoo_answers_csv" / "test.made.npz").unlink()
    with pytest.raises(DataFilesMissing) as caught:
        YahooAnswers("made", 6).load(tmp_path)
    for part in ("train.made.npz (present)", "test.made.npz (missing)", "python -m cfl.data.embed", "train.csv"):
        assert part in str(caught.value)
    (tmp_path / "yahoo_answers_csv" / "test.made.npz").write_bytes(b"PK")
    with pytest.raises(DataFilesMissing, match=r"test\.made\.npz is damaged"):
        YahooAnswers("made", 6).load(tmp_path)


def test_options_that_cannot_work(tmp_path: Path) -> None:
    write_features(tmp_path)
    with pytest.raises(ConfigError, match=r"dimensions = 5 cannot work; valid: 6"):
        YahooAnswers("made", 5).load(tmp_path)
    for options in ({"dimensions": 0}, {"encoder": ""}, {"encoder": "a/b"}, {"mean": [0.1, 0.2]}):
        with pytest.raises(ConfigError, match=r"data\.stream\.source\."):
            YahooAnswers(**options)


# From texts to a run


def test_from_texts_to_accuracy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The benchmark runs on a few made-up questions: a linear head learns topics with different words."""
    wordllama()
    root = tmp_path / "data"
    write_csv(root, "train", 30)
    write_csv(root, "test", 6)
    assert embed.main(["--root", str(root), "--encoder", "wordllama-64"]) == 0
    capsys.readouterr()
    options = {
        "data.root": root,
        "data.stream.source.encoder": "wordllama-64",
        "data.stream.source.dimensions": 64,
        "data.stream.source.max_train": 300,
        "data.num_clients": 3,
        "data.partition.min_samples": 2,
        "schedule.rounds_per_task": 3,
        "schedule.cohort_width": 3,
        "engine.kind": "workers",
        "run.dir": tmp_path / "run",
    }
    given = [f"--{key}={value}" for key, value in options.items()]
    assert tiny_cli.run("fit", "--config", str(BENCHMARK), *given) == 0, capsys.readouterr().err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["tasks"], summary["scenario"], summary["parameters"]) == (5, "class", 650)
    assert summary["acc_task_il"] > 90
