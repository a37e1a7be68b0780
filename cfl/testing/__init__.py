"""Checks that your own methods, networks and data sets have the properties that the program relies on."""

from cfl.testing.methods import PROPERTIES, check_method
from cfl.testing.networks import check_network
from cfl.testing.sources import check_source

__all__ = ["PROPERTIES", "check_method", "check_network", "check_source"]
