"""InnerSteps: steps of partition k as a function of ψ, and how a loss after them changes with ψ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from partnets.hyper import penalties
from partnets.hyper.penalty import penalised
from partnets.subnetworks.context import subnetwork, trying
from partnets.optim.base import PartitionedOptimizer
from partnets.optim.followed import followed
from partnets.subnetworks.statistics import other_norms, partitioned_norms
from partnets.subnetworks.switch import noted
from partnets.training.start import check_finite
from partnets.utils.held import Held
from partnets.utils.modules import device_of, evaluating, is_sharded
from partnets.utils.random_state import get_state, preserved, set_state
from partnets.utils.twice import twice_differentiable

Compute = Callable[[Any], Tensor]
# averaged(tensors, like): the means over ranks of tensors that are like others; None is 0 unless all ranks have None.
Averaged = Callable[[Sequence[Tensor | None], Sequence[Tensor]], list[Tensor | None]]
# Of each parameter in turn: a tensor like it; or the entries of it that the partition owns, packed.
Whole = list[Tensor]
Packed = list[Tensor]
# How far finite differences move the weights: a Euclidean norm, by the size of their dtype in bytes.
MOVES = {8: 1e-4, 4: 1e-2}
# What torch's clipping adds to a norm.
CLIPPED = 1e-6


class Taken(NamedTuple):
    """A step of w_k, and what the way back through it needs.

    Attributes:
        weights: before it.
        gradients: of the training loss, with the graph that is kept; None for finite differences.
        slopes: the owned entries of the gradients; None where the loss reaches nothing.
        batch, noise: of which they are, and the random states before them.
        states: the optimiser's, of the owned entries before the step; None for its present ones.
        kept: what stateful modules kept before it.
    """

    weights: Whole
    gradients: list[Tensor | None] | None
    slopes: list[Tensor | None]
    batch: Any
    noise: dict
    states: list[dict] | None
    kept: list[Held]


def alone(tensors: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor | None]:
    """The means over this rank alone.

    Example:
        >>> alone([None, torch.ones(1)], [torch.zeros(2), torch.zeros(1)])
        [None, tensor([1.])]
    """
    return list(tensors)


def check_all_finite(loss: Tensor, averaged: Averaged, what: str) -> Tensor:
    """As check_finite, on all ranks: the others would wait for one that raises. Gives the mean over them."""
    (mean,) = averaged([loss.detach()], [loss])
    check_finite(mean, what)
    return mean


@contextmanager
def leaving_nothing(model: nn.Module) -> Iterator[None]:
    """Inside, normalisation layers normalise as where weights learn; afterwards all is as if nothing had learned."""
    held = [Held(layer) for layer in partitioned_norms(model)]
    try:
        with trying(model), evaluating(*other_norms(model)):
            yield
    finally:
        for one in held:
            one.put_back()


def _is_compiled(module: nn.Module) -> bool:
    """By module.compile(), or as what torch.compile(module) gives."""
    return getattr(module, "_compiled_call_impl", None) is not None or "_orig_mod" in module._modules


class InnerSteps:
    """Steps of w_k on batches of D_1:k, from the present weights on; use it inside of leaving_nothing.

    Args:
        model: with partitioned layers.
        optimizer: of partnets.optim, of this model: the steps are as its next ones.
        k: 1..C.
        loss: loss(batch), computed by the model; penalties are added to it.
        psi: the parameters of which the steps are a function.
        exact: whether second derivatives are those of graphs that are kept, or finite differences.
        clip: the gradient of w_k is scaled down to this norm where it is longer; None leaves it.
        averaged: over ranks that each have a part of the batches, and take the same steps.

    Raises:
        ValueError: parameters are sharded; or differences are asked for of weights in half precision.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: PartitionedOptimizer,
        k: int,
        loss: Compute,
        psi: Iterable[nn.Parameter],
        exact: bool = True,
        clip: float | None = None,
        averaged: Averaged = alone,
    ) -> None:
        self.model, self.optimizer, self.k, self.loss = model, optimizer, k, loss
        self.psi, self.exact, self.clip, self.averaged = list(psi), exact, clip, averaged
        self.groups = {
            parameter: group
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        }
        self.parameters = list(self.groups)
        self.owners = [optimizer.owner_of(parameter) for parameter in self.parameters]
        if not exact and any(parameter.itemsize not in MOVES for parameter in self.parameters):
            raise ValueError(
                "finite differences of weights in half precision are lost in rounding; pass Lookahead(exact=True), or"
                " keep the weights in float32, without autocast."
            )
        if exact and any(map(_is_compiled, model.modules())):
            raise ValueError(
                "a part of the model is compiled, of which torch gives no second derivatives, and by some of its"
                " backends wrong ones; pass Lookahead(exact=False), or compile nothing."
            )
        if any(map(is_sharded, self.parameters)):
            raise ValueError(
                "the model is sharded, and a step of ψ that looks ahead needs whole weights on each rank: train on one"
                " rank, or compare values by partnets.sweep."
            )
        self.weights: Whole = [owner.stored for owner in self.owners]
        self.present = self.weights
        self.states: list[dict] | None = None
        self.taken: list[Taken] = []

    def step(self, batch: Any, is_last: bool = False) -> None:
        """A step of w_k; after the last one the optimiser's states are not kept."""
        noise = get_state(device_of(self.model))
        held: list[Held] = []
        gradients = self._gradients(batch, self.weights, self.parameters, graph=self.exact)
        slopes = self._averaged([None if by is None else self._take_gradient(i, by) for i, by in enumerate(gradients)])
        kept = gradients if self.exact else None
        self.taken.append(Taken(self.weights, kept, slopes, batch, noise, self.states, held))
        del gradients
        factor, states = self._factor(slopes), []
        weights = [weight.detach().clone() for weight in self.weights]
        for i, slope in enumerate(slopes):
            entries = self._take_one(i, self.weights[i])
            with torch.no_grad():
                before = None if self.states is None else self.states[i]
                entries, state = self._stepped(i, entries, None if slope is None else factor * slope, before)
            self._put_one(i, weights[i], entries)
            states.append({} if is_last else state)
        self.weights, self.states = weights, states

    def _stepped(self, i: int, entries: Tensor, slope: Tensor | None, state: dict | None) -> tuple[Tensor, dict]:
        """What a step makes of a parameter's entries and their state, the optimiser's present one if None."""
        parameter = self.parameters[i]
        optimizer, settings, present = self.optimizer.as_torchs(parameter, self.groups[parameter], self.k)
        state = present if state is None else state
        rate = self.optimizer.rate_to_follow(parameter, self.groups[parameter])
        if slope is None:  # it leaves them out, whatever their rate
            return entries * 1 if rate is None else entries + 0 * rate, state
        return followed(optimizer, settings, state, entries, slope, rate)

    def _factor(self, slopes: list[Tensor | None]) -> float:
        """By how much clipping shortens the gradient, as torch.nn.utils.clip_grad_norm_ does."""
        return 1.0 if self.clip is None else min(1.0, self.clip / (_norm(slopes) + CLIPPED))

    def _unclipped(self, slopes: list[Tensor | None], by_slopes: list[Tensor | None]) -> list[Tensor | None]:
        """From derivatives by the clipped gradient those by the gradient."""
        if (factor := self._factor(slopes)) == 1:
            return by_slopes
        norm, pairs = _norm(slopes), list(zip(slopes, by_slopes, strict=True))
        along = sum((slope.double() @ by.double()).item() for slope, by in pairs if by is not None)
        turned = along / (norm * (norm + CLIPPED))
        return [None if by is None else factor * (by - turned * slope) for slope, by in pairs]

    def judged(
        self, batch: Any, loss: Compute, psi: Sequence[nn.Parameter], training_only: Iterable[nn.Module]
    ) -> tuple[Tensor, Packed, list[Tensor | None]]:
        """The loss of subnetwork k after the steps, its gradient by w_k, and this rank's by ψ that needs no step."""
        with self._computing(self.weights), evaluating(*training_only), penalties():
            value = loss(batch)
            found = torch.autograd.grad(value, [*self.parameters, *psi], allow_unused=True)  # checkpoints compute anew
        by_weights, by_psi = found[: len(self.parameters)], list(found[len(self.parameters) :])
        pairs = zip(by_weights, self.parameters, strict=True)
        by_weights = self.take_gradients([torch.zeros_like(w) if by is None else by for by, w in pairs])
        return value.detach(), self._averaged(by_weights), by_psi

    def back(self, by_weights: Packed) -> list[Tensor | None]:
        """From a loss's gradient by w_k after the steps, this rank's by ψ through them; they are forgotten.

        The mean of all ranks' is the gradient: what is the same on all of them is in each.
        """
        total: list[Tensor | None] = [None] * len(self.psi)
        by_states: list[dict] = [{} for _ in self.parameters]
        self.weights = []
        while self.taken:
            one, by_entries, by_slopes = self.taken.pop(), [], []
            factor = self._factor(one.slopes)
            for i, slope in enumerate(one.slopes):
                entries = self._take_one(i, one.weights[i]).clone().requires_grad_()
                slope = None if slope is None else (factor * slope).requires_grad_()
                state = None if one.states is None else {name: _leaf(value) for name, value in one.states[i].items()}
                after, state_after = self._stepped(i, entries, slope, state)
                moments = {name: value for name, value in (state or {}).items() if _requires_grad(value)}
                outputs = [after, *(state_after[name] for name in by_states[i])]
                wanted = [entries, *([] if slope is None else [slope]), *moments.values(), *self.psi]
                given = [by_weights[i], *by_states[i].values()]
                found = iter(torch.autograd.grad(outputs, wanted, given, allow_unused=True))
                by_entries.append(next(found))
                by_slopes.append(None if slope is None else next(found))
                by_states[i] = {name: by for name in moments if (by := next(found)) is not None}
                total = _added(total, [*found])
            further = bool(self.taken)
            mixed, through = self._second(one, self._unclipped(one.slopes, by_slopes), further)
            by_weights = [by if more is None else by + more for by, more in zip(by_entries, through, strict=True)]
            total = _added(total, mixed)
        return total

    def solved(self, batch: Any, by_weights: Packed, solve: Callable, damping: float) -> list[Tensor | None]:
        """From a loss's gradient by w_k, this rank's by ψ through where the training loss would be least.

        Args:
            batch: of which the training loss is.
            by_weights: the gradient.
            solve: solve(product, right) gives x with H x = right, H being the Hessian of the training loss by w_k.
            damping: added to its diagonal.
        """
        gradients = self._gradients(batch, self.weights, self.parameters, graph=True)
        lengths = [len(entries) for entries in by_weights]

        def product(vector: Tensor) -> Tensor:
            found = _products(gradients, self.parameters, self._spread(vector.split(lengths)))
            parts = [torch.zeros_like(p) if by is None else by for p, by in zip(self.parameters, found, strict=True)]
            return torch.cat(self._averaged(self.take_gradients(parts))) + damping * vector

        with self._computing(self.weights):
            solution = solve(product, torch.cat(by_weights))
            found = _products(gradients, self.psi, self._spread(solution.split(lengths)))
        return [None if by is None else -by for by in found]

    def _second(self, one: Taken, by_slopes: list[Tensor | None], further: bool) -> tuple[list, list]:
        """What by_slopes times the gradient of the training loss has as derivatives by ψ and, if further, by w_k."""
        wanted = [*self.psi, *(self.parameters if further else [])]
        if self.exact:
            with self._computing(one.weights):
                found = _products(one.gradients, wanted, self._spread(by_slopes))
        else:
            found = self._difference(one, by_slopes, wanted)
        by_psi, by_weights = found[: len(self.psi)], found[len(self.psi) :]
        if not further:
            return by_psi, [None] * len(self.parameters)
        packed = [None if by is None else self._take_gradient(i, by) for i, by in enumerate(by_weights)]
        return by_psi, self._averaged(packed)

    def _difference(self, one: Taken, by_slopes: list[Tensor | None], wanted: list[Tensor]) -> list[Tensor | None]:
        """The same by two gradients of the training loss, with the noise of its first (Liu et al. 2019).

        Weights whose gradient is 0 stay: of words that no example has, say, it is 0 whatever ψ is. Adam would move
        those the farthest, and all others by so little that nothing of it is left.
        """
        pairs = zip(by_slopes, one.slopes, strict=True)
        by_slopes = [None if by is None else by * (slope != 0) for by, slope in pairs]
        if not (length := _norm(by_slopes)):
            return [None if all(by is None for by in by_slopes) else torch.zeros_like(one) for one in wanted]
        move = min(MOVES[each.itemsize] for each in one.weights) / length
        found = []
        for sign in (1, -1):
            moved = self._moved(one.weights, by_slopes, sign * move)
            for held in one.kept:
                held.put_back()
            with preserved(device := device_of(self.model)):
                set_state(one.noise, device)
                found.append(self._gradients(one.batch, moved, wanted))
        return [
            None if plus is None or minus is None else (plus - minus) / (2 * move)
            for plus, minus in zip(*found, strict=True)
        ]

    def _moved(self, weights: Whole, by: Sequence[Tensor | None], length: float) -> Whole:
        """Copies of weights whose entries of w_k are moved in a direction."""
        moved = [weight.detach().clone() for weight in weights]
        for i, direction in enumerate(by):
            if direction is not None:
                self._put_one(i, moved[i], self._take_one(i, moved[i]).add(direction, alpha=length))
        return moved

    def _gradients(self, batch: Any, weights: Whole, wanted: Sequence[Tensor], graph: bool = False) -> list:
        """Of the training loss of subnetwork k with these weights."""
        with self._computing(weights):
            total = penalised(self.loss, batch)[1]
            check_all_finite(total, self.averaged, "a step of the weights that a step of ψ looks through")
            if not total.requires_grad:
                return [None] * len(wanted)
            return list(torch.autograd.grad(total, wanted, create_graph=graph, allow_unused=True))

    @contextmanager
    def _computing(self, weights: Whole) -> Iterator[None]:
        """Inside, the model is subnetwork k with these weights, of which w_k learns.

        They are in the parameters themselves, which others than their layers may read. Autograd is not told, and so
        a graph is gone back through with the weights that it was made with.
        """
        before = [] if weights is self.present else [tensor.detach().clone() for tensor in self.present]
        functions = twice_differentiable() if self.exact else nullcontext()
        with torch.autograd._unsafe_preserve_version_counter((*self.parameters, *self.present)):
            try:
                if before:
                    self._set(weights)
                with subnetwork(self.model, self.k, self.k, hyper=True), functions:
                    yield
            finally:
                if before:
                    self._set(before)
        noted(self.owners)

    @torch.no_grad()
    def _set(self, weights: Whole) -> None:
        for owner, tensor, weight in zip(self.owners, self.present, weights, strict=True):
            tensor.data.copy_(weight)
            owner.combine(owner.parameter.data)
        torch.clear_autocast_cache()  # of the weights before

    def _averaged(self, packed: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The means over ranks of entries of w_k."""
        return list(packed) if self.averaged is alone else self.averaged(packed, self.take(self.present))

    def take(self, tensors: Whole) -> Packed:
        """The entries of w_k, detached."""
        return [self._take_one(i, tensor) for i, tensor in enumerate(tensors)]

    def _take_one(self, i: int, tensor: Tensor) -> Tensor:
        return self.owners[i].take(tensor.detach(), self.k)

    def _put_one(self, i: int, tensor: Tensor, entries: Tensor) -> None:
        self.owners[i].put(tensor, self.k, entries)

    def take_gradients(self, gradients: Whole) -> Packed:
        """The entries of w_k of gradients, detached."""
        return [self._take_gradient(i, by) for i, by in enumerate(gradients)]

    def _take_gradient(self, i: int, gradient: Tensor) -> Tensor:
        owner = self.owners[i]
        return gradient.detach().reshape(-1) if owner.is_vector else owner.take(gradient.detach(), self.k)

    def _spread(self, entries: Sequence[Tensor | None]) -> Whole:
        """Entries of w_k among zeros; zeros alone for None."""
        found = [torch.zeros_like(parameter) for parameter in self.parameters]
        for i, values in enumerate(entries):
            if values is not None:
                if self.owners[i].is_vector:
                    found[i].copy_(values.detach().view_as(found[i]))
                else:
                    self._put_one(i, found[i], values.detach())
        return found


def _norm(tensors: Iterable[Tensor | None]) -> float:
    """The Euclidean norm of all of them."""
    norms = [tensor.double().norm() for tensor in tensors if tensor is not None]
    return torch.stack(norms).norm().item() if norms else 0.0


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
