"""Benchmarks of speed and memory, run by ``make bench``; docs/benchmarks.md says what is measured and how."""

import os

ENVIRONMENT = dict(os.environ)
"""The user's environment, which every measured process gets.

It is copied before ``cfl`` is imported, because ``cfl`` sets OMP_WAIT_POLICY, which the bare loop must not inherit.
"""
