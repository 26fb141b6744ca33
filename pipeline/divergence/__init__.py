"""Full-vocabulary divergence: the reference's store, checkpoints of a pass over it, and the arithmetic of distributions."""
