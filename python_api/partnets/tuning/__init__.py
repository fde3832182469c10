"""Tuning of a torch network's hyperparameters in one call: the search, the choice and the final training.

partnets.tune trains copies of the network on small batches at different values, compares their losses on data that they
have not seen (L_ML), checks the chosen values in one more training, and trains the network with them on all data.
"""

from partnets.tuning.result import Tuned
from partnets.tuning.run import tune

__all__ = ["Tuned", "tune"]
