"""The temperature of a classifier, by which its logits are divided, fitted to held-out data (Guo et al. 2017)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy
from torch import nn

from partnets.data.batch import Forward, Loss, scores, summed
from partnets.utils.likelihood import BINARY_OF_LOGITS, name_of
from partnets.utils.targets import is_of_classes

# Temperatures at which unseen data are judged, and the number of points on a polynomial fitted to these losses.
TEMPERATURES, TRIED = tuple(2 ** (i / 2) for i in range(5)), 401
# The prior's standard deviation of log T, so that few unseen examples do not choose a T far from 1. Of .25, .5 and no
# prior, .5 was best on the problems used to choose defaults. T below 1 is excluded: with it, undertrained networks look
# as good as others.
SPREAD = 0.5


def has_temperature(loss: Loss) -> bool:
    """Return whether a loss takes logits, which a temperature divides.

    Example:
        >>> has_temperature(nn.CrossEntropyLoss()), has_temperature(nn.MSELoss())
        (True, False)
    """
    return is_of_classes(loss) or name_of(loss) in BINARY_OF_LOGITS


def divided(output: Any, temperature: float) -> Any:
    """Return the logits of an output, divided by a temperature; the output itself if that is 1."""
    return output if temperature == 1.0 else scores(output) / temperature


class AtTemperatures:
    """A forward(network, batch) that also adds up the loss of its outputs at each temperature above 1.

    Args:
        forward: returns outputs and targets.
        loss: a loss of logits; see has_temperature.

    Attributes:
        nats: the summed loss for each of TEMPERATURES[1:].

    Example:
        >>> forward = AtTemperatures(lambda network, batch: batch, nn.functional.cross_entropy)
        >>> import torch
        >>> _ = forward(None, (torch.tensor([[8.0, 0.0], [8.0, 0.0]]), torch.tensor([0, 1])))
        >>> [round(nats, 2) for nats in forward.nats]
        [5.66, 4.04, 2.94, 2.25]
    """

    def __init__(self, forward: Forward, loss: Loss) -> None:
        self.forward, self.loss = forward, loss
        self.nats = [0.0] * (len(TEMPERATURES) - 1)

    def __call__(self, network: nn.Module, batch: Any) -> tuple[Any, Any]:
        output, y = self.forward(network, batch)
        for i, temperature in enumerate(TEMPERATURES[1:]):
            self.nats[i] += summed(self.loss, divided(output, temperature), y, len(y))[0].item()
        return output, y


def best(nats: Sequence[float]) -> tuple[float, float]:
    """Return the lowest loss and its temperature in [1, 4], under the prior of log T.

    Args:
        nats: the loss at each of TEMPERATURES.

    Example:
        >>> best([30.0, 20.0, 16.0, 15.0, 17.0])  # at T = 2.32 the prior is 1.4 nats
        (16.68..., 2.32...)
        >>> best([10.0, 11.0, 12.0, 13.0, 14.0])
        (10.0, 1.0)
    """
    logs = numpy.log(TEMPERATURES)
    found = numpy.array(nats) + logs**2 / (2 * SPREAD**2)
    if not numpy.isfinite(found).all():
        return nats[0], 1.0
    tried = numpy.linspace(0.0, logs[-1], TRIED)
    losses = numpy.polynomial.Polynomial.fit(logs, found, len(logs) - 1)(tried)
    least = losses.argmin()
    return (float(losses[least]), math.exp(tried[least])) if least else (nats[0], 1.0)
