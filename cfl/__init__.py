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

from cfl.runtime import quick_torchmetrics, torchvision_ops  # before anything that imports these two: see the modules

torchvision_ops.declare_when_imported()
quick_torchmetrics.serve_when_imported()

__version__ = "0.2.0"
