"""What ``import cfl`` offers in Python: :func:`fit`, :func:`load`, :func:`trainer` and :class:`Run`."""

from cfl.api.fitting import fit
from cfl.api.parts import trainer
from cfl.api.run import Run, load

__all__ = ["Run", "fit", "load", "trainer"]
