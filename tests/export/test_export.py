"""Exported models: files whose answers equal the run's own tests, and cards that describe them."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from support import tiny_cli
from support.own_networks import Plain
from support.tiny import ConvNet, NetworkFactory, fit, mlp, norm_net, split, tiny_client, tiny_data
from torch import Tensor, nn

from cfl.__main__ import main
from cfl.cli.federated_cli import FederatedCLI
from cfl.data.evaluation import EvaluationBatch
from cfl.data.participation import RandomShare
from cfl.data.sequences import FixedTasks
from cfl.data.sources import Binarised, Features, ImageFolder, Synthetic
from cfl.data.streams import Permuted, Sequence
from cfl.export.answer import Choice, answer_of, plain_network
from cfl.export.formats import PACKAGES, check_format, read, write
from cfl.methods import APD, RGO, AnalyticHead, FedWeIT, ICaRL, InferringFOT, Method, PersonalLayers
from cfl.models import MADE, MLP, PromptedViT, TinyYOLO
from cfl.models.decomposition import decompose
from cfl.runtime.errors import ConfigError
from cfl.testing.tiny_data import black_and_white, squares
from cfl.training.client import Client

FORMATS = list(PACKAGES)


def available(suffix: str) -> None:
    for package in PACKAGES[suffix]:
        pytest.importorskip(package, reason=f"{suffix} needs {package}: pip install {package}")


def images(client: Client, samples: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(samples, *client.input_shape, generator=generator)


def trained(
    network: NetworkFactory = mlp, methods: dict[str, Method] | None = None, federated: Any = None, **data: Any
) -> Client:
    """Return a client module whose federation has been trained on two tasks."""
    module = tiny_data(**{"stream": split(), "scenario": "task", **data})
    client = tiny_client(module, network, methods=methods)
    fit(client, module, federated)
    client.eval()
    return client


@torch.no_grad()
def scores(client: Client, x: Tensor, owner: int | None = None, task: int = 0) -> Tensor:
    """Return the scores that the run's own tests compute."""
    federation = client.require_federation()
    model = federation.model.state_tensors() if owner is None else federation.model_of(owner, task)
    batch = EvaluationBatch(task, 0, len(x), x, torch.zeros(len(x), dtype=torch.int64))
    return client.scoring.answers(batch, federation.methods.model_for(task, model), False)


def exported(client: Client, path: Path, choice: Choice | None = None) -> Any:
    """Return the model as other programs read it from the file."""
    available(path.suffix)
    answer = answer_of(client, choice or Choice())
    write(path, answer, client.input_shape, {})
    return read(path, answer)


def assert_same(found: Any, client: Client, owner: int | None = None, task: int = 0, x: Tensor | None = None) -> None:
    for samples in (1, 5):
        inputs = images(client, samples) if x is None else x[:samples]
        torch.testing.assert_close(found(inputs), scores(client, inputs, owner, task), rtol=0, atol=1e-6)


# Networks and formats.


@pytest.fixture(scope="module")
def convolutional() -> Client:
    return trained(partial(WithDropout, norm=True))


class WithDropout(ConvNet):
    """Convolution, BatchNorm and dropout."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.dropout = nn.Dropout(0.5)

    def features(self, x: Tensor) -> Tensor:
        return self.dropout(super().features(x))


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_file_answers_as_the_network_does(convolutional: Client, suffix: str, tmp_path: Path) -> None:
    """A file answers as the network does for any number of images, with BatchNorm's running statistics, no dropout."""
    path = tmp_path / "new" / f"model{suffix}"
    found = exported(convolutional, path)
    assert_same(found, convolutional)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    # The running statistics of training matter: an untrained network answers differently.
    fresh = tiny_client(tiny_data(split(), scenario="task"), partial(WithDropout, norm=True))
    assert float((fresh.network.eval()(images(fresh)) - found(images(fresh))).abs().max()) > 1e-3


def test_torch_and_onnxruntime_alone_can_use_the_files(convolutional: Client, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="pip install onnxruntime")
    available(".onnx")
    answer, x = answer_of(convolutional, Choice()), images(convolutional, 4)
    for suffix in (".pt2", ".onnx"):
        write(tmp_path / f"model{suffix}", answer, convolutional.input_shape, {})
    torch.testing.assert_close(torch.export.load(tmp_path / "model.pt2").module()(x), answer(x), rtol=0, atol=1e-6)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (found,) = session.run(["output"], {"input": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), answer(x), rtol=0, atol=1e-6)


def test_tensors_by_hand(tmp_path: Path) -> None:
    """An MLP computed in float64 from the file's tensors only gives the run's scores."""
    available(".safetensors")
    from safetensors.torch import load_file

    client = trained()
    write(tmp_path / "m.safetensors", answer_of(client, Choice()), client.input_shape, {"method": "fedavg"})
    held = {name: tensor.double() for name, tensor in load_file(tmp_path / "m.safetensors").items()}
    assert set(held) == set(MLP(client.input_shape, 4, hidden=[8]).state_dict())
    x = images(client).double().flatten(1)
    (hidden,) = {name.rpartition(".")[0] for name in held} - {"head"}
    inner = torch.relu(x @ held[f"{hidden}.weight"].T + held[f"{hidden}.bias"])
    by_hand = inner @ held["head.weight"].T + held["head.bias"]
    torch.testing.assert_close(by_hand.float(), scores(client, images(client)), rtol=0, atol=1e-6)


VIT = {
    "pool_size": 3,
    "prompt_length": 2,
    "top_k": 2,
    "image_size": 8,
    "patch_size": 4,
    "num_layers": 1,
    "num_heads": 2,
    "hidden_dim": 8,
    "mlp_dim": 8,
}


@pytest.mark.parametrize("suffix", [".safetensors", ".onnx"])
def test_frozen_transformers_are_in_the_file(suffix: str, tmp_path: Path) -> None:
    available(suffix)
    client = tiny_client(data := tiny_data(split(), scenario="task"), partial(PromptedViT, **VIT))
    fit(client, data)
    client.eval()
    path = tmp_path / f"vit{suffix}"
    assert_same(exported(client, path), client)
    if suffix == ".safetensors":
        from safetensors.torch import load_file

        vit = client.network.backbone.vit.state_dict()
        held = load_file(path)
        assert all(torch.equal(held[f"backbone.{name}"], tensor) for name, tensor in vit.items())


@pytest.mark.parametrize("suffix", [".pt2", ".onnx"])
def test_densities_answer_with_log_likelihoods(suffix: str, tmp_path: Path) -> None:
    stream = Permuted(Binarised(Synthetic(4, [1, 4, 4], 80, 40)), 2)
    client = trained(partial(MADE, hidden=[8]), stream=stream, scenario="density")
    x = (images(client) > 0).float()
    found = exported(client, tmp_path / f"made{suffix}")
    assert found(x).shape == (5,)
    assert_same(found, client, x=x)


# Methods under which models differ, or that score by themselves.


@pytest.mark.parametrize("method", [FedWeIT, APD])
@pytest.mark.parametrize("suffix", FORMATS)
def test_decomposed_weights_become_plain_ones(method: Any, suffix: str, tmp_path: Path) -> None:
    """Decomposed weights are exported as plain weights of the chosen client and task, which differ from others'."""
    client = trained(methods={"m": method(consolidation=1.0)})
    found = exported(client, tmp_path / f"m{suffix}", Choice(client=1, task=0))
    assert_same(found, client, 1, 0)
    plain = MLP(client.input_shape, 4, hidden=[8])
    plain.load_state_dict(answer_of(client, Choice(1, 0)).network.state_dict())  # the network without the method
    if suffix == ".safetensors":  # without a task, it is the client's current task
        assert_same(answer_of(client, Choice(client=1)), client, 1, 1)
        with pytest.raises(ConfigError, match=r"^task = 2 .*0\.\.1"):
            answer_of(client, Choice(client=1, task=2))
    for other in ((1, 1), (2, 0)):
        assert float((found(images(client)) - scores(client, images(client), *other)).abs().max()) > 1e-3


def test_plain_weights_of_a_decomposition_by_hand() -> None:
    network = MLP((1, 2, 2), 2, hidden=[3], dropout=0.0).double()
    decompose(network)
    tensors = {n: torch.randn_like(t) for n, t in (*network.named_parameters(), *network.named_buffers())}
    before = {n: t.clone() for n, t in network.state_dict().items()}
    plain = plain_network(network, tensors)
    (name,) = [n.removesuffix(".parametrizations.weight.original") for n in tensors if n.endswith(".original")]
    parts = f"{name}.parametrizations.weight."
    expected = tensors[f"{parts}original"] * torch.sigmoid(tensors[f"{parts}0.mask"])[:, None]
    expected = expected + tensors[f"{parts}0.adaptive"]
    torch.testing.assert_close(plain.state_dict()[f"{name}.weight"], expected, rtol=0, atol=1e-12)
    assert all(torch.equal(tensor, before[n]) for n, tensor in network.state_dict().items())


def test_a_method_that_encodes_by_task_needs_one(tmp_path: Path) -> None:
    client = trained(partial(MLP, hidden=[8, 6], dropout=0.0), {"rgo": RGO(share=1.0)})
    with pytest.raises(ConfigError, match=r"^task = None .*0\.\.1.*methods\.rgo"):
        answer_of(client, Choice())
    for task in (0, 1):
        assert_same(exported(client, tmp_path / "m.pt2", Choice(task=task)), client, None, task)
    difference = scores(client, images(client), None, 0) - scores(client, images(client), None, 1)
    assert float(difference.abs().max()) > 1e-3
    with pytest.raises(ConfigError, match=r"^task = 2"):
        answer_of(client, Choice(task=2))


@pytest.mark.parametrize("suffix", [".pt2", ".onnx"])
@pytest.mark.parametrize("make", [partial(ICaRL, size=8), AnalyticHead, partial(InferringFOT, 4)])
def test_scores_that_methods_compute_are_exported(make: Callable[[], Method], suffix: str, tmp_path: Path) -> None:
    client = trained(methods={"tried": make()}, scenario="class")
    found = exported(client, tmp_path / f"m{suffix}")
    assert_same(found, client)
    logits = client.network(images(client))
    assert float((found(images(client)) - logits).abs().max()) > 1e-3


def test_tensors_alone_are_no_nearest_class_means(tmp_path: Path) -> None:
    available(".safetensors")
    client = trained(methods={"icarl": ICaRL(size=8)}, scenario="class")
    with pytest.raises(ConfigError, match=r"m\.safetensors.*\*\.pt2 or \*\.onnx: ICaRL"):
        write(tmp_path / "m.safetensors", answer_of(client, Choice()), client.input_shape, {})
    assert list(tmp_path.iterdir()) == []


def test_scores_that_branch_on_values_are_not_sent_to_a_format_that_refuses_them(tmp_path: Path) -> None:
    class Branches(Method):
        def classify(self, task: int, model: dict[str, Tensor], x: Tensor) -> Tensor | None:
            return x.flatten(1)[:, : self.context.num_outputs] if bool((model["head.bias"] != 7).any()) else None

    client = trained(methods={"mine": Branches()})
    with pytest.raises(ConfigError, match=r"m\.pt2.*valid: a network and a classify of Branches of which"):
        exported(client, tmp_path / "m.pt2")


def test_personal_layers_need_a_client(tmp_path: Path) -> None:
    client = trained(methods={"local": PersonalLayers(["head.*"])})
    with pytest.raises(ConfigError, match=r"^client = None .*0\.\.3.*head"):
        answer_of(client, Choice())
    with pytest.raises(ConfigError, match=r"^client = 4"):
        answer_of(client, Choice(client=4))
    with pytest.raises(ConfigError, match=r"^task = 0"):
        answer_of(client, Choice(client=3, task=0))
    found = exported(client, tmp_path / "m.pt2", Choice(client=3))
    assert_same(found, client, 3)
    assert float((found(images(client)) - scores(client, images(client), 2)).abs().max()) > 1e-3


def model_in(folder: Path) -> Path:
    """Make an exported file whose content does not matter."""
    path = folder / "m.onnx"
    path.write_bytes(b"a model")
    return path


def test_the_card_of_a_client_that_has_never_trained_says_so(tmp_path: Path) -> None:
    """The card of a client that never trained says so. Its model has the common layers and its initial own layers."""
    from cfl.export.card import write_card

    client = trained(methods={"local": PersonalLayers(["head.*"])}, participation=RandomShare(0.25))
    federation = client.require_federation()
    took_part = {int(c) for members in federation.data.members for c in members}
    assert 0 < len(took_part) < 4
    for owner in range(4):
        choice, path = Choice(client=owner), tmp_path / f"{owner}.md"
        write_card(path, model_in(tmp_path), answer_of(client, choice), choice, federation, "", tmp_path)
        assert ("It has not trained so far" in path.read_text()) == (owner not in took_part)


def test_one_global_model_has_no_clients() -> None:
    with pytest.raises(ConfigError, match=r"^client = 0 .*global model"):
        answer_of(trained(), Choice(client=0))


def test_batch_statistics_are_no_model() -> None:
    with pytest.raises(ConfigError, match=r"federated\.batchnorm = 'drop'"):
        answer_of(trained(norm_net, federated={"batchnorm": "drop"}), Choice())
    client = trained(norm_net, federated={"batchnorm": "local"})
    with pytest.raises(ConfigError, match=r"or --client 0\.\.3"):
        answer_of(client, Choice())
    own = client.require_federation().model.personal_state((2,))
    found = answer_of(client, Choice(client=2)).network.state_dict()
    assert own
    for name, values in own.items():
        assert torch.equal(found[name], values[0])


# What cannot be written.


def test_unknown_formats_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.zip.*\*\.pt2, \*\.safetensors, \*\.onnx"):
        check_format(tmp_path / "model.zip")
    (tmp_path / "model.pt2").mkdir()
    with pytest.raises(ConfigError, match="folder"):
        check_format(tmp_path / "model.pt2")


@pytest.mark.parametrize(("suffix", "package"), [(s, p) for s, packages in PACKAGES.items() for p in packages])
def test_missing_packages_are_named_before_any_work(
    suffix: str, package: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing package is named before the checkpoint is read, which does not exist here."""
    find = importlib.util.find_spec
    with mock.patch("cfl.export.formats.find_spec", lambda name: None if name == package else find(name)):
        assert main(["export", "--ckpt_path", str(tmp_path / "no.ckpt"), "--out", str(tmp_path / f"m{suffix}")]) == 2
    error = capsys.readouterr().err
    assert f"with {package}: pip install 'continual-fl[export]'" in error


def test_an_exporter_too_old_for_torch_is_named(convolutional: Client, tmp_path: Path) -> None:
    """torch imports the module of onnxscript that its own release was written for."""
    available(".onnx")
    absent = ModuleNotFoundError("No module named 'onnxscript._framework_apis.torch_9_9'")
    too_old = mock.patch("torch.onnx.export", side_effect=absent)
    with too_old, pytest.raises(ConfigError, match=r"fit torch .*'continual-fl\[export\]' \(No module .*torch_9_9"):
        write(tmp_path / "m.onnx", answer_of(convolutional, Choice()), convolutional.input_shape, {})


def test_a_file_that_answers_otherwise_is_not_left_behind(convolutional: Client, tmp_path: Path) -> None:
    answer = answer_of(convolutional, Choice())
    other = mock.patch("cfl.export.formats.read", lambda path, answer: lambda x: answer(x) + 1)
    with other, pytest.raises(RuntimeError, match="differ by 1"):
        write(tmp_path / "m.pt2", answer, convolutional.input_shape, {})
    assert list(tmp_path.iterdir()) == []


# The command.


def export(*arguments: str) -> int:
    """Run ``cfl export ...`` without building the options of other subcommands, which takes most of the time."""
    only = {name: skipped for name, skipped in FederatedCLI.subcommands().items() if name == "validate"}
    with mock.patch.object(FederatedCLI, "subcommands", return_value=only), mock.patch.dict(os.environ):
        return main(["export", *arguments])


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "run"
    assert tiny_cli.fit(folder) == 0
    return folder


def test_the_command_writes_model_and_card(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "model.pt2"
    assert export("--ckpt_path", str(run_folder / "last.ckpt"), "--out", str(out)) == 0
    assert str(out) in capsys.readouterr().out
    network = MLP((1, 4, 4), 4, hidden=[8])
    network.load_state_dict(
        {n.removeprefix("network."): t for n, t in tiny_cli.checkpoint(run_folder)["state_dict"].items()}
    )
    x = torch.randn(3, 1, 4, 4)
    torch.testing.assert_close(torch.export.load(out).module()(x), network.eval()(x), rtol=0, atol=1e-6)

    card = (tmp_path / "model.pt2.md").read_text()
    summary = json.loads((run_folder / "summary.json").read_text())
    assert card.startswith("# fedavg on permuted-synthetic\n")
    assert "global model, network MLP, after 6 of 6 rounds" in card
    assert "torch.export.load('model.pt2')" in card
    assert "`[N, 1, 4, 4]`" in card
    assert "| synthetic | 1 x 4 x 4 | 255 | 0.5 | 0.25 |" in card
    assert "| 1 | 0 to 3 |" in card
    assert f"| acc | {summary['acc']:.6g} |" in card
    assert f"| config_hash | {summary['config_hash']} |" in card
    assert (run_folder / "config.yaml").read_text().strip() in card


def test_last_is_the_named_runs_wherever_one_is(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``--ckpt_path last`` is that of ``--run.dir``, also if the current folder has another run."""
    other = {"method": "other", "acc": 99.5}
    (tmp_path / "summary.json").write_text(json.dumps(other))
    (tmp_path / "config.yaml").write_text("nothing: of it\n")
    monkeypatch.chdir(tmp_path)
    assert export("--ckpt_path", "last", "--run.dir", str(run_folder), "--out", "m.safetensors") == 0
    written, card = (tmp_path / name for name in ("m.safetensors", "m.safetensors.md"))
    assert written.stat().st_mode == card.stat().st_mode  # both have the same permissions
    card, summary = card.read_text(), json.loads((run_folder / "summary.json").read_text())
    assert card.startswith("# fedavg on permuted-synthetic\n")
    assert f"| acc | {summary['acc']:.6g} |" in card
    assert (run_folder / "config.yaml").read_text().strip() in card


def test_the_card_of_a_run_in_the_middle_of_a_task_has_the_figures_so_far(tmp_path: Path) -> None:
    """Within a task, the card has the figures after the task before."""
    with tiny_cli.die_at("training", 4, 15):
        assert tiny_cli.fit(tmp_path) == 143
    assert export("--ckpt_path", str(tmp_path / "last.ckpt"), "--out", str(tmp_path / "m.safetensors")) == 0
    card = (tmp_path / "m.safetensors.md").read_text()
    first = tiny_cli.rows(tmp_path / "accuracy_matrix.csv")[1]
    assert "after 5 of 6 rounds; the run is not over" in card
    assert "(after the last evaluation so far; accuracy in %" in card
    assert f"| acc | {float(first['task_0']):.6g} |" in card


def test_the_card_of_an_earlier_checkpoint_has_its_own_figures(tmp_path: Path) -> None:
    """The card of an earlier checkpoint has that checkpoint's figures, also if the run has finished since."""
    with tiny_cli.die_at("training", 4, 15):
        assert tiny_cli.fit(tmp_path) == 143
    early = tmp_path / "early.ckpt"
    early.write_bytes((tmp_path / "last.ckpt").read_bytes())
    assert tiny_cli.fit(tmp_path, "--ckpt_path", "last") == 0
    assert export("--ckpt_path", str(early), "--out", str(tmp_path / "m.safetensors")) == 0
    card = (tmp_path / "m.safetensors.md").read_text()
    first = tiny_cli.rows(tmp_path / "accuracy_matrix.csv")[1]
    assert "after 5 of 6 rounds; the run is not over" in card
    assert "| rounds |" not in card
    assert f"| acc | {float(first['task_0']):.6g} |" in card


@pytest.mark.parametrize("damaged", [b'{"acc": 9', b"[1, 2]", b"\xff"])
def test_a_damaged_summary_is_named(
    run_folder: Path, tmp_path: Path, damaged: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("last.ckpt", "config.yaml"):
        (tmp_path / name).write_bytes((run_folder / name).read_bytes())
    (tmp_path / "summary.json").write_bytes(damaged)
    model = tmp_path / "m.safetensors"
    assert export("--ckpt_path", str(tmp_path / "last.ckpt"), "--out", str(model)) == 2
    said = capsys.readouterr().err
    assert f"error: summary.json = '{tmp_path / 'summary.json'}' cannot work; valid: figures as a run leaves" in said
    assert model.is_file()


def test_the_card_of_tasks_with_outputs_of_their_own(tmp_path: Path) -> None:
    """The card lists the outputs and classes of every task. Without summary.json, its figures are the checkpoint's."""
    from cfl.export.card import write_card

    client = trained(methods={"fedweit": FedWeIT()})
    choice = Choice(client=1, task=1)
    path = tmp_path / "card.md"
    write_card(
        path, model_in(tmp_path), answer_of(client, choice), choice, client.require_federation(), "a: 1", tmp_path
    )
    card = path.read_text()
    assert "The model of client 1 for its task 1 (from 0)" in card
    assert "| 0 | 0 to 1 | 0, 1 |\n| 1 | 2 to 3 | 2, 3 |" in card
    accuracy = client.require_federation().measured.summary(after=1)["acc"]
    assert f"| acc | {accuracy:.6g} |" in card
    assert "Every task has outputs of its own; which task" in card
    assert "over all clients, each with its own model: not of this model alone; accuracy in %" in card
    choice = Choice(task=1)
    write_card(
        path,
        model_in(tmp_path),
        answer_of(client, Choice(1, 1)),
        choice,
        client.require_federation(),
        "",
        tmp_path,
    )
    assert "over all tasks, each with its own model: not of this model alone; accuracy in %" in path.read_text()


def code_of(card: Path) -> str:
    """Return the code in a card."""
    return card.read_text().split("```python\n")[1].split("```")[0]


@pytest.mark.parametrize("scenario", ["class", "task"])
@pytest.mark.parametrize("suffix", FORMATS)
def test_the_code_of_a_card_runs_as_printed(
    suffix: str, scenario: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The code in a card runs as printed. On other images, its outputs are the model's and its classes the tests'."""
    from cfl.export.card import write_card
    from cfl.export.prediction import SampleScorer

    available(suffix)
    client, path = trained(scenario=scenario), tmp_path / f"model{suffix}"
    federation, answer = client.require_federation(), answer_of(client, Choice())
    write(path, answer, client.input_shape, {})
    config = json.dumps({"model": {"network": {"class_path": "cfl.models.MLP", "init_args": {"hidden": [8]}}}})
    card = tmp_path / "card.md"
    write_card(card, path, answer, Choice(), federation, config, tmp_path)
    code = code_of(card)
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    exec(code, {})
    assert capsys.readouterr().out.startswith("['")

    test = federation.data.tasks[0].test
    (line,) = (line for line in code.splitlines() if line.startswith("images = "))
    held: dict[str, Any] = {"given": test.images.permute(0, 2, 3, 1).numpy()}
    exec(code.replace(line, "images = given"), held)
    x = federation.data.stream.source.transform()(test.images)  # type: ignore[attr-defined]
    torch.testing.assert_close(torch.from_numpy(held["outputs"]), answer(x), rtol=0, atol=1e-5)
    expected = SampleScorer(client, Choice(task=0)).scores(x).argmax(1)
    assert capsys.readouterr().out == f"{[str(label) for label in expected.tolist()]}\n"


def test_the_code_of_a_card_names_the_classes_of_the_task_where_clients_tasks_share_outputs() -> None:
    from cfl.export.snippet import snippet

    stream, tasks = split(3, classes=6), FixedTasks([[0, 1], [2, 0]], outputs="place")
    client = trained(stream=stream, num_clients=2, sequences=tasks)
    answer, federation = answer_of(client, Choice()), client.require_federation()
    lines = snippet(Path("m.onnx"), answer, Choice(), federation, "").splitlines()
    naming = "\n".join(line for line in lines if line.startswith(("classes = ", "first, end = ")))
    for task, names in enumerate((["0", "1"], ["2", "3"], ["4", "5"], ["0", "1"])):
        held: dict[str, Any] = {"task": task}
        exec(naming, held)
        assert held["classes"][held["first"] : held["end"]] == names


def outputs_of_code(model: Path, client: Client, network: dict[str, Any], x: Tensor, choice: Choice) -> Tensor:
    """Write a model and its card; return what the card's code computes of network input."""
    from cfl.export.card import write_card

    available(model.suffix)
    answer, card = answer_of(client, choice), model.with_name("card.md")
    write(model, answer, client.input_shape, {})
    config = json.dumps({"model": {"network": network}})
    write_card(card, model, answer, choice, client.require_federation(), config, model.parent)
    return executed(code_of(card), x)


def executed(code: str, x: Tensor) -> Tensor:
    """Run a card's code on network input; return its ``outputs``."""
    (line,) = (line for line in code.splitlines() if line.startswith("x = "))
    held: dict[str, Any] = {"given": x.numpy()}
    exec(code.replace(line, "x = given"), held)
    return torch.from_numpy(held["outputs"])


@pytest.mark.parametrize("synchronised", [True, False])
def test_the_code_of_a_card_computes_a_mades_likelihoods_under_the_masks_of_the_run(
    synchronised: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The initial weights draw the masks if ``mask_seed`` is null, so that they are the run's own."""
    monkeypatch.chdir(tmp_path)
    options = {"hidden": [6], "synchronised": synchronised}
    client = trained(partial(MADE, **options), stream=black_and_white(2), scenario="density")
    network = {"class_path": "cfl.models.MADE", "init_args": {**options, "mask_seed": None}}
    x, choice = (images(client) > 0).float(), Choice(None if synchronised else 2)
    found = outputs_of_code(tmp_path / "m.safetensors", client, network, x, choice)
    expected = client.network.log_likelihood(x, (choice.client or 0,))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    other = MADE(client.input_shape, 16, mask_seed=0, **options)
    other.load_state_dict(client.network.state_dict())
    assert float((other.eval().log_likelihood(x).detach() - found).abs().max()) > 1e-3


def test_the_code_of_a_card_finds_boxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pycocotools")
    monkeypatch.chdir(tmp_path)
    client = trained(partial(TinyYOLO, width=2), stream=squares(2), scenario="detection")
    network, x = {"class_path": "cfl.models.TinyYOLO", "init_args": {"width": 2}}, images(client)
    found = outputs_of_code(tmp_path / "m.safetensors", client, network, x, Choice())
    torch.testing.assert_close(found, scores(client, x), rtol=0, atol=1e-4)
    assert found.shape != client.network(x).shape


def test_the_code_of_a_card_reads_no_file_of_pretrained_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exported file holds all weights, so the code runs where the file of pre-trained ones is not."""
    monkeypatch.chdir(tmp_path)
    file, client = tmp_path / "vit.pth", tiny_client(tiny_data(split()), partial(PromptedViT, **VIT))
    torch.save(client.network.backbone.vit.state_dict(), file)
    options: dict[str, Any] = {**VIT, "weights": str(file)}
    client = trained(partial(PromptedViT, **options), scenario="class")
    file.unlink()
    network, x = {"class_path": "cfl.models.PromptedViT", "init_args": options}, images(client)
    found = outputs_of_code(tmp_path / "m.safetensors", client, network, x, Choice())
    torch.testing.assert_close(found, scores(client, x), rtol=0, atol=1e-5)


def test_an_answer_leaves_the_frozen_transformer_of_the_run_in_its_mode() -> None:
    """Attention in evaluation mode takes a fast path that fails under vmap."""
    client = trained(partial(PromptedViT, **VIT))
    before = {name: part.training for name, part in client.network.backbone.vit.named_modules()}
    assert set(before.values()) == {True, False}
    answer = answer_of(client, Choice())
    for mode in (True, False):
        answer.train(mode)
        assert {name: part.training for name, part in client.network.backbone.vit.named_modules()} == before
        assert answer.training == answer.network.training == mode


def test_the_code_of_a_card_builds_classes_among_the_networks_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The card's options are the parsed ones: text in the run's own configuration is shown and does not become code."""
    from cfl.cli.main import restored

    options = ("--model.network", "ACGAN", "--model.network.classifier", "MLP")
    options += ("--model.network.classifier.hidden", "[8]", "--model.network.widths", "[4]")
    options += ("--methods.fedcil", "FedCIL", "--methods.fedcil.consolidation_steps", "1")
    assert (
        tiny_cli.fit(tmp_path / "run", "--data.stream", "ClassSplit", "--schedule.rounds_per_task", "1", *options) == 0
    )
    mine, injected = tmp_path / "mine.yaml", "noise_dim=100), open('injected', 'w'"
    mine.write_text((tmp_path / "run" / "config.yaml").read_text())
    theirs = yaml.safe_load(mine.read_text())
    del theirs["model"]["network"]["init_args"]["noise_dim"]
    theirs["model"]["network"]["init_args"][injected] = 1
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(theirs))
    checkpoint = ["--ckpt_path", str(tmp_path / "run" / "last.ckpt"), "--config", str(mine)]
    monkeypatch.chdir(tmp_path)
    assert export(*checkpoint, "--out", "m.safetensors") == 0
    card = tmp_path / "m.safetensors.md"
    assert injected in card.read_text()
    code, client = code_of(card), restored(checkpoint)[0]
    assert "classifier=partial(MLP, hidden=[8], " in code
    torch.testing.assert_close(executed(code, images(client)), client.network(images(client)), rtol=0, atol=1e-5)
    assert not (tmp_path / "injected").exists()


class WithOptions(Plain):
    """A network of a user's with an object and further options, which a configuration has in ``dict_kwargs``."""

    def __init__(
        self, input_shape: tuple[int, int, int], num_outputs: int, activation: nn.Module, **more: float
    ) -> None:
        super().__init__(input_shape, num_outputs)
        self.activation, self.scale = activation, more.get("scale", 1.0)

    def features(self, x: Tensor) -> Tensor:
        return self.scale * self.activation(super().features(x))


def test_the_code_of_a_card_has_all_options_of_a_users_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    client = trained(partial(WithOptions, activation=nn.Hardtanh(0.0, 0.2), scale=3.0))
    network: dict[str, Any] = {
        "class_path": f"{__name__}.WithOptions",
        "init_args": {"activation": {"class_path": "torch.nn.Hardtanh", "init_args": {"min_val": 0.0, "max_val": 0.2}}},
        "dict_kwargs": {"scale": 3.0},
    }
    found = outputs_of_code(tmp_path / "m.safetensors", client, network, images(client), Choice())
    torch.testing.assert_close(found, scores(client, images(client)), rtol=0, atol=1e-5)
    for name, value in (("scale=3.0), open('injected', 'w'", 1), ("class", 1), ("scale", [{"class_path": "a.B"}])):
        network["dict_kwargs"] = {name: value}
        with pytest.raises(ConfigError, match=re.escape(f"model.network.{name} = ")):
            outputs_of_code(tmp_path / "m.safetensors", client, network, images(client), Choice())


def test_the_code_of_a_card_normalises_by_the_task_where_data_sets_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code in a card normalises images with the constants of the chosen task's data set."""
    from cfl.export.card import write_card

    sources: list[Any] = [
        Synthetic(num_classes=2, shape=(1, 4, 4), train_size=64, test_size=20, mean=[mean], std=[std])
        for mean, std in ((0.5, 0.25), (0.1, 2.0))
    ]
    client, path, card = trained(stream=Sequence(sources)), tmp_path / "model.pt2", tmp_path / "card.md"
    answer = answer_of(client, Choice())
    write(path, answer, client.input_shape, {})
    write_card(card, path, answer, Choice(), client.require_federation(), "", tmp_path)
    code = code_of(card)
    assert code.count("task = ") == 1
    monkeypatch.chdir(tmp_path)
    (line,) = (line for line in code.splitlines() if line.startswith("images = "))
    for number, task in enumerate(client.require_federation().data.tasks):
        held: dict[str, Any] = {"given": task.test.images.permute(0, 2, 3, 1).numpy()}
        exec(code.replace(line, "images = given").replace("task = 0", f"task = {number}"), held)
        expected = answer(task.transform(task.test.images))
        torch.testing.assert_close(torch.from_numpy(held["outputs"]), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("standardise", [True, False])
def test_the_card_reads_rows_as_every_data_set_does(standardise: bool, tmp_path: Path) -> None:
    from cfl.export.card import write_card

    sources: list[Any] = []
    for number in range(2):
        values = np.random.default_rng(number).normal(10.0 * number, 1 + number, (96, 4))
        arrays = {f"{part}_features": values for part in ("train", "test")}
        arrays |= {f"{part}_labels": np.arange(96) % 2 for part in ("train", "test")}
        np.savez(tmp_path / f"rows{number}.npz", **arrays)
        sources.append(Features(str(tmp_path / f"rows{number}.npz"), standardise=standardise))
    client, card = trained(stream=Sequence(sources)), tmp_path / "card.md"
    answer = answer_of(client, Choice())
    write_card(card, model_in(tmp_path), answer, Choice(), client.require_federation(), "", tmp_path)
    assert ("| rows1 | 1 x 1 x 4 | 1 | of each feature | of each feature |" in card.read_text()) == standardise
    lines = code_of(card).splitlines()
    assert "features = np.zeros((1, 4))  # yours in their place: [N, 4]" in lines
    (line,) = (line for line in lines if line.startswith("scale, mean, std = "))
    for number, task in enumerate(client.require_federation().data.tasks):
        held: dict[str, Any] = {"np": np, "task": number}
        exec(line, held)
        stored = np.load(tmp_path / f"rows{number}.npz")["test_features"]
        found = torch.from_numpy((stored / held["scale"] - held["mean"]) / held["std"]).float()
        torch.testing.assert_close(found, task.test.images.flatten(1), rtol=0, atol=1e-5)


def test_the_card_says_how_images_are_read(tmp_path: Path) -> None:
    from cfl.export.card import write_card

    for name in ("ant", "bee"):
        for part in ("train", "test"):
            (tmp_path / "pets" / part / name).mkdir(parents=True)
            for number in range(16):
                pixels = torch.randint(0, 256, (5, 6, 3), dtype=torch.uint8).numpy()
                Image.fromarray(pixels).save(tmp_path / "pets" / part / name / f"{number}.png")
    source = ImageFolder(str(tmp_path / "pets"), [3, 4, 4], mean=[0.5, 0.4, 0.3], resize="crop")
    client, card = trained(stream=Permuted(source, 2), scenario="domain"), tmp_path / "card.md"
    answer = answer_of(client, Choice())
    write_card(card, model_in(tmp_path), answer, Choice(), client.require_federation(), "", tmp_path)
    text = card.read_text()
    assert "| pets | 3 x 4 x 4 | 255 | 0.5 0.4 0.3 | 1 1 1 |" in text
    assert "integers from 0 (black) to 255 (white); the axes are channels (red, green, blue), rows from the top" in text
    assert "converted to RGB and scaled with their proportions, and the middle of 4 x 4 pixels is cut out" in text
    assert "| 0 | 0 to 1 | ant, bee |" in text
    assert "classes = ['ant', 'bee']" in code_of(card)


def test_the_card_of_an_unfinished_run_says_which_outputs_have_been_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cfl.export.card import write_card

    client, path, said = trained(scenario="class", class_loss="seen"), tmp_path / "card.md", "Only outputs below 2 have"
    federation, answer = client.require_federation(), answer_of(client, Choice())
    write_card(path, model_in(tmp_path), answer, Choice(), federation, "", tmp_path)
    assert said not in path.read_text()
    monkeypatch.setattr(type(federation), "finished", False)
    monkeypatch.setattr(type(federation), "last_task", 0)
    write_card(path, model_in(tmp_path), answer, Choice(), federation, "", tmp_path)
    assert said in path.read_text()


@pytest.mark.parametrize(("samples", "said"), [("test", "%)\n"), ("validation", "% on validation samples)\n")])
def test_the_card_says_if_its_figures_are_of_validation_samples(samples: str, said: str, tmp_path: Path) -> None:
    from cfl.export.card import write_card

    client, path = trained(validation=0.2, evaluate_on=samples), tmp_path / "card.md"
    answer, federation = answer_of(client, Choice()), client.require_federation()
    write_card(path, model_in(tmp_path), answer, Choice(), federation, "", tmp_path)
    assert f"(of the whole run; accuracy in {said}" in path.read_text()


def test_the_card_of_a_common_model_with_a_clients_own_statistics_says_whose_figures_it_has(tmp_path: Path) -> None:
    from cfl.export.card import write_card

    client, path = trained(norm_net, federated={"batchnorm": "local"}), tmp_path / "card.md"
    choice = Choice(client=1)
    write_card(path, model_in(tmp_path), answer_of(client, choice), choice, client.require_federation(), "", tmp_path)
    card = path.read_text()
    assert "Weights are the global model's, statistics of normalisation layers the client's own." in card
    assert "of the global model with the statistics of test batches: not of this model; accuracy in %" in card
    assert "each with its own model" not in card


def test_the_card_of_clients_at_different_tasks_counts_the_fastest_ones_outputs(tmp_path: Path) -> None:
    from cfl.export.card import write_card

    schedule = {"rounds_per_task": 3, "clock_spread": 0.67}
    client, path = trained(scenario="class", class_loss="seen", schedule=schedule), tmp_path / "card.md"
    federation, answer = client.require_federation(), answer_of(client, Choice())
    of_round = [[federation.schedule.task_at(r, c) for c in range(4)] for r in range(federation.schedule.num_rounds)]
    federation.round = 1 + next(r for r, tasks in enumerate(of_round) if set(tasks) == {0, 1})
    write_card(path, model_in(tmp_path), answer, Choice(), federation, "", tmp_path)
    card = path.read_text()
    assert "Only outputs below 4 have" in card
    assert "after the last task so far after which every client has been evaluated" in card
    matrix = federation.accuracy
    for owner in range(1, 4):
        matrix.clear_row(1, [owner])
        matrix.clear_row(0, [owner])
    for owner in range(1, 4):
        matrix.update(0, 0, torch.tensor(1), 4, owner)
    write_card(path, model_in(tmp_path), answer, Choice(), federation, "", tmp_path)
    expected = (matrix.compute()[0, 0, 0] + 75) / 4
    assert f"| acc | {float(expected):.6g} |" in path.read_text(), "after task 0, of all four"


@pytest.mark.parametrize("content", [None, b"", b"no checkpoint"])
def test_bad_checkpoints_are_refused(content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.ckpt"
    if content is not None:
        path.write_bytes(content)
    assert export("--ckpt_path", str(path), "--out", str(tmp_path / "m.pt2")) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ckpt_path = ")
    assert error.count("\n") == 1
    assert "torch" not in error
    assert content is None or "this file is not a checkpoint" in error
    assert not (tmp_path / "m.pt2").exists()


def test_a_checkpoint_of_another_experiment_is_refused(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "m.pt2"
    options = ("--ckpt_path", str(run_folder / "last.ckpt"), "--out", str(out))
    assert export(*options, "--schedule.batch_size", "9") == 2
    assert "schedule.batch_size" in capsys.readouterr().err
    assert export(*options, "--task", "1") == 2
    assert "--task" in capsys.readouterr().err
    assert not out.exists()


def test_what_the_run_had_of_machines_does_not_matter(run_folder: Path, tmp_path: Path) -> None:
    """A run of several processes with loggers can be exported by one process, which opens no logger."""
    config = run_folder / "config.yaml"
    original = config.read_text()
    changed = original.replace("  devices: 1\n", "  devices: 4\n").replace(
        "  logger: false\n",
        "  logger:\n    class_path: lightning.pytorch.loggers.CSVLogger\n"
        f"    init_args: {{save_dir: {tmp_path / 'logs'}}}\n",
    )
    assert changed.count("devices: 4") == changed.count("CSVLogger") == 1
    config.write_text(changed)
    try:
        assert export("--ckpt_path", str(run_folder / "last.ckpt"), "--out", str(tmp_path / "m.pt2")) == 0
    finally:
        config.write_text(original)
    assert not (tmp_path / "logs").exists()
