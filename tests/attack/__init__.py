"""Attacks on the command line: kills, configurations, damaged files and failing disks, each with a verdict.

``PYTHONPATH=tests python -m attack --help``, or ``make attack``.
"""
