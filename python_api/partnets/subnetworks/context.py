"""subnetwork: which subnetwork a model is, and which partition learns."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch._C import _is_any_autocast_enabled
from torch.nn.utils import parametrize

from partnets.hyper.hyperparameter import hyperparameters_among
from partnets.subnetworks.per_example import grouped, grouping
from partnets.subnetworks.state import (
    PER_EXAMPLE,
    Entry,
    outside,
    partitioned_modules,
    put_back,
    state_of,
)
from partnets.subnetworks.switch import Switch, switch_of
from partnets.utils.in_thread import SEVERAL, holding
from partnets.utils.modules import frozen, modules_of


@contextmanager
def subnetwork(
    model: nn.Module,
    active: int | Tensor,
    update: int | Tensor | None = None,
    *,
    hyper: bool = False,
    masked: bool = True,
) -> Iterator[None]:
    """Make a model its subnetwork w_s^(active); gradients reach partition `update` only (Eq. 3).

    In the context, the model's parameters are the active weights for all code: its modules, hooks, tied weights, and
    torch.func.functional_call. On leaving, also by an exception, they are those of the whole network again. The entries
    that differ are exchanged in place, so the backward pass must run in the context too: afterwards it raises. The same
    holds for copying and saving the model, which raise in the context, and for other threads: a model is one subnetwork
    at a time; give each thread a copy.

    With update=None no parameter of the network receives a gradient, and none is computed (Eq. 4); normalisation layers
    in training mode use the batch, and leave their running statistics unchanged. With a partition to learn, ψ receives
    no gradient: the training loss would fit it to the training data.

    Gradients are 0 outside of partition `update`. The gradient of a bias or a scale, which has a vector for each
    partition, is that of the vector of `update`; gradients of other partitions are set aside until their step.

    torch.compile needs two graphs for any C, one where weights learn and one where none do. Nested partitions need
    graphs for each subnetwork, as shapes differ.

    **A number for each example** (Appendix C): with tensors [N], `model(...)` computes each example in its subnetwork,
    and each partition learns from its own examples only. Inputs whose first dimension is N are divided; others go to
    all examples; outputs must have N rows. The examples of one subnetwork and one `update` are a batch of their own, as
    for BatchNorm. The weights of each are computed from the whole network's, at the cost of a copy.

    Args:
        model: a partitioned model with C partitions, or a part of one.
        active: k, 1..C; or int [N].
        update: 1..active, or None; or int [N], 0 for examples from which no partition learns.
        hyper: whether ψ, the parameters of partnets.hyper's modules, receives gradients also where a partition learns.
        masked: whether gradients are masked as they arrive. The optimizers of partnets.optim do not read entries of
            other partitions; where nothing else reads gradients, False saves a pass over them.

    Raises:
        ValueError: active or update is out of range, or the model is not partitioned; nothing has changed then. In a
            call with several subnetworks: no input has N rows, or a part of the output has not.
        RuntimeError: another thread is in a subnetwork of this model; a bias or scale was written into since the last
            step; or, on leaving, a parameter was written into, other than by partnets.optim.

    Example:
        >>> import partnets
        >>> layer = partnets.Linear(4, 3, proportions=(0.5, 0.5), seed=0)
        >>> with subnetwork(layer, active=1, update=1):
        ...     layer(torch.ones(2, 4)).sum().backward()
        >>> torch.equal(layer.weight.grad != 0, partnets.partitions(layer)["weight"].mask(1))
        True
        >>> layer.bias.grad
        tensor([2., 2., 2.])
    """
    modules = modules_of(model)
    with selected(switch_of(model, modules), modules, active, update, hyper=hyper, masked=masked):
        yield


@contextmanager
def selected(
    switch: Switch,
    modules: list[nn.Module],
    active: int | Tensor,
    update: int | Tensor | None,
    *,
    hyper: bool = False,
    masked: bool = True,
) -> Iterator[None]:
    """Make a model its subnetwork by its present switch and modules, the model first; see subnetwork."""
    if isinstance(active, Tensor) or isinstance(update, Tensor):
        groups = grouped(active, update, switch.num_partitions)
        with (
            _entered(switch, switch.num_partitions, PER_EXAMPLE),
            grouping(modules[0], groups, switch, () if hyper else hyperparameters_among(modules)),
            holding({SEVERAL: True}),
        ):
            for state in switch.states:
                state.learned |= {group.update for group in groups if group.update}
            yield
        return
    _check(switch.num_partitions, active, update)
    withheld = hyperparameters_among(modules) if update is not None and not hyper else ()
    with _entered(switch, active, update, masked), frozen(withheld):
        yield


def _check(num_partitions: int, active: int, update: int | None) -> None:
    if type(active) is not int or not 1 <= active <= num_partitions:
        raise ValueError(
            f"active={active!r}, but this model has {num_partitions} partitions; pass an int from 1 to"
            f" {num_partitions}."
        )
    if update is not None and (type(update) is not int or not 1 <= update <= active):
        raise ValueError(f"update={update!r} with active={active}; pass an int from 1 to {active}, or None.")


@contextmanager
def _entered(switch: Switch, active: int, update: int | None, masked: bool = True) -> Iterator[None]:
    entry = Entry(update, threading.get_ident(), masked)
    before, actives = _claimed(switch, entry), [state.active for state in switch.states]
    still, statistics, written, is_entered, failed = [], [], [], False, None
    is_outermost = all(one.thread is None for one in set(before))
    is_whole = active == update == switch.num_partitions
    try:
        if is_outermost and all(one.active == one.num_partitions for one in switch.states):
            switch.prepare()
        still = [] if update == PER_EXAMPLE else switch.still(update)
        switch.move(active)
        if is_outermost and not is_whole:
            switch.renew()
        # Where nothing learns, BatchNorm in training mode normalises by the batch, and its statistics stay.
        statistics = [] if update is not None else switch.followed_statistics()
        switch.note()
        if update not in (None, PER_EXAMPLE):
            for state in switch.states:
                state.learned.add(update)
        for parameter in still:
            parameter.requires_grad_(False)
        switch.fit()
        _clear_caches()
        is_entered = True
        try:
            yield
        finally:
            if entry.unscaled:
                switch.scale_gradients(entry.unscaled, active, update)
    finally:
        for parameter in still:
            parameter.requires_grad_(True)
        if statistics:
            switch.widen()  # which writes statistics of narrow modules back
            put_back(statistics)
        is_crossed = is_entered and any(state.entry is not entry for state in switch.states)
        if is_crossed:
            before = [outside(switch.num_partitions)] * len(before)
            actives = [switch.num_partitions] * len(before)
        if is_entered and not is_crossed:
            written = switch.written()
            try:
                switch.check_statistics()
            except RuntimeError as error:
                failed = error
        if not (switch.is_resident and is_outermost):
            switch.move(actives)
            if is_outermost and not is_whole:
                switch.renew()
            switch.fit()
            switch.note()
        else:
            switch.widen()  # code that reads parameters between subnetworks finds whole ones
        for state, was in zip(switch.states, before, strict=True):
            state.entry = was
        _clear_caches()
    if is_crossed:
        raise RuntimeError(
            "subnetworks of this model were left in another order than they were entered in, such as by await inside of"
            " partnets.subnetwork; use a copy of the model for each task."
        )
    if failed is not None:
        raise failed
    if written:
        names = ", ".join([*dict.fromkeys(f"{one.name} of {type(one.module).__name__}" for one in written)][:3])
        raise RuntimeError(
            f"{names} was written into inside of partnets.subnetwork; write into parameters outside of it, and step"
            " them by partnets.optim."
        )


def _claimed(switch: Switch, entry: Entry) -> list[Entry]:
    """Let the modules of a model enter a subnetwork; return the entries that they are in until then."""
    with _claiming:
        before = [state.entry for state in switch.states]
        if any(one.thread not in (None, entry.thread) for one in set(before)):
            raise RuntimeError(
                "another thread is inside of partnets.subnetwork with this model, which can be one subnetwork at a"
                " time; use a copy of the model in each thread."
            )
        for state in switch.states:
            state.entry = entry
    return before


_claiming = threading.Lock()


def _clear_caches() -> None:
    """Clear torch's caches of tensors that it computed from the previous weights."""
    if not torch.compiler.is_compiling() and _is_any_autocast_enabled():
        torch.clear_autocast_cache()
    if parametrize._cache_enabled:
        parametrize._cache.clear()


@contextmanager
def resident(model: nn.Module) -> Iterator[None]:
    """Leave a model in its last subnetwork between those that are entered in this context, which saves an exchange.

    Meanwhile only partnets' own functions may look at the model; others need `whole`.

    Args:
        model: a partitioned model.
    """
    switch = switch_of(model)
    switch.is_resident, before = True, switch.is_resident
    try:
        yield
    finally:
        switch.is_resident = before
        if not before:
            settle(switch)


@contextmanager
def whole(model: nn.Module) -> Iterator[None]:
    """Make a model the whole network, and leave subnetworks at once in this context, also inside of `resident`."""
    switch = switch_of(model)
    switch.is_resident, before = False, switch.is_resident
    settle(switch)
    try:
        yield
    finally:
        switch.is_resident = before


def settle(switch: Switch) -> None:
    """Make a model the whole network again, where `resident` has left it in a subnetwork."""
    if all(state.entry.thread is None for state in switch.states):
        switch.move([state.num_partitions for state in switch.states])
        switch.note()


@contextmanager
def trying(model: nn.Module) -> Iterator[None]:
    """Restore, on exit, which partitions have learned since their last step, and the gradients that were set aside."""
    states = [state_of(module) for module in partitioned_modules(model)]
    before = [
        (
            set(state.learned),
            {name: dict(kept) for name, kept in state.grads.items()},
            dict(state.grad_of),
            {name: seen for name, seen in state.grad_seen.items() if seen[2] is not None},  # copies may be put back
            set(state.grads_changed),
        )
        for state in states
    ]
    try:
        yield
    finally:
        for state, kept in zip(states, before, strict=True):
            state.learned, state.grads, state.grad_of, state.grad_seen, state.grads_changed = kept
