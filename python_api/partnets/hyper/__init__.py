"""Hyperparameters ψ as modules: trained on the data that a subnetwork has not seen (Eq. 4).

Augmentations: Affine, ImmerAffine, SchwobelAffine and ColourJitter, averaged over draws by Averaged. Masks: InputMask
and ConcreteDropout. Any module, such as a feature extractor: Submodule. One of your own: derive it from Hyperparameter
and keep numbers in Learned, each in a Range: real, positive, probability, interval or clamped.
"""

from partnets.hyper.affine import Affine, ImmerAffine
from partnets.hyper.averaged import Averaged
from partnets.hyper.colour_jitter import ColourJitter
from partnets.hyper.concrete_dropout import ConcreteDropout
from partnets.hyper.hyperparameter import Hyperparameter, hyperparameters
from partnets.hyper.input_mask import InputMask
from partnets.hyper.learned import Learned
from partnets.hyper.observation_noise import Gaussian, ObservationNoise, gaussian_nll
from partnets.hyper.ranges import Range, clamped, interval, positive, probability, real
from partnets.hyper.schwobel_affine import SchwobelAffine
from partnets.hyper.submodule import Submodule

__all__ = [
    "Affine",
    "Averaged",
    "ColourJitter",
    "ConcreteDropout",
    "Gaussian",
    "Hyperparameter",
    "ImmerAffine",
    "InputMask",
    "Learned",
    "ObservationNoise",
    "Range",
    "SchwobelAffine",
    "Submodule",
    "clamped",
    "gaussian_nll",
    "hyperparameters",
    "interval",
    "positive",
    "probability",
    "real",
]
