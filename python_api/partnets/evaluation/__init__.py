"""Evaluation of a model, or of each of its subnetworks, on given examples; and L_ML."""

from partnets.evaluation.auditing import audit
from partnets.evaluation.marginal_likelihood import lml
from partnets.evaluation.metrics import accuracy, loss_matrix, mean_loss, per_subnetwork
from partnets.evaluation.running_statistics import estimate_statistics

__all__ = ["accuracy", "audit", "estimate_statistics", "lml", "loss_matrix", "mean_loss", "per_subnetwork"]
