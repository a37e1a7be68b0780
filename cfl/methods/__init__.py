"""The methods, one file each. Their base class is in ``cfl.methods.base``."""

from cfl.methods.agem import AGEM
from cfl.methods.analytic_head import AnalyticHead
from cfl.methods.apd import APD
from cfl.methods.base import Method
from cfl.methods.cfed import CFeD
from cfl.methods.confedmade import CONFEDMADE
from cfl.methods.der import DER
from cfl.methods.dp_fedavg import DPFedAvg
from cfl.methods.er import ER
from cfl.methods.ewc import EWC
from cfl.methods.fed_agem import FedAGEM
from cfl.methods.fedcil import FedCIL
from cfl.methods.fedcurv import FedCurv
from cfl.methods.fedprox import FedProx
from cfl.methods.fedweit import FedWeIT
from cfl.methods.fot import FOT
from cfl.methods.found_boundaries import FoundBoundaries
from cfl.methods.glfc import GLFC
from cfl.methods.gpm import GPM
from cfl.methods.gradient_compensation import GradientCompensation
from cfl.methods.icarl import ICaRL
from cfl.methods.inferring_fot import InferringFOT
from cfl.methods.l2p import L2P
from cfl.methods.masked_weights import MaskedWeights
from cfl.methods.personal import PersonalLayers
from cfl.methods.plateau import LearningRateDecay
from cfl.methods.rgo import RGO
from cfl.methods.scaffold import SCAFFOLD
from cfl.methods.single_task import SingleTask

__all__ = [
    "AGEM",
    "APD",
    "CONFEDMADE",
    "DER",
    "ER",
    "EWC",
    "FOT",
    "GLFC",
    "GPM",
    "L2P",
    "RGO",
    "SCAFFOLD",
    "AnalyticHead",
    "CFeD",
    "DPFedAvg",
    "FedAGEM",
    "FedCIL",
    "FedCurv",
    "FedProx",
    "FedWeIT",
    "FoundBoundaries",
    "GradientCompensation",
    "ICaRL",
    "InferringFOT",
    "LearningRateDecay",
    "MaskedWeights",
    "Method",
    "PersonalLayers",
    "SingleTask",
]
