"""Builders and independent computations that tests of several rooms use."""
