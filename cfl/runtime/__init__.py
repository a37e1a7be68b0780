"""Errors, files, processes and precision: the lowest package, used by all others."""
