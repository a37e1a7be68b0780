"""The command line of ``cfl fit``, ``validate`` and ``test``."""
