"""What a run measures after each task, and the figures that follow from it."""
