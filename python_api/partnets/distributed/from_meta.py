"""Give modules of a model that was partitioned on the meta device their memory and initial values, one at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from partnets.subnetworks.assignment import Assignment
from partnets.subnetworks.merging import remove_own
from partnets.subnetworks.partitioning import share
from partnets.subnetworks.state import holder_of, state_of
from partnets.utils import seeds
from partnets.utils.random_state import preserved, seed_all

# New tensors, and the first places of those on the meta device that they replace, by the latter.
Made = dict[Tensor, tuple[Tensor, nn.Module, str]]
# A function that sets a module's own parameters and buffers.
Initialise = Callable[[nn.Module], object]


class Maker:
    """Makes modules of a model that was partitioned on the meta device, with the values that the seed gives.

    Args:
        model: partitioned; some of its parameters and buffers are on the meta device.
        device: that of the new tensors.
        initialise: called with each module that has new parameters or buffers; True calls its reset_parameters().

    Raises:
        ValueError: modules on the meta device cannot be initialised; all of them are named.
    """

    def __init__(self, model: nn.Module, device: torch.device, initialise: Initialise | bool) -> None:
        self.device, self._initialise = device, _reset if initialise is True else initialise
        self._paths = {module: path or "the model itself" for path, module in model.named_modules()}
        plans = (state.plan for module in self._paths if (state := state_of(module)) is not None and state.plan)
        self._seed = next((plan["seed"] for plan in plans), 0)
        stuck = [module for module in self._paths if _on_meta(module) and initialise is True and not _can_reset(module)]
        if stuck:
            listed = ", ".join(f"{self._paths[one]} ({type(one).__name__})" for one in stuck)
            raise ValueError(
                f"{listed} has parameters or buffers on the meta device and no reset_parameters() that sets them; pass"
                " a function as initialise=, or construct it outside of torch.device('meta')."
            )

    @torch.no_grad()
    def __call__(self, modules: Iterable[nn.Module]) -> None:
        """Make these modules, which share no parameter with others."""
        wanted = set(modules)
        modules = [module for module in self._paths if module in wanted and _on_meta(module)]  # outer ones first
        if not modules:
            return
        plans = {module: state.plan if (state := state_of(module)) else {} for module in modules}
        made: Made = {}
        tied = {module: self._allocate(module, made) for module in modules}
        with preserved(self.device):
            seed_all(seeds.derived(self._seed, self._paths[modules[0]]))  # the same on all ranks
            for module in reversed(modules):  # as in their construction
                self._initialise(module)
        for tensor, module, name in made.values():
            if tensor.is_floating_point() and tensor.isnan().any():
                raise ValueError(
                    f"initialise has left {name} of {self._paths[module]} ({type(module).__name__}) without values; let"
                    " it set all parameters and buffers."
                )
        assignments = {module: Assignment(module, **plan) for module, plan in plans.items() if plan}
        for module, assignment in assignments.items():
            for name in tied[module]:
                assignment.values.pop(name, None)
            assignment.apply()
        for module in assignments:
            for name, place in tied[module].items():
                share(*place, module, name)

    def _allocate(self, module: nn.Module, made: Made) -> dict[str, tuple[nn.Module, str]]:
        """Replace a module's own tensors on the meta device; return the first place of each that is in others too."""
        tied, names = {}, _on_meta(module)
        if state_of(module) is not None:
            remove_own(module)
        for name in names:
            own = holder_of(module, name)
            old = own[name]
            if old in made:
                new, *tied[name] = made[old]
            else:
                new = torch.full_like(old, math.nan if old.is_floating_point() else 0, device=self.device)
                new = nn.Parameter(new, old.requires_grad) if own is module._parameters else new
                made[old] = new, module, name
            own[name] = new
        return tied


def _on_meta(module: nn.Module) -> list[str]:
    """Return the names of a module's own parameters and buffers on the meta device, other than those of partitions."""
    of_partitions = () if (state := state_of(module)) is None else state.buffers()
    tensors = [*module._parameters.items(), *module._buffers.items()]
    return [name for name, one in tensors if one is not None and one.is_meta and name not in of_partitions]


def _can_reset(module: nn.Module) -> bool:
    """Return whether a module has a function that sets all of its own parameters and buffers."""
    has_buffers = not isinstance(module, _NormBase) and any(name in module._buffers for name in _on_meta(module))
    return _reset_of(module) is not None and not has_buffers


def _reset(module: nn.Module) -> None:
    _reset_of(module)()


def _reset_of(module: nn.Module) -> Callable[[], None] | None:
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
