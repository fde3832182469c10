"""TrainingLoss: the base class of training losses with learned parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partnets.hyper.hyperparameter import Hyperparameter
from partnets.utils.likelihood import check_mean, counted, of_each, of_each_that_counts, plain


class TrainingLoss(Hyperparameter):
    """A loss with hyperparameters that trains weights, around a loss that judges held-out data.

    Pass it as `loss`, and also put it at the end of the model, where it passes the output through. In evaluation mode
    it is the inner loss of the targets; so is its `plain`, by which partnets.Trainer judges. Derive from it and define
    trained(output, y), with y as in the data, and targets(y) if y has more than the targets.

    Args:
        loss: the inner loss(output, targets): torch's, or a custom one that returns the loss of each example, [batch].

    Shapes:
        output and y; returns a mean, or the loss of each example, [batch]. A call with output only returns it.

    Raises:
        ValueError: the inner loss is a sum over the batch.

    Example:
        >>> import torch
        >>> class Focal(TrainingLoss):
        ...     "Lin et al. 2017: examples that are predicted well count less."
        ...     def __init__(self, gamma=2.0):
        ...         super().__init__()
        ...         self.gamma = hyper.Learned(gamma, hyper.positive)
        ...     def trained(self, output, y):
        ...         losses = self.losses(output, y)
        ...         return (1 - torch.exp(-losses)) ** self.gamma() * losses
        >>> from partnets import hyper
        >>> focal, logits, y = Focal(), torch.randn(3, 4), torch.tensor([0, 3, 1])
        >>> focal(logits, y).shape, torch.equal(focal.eval()(logits, y), F.cross_entropy(logits, y))
        (torch.Size([3]), True)
    """

    hyper_gradient = "lookahead"
    acts_in_loss, acts_on_inputs = True, False
    # Whether `trained` itself leaves out ignored examples.
    leaves_out = False

    def __init__(self, loss: Callable[[Any, Any], Tensor] = F.cross_entropy) -> None:
        super().__init__()
        check_mean(loss)
        self.loss = loss

    def forward(self, output: Any, y: Any = None) -> Any:
        if y is None:
            return output
        if self.training:
            found = self.trained(output, y)
            counted = self.counted(output, y) if found.dim() and not self.leaves_out else None
            return found if counted is None else found[counted]
        return plain(self.loss)(output, self.targets(y))

    def to_ordinary(self) -> nn.Module:
        """Return nn.Identity()."""
        return nn.Identity()

    def trained(self, output: Any, y: Any) -> Tensor:
        """Return the training loss of a batch, or of each example, [batch]."""
        raise NotImplementedError(f"{type(self).__name__} has no trained(output, y); define it.")

    def targets(self, y: Any) -> Any:
        """Return the part of y that the inner loss takes."""
        return y

    def plain(self, output: Any, y: Any) -> Tensor:
        """Return the inner loss of each target that counts, or its mean if it gives no other; it judges held-out data.

        Torch's losses are used without label smoothing and class weights.
        """
        return of_each_that_counts(plain(self.loss), output, self.targets(y))

    def losses(self, output: Any, y: Any) -> Tensor:
        """Return the inner loss of each example, [batch]; with several targets, the mean of those not ignored.

        Raises:
            ValueError: the inner loss returns only a mean.
        """
        targets = self.targets(y)
        found = self._of_each_target(output, targets)
        if not found.dim():
            raise ValueError(
                "the loss gives a mean, but each example has a weight; pass one of torch's losses, or one that returns"
                " the loss of each example."
            )
        if found.dim() == 1:
            return found
        which = counted(self.loss, lambda: found, output, targets)
        if which is None:
            return found.flatten(1).mean(1)
        return found.flatten(1).sum(1) / which.flatten(1).sum(1).clamp(min=1)

    def counted(self, output: Any, y: Any) -> Tensor | None:
        """Return which examples have a target that is not ignored, bool [batch]; None if all do."""
        targets = self.targets(y)
        with torch.no_grad():
            which = counted(self.loss, partial(self._of_each_target, output, targets), output, targets)
        return None if which is None else which.flatten(1).any(1) if which.dim() > 1 else which

    def _of_each_target(self, output: Any, targets: Any) -> Tensor:
        return of_each(self.loss)(output, targets)


def check_numbers(what: str, numbers: Any, losses: Tensor, count: int) -> None:
    """Raise ValueError unless numbers has one integer in 0..count - 1 for each example."""
    shown = list(numbers.shape) if isinstance(numbers, Tensor) else f"a {type(numbers).__name__}"
    if not isinstance(numbers, Tensor) or numbers.shape != losses.shape or numbers.is_floating_point():
        raise ValueError(
            f"the {what} are {shown}, of {len(losses)} examples; pass int64 [{len(losses)}] with the targets."
        )
    if numbers.numel() and not 0 <= int(numbers.min()) <= int(numbers.max()) < count:
        raise ValueError(
            f"the {what} are {int(numbers.min())} to {int(numbers.max())}; pass numbers in 0..{count - 1}."
        )
