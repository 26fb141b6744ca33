"""Rows to metrics with intervals; what each metric means stands in definitions.py."""
