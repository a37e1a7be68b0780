"""Task streams: how one or several data sets become tasks that arrive one after another."""

from cfl.data.streams.base import Stream
from cfl.data.streams.class_split import ClassSplit
from cfl.data.streams.mixture import Mixture
from cfl.data.streams.natural_tasks import NaturalTasks
from cfl.data.streams.permuted import Permuted
from cfl.data.streams.rotated import Rotated
from cfl.data.streams.sequence import Sequence

__all__ = ["ClassSplit", "Mixture", "NaturalTasks", "Permuted", "Rotated", "Sequence", "Stream"]
