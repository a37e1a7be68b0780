"""Runs many experiments, each in its own process, several at a time. Finished runs are not repeated.

``cfl sweep`` (:mod:`cfl.running.command`) and the papers' tables (:mod:`cfl.papers`) are built on this package.
"""
