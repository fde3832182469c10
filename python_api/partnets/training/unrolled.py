"""InnerSteps: steps of partition k as a function of ψ, and the gradient of a later loss through them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from partnets.data.parts import weighted_parts
from partnets.hyper import penalties
from partnets.hyper.penalty import penalised
from partnets.optim.base import PartitionedOptimizer
from partnets.optim.entrywise import differentiable_step
from partnets.subnetworks.context import subnetwork, trying, whole
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
# For each parameter: a tensor like PartitionedParameter.stored; or its packed entries in the partition.
Whole = list[Tensor]
Packed = list[Tensor]
# The Euclidean norm by which finite differences move the weights, by the size of their dtype in bytes.
MOVES = {8: 1e-4, 4: 1e-2}
# The constant that torch's clipping adds to a norm.
CLIPPED = 1e-6


class Taken(NamedTuple):
    """A step of w_k, with the values that its backward pass needs.

    Attributes:
        weights: the weights before the step.
        gradients: the gradients of the training loss with their graph; None for finite differences.
        slopes: the gradients' entries in the partition; None for parameters without a gradient.
        batch, noise: the batch, and the random states before the gradients were computed.
        states: the optimiser's states of the partition's entries before the step; None for its current states.
        kept: the statistics before the step, from held_statistics; None for exact second derivatives.
    """

    weights: Whole
    gradients: list[Tensor | None] | None
    slopes: list[Tensor | None]
    batch: Any
    noise: dict
    states: list[dict] | None
    kept: list[tuple] | None


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
        if value.requires_grad:
            found = _added(found, torch.autograd.grad(value, wanted, create_graph=graph, allow_unused=True))
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
        self.weights: Whole = [owner.stored for owner in self.owners]
        self.present = self.weights
        self.states: list[dict] | None = None
        modules = partitioned_modules(model)
        norms = [module for module in modules if is_norm(state_of(module))]
        self.statistics = [tensor for _, _, tensor, _ in held_statistics(norms, rows=True)]
        self.others = [module for module in modules if not is_norm(state_of(module))]
        self.taken: list[Taken] = []

    def step(self, batch: Any, is_last: bool = False) -> None:
        """Take a step of w_k; do not keep the optimiser's states after the last step."""
        noise = get_state(device_of(self.model))
        kept = None if self.exact else []
        gradients = self._gradients(batch, self.weights, self.parameters, graph=self.exact, kept=kept)
        slopes = self._averaged(self._packed(gradients))
        graphs = gradients if self.exact else None
        self.taken.append(Taken(self.weights, graphs, slopes, batch, noise, self.states, kept))
        del gradients
        factor, states = self._factor(slopes), []
        weights = [weight.detach().clone() for weight in self.weights]
        for i, slope in enumerate(slopes):
            entries = self._take(i, self.weights[i])
            with torch.no_grad():
                before = None if self.states is None else self.states[i]
                entries, state = self._stepped(i, entries, None if slope is None else factor * slope, before)
            self.owners[i].put(weights[i], self.k, entries)
            states.append({} if is_last else state)
        self.weights, self.states = weights, states

    def _stepped(self, i: int, entries: Tensor, slope: Tensor | None, state: dict | None) -> tuple[Tensor, dict]:
        """Return a parameter's entries and optimiser state after a step; a state of None is the present one."""
        parameter = self.parameters[i]
        optimizer, settings, present = self.optimizer.as_torchs(parameter, self.groups[parameter], self.k)
        state = present if state is None else state
        rate = self.optimizer.rate_to_follow(parameter, self.groups[parameter])
        if slope is None:  # the optimiser skips parameters without a gradient, whatever their rate
            return entries * 1 if rate is None else entries + 0 * rate, state
        return differentiable_step(optimizer, settings, state, entries, slope, rate)

    def _factor(self, slopes: list[Tensor | None]) -> float:
        """Return the factor by which clipping scales the gradient, as torch.nn.utils.clip_grad_norm_ does."""
        return 1.0 if self.clip is None else min(1.0, self.clip / (_norm(slopes) + CLIPPED))

    def _unclipped(self, slopes: list[Tensor | None], by_slopes: list[Tensor | None]) -> list[Tensor | None]:
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
        """Return the loss after the steps, its gradient of w_k, and this rank's direct gradient of ψ."""
        with self._computing(self.weights), evaluating(*training_only), penalties():
            value, found = accumulated(loss, batch, [*self.parameters, *psi])  # recomputes checkpoints
        by_weights, by_psi = found[: len(self.parameters)], found[len(self.parameters) :]
        return value, self._averaged(self._packed(by_weights, zeros=True)), by_psi

    def back(self, by_weights: Packed) -> list[Tensor | None]:
        """Propagate a loss's gradient of w_k back through the steps, discard them, and return this rank's part of ψ's.

        The mean over ranks is the gradient; terms that are the same on all ranks are part of each.
        """
        total: list[Tensor | None] = [None] * len(self.psi)
        by_states: list[dict] = [{} for _ in self.parameters]
        self.weights = []
        while self.taken:
            one, by_entries, by_slopes = self.taken.pop(), [], []
            factor = self._factor(one.slopes)
            for i, slope in enumerate(one.slopes):
                entries = self._take(i, one.weights[i]).clone().requires_grad_()
                slope = None if slope is None else (factor * slope).requires_grad_()
                state = None if one.states is None else {name: _leaf(value) for name, value in one.states[i].items()}
                after, state_after = self._stepped(i, entries, slope, state)
                moments = {n: v for n, v in (state or {}).items() if isinstance(v, Tensor) and v.requires_grad}
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
        """Return this rank's gradient of ψ through the minimum of the training loss.

        Args:
            batch: the batch of the training loss.
            by_weights: the loss's gradient of w_k.
            solve: solve(product, right) returns x with H x = right, where H is the Hessian of the training loss in w_k.
            damping: a number added to the diagonal of H.
        """
        gradients = self._gradients(batch, self.weights, self.parameters, graph=True)
        lengths = [len(entries) for entries in by_weights]

        def product(vector: Tensor) -> Tensor:
            found = _products(gradients, self.parameters, self._spread(vector.split(lengths)))
            return torch.cat(self._averaged(self._packed(found, zeros=True))) + damping * vector

        with self._computing(self.weights):
            solution = solve(product, torch.cat(by_weights))
            found = _products(gradients, self.psi, self._spread(solution.split(lengths)))
        return [None if by is None else -by for by in found]

    def _second(self, one: Taken, by_slopes: list[Tensor | None], further: bool) -> tuple[list, list]:
        """Return the derivatives of by_slopes times the training loss's gradient, by ψ and, if further, by w_k."""
        wanted = [*self.psi, *(self.parameters if further else [])]
        if self.exact:
            with self._computing(one.weights):
                found = _products(one.gradients, wanted, self._spread(by_slopes))
        else:
            found = self._difference(one, by_slopes, wanted)
        by_psi, by_weights = found[: len(self.psi)], found[len(self.psi) :]
        if not further:
            return by_psi, [None] * len(self.parameters)
        return by_psi, self._averaged(self._packed(by_weights))

    def _difference(self, one: Taken, by_slopes: list[Tensor | None], wanted: list[Tensor]) -> list[Tensor | None]:
        """Return the same derivatives by two gradients of the training loss, with the original noise (Liu et al. 2019).

        Weights with a gradient of 0, such as words that no example has, are not moved, as their gradient is 0 for all
        ψ. Adam would move them the farthest, and the others by too little for the difference.
        """
        pairs = zip(by_slopes, one.slopes, strict=True)
        by_slopes = [None if by is None else by * (slope != 0) for by, slope in pairs]
        if not (length := _norm(by_slopes)):
            return [None if all(by is None for by in by_slopes) else torch.zeros_like(one) for one in wanted]
        move = min(MOVES[each.itemsize] for each in one.weights) / length
        found = []
        for sign in (1, -1):
            moved = [weight.detach().clone() for weight in one.weights]
            for i, direction in enumerate(by_slopes):
                if direction is not None:
                    entries = self._take(i, moved[i]).add(direction, alpha=sign * move)
                    self.owners[i].put(moved[i], self.k, entries)
            with preserved(device := device_of(self.model)):
                set_state(one.noise, device)
                found.append(self._gradients(one.batch, moved, wanted, kept=one.kept))
        return [
            None if plus is None or minus is None else (plus - minus) / (2 * move)
            for plus, minus in zip(*found, strict=True)
        ]

    def _gradients(
        self,
        batch: Any,
        weights: Whole,
        wanted: Sequence[Tensor],
        graph: bool = False,
        kept: list[tuple] | None = None,
    ) -> list:
        """Return the gradients of the training loss of subnetwork k with these weights.

        Args:
            batch, weights: the batch, and the weights of all partitions.
            wanted: the tensors to differentiate by.
            graph: whether gradients have a graph.
            kept: the statistics of modules other than norms to begin with; if empty, the present ones are stored in it.
        """
        with self._computing(weights):
            if kept:
                put_back(kept)
            elif kept is not None:
                kept[:] = held_statistics(self.others)
            total, found = accumulated(lambda part: penalised(self.loss, part)[1], batch, wanted, graph)
            check_all_finite(total, self.averaged, "a step of the weights that a step of ψ looks through")
            return found

    @contextmanager
    def _computing(self, weights: Whole) -> Iterator[None]:
        """Set the model to subnetwork k with these weights in the context; w_k learns.

        Autograd does not see these writes, so a graph must be differentiated with the weights that it has seen.
        """
        before = [] if weights is self.present else [tensor.detach().clone() for tensor in self.present]
        functions = twice_differentiable() if self.exact else nullcontext()
        # Graphs have saved running statistics too, which backward passes in training mode do not read.
        written = (*self.parameters, *self.present, *self.statistics)
        with torch.autograd._unsafe_preserve_version_counter(written):
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
        """Write weights into the model."""
        for owner, tensor, weight in zip(self.owners, self.present, weights, strict=True):
            tensor.data.copy_(weight)
            owner.combine(owner.parameter.data)
        torch.clear_autocast_cache()  # it has the previous weights

    def _averaged(self, packed: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the means over ranks of entries of w_k."""
        if self.averaged is alone:
            return list(packed)
        return self.averaged(packed, [self._take(i, tensor) for i, tensor in enumerate(self.present)])

    def _take(self, i: int, tensor: Tensor) -> Tensor:
        """Return the entries of w_k of a parameter's tensor, detached."""
        return self.owners[i].take(tensor.detach(), self.k)

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

    def _spread(self, entries: Sequence[Tensor | None]) -> list[Tensor]:
        """Return tensors of the parameters' shapes with these entries of w_k and zeros elsewhere; None gives zeros."""
        found = [torch.zeros_like(parameter) for parameter in self.parameters]
        for one, owner, values in zip(found, self.owners, entries, strict=True):
            if values is not None and owner.is_vector:
                one.copy_(values.detach().view_as(one))
            elif values is not None:
                owner.put(one, self.k, values.detach())
        return found


def _norm(tensors: Iterable[Tensor | None]) -> float:
    """Return the Euclidean norm of all tensors."""
    norms = [tensor.double().norm() for tensor in tensors if tensor is not None]
    return torch.stack(norms).norm().item() if norms else 0.0


def _products(outputs: list[Tensor | None], wanted: list[Tensor], given: Whole) -> list[Tensor | None]:
    """Return the derivatives of the sum of outputs times `given`, over outputs that require a gradient."""
    pairs = [(one, by) for one, by in zip(outputs, given, strict=True) if one is not None and one.requires_grad]
    if not pairs:
        return [None] * len(wanted)
    outputs, given = zip(*pairs, strict=True)
    return list(torch.autograd.grad(outputs, wanted, given, retain_graph=True, allow_unused=True))


def _added(one: Sequence[Tensor | None], other: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [b if a is None else a if b is None else a + b for a, b in zip(one, other, strict=True)]


def _leaf(value: Any) -> Any:
    """Return a moment as a leaf that requires a gradient; step counts require none."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(value.dim() > 0 and value.is_floating_point())
