"""The base class of measures, by which runs are trained and evaluated, and the figures of a whole run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from torch import Tensor, nn

from cfl.runtime.errors import ConfigError

if TYPE_CHECKING:
    from cfl.metrics.task_matrix import TaskMatrix

Better = Literal["higher", "lower"]
Targets = Literal["classes", "numbers", "boxes", "inputs"]


@dataclass(frozen=True)
class Figure:
    """A figure of a whole run, averaged over seeds and ranked.

    Attributes:
        key: its key in ``summary.json``.
        heading: heading of its column.
        meaning: one sentence for captions.
        better: which values are better; None if neither are.
        decimals: number of decimals shown.
        signed: whether a plus sign is shown.
        divisor: the value is divided by it before it is shown, 1e6 for bytes in MB.
        printed: whether it is in the printed tables; pages and CSV files have all figures.
    """

    key: str
    heading: str
    meaning: str
    better: Better | None
    decimals: int = 2
    signed: bool = False
    divisor: float = 1.0
    printed: bool = True


def own_key(name: str, of: str = "") -> str:
    """Key of a figure of a user's measure in summaries: ``measures.top5`` is its mean, ``measures.top5.fgt`` its FGT.

    It has a dot, and no other figure has one, so that users may give any names.
    """
    return f"measures.{name}{of and f'.{of}'}"


class Measure(ABC):
    """The loss of clients, the matrix and figures that are computed from test samples, and the words for them.

    The matrix has a row per task learned and a column per task measured. A run's measure follows from its scenario
    (:func:`cfl.metrics.measure.measure_of`). To add a measure, add a module to :mod:`cfl.metrics.measures` that holds
    an object of a subclass.

    Attributes:
        name: identifies it; its files begin with it, e.g. ``accuracy_matrix.csv``.
        figure: key of its mean over the tasks seen, in summaries and tables.
        words: its name for readers, such as ``accuracy``.
        one: words for one value of it, such as ``an accuracy``.
        unit: unit of its values.
        label: label of axes and colour scales, with the unit.
        task_label: label of the axis with the tasks measured.
        formulas: key of a figure of the summary -> its formula, as plain text for help pages and tables. In it
            ``a[t, i]`` (``n[t, i]`` of densities) is the value on task i after learning task t, both counted from 0,
            and ``b[i]`` the value before any training.
        bounds: smallest and greatest possible value; None if there are none.
        lower_is_better: whether lower values are better.
        columns: its figures in tables.
        of_papers: keys of the figures that articles print, its mean first.
        known: suffix of files and figures of tests in which the task of each sample was known; empty without such
            tests.
        scenarios: the values of ``data.scenario`` with this measure.
        targets: what outputs are compared with: ``classes``, ``numbers``, ``boxes``, or the ``inputs`` themselves.
        predicts: what the network must return (:attr:`cfl.models.base.Network.predicts`): a ``vector`` per sample,
            ``boxes``, or a ``density``.
        network: words for such a network.
        by_outputs: whether the loss is a function of outputs and targets alone.
        is_cross_entropy: whether the loss is the cross-entropy, for which engines have code of their own.
        tells_tasks: whether tests may choose a model by the task of a sample.
        answers: words for the outputs of exported models; empty if they are scores of classes.
        answers_shape: shape of these outputs for N samples.
        is_accuracy: whether its values are accuracies, so that ``targets.accuracies`` may be set.
        heading: heading of its section in dashboards; empty for accuracy, which the general sections show.
        about: a sentence under the heading.
    """

    name: ClassVar[str]
    figure: ClassVar[str]
    words: ClassVar[str]
    one: ClassVar[str]
    unit: ClassVar[str]
    label: ClassVar[str]
    task_label: ClassVar[str]
    formulas: ClassVar[Mapping[str, str]]
    bounds: ClassVar[tuple[float, float] | None] = None
    lower_is_better: ClassVar[bool]
    columns: ClassVar[tuple[Figure, ...]]
    of_papers: ClassVar[tuple[str, ...]]
    known: ClassVar[str] = ""
    scenarios: ClassVar[tuple[str, ...]]
    targets: ClassVar[Targets]
    predicts: ClassVar[str] = "vector"
    network: ClassVar[str] = "a network with an output layer, such as MLP"
    by_outputs: ClassVar[bool] = True
    is_cross_entropy: ClassVar[bool] = False
    tells_tasks: ClassVar[bool] = True
    answers: ClassVar[str] = ""
    answers_shape: ClassVar[str] = ""
    is_accuracy: ClassVar[bool] = False
    heading: ClassVar[str] = ""
    about: ClassVar[str] = ""

    @property
    def mean_label(self) -> str:
        """Name of the mean over the tasks seen, such as ``ACC``."""
        return self.figure.upper()

    @property
    def better(self) -> Better:
        """Which values are better, ``lower`` or ``higher``."""
        return "lower" if self.lower_is_better else "higher"

    def scenario_in_words(self, scenario: str) -> str:
        """Return the name of one of :attr:`scenarios` for readers."""
        return scenario

    def on(self, shape: tuple[int, int, int]) -> Measure:
        """Return this measure for images ``(C, H, W)``, whose size may determine the meaning of outputs."""
        return self

    def num_outputs(self, shape: tuple[int, int, int], classes: Sequence[int]) -> int:
        """Return the size of the network's output if :attr:`targets` are not classes.

        Args:
            shape: ``(C, H, W)`` of a sample.
            classes: for every task, the number that its data set gives as number of classes, such as the classes of
                boxes or the numbers to predict. It is the same for all tasks.
        """
        return classes[0]

    def require(self) -> None:  # noqa: B027
        """Refuse a run if a library that this measure needs is not installed.

        Raises:
            ConfigError: names the library to install.
        """

    def start(self, network: nn.Module, targets: Callable[[], Tensor]) -> None:  # noqa: B027
        """Initialise a new network from the targets of the first task's training samples, if this measure needs it.

        Args:
            network: the global model, before any training.
            targets: returns these targets, ``[N, ...]``.
        """

    @abstractmethod
    def matrix(self, num_tasks: int, num_clients: int | None, num_outputs: int) -> TaskMatrix:
        """An empty matrix.

        Args:
            num_tasks: number of tasks T.
            num_clients: number of clients C when each is evaluated on a model of its own; None for one global model.
            num_outputs: size O of the network's output.
        """

    def has_known(self, scenario: str, model_per_task: bool) -> bool:
        """Return whether a run has a second matrix, of tests in which the task of each sample is known.

        Args:
            scenario: the run's scenario.
            model_per_task: whether a method has a personal model for every task.
        """
        return False

    @abstractmethod
    def losses(self, outputs: Tensor, y: Tensor, allowed: Tensor | None, x: Tensor | None) -> Tensor:
        """Return the loss of every sample, ``[..., N]``, which clients minimise.

        Args:
            outputs: the network's outputs, ``[..., N, O]``.
            y: the targets, ``[..., N]`` or ``[..., N, D]``.
            allowed: ``[..., N, O]`` bool, the outputs in the loss of each sample, or None for all.
            x: the samples ``[..., N, C, H, W]``; given unless the loss is :attr:`by_outputs`.
        """

    def check_head(self, network: nn.Module) -> None:
        """Refuse a network without the output layer that methods use: a Linear ``head`` that computes all outputs.

        Raises:
            ConfigError: ``model.network``.
        """
        head, outputs = getattr(network, "head", None), network.num_outputs
        if not isinstance(head, nn.Linear) or head.out_features != outputs:
            found = f"{type(network).__name__}, whose head is {'missing' if head is None else head}"
            raise ConfigError("model.network", found, f"a network with self.head = nn.Linear(..., {outputs})")
        for name, parameter in network.named_parameters(remove_duplicate=False):
            if parameter is head.weight and name != "head.weight":
                found = f"{type(network).__name__}, whose head.weight is {name} as well"
                raise ConfigError("model.network", found, "a head with a weight of its own, whose rows are the outputs")
