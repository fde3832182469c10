"""Regret of partnets.tune and of searches with a validation set: python -m partbench.tuning."""
