"""Best: a model's state where its L_ML was highest, for model selection and early stopping."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


@dataclass
class Best:
    """The parameters and buffers of a model, ψ included, at the highest L_ML so far (Appendix I.4, early stopping).

    Attributes:
        step: when it was; 0 before the first evaluation.
        lml: in nats.
        state: a copy of each parameter and buffer, by its dotted name.

    Example:
        >>> model, best = nn.Linear(1, 1), Best()
        >>> best.offer(model, step=10, lml=-5.0), best.offer(model, step=20, lml=-6.0)
        (True, False)
        >>> best.restore(model)
        >>> best.step
        10
    """

    step: int = 0
    lml: float = -float("inf")
    state: dict[str, Tensor] = field(default_factory=dict)

    def offer(self, model: nn.Module, step: int, lml: float) -> bool:
        """Keeps a copy of the model if its L_ML is higher than before; says whether it is."""
        if not lml > self.lml:
            return False
        self.step, self.lml = step, lml
        self.state = copies(model)
        return True

    @torch.no_grad()
    def restore(self, model: nn.Module) -> None:
        """Copies the kept values into the model.

        Raises:
            ValueError: nothing has been kept.
        """
        if not self.state:
            raise ValueError("no state has been kept; evaluate L_ML first, as Trainer(..., lml_every=100) does.")
        for name, tensor in tensors(model):
            tensor.copy_(self.state[name])


def copies(model: nn.Module) -> dict[str, Tensor]:
    """A copy of each parameter and buffer, by its dotted name.

    Example:
        >>> list(copies(nn.Linear(1, 1)))
        ['weight', 'bias']
    """
    return {name: tensor.detach().clone() for name, tensor in tensors(model)}


def tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Each parameter and buffer, with its dotted name."""
    yield from model.named_parameters()
    yield from model.named_buffers()
