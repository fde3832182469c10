"""partnets.tune against searches with a validation set, by regret: python -m partbench.tuning."""
