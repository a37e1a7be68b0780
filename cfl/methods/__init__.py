"""One file per method; ``cfl.methods.base`` says what a method may do."""

from cfl.methods.base import Method
from cfl.methods.fot import FOT
from cfl.methods.personal import PersonalLayers

__all__ = ["FOT", "Method", "PersonalLayers"]
