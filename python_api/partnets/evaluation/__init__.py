"""What a model, or each of its subnetworks, makes of given examples; and L_ML."""

from partnets.evaluation.metrics import accuracy, loss_matrix, mean_loss, per_subnetwork
from partnets.evaluation.out_of_chunk import lml

__all__ = ["accuracy", "lml", "loss_matrix", "mean_loss", "per_subnetwork"]
