"""Benchmarks of speed and memory, run by ``make bench``; docs/performance.md says what is measured and how."""

import os

ENVIRONMENT = dict(os.environ)
"""The user's environment, as every measured process gets it.

Taken before ``cfl`` is imported here, which sets OMP_WAIT_POLICY for itself: the bare loop must not inherit that.
"""
