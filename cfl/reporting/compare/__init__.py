"""Comparing runs: reading run folders, statistics over seeds, tables, and one self-contained page.

Read are the CSV files, the resolved configuration and the summary of each run; nothing is trained or evaluated, and
neither Lightning nor a model is imported.
"""
