"""The tables of the papers: published numbers as data, runs that fill the cells, and what came out compared.

A paper is a folder of data files, nothing in the code knows one of them:

- ``published/table1.csv``, ...: every published number (:mod:`cfl.papers.published`);
- ``paper.yaml``, ``table1.yaml``, ...: which experiment fills which cell (:mod:`cfl.papers.definition`,
  :mod:`cfl.papers.recipes`);
- ``results/*.json``: finished runs in a few kilobytes each (:mod:`cfl.papers.kept`).

``python -m cfl.papers`` is the command line; ``docs/tables.md`` explains it.
"""
