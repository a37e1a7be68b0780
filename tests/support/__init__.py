"""Builders and independent computations that tests of several folders use."""
