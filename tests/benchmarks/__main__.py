"""``python -m benchmarks``, with ``tests`` on PYTHONPATH."""

import sys

from benchmarks.command import main

sys.exit(main())
