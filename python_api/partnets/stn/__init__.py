"""Self-tuning networks (MacKay et al. 2019): weights as a learned function of the hyperparameters.

stn.convert(network, hyper=dropout)
trainer = stn.Trainer(*partnets.held_out(network, data, validation=0.2), hyper=dropout)
trainer.fit(3000)
ordinary = stn.freeze(network)
"""

from partnets.stn.attention import HyperMultiheadAttention
from partnets.stn.conv import HyperConv1d, HyperConv2d, HyperConv3d
from partnets.stn.converting import convert, freeze
from partnets.stn.embedding import HyperEmbedding
from partnets.stn.layer import HyperLayer
from partnets.stn.linear import HyperLinear
from partnets.stn.norm import (
    HyperBatchNorm1d,
    HyperBatchNorm2d,
    HyperBatchNorm3d,
    HyperGroupNorm,
    HyperLayerNorm,
    HyperRMSNorm,
)
from partnets.stn.recurrent import HyperGRU, HyperLSTM, HyperRNN
from partnets.stn.step import step_hyper, step_weights
from partnets.stn.trainer import Trainer
from partnets.stn.vector import HyperVector

__all__ = [
    "HyperBatchNorm1d",
    "HyperBatchNorm2d",
    "HyperBatchNorm3d",
    "HyperConv1d",
    "HyperConv2d",
    "HyperConv3d",
    "HyperEmbedding",
    "HyperGRU",
    "HyperGroupNorm",
    "HyperLSTM",
    "HyperLayer",
    "HyperLayerNorm",
    "HyperLinear",
    "HyperMultiheadAttention",
    "HyperRMSNorm",
    "HyperRNN",
    "HyperVector",
    "Trainer",
    "convert",
    "freeze",
    "step_hyper",
    "step_weights",
]
