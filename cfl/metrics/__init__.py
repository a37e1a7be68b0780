"""Losses of clients, matrices of test results over tasks, and the figures computed from them."""
