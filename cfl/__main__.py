"""``python -m cfl``."""

import sys

from cfl.cli import main

sys.exit(main())
