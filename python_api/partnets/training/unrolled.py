"""InnerSteps: steps of partition k as a function of ψ, and the gradient of a later loss through them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from partnets.data.parts import weighted_parts
from partnets.hyper import penalties
from partnets.hyper.penalty import penalised
from partnets.optim.base import PartitionedOptimizer
from partnets.optim.entrywise import differentiable_step
from partnets.subnetworks.context import subnetwork, trying, whole
from partnets.subnetworks.parameters import partitioned_parameters
from partnets.subnetworks.state import held_statistics, is_norm, partitioned_modules, put_back, state_of
from partnets.subnetworks.statistics import following_norms
from partnets.subnetworks.switch import noted
from partnets.training.preflight import check_finite
from partnets.utils.modules import device_of, evaluating, is_sharded
from partnets.utils.random_state import get_state, preserved, set_state
from partnets.utils.twice import twice_differentiable

Compute = Callable[[Any], Tensor]
# averaged(tensors, like): the means of tensors over ranks, with the shapes of like; None is 0 unless all ranks have it.
Averaged = Callable[[Sequence[Tensor | None], Sequence[Tensor]], list[Tensor | None]]
# For each parameter its packed entries in partition k; None is 0.
Packed = Sequence[Tensor | None]
# The Euclidean norm by which finite differences move the weights, by the size of their dtype in bytes.
MOVES = {8: 1e-4, 4: 1e-2}
# The constant that torch's clipping adds to a norm.
CLIPPED = 1e-6


class Taken(NamedTuple):
    """A step of w_k, with the values that its backward pass needs.

    Attributes:
        entries, states: the weights and each parameter's optimiser state before the step; None for the present ones.
        slopes: the gradient of the training loss; None for parameters without a gradient.
        products: products(vectors, wanted) returns this rank's derivatives, by the tensors `wanted`, of the sum of its
            gradient times `vectors`.
    """

    entries: Packed | None
    states: list[dict[str, Any] | None]
    slopes: Packed
    products: Callable[..., Any]


def alone(tensors: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor | None]:
    """Return tensors unchanged, as the means over a single rank."""
    return list(tensors)


def check_all_finite(loss: Tensor, averaged: Averaged, what: str) -> Tensor:
    """Return a loss's mean over ranks; call check_finite on it, so that all ranks raise and none waits."""
    (mean,) = averaged([loss.detach()], [loss])
    check_finite(mean, what)
    return mean


@contextmanager
def leaving_nothing(model: nn.Module) -> Iterator[None]:
    """Normalise as in steps of the weights in the context; restore statistics of all subnetworks on exit."""
    with whole(model), trying(model), evaluating(*following_norms(model)):
        before = held_statistics(partitioned_modules(model), rows=True)
        try:
            yield
        finally:
            put_back(before)


def accumulated(
    loss: Compute, batch: Any, wanted: Sequence[Tensor], graph: bool = False
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the mean loss of a batch's parts, detached, and its gradients; with `graph`, of all parts at once."""
    values, found = [], [None] * len(wanted)
    for part, weight in weighted_parts(batch):
        value = loss(part)
        value = value if weight == 1 else weight * value
        values.append(value.detach())
        if value.requires_grad and wanted:
            found = added(found, torch.autograd.grad(value, wanted, create_graph=graph, allow_unused=True))
    return sum(values[1:], values[0]), found


def _is_compiled(module: nn.Module) -> bool:
    """Return whether a module was compiled by module.compile() or torch.compile(module)."""
    return getattr(module, "_compiled_call_impl", None) is not None or "_orig_mod" in module._modules


class InnerSteps:
    """Steps of w_k on batches of D_1:k, starting from the current weights; use it inside leaving_nothing.

    Args:
        model: a partitioned model.
        optimizer: an optimiser of partnets.optim of this model; the steps are those that it would take next.
        k: an int from 1 to C.
        loss: loss(batch), computed by the model; penalties are added to it.
        psi: the parameters that the steps depend on.
        exact: whether second derivatives are computed from graphs; otherwise by finite differences.
        clip: the norm to which the gradient of w_k is clipped; None does not clip.
        averaged: the mean over ranks, which have parts of the batches and take the same steps.

    Raises:
        ValueError: parameters are sharded; finite differences are requested for weights in half precision; or exact
            second derivatives of a compiled model.
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
            if parameter.requires_grad and optimizer.owner_of(parameter).owner in (None, k)
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
                "a part of the model is compiled, and torch has no second derivatives of compiled code, or wrong ones"
                " with some backends; pass Lookahead(exact=False), or do not compile."
            )
        if any(map(is_sharded, self.parameters)):
            raise ValueError(
                "the model is sharded, but a step of ψ that looks ahead needs whole weights on each rank; train on one"
                " rank, or compare a few values by their L_ML."
            )
        self.stored = [owner.stored.detach() for owner in self.owners]
        # The weights and states after the steps, as in Taken.
        self.entries: Packed | None = None
        self.states: list[dict[str, Any] | None] = [None] * len(self.parameters)
        modules = partitioned_modules(model)
        norms = [module for module in modules if is_norm(state_of(module))]
        # The tensors into which switches write, frozen ones too. Graphs have saved statistics of norms, which backward
        # passes in training mode do not read.
        statistics = (tensor for _, _, tensor, _ in held_statistics(norms, rows=True))
        every = (tensor for one in partitioned_parameters(model) for tensor in (one.parameter, one.stored))
        self.written = (*statistics, *every)
        self.others = [module for module in modules if not is_norm(state_of(module))]
        self.taken: list[Taken] = []

    def step(self, batch: Any) -> None:
        """Take a step of w_k."""
        began = None if self.exact else (get_state(device_of(self.model)), held_statistics(self.others, rows=True))
        gradients = self._gradients(batch, self.entries, self.parameters)
        slopes = self._averaged(self._packed(gradients))
        if self.exact:
            products = partial(self._second, self.entries, gradients)
        else:
            products = partial(self._difference, batch, self.entries, slopes, began)
        self.taken.append(Taken(self.entries, self.states, slopes, products))
        del gradients, products
        factor, entries, states = self._factor(slopes), [], []
        with torch.no_grad():
            for i, slope in enumerate(slopes):
                slope = None if slope is None else factor * slope
                after, state = self._stepped(i, self._before(i, self.entries), slope, self.states[i])
                entries.append(after)
                states.append(state)
        self.entries, self.states = entries, states

    def _before(self, i: int, entries: Packed | None) -> Tensor:
        """Return a parameter's entries as a leaf, the model's present ones if entries is None."""
        return _leaf(self.owners[i].take(self.stored[i], self.k) if entries is None else entries[i])

    def _stepped(self, i: int, entries: Tensor, slope: Tensor | None, state: dict | None) -> tuple[Tensor, dict]:
        """Return a parameter's entries and optimiser state after a step; a state of None is the present one."""
        parameter = self.parameters[i]
        optimizer, settings, present = self.optimizer.as_torchs(parameter, self.groups[parameter], self.k)
        state = present if state is None else state
        rate = self.optimizer.rate_to_follow(parameter, self.groups[parameter])
        if slope is None:  # the optimiser skips parameters without a gradient, whatever their rate
            return entries * 1 if rate is None else entries + 0 * rate, state
        return differentiable_step(optimizer, settings, state, entries, slope, rate)

    def _factor(self, slopes: Packed) -> float:
        """Return the factor by which clipping scales the gradient, as torch.nn.utils.clip_grad_norm_ does."""
        return 1.0 if self.clip is None else min(1.0, self.clip / (_norm(slopes) + CLIPPED))

    def _unclipped(self, slopes: Packed, by_slopes: Packed) -> Packed:
        """Convert derivatives with respect to the clipped gradient to those with respect to the gradient."""
        if (factor := self._factor(slopes)) == 1:
            return by_slopes
        norm, pairs = _norm(slopes), list(zip(slopes, by_slopes, strict=True))
        along = sum((slope.double() @ by.double()).item() for slope, by in pairs if by is not None)
        turned = along / (norm * (norm + CLIPPED))
        return [None if by is None else factor * (by - turned * slope) for slope, by in pairs]

    def judged(
        self, batch: Any, loss: Compute, psi: Sequence[nn.Parameter], training_only: Iterable[nn.Module]
    ) -> tuple[Tensor, Packed, list[Tensor | None]]:
        """Return the loss after all steps, its gradient of w_k, and this rank's direct gradient of ψ."""
        self.states = []  # no step needs them any more
        with self._computing(self.entries), evaluating(*training_only), penalties():
            value, found = accumulated(loss, batch, [*self.parameters, *psi])  # recomputes checkpoints
        by_weights, by_psi = found[: len(self.parameters)], found[len(self.parameters) :]
        return value, self._averaged(self._packed(by_weights, zeros=True)), by_psi

    def back(self, by_weights: Packed) -> list[Tensor | None]:
        """Propagate a loss's gradient of w_k back through the steps, discard them, and return this rank's part of ψ's.

        The mean over ranks is the gradient; terms that are the same on all ranks are part of each.
        """
        total: list[Tensor | None] = [None] * len(self.psi)
        by_entries, by_states = list(by_weights), [{} for _ in self.parameters]
        self.entries = None
        while self.taken:
            one, by_slopes = self.taken.pop(), []
            factor = self._factor(one.slopes)
            for i, slope in enumerate(one.slopes):
                entries, slope = self._before(i, one.entries), None if slope is None else _leaf(factor * slope)
                state = None if one.states[i] is None else {name: _leaf(value) for name, value in one.states[i].items()}
                after, state_after = self._stepped(i, entries, slope, state)
                outputs, given = [after, *map(state_after.get, by_states[i])], [by_entries[i], *by_states[i].values()]
                wanted = [entries, slope, *self.psi, *(state or {}).values()]
                found = _derivatives(outputs, wanted, given)
                by_entries[i], by_slope, *by_psi = found[: 2 + len(self.psi)]
                by_slopes.append(by_slope)
                by_states[i] = dict(zip(state or {}, found[2 + len(self.psi) :], strict=True))
                total = added(total, by_psi)
            wanted = [*self.psi, *(self.parameters if self.taken else ())]
            found = one.products(self._unclipped(one.slopes, by_slopes), wanted)
            total = added(total, found[: len(self.psi)])
            if self.taken:
                by_entries = added(by_entries, self._averaged(self._packed(found[len(self.psi) :])))
        return total

    def solved(self, batch: Any, by_weights: Packed, solve: Callable[..., Any], damping: float) -> list[Tensor | None]:
        """Return this rank's gradient of ψ through the minimum of the training loss.

        Args:
            batch: the batch of the training loss.
            by_weights: the loss's gradient of w_k.
            solve: solve(product, right) returns x with H x = right, where H is the Hessian of the training loss in w_k.
            damping: a number added to the diagonal of H.
        """
        gradients = self._gradients(batch, self.entries, self.parameters)
        lengths = [len(entries) for entries in by_weights]

        def products(vector: Tensor, wanted: list[Tensor]) -> list[Tensor | None]:
            return _derivatives(gradients, wanted, self._spread(vector.split(lengths)), retain=True)

        def product(vector: Tensor) -> Tensor:
            found = products(vector, self.parameters)
            return torch.cat(self._averaged(self._packed(found, zeros=True))) + damping * vector

        with self._computing(self.entries):
            solution = solve(product, torch.cat(by_weights))
            found = products(solution, self.psi)
        return [None if by is None else -by for by in found]

    def _second(
        self, entries: Packed | None, gradients: list[Tensor | None], vectors: Packed, wanted: list[Tensor]
    ) -> list[Tensor | None]:
        """Return the products of a gradient by its graph."""
        with self._computing(entries):
            return _derivatives(gradients, wanted, self._spread(vectors), retain=True)

    def _difference(
        self,
        batch: Any,
        entries: Packed | None,
        slopes: Packed,
        began: tuple[dict[str, Any], list[tuple[Any, ...]]],
        vectors: Packed,
        wanted: list[Tensor],
    ) -> list[Tensor | None]:
        """Return the products of a gradient by two more, with the original noise and statistics (Liu et al. 2019).

        Weights with a gradient of 0, such as words that no example has, are not moved, as their gradient is 0 for all
        ψ. Adam would move them the farthest, and the others by too little for the difference.
        """
        vectors = [None if by is None else by * (slope != 0) for by, slope in zip(vectors, slopes, strict=True)]
        if not (length := _norm(vectors)):
            return [None if all(by is None for by in vectors) else torch.zeros_like(one) for one in wanted]
        entries = self._present() if entries is None else entries
        move = min(MOVES[each.itemsize] for each in entries) / length
        found, (noise, statistics) = [], began
        for sign in (1, -1):
            pairs = zip(entries, vectors, strict=True)
            moved = [one if by is None else one.add(by, alpha=sign * move) for one, by in pairs]
            with preserved(device := device_of(self.model)):
                set_state(noise, device)
                put_back(statistics)
                found.append(self._gradients(batch, moved, wanted))
        return [
            None if plus is None or minus is None else (plus - minus) / (2 * move)
            for plus, minus in zip(*found, strict=True)
        ]

    def _gradients(self, batch: Any, entries: Packed | None, wanted: list[Tensor]) -> list[Tensor | None]:
        """Return the gradients of the training loss of subnetwork k with these weights, with a graph if `exact`."""
        with self._computing(entries):
            total, found = accumulated(lambda part: penalised(self.loss, part)[1], batch, wanted, self.exact)
            check_all_finite(total, self.averaged, "a step of the weights that a step of ψ looks through")
            return found

    @contextmanager
    def _computing(self, entries: Packed | None) -> Iterator[None]:
        """Set the model to subnetwork k with these weights, if they are not None, in the context; w_k learns.

        Autograd does not see these writes, so a graph must be differentiated with the weights that it has seen.
        """
        before = None if entries is None else self._present()
        functions = twice_differentiable() if self.exact else nullcontext()
        with torch.autograd._unsafe_preserve_version_counter(self.written):
            try:
                self._set(entries)
                with subnetwork(self.model, self.k, self.k, hyper=True), functions:
                    yield
            finally:
                self._set(before)
        noted(self.owners)

    @torch.no_grad()
    def _set(self, entries: Packed | None) -> None:
        """Write the weights of partition k into the model, if they are not None."""
        if entries is None:
            return
        for owner, tensor, values in zip(self.owners, self.stored, entries, strict=True):
            owner.put(tensor.data, self.k, values)
            owner.combine(owner.parameter.data)
        torch.clear_autocast_cache()  # it has the previous weights

    def _present(self) -> list[Tensor]:
        """Return copies of the model's entries of w_k."""
        return [owner.take(stored, self.k).clone() for owner, stored in zip(self.owners, self.stored, strict=True)]

    def _averaged(self, packed: Packed) -> list[Tensor | None]:
        """Return the means over ranks of entries of w_k."""
        return list(packed) if self.averaged is alone else self.averaged(packed, self._present())

    def _packed(self, gradients: Sequence[Tensor | None], zeros: bool = False) -> list[Tensor | None]:
        """Return the entries of w_k of gradients, detached; with zeros, zeros instead of None."""
        packed = []
        for owner, by in zip(self.owners, gradients, strict=True):
            if by is None and zeros:
                by = torch.zeros_like(owner.parameter)
            if by is not None:  # the gradient of a vector is that of partition k, of the parameter's shape
                by = by.detach().reshape(-1) if owner.is_vector else owner.take(by.detach(), self.k)
            packed.append(by)
        return packed

    def _spread(self, entries: Packed) -> list[Tensor]:
        """Return tensors of the parameters' shapes with these entries of w_k and zeros elsewhere; None gives zeros."""
        found = [torch.zeros_like(parameter) for parameter in self.parameters]
        for one, owner, values in zip(found, self.owners, entries, strict=True):
            if values is not None and owner.is_vector:
                one.copy_(values.detach().view_as(one))
            elif values is not None:
                owner.put(one, self.k, values.detach())
        return found


def _norm(tensors: Packed) -> float:
    """Return the Euclidean norm of all tensors."""
    norms = [tensor.double().norm() for tensor in tensors if tensor is not None]
    return torch.stack(norms).norm().item() if norms else 0.0


def _derivatives(
    outputs: Sequence[Tensor | None], wanted: Sequence[Any], given: Sequence[Tensor | None], retain: bool = False
) -> list[Tensor | None]:
    """Return the derivatives by `wanted` of the sum of outputs times `given`; None where there is none."""
    pairs = [(one, by) for one, by in zip(outputs, given, strict=True) if by is not None and _learns(one)]
    learning = [one for one in wanted if _learns(one)]
    if not pairs or not learning:
        return [None] * len(wanted)
    outputs, given = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(outputs, learning, given, retain_graph=retain, allow_unused=True))
    return [next(found) if _learns(one) else None for one in wanted]


def _learns(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def added(one: Sequence[Tensor | None], other: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the sums of two lists of tensors; None is 0."""
    return [b if a is None else a if b is None else a + b for a, b in zip(one, other, strict=True)]


def _leaf(value: Any) -> Any:
    """Return a tensor of floats as a leaf that requires a gradient; step counts require none."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(value.dim() > 0 and value.is_floating_point())
