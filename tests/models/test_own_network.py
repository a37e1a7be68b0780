"""User-written networks: the documentation's example, and the errors about networks that cannot be used."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from support import tiny_cli
from support.tiny import fit, tiny_client, tiny_data, weights
from torch import Tensor, nn

from cfl.methods.components.layer_inputs.weighted_layers import choose_layers
from cfl.models import MLP
from cfl.models.base import Network
from cfl.runtime.errors import ConfigError

DOCUMENTED = Path(__file__).parents[2] / "docs" / "writing-a-network.md"
HEADLESS = """
import torch
from cfl.models.base import Network

class Net(Network):
    def __init__(self, input_shape, num_outputs):
        super().__init__(input_shape, num_outputs)
        self.out = torch.nn.Linear(16, num_outputs)

    def features(self, x):
        return x.flatten(1)

    def forward(self, x):
        return self.out(self.features(x))

class Narrow(Net):
    def __init__(self, input_shape, num_outputs):
        super().__init__(input_shape, num_outputs)
        self.head = torch.nn.Linear(16, num_outputs - 1)
"""


def test_the_documented_example_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = DOCUMENTED.read_text()
    code = text[text.index("class Net(Network):") :].partition("```")[0]
    imports = "from torch import Tensor, nn\nfrom cfl.models.base import Network\n"
    (tmp_path / "documented_net.py").write_text(imports + code)
    monkeypatch.syspath_prepend(tmp_path)
    options = ("--model.network", "documented_net.Net", "--model.network.width", "3", "--methods.fot", "FOT")
    assert tiny_cli.fit(tmp_path / "run", *options) == 0
    layers = {row["layer"] for row in tiny_cli.rows(tmp_path / "run" / "fot.csv")}
    assert layers == {"body.0", "head"}


def test_a_network_that_lacks_what_every_network_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "featureless.py").write_text("from cfl.models.base import Network\n\nclass Net(Network):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert tiny_cli.fit(tmp_path / "run", "--model.network", "featureless.Net") == 2
    said = "model.network = 'featureless.Net' cannot work; valid: a class with all it needs; this one lacks features"
    assert capsys.readouterr().err == f"error: {said}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("self", r"Net.__init__() takes 1 positional argument but 3 were given"),
        ("self, input_shape, num_outputs, share=1.5", "dropout probability has to be between 0 and 1, but got 1.5"),
    ],
)
def test_a_network_that_cannot_be_built(
    arguments: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = f"""
import torch
from cfl.models.base import Network

class Net(Network):
    def __init__({arguments}):
        super().__init__(input_shape, num_outputs)
        self.dropout = torch.nn.Dropout(share)

    def features(self, x):
        return self.dropout(x.flatten(1))
"""
    (tmp_path / "unbuilt.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "unbuilt", raising=False)
    assert tiny_cli.fit(tmp_path / "run", "--model.network", "unbuilt.Net") == 2
    valid = f"a network that can be built of input_shape, num_outputs and its options ({said})"
    assert capsys.readouterr().err == f"error: model.network = 'Net' cannot work; valid: {valid}\n"


SHARING = """
import torch
from cfl.models.base import Network

class Net(Network):
    def __init__(self, input_shape, num_outputs):
        super().__init__(input_shape, num_outputs)
        self.body = torch.nn.Sequential(*self.layers())
        self.head = torch.nn.Linear(16, num_outputs)

    def features(self, x):
        return self.body(x.flatten(1))

class SameModule(Net):
    def layers(self):
        layer = torch.nn.Linear(16, 16)
        return layer, torch.nn.ReLU(), layer, torch.nn.ReLU()

class SameWeight(Net):
    def layers(self):
        layer, other = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
        other.weight = layer.weight
        return layer, torch.nn.ReLU(), other, torch.nn.ReLU()

class SameActivation(Net):
    def layers(self):
        relu = torch.nn.ReLU()
        return torch.nn.Linear(16, 16), relu, torch.nn.Linear(16, 16), relu
"""


@pytest.fixture
def sharing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module with networks that use a layer, a weight or an activation twice."""
    (tmp_path / "sharing.py").write_text(SHARING)
    monkeypatch.syspath_prepend(tmp_path)
    return "sharing"


def test_a_module_under_two_names_is_refused(sharing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A module with weights under two names is refused: the global model would keep a client's weights.

    Modules without weights may be used twice.
    """
    assert tiny_cli.fit(tmp_path / "run", "--model.network", f"{sharing}.SameModule") == 2
    assert "SameModule, whose module body.0 is body.2 as well' cannot work" in capsys.readouterr().err
    assert tiny_cli.fit(tmp_path / "other", "--model.network", f"{sharing}.SameActivation") == 0


def test_layers_may_share_a_weight(sharing: str, tmp_path: Path) -> None:
    """A weight shared by two layers trains alike in every engine, and stays shared."""
    engines = {"vmap": (), "workers": ("--engine.workers", "2")}
    for kind, options in engines.items():
        own = ("--model.network", f"{sharing}.SameWeight", "--engine.kind", kind, *options)
        assert tiny_cli.fit(tmp_path / kind, *own) == 0
    weights = [tiny_cli.checkpoint(tmp_path / kind)["state_dict"] for kind in engines]
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-6)
    assert torch.equal(weights[0]["network.body.0.weight"], weights[0]["network.body.2.weight"])


def test_a_weight_that_is_made_of_others_is_not_a_layers_own() -> None:
    network = MLP((1, 4, 4), 4, [8])
    torch.nn.utils.spectral_norm(network.head)
    with pytest.raises(ConfigError, match=r"layers = 'head, whose weight is made of others' .*weight of their own"):
        choose_layers(network, None, "methods.mine.layers")
    assert "head" not in choose_layers(network, ["layers.*"], "methods.mine.layers")


@pytest.mark.parametrize("method", ["FOT", "GPM", "RGO"])
def test_a_shared_weight_is_not_protected_by_the_inputs_of_one_layer(
    sharing: str, method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--model.network", f"{sharing}.SameWeight", "--methods.mine", method)
    assert tiny_cli.fit(tmp_path / "run", *options) == 2
    assert "methods.mine.layers = 'body.0, whose weight is body.2.weight as well'" in capsys.readouterr().err
    assert tiny_cli.fit(tmp_path / "run", *options, "--methods.mine.layers", "[head]") == 0


BRANCHING = """
import torch
from cfl.models.base import Network

class Net(Network):
    def __init__(self, input_shape, num_outputs):
        super().__init__(input_shape, num_outputs)
        self.head = torch.nn.Linear(16, num_outputs)

    def features(self, x):
        return x.flatten(1) if x.mean().item() > 0 else -x.flatten(1)

class Counting(Net):
    def __init__(self, input_shape, num_outputs):
        super().__init__(input_shape, num_outputs)
        self.seen = torch.zeros(16)

    def features(self, x):
        self.seen.add_(x.detach().flatten(1).mean(0))
        return x.flatten(1)
"""


@pytest.mark.parametrize("name", ["Net", "Counting"])
def test_a_network_that_vmap_cannot_compute(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A network that branches on its values or changes tensors is refused with vmap. ``auto`` chooses workers."""
    (tmp_path / "branching.py").write_text(BRANCHING)
    monkeypatch.syspath_prepend(tmp_path)
    own = ("--model.network", f"branching.{name}")
    assert tiny_cli.fit(tmp_path / "vmap", *own) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: model.network = '{name}' cannot work; valid: schedule.cohort_width: 1, ")
    assert message.count("\n") == 1
    assert tiny_cli.fit(tmp_path / "one", *own, "--schedule.cohort_width", "1") == 0
    for kind in ("auto", "workers"):
        assert tiny_cli.fit(tmp_path / kind, *own, "--engine.kind", kind) == 0
        assert tiny_cli.summary(tmp_path / kind)["engine"]["kind"] == "workers"


@pytest.mark.parametrize(("name", "found"), [("Net", "missing"), ("Narrow", "out_features=3")])
def test_outputs_that_are_not_the_heads(
    name: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "headless.py").write_text(HEADLESS)
    monkeypatch.syspath_prepend(tmp_path)
    assert tiny_cli.fit(tmp_path / "run", "--model.network", f"headless.{name}") == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: model.network = '{name}, whose head is ")
    assert found in message
    assert "valid: a network with self.head = nn.Linear(..., 4)" in message


class Free(Network):
    """A network with a bare parameter, a 1d convolution and BatchNorm."""

    def __init__(self, input_shape: tuple[int, int, int], num_outputs: int) -> None:
        super().__init__(input_shape, num_outputs)
        self.shift = nn.Parameter(torch.zeros(16))
        self.line, self.norm, self.head = nn.Conv1d(1, 1, 3), nn.BatchNorm1d(14), nn.Linear(14, num_outputs)

    def features(self, x: Tensor) -> Tensor:
        return self.norm(self.line((x.flatten(1) + self.shift)[:, None]).flatten(1))


def test_weights_that_a_method_does_not_see_are_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert list(choose_layers(MLP((1, 4, 4), 4, hidden=[8]), None, "methods.fot.layers")) == ["layers.0", "head"]
        assert caplog.text == ""
        assert list(choose_layers(Free((1, 4, 4), 4), None, "methods.fot.layers")) == ["head"]
        attention = nn.ModuleDict({"own": nn.MultiheadAttention(4, 2), "line": nn.Linear(4, 4)})
        assert list(choose_layers(attention, None, "methods.gpm.layers")) == ["line"]
    unseen = "own.in_proj_weight, own.in_proj_bias, own.out_proj.weight, own.out_proj.bias"
    assert f"methods.gpm.layers: {unseen} belong to no" in caplog.text
    with pytest.raises(ConfigError, match=r"own\.out_proj.*\['line'\]"):
        choose_layers(attention, ["own.out_proj"], "methods.gpm.layers")
    assert "methods.fot.layers: shift, line.weight, line.bias belong to no Linear or Conv2d layer" in caplog.text


TIED = """
import torch
from cfl.models.base import Network

class Net(Network):
    def __init__(self, input_shape, num_outputs):
        super().__init__(input_shape, num_outputs)
        self.rows = torch.nn.Linear(16, num_outputs)
        self.back = torch.nn.Linear(num_outputs, 16)
        self.head = torch.nn.Linear(16, num_outputs)
        self.head.weight = self.rows.weight

    def features(self, x):
        return self.back(torch.tanh(self.rows(x.flatten(1))))
"""


def test_a_head_that_shares_its_weight_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Outputs that are not in the loss keep their rows of the head only if the rows serve nothing else."""
    (tmp_path / "tied.py").write_text(TIED)
    monkeypatch.syspath_prepend(tmp_path)
    assert tiny_cli.fit(tmp_path / "run", "--model.network", "tied.Net") == 2
    assert "'Net, whose head.weight is rows.weight as well' cannot work" in capsys.readouterr().err


class Turned(Network):
    """Multiplies features by complex numbers, held as such or as pairs of real ones."""

    def __init__(self, shape: tuple[int, int, int], outputs: int, real: bool = True, buffer: bool = False) -> None:
        super().__init__(shape, outputs)
        self.body, self.head = nn.Linear(16, 6), nn.Linear(6, outputs)
        self.phase = nn.Parameter(torch.ones(6, 2) if real else torch.ones(6, dtype=torch.complex64))
        if buffer:
            self.register_buffer("kept", torch.ones(6, dtype=torch.complex64))
        self.register_buffer("constant", torch.ones(6, dtype=torch.complex64), persistent=False)

    def features(self, x: Tensor) -> Tensor:
        phase = self.phase if self.phase.is_complex() else torch.view_as_complex(self.phase)
        return (self.body(x.flatten(1)) * phase * self.constant).abs()


def test_complex_parameters_are_refused_and_pairs_of_real_ones_work() -> None:
    """Only real numbers are wholly in norms, noise and sums of integers. A constant may be complex."""

    def trained(make: Callable[..., Network]) -> dict[str, Tensor]:
        data = tiny_data(num_clients=4)
        return weights(fit(tiny_client(data, make), data, {"aggregation": "modelled"}))

    for options, name in (({"real": False}, "phase"), ({"buffer": True}, "kept")):
        with pytest.raises(ConfigError, match=rf"Turned, whose {name} is complex64.*torch\.view_as_complex"):
            trained(partial(Turned, **options))
    moved = (trained(Turned)["phase"] - torch.ones(6, 2)).abs()
    assert (moved > 1e-4).any(0).all()  # real and imaginary parts
