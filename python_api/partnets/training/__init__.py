"""Training: a step of w_k and a step of ψ, the Trainer that alternates them, its records and its checkpoints."""

from partnets.training import callbacks, loggers
from partnets.training.dense import held_out, single_chunk
from partnets.training.history import History
from partnets.training.hypergradient import Implicit, Lookahead, step_lookahead
from partnets.training.settings import Settings
from partnets.training.step import hyper_learning, step_hyper, step_weights, weights_learning
from partnets.training.trainer import Trainer

__all__ = [
    "History",
    "Implicit",
    "Lookahead",
    "Settings",
    "Trainer",
    "callbacks",
    "held_out",
    "hyper_learning",
    "loggers",
    "single_chunk",
    "step_hyper",
    "step_lookahead",
    "step_weights",
    "weights_learning",
]
