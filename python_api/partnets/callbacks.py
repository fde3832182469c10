"""Callbacks of a Trainer, by their short path; see partnets.training.callbacks."""

from partnets.training.callbacks import Callback, every, record_loss_matrix, subnetwork_metrics

__all__ = ["Callback", "every", "record_loss_matrix", "subnetwork_metrics"]
