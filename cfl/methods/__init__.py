"""One file per method; ``cfl.methods.base`` says what a method may do."""

from cfl.methods.base import Method
from cfl.methods.er import ER
from cfl.methods.ewc import EWC
from cfl.methods.fedcil import FedCIL
from cfl.methods.fot import FOT
from cfl.methods.glfc import GradientCompensation
from cfl.methods.gpm import GPM
from cfl.methods.personal import PersonalLayers
from cfl.methods.rgo import RGO
from cfl.methods.single_task import SingleTask

__all__ = ["ER", "EWC", "FOT", "GPM", "RGO", "FedCIL", "GradientCompensation", "Method", "PersonalLayers", "SingleTask"]
