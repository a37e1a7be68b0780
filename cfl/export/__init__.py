"""Exports a trained model to a file for other programs, with a model card."""
