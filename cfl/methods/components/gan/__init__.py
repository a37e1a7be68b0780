"""An auxiliary-classifier GAN: its losses, and its training at the server."""
