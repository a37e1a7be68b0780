"""Comparing runs: reading run folders, statistics over seeds, tables, and one self-contained page.

A comparison reads the CSV files, the resolved configuration and the summary of each run. It trains and evaluates
nothing, and imports neither Lightning nor a model.
"""
