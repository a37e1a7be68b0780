"""Federated simulators of others, each as its own documentation says to use it, on the works of the suite.

Every simulator has an environment of its own (:mod:`benchmarks.simulators.environments`), in which this package is
imported. A module has one function ``main(work_file, data, turns)``, which builds the federation and never returns.
"""
