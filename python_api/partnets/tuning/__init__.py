"""Tune hyperparameters of a torch network in one call: the search, the choice and the final training.

partnets.tune trains a few copies of the network by small batches at different values, compares them by data that they
have not seen (L_ML), checks the chosen values in one more training, and trains the network with them on all data.
"""

from partnets.tuning.result import Tuned
from partnets.tuning.run import tune

__all__ = ["Tuned", "tune"]
