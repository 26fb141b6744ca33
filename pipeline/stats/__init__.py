"""Intervals and tests: NumPy and SciPy only."""
