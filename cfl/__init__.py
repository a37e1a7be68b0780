"""cfl: train and compare continual federated learning methods."""

import os
import sys

# ``python -m cfl`` puts the current folder in front of all others. People unpack runs there, so nothing is imported
# from it before it is known whether this command reads somebody's run. A checkout of the project stays where it is.
if sys.argv[:1] == ["-m"] and sys.path[:1] == [os.getcwd()] != [os.path.dirname(os.path.dirname(__file__))]:
    _here = sys.path.pop(0)
    from cfl.runtime.command_line import place_of_current_folder

    _place = place_of_current_folder(sys.argv[1:])
    if _place is not None:
        sys.path.insert(_place, _here)

# Before torch is first imported, which reads it once. Waiting math threads then sleep instead of spinning: on a machine
# whose cores are also used by others, spinning made small networks several times slower. A value of the user's stands.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from cfl.runtime import quick_dynamo, quick_torchmetrics, torchvision_ops  # before anything that imports these packages

torchvision_ops.declare_when_imported()
quick_torchmetrics.serve_when_imported()
quick_dynamo.serve_when_imported()

from typing import TYPE_CHECKING  # noqa: E402 - not from the current folder: see above

if TYPE_CHECKING:
    from cfl.api import Run, fit, load, trainer

__all__ = ["Run", "__version__", "fit", "load", "trainer"]
__version__ = "0.2.0"


def __getattr__(name: str) -> object:
    """What :mod:`cfl.api` offers, imported when it is first used: torch and Lightning take seconds."""
    if name in __all__:
        from cfl import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
