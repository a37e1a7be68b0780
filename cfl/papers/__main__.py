"""``python -m cfl.papers``."""

import sys

from cfl.papers.command import main

sys.exit(main())
