"""Self-tuning networks (MacKay et al. 2019): weights as a learned function of the hyperparameters.

Convert a network, train it and freeze its hyperparameters:

    stn.convert(network, hyper=dropout)
    trainer = stn.Trainer(*partnets.held_out(network, data, validation=0.2), hyper=dropout)
    trainer.fit(3000)
    dense = stn.freeze(network)
"""

from partnets.stn import attention, layers, norm, recurrent  # noqa: F401 - each registers its layers
from partnets.stn.converting import convert, freeze
from partnets.stn.layer import HyperLayer
from partnets.stn.step import step_hyper, step_weights
from partnets.stn.trainer import Trainer
from partnets.stn.vector import HyperVector

__all__ = ["HyperLayer", "HyperVector", "Trainer", "convert", "freeze", "step_hyper", "step_weights"]
