"""PartitionedOptimizer: steps one partition at a time, with moments of each entry (Appendix I.1)."""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from partkernels import Partition
from partkernels import gather_entries as take
from partkernels.arguments import check_not_negative
from partkernels.operators.checks import check_entries_apart
from partkernels.operators.optimizers import Steps
from partnets.hyper import LearningRate, WeightDecay, hyperparameters
from partnets.subnetworks.parameters import Combination, PartitionedParameter, partitioned_parameters
from partnets.subnetworks.state import MAP, UNKNOWN, num_partitions
from partnets.subnetworks.switch import noted, switch_of
from partnets.utils.modules import is_sharded
from partnets.utils.shards import Memory

# Learning rates down to minus this number count as 0, because LinearLR may end there.
ROUNDING = 1e-9


@dataclass
class Entries:
    """The entries of one partition in several parameters.

    Attributes:
        of: the parameters' owners, the names of moments, and the ids of all states of the optimiser.
        memory: that of these tensors.
        parameters, moments: the parameters, and for each moment a list like them.
        states: the parameters' states.
        partitions: of weights; None for rows of vectors, and if one partition owns all of a weight.
        combine: sets the parameters of vectors after a step.
        steps: what a subclass has prepared.
    """

    of: tuple[Any, ...]
    memory: Memory
    parameters: list[Tensor]
    moments: list[list[Tensor]]
    states: list[dict[str, Any]]
    partitions: list[Partition | None]
    combine: Combination
    steps: Steps | None = None


class PartitionedOptimizer(torch.optim.Optimizer):
    """The base class of optimisers. A subclass defines check, moments, step_all and torchs.

    Each entry belongs to one partition, so each moment is one tensor: shaped like a weight, or like the rows [C, ...]
    of a vector. A step changes the entries of one partition, in the parameter and in its state; all others keep their
    bits.

    Attributes:
        num_partitions: C, the number of partitions.
        unserved: settings of torch's optimiser of this kind that this one does not have.
    """

    unserved: tuple[str, ...] = ()
    # The hyper.LearningRate of each parameter that has one. The class has no value for it: Lightning's wrapper derives
    # from this class, and looks up missing attributes in the optimiser.
    _rates: Mapping[nn.Parameter, LearningRate]
    # The initial learning rates of groups.
    _lrs: list[float]

    def __init__(self, model: nn.Module, groups: Iterable[dict[str, Any]], **defaults: Any) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"{self.kind} got a {type(model).__name__}; pass the model itself, not its parameters: it knows which"
                " partition owns which entries."
            )
        self.num_partitions = num_partitions(model)
        self._owners = owners(model)
        check_held(model)
        switch_of(model).hook()
        self._rates = _learned_rates(model)
        defaults = self._with_decays(defaults)
        self.check(defaults)
        groups = [group | {"params": _listed(group)} for group in groups]
        grouped = {parameter for group in groups for parameter in group["params"]}
        rest = [parameter for parameter in self._owners if parameter not in grouped]
        super().__init__([*groups, {"params": rest}] if rest else groups, defaults)
        self._lrs = [group["lr"] for group in self.param_groups]

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Add a group of parameters, as torch.optim.Optimizer does, which calls it for each of `groups`.

        Raises:
            ValueError: a setting is unknown or out of range, or a parameter is in another group or not partitioned;
                nothing has changed then.
        """
        unknown = sorted(group.keys() - self.defaults.keys() - {"params"})
        if unknown:
            raise ValueError(f"a group has {', '.join(unknown)}; its settings can be {', '.join(self.defaults)}.")
        parameters = _listed(group)
        if not all(parameter in self._owners for parameter in parameters):
            raise ValueError(
                "a group has a parameter that is not a trainable, partitioned one of this model; take parameters"
                " from the model after partnets.partition, and leave out frozen ones and those of partnets.hyper."
            )
        group = self._with_decays(self.defaults | group | {"params": parameters})
        self.check(group)
        super().add_param_group(group)

    def _with_decays(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return settings with a weight decay for each partition, if they have any."""
        return settings | {name: self._decays(settings[name]) for name in settings.keys() & {"weight_decay"}}

    def _decays(self, weight_decay: float | Sequence[float]) -> tuple[float, ...]:
        is_one = not isinstance(weight_decay, Iterable) or getattr(weight_decay, "ndim", 1) == 0
        decays = (weight_decay,) * self.num_partitions if is_one else tuple(weight_decay)
        if len(decays) != self.num_partitions or not all(0 <= decay < math.inf for decay in decays):
            raise ValueError(
                f"weight_decay={weight_decay}; pass a finite number that is not negative, or {self.num_partitions} of"
                " them, one for each partition."
            )
        return decays

    @property
    def kind(self) -> str:
        """Return the name of this optimiser, for messages and checkpoints."""
        return type(self).__name__

    def parameters(self) -> list[nn.Parameter]:
        """Return all parameters that this optimiser updates."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    @torch.no_grad()
    def step(self, update: int | None = None, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Update the entries of one partition; parameters without a gradient are left unchanged.

        Args:
            update: the partition, 1..C.
            closure: as in torch's optimisers: called first, with gradients enabled.

        Returns:
            The value that closure returns, or None.

        Raises:
            ValueError: update or a setting of a group is out of range, or a group has a setting of torch's that this
                optimiser lacks.
            RuntimeError: the partition is inactive, or has no gradient, such as after a backward pass of another
                subnetwork; or the model was moved to another device or dtype after a step. Nothing has changed then.
        """
        if isinstance(update, bool) or not isinstance(update, int) or not 1 <= update <= self.num_partitions:
            cure = f"pass an int in 1..{self.num_partitions}."
            if update is None:  # from loops that step any optimiser
                cure += (
                    " partnets.step_weights does; for Lightning and Hugging Face's trainer take PartitionedModule or"
                    " PartitionedTrainer of partnets.integrations."
                )
            raise ValueError(f"update={update!r}, but there are {self.num_partitions} partitions; {cure}")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_gradient(update)
        rates = {module: module.rate().item() for module in set(self._rates.values())}
        steps, changed = [], []
        for group in self.param_groups:
            self.check(self._with_decays(group))  # schedules and loops change settings
            if ignored := [name for name in self.unserved if group.get(name)]:
                raise ValueError(
                    f"a group has {ignored[0]}={group[ignored[0]]}, which partnets.optim.{self.kind} does not have;"
                    f" take partnets.optim.PerPartition(torch.optim.{self.kind}, model, {ignored[0]}=...)."
                )
            for module, owners in self._by_rate(group):
                grads = [owner.gradient(update) for owner in owners]
                if any(grad is None for grad in grads):
                    pairs = [(owner, grad) for owner, grad in zip(owners, grads, strict=True) if grad is not None]
                    if not pairs:
                        continue
                    owners, grads = map(list, zip(*pairs, strict=True))
                for owner, grad in zip(owners, grads, strict=True):
                    if grad.dtype is not owner.parameter.dtype:  # allowed by a parameter's grad_dtype
                        raise RuntimeError(
                            f"the gradient of {_described(owner)} is {grad.dtype}, and the parameter"
                            f" {owner.parameter.dtype}; cast it: parameter.grad = parameter.grad.to(parameter.dtype)."
                        )
                rate = {} if module is None else {"lr": rates[module] * self._schedule(group)}
                steps.append((self._prepared(owners, group, update), grads, group | rate))
                changed += owners
        for entries, grads, group in steps:
            self.step_all(entries, grads, update, group)
        for entries, *_ in steps:
            entries.combine()
        noted(changed)
        return loss

    def _by_rate(self, group: dict[str, Any]) -> list[tuple[LearningRate | None, list[PartitionedParameter]]]:
        """Return the owners of a group's parameters, by the learned rate that they follow."""
        parameters, known = group["params"], self.__dict__.setdefault("_grouped", {})
        before, found = known.get(id(group), ((), []))
        if len(parameters) != len(before) or any(map(operator.is_not, parameters, before)):
            by_rate = defaultdict(list)
            for parameter in parameters:
                by_rate[self._rates.get(parameter)].append(self._owners[parameter])
            found = list(by_rate.items())
            known[id(group)] = list(parameters), found
        return found

    def _prepared(self, owners: list[PartitionedParameter], group: dict[str, Any], update: int) -> Entries:
        """Return the entries of a partition in parameters: those of an earlier step if nothing has moved since."""
        moments, known = self.moments(group), self.__dict__.setdefault("_entries", {})
        found, of = known.get((update, owners[0])), (owners, moments, [*map(id, self.state.values())])
        if found is None or found.of != of or not found.memory.is_current():
            states = [self._started(self.state[owner.parameter], owner.parameter, group) for owner in owners]
            pairs = list(zip(owners, states, strict=True))
            held = [owner.held for owner in owners]
            held += [(state, name) for state in states for name in (*moments, "step")]
            found = Entries(
                (owners, moments, [*map(id, self.state.values())]),
                Memory([owner.parameter for owner in owners], held),
                [owner.of(owner.stored, update) for owner in owners],
                [[owner.of(state[one], update) for owner, state in pairs] for one in moments],
                states,
                [owner.partition for owner in owners],
                Combination(owners),
            )
            if not any(is_sharded(owner.parameter) for owner in owners):
                known[update, owners[0]] = found
        return found

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all partitions, as torch.optim.Optimizer does."""
        if set_to_none:
            for parameter in self.parameters():  # torch's method takes ten times as long: it tells profilers
                parameter.grad = None
        else:
            super().zero_grad(set_to_none)
        for owner in self._owners.values():
            owner.clear_gradients()

    def _check_gradient(self, update: int) -> None:
        """Raise RuntimeError unless the partition is active and has a gradient.

        Gradients are read only if the partition was not `update` of a subnetwork since its last step.
        """
        states = {owner.state for owner in self._owners.values()}
        if update > (active := min((state.active for state in states), default=self.num_partitions)):
            raise RuntimeError(
                f"partition {update} is inactive in subnetwork {active}, which the model is now, so that a step would"
                " be lost; step outside of partnets.subnetwork."
            )
        expected = any(update in state.learned for state in states)
        for state in states:
            state.learned.discard(update)
            if state.learned_from is None:
                state.learned_from = UNKNOWN
        given = [one for one in self.parameters() if one.grad is not None]
        if not given and self._owners:
            what = "no parameter of this optimiser has a gradient"
        elif expected or any(self._has_gradient(parameter, update) for parameter in self._telling(given)):
            return
        else:
            what = f"the gradient of partition {update} is 0 everywhere"
        raise RuntimeError(
            f"{what}, so that a step would do nothing: compute the loss and its backward pass inside of"
            f" partnets.subnetwork(model, active={update}, update={update}), by the model that this optimiser was made"
            " for; or call partnets.step_weights."
        )

    def _telling(self, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
        """Return the weights among parameters, where assigned gradients show their partition; or else all of them."""
        return [one for one in parameters if not self._owners[one].is_vector] or parameters

    def _has_gradient(self, parameter: nn.Parameter, update: int) -> bool:
        if is_sharded(parameter):  # another rank may have it
            return True
        owner = self._owners[parameter]
        grad = owner.gradient(update)
        if grad is None:
            return False
        return bool((grad if owner.partition is None else take(grad, owner.partition, update)).any())

    def full_states(self) -> dict[nn.Parameter, dict[str, Any]]:
        """Return each parameter's state: moments shaped like `stored`, and numbers for each partition.

        State that no step has made yet is included as zeros. So all optimisers of a model have states of one kind, and
        on several ranks moments are sharded like parameters.
        """
        groups = {parameter: group for group in self.param_groups for parameter in group["params"]}
        return {parameter: self._started(self.state[parameter], parameter, groups[parameter]) for parameter in groups}

    def _started(self, state: dict[str, Any], parameter: nn.Parameter, group: dict[str, Any]) -> dict[str, Any]:
        """Return a parameter's state after adding missing parts as zeros."""
        for moment in self.moments(group):
            if moment not in state:
                state[moment] = torch.zeros_like(self._owners[parameter].stored)
            elif state[moment].dtype != parameter.dtype or state[moment].device != parameter.device:
                of, by = (f"{tensor.dtype} on {tensor.device}" for tensor in (state[moment], parameter))
                raise RuntimeError(
                    f"{moment} of {_described(self._owners[parameter])} is {of}, and the parameter {by}: the model was"
                    " moved or converted after a step. Make a new optimiser, or load its state_dict into a new one."
                )
        if "step" not in state and (steps := self.new_steps(parameter, group)) is not None:
            state["step"] = steps
        return state

    def check(self, settings: dict[str, Any]) -> None:
        """Raise ValueError unless a group can be stepped with these settings."""
        lr = settings["lr"]
        check_not_negative(lr=0.0 if isinstance(lr, float) and -ROUNDING < lr < 0 else lr)

    def moments(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Return the names of the tensors in the state that are shaped like `stored`."""
        raise NotImplementedError

    def new_steps(self, parameter: nn.Parameter, group: dict[str, Any]) -> Tensor | None:
        """Return the numbers of each partition, [C] or [C, n], before a parameter's first step, or None."""
        return None

    def step_all(self, entries: Entries, grads: Sequence[Tensor], update: int, group: dict[str, Any]) -> None:
        """Step partition `update` of several parameters, with a gradient for each and the settings of their group."""
        raise NotImplementedError

    def settings_of(self, group: dict[str, Any], update: int) -> dict[str, Any]:
        """Return the settings of torch's optimiser for one partition."""
        settings = {name: value for name, value in group.items() if name != "params"}
        return settings | {name: decay_of(group, update) for name in settings.keys() & {"weight_decay"}}

    def owner_of(self, parameter: nn.Parameter) -> PartitionedParameter:
        """Return the PartitionedParameter of a parameter."""
        return self._owners[parameter]

    def as_torchs(
        self, parameter: nn.Parameter, group: dict[str, Any], update: int
    ) -> tuple[type[torch.optim.Optimizer], dict[str, Any], dict[str, Any]]:
        """Return the optimiser of torch that steps the packed entries of one partition in the same way.

        Returns:
            The class, the settings of its group, and its current state, which must not be changed in place.
        """
        state = self._started(dict(self.state.get(parameter, {})), parameter, group)
        moments = [self._owners[parameter].take(state[moment], update) for moment in self.moments(group)]
        return self.torchs(moments, state, update, group)

    def torchs(
        self, moments: list[Tensor], state: dict[str, Any], update: int, group: dict[str, Any]
    ) -> tuple[type[torch.optim.Optimizer], dict[str, Any], dict[str, Any]]:
        """Return the result of as_torchs.

        Args:
            moments: the packed entries of one partition.
            state: the parameter's state.
        """
        raise NotImplementedError

    def rate_to_follow(self, parameter: nn.Parameter, group: dict[str, Any]) -> Tensor | None:
        """Return a parameter's learning rate with its graph if it is learned, otherwise None."""
        module = self._rates.get(parameter)
        return None if module is None else module.rate() * self._schedule(group)

    def _schedule(self, group: dict[str, Any]) -> float:
        """Return a group's learning rate divided by its initial one; for OneCycleLR, by its maximum."""
        place = next(i for i, own in enumerate(self.param_groups) if own is group)
        began = self._lrs[place] if place < len(self._lrs) else None  # ReduceLROnPlateau does not set initial_lr
        of = group.get("max_lr") or group.get("initial_lr") or began
        return group["lr"] / of if of else 1.0

    def __getstate__(self) -> dict[str, Any]:
        own = {
            "num_partitions": self.num_partitions,
            "_owners": self._owners,
            "_rates": dict(self._rates),
            "_lrs": self._lrs,
        }
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # load_state_dict passes only groups and states.
        own = {"_rates": self.__dict__.get("_rates", {}), "_lrs": self.__dict__.get("_lrs", [])}
        super().__setstate__(own | state)

    def state_dict(self) -> dict[str, Any]:
        """Return the state_dict of torch.optim.Optimizer, with a weight decay for each partition."""
        found = super().state_dict()
        return found | {"param_groups": [self._with_decays(group) for group in found["param_groups"]]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state_dict of such an optimiser of the same model, as torch.optim.Optimizer does.

        Load the model's state_dict too: it has the partition of each entry. Otherwise moments that one partition has
        learned may be used for another.

        Raises:
            ValueError: as for check_state_dict; nothing has changed then.
        """
        self.check_state_dict(state_dict)
        super().load_state_dict(state_dict)

    def check_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Check a state_dict before anything changes, as load_state_dict does.

        Raises:
            ValueError: settings are missing, or parameters, their shapes or the number of partitions differ.
        """
        groups, states = state_dict["param_groups"], state_dict["state"]
        theirs, own = ([len(group["params"]) for group in each] for each in (groups, self.param_groups))
        if theirs != own:
            _raise_foreign(f"parameter groups of {theirs} and this one of {own}")
        for group, mine in zip(groups, self.param_groups, strict=True):
            # torch adds "differentiable" to the defaults, but to no group, when it loads or copies a state.
            lacking = self.defaults.keys() - group.keys() - {"differentiable"}
            decays = group.get("weight_decay")
            if lacking or (
                decays is not None and (not isinstance(decays, Sequence) or len(decays) != self.num_partitions)
            ):
                what = f"no {', '.join(sorted(lacking))}" if lacking else f"weight_decay={decays}"
                _raise_foreign(f"{what}, and this one is a {self.kind} of {self.num_partitions} partitions")
            for index, parameter in zip(group["params"], mine["params"], strict=True):
                if states.get(index):
                    self._check_state(states[index], parameter, group)

    def _check_state(self, state: dict[str, Any], parameter: nn.Parameter, group: dict[str, Any]) -> None:
        expected = dict.fromkeys(self.moments(group), tuple(self._owners[parameter].stored.shape))
        if (steps := self.new_steps(parameter, group)) is not None:
            expected["step"] = tuple(steps.shape)
        shapes = {name: tuple(getattr(value, "shape", ())) for name, value in state.items()}
        if shapes != expected:
            _raise_foreign(f"a parameter's state of shapes {shapes} instead of {expected}")


def check_held(model: nn.Module) -> None:
    """Raise ValueError if a learned rate or decay is of layers that are not in the model, where it has no effect."""
    modules = set(model.modules())
    for path, module in model.named_modules():
        if isinstance(module, LearningRate | WeightDecay):
            strange = [part for one in module.of for part in one.modules() if part not in modules]
            if strange:
                raise ValueError(
                    f"{path} (hyper.{type(module).__name__}) is of a {type(strange[0]).__name__} that is not in the"
                    " model; make it of the model's present layers."
                )


def _learned_rates(model: nn.Module) -> dict[nn.Parameter, LearningRate]:
    """Return the hyper.LearningRate of each parameter that has one.

    Raises:
        ValueError: a parameter has two such modules.
    """
    found: dict[nn.Parameter, LearningRate] = {}
    for path, module in model.named_modules():
        if isinstance(module, LearningRate):
            for parameter in module.governed():
                if found.setdefault(parameter, module) is not module:
                    name = next(name for name, one in model.named_parameters() if one is parameter)
                    raise ValueError(
                        f"{name} has two learning rates, and one of them is {path}; pass different modules to each"
                        " hyper.LearningRate."
                    )
    return found


def decay_of(group: dict[str, Any], update: int) -> float:
    """Return a group's weight decay for a partition; a schedule may have set a single number for all partitions."""
    decay = group["weight_decay"]
    return decay if isinstance(decay, Real) else decay[update - 1]


def check_partitioned(optimizer: object, name: str = "optimizer") -> None:
    """Raise ValueError unless an optimiser can step one partition at a time."""
    if isinstance(optimizer, PartitionedOptimizer):
        return
    if isinstance(inner := getattr(optimizer, "optimizer", None), PartitionedOptimizer):  # Accelerate's
        raise ValueError(
            f"{name} is a {type(optimizer).__name__} around a {type(inner).__name__}, and its step takes no partition;"
            f" pass {name}.optimizer, the {type(inner).__name__} itself."
        )
    raise ValueError(
        f"{name} is a {type(optimizer).__name__}, which steps all partitions at once; pass one of"
        " partnets.optim, such as optim.PerPartition(torch.optim.RMSprop, model)."
    )


def _raise_foreign(what: str) -> NoReturn:
    """Raise ValueError because a saved optimiser has parts that this one cannot load."""
    raise ValueError(f"the saved optimiser has {what}; load the state of such an optimiser of the same model.")


def _listed(group: dict[str, Any]) -> list[nn.Parameter]:
    return [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])


def owners(model: nn.Module) -> dict[nn.Parameter, PartitionedParameter]:
    """Return the PartitionedParameter of each trainable parameter.

    Raises:
        ValueError: a trainable parameter belongs neither to partitions nor to partnets.hyper; entries of a parameter
            share memory; two layers partition a parameter differently; or FullyShardedDataParallel has flattened them.
    """
    if any(hasattr(p, "_fsdp_flattened") or path.endswith("_flat_param") for path, p in model.named_parameters()):
        raise ValueError(
            "FullyShardedDataParallel flattens parameters, so that their partitions are unknown; shard the model by"
            " partnets.distributed.fully_shard."
        )
    found = {one.parameter: one for one in partitioned_parameters(model) if one.parameter.requires_grad}
    _check_ties(model, found)
    for parameter, owner in found.items():
        check_entries_apart(owner.name, parameter.detach())
    known = found.keys() | set(hyperparameters(model))
    strangers = [
        path for path, parameter in model.named_parameters() if parameter.requires_grad and parameter not in known
    ]
    if strangers:
        raise ValueError(
            f"{', '.join(strangers)} would learn from every chunk: no partition owns them. Freeze them with"
            " requires_grad_(False), partition their modules with partnets.partition, or derive their module from"
            " partnets.hyper.Hyperparameter."
        )
    return found


def _check_ties(model: nn.Module, found: dict[nn.Parameter, PartitionedParameter]) -> None:
    """Raise ValueError if a parameter was assigned to a second layer that partitions it differently."""
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if (owner := found.get(parameter)) is None:
                continue
            first, map = owner.module._buffers.get(owner.name + MAP), module._buffers.get(name + MAP)
            if first is not map and (first is None or map is None or not torch.equal(first, map)):
                raise ValueError(
                    f"{path}.{name} is another layer's parameter too, {_described(owner)} with another partition; tie"
                    " parameters before partnets.partition."
                )


def _described(owner: PartitionedParameter) -> str:
    """Return a partitioned parameter's name for messages."""
    return f"the {owner.name} of a {type(owner.module).__name__}"
