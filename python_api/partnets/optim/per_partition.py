"""PerPartition: an elementwise optimiser of torch.optim, for one partition at a time (Appendix I.1)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from partkernels import gather_entries, scatter_entries
from partnets.optim import entrywise
from partnets.optim.base import Entries, PartitionedOptimizer


class PerPartition(PartitionedOptimizer):
    """An optimiser of torch.optim for one partition at a time; with C = 1, it equals that optimiser bitwise.

    A step gathers the entries of one partition, lets torch's optimiser step them as a tensor, and scatters them back.
    Each partition has its own state: its entries of tensors like the parameter, and its own numbers, such as a count.
    partnets.optim.SGD, Adam and AdamW do the same in one pass without copies, many times faster.

    Args:
        optimizer: the class: Adadelta, Adagrad, Adamax, ASGD, NAdam, RAdam, RMSprop, Rprop; Adam, AdamW and SGD for
            settings that partnets.optim lacks, such as amsgrad and dampening; or another torch.optim.Optimizer whose
            step of an entry depends only on this entry, its gradient and its state. This is tested on a small tensor,
            here and for each group.
        model, groups: as for partnets.optim.SGD.
        settings: the optimiser's settings, by name. weight_decay may be C numbers, one for each partition.

    Raises:
        TypeError: optimizer is not a class of optimisers, or does not have a setting.
        ValueError: the optimiser does not step each entry by itself, such as LBFGS, Muon, Adafactor and SparseAdam; and
            as for partnets.optim.SGD.

    Example:
        >>> import partnets
        >>> model = partnets.Linear(4, 3, proportions=(0.5, 0.5), seed=0)
        >>> optimizer = PerPartition(torch.optim.RMSprop, model, lr=1e-2)
        >>> with partnets.subnetwork(model, active=1, update=1):
        ...     model(torch.ones(2, 4)).sum().backward()
        >>> optimizer.step(update=1)
        >>> optimizer.state[model.weight]["square_avg"].shape, optimizer.state[model.weight]["step"][:, 0]
        (torch.Size([3, 4]), tensor([1., 0.], dtype=torch.float64))
    """

    def __init__(
        self,
        optimizer: type[torch.optim.Optimizer],
        model: nn.Module,
        *,
        groups: Iterable[dict[str, Any]] = (),
        **settings: Any,
    ) -> None:
        is_torchs = isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)
        if not is_torchs or issubclass(optimizer, PartitionedOptimizer):
            raise TypeError(
                f"PerPartition got {optimizer!r}; pass a class of torch.optim, such as torch.optim.RMSprop."
            )
        self.steps_by = optimizer  # Lightning's wrapper has another attribute `optimizer`
        one_decay = {"weight_decay": 0.0} if "weight_decay" in settings else {}
        # Some optimisers require two dimensions, and are refused below for another reason.
        defaults = optimizer([torch.zeros(1, 1, device="cpu")], **settings | one_decay).defaults
        super().__init__(model, groups, **defaults | settings)

    @property
    def kind(self) -> str:
        return f"{super().kind}({self.steps_by.__name__})"

    def check(self, settings: dict[str, Any]) -> None:
        super().check(settings)
        self._state_of(settings)

    def moments(self, group: dict[str, Any]) -> tuple[str, ...]:
        return tuple(name for name, number in self._state_of(group).items() if number is None)

    def new_steps(self, parameter: nn.Parameter, group: dict[str, Any]) -> Tensor:
        # Each partition's row: how often it was stepped, and the numbers in torch's state. torch keeps the dtype of
        # 'step' when it loads a state, and casts all else to the parameter's.
        return torch.zeros(self.num_partitions, 1 + len(self._numbers(group)), dtype=torch.float64, device="cpu")

    def step_all(self, entries: Entries, grads: Sequence[Tensor], update: int, group: dict[str, Any]) -> None:
        tensors = zip(entries.parameters, grads, *entries.moments, strict=True)
        for each, state, partition in zip(tensors, entries.states, entries.partitions, strict=True):
            if partition is None:
                packed = [tensor.detach() for tensor in each]
            else:
                packed = [gather_entries(tensor, partition, update) for tensor in each]
            values, grad, *moments = packed
            optimizer, settings, before = self.torchs(moments, state, update, group)
            after = entrywise.step(optimizer, values, grad, before, settings)
            whole, _, *own = each
            for tensor, part in zip([whole, *own], [values, *map(after.get, self.moments(group))], strict=True):
                if partition is None:
                    tensor.copy_(part)
                else:
                    scatter_entries(tensor, partition, update, part)
            steps = state["step"][update - 1]
            steps.copy_(torch.tensor([steps[0] + 1, *(float(after[name]) for name in self._numbers(group))]))

    def torchs(
        self, moments: list[Tensor], state: dict[str, Any], update: int, group: dict[str, Any]
    ) -> tuple[type[torch.optim.Optimizer], dict[str, Any], dict[str, Any]]:
        before = self._of_partition(moments, state["step"][update - 1], group)
        return self.steps_by, self.settings_of(group, update), before

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "steps_by": self.steps_by}

    def _of_partition(self, moments: list[Tensor], steps: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Return the state of torch's optimiser for the entries of a partition; empty before its first step."""
        if not steps[0]:
            return {}
        numbers = {}
        for (name, number), value in zip(self._numbers(group).items(), steps[1:].tolist(), strict=True):
            numbers[name] = torch.full_like(number, value) if isinstance(number, Tensor) else type(number)(value)
        return numbers | dict(zip(self.moments(group), moments, strict=True))

    def _numbers(self, group: dict[str, Any]) -> dict[str, object]:
        """Return the numbers in the state of torch's optimiser, by name."""
        return {name: number for name, number in self._state_of(group).items() if number is not None}

    def _state_of(self, group: dict[str, Any]) -> dict[str, object]:
        """Return the result of entrywise.check for the optimiser with a group's settings."""
        settings = {name: value for name, value in self.settings_of(group, 1).items() if name != "lr"}
        tested, key = self.__dict__.setdefault("_tested", {}), repr(sorted(settings.items()))
        if key not in tested:
            device = next((parameter.device for parameter in self._owners), None)
            tested[key] = entrywise.check(self.steps_by, settings, device)
        return tested[key]
