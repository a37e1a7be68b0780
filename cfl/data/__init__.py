"""Data sets, task streams, partitions and the loaders that serve them."""
