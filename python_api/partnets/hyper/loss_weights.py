"""ClassWeights, SourceWeights and ExampleWeights: learned weights of the examples in a training loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partnets.hyper.learned import Learned, Precise
from partnets.hyper.ranges import Range, logarithmic
from partnets.hyper.training_loss import TrainingLoss, check_numbers
from partnets.utils.in_thread import SEVERAL
from partnets.utils.likelihood import IGNORED

# Range of one weight relative to another.
WEIGHTS = logarithmic(1e-3, 1e3)
# Hidden units of the network that maps losses to weights (Shu et al. 2019).
HIDDEN = 100


def _check_alone() -> None:
    """Raise RuntimeError if the batch has examples of several subnetworks, which a mean over the batch would mix."""
    if SEVERAL.get():
        raise RuntimeError(
            "weights have a mean of 1 in a batch, but its examples are of several subnetworks: those of later chunks"
            " would change the weights of earlier partitions. Compute each subnetwork's loss in a separate call,"
            " as Trainer(one_pass=True) does."
        )


def _of_counted(counted: Tensor | None, *of_examples: Tensor) -> tuple[Tensor, ...]:
    """Return the entries of each tensor for the examples that count; all entries if counted is None."""
    return of_examples if counted is None else tuple(each[counted] for each in of_examples)


class _Weighted(TrainingLoss):
    """The base class of positive weights, normalised to a mean of 1 so that they do not act as a learning rate."""

    leaves_out = True

    def __init__(self, loss: Callable, weights: int | Sequence[str], range: Range) -> None:
        super().__init__(loss)
        names = None if isinstance(weights, int) else list(weights)
        count = weights if names is None else len(names)
        if count < 2:
            raise ValueError(f"there are {count} weights, but they are relative; pass two names or more.")
        self.weights = Learned([1.0] * count, range, names=names)

    def normalised(self, which: Tensor) -> Tensor:
        """Return these weights, divided by their mean."""
        _check_alone()
        weights = self.weights()[which]
        return weights / weights.mean()

    def values(self) -> dict[str, float]:
        """Return the weights, divided by their mean."""
        found = self.weights.values("weights")
        mean = sum(found.values()) / len(found)
        return {name: value / mean for name, value in found.items()}


class ClassWeights(_Weighted):
    """The cross-entropy with a learned weight for each class, for rare or mislabelled classes.

    In each batch the mean weight of the labels is 1, as in torch's mean with class weights.

    Args:
        classes: the number of classes, or their names.
        range: range of the weights relative to each other.

    Attributes:
        weights: hyper.Learned, one for each class; values() normalises them to a mean of 1.

    Shapes:
        logits [batch, classes, ...] and labels [batch, ...]; returns a vector of losses, without labels of -100.

    Raises:
        ValueError: there are fewer than two classes.

    Example:
        >>> weights = ClassWeights(("cat", "dog"))
        >>> weights.weights.assign([1.0, 3.0])
        >>> weights.values()
        {'cat': 0.5, 'dog': 1.5}
        >>> weights(torch.zeros(2, 2), torch.tensor([0, 1]))
        tensor([0.3466, 1.0397], grad_fn=<MulBackward0>)
    """

    def __init__(self, classes: int | Sequence[str], *, range: Range = WEIGHTS) -> None:
        super().__init__(F.cross_entropy, classes, range)

    def trained(self, output: Tensor, y: Tensor) -> Tensor:
        counts = y != IGNORED
        return F.cross_entropy(output, y, reduction="none")[counts] * self.normalised(y[counts])


class SourceWeights(_Weighted):
    """A training loss with a learned weight per data source, such as web text and books, or clean and noisy labels.

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

    def __init__(
        self,
        sources: int | Sequence[str],
        loss: Callable[[Any, Any], Tensor] = F.cross_entropy,
        *,
        range: Range = WEIGHTS,
    ) -> None:
        super().__init__(loss, sources, range)

    def targets(self, y: Any) -> Any:
        return y[0]

    def trained(self, output: Any, y: Any) -> Tensor:
        losses = self.losses(output, y)
        check_numbers("sources", y[1], losses, len(self.weights()))
        losses, sources = _of_counted(self.counted(output, y), losses, y[1])
        return losses * self.normalised(sources)


class ExampleWeights(Precise, TrainingLoss):
    """A training loss with a learned weight for each example, for data with many wrong labels.

    The weight is either computed from the example's loss by a small network (Shu et al. 2019), the same for all data,
    or a separate number for each example (Ren et al. 2018). In the second case, the data must include each example's
    index: (x, (targets, index)). Numbers of the last chunk keep their initial values: it trains only the last
    partition, which no later chunk judges. In each batch the mean weight is 1.

    Args:
        examples: the number of examples, each with a separate number; None for a network.
        loss: see TrainingLoss.
        network: maps losses [batch, 1] to numbers [batch, 1], the logits of the weights; by default it has one hidden
            layer of 100 units.

    Attributes:
        network: the nn.Module, or None.
        scores: the logits of the weights, a parameter [examples], or None.

    Shapes:
        output [batch, ...] and targets, or (targets, index int64 [batch]); returns the losses of the examples that are
        not ignored, a vector.

    Raises:
        ValueError: examples and network are both given, examples is below 1, or see TrainingLoss.losses.

    Example:
        >>> weights = ExampleWeights(examples=5)
        >>> logits, y, index = torch.zeros(2, 3), torch.tensor([0, 2]), torch.tensor([4, 1])
        >>> weights(logits, (y, index))
        tensor([1.0986, 1.0986], grad_fn=<MulBackward0>)
        >>> weights.values()
        {'lowest weight': 0.5, 'highest weight': 0.5}
    """

    leaves_out = True

    def __init__(
        self,
        examples: int | None = None,
        loss: Callable[[Any, Any], Tensor] = F.cross_entropy,
        *,
        network: nn.Module | None = None,
    ) -> None:
        super().__init__(loss)
        if (examples is not None and network is not None) or (examples is not None and examples < 1):
            raise ValueError(f"examples={examples}, network={network}; pass a number of at least 1, or a network.")
        self.scores = None if examples is None else nn.Parameter(torch.zeros(examples))
        self.detaches = examples is None  # detaches the losses, the network's input
        if examples is None and network is None:
            network = nn.Sequential(nn.Linear(1, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))
        self.network = network

    def targets(self, y: Any) -> Any:
        return y if self.scores is None else y[0]

    def trained(self, output: Any, y: Any) -> Tensor:
        _check_alone()
        losses, counted = self.losses(output, y), self.counted(output, y)
        if self.scores is None:
            (losses,) = _of_counted(counted, losses)
            weights = self.network(losses.detach()[:, None].to(self._parameter().dtype))[:, 0].sigmoid()
        else:
            check_numbers("indices", y[1], losses, len(self.scores))
            losses, indices = _of_counted(counted, losses, y[1])
            weights = self.scores[indices].sigmoid()
        return losses * (weights / weights.mean())

    def values(self) -> dict[str, float]:
        """Return the lowest and the highest weight of the examples, or the weights of losses 0 and 5."""
        if self.scores is not None:
            ends = torch.stack([self.scores.min(), self.scores.max()]).sigmoid().tolist()
            return dict(zip(("lowest weight", "highest weight"), ends, strict=True))
        with torch.no_grad():
            low, high = self.network(self._parameter().new_tensor([[0.0], [5.0]]))[:, 0].sigmoid().tolist()
        return {"weight of loss 0": low, "weight of loss 5": high}

    def _parameter(self) -> nn.Parameter:
        """Return a parameter of the network, for its dtype and device."""
        return next(self.network.parameters())
