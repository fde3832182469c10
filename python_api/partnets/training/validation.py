"""Checks of a checkpoint's content, all made before a trainer changes.

They assume equal configurations: the same parameters, groups and schedulers.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from partkernels import Partition, Zeros
from partnets.subnetworks.state import (
    DEFAULTS,
    LEARNED,
    MAP,
    ROWS,
    STORED,
    defaults_of,
    parameter_of,
    state_of,
    text_of,
)
from partnets.training.best_model import Best, tensors
from partnets.training.history import History
from partnets.training.state import TrainingState
from partnets.utils import random_state

# State of all schedulers of torch: counts, and rates, which are not negative.
COUNTS, RATES = ("last_epoch", "_step_count"), ("base_lrs", "_last_lr")
# The largest setting, as torch's steps convert settings to the parameters' dtype.
LARGEST = torch.finfo(torch.float32).max


def check(trainer: TrainingState, saved: dict, rank: int) -> None:
    """Raise ValueError, naming the part and its fault, unless a trainer can load all of this."""
    if empty := [at for at, value in leaves(saved) if isinstance(value, Tensor) and value.is_meta]:
        raise ValueError(f"{empty[0]} is on the meta device, without values.")
    for name, check_part in PARTS.items():
        if name in saved:
            try:
                with _partitioned_as(trainer.model, saved.get("model", {}) if name == "optimizer" else {}):
                    check_part(trainer, saved[name], rank)
            except Exception as error:  # a part that is damaged may fail anywhere
                raise ValueError(f"{name}: {error}") from error


@contextmanager
def _partitioned_as(model: nn.Module, state: Mapping) -> Iterator[None]:
    """Set the maps of weights to those of a state_dict in the context, as partitions may have moved before saving."""
    before = [(module, name + MAP, module._buffers[name + MAP]) for _, module, name in _weights(model)]
    try:
        for path, module, name in _weights(model):
            if (map := state.get(path + MAP)) is not None:
                module._buffers[name + MAP] = map.to(module._buffers[name + MAP].device)
        yield
    finally:
        for module, name, map in before:
            module._buffers[name] = map


def _weights(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield the dotted name, the module and the name of each partitioned weight, in each place of tied ones."""
    for path, module in model.named_modules():
        if (state := state_of(module)) is not None:
            for name in state.weights:
                yield f"{path}.{name}".lstrip("."), module, name


def kinds(state: Mapping) -> dict[str, str]:
    """Return the dtype and shape of each tensor in a state_dict, and other values' types.

    Stored defaults are left out, because partitions that move change their sizes.
    """
    stored = {name.removesuffix(MAP) + STORED for name in state if str(name).endswith(MAP)}
    return {name: _kind(value) for name, value in state.items() if name not in stored}


def _kind(value) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{value.dtype} {list(value.shape)}" + (f" {value.layout}" if value.layout != torch.strided else "")


def _model(trainer: TrainingState, state: dict, _) -> None:
    model = trainer.model
    _like(kinds(state), kinds(model.state_dict()))
    for path, module, name in _weights(model):
        weight, own = parameter_of(module, name), state_of(module)
        sizes = Partition(tuple(weight.shape), own.count, state[path + MAP].cpu(), Zeros()).sizes()
        is_nested = own.narrow is not None and name in own.narrow.owners
        if is_nested and not torch.equal(state[path + MAP].cpu(), module._buffers[name + MAP].cpu()):
            raise ValueError(f"{path + MAP} is of other nested channels than this trainer's.")
        stored = state.get(path + STORED)
        if defaults_of(state[path + DEFAULTS]) is not None:
            if stored is not None:
                raise ValueError(f"{path + STORED} is a {_kind(stored)}, but the defaults are drawn.")
        elif not isinstance(stored, Tensor) or _kind(stored) != _kind(weight.new_empty(sum(sizes[1:]))):
            what = "missing" if stored is None else _kind(stored)
            raise ValueError(f"{path + STORED} is {what}; it must be {weight.dtype} [{sum(sizes[1:])}].")
    for path, module in model.named_modules():
        if (learned := state.get(f"{path}.{LEARNED}".lstrip("."))) is not None:
            text_of(learned)
        for name, is_product in getattr(state_of(module), "vectors", {}).items():
            vector, rows = (state[f"{path}.{name}{end}".lstrip(".")] for end in ("", ROWS))
            whole = rows.prod(0) if is_product else rows.sum(0)
            if not torch.allclose(whole, vector, rtol=1e-5, atol=1e-6, equal_nan=True):
                raise ValueError(f"{path}.{name} and {path}.{name}{ROWS} do not agree.")


def _optimizer(trainer: TrainingState, state: dict, _) -> None:
    optimizer = trainer.optimizer
    optimizer.check_state_dict(state)
    _settings(state["param_groups"], optimizer.state_dict()["param_groups"])
    indices = [index for group in state["param_groups"] for index in group["params"]]
    for index, parameter in zip(indices, optimizer.parameters(), strict=True):
        for at, value in leaves(state["state"].get(index, {}), f"state.{index}"):
            # torch would cast them silently. Numbers, such as step counts, have other dtypes.
            entries = isinstance(value, Tensor) and value.is_floating_point() and value.dim()
            if entries and value.dtype != parameter.dtype:
                raise ValueError(f"{at} is {value.dtype}, but the parameter {parameter.dtype}.")


def _hyper_optimizer(trainer: TrainingState, state: dict | None, _) -> None:
    """Let a copy of the optimiser load the state and take a step, as optimisers of torch have different states."""
    if trainer.hyper_optimizer is None:
        return
    tried = copy.deepcopy(trainer.hyper_optimizer)
    own = tried.state_dict()["param_groups"]
    tried.load_state_dict(copy.deepcopy(state))
    _like(state["state"], tried.state_dict()["state"], "state")
    groups = tried.state_dict()["param_groups"]
    _settings(groups, own)
    for told, group, mine in zip(state["param_groups"], groups, own, strict=True):
        # torch fills in settings that an older version did not save.
        if missing := [name for name in mine.keys() - told.keys() if group.get(name) != mine[name]]:
            raise ValueError(f"its param_groups lack {', '.join(missing)}.")
    parameters = [parameter for group in tried.param_groups for parameter in group["params"]]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    tried.step()
    if not all(parameter.isfinite().all() for parameter in parameters):
        raise ValueError("a step with it makes ψ infinite or NaN.")


def _scheduler(which: str) -> Callable:
    def check(trainer: TrainingState, state: dict | None, _) -> None:
        scheduler = getattr(trainer, which)
        if scheduler is None:
            return
        own = scheduler.state_dict()
        # torch's private flags depend on its version, and settings can be keys, as in MultiStepLR's milestones.
        told = {name for name in own if not name.startswith("_") or name in (*COUNTS, *RATES)}
        if missing := sorted(told - state.keys()):
            raise ValueError(f"{', '.join(missing)} is missing.")
        for name in own.keys() & state.keys():
            _like(state[name], own[name], name, keys=False)
        for name in COUNTS:
            if type(state.get(name, 0)) is not int or state.get(name, 0) < 0:
                raise ValueError(f"{name} is {state[name]!r}; it must be an int that is not negative.")
        for name in RATES:
            _check_not_negative(state.get(name, []), name)
        if type(scheduler).__module__ == LRScheduler.__module__:  # other schedulers may not be copyable
            _check_not_negative(_next_rates(scheduler, state), "the rate after its next step")

    return check


def _next_rates(scheduler: LRScheduler, state: dict) -> list:
    """Return the learning rates that a copy of the scheduler with this state sets next, on an optimiser of dummies."""
    groups = [group | {"params": [torch.zeros((), device="cpu")]} for group in scheduler.optimizer.param_groups]
    optimizer = torch.optim.SGD(groups)
    tried = copy.deepcopy(scheduler, {id(scheduler.optimizer): optimizer})
    tried.load_state_dict(copy.deepcopy(state))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the optimiser has not taken a step
        tried.step()
    return [group["lr"] for group in optimizer.param_groups]


def _best(trainer: TrainingState, state: dict | None, _) -> None:
    if trainer.best is None:
        return
    best = Best(**state)
    _like(state, vars(Best(state=best.state, division=best.division)))
    if not isinstance(best.division, str):
        raise ValueError(f"division is {best.division!r}; it must be text.")
    if type(best.step) is not int or best.step < 0 or math.isnan(best.lml):
        raise ValueError(f"step {best.step} with L_ML {best.lml}; they must be an int and a number.")
    own = dict(tensors(trainer.model)) if best.step else {}
    _like(kinds(best.state), kinds(own), "state")


def _generator(trainer: TrainingState, state: Tensor, _) -> None:
    torch.Generator().set_state(state)


def _noises(trainer: TrainingState, states: list, rank: int) -> None:
    if not isinstance(states, list) or not states:
        raise TypeError(f"there is a {type(states).__name__} instead of a list of each rank's.")
    for state in states[rank : rank + 1]:
        random_state.check_state(state, trainer.device)


def _history(trainer: TrainingState, state: dict, _) -> None:
    _like(dict.fromkeys(state), dict.fromkeys(vars(History())))
    history = History(**state)
    history.check()
    steps, k = history.steps["step"], history.steps["k"]
    if steps != list(range(1, len(steps) + 1)):
        raise ValueError("the steps are not numbered 1, 2, 3, ...")
    if steps and history.values.keys() != trainer.values().keys():
        raise ValueError(f"the values are of {[*history.values]}, but this trainer's of {[*trainer.values()]}.")
    possible = [0] if trainer.one_pass else range(1, trainer.chunks.count + 1)
    if not all(each in possible for each in k):
        raise ValueError(f"k is not in {[*possible]}.")


PARTS = {
    "model": _model,
    "optimizer": _optimizer,
    "hyper_optimizer": _hyper_optimizer,
    "scheduler": _scheduler("scheduler"),
    "hyper_scheduler": _scheduler("hyper_scheduler"),
    "best": _best,
    "generator": _generator,
    "noises": _noises,
    "history": _history,
}


def _settings(groups: list[dict], own: list[dict]) -> None:
    """Raise ValueError unless an optimiser's groups have valid numbers, of the same types as this trainer's."""
    for i, (group, mine) in enumerate(zip(groups, own, strict=True)):
        _like({name: group[name] for name in mine.keys() & group.keys()}, mine, f"param_groups.{i}")
        for at, value in leaves({n: v for n, v in group.items() if n != "params"}, f"param_groups.{i}"):
            if isinstance(value, int | float | Tensor):
                _check_not_negative([value], at)
        if not all(beta < 1 for beta in group.get("betas", ())):
            raise ValueError(f"param_groups.{i}.betas are {group['betas']}; each must be in [0, 1).")


def _check_not_negative(numbers: list, at: str) -> None:
    for number in numbers:
        if not 0 <= number <= LARGEST:
            raise ValueError(f"{at} is {number}; it must be a number in [0, {LARGEST:g}].")


def _like(found, own, at: str = "", *, keys: bool = True) -> None:
    """Raise ValueError unless a value and its contents have the types of this trainer's; None accepts any value.

    Args:
        keys: whether dicts must have the same keys.
    """
    if own is None:
        return
    if isinstance(own, Tensor):
        if not isinstance(found, Tensor) or _kind(found) != _kind(own):
            _raise_unlike(at, found, own)
    elif isinstance(own, Mapping):
        if not isinstance(found, Mapping):
            _raise_unlike(at, found, own)
        if keys and (different := sorted(map(str, found.keys() ^ own.keys()))):
            raise ValueError(f"{at} and this trainer's differ in {', '.join(different)}.".lstrip())
        for name in found.keys() & own.keys():
            _like(found[name], own[name], f"{at}.{name}".lstrip("."), keys=keys)
    elif isinstance(own, list | tuple):
        if not isinstance(found, list | tuple) or len(found) != len(own):
            _raise_unlike(at, found, own)
        for i, (one, mine) in enumerate(zip(found, own, strict=True)):
            _like(one, mine, f"{at}.{i}", keys=keys)
    elif isinstance(own, str):
        if found != own:
            _raise_unlike(at, found, own)
    elif isinstance(own, int | float) and not isinstance(own, bool):
        if not isinstance(found, int | float) or isinstance(found, bool) or math.isfinite(own) > math.isfinite(found):
            _raise_unlike(at, found, own)
    elif type(found) is not type(own):
        _raise_unlike(at, found, own)


def _raise_unlike(at: str, found, own) -> None:
    shown = [_kind(value) if isinstance(value, Tensor) else repr(value)[:60] for value in (found, own)]
    raise ValueError(f"{at or 'it'} is {shown[0]}, but this trainer's {shown[1]}.")


def leaves(value, at: str = "") -> Iterator[tuple[str, object]]:
    """Yield the leaves of nested dicts, lists and tuples, each with its path."""
    if not isinstance(value, Mapping | list | tuple):
        yield at, value
        return
    for name, one in value.items() if isinstance(value, Mapping) else enumerate(value):
        yield from leaves(one, f"{at}.{name}".lstrip("."))
