"""Data sets, task streams, partitions and data loaders."""
