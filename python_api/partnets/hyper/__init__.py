"""Hyperparameters ψ as modules, trained on the data that a subnetwork has not seen (Eq. 4).

- Augmentations: Affine, ImmerAffine, SchwobelAffine and ColourJitter. Averaged averages a network over their draws.
- Masks: InputMask and ConcreteDropout.
- Any module, such as a feature extractor: Submodule.
- Confidence of predictions: Temperature, and ObservationNoise for regression.
- Custom ones: derive from Hyperparameter and keep numbers in Learned, each in a Range: real, positive, probability,
  interval, logarithmic or clamped.

Modules that act only in training learn by lookahead (partnets.Lookahead): LearningRate; penalties, such as WeightDecay,
ActivationPenalty and TemporalActivationPenalty; training losses, such as LabelSmoothing, LossWeights, ClassWeights,
SourceWeights, ExampleWeights and others derived from TrainingLoss; Mixup; and augmentations in InTraining. partnets.stn
learns them through a best response instead, and also Dropout, EmbeddingDropout, DropConnect, Cutout and InputNoise.
"""

from partnets.hyper.activation_penalty import ActivationPenalty, TemporalActivationPenalty
from partnets.hyper.affine import Affine, ImmerAffine
from partnets.hyper.averaged import Averaged
from partnets.hyper.colour_jitter import ColourJitter
from partnets.hyper.concrete_dropout import ConcreteDropout
from partnets.hyper.cutout import Cutout
from partnets.hyper.drop_connect import DropConnect
from partnets.hyper.dropout import Dropout
from partnets.hyper.embedding_dropout import EmbeddingDropout
from partnets.hyper.hyperparameter import Hyperparameter, assign, hyperparameters, named_values
from partnets.hyper.in_training import InTraining
from partnets.hyper.input_mask import InputMask
from partnets.hyper.input_noise import InputNoise
from partnets.hyper.label_smoothing import LabelSmoothing
from partnets.hyper.learned import Learned
from partnets.hyper.learning_rate import LearningRate
from partnets.hyper.loss_weights import ClassWeights, ExampleWeights, LossWeights, SourceWeights
from partnets.hyper.mixup import Mixup
from partnets.hyper.observation_noise import Gaussian, ObservationNoise, gaussian_nll
from partnets.hyper.penalty import Penalty, penalties
from partnets.hyper.ranges import Range, clamped, interval, logarithmic, positive, probability, real
from partnets.hyper.schwobel_affine import SchwobelAffine
from partnets.hyper.submodule import Submodule
from partnets.hyper.temperature import Temperature
from partnets.hyper.training_loss import TrainingLoss
from partnets.hyper.weight_decay import WeightDecay
from partnets.hyper.wrong_labels import expected_error

__all__ = [
    "ActivationPenalty",
    "Affine",
    "Averaged",
    "ClassWeights",
    "ColourJitter",
    "ConcreteDropout",
    "Cutout",
    "DropConnect",
    "Dropout",
    "EmbeddingDropout",
    "ExampleWeights",
    "Gaussian",
    "Hyperparameter",
    "ImmerAffine",
    "InTraining",
    "InputMask",
    "InputNoise",
    "LabelSmoothing",
    "Learned",
    "LearningRate",
    "LossWeights",
    "Mixup",
    "ObservationNoise",
    "Penalty",
    "Range",
    "SchwobelAffine",
    "SourceWeights",
    "Submodule",
    "Temperature",
    "TemporalActivationPenalty",
    "TrainingLoss",
    "WeightDecay",
    "assign",
    "clamped",
    "expected_error",
    "gaussian_nll",
    "hyperparameters",
    "interval",
    "logarithmic",
    "named_values",
    "penalties",
    "positive",
    "probability",
    "real",
]
