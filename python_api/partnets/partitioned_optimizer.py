"""PartitionedOptimizer: steps one partition at a time, with moments of each entry (Appendix I.1)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from partkernels import Partition
from partkernels.optimizers import check_not_negative
from partnets.hyper import hyperparameters
from partnets.partitioned import Partitioned, count, partitioned_layers
from partnets.shards import held_entries


class PartitionedOptimizer(torch.optim.Optimizer):
    """What the optimisers share. A subclass defines check, moments and step_entries.

    Each entry of a parameter has one owner, so the state is one tensor like the parameter for each moment. A step
    changes entries of one partition, in the parameter and in its state; all others keep their bits.
    """

    # Whether the state has the number of steps of each partition.
    counts = False

    def __init__(self, model: nn.Module, groups: Iterable[dict], **defaults) -> None:
        self.count = count(model)
        self._owners = _owners(model)
        defaults["weight_decay"] = self._decays(defaults["weight_decay"])
        self.check(defaults)
        groups = [group | {"params": _listed(group)} for group in groups]
        grouped = {parameter for group in groups for parameter in group["params"]}
        rest = [parameter for parameter in self._owners if parameter not in grouped]
        super().__init__([*groups, {"params": rest}] if rest else groups, defaults)

    def add_param_group(self, group: dict) -> None:
        """As torch.optim.Optimizer's, which calls it for each of `groups`.

        Raises:
            ValueError: a setting is unknown or out of range, or a parameter is not one that this optimiser may step or
                is in another group already; nothing has changed then.
        """
        unknown = sorted(group.keys() - self.defaults.keys() - {"params"})
        if unknown:
            raise ValueError(f"a group has {', '.join(unknown)}; its settings can be {', '.join(self.defaults)}.")
        parameters = _listed(group)
        if not all(parameter in self._owners for parameter in parameters):
            raise ValueError(
                "a group has a parameter that is no trainable one of this model's partitioned layers; take parameters"
                " from the model after partnets.partition, and leave out frozen ones and those of partnets.hyper."
            )
        group = self.defaults | group | {"params": parameters}
        group["weight_decay"] = self._decays(group["weight_decay"])
        self.check(group)
        super().add_param_group(group)

    def _decays(self, weight_decay: float | Sequence[float]) -> tuple[float, ...]:
        decays = tuple(weight_decay) if isinstance(weight_decay, Iterable) else (weight_decay,) * self.count
        if len(decays) != self.count or not all(0 <= decay < math.inf for decay in decays):
            raise ValueError(
                f"weight_decay={weight_decay}; pass a finite number that is not negative, or {self.count} of them, one"
                " for each partition."
            )
        return decays

    def parameters(self) -> list[nn.Parameter]:
        """All parameters that this optimiser updates."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    @torch.no_grad()
    def step(self, update: int) -> None:
        """Updates the entries of one partition; parameters without a gradient are left out.

        Args:
            update: the partition, 1..C.

        Raises:
            ValueError: update is out of range.
        """
        if isinstance(update, bool) or not isinstance(update, int) or not 1 <= update <= self.count:
            raise ValueError(
                f"update={update!r}, but there are {self.count} partitions; pass an int in 1..{self.count}."
            )
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self._filled(parameter, group)
                tensors = [parameter, parameter.grad, *(state[moment] for moment in self.moments(group))]
                layer, name = self._owners[parameter]
                found = held_entries(layer, name, tensors, update)
                if found is not None:
                    self.step_entries(found[0], state, found[1], update, group)

    def fill_state(self) -> None:
        """Gives each parameter the state that its first step would, all 0: what a saved one can be loaded into."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self._filled(parameter, group)

    def _filled(self, parameter: nn.Parameter, group: dict) -> dict:
        state = self.state[parameter]
        for moment in self.moments(group):
            if moment not in state:
                state[moment] = torch.zeros_like(parameter)
        if self.counts and "step" not in state:
            state["step"] = torch.zeros(self.count, dtype=torch.int64, device="cpu")
        return state

    def check(self, settings: dict) -> None:
        """Raises ValueError unless a group can be stepped with these settings."""
        check_not_negative(lr=settings["lr"])

    def moments(self, group: dict) -> tuple[str, ...]:
        """The names in the state of those tensors that are like the parameter."""
        raise NotImplementedError

    def step_entries(
        self, tensors: list[Tensor], state: dict, partition: Partition | None, update: int, group: dict
    ) -> None:
        """Steps one partition of a parameter.

        Args:
            tensors: the parameter, its gradient and its moments; if there is no partition, all of their entries are
                to be stepped.
        """
        raise NotImplementedError

    def __getstate__(self) -> dict:
        return {**super().__getstate__(), "count": self.count, "_owners": self._owners}

    def load_state_dict(self, state_dict: dict) -> None:
        """As torch.optim.Optimizer's; the state must be of such an optimiser of the same model.

        Raises:
            ValueError: settings, parameters, their shapes or the number of partitions differ; nothing has changed then.
        """
        parameters = self.parameters()
        saved = sum(len(group["params"]) for group in state_dict["param_groups"])
        if saved != len(parameters):
            raise ValueError(
                f"the saved optimiser has {saved} parameters and this one {len(parameters)}; load the state of an"
                " optimiser of the same model."
            )
        for group in state_dict["param_groups"]:
            lacking = self.defaults.keys() - group.keys()
            if lacking or len(group["weight_decay"]) != self.count:
                what = f"no {', '.join(sorted(lacking))}" if lacking else f"weight_decay={group['weight_decay']}"
                raise ValueError(
                    f"the saved optimiser has {what}, and this one is a {type(self).__name__} of {self.count}"
                    " partitions; load the state of such an optimiser of the same model."
                )
        for index, state in state_dict["state"].items():
            for name, value in state.items():
                expected = (self.count,) if name == "step" else tuple(parameters[index].shape)
                if tuple(value.shape) != expected:
                    raise ValueError(
                        f"the saved {name} of parameter {index} has shape {tuple(value.shape)} instead of {expected};"
                        " load the state of an optimiser of the same model."
                    )
        super().load_state_dict(state_dict)


def _listed(group: dict) -> list[nn.Parameter]:
    return [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])


def _owners(model: nn.Module) -> dict[nn.Parameter, tuple[Partitioned, str]]:
    """The layer and name of each trainable parameter that a partitioned layer owns; raises for any other."""
    owners = {
        parameter: (layer, name)
        for _, layer in partitioned_layers(model)
        for name, parameter in layer.owned()
        if parameter.requires_grad
    }
    known = owners.keys() | set(hyperparameters(model))
    strangers = [
        path for path, parameter in model.named_parameters() if parameter.requires_grad and parameter not in known
    ]
    if strangers:
        raise ValueError(
            f"{', '.join(strangers)} would learn from every chunk: no partitioned layer owns them. Freeze them with"
            " requires_grad_(False), partition their layers with partnets.partition, or derive their module from"
            " partnets.hyper.Hyperparameter."
        )
    return owners
