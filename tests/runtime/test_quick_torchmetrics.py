"""Lightning is imported without most of torchmetrics, which is whole for whoever asks for more."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest


def said_by(code: str) -> str:
    """What a fresh interpreter prints."""
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.strip()


def test_lightning_needs_neither_all_metrics_nor_what_these_import() -> None:
    heavy = ("torchmetrics.functional", "torchvision", "scipy.signal")
    assert (
        said_by(
            f"""
        import sys
        import cfl
        import lightning.pytorch
        import cfl.metrics.accuracy
        print([name for name in {heavy} if name in sys.modules])
        """
        )
        == "[]"
    )


@pytest.mark.parametrize(
    "use",
    [
        "import torchmetrics; metric = torchmetrics.Accuracy",
        "from torchmetrics import Accuracy as metric",
        "from torchmetrics.classification import Accuracy as metric",
        "import torchmetrics.functional; import torchmetrics; metric = torchmetrics.Accuracy",
    ],
)
def test_whatever_else_is_asked_for_is_there(use: str) -> None:
    found = said_by(
        f"""
        import cfl
        import lightning.pytorch
        {use}
        import importlib.metadata, pickle, torch, torchmetrics
        assert torchmetrics.__version__ == importlib.metadata.version("torchmetrics")
        assert torchmetrics.Metric is torchmetrics.metric.Metric
        assert issubclass(torchmetrics.MetricCollection, torch.nn.ModuleDict)
        made = metric("multiclass", num_classes=3)
        made.update(torch.tensor([0, 1, 2, 2]), torch.tensor([0, 1, 2, 1]))
        print(isinstance(pickle.loads(pickle.dumps(made)), torchmetrics.Metric), float(made.compute()))
        """
    )
    assert found == "True 0.75"


def test_what_is_not_there_is_an_attribute_error() -> None:
    assert said_by(
        "import cfl, torchmetrics; print(hasattr(torchmetrics, 'Nothing'), hasattr(torchmetrics, '__no__'))"
    ) == ("False False")
