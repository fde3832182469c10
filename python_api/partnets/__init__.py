"""Partitioned neural networks (Mlodozeniec, Reisser and Louizos, ICLR 2023): hyperparameters in one training run.

Partition a model and its data, and train weights and hyperparameters together:

    model = partnets.partition(hyper.Averaged(augmentation := hyper.Affine(), network), (0.8, 0.1, 0.1))
    chunks = partnets.chunk((images, labels), (0.8, 0.1, 0.1))
    history = partnets.Trainer(model, chunks, hyper=augmentation).fit(1000)
"""

from partnets import baselines, callbacks, data, hyper, loggers, models, optim
from partnets.attention import MultiheadAttention
from partnets.batch_norms import BatchNorm1d, BatchNorm2d, BatchNorm3d
from partnets.chunks import Chunks, chunk
from partnets.conv2d import Conv1d, Conv2d, Conv3d
from partnets.conv_transpose2d import ConvTranspose1d, ConvTranspose2d, ConvTranspose3d
from partnets.embedding import Embedding, EmbeddingBag
from partnets.evaluation import accuracy, loss_matrix, mean_loss, per_subnetwork
from partnets.finalize import finalize
from partnets.history import History
from partnets.linear import Bilinear, Linear
from partnets.lml import lml
from partnets.loader import Loader
from partnets.merge import merge
from partnets.norms import GroupNorm, LayerNorm, RMSNorm
from partnets.partition import partition, register, without_rule
from partnets.recomputation import checkpoint_contexts
from partnets.recurrent import GRU, LSTM, RNN
from partnets.subnetwork import subnetwork
from partnets.trainer import Trainer

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
    "LayerNorm",
    "Linear",
    "Loader",
    "MultiheadAttention",
    "RMSNorm",
    "Trainer",
    "accuracy",
    "baselines",
    "callbacks",
    "checkpoint_contexts",
    "chunk",
    "data",
    "finalize",
    "hyper",
    "lml",
    "loggers",
    "loss_matrix",
    "mean_loss",
    "merge",
    "models",
    "optim",
    "partition",
    "per_subnetwork",
    "register",
    "subnetwork",
    "without_rule",
]
