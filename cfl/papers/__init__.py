"""The tables of the papers: published numbers as data, runs that fill the cells, and reports that compare the two.

A paper is a folder of data files. The code has no knowledge of a particular paper:

- ``published/table1.csv``, ...: every published number (:mod:`cfl.papers.published`);
- ``paper.yaml``, ``table1.yaml``, ...: which experiment fills which cell (:mod:`cfl.papers.definition`,
  :mod:`cfl.papers.recipes`);
- ``results/*.json``: finished runs in a few kilobytes each (:mod:`cfl.papers.kept`).

``python -m cfl.papers`` is the command line; ``docs/tables.md`` explains it.
"""
