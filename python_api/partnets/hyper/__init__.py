"""Hyperparameters ψ as modules, trained on the data that a subnetwork has not seen (Eq. 4).

- Augmentations: Affine and ColourJitter. Averaged averages a network over their draws.
- Masks: InputMask and ConcreteDropout.
- Any module, such as a feature extractor: Submodule.
- Confidence of predictions: Temperature, and ObservationNoise for regression.
- Custom ones: derive from Hyperparameter and keep numbers in Learned, each in a range: real, positive, probability,
  interval or logarithmic.

A learned number is an attribute of its module, a Learned, under the name of the argument that sets its initial value.

Modules that act only in training learn by lookahead (partnets.Lookahead): LearningRate; penalties, such as WeightDecay
and ActivationPenalty; training losses, such as LabelSmoothing, SourceWeights and others derived from TrainingLoss;
Mixup; and augmentations in InTraining. partnets.stn learns them through a best response instead, and also Dropout,
EmbeddingDropout, DropConnect, Cutout and InputNoise.
"""

from partnets.hyper.affine import Affine
from partnets.hyper.averaged import Averaged
from partnets.hyper.colour_jitter import ColourJitter
from partnets.hyper.concrete import ConcreteDropout, InputMask
from partnets.hyper.cutout import Cutout
from partnets.hyper.dropout import DropConnect, Dropout, EmbeddingDropout
from partnets.hyper.hyperparameter import Hyperparameter, assign, hyperparameters
from partnets.hyper.in_training import InTraining
from partnets.hyper.input_noise import InputNoise
from partnets.hyper.learned import Learned
from partnets.hyper.learning_rate import LearningRate
from partnets.hyper.likelihood import ObservationNoise, Temperature, expected_error, gaussian_nll
from partnets.hyper.mixup import Mixup
from partnets.hyper.penalty import ActivationPenalty, Penalty, penalties
from partnets.hyper.ranges import Range, interval, logarithmic, positive, probability, real
from partnets.hyper.submodule import Submodule
from partnets.hyper.training_loss import LabelSmoothing, SourceWeights, TrainingLoss
from partnets.hyper.weight_decay import WeightDecay

__all__ = [
    "ActivationPenalty",
    "Affine",
    "Averaged",
    "ColourJitter",
    "ConcreteDropout",
    "Cutout",
    "DropConnect",
    "Dropout",
    "EmbeddingDropout",
    "Hyperparameter",
    "InTraining",
    "InputMask",
    "InputNoise",
    "LabelSmoothing",
    "Learned",
    "LearningRate",
    "Mixup",
    "ObservationNoise",
    "Penalty",
    "Range",
    "SourceWeights",
    "Submodule",
    "Temperature",
    "TrainingLoss",
    "WeightDecay",
    "assign",
    "expected_error",
    "gaussian_nll",
    "hyperparameters",
    "interval",
    "logarithmic",
    "penalties",
    "positive",
    "probability",
    "real",
]
