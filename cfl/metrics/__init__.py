"""Accuracy and NLL matrices, and the figures computed from them."""
