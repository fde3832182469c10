"""audit: a check that no data of a later chunk reaches an earlier partition, by passes of the model."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from partnets.data.batch import Forward, call
from partnets.evaluation.snapshot import Snapshot, same
from partnets.hyper import penalties
from partnets.hyper.penalty import with_terms
from partnets.subnetworks.context import subnetwork, trying, whole
from partnets.subnetworks.parameters import names_of, partitioned_parameters
from partnets.subnetworks.state import ROWS, num_partitions, state_of
from partnets.subnetworks.statistics import other_norms
from partnets.subnetworks.switch import noted, switch_of
from partnets.utils import random_state
from partnets.utils.losses import Loss, mean
from partnets.utils.modules import device_of, evaluating, is_sharded, overlapping, to_device
from partnets.utils.tree_leaves import tensors

APART = (
    "let a module of the model store it in buffers, and name that module in partnets.partition(...,"
    " stateful=[...]), which stores it for each subnetwork; or use a module without state"
)
# Whether the last subnetwork trains, and whether the first does after it.
MODES = (True, True), (False, False), (True, False), (False, True)
# State that a pass reads is multiplied by NaN, or by this if the model raises.
LARGE = 1000.0
# Devices with reproducible results. On others, sums by atomics vary.
STEADY = {"cpu"}
# The largest number of paths that are named for each of MODES.
MOST = 8


class Leak(NamedTuple):
    """A fault of a model, found by `audit`: a path by which data of later chunks reach an earlier subnetwork.

    Attributes:
        path: the dotted path of the module, parameter or attribute; "" for the model itself.
        what: the fault, a predicate with the path as its subject.
        cure: what to do, an imperative.

    Example:
        >>> print(Leak("0.weight", "shares memory with 1.weight", "assign one Parameter to both"))
        0.weight shares memory with 1.weight; assign one Parameter to both.
    """

    path: str
    what: str
    cure: str

    def __str__(self) -> str:
        return f"{self.path or 'the model itself'} {self.what}; {self.cure}."


def audit(
    model: nn.Module, batch: Any, loss: Loss | None = None, *, other: Any = None, forward: Forward = call
) -> list[Leak]:
    """Find paths by which later chunks reach earlier subnetworks, as far as two batches show; [] if no path is found.

    L_ML and the steps of ψ assume that partitions 1..k have not seen chunk k + 1. In training and in evaluation mode,
    the outputs, loss and gradients of subnetwork k must not change with the weights of later partitions, and those of
    subnetwork 1 must not change with the data and weights of a pass of subnetwork C before. State that is written and
    never read is no leak. If the model or the loss raises in evaluation mode, as for detectors that return losses in
    training mode only, passes are in training mode only. No pass may write into partitioned parameters or draw more
    random numbers for other data, and no two parameters may share memory.

    Model, gradients and random states are restored afterwards. Trainers run the audit before their first step.

    Args:
        model: a model with partitioned layers, in its mode for training.
        batch: a batch as from chunks, with at least 2 examples.
        loss: loss(output, y), the loss for the gradients; the mean square of all outputs if None.
        other: a second batch of the same sizes; if None, the first with its numbers shuffled and scaled.
        forward: forward(model, batch), which returns output and y; see partnets.data.batch.call for the default.

    Raises:
        ValueError: the model has no partitioned layers, or does not take the batch.

    Example:
        >>> import partnets
        >>> class Centred(nn.Linear):
        ...     mean = 0.0
        ...     def forward(self, x):
        ...         self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        ...         return super().forward(x - self.mean)
        >>> print(*partnets.audit(partnets.partition(Centred(4, 4), (0.5, 0.5)), (torch.randn(8, 4), None)))
        mean follows the data: it carries information about later chunks to earlier subnetworks; let a module ...
    """
    device = device_of(model)
    batch = to_device(batch, device)

    def compute(batch: Any) -> tuple[Any, Tensor]:
        output, y = forward(model, batch)
        return output, mean(loss, output, y) if loss is not None else _size(output)

    with random_state.preserved(device):
        random_state.seed(0)
        other = _varied(batch) if other is None else to_device(other, device)
        return leaks(model, compute, batch, other)


def leaks(
    model: nn.Module, compute: Callable[[Any], tuple[Any, Tensor]], batch: Any, other: Any, last: int | None = None
) -> list[Leak]:
    """Run the audit with a function that returns a batch's output and loss.

    Args:
        compute: takes a batch on the model's device; both batches are on it.
        last: the last subnetwork that learns; C if None.
    """
    if shared := overlapping(_learning(model)):  # a pass would exchange entries of one with those of the other
        return [Leak(one, f"shares memory with {two}", "assign one Parameter to both") for one, two in shared]
    with whole(model), trying(model), random_state.preserved(device_of(model)):
        trial = _Trial(model, compute, batch)
        try:
            return trial.leaks(other, last or num_partitions(model))
        except _WrittenError as error:
            cure = "compute with the changed value instead, or write into it outside of partnets.subnetwork"
            return [Leak(path, "is changed in a pass, and other subnetworks would see it", cure) for path in error.args]
        finally:
            trial.before.put_back()


class _WrittenError(BaseException):  # not an Exception, as those that a model raises are handled
    """Raised with the names of parameters that a pass has written into."""


class _Trial:
    """Passes of subnetworks with two versions of everything that earlier subnetworks must not see."""

    def __init__(self, model: nn.Module, compute: Callable[[Any], tuple[Any, Tensor]], batch: Any) -> None:
        self.model, self.compute, self.batch = model, compute, batch
        self.before, self.device = Snapshot(model), device_of(model)
        self.parameters = names_of(model, partitioned_parameters(model))
        self.learning, self.evaluates = _learning(model), True

    def leaks(self, other: Any, last: int) -> list[Leak]:
        """Return all leaks that passes show; `last` is the last subnetwork that learns."""
        self.evaluates = self._evaluates()
        if _differing(self._kept(self._both, 1), self._kept(self._both, 1)):
            return [Leak("", "gives a different result each time for the same batch: it has hidden state", APART)]
        found, parts = {}, num_partitions(self.model)
        for k in sorted({1, 2, parts // 2, parts - 1} & set(range(1, parts))):
            clean = self._kept(self._both, k)
            for name in self._changed(clean, partial(self._both, k))[:1]:
                what = f"computes {name} from weights of inactive partitions"
                found[what] = Leak("", what, "read parameters, and no buffers that partnets.partition has added")
        for trains, first_trains in MODES[: None if self.evaluates else 1] if parts > 1 else ():
            if trains and last == 1:
                continue  # L_ML passes later chunks in evaluation mode only
            later = max(last, 2)
            # With nested channels, state may be in channels that subnetwork 1 lacks.
            is_nested = any(state.narrow is not None for state in switch_of(self.model).states)
            for first in sorted({1, later - 1} if is_nested else {1}):
                for leak in self._remembers(trains, first_trains, other, later, first):
                    found.setdefault(leak.path or leak.what, leak)
        return list(found.values())

    def _evaluates(self) -> bool:
        """Return whether the model and the loss can be computed in evaluation mode."""
        try:
            with evaluating(self.model):
                self._kept(self._pass, False, 1, self.batch)
        except Exception:  # whatever a loss raises for an output that is none of training; both modes may raise
            return False
        return True

    def _remembers(self, trains: bool, first_trains: bool, other: Any, last: int, first: int) -> Iterator[Leak]:
        """Yield leaks if a pass of the last subnetwork changes later results of the first, in these modes."""
        run = partial(self._first_after_last, trains, first_trains, last, first)

        def reads(*paths: str) -> bool:
            """Return whether the first subnetwork computes from these, be it only to keep the larger of two values."""
            return bool(self._changed(clean, lambda by: run(self.batch, spoiled=paths, by=by)[0]))

        clean, drawn, stored = self._kept(run, self.batch)
        later, drawn_later, stored_later = self._kept(run, other, factor=-2)
        if trains and first_trains and not all(map(same, drawn, drawn_later)):
            what = "draws random numbers, and how many depends on the data, which changes later noise"
            cure = (
                "draw as many for each batch: dropout before packing or selecting, an nn.LSTM for each layer, not RReLU"
            )
            yield Leak("", what, cure)
        differing, changed = _differing(clean, later), stored.changed(stored_later)
        # The first subnetwork reads its own row of statistics, which a pass of another one leaves as it is.
        rows = {f"{p}.{name}{ROWS}".lstrip(".") for p, m in self.model.named_modules() for name in _statistics(m)}
        own = first - 1
        changed = [p for p in changed if p not in rows or not same(stored.values[p][own], stored_later.values[p][own])]
        if differing or (changed and reads(*changed)):
            what = "follows the data: it carries information about later chunks to earlier subnetworks"
            paths = [*islice(filter(reads, changed), MOST)]
            yield from (Leak(path, what, APART) for path in paths)
            if not paths:
                name = differing[0] if differing else "result"
                what = f"computes another {name} after later chunks were seen, because of hidden state"
                yield Leak("", what, APART)

    def _first_after_last(
        self,
        trains: bool,
        first_trains: bool,
        last: int,
        first: int,
        given: Any,
        factor: float = 1,
        spoiled: Sequence[str] = (),
        by: float = 1,
    ) -> tuple[dict[str, Tensor], list[Any], Snapshot]:
        """Return the first subnetwork's results after a pass of the last one, and the states between the passes."""
        with ExitStack() as mode:
            mode.enter_context(evaluating(*(() if trains else (self.model,))))
            with self._later_weights(first, factor):
                self._pass(trains, last, given)
            drawn = tree_leaves(random_state.get_state(self.device))
            if first_trains != trains:  # otherwise without a call of train(), which may drop state
                mode.close()
                mode.enter_context(evaluating(*(() if first_trains else (self.model,))))
            stored = Snapshot(self.model, without=self.parameters.values())
            for path in spoiled:
                stored.spoil(path, by)
            return self._pass(first_trains, first, self.batch), drawn, stored

    def _kept(self, run: Callable, *arguments: Any, **options: Any) -> Any:
        """Return the result of run; restore the model's state."""
        try:
            return run(*arguments, **options)
        finally:
            self.before.put_back()

    def _changed(self, clean: dict[str, Tensor], run: Callable[[float], dict[str, Tensor]]) -> list[str]:
        """Return the names of results that a run with NaN changes, or if that raises, a run with LARGE."""
        found = []
        for factor in (torch.nan, LARGE):
            try:
                return _differing(clean, self._kept(run, factor))
            except Exception as error:  # whatever a model raises for NaN, even if it computes nothing from that
                found = [f"{type(error).__name__} ({error})"]
        return found

    def _both(self, k: int, factor: float = 1) -> dict[str, Tensor]:
        """Return the results of subnetwork k in training mode, then in evaluation mode, with other later weights."""
        with self._later_weights(k, factor):
            trained = self._pass(True, k, self.batch)
            if not self.evaluates:
                return trained
            with evaluating(self.model):
                return trained | self._pass(False, k, self.batch)

    def _pass(self, trains: bool, k: int, batch: Any) -> dict[str, Tensor]:
        """Return the results of subnetwork k in its present mode, by name; raise _WrittenError if it writes."""
        random_state.seed(0)
        still, written, values = evaluating(*(other_norms(self.model) if trains else ())), [], {}
        try:
            with subnetwork(self.model, k, k if trains else None, hyper=True), still, torch.set_grad_enabled(trains):
                before = {one: one.parameter.detach().clone() for one in self.parameters}
                with penalties() as found:
                    # The forward pass may remove parts of it. Not all layouts of tensors have a deepcopy.
                    copies = {id(leaf): leaf.detach().clone() for leaf in tensors(batch)}
                    output, loss = self.compute(copy.deepcopy(batch, copies))
                values = {f"output {i}": leaf.detach().clone() for i, leaf in enumerate(tensors(output))}
                if trains:
                    values |= self._learned(with_terms(loss, found))
                bumped = {(one.module, one.name) for one in switch_of(self.model).written()}
                for one, path in self.parameters.items():
                    if (one.module, one.name) in bumped or not same(one.parameter.detach(), before[one]):
                        written.append(path)
        except RuntimeError:  # raised by partnets.subnetwork for written parameters
            if not written:
                raise
        if written:
            for one in switch_of(self.model).weights:
                one.key = ()  # defaults may have been written into: make them again
            raise _WrittenError(*written)
        return values if trains else {f"{name} in evaluation": value for name, value in values.items()}

    def _learned(self, loss: Tensor) -> dict[str, Tensor]:
        """Return the loss, and its gradients of partition k and of ψ, by name."""
        value, parameters = {"loss": loss.detach().clone()}, self.learning.values()
        for parameter in parameters:
            parameter.grad = None
        if parameters and loss.requires_grad:
            if dist.is_available() and dist.is_initialized() and not any(map(is_sharded, parameters)):
                _differentiate(loss, [parameter for parameter in parameters if parameter.requires_grad])
            else:
                loss.backward()
        return value | {f"gradient of {name}": p.grad for name, p in self.learning.items() if p.grad is not None}

    @contextmanager
    def _later_weights(self, k: int, factor: float) -> Iterator[None]:
        """Change all entries of partitions above k inside this context, unless the factor is 1."""
        later = range(k + 1, num_partitions(self.model) + 1) if factor != 1 else ()
        kept = [(one, j, one.take(one.stored.detach(), j).clone()) for one in self.parameters for j in later]

        @torch.no_grad()
        def put(change: Callable[[Tensor], Tensor]) -> None:
            for one, j, values in kept:
                one.put(one.stored, j, change(values))
            for one in self.parameters if kept else ():
                one.combine()
                noted([one])

        put(lambda values: factor * values + 0.01)
        try:
            yield
        finally:
            put(lambda values: values)


def _differentiate(loss: Tensor, parameters: list[nn.Parameter]) -> None:
    """Call loss.backward() without hooks on accumulated gradients, by which DistributedDataParallel counts them."""
    try:
        grads = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
    except RuntimeError as error:
        if "checkpoint" not in str(error):  # reentrant checkpoints support only backward()
            raise
        loss.backward()
    else:
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad


def _learning(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _differing(one: dict[str, Tensor], two: dict[str, Tensor]) -> list[str]:
    """Return the names of tensors with different bits, or on devices that are not STEADY, with clearly other values."""

    def alike(a: Tensor, b: Tensor) -> bool:
        if a.device.type in STEADY or not a.is_floating_point() or a.shape != b.shape or not a.numel():
            return same(a, b)
        size = float(a.nan_to_num(0, 0, 0).abs().amax())
        return torch.allclose(a, b, rtol=0, atol=max(0.01, math.sqrt(torch.finfo(a.dtype).eps)) * size, equal_nan=True)

    return [name for name in {**one, **two} if name not in one or name not in two or not alike(one[name], two[name])]


def _size(output: Any) -> Tensor:
    """Return a loss for any output: the sum of the mean squares."""
    numbers = [leaf for leaf in tensors(output) if leaf.numel() and leaf.dtype != torch.bool]
    return sum((leaf.abs().float().square().mean() for leaf in numbers), torch.zeros((), device="cpu"))


def _statistics(module: nn.Module) -> tuple[str, ...]:
    state = state_of(module)
    return () if state is None else state.statistics


def _varied(value: Any) -> Any:
    """Return a similar batch, with its numbers shuffled, and scaled if floating point."""
    if isinstance(value, Mapping):
        return {name: _varied(part) for name, part in value.items()}

    def shuffled(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        mixed = leaf.flatten()[torch.randperm(leaf.numel(), device="cpu")].view(leaf.shape)
        return mixed * 1.25 if leaf.is_floating_point() else mixed

    return tree_map(shuffled, value)
