"""PerPartition: an elementwise optimiser of torch.optim, for one partition at a time (Appendix I.1)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from partkernels import gather_entries, scatter_entries
from partnets.optim import entrywise
from partnets.optim.base import PartitionedOptimizer, check_shapes, raise_foreign


class PerPartition(PartitionedOptimizer):
    """An optimiser of torch.optim for one partition at a time; with C = 1, it equals that optimiser bitwise.

    A step gathers the entries of one partition, lets torch's optimiser step them as a tensor, and scatters them back.
    Each partition has its own state, including a step count. The states have as many numbers as the state of torch's
    optimiser for the whole parameter. partnets.optim.SGD, Adam and AdamW do the same in one pass without copies, many
    times faster.

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
        >>> {k: state["square_avg"].shape for k, state in optimizer.state[model.weight].items()}
        {1: torch.Size([6])}
    """

    def __init__(
        self, optimizer: type[torch.optim.Optimizer], model: nn.Module, *, groups: Iterable[dict] = (), **settings
    ) -> None:
        ordinary = isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)
        if not ordinary or issubclass(optimizer, PartitionedOptimizer):
            raise TypeError(
                f"PerPartition got {optimizer!r}; pass a class of torch.optim, such as torch.optim.RMSprop."
            )
        self.steps_by = optimizer  # Lightning's wrapper has another attribute `optimizer`
        one_decay = {"weight_decay": 0.0} if "weight_decay" in settings else {}
        # Some optimisers require two dimensions, and are refused below for another reason.
        defaults = optimizer([torch.zeros(1, 1, device="cpu")], **settings | one_decay).defaults
        super().__init__(model, groups, **defaults | settings)

    @property
    def kind(self):
        return f"{super().kind}({self.steps_by.__name__})"

    def check(self, settings):
        super().check(settings)
        self._state(settings)

    def moments(self, group):
        return ()

    def step_entries(self, tensors, state, partition, update, group):
        settings = self.settings_of(group, update)
        if partition is None:
            parameter, grad = tensors
            state[update] = entrywise.step(self.steps_by, parameter.detach(), grad, state.get(update), settings)
            return
        entries, grad = (gather_entries(tensor, partition, update) for tensor in tensors)
        state[update] = entrywise.step(self.steps_by, entries, grad, state.get(update), settings)
        scatter_entries(tensors[0], partition, update, entries)

    def whole_state(self, parameter, group):
        whole = {"stepped": torch.zeros(self.count, dtype=torch.int64, device="cpu")}
        for name, value in self._template(parameter, group).items():
            if _has_entries(value):
                whole[name] = torch.zeros_like(self._owners[parameter].stored, dtype=value.dtype)
            else:
                whole[name] = torch.zeros(self.count, dtype=torch.float64, device="cpu")
        for k, state in self.state.get(parameter, {}).items():
            whole["stepped"][k - 1] = 1
            if {"stepped", *state} != whole.keys():
                raise ValueError(
                    f"{self.steps_by.__name__} keeps {', '.join(state) or 'nothing'} of partition {k}, but another"
                    " state after its first step; torch.distributed.checkpoint needs the same state after each step."
                    " Save it by Trainer.save or torch.save."
                )
            for name, value in state.items():
                if _has_entries(value):
                    self._owners[parameter].put(whole[name], k, value.reshape(-1))
                else:
                    whole[name][k - 1] = value
        return whole

    def of_whole(self, parameter, group, whole):
        template = self._template(parameter, group)
        if missing := {"stepped", *template} ^ whole.keys():
            raise_foreign(f"a state with other parts than {self.kind} has: {', '.join(sorted(missing))}")
        states = {}
        for k in whole["stepped"].nonzero()[:, 0].add(1).tolist():
            states[k] = state = {}
            for name, like in template.items():
                if _has_entries(like):
                    owner = self._owners[parameter]
                    entries = owner.take(whole[name], k).clone()
                    state[name] = entries.view_as(owner.of(whole[name], k)) if owner.partition is None else entries
                elif isinstance(like, Tensor):
                    state[name] = whole[name][k - 1].to(like)
                else:
                    state[name] = type(like)(whole[name][k - 1].item())
        return states

    def _template(self, parameter: nn.Parameter, group: dict) -> dict:
        """Return the optimiser's state of a single entry after a step."""
        one = torch.zeros(1, dtype=parameter.dtype, device=parameter.device)
        return entrywise.step(self.steps_by, one, torch.zeros_like(one), None, self.settings_of(group, 1))

    def check_states(self, states, group):
        like_entries = self._state(group)
        for parameter, state in states.items():
            stepped = {k: inner for k, inner in state.items() if inner != {}}
            expected = {
                k: {name: shape if like else () for name, like in like_entries.items()}
                for k, shape in self._shapes(parameter).items()
                if k in stepped
            }
            check_shapes(stepped, expected)

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        # torch casts all but 'step' to the parameter's dtype; numbers, such as NAdam's products, must keep theirs.
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        for index, parameter in zip(indices, self.parameters(), strict=True):
            for k, saved in state_dict["state"].get(index, {}).items():
                loaded = self.state[parameter][k]
                numbers = [name for name, value in saved.items() if isinstance(value, Tensor) and value.dim() == 0]
                loaded.update({name: saved[name].to(loaded[name].device) for name in numbers})

    def __getstate__(self):
        return {**super().__getstate__(), "steps_by": self.steps_by}

    def _shapes(self, parameter: nn.Parameter) -> dict[int, tuple[int, ...]]:
        """Return the shape of the tensor that is stepped for a parameter, by partition."""
        owner = self._owners[parameter]
        shapes = {}
        for k in range(1, self.count + 1):
            if owner.partition is not None:
                shapes[k] = (owner.partition.sizes()[k - 1],)
            elif owner.numel(k):
                shapes[k] = tuple(owner.of(owner.stored, k).shape)
        return shapes

    def _state(self, group: dict) -> dict[str, bool]:
        """Return the result of entrywise.check for the optimiser with a group's settings."""
        device = next((parameter.device for parameter in self._owners), None)
        return entrywise.check(self.steps_by, self.settings_of(group, 1), device)

    def torchs(self, moments, state, update, group):
        own = state.get(update, {})
        packed = {name: value.reshape(-1) if _has_entries(value) else value for name, value in own.items()}
        return self.steps_by, self.settings_of(group, update), packed


def _has_entries(value: object) -> bool:
    """Return whether a part of an optimiser's state has a number for each entry."""
    return isinstance(value, Tensor) and value.dim() > 0
