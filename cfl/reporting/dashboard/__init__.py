"""Panels at wandb that compare runs: a workspace and a report, as a program instead of by hand."""
