"""Best: a model's state at its highest L_ML, for model selection and early stopping."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from partnets.subnetworks.state import LEARNED, MAP, weights_of
from partnets.utils.shards import whole


@dataclass
class Best:
    """The parameters and buffers of a model, including ψ, at the highest L_ML so far (Appendix I.4, early stopping).

    Attributes:
        step: the step of the highest L_ML; 0 before the first evaluation.
        lml: the highest L_ML, in nats.
        state: a copy of each parameter and buffer, by dotted name.
        assignment: the fingerprint of the partitions, assignment(model). If it changes, as by load_state_dict, the next
            evaluation replaces the best.

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
    assignment: str = ""

    def offer(self, model: nn.Module, step: int, lml: float) -> bool:
        """Keep a copy of the model and return True if its L_ML is higher than before or partitions have moved."""
        now = assignment(model)
        if not lml > self.lml and (self.assignment == now or not self.state):
            return False
        self.step, self.lml, self.assignment = step, lml, now
        self.state = copies(model)
        return True

    @torch.no_grad()
    def restore(self, model: nn.Module) -> None:
        """Copy the kept values into the model.

        Raises:
            ValueError: no state has been kept, or partitions have moved since.
        """
        if not self.state:
            raise ValueError("no state has been kept; evaluate L_ML first, as Trainer(..., lml_every=100) does.")
        if self.assignment not in ("", assignment(model)):
            raise ValueError(
                f"the best state is of step {self.step}, and partitions have moved since, as by load_state_dict: its"
                " weights would belong to other partitions and carry later chunks into earlier ones. Evaluate L_ML"
                " after the move; to keep an earlier state with its partitions, save the model."
            )
        for name, tensor in named_tensors(model):
            tensor.copy_(self.state[name])


def assignment(model: nn.Module) -> str:
    """Return a fingerprint of the maps of entries to partitions; "" if the model has no maps."""
    maps = hashlib.sha256()
    found = [module._buffers[name + MAP] for module, name in weights_of(model)]
    for map in found:
        maps.update(whole(map).cpu().numpy())
    return maps.hexdigest() if found else ""


def copies(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of each parameter and buffer, by dotted name."""
    return {name: tensor.detach().clone() for name, tensor in named_tensors(model)}


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield each parameter and buffer with its dotted name, except `learned_from`, which is filled only for a file."""
    yield from model.named_parameters()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name.rpartition(".")[2] != LEARNED)
