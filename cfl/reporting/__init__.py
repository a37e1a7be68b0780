"""Run folders, pictures and comparisons: what is made of a run's figures."""
