"""Loggers of a Trainer, by their short path; see partnets.training.loggers."""

from partnets.training.loggers import CSV, TensorBoard

__all__ = ["CSV", "TensorBoard"]
