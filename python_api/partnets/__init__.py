"""Partitioned neural networks (Mlodozeniec, Reisser and Louizos, ICLR 2023): hyperparameters in one training run.

Partition a model and its data, and train weights and hyperparameters together:

    model = partnets.partition(hyper.Averaged(augmentation := hyper.Affine(), network), (0.8, 0.1, 0.1))
    chunks = partnets.chunk((images, labels), (0.8, 0.1, 0.1))
    history = partnets.Trainer(model, chunks, hyper=augmentation).fit(1000)
"""

from pathlib import Path

from partkernels import __version__
from partkernels.build_info import check_companion
from partnets import data, federated, hyper, nn, optim, stn
from partnets.convert import finalize, merge, partition, without_rule
from partnets.data.chunks import Chunks, chunk
from partnets.data.loader import Loader
from partnets.evaluation import accuracy, audit, estimate_statistics, lml, loss_matrix, mean_loss, per_subnetwork
from partnets.nn import (
    GRU,
    LSTM,
    RNN,
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    Bilinear,
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
    Embedding,
    EmbeddingBag,
    GroupNorm,
    LayerNorm,
    Linear,
    MultiheadAttention,
    RMSNorm,
)
from partnets.subnetworks.context import subnetwork
from partnets.subnetworks.ensemble import Ensemble
from partnets.subnetworks.explaining import explain_partition
from partnets.subnetworks.rules import Rule, register
from partnets.subnetworks.state import partitions
from partnets.training import (
    History,
    Implicit,
    Lookahead,
    Trainer,
    callbacks,
    held_out,
    hyper_learning,
    loggers,
    single_chunk,
    step_hyper,
    step_lookahead,
    step_weights,
    weights_learning,
)
from partnets.tuning import Tuned, tune

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "Bilinear",
    "Chunks",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "Embedding",
    "EmbeddingBag",
    "Ensemble",
    "GroupNorm",
    "History",
    "Implicit",
    "LayerNorm",
    "Linear",
    "Loader",
    "Lookahead",
    "MultiheadAttention",
    "RMSNorm",
    "Rule",
    "Trainer",
    "Tuned",
    "__version__",
    "accuracy",
    "audit",
    "callbacks",
    "chunk",
    "data",
    "estimate_statistics",
    "explain_partition",
    "federated",
    "finalize",
    "held_out",
    "hyper",
    "hyper_learning",
    "lml",
    "loggers",
    "loss_matrix",
    "mean_loss",
    "merge",
    "nn",
    "optim",
    "partition",
    "partitions",
    "per_subnetwork",
    "register",
    "single_chunk",
    "step_hyper",
    "step_lookahead",
    "step_weights",
    "stn",
    "subnetwork",
    "tune",
    "weights_learning",
    "without_rule",
]

check_companion(Path(__file__).parent)
