"""Errors, files, processes and precision: what every room above builds on."""
