"""Local training and evaluation as Lightning runs them."""
