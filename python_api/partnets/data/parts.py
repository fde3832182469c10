"""Parts: a batch in parts, for gradient accumulation."""

from __future__ import annotations

from typing import Any


class Parts(list):
    """A batch as a list of parts of equal size, over which a step accumulates gradients, with the memory of one part.

    partnets.step_weights, step_hyper and step_lookahead call the loss with each part and use the mean. This is the loss
    of the whole batch if that is a mean over examples; normalisation layers see a part at a time. Exact lookahead keeps
    the graphs of all parts.

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

    @classmethod
    def of(cls, batch: Any) -> Parts:
        """Return the parts of a batch; if it has none, the batch as the only part."""
        return batch if isinstance(batch, Parts) else cls([batch])
