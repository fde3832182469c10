"""InnerSteps: steps of partition k as a function of ψ, and how a loss after them changes with ψ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from partnets.hyper import penalties
from partnets.hyper.penalty import penalised
from partnets.nn.batch_norm import heedless_norms, partitioned_norms
from partnets.nn.entries import put, take
from partnets.nn.live import subnetwork
from partnets.nn.own_state import OwnState
from partnets.nn.partitioned import partitioned_layers
from partnets.optim.base import PartitionedOptimizer
from partnets.optim.followed import followed
from partnets.training.start import check_finite
from partnets.utils.held import Held
from partnets.utils.modules import device_of, evaluating, is_sharded, replaced
from partnets.utils.random_state import get_state, preserved, set_state

Compute = Callable[[Any], Tensor]
# Of each parameter in turn: a tensor like it; or the entries of it that the partition owns, packed.
Whole = list[Tensor]
Packed = list[Tensor]
# How far finite differences move the weights: a Euclidean norm, by the size of their dtype in bytes.
MOVES = {8: 1e-4, 4: 1e-2, 2: 1e-1}


class Taken(NamedTuple):
    """A step of w_k, and what the way back through it needs.

    Attributes:
        weights: before it.
        gradients: of the training loss, with their graph if it is kept; None where it reaches nothing.
        batch, noise: of which they are, and the random states before them.
        entries, slopes, states: leaves: the owned entries, their gradients, and the optimiser's states of them.
        after, states_after: what the step makes of them.
    """

    weights: Whole
    gradients: list[Tensor | None]
    batch: Any
    noise: dict
    entries: Packed
    slopes: Packed
    states: list[dict]
    after: Packed
    states_after: list[dict]


@contextmanager
def leaving_nothing(model: nn.Module) -> Iterator[None]:
    """Inside, normalisation layers normalise as where weights learn; afterwards all is as if nothing had learned."""
    layers = [layer for _, layer in partitioned_layers(model)]
    keepers = [*partitioned_norms(model), *(layer for layer in layers if isinstance(layer, OwnState))]
    held, learned = [Held(layer) for layer in keepers], [set(layer._live.learned) for layer in layers]
    try:
        with evaluating(*heedless_norms(model)):
            yield
    finally:
        for one in held:
            one.put_back()
        for layer, before in zip(layers, learned, strict=True):
            layer._live.learned.clear()
            layer._live.learned.update(before)


class InnerSteps:
    """Steps of w_k on batches of D_1:k, from the present weights on; use it inside of leaving_nothing.

    Args:
        model: with partitioned layers.
        optimizer: of partnets.optim, of this model: the steps are as its next ones.
        k: 1..C.
        loss: loss(batch), computed by the model; penalties are added to it.
        psi: the parameters of which the steps are a function.
        exact: whether second derivatives are those of graphs that are kept, or finite differences.

    Raises:
        ValueError: parameters are sharded.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: PartitionedOptimizer,
        k: int,
        loss: Compute,
        psi: Iterable[nn.Parameter],
        exact: bool = True,
    ) -> None:
        self.model, self.optimizer, self.k, self.loss = model, optimizer, k, loss
        self.psi, self.exact = list(psi), exact
        self.groups = {
            parameter: group
            for group in optimizer.param_groups
            for parameter in group["params"]
            if optimizer.entries_of(parameter, parameter, k) is not None
        }
        self.parameters = list(self.groups)
        if any(map(is_sharded, self.parameters)):
            raise ValueError(
                "the model is sharded, and a step of ψ that looks ahead needs whole weights on each rank: train on one"
                " rank, or compare values by partnets.sweep."
            )
        self.weights: Whole = self.parameters
        self.states: list[dict] | None = None
        self.taken: list[Taken] = []

    def step(self, batch: Any) -> None:
        """A step of w_k."""
        noise, first = get_state(device_of(self.model)), self.states is None
        gradients = self._gradients(batch, self.weights, self.weights, graph=self.exact)
        pairs = zip(gradients, self.parameters, strict=True)
        whole = [torch.zeros_like(parameter) if grad is None else grad for grad, parameter in pairs]
        entries, slopes = ([one.clone().requires_grad_() for one in self.take(each)] for each in (self.weights, whole))
        states, after, states_after = self.states or [{} for _ in entries], [], []
        for i, (parameter, group) in enumerate(self.groups.items()):
            optimizer, settings, state = self.optimizer.as_torchs(parameter, group, self.k)
            states[i] = state if first else {name: _leaf(value) for name, value in states[i].items()}
            rate = self.optimizer.rate_to_follow(parameter, group)
            if gradients[i] is None:  # a step leaves it out
                after.append(entries[i] * 1), states_after.append(states[i])
                continue
            found = followed(optimizer, settings, states[i], entries[i], slopes[i], rate)
            after.append(found[0]), states_after.append(found[1])
        self.taken.append(Taken(self.weights, gradients, batch, noise, entries, slopes, states, after, states_after))
        self.weights = [weight.requires_grad_() for weight in self._put(self.weights, after)]
        self.states = [dict(state) for state in states_after]

    def judged(
        self, batch: Any, loss: Compute, psi: Sequence[nn.Parameter], training_only: Iterable[nn.Module]
    ) -> tuple[Tensor, Packed, list[Tensor | None]]:
        """The loss of subnetwork k after the steps, its gradient by w_k, and by ψ through the forward pass."""
        weights = [weight.detach().requires_grad_() for weight in self.weights]
        with self._computing(weights), evaluating(*training_only), penalties():
            value = loss(batch)
        found = torch.autograd.grad(value, [*weights, *psi], allow_unused=True)
        by_weights, by_psi = found[: len(weights)], list(found[len(weights) :])
        pairs = zip(by_weights, weights, strict=True)
        return value.detach(), self.take([torch.zeros_like(w) if by is None else by for by, w in pairs]), by_psi

    def back(self, by_weights: Packed) -> list[Tensor | None]:
        """From a loss's gradient by w_k after the steps, its gradient by ψ through them; they are forgotten."""
        total: list[Tensor | None] = [None] * len(self.psi)
        by_states: list[dict] = [{} for _ in self.parameters]
        while self.taken:
            one = self.taken.pop()
            outputs, given = list(one.after), list(by_weights)
            for after, by in zip(one.states_after, by_states, strict=True):
                outputs += [after[name] for name in by]
                given += by.values()
            names = [[name for name, value in state.items() if _requires_grad(value)] for state in one.states]
            leaves = [state[name] for state, own in zip(one.states, names, strict=True) for name in own]
            wanted = [*one.entries, *one.slopes, *leaves, *self.psi]
            found = iter(torch.autograd.grad(outputs, wanted, given, allow_unused=True))
            by_entries = [next(found) for _ in one.entries]
            by_slopes = [torch.zeros_like(slope) if (by := next(found)) is None else by for slope in one.slopes]
            by_states = [{name: by for name in own if (by := next(found)) is not None} for own in names]
            mixed, through = self._second(one, by_slopes, further=bool(self.taken))
            by_weights = [by if more is None else by + more for by, more in zip(by_entries, through, strict=True)]
            total = _added(_added(total, [*found]), mixed)
        return total

    def solved(self, batch: Any, by_weights: Packed, solve: Callable, damping: float) -> list[Tensor | None]:
        """From a loss's gradient by w_k, its gradient by ψ through where the training loss would be least.

        Args:
            batch: of which the training loss is.
            by_weights: the gradient.
            solve: solve(product, right) gives x with H x = right, H being the Hessian of the training loss by w_k.
            damping: added to its diagonal.
        """
        gradients = self._gradients(batch, self.weights, self.weights, graph=True)
        lengths = [len(entries) for entries in by_weights]

        def product(vector: Tensor) -> Tensor:
            found = _products(gradients, self.weights, self._spread(vector.split(lengths)))
            parts = [torch.zeros_like(p) if by is None else by for p, by in zip(self.parameters, found, strict=True)]
            return torch.cat(self.take(parts)) + damping * vector

        solution = solve(product, torch.cat(by_weights))
        found = _products(gradients, self.psi, self._spread(solution.split(lengths)))
        return [None if by is None else -by for by in found]

    def _second(self, one: Taken, by_slopes: Packed, further: bool) -> tuple[list, list]:
        """What by_slopes times the gradient of the training loss has as derivatives by ψ and, if further, by w_k."""
        weights = one.weights if further else []
        direction = self._spread(by_slopes)
        if self.exact:
            found = _products(one.gradients, [*self.psi, *weights], direction)
        else:
            found = self._difference(one, direction, weights)
        by_psi, by_weights = found[: len(self.psi)], found[len(self.psi) :]
        return by_psi, [None if by is None else self._take_one(i, by) for i, by in enumerate(by_weights)] or [
            None for _ in self.parameters
        ]

    def _difference(self, one: Taken, direction: Whole, wanted: Whole) -> list[Tensor | None]:
        """The same by two gradients of the training loss, with the noise of its first (Liu et al. 2019)."""
        length = torch.stack([each.double().norm() for each in direction]).norm().item()
        if not length:
            return [None] * (len(self.psi) + len(wanted))
        move = min(MOVES[each.itemsize] for each in direction) / length
        found = []
        for sign in (1, -1):
            moved = [
                weight.detach().add(each, alpha=sign * move).requires_grad_(bool(wanted))
                for weight, each in zip(one.weights, direction, strict=True)
            ]
            with preserved(device := device_of(self.model)):
                set_state(one.noise, device)
                found.append(self._gradients(one.batch, moved, [*self.psi, *(moved if wanted else [])]))
        return [
            None if plus is None or minus is None else (plus - minus) / (2 * move)
            for plus, minus in zip(*found, strict=True)
        ]

    def _gradients(self, batch: Any, weights: Whole, wanted: Sequence[Tensor], graph: bool = False) -> list:
        """Of the training loss of subnetwork k with these weights."""
        with self._computing(weights):
            total = penalised(self.loss, batch)[1]
        check_finite(total, "a step of the weights that a step of ψ looks through")
        if not total.requires_grad:
            return [None] * len(wanted)
        return list(torch.autograd.grad(total, wanted, create_graph=graph, allow_unused=True))

    @contextmanager
    def _computing(self, weights: Whole) -> Iterator[None]:
        """Inside, the model is subnetwork k with these weights, of which w_k learns."""
        given = dict(zip(self.parameters, weights, strict=True))
        # torch's fused attention has no second derivative.
        attention = sdpa_kernel(SDPBackend.MATH) if self.exact else nullcontext()
        with replaced(self.model, given), subnetwork(self.model, self.k, self.k, hyper=True), attention:
            yield

    def take(self, tensors: Whole) -> Packed:
        """The entries of w_k, detached."""
        return [self._take_one(i, tensor) for i, tensor in enumerate(tensors)]

    def _take_one(self, i: int, tensor: Tensor) -> Tensor:
        (view,), partition = self.optimizer.entries_of(self.parameters[i], tensor.detach(), self.k)
        return take(view, partition, self.k)

    def _put(self, tensors: Whole, entries: Packed) -> Whole:
        """Copies of tensors with these entries of w_k."""
        found = [tensor.detach().clone() for tensor in tensors]
        for parameter, tensor, values in zip(self.parameters, found, entries, strict=True):
            (view,), partition = self.optimizer.entries_of(parameter, tensor, self.k)
            put(view, partition, self.k, values.detach())
        return found

    def _spread(self, entries: Packed) -> Whole:
        """Entries of w_k among zeros."""
        return self._put([torch.zeros_like(parameter) for parameter in self.parameters], entries)


def _products(outputs: list[Tensor | None], wanted: list[Tensor], given: Whole) -> list[Tensor | None]:
    """The derivatives of the sum of outputs times what is given, for those that depend on something."""
    pairs = [(one, by) for one, by in zip(outputs, given, strict=True) if one is not None and one.requires_grad]
    if not pairs:
        return [None] * len(wanted)
    outputs, given = zip(*pairs, strict=True)
    return list(torch.autograd.grad(outputs, wanted, given, retain_graph=True, allow_unused=True))


def _added(one: Sequence[Tensor | None], other: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [b if a is None else a if b is None else a + b for a, b in zip(one, other, strict=True)]


def _leaf(value: Any) -> Any:
    """A moment, as of which the way back gives a derivative; what counts steps stays as it is."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(value.dim() > 0 and value.is_floating_point())


def _requires_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
