"""A variant's rows -> figures with intervals, and where it broke: what the stage `compare` puts together."""
