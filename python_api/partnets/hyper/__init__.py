"""Hyperparameters ψ as modules: trained on the data that a subnetwork has not seen (Eq. 4)."""

from partnets.hyper.affine import Affine
from partnets.hyper.averaged import Averaged
from partnets.hyper.hyperparameter import Hyperparameter, hyperparameters
from partnets.hyper.input_mask import InputMask

__all__ = ["Affine", "Averaged", "Hyperparameter", "InputMask", "hyperparameters"]
