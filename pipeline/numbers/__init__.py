"""Arithmetic without files, clock or models: statistics, metrics and what their names mean."""
