"""Object detection and its mean average precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor, nn

from cfl.metrics import boxes
from cfl.metrics.base import Figure, Measure
from cfl.runtime.errors import ConfigError
from cfl.runtime.extras import install

if TYPE_CHECKING:
    from cfl.metrics.detection import DetectionMatrix


class Detection(Measure):
    """Object detection: trained by the loss of a one-stage grid, measured by COCO's mean average precision."""

    name = "map"
    figure = "map"
    words = "mean average precision"
    one = "a mean average precision"
    unit = "%"
    label = "mAP 0.5:0.95 (%)"
    task_label = "mAP on task"
    formulas: ClassVar[dict[str, str]] = {
        "map": "mean over i <= t of a[t, i], in percent (higher is better)",
        "map_fgt": "mean over i < t of a[i, i] - a[t, i], in points (lower is better)",
        "map_bwt": "mean over i < t of a[t, i] - a[i, i], in points (higher is better)",
        "map_fwt": "mean over 1 <= i <= t of a[i-1, i] - b[i], in points (higher is better)",
        "map50": "the same mean as map, of the average precision at an overlap of 0.5 (higher is better)",
    }
    bounds: ClassVar[tuple[float, float] | None] = (0.0, 100.0)
    lower_is_better = False
    columns = (
        Figure("map", "mAP %", "mean average precision at overlaps 0.5 to 0.95 over all tasks at the end", "higher"),
        Figure("map50", "mAP 0.5 %", "the same at an overlap of 0.5", "higher"),
        Figure("map_fgt", "mAP FGT", "mean loss of mAP since each task was learned, in points", "lower"),
        Figure("map_bwt", "mAP BWT", "backward transfer in points, the negative of its FGT", "higher", signed=True),
        Figure(
            "map_fwt", "mAP FWT", "forward transfer: points gained on a task before its training", "higher", signed=True
        ),
    )
    of_papers = ("map", "map50", "map_fgt", "map_bwt")
    scenarios = ("detection",)
    targets = "boxes"
    predicts = "boxes"
    network = "a network that predicts boxes, such as TinyYOLO, in this scenario"
    answers = "what was found, each with class (-1 for nothing), left, top, right, bottom in pixels, and score"
    answers_shape = "[N, n, 6]"
    heading = "Detection"
    about = "Runs that detect objects have mean average precisions in place of accuracies; higher is better."

    def __init__(self, shape: tuple[int, int, int] = (1, 1, 1)) -> None:
        self._grid = boxes.grid_size(*shape[1:])

    def on(self, shape: tuple[int, int, int]) -> Detection:
        """See :meth:`Measure.on`: return the measure with the grid over such images."""
        return Detection(shape)

    def num_outputs(self, shape: tuple[int, int, int], classes: Sequence[int]) -> int:
        """See :meth:`Measure.num_outputs`: the numbers of all cells of the grid."""
        return boxes.num_outputs(shape, classes[0])

    def require(self) -> None:
        """Refuse a run without the library that computes average precisions.

        Raises:
            ConfigError: ``data.scenario``.
        """
        try:
            import pycocotools.cocoeval  # noqa: F401
        except ImportError as error:
            valid = f"{install('detection')}, which tests of boxes need ({error})"
            raise ConfigError("data.scenario", "detection", valid) from error

    def matrix(self, num_tasks: int, num_clients: int | None, num_outputs: int) -> DetectionMatrix:
        """See :meth:`Measure.matrix`."""
        from cfl.metrics.detection import DetectionMatrix

        return DetectionMatrix(num_tasks, num_clients)

    def start(self, network: nn.Module, targets: Callable[[], Tensor]) -> None:
        """See :meth:`Measure.start`: initialise the network's anchors from the sizes of the boxes."""
        network.start_from(targets())  # type: ignore[operator]

    def losses(self, outputs: Tensor, y: Tensor, allowed: Tensor | None, x: Tensor | None) -> Tensor:
        """Return :func:`cfl.metrics.boxes.detection_losses`."""
        return boxes.detection_losses(outputs, y, *self._grid)

    def check_head(self, network: nn.Module) -> None:
        """Refuse a network without a convolution ``head`` that computes all outputs."""
        head = getattr(network, "head", None)
        if not isinstance(head, nn.Conv2d):
            found = f"{type(network).__name__}, whose head is {'missing' if head is None else head}"
            raise ConfigError("model.network", found, "a network with self.head = nn.Conv2d(...)")


DETECTION = Detection()
