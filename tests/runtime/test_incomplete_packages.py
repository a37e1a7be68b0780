"""Lightning is imported without most of torchmetrics and torch._dynamo, whose parts are imported when they are used."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest


def said_by(code: str) -> str:
    """Return what the code prints in a new interpreter."""
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.strip()


def test_lightning_needs_none_of_what_it_imports_and_does_not_use() -> None:
    heavy = ("torchmetrics.functional", "torchvision", "scipy.signal", "matplotlib", "torch._dynamo.config", "sympy")
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


def test_metrics_are_drawn() -> None:
    assert (
        said_by(
            """
        import cfl
        import lightning.pytorch
        import matplotlib
        matplotlib.use("agg")
        from torchmetrics.aggregation import MeanMetric
        metric = MeanMetric()
        metric.update(2.0)
        figure, axes = metric.plot()
        print(type(figure).__name__, len(axes.lines))
        """
        )
        == "Figure 1"
    )


@pytest.mark.parametrize(
    "use",
    [
        "import torch._dynamo.config",
        "from torch._dynamo import config",
        "list(ThreadPoolExecutor(4).map(lambda _: torch._dynamo.reset(), range(4)))",
    ],
)
def test_compiled_modules_are_known_as_such(use: str) -> None:
    """A compiled module is an OptimizedModule to Lightning, which imported the class before torch._dynamo was loaded.

    Each case loads torch._dynamo in another way.
    """
    found = said_by(
        f"""
        import cfl, sys, torch
        from concurrent.futures import ThreadPoolExecutor
        from lightning.fabric.wrappers import OptimizedModule
        net = torch.nn.Linear(2, 1)
        print(isinstance(net, OptimizedModule), "torch._dynamo.config" in sys.modules)
        {use}
        compiled = torch.compile(net)
        print(isinstance(compiled, OptimizedModule), issubclass(type(compiled), OptimizedModule))
        print(isinstance(net, OptimizedModule), isinstance(compiled, torch._dynamo.OptimizedModule))
        print(torch._dynamo.eval_frame.__spec__.name, torch._dynamo.config is sys.modules["torch._dynamo.config"])
        """
    )
    assert found.splitlines() == ["False False", "True True", "False True", "torch._dynamo.eval_frame True"]


def test_a_function_marked_early_is_not_compiled() -> None:
    found = said_by(
        """
        import cfl, sys, torch
        from lightning.fabric.wrappers import OptimizedModule

        @torch.compiler.disable
        def double(x):
            return 2 * x, torch.compiler.is_compiling()

        print(double(torch.ones(1)), "torch._dynamo.config" in sys.modules)
        print(torch.compile(lambda x: double(x + 1), backend="eager")(torch.ones(1)))
        print(double(torch.ones(1)))
        """
    )
    assert found.splitlines() == ["(tensor([2.]), False) False", "(tensor([4.]), False)", "(tensor([2.]), False)"]


def test_a_module_marked_early_stays_a_module() -> None:
    marked = "torch.compiler.disable(torch.nn.Linear(2, 1))"
    code = f"import cfl, torch, lightning.pytorch; print(isinstance({marked}, torch.nn.Module))"
    assert said_by(code) == "True"


def test_training_needs_it_only_to_compile() -> None:
    """Optimizers take the same steps with and without torch._dynamo, which is loaded only to compile."""
    found = said_by(
        """
        import cfl, sys, torch
        import lightning.pytorch
        found = []
        for late in (False, True):
            torch.manual_seed(0)
            net = torch.nn.Linear(2, 1)
            optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
            step = torch.compile(optimizer.step, backend="eager") if late else optimizer.step
            for x in torch.ones(3, 4, 2):
                optimizer.zero_grad()
                net(x).square().sum().backward()
                step()
            found.append(net.weight.detach())
            print("torch._dynamo.config" in sys.modules)
        print(torch.allclose(*found))
        """
    )
    assert found.splitlines() == ["False", "True", "True"]
