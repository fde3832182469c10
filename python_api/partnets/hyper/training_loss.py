"""TrainingLoss, LabelSmoothing and SourceWeights: training losses with learned parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partnets.hyper.dropout import RATES, check_rate
from partnets.hyper.hyperparameter import Hyperparameter
from partnets.hyper.learned import Learned
from partnets.hyper.ranges import Range, logarithmic
from partnets.utils.in_thread import SEVERAL
from partnets.utils.losses import IGNORED, check_mean, counted, of_each, of_each_that_counts, plain, scores

# Range of one weight relative to another.
WEIGHTS = logarithmic(1e-3, 1e3)


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
        output = scores(output)
        if self.training:
            found = self.trained(output, y)
            counted = self.counted(output, y) if found.dim() and not self.leaves_out else None
            return found if counted is None else found[counted]
        return plain(self.loss)(output, self.targets(y))

    def to_torch(self) -> nn.Module:
        """Return nn.Identity()."""
        return nn.Identity()

    def trained(self, output: Any, y: Any) -> Tensor:
        """Return the training loss of each example, [batch], or its mean over examples that count."""
        raise NotImplementedError(f"{type(self).__name__} has no trained(output, y); define it.")

    def targets(self, y: Any) -> Any:
        """Return the part of y that the inner loss takes."""
        return y

    def plain(self, output: Any, y: Any) -> Tensor:
        """Return the inner loss of each target that counts, or its mean if it gives no other; it judges held-out data.

        Torch's losses are used without label smoothing and class weights.
        """
        return of_each_that_counts(plain(self.loss), scores(output), self.targets(y))

    def losses(self, output: Any, y: Any) -> Tensor:
        """Return the inner loss of each example, [batch]; with several targets, the mean of those not ignored.

        Raises:
            ValueError: the inner loss returns only a mean.
        """
        targets = self.targets(y)
        found = of_each(self.loss)(output, targets)
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
            which = counted(self.loss, partial(of_each(self.loss), output, targets), output, targets)
        return None if which is None else which.flatten(1).any(1) if which.dim() > 1 else which


class LabelSmoothing(TrainingLoss):
    """The cross-entropy as a training loss, with label smoothing s for each example (Szegedy et al. 2016).

    The loss is (1 - s) (-log p_y) + s times the mean of -log p over the classes, as in
    torch.nn.functional.cross_entropy. Pass it as `loss`, and also put it at the end of the model, where it passes the
    logits through. In evaluation mode it is the cross-entropy without smoothing, which validation uses.

    Args:
        smoothing: the initial s.
        range: range of s, inside [0, 1].

    Shapes:
        logits [batch, classes, ...] and labels [batch, ...]; returns a vector of losses, without labels of -100. A
        call with logits only returns them.

    Raises:
        ValueError: smoothing is outside the range, or the range exceeds [0, 1].

    Example:
        >>> import torch
        >>> smoothing = LabelSmoothing(0.1)
        >>> logits, y = torch.randn(3, 4), torch.tensor([0, 3, 1])
        >>> expected = F.cross_entropy(logits, y, label_smoothing=0.1)
        >>> torch.allclose(smoothing(logits, y).mean(), expected)
        True
    """

    per_example = True
    # The loss of held-out data.
    plain = staticmethod(F.cross_entropy)

    def __init__(self, smoothing: float = 0.1, *, range: Range = RATES) -> None:
        super().__init__()
        check_rate("smoothing", smoothing, range)
        self.smoothing = Learned(smoothing, range)

    def forward(self, logits: Tensor, labels: Tensor | None = None) -> Tensor:
        if labels is None:
            return logits
        logits = scores(logits)
        counts, losses = labels != IGNORED, F.cross_entropy(logits, labels, reduction="none")
        if self.training:
            losses = losses + self.smoothing(labels) * (-logits.log_softmax(1).mean(1) - losses)
        return losses[counts]

    def to_torch(self) -> nn.Module:
        """Return nn.Identity()."""
        return nn.Identity()


class SourceWeights(TrainingLoss):
    """A training loss with a learned weight per data source, such as web text and books, or clean and noisy labels.

    A source may also be a class, or a single example (Ren et al. 2018).

    The data must name each example's source: (x, (targets, source)), with source an int from 0. The mean weight of the
    examples is 1 in each batch, so that the weight of a large source does not act as a learning rate.

    Args:
        sources: the number of sources, or their names.
        loss: see TrainingLoss.
        range: range of the weights relative to each other.

    Attributes:
        weights: hyper.Learned, one for each source; values() normalises them to a mean of 1.

    Shapes:
        output [batch, ...] and (targets, source int64 [batch]); returns the losses of the examples that are not
        ignored, a vector.

    Raises:
        ValueError: there are fewer than two sources, an example has no valid source, or see TrainingLoss.losses.

    Example:
        >>> weights = SourceWeights(("books", "web"))
        >>> weights.weights.assign([3.0, 1.0])
        >>> weights(torch.zeros(2, 2), (torch.tensor([0, 1]), torch.tensor([0, 1])))
        tensor([1.0397, 0.3466], grad_fn=<MulBackward0>)
    """

    leaves_out = True

    def __init__(
        self,
        sources: int | Sequence[str],
        loss: Callable[[Any, Any], Tensor] = F.cross_entropy,
        *,
        range: Range = WEIGHTS,
    ) -> None:
        super().__init__(loss)
        names = None if isinstance(sources, int) else list(sources)
        count = sources if names is None else len(names)
        if count < 2:
            raise ValueError(f"there are {count} sources, but their weights are relative; pass two names or more.")
        self.weights = Learned([1.0] * count, range, names=names)

    def targets(self, y: Any) -> Any:
        return y[0]

    def trained(self, output: Any, y: Any) -> Tensor:
        check_one_subnetwork()
        losses, sources, counted = self.losses(output, y), y[1], self.counted(output, y)
        check_numbers("sources", sources, losses, len(self.weights()))
        if counted is not None:
            losses, sources = losses[counted], sources[counted]
        weights = self.weights()[sources]
        return losses * (weights / weights.mean())

    def values(self) -> dict[str, float]:
        """Return the weights, divided by their mean."""
        found = self.weights.values("weights")
        mean = sum(found.values()) / len(found)
        return {name: value / mean for name, value in found.items()}


def check_one_subnetwork() -> None:
    """Raise RuntimeError if the batch has examples of several subnetworks, which a mean over the batch would mix."""
    if SEVERAL.get():
        raise RuntimeError(
            "weights have a mean of 1 in a batch, but its examples are of several subnetworks: those of later chunks"
            " would change the weights of earlier partitions. Compute each subnetwork's loss in a separate call,"
            " as Trainer(one_pass=True) does."
        )


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
