"""Counted randomness: every draw is named by a seed, a purpose and numbers, so that order and company do not matter."""
