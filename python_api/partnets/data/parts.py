"""Parts: a batch in parts, for gradient accumulation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any


class Parts(list[Any]):
    """A batch as a list of parts, over which a step accumulates gradients, with the memory of one part.

    partnets.step_weights, step_hyper and step_lookahead call the loss with each part and use the weighted mean. This is
    the loss of the whole batch if that is a mean over examples and the parts are equal, or a mean over targets with the
    parts' shares of the targets as weights. Normalisation layers, Mixup, and weights that are relative within a batch,
    as of SourceWeights, see a part at a time. Exact lookahead keeps the graphs of all parts.

    Args:
        parts: the parts.
        weights: a number for each part, with a sum of 1; equal if None. Parts with weight 0 are left out.

    Example:
        >>> import partnets, torch
        >>> model = partnets.partition(torch.nn.Linear(4, 2), (0.8, 0.2))
        >>> optimizer = partnets.optim.SGD(model, lr=0.1)
        >>> x, y = torch.ones(6, 4), torch.arange(6) % 2
        >>> def loss(batch):
        ...     return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
        >>> whole = loss((x, y)).item()
        >>> parts = Parts([(x[:3], y[:3]), (x[3:], y[3:])])
        >>> abs(partnets.step_weights(model, optimizer, 2, parts, loss).item() - whole) < 1e-6
        True
    """

    def __init__(self, parts: Iterable[Any] = (), weights: Sequence[float] | None = None) -> None:
        super().__init__(parts)
        if weights is not None and (len(weights) != len(self) or abs(sum(weights) - 1) > 1e-6 or min(weights) < 0):
            raise ValueError(f"weights={weights} of {len(self)} parts; pass one for each, with a sum of 1.")
        self.weights = weights


def weighted_parts(batch: Any) -> Iterator[tuple[Any, float]]:
    """Yield each part of a batch with its weight, if that is not 0; a batch that is not Parts is the only part.

    Raises:
        ValueError: there are no parts.
    """
    parts = batch if isinstance(batch, Parts) else Parts([batch])
    if not parts:
        raise ValueError("a batch has no parts; pass at least one.")
    weights = [1 / len(parts)] * len(parts) if parts.weights is None else parts.weights
    return ((part, weight) for part, weight in zip(parts, weights, strict=True) if weight)
