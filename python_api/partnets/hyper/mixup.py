"""Mixup: random mixing of training examples, in a learned proportion."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Beta

from partnets.hyper.hyperparameter import Hyperparameter
from partnets.hyper.learned import Learned, check_real
from partnets.hyper.ranges import Range, logarithmic
from partnets.utils.in_thread import InThread
from partnets.utils.losses import Loss, check_mean, mean, of_each_that_counts, plain, scores

# Wider than the range used in practice.
ALPHAS = logarithmic(0.01, 10.0)


class Mixup(Hyperparameter):
    """A layer that replaces x in training by λ x + (1 - λ) x', with another x' of the batch (Zhang et al. 2018).

    λ ~ Beta(α, α), one per batch; α learns by lookahead, through the draw. Put the module in front of the network, and
    pass its `loss` as the training loss: λ times the loss of the example's targets plus (1 - λ) times that of the other
    example's targets. In evaluation mode nothing is mixed.

    Args:
        alpha: the initial α: 0.2 mixes little; with 1, λ is uniform.
        loss: loss(output, targets), which returns the mean or the loss of each target.
        range: range of α.

    Shapes:
        x [batch, ...], floating point; returns the same shape.

    Raises:
        ValueError: alpha is outside the range, or the loss is a sum over the batch.
        RuntimeError: loss is called before a batch was mixed, or for another batch size.

    Example:
        >>> mixup = Mixup(1.0)
        >>> x, y = torch.eye(4), torch.arange(4)
        >>> mixed = mixup(x)
        >>> mixed.sum(1)
        tensor([1., 1., 1., 1.], grad_fn=<SumBackward1>)
        >>> mixup.loss(torch.zeros(4, 4), y)
        tensor(1.3863, grad_fn=<AddBackward0>)
    """

    hyper_gradient = "lookahead"
    acts_in_loss = acts_on_inputs = True

    def __init__(
        self, alpha: float = 0.2, loss: Callable[[Any, Any], Tensor] = F.cross_entropy, *, range: Range = ALPHAS
    ) -> None:
        super().__init__()
        range.check("alpha", alpha)
        check_mean(loss)
        self.alpha, self._loss = Learned(alpha, range), loss
        self._mixed = InThread()

    def forward(self, x: Tensor) -> Tensor:
        check_real(self, x)
        if not self.training:
            return x
        if torch.compiler.is_compiling():  # a compiled graph would not store the draw for the loss
            return torch.compiler.disable(self._of_others)(x)
        return self._of_others(x)

    def _of_others(self, x: Tensor) -> Tensor:
        alpha = self.alpha()
        share = Beta(alpha, alpha).rsample()
        others = torch.randperm(len(x), device=x.device)
        self._mixed.now = share, others
        share = share.to(x.dtype)
        return share * x + (1 - share) * x[others]

    @property
    def loss(self) -> Loss:
        """Return the training loss of outputs and targets, for the batch that this thread mixed last.

        In evaluation mode it is the inner loss; so is its `plain`, for each target that counts.
        """
        return _OfMixed(self)

    def to_torch(self) -> nn.Module:
        """Return nn.Identity()."""
        return nn.Identity()


@dataclass(frozen=True)
class _OfMixed:
    """The loss of a Mixup."""

    mixup: Mixup
    acts_in_loss = True

    def __call__(self, output: Any, targets: Tensor) -> Tensor:
        output, loss, mixed = scores(output), self.mixup._loss, self.mixup._mixed.get()
        if not self.mixup.training:
            return plain(loss)(output, targets)
        if mixed is None or len(mixed[1]) != len(targets):
            raise RuntimeError(
                f"there are {len(targets)} targets, and {'nothing' if mixed is None else len(mixed[1])} was mixed last;"
                " call the model that has this module in front, once, before each loss."
            )
        share, others = mixed
        one, other = (mean(loss, output, y) for y in (targets, targets[others]))
        return share * one + (1 - share) * other

    def plain(self, output: Any, targets: Tensor) -> Tensor:
        return of_each_that_counts(plain(self.mixup._loss), scores(output), targets)
