"""Make the modules of a model that was partitioned on the meta device: their memory, initial values and partitions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from partnets.subnetworks.assignment import Assignment
from partnets.subnetworks.initial_values import reset_of
from partnets.subnetworks.merging import remove_own
from partnets.subnetworks.partitioning import share
from partnets.subnetworks.state import holder_of, state_of
from partnets.utils import seeds
from partnets.utils.random_state import preserved, seed_all
from partnets.utils.shards import local

# New tensors, and the first places of those on the meta device that they replace, by the latter.
Made = dict[Tensor, tuple[Tensor, nn.Module, str]]
# A function that sets the parameters and buffers of a module.
Initialise = Callable[[nn.Module], object]
AGAIN = "and construct the model again, as it is half made now."


class Maker:
    """Makes modules of a model that was partitioned on the meta device, with values that the partition's seed draws.

    Args:
        model: partitioned; some of its parameters and buffers are on the meta device.
        device: that of the new tensors.
        initialise: called with each module that has new parameters or buffers in it, inner ones first; True calls
            reset_parameters() of those that have it.

    Raises:
        ValueError: modules on the meta device cannot be initialised; all of them are named.
    """

    def __init__(self, model: nn.Module, device: torch.device, initialise: Initialise | bool) -> None:
        self.model, self.device, self._initialise = model, device, _reset if initialise is True else initialise
        self._paths = {module: path or "the model itself" for path, module in model.named_modules()}
        self._wanted = {one for one in self._paths if any(map(_on_meta, one.modules()))}
        self._plans = {module: state_of(module).plan for module in self._wanted if state_of(module) is not None}
        self._seed = next((plan["seed"] for plan in self._plans.values() if plan), 0)
        reset = {inner for one in self._paths if reset_of(one) is not None for inner in one.modules()}
        stuck = [one for one in self._wanted if _on_meta(one) and initialise is True and one not in reset]
        stuck += [module for module, plan in self._plans.items() if not plan and _on_meta(module)]
        if stuck:
            listed = ", ".join(f"{self._paths[one]} ({type(one).__name__})" for one in stuck)
            raise ValueError(
                f"{listed} has parameters or buffers on the meta device and no reset_parameters() that sets them; pass"
                " a function as initialise=, or construct it outside of torch.device('meta')."
            )

    @torch.no_grad()
    def __call__(self, modules: Iterable[nn.Module]) -> list[Tensor]:
        """Make these modules, which share no tensor with others; return the new tensors.

        Raises:
            ValueError: initialise leaves some without values, or writes into others.
        """
        inside = set(modules)
        wanted = [module for module in self._paths if module in inside and module in self._wanted]  # outer ones first
        made: Made = {}
        tied = {module: self._allocate(module, made) for module in wanted if _on_meta(module)}
        with preserved(self.device), _Writes() as writes:
            seed_all(seeds.derived(self._seed, self._paths[wanted[0]] if wanted else ""))  # the same on all ranks
            for module in reversed(wanted):  # as in their construction
                self._initialise(module)
        self._check(made, writes)
        assignments = {one: Assignment(one, **plan) for one in tied if (plan := self._plans.get(one))}
        for module, assignment in assignments.items():
            for name in tied[module]:
                assignment.values.pop(name, None)
            assignment.apply()
        for module in assignments:
            for name, place in tied[module].items():
                share(*place, module, name)
        for old, (new, *_) in made.items():
            new.requires_grad_(old.requires_grad)
        return [new for new, *_ in made.values()]

    def _allocate(self, module: nn.Module, made: Made) -> dict[str, tuple[nn.Module, str]]:
        """Replace a module's own tensors on the meta device; return the first place of each that is in others too."""
        tied, names, owned = {}, _on_meta(module), None
        if (state := state_of(module)) is not None:
            owned = {*state.weights, *state.vectors} if state.num_partitions > 1 else None
            remove_own(module)
        for name in names:
            own = holder_of(module, name)
            old = own[name]
            if old in made:
                new, *tied[name] = made[old]
            else:
                new = torch.full_like(old, math.nan if old.is_floating_point() else 0, device=self.device)
                if own is module._parameters:  # may have been frozen since partnets.partition
                    new = nn.Parameter(new, old.requires_grad if owned is None else name in owned)
                made[old] = new, module, name
            own[name] = new
        return tied

    def _check(self, made: Made, writes: _Writes) -> None:
        """Raise ValueError unless exactly the new tensors were written into."""
        news = {id(new) for new, *_ in made.values()}
        for new, module, name in made.values():
            if new.numel() and not writes.has(new):
                raise ValueError(
                    f"initialise has left {name} of {self._paths[module]} ({type(module).__name__}) without values; let"
                    f" it set all parameters and buffers, {AGAIN}"
                )
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            if not tensor.is_meta and id(tensor) not in news and writes.has(tensor):
                raise ValueError(
                    f"initialise has written into {name}, which is in another unit or was not on the meta device; pass"
                    f" units= with one that includes all that a module initialises, {AGAIN}"
                )


class _Writes(TorchDispatchMode):
    """Records which memory is written into."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, Any] = {}

    def has(self, tensor: Tensor) -> bool:
        return id(local(tensor).untyped_storage()) in self._storages

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        arguments = func._schema.arguments
        given = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
        for argument in arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = given.get(argument.name)
                for one in value if isinstance(value, list | tuple) else [value]:
                    if isinstance(one, Tensor):
                        storage = local(one).untyped_storage()
                        self._storages[id(storage)] = storage
        return func(*args, **kwargs)


def _on_meta(module: nn.Module) -> list[str]:
    """Return the names of a module's own parameters and buffers on the meta device, other than those of partitions."""
    of_partitions = () if (state := state_of(module)) is None else state.buffers()
    tensors = [*module._parameters.items(), *module._buffers.items()]
    return [name for name, one in tensors if one is not None and one.is_meta and name not in of_partitions]


def _reset(module: nn.Module) -> None:
    if (reset := reset_of(module)) is not None:
        reset()
