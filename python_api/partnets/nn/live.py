"""subnetwork: which subnetwork of a model computes, and which partition learns."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch._C import _is_any_autocast_enabled

from partkernels.arguments import check_live
from partkernels.autograd_threads import hand_on, handed_on
from partnets.hyper import hyperparameters
from partnets.nn.partitioned import HANDED_ON, Partitioned, count, partitioned_layers
from partnets.nn.several import Several, grouped, grouping
from partnets.nn.shown import check_unwritten
from partnets.utils.in_thread import SEVERAL, holding
from partnets.utils.modules import frozen


@contextmanager
def subnetwork(
    model: nn.Module, active: int | Tensor, update: int | Tensor | None = None, *, hyper: bool = False
) -> Iterator[None]:
    """Inside, the model is its subnetwork w_s^(active), and gradients reach partition `update` only (Eq. 3).

    With update=None no parameter of a partitioned layer receives a gradient, and none is computed (Eq. 4). With a
    partition to learn, ψ receives none: the training loss would drive it to what fits the training data. The backward
    pass may run inside or outside; outside, activation checkpoints need partnets.checkpoint_contexts. On leaving, also
    by an exception, every layer is as before.

    It holds in the thread that enters it, and in the backward passes that this thread starts: others can compute other
    subnetworks of the model meanwhile, and a thread that is started inside begins outside. Copies of the model, by
    copy.deepcopy, pickle or torch.save, are in no subnetwork. Don't await or yield inside: tasks of one thread would
    share it, which raises on leaving.

    Under torch.compile each pair of active and update is a compilation of its own, C (C + 3) / 2 in all. Past
    torch._dynamo.config.recompile_limit, 8, torch runs the rest uncompiled and warns, or raises with fullgraph=True:
    from C = 3 on set that limit, or torch.compile's argument of this name, to as many.

    **A number for each example** (Appendix C): with tensors [N], `model(...)` computes each example in its subnetwork,
    and each partition learns from its own examples alone. Tensors that the model is given are divided where their first
    dimension is N, and so must be what it gives; others go to all examples. The examples of one subnetwork and one
    `update` are a batch of their own, as for BatchNorm, computed one after another, in order and without copies where
    `active` is sorted. Its layers alone, called outside of the model's own call, raise; what its forward leaves in an
    attribute is that of the last group.

    Args:
        model: with partitioned layers, all of C partitions; or such a layer.
        active: k, 1..C; or int [N].
        update: 1..active, or None; or int [N], 0 for examples from which no partition learns.
        hyper: whether ψ, the parameters of partnets.hyper's modules, receive gradients also where a partition learns.

    Raises:
        ValueError: active or update is out of range, or the model has no partitioned layers; nothing has changed then.
            In a call of a model of several subnetworks: no input has N rows, or a part of the output has not.
        RuntimeError: on leaving, another one was entered in this thread meanwhile and is not left.

    Example:
        >>> import torch, partnets
        >>> layer = partnets.Linear(4, 3, proportions=(0.5, 0.5), seed=0)
        >>> with subnetwork(layer, active=1, update=1):
        ...     layer(torch.ones(2, 4)).sum().backward()
        >>> layer.bias.grad
        tensor([[2., 2., 2.],
                [0., 0., 0.]])
        >>> layer.bias.grad = None
        >>> with subnetwork(layer, active=torch.tensor([1, 2, 2]), update=torch.tensor([1, 2, 0])):
        ...     layer(torch.ones(3, 4)).sum().backward()
        >>> layer.bias.grad
        tensor([[1., 1., 1.],
                [1., 1., 1.]])
    """
    last = count(model)
    layers = [layer for _, layer in partitioned_layers(model)]
    if isinstance(active, Tensor) or isinstance(update, Tensor):
        several = Several(grouped(active, update, last), partial(subnetwork, model, hyper=hyper))
        with live(dict.fromkeys(layers, several)), grouping(model, layers[0]), holding({SEVERAL: True}):
            yield
        for layer in layers:
            if layer._live.unlearned is not None:  # which of them it was is not known in the backward pass
                layer._live.unlearned = several
        return
    for layer in layers:
        check_unwritten(layer)
    check_live(layers[0], active, update)  # of a partition it reads the count alone
    withheld = hyperparameters(model) if update is not None and not hyper else ()
    with live(dict.fromkeys(layers, (active, update))), frozen(withheld):
        yield


@contextmanager
def trying(model: nn.Module) -> Iterator[None]:
    """Inside, subnetworks are tried; afterwards no partition counts as having learned: a step would do nothing."""
    layers = [layer for _, layer in partitioned_layers(model)]
    before = [set(layer._live.learned) for layer in layers]
    try:
        yield
    finally:
        for layer, learned in zip(layers, before, strict=True):
            layer._live.learned.clear()
            layer._live.learned.update(learned)


@contextmanager
def live(subnetworks: Mapping[Partitioned, tuple[int, int | None] | Several]) -> Iterator[None]:
    """Inside, in this thread, each of these layers has these `active` and `update`."""
    outside = handed_on(HANDED_ON, {})
    before = {layer: layer._live.now for layer in subnetworks}
    try:
        hand_on(HANDED_ON, {**outside, **subnetworks})
        for layer, state in subnetworks.items():
            layer._live.now = state
            if isinstance(state, tuple) and state[1] is not None:
                layer._live.learned.add(state[1])
        yield
        if _is_mixed(subnetworks):
            raise RuntimeError(
                "another partnets.subnetwork was entered here in the same thread and not left, as where an await or a"
                " yield comes between: what was computed since may be of either. Compute in a thread of its own, or"
                " without waiting inside."
            )
    finally:
        # Whoever is mixed up leaves all outside: what was before may be another's that has left.
        mixed = _is_mixed(subnetworks)
        for layer, state in before.items():
            layer._live.now = None if mixed else state
        hand_on(HANDED_ON, {} if mixed else outside)
        _pass.begin(None)
        if not torch.compiler.is_compiling() and _is_any_autocast_enabled():
            # A step may follow, and a loop inside of torch.autocast would keep the copies from before the step.
            torch.clear_autocast_cache()


class Pass(threading.local):
    """What modules keep while the present thread computes where nothing learns; see OwnState.

    Attributes:
        now: the `active` and `update` for which it is, by identity: each partnets.subnetwork has its own.
        kept: of each module.
        memo: what has been copied for it.
    """

    def __init__(self) -> None:
        self.begin(None)

    def begin(self, now: tuple[int, int | None] | None) -> None:
        self.now, self.memo = now, {}
        self.kept: dict[nn.Module, nn.Module] = {}


_pass = Pass()


def passing(now: tuple[int, int | None]) -> Pass:
    """What the present thread keeps of this pass."""
    if _pass.now is not now:
        _pass.begin(now)
    return _pass


def _is_mixed(subnetworks: Mapping[Partitioned, tuple[int, int | None]]) -> bool:
    """Whether another context has made other subnetworks live and is not left."""
    return any(layer._live.now is not state for layer, state in subnetworks.items())
