"""Runs many experiments: one process for each, several at a time, those that are finished already left out.

``cfl sweep`` (:mod:`cfl.running.command`) and the papers' tables (:mod:`cfl.papers`) are built on it.
"""
