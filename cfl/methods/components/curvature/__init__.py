"""Second-order information of a loss: per-sample gradients, squared and summed; the Fisher information."""
