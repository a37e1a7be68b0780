"""Counted randomness: every draw is keyed by a seed, a purpose and indices, and so independent of all other draws."""
