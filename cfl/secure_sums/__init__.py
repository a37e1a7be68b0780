"""Sums of clients' messages as integers: codecs, the protocol that hides single messages, and sums without it."""
