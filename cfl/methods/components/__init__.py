"""Computations and base classes shared by several methods."""
