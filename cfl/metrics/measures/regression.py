"""Regression and its root mean squared error."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from cfl.metrics.base import Figure, Measure

if TYPE_CHECKING:
    from cfl.metrics.regression import ErrorMatrix


class Regression(Measure):
    """Regression: trained by the mean squared error, measured by its root."""

    name = "rmse"
    figure = "rmse"
    words = "root mean squared error"
    one = "an RMSE"
    unit = "targets' unit"
    label = "RMSE (targets' unit)"
    task_label = "RMSE on task"
    formulas: ClassVar[dict[str, str]] = {
        "rmse": "mean over i <= t of a[t, i], in the targets' unit (lower is better)",
        "rmse_fgt": "mean over i < t of a[t, i] - a[i, i], in the targets' unit (lower is better)",
        "rmse_bwt": "mean over i < t of a[i, i] - a[t, i], in the targets' unit (higher is better)",
        "rmse_fwt": "mean over 1 <= i <= t of b[i] - a[i-1, i], in the targets' unit (higher is better)",
        "r2": "mean over i <= t of R2[t, i] (higher is better)",
    }
    lower_is_better = True
    columns = (
        Figure("rmse", "RMSE", "mean root mean squared error over all tasks at the end", "lower", 4),
        Figure("rmse_fgt", "RMSE FGT", "mean rise of the error since each task was learned", "lower", 4, signed=True),
        Figure("rmse_bwt", "RMSE BWT", "backward transfer, the negative of its FGT", "higher", 4, signed=True),
        Figure("rmse_fwt", "RMSE FWT", "forward transfer: fall of the error before it is learned", "higher", 4, True),
        Figure("r2", "R2", "mean coefficient of determination over all tasks at the end", "higher", 4),
    )
    of_papers = ("rmse", "rmse_fgt", "rmse_bwt", "r2")
    scenarios = ("regression",)
    targets = "numbers"
    answers = "the numbers predicted, in the targets' unit"
    answers_shape = "[N, D]"
    heading = "Regression"
    about = "Runs that predict numbers have root mean squared errors in place of accuracies; lower is better."

    def matrix(self, num_tasks: int, num_clients: int | None, num_outputs: int) -> ErrorMatrix:
        """See :meth:`Measure.matrix`."""
        from cfl.metrics.regression import ErrorMatrix

        return ErrorMatrix(num_tasks, num_clients, num_outputs)

    def losses(self, outputs: Tensor, y: Tensor, allowed: Tensor | None, x: Tensor | None) -> Tensor:
        """Squared errors, the mean over the D numbers of a sample, as in ``torch.nn.MSELoss``."""
        return (outputs - y.to(outputs.dtype)).square().mean(-1)


REGRESSION = Regression()
