"""Timing in process: the hardware, the schedule of rounds, run-to-run variation, the roofline."""
