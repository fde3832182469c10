"""Losses of unseen data: the default loss, the loss of the best constant prediction, and a classifier's temperature."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partnets.data.batch import Forward
from partnets.utils.losses import (
    BINARY,
    BINARY_OF_LOGITS,
    CROSS_ENTROPIES,
    OF_CLASSES,
    SQUARED,
    Loss,
    entropy,
    ignored,
    name_of,
    scores,
    summed,
    token_cross_entropy,
    weighs,
)
from partnets.utils.targets import are_probabilities, is_binary

# Temperatures at which unseen data are judged, and the number of points on a polynomial fitted to these losses.
TEMPERATURES, TRIED = tuple(2 ** (i / 2) for i in range(5)), 401
# The prior's standard deviation of log T, so that few unseen examples do not choose a T far from 1. Of .25, .5 and no
# prior, .5 was best on the problems used to choose defaults. T below 1 is excluded: with it, undertrained networks look
# as good as others.
SPREAD = 0.5


def usual_loss(output: Any, y: Any, targets: Callable[[], Tensor]) -> Loss:
    """Return the cross-entropy, its binary version, or the squared error, by a batch's outputs and targets.

    `targets` returns many targets, since those of one batch may be zeros and ones by chance.
    """
    output = scores(output)
    if not isinstance(output, Tensor) or not isinstance(y, Tensor):
        raise ValueError(
            f"the network returns a {type(output).__name__} for targets of type {type(y).__name__}; pass loss=, a"
            " function of both that returns the mean negative log-likelihood."
        )
    if y.is_floating_point():
        if output.shape != y.shape or not is_binary(y):
            rows = output.shape == y.shape and y.dim() == 2 and y.shape[1] > 1
            return F.cross_entropy if rows and are_probabilities(y) else F.mse_loss
        every = targets()
        if not is_binary(every):
            return F.mse_loss
        rows = every.reshape(-1, y.shape[-1]) if y.dim() > 1 else every[:, None]
        if rows.shape[1] > 1 and len(rows) > 16 and bool((rows.sum(1) == 1).all()):
            raise ValueError(
                f"each of the targets {list(y.shape)} has a single one: pass y.argmax(1) as the classes; or, if an"
                " example may have several labels, loss=F.binary_cross_entropy_with_logits."
            )
        return F.binary_cross_entropy_with_logits
    if output.dim() == y.dim() + 1 and output.dim() > 2 and output.shape[:-1] == y.shape:
        if output[:, 0].shape == y.shape:
            raise ValueError(
                f"the outputs are {list(output.shape)}, where either the second or the last dimension may be the"
                " classes; pass loss=F.cross_entropy for the second, or loss=lambda output, y:"
                " F.cross_entropy(output.flatten(0, -2), y.flatten()) for the last."
            )
        return token_cross_entropy
    return F.cross_entropy


def guessed_nats(loss: Any, judged: Sequence[tuple[Any, Any]]) -> float | None:
    """Return the loss of the best constant prediction in nats, which a network that has learned must undercut.

    For torch's losses, the best constant is known. For others, it is the best weighted mean of the outputs, as a
    constant outside of their range may be impossible for the network. A squared error counts as n / 2 log(error) for n
    numbers. None if outputs are not tensors of one shape, or targets differ in shape.

    Args:
        judged: outputs and targets of each batch.
    """
    name, targets = name_of(loss), [y for _, y in judged]
    of_classes = name in OF_CLASSES
    soft = of_classes and any(isinstance(y, Tensor) and y.is_floating_point() for y in targets)
    if soft or weighs(loss) or not (of_classes or name in BINARY | SQUARED):
        return _guessed_from_outputs(loss, judged)
    if not targets or not all(isinstance(y, Tensor) and y.shape[1:] == targets[0].shape[1:] for y in targets):
        return None
    y = torch.cat([each.cpu() for each in targets])
    if of_classes:
        return entropy(y[y != ignored(loss)].bincount())
    y = y.double().flatten(1) if y.dim() > 1 else y.double()[:, None]
    if name in BINARY:
        ones = y.sum(0)
        return entropy(torch.stack([ones, len(y) - ones]))
    error = (y - y.mean(0)).square().mean()
    return y.numel() / 2 * math.log(max(float(error), 1e-30))


def _guessed_from_outputs(loss: Any, judged: Sequence[tuple[Any, Any]]) -> float | None:
    """Return the lowest total loss if all outputs are replaced by one weighted mean of them."""
    outputs = [output for output, _ in judged]
    if not outputs or not all(isinstance(each, Tensor) and each.dim() and each.is_floating_point() for each in outputs):
        return None
    if any(each.shape[1:] != outputs[0].shape[1:] for each in outputs):
        return None
    rows, found = torch.cat(outputs).detach(), []
    weights = torch.zeros(len(rows), device=rows.device, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=50, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        constant = torch.tensordot(weights.softmax(0).to(rows.dtype), rows, 1)
        total = sum(summed(loss, constant.expand_as(output), y, len(output))[0] for output, y in judged)
        found.append(float(total.detach()))
        if total.requires_grad:
            total.backward()
        return total

    with torch.enable_grad():
        optimizer.step(closure)
    return min((value for value in found if math.isfinite(value)), default=None)


def has_temperature(loss: Loss) -> bool:
    """Return whether a loss takes logits, which a temperature divides (Guo et al. 2017)."""
    return name_of(loss) in CROSS_ENTROPIES | BINARY_OF_LOGITS


def divided(output: Any, temperature: float) -> Any:
    """Return the logits of an output, divided by a temperature; the output itself if that is 1."""
    return output if temperature == 1.0 else scores(output) / temperature


class AtTemperatures:
    """A forward(network, batch) that also adds up the loss of its outputs at each temperature above 1, in `nats`."""

    def __init__(self, forward: Forward, loss: Loss) -> None:
        self.forward, self.loss = forward, loss
        self.nats = [0.0] * (len(TEMPERATURES) - 1)

    def __call__(self, network: nn.Module, batch: Any) -> tuple[Any, Any]:
        output, y = self.forward(network, batch)
        for i, temperature in enumerate(TEMPERATURES[1:]):
            self.nats[i] += summed(self.loss, divided(output, temperature), y, len(y))[0].item()
        return output, y


def best_temperature(nats: Sequence[float]) -> tuple[float, float]:
    """Return the lowest loss and its temperature in [1, 4], under the prior of log T, by the loss at TEMPERATURES."""
    logs = numpy.log(TEMPERATURES)
    found = numpy.array(nats) + logs**2 / (2 * SPREAD**2)
    if not numpy.isfinite(found).all():
        return nats[0], 1.0
    tried = numpy.linspace(0.0, logs[-1], TRIED)
    losses = numpy.polynomial.Polynomial.fit(logs, found, len(logs) - 1)(tried)
    least = losses.argmin()
    return (float(losses[least]), math.exp(tried[least])) if least else (nats[0], 1.0)
