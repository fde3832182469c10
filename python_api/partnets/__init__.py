"""Partitioned neural networks (Mlodozeniec, Reisser and Louizos, ICLR 2023): hyperparameters in one training run.

Partition a model and its data, and train weights and hyperparameters together:

    model = partnets.partition(hyper.Averaged(augmentation := hyper.Affine(), network), (0.8, 0.1, 0.1))
    chunks = partnets.chunk((images, labels), (0.8, 0.1, 0.1))
    history = partnets.Trainer(model, chunks, hyper=augmentation).fit(1000)
"""

from pathlib import Path

from partkernels import __version__
from partkernels.build_info import check_companion
from partnets import baselines, data, federated, hyper, models, nn, optim, stn
from partnets.convert import explain_partition, finalize, merge, partition, reassign, without_rule
from partnets.data.chunks import Chunks, chunk
from partnets.data.loader import Loader
from partnets.evaluation import accuracy, audit, estimate_statistics, lml, loss_matrix, mean_loss, per_subnetwork
from partnets.nn.activation_checkpoint import checkpoint_contexts
from partnets.nn.attention import MultiheadAttention
from partnets.nn.batch_norm import BatchNorm1d, BatchNorm2d, BatchNorm3d
from partnets.nn.conv import Conv1d, Conv2d, Conv3d
from partnets.nn.conv_transpose import ConvTranspose1d, ConvTranspose2d, ConvTranspose3d
from partnets.nn.embedding import Embedding, EmbeddingBag
from partnets.nn.linear import Bilinear, Linear
from partnets.nn.live import subnetwork
from partnets.nn.norm import GroupNorm, LayerNorm, RMSNorm
from partnets.nn.recurrent import GRU, LSTM, RNN
from partnets.nn.registry import register
from partnets.training import (
    History,
    Implicit,
    Lookahead,
    Trainer,
    callbacks,
    hyper_learning,
    loggers,
    step_hyper,
    step_lookahead,
    step_weights,
    sweep,
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
    "GroupNorm",
    "History",
    "Implicit",
    "LayerNorm",
    "Linear",
    "Loader",
    "Lookahead",
    "MultiheadAttention",
    "RMSNorm",
    "Trainer",
    "Tuned",
    "__version__",
    "accuracy",
    "audit",
    "baselines",
    "callbacks",
    "checkpoint_contexts",
    "chunk",
    "data",
    "estimate_statistics",
    "explain_partition",
    "federated",
    "finalize",
    "hyper",
    "hyper_learning",
    "lml",
    "loggers",
    "loss_matrix",
    "mean_loss",
    "merge",
    "models",
    "nn",
    "optim",
    "partition",
    "per_subnetwork",
    "reassign",
    "register",
    "step_hyper",
    "step_lookahead",
    "step_weights",
    "stn",
    "subnetwork",
    "sweep",
    "tune",
    "weights_learning",
    "without_rule",
]

check_companion(Path(__file__).parent)
