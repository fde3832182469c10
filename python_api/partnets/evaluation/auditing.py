"""audit: a check that no data of a later chunk reaches an earlier partition, by passes of the model."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from partnets.data import batch as batches
from partnets.data.batch import Forward, Loss, call
from partnets.hyper import hyperparameters, penalties
from partnets.hyper.penalty import with_terms
from partnets.subnetworks.context import subnetwork, trying, whole
from partnets.subnetworks.parameters import partitioned_parameters
from partnets.subnetworks.state import DEFAULTS, ESTIMATED, MAP, ROWS, STORED, state_of
from partnets.subnetworks.state import num_partitions as count
from partnets.subnetworks.statistics import other_norms
from partnets.subnetworks.switch import noted
from partnets.utils import random_state
from partnets.utils.contained import tensors
from partnets.utils.held import Held, is_of_library, same
from partnets.utils.modules import device_of, evaluating, is_sharded, overlapping, to_device
from partnets.utils.reached import reached

LIVE = "read parameters as attributes (self.layer.weight), which gives those of the active subnetwork"
APART = (
    "let a module store it in buffers or attributes, and name that module in partnets.partition(..., stateful=[...]),"
    " which stores it for each subnetwork; or use a module without state, or put it into evaluation mode"
)
FOLLOWS = "follows the data: it carries information about later chunks to earlier subnetworks"
KEPT_IN_A_MODE = (
    "name its module in partnets.partition(..., stateful=[...]), which stores it for each subnetwork; or compute it at"
    " each call"
)
LOST = (
    "inside of a subnetwork a parameter is computed from its entries: compute with the changed value instead, or modify"
    " dict(layer.named_parameters()) outside"
)
CHANGES_ALL = (
    "change it between passes, using only data of chunk 1; or store the changing values in buffers of a module that is"
    " named in partnets.partition(..., stateful=[...])"
)
NOT_ITS_OWN = (
    "a module in a global variable or a function's closure is not part of the model: assign it to an attribute of one"
    " that is, before partnets.partition; or freeze it"
)
OUT_OF_SIGHT = (
    "state in a class, a loss, slots or an object of a library is shared by all subnetworks: let a module of the model"
    " store it in buffers or attributes, and name that module in partnets.partition(..., stateful=[...])"
)
# (whether the last subnetwork trains, whether the first does after it).
# Whether the last subnetwork trains, and whether the first does after it.
MODES = (True, True), (False, False), (True, False), (False, True)
# Devices with a deterministic order of summation.
STEADY = {"cpu"}


class Leak(NamedTuple):
    """A path by which later chunks reach earlier subnetworks.

    Attributes:
        path: path of the module, parameter or attribute.
        what: the fault, as a predicate that follows the path.
        cure: the remedy.
    """

    path: str
    what: str
    cure: str

    def __str__(self) -> str:
        return f"{self.path or 'the model itself'} {self.what}; {self.cure}."


class Seen(NamedTuple):
    """The result of a subnetwork's pass: outputs and gradients by name, and the random state after it."""

    values: dict[str, Tensor]
    drawn: dict

    def differing(self, other: Seen) -> list[str]:
        names = dict.fromkeys((*self.values, *other.values))
        return [name for name in names if not same(self.values.get(name), other.values.get(name))]


def audit(
    model: nn.Module, batch: Any, loss: Loss | None = None, *, other: Any = None, forward: Forward = call
) -> list[Leak]:
    """Find paths by which later chunks reach earlier subnetworks, as far as two batches show; [] if no path is found.

    L_ML and the steps of ψ assume that partitions 1..k have not seen chunk k + 1. This is tested in training mode and
    in evaluation mode, for each k:

    - The outputs, loss and gradients of subnetwork k are bitwise unchanged if the weights of all later partitions are
      NaN.
    - A pass of subnetwork C leaves no trace of its data or weights that subnetwork 1 reads or stores: in buffers,
      attributes, state of hooks, values that the model's train() drops, and the number of random numbers drawn.
    - No two parameters share memory, and no pass modifies a parameter: neither its entries, which belong to all
      partitions, nor the tensor that reading it returns, where the change would be lost.
    - The loss depends only on the model's parameters, as others would not be trained.

    Model, gradients and random states are restored afterwards. The audit takes 4 passes for each of at most 4
    subnetworks, 16 passes for traces, from each mode to each, and up to six times the weights' memory. Trainers run it
    before their first step.

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
        >>> class Tied(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = nn.Linear(4, 4)
        ...     def forward(self, x):
        ...         (weight, bias) = self.layer.parameters()
        ...         return self.layer(x) @ weight
        >>> model = partnets.partition(Tied(), (0.5, 0.5))
        >>> for leak in partnets.audit(model, (torch.randn(8, 4), None)):
        ...     print(leak)
        the model itself reads weights of inactive partitions; read parameters as attributes ...
    """
    device = device_of(model)
    batch = to_device(batch, device)

    def compute(batch: Any) -> tuple[Any, Tensor]:
        output, y = forward(model, batch)
        return output, batches.mean(loss, output, y) if loss is not None else _size(output)

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
    learning = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    found = [
        Leak(one, f"shares memory with {two}", "assign one Parameter to both") for one, two in overlapping(learning)
    ]
    parts = count(model)
    last = last or parts
    before = Held(model)
    trial = _Trial(model, compute, before)
    try:
        with random_state.preserved(trial.device), whole(model), trying(model):
            ks = sorted({1, 2, parts // 2, parts - 1} & set(range(1, parts)))
            reading = (leak for k in ks for leak in trial.reads_later_weights(k, batch))
            remembering = trial.remembers(batch, other, last) if last > 1 else ()
            return [*found, *itertools.islice(reading, 1), *remembering, *trial.strangers()]
    finally:
        before.put_back()


class _Trial:
    """Passes of subnetworks with two versions of everything that earlier subnetworks must not see."""

    def __init__(self, model: nn.Module, compute: Callable[[Any], tuple[Any, Tensor]], before: Held) -> None:
        self.model, self.compute, self.before, self.device = model, compute, before, device_of(model)
        self.strange: set[nn.Parameter] = set()
        # What each subnetwork has of its own, and weights: the passes show whether they matter.
        self.apart = set()
        for path, module in model.named_modules():
            if (state := state_of(module)) is not None:
                names = [*state.weights, *state.vectors, *state.wholes, *state.statistics]
                names += [name + end for name in names for end in (MAP, DEFAULTS, STORED, ROWS)] + [ESTIMATED]
                self.apart |= {f"{path}.{name}".lstrip(".") for name in names}

    def reads_later_weights(self, k: int, batch: Any) -> Iterator[Leak]:
        """Yield a leak if the results or the state of subnetwork k depend on the weights of partitions above k."""
        run = partial(self._pass, k, batch)
        clean = self._kept(run)
        try:
            with self._later_weights(k, _poisoned):
                poisoned = self._kept(run)
        except Exception as error:  # a model may raise anything for NaN weights
            yield Leak("", f"fails if the weights of later partitions are NaN ({error})", LIVE)
            return
        differing, kept = self._changed_by_nan(run, clean, poisoned)
        if any(name.startswith("output") for name in differing):
            path = self._first_difference(k, [(batch, _same), (batch, _poisoned)], after=k, of_outputs=True)
            yield Leak(path, "reads weights of inactive partitions", LIVE)
        elif "loss" in differing:
            yield Leak("", "has a loss that reads weights of inactive partitions", LIVE)
        elif differing:
            yield Leak(differing[0], "has a gradient that depends on weights of inactive partitions", LIVE)
        elif kept:
            yield Leak(kept[0], "stores values that depend on weights of inactive partitions", APART)

    def strangers(self) -> Iterator[Leak]:
        """Yield parameters in the loss's graph that are not in the model: these do not leak, but are not trained."""
        if self.strange:
            shapes = ", ".join(sorted(str(list(parameter.shape)) for parameter in self.strange))
            yield Leak("", f"computes with parameters of shape {shapes} that are not in the model", NOT_ITS_OWN)

    def remembers(self, batch: Any, other: Any, last: int) -> Iterator[Leak]:
        """Yield leaks if subnetwork 1 reads or keeps state from a pass of the last subnetwork."""
        told: set[str] = set()
        for trains, first_trains in MODES:
            if told and trains != first_trains:
                return
            for leak in self._carries(trains, first_trains, batch, other, last):
                if (key := leak.path or leak.what) not in told:
                    told.add(key)
                    yield leak

    def _carries(self, trains: bool, first_trains: bool, batch: Any, other: Any, last: int) -> Iterator[Leak]:
        """Yield leaks from a pass of the last subnetwork to a following one of the first, in these modes."""
        worlds, behind, within, drawn = [(batch, _same), (other, _disturbed)], [], [], []

        def first_after(given: Any, change: Callable[[Tensor], None], lost: Sequence[str] = ()) -> Seen:
            with ExitStack() as stack:
                stack.enter_context(self._mode(trains))
                with self._later_weights(1, change):
                    drawn.append(self._computed(trains, last, given).drawn)
                if first_trains != trains:
                    stack.close()
                    stack.enter_context(self._mode(first_trains))
                behind.append(self._held())
                for path in lost:
                    behind[-1].set(path, torch.nan)
                seen = self._computed(first_trains, 1, batch)
                within.append(self._held())  # before the mode changes, in which the model's train() may drop state
            return seen

        run = partial(first_after, *worlds[0])
        (one, left), (two, left_too) = self._kept(run), self._kept(partial(first_after, *worlds[1]))
        replaced, kept = behind[0].changed(behind[1]), within[0].changed(within[1])
        # State that one mode overwrites in each pass carries no information to the other mode.
        is_one, differing = trains == first_trains, one.differing(two)
        changed = left.changed(left_too) if is_one else []
        if differing or changed:
            again, left_again = self._kept(run)
            if self.device.type in STEADY and (one.differing(again) or (is_one and left.changed(left_again))):
                what = "gives a different result each time for the same batch and seed: it has hidden state"
                yield Leak("", what, OUT_OF_SIGHT)
                return
            differing = [name for name in differing if name not in one.differing(again)]
            changed = [path for path in changed if path not in left.changed(left_again)]
        for path in changed:
            yield Leak(path, FOLLOWS, APART)
        if differing and not changed and kept and is_one:
            yield Leak(kept[0], "is kept until the mode changes, and other subnetworks read it", KEPT_IN_A_MODE)
        elif differing and not changed and kept:
            yield Leak(kept[0], "is kept in one mode, and other subnetworks read it in the other mode", APART)
        elif differing and not changed:
            what = f"gives another {differing[0]} after later chunks were seen, because of hidden state"
            yield Leak("", what, APART)
        elif not changed and replaced and (path := self._read_first(replaced, run, (one, left), is_one)):
            yield Leak(path, FOLLOWS, APART)
        if trains and is_one and not all(map(same, *map(tree_leaves, drawn[:2]))):
            path = self._first_difference(last, worlds, after=1, of_outputs=False)
            what = "draws random numbers, and how many depends on the data, which changes later noise"
            yield Leak(
                path, what, "draw as many for each batch: dropout before packing or selecting, LeakyReLU for RReLU"
            )

    def _read_first(
        self, replaced: list[str], run: Callable[..., Seen], clean: tuple[Seen, Held], is_one: bool
    ) -> str | None:
        """Return the path of a value that subnetwork 1 reads before it replaces it, such as a running maximum, or None.

        NaN in place of the last subnetwork's values would then affect the result, or stay.
        """
        try:
            differing, changed = self._changed_by_nan(run, clean, self._kept(partial(run, lost=replaced)))
        except Exception:  # a model may raise anything for NaN
            return replaced[0]
        if not differing and not (is_one and changed):
            return None
        return next((path for path in replaced if path in changed), replaced[0])

    def _changed_by_nan(
        self, run: Callable[[], Seen], clean: tuple[Seen, Held], other: tuple[Seen, Held]
    ) -> tuple[list[str], list[str]]:
        """Return the names of results, and the paths of state, that differ with NaN.

        Results that vary by themselves, such as sums by atomics on a GPU, count only if they have more NaN.
        """
        (one, left), (two, left_too) = clean, other
        differing, changed = one.differing(two), left.changed(left_too)
        if differing or changed:
            again, left_again = self._kept(run)
            unsteady = {name for name in one.differing(again) if not _has_more_nan(one, two, name)}
            differing = [name for name in differing if name not in unsteady]
            changed = [path for path in changed if path not in left.changed(left_again)]
        return differing, changed

    def _kept(self, run: Callable[[], Seen]) -> tuple[Seen, Held]:
        """Return the result of run and the state after it; then restore the state."""
        try:
            return run(), self._held()
        finally:
            self.before.put_back()

    def _held(self) -> Held:
        """Return a snapshot of the state, without per-subnetwork state."""
        return Held(self.model, without=self.apart, known=self.before)

    def _pass(self, k: int, batch: Any) -> Seen:
        """Run subnetwork k in both modes."""
        trained = self._trained(k, batch)
        with evaluating(self.model):
            return Seen(trained.values | self._evaluated(k, batch).values, trained.drawn)

    def _mode(self, is_training: bool) -> AbstractContextManager:
        return nullcontext() if is_training else evaluating(self.model)

    def _computed(self, is_training: bool, k: int, batch: Any) -> Seen:
        """Run a pass in the given mode, which the model must be in."""
        return self._trained(k, batch) if is_training else self._evaluated(k, batch)

    def _trained(self, k: int, batch: Any) -> Seen:
        """Run a pass in the model's mode for training, with gradients, including those of ψ.

        It uses a copy of the batch, as forward may remove parts of it.
        """
        random_state.seed(0)
        still = evaluating(*other_norms(self.model))
        with subnetwork(self.model, k, k, hyper=True), still:
            output, loss, grads = self._learned(batch)
        values = {f"output {i}": leaf.detach().clone() for i, leaf in enumerate(tensors(output))} | {"loss": loss}
        values |= self._live_entries(grads, k)
        return Seen(values, random_state.get_state(self.device))

    def _evaluated(self, k: int, batch: Any) -> Seen:
        """Run a pass in evaluation mode."""
        random_state.seed(0)
        with torch.no_grad(), subnetwork(self.model, k):
            output, _ = self.compute(copy.deepcopy(batch))
        values = {f"output {i} in evaluation": leaf.clone() for i, leaf in enumerate(tensors(output))}
        return Seen(values, random_state.get_state(self.device))

    def _learned(self, batch: Any) -> tuple[Any, Tensor, dict[nn.Parameter, Tensor]]:
        """Return the output in training mode, the loss, and the gradients."""
        learning = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        output, loss = self._penalised(batch)
        if not any(map(is_sharded, learning)):  # FSDP computes with gathered parameters
            self.strange |= {leaf for leaf in reached([loss]) if isinstance(leaf, nn.Parameter)}.difference(learning)
        if not (learning and loss.requires_grad):
            return output, loss.detach().clone(), {}
        try:  # autograd.grad does not trigger hooks on gradient accumulation, such as DistributedDataParallel's
            grads = torch.autograd.grad(loss, learning, allow_unused=True)
        except RuntimeError as error:
            if "checkpoint" not in str(error):  # reentrant checkpoints support only backward()
                raise
            for parameter in learning:
                parameter.grad = None
            output, loss = self._penalised(batch)
            loss.backward()
            grads = [parameter.grad for parameter in learning]
        else:
            grads = [_after_hooks(parameter, grad) for parameter, grad in zip(learning, grads, strict=True)]
        found = {parameter: grad for parameter, grad in zip(learning, grads, strict=True) if grad is not None}
        return output, loss.detach().clone(), found

    def _penalised(self, batch: Any) -> tuple[Any, Tensor]:
        """Return the output and the training loss."""
        with penalties() as found:
            output, loss = self.compute(copy.deepcopy(batch))
        return output, with_terms(loss, found)

    def _live_entries(self, grads: dict[nn.Parameter, Tensor], k: int) -> dict[str, Tensor]:
        """Return the gradients of partition k, and of ψ."""
        named = {parameter: name for name, parameter in self.model.named_parameters()}
        own = [one.parameter for one in partitioned_parameters(self.model)] + list(hyperparameters(self.model))
        return {named[parameter]: grads[parameter] for parameter in own if parameter in grads}

    @contextmanager
    def _later_weights(self, k: int, change: Callable[[Tensor], None]) -> Iterator[None]:
        """Apply `change` to all entries of partitions above k inside this context."""
        owned = partitioned_parameters(self.model)
        kept = [one.stored.detach().clone() for one in owned]
        with torch.no_grad():
            for one in owned:
                for j in range(k + 1, one.state.count + 1):
                    entries = one.take(one.stored, j).clone()
                    change(entries)
                    one.put(one.stored, j, entries)
                one.combine()
            noted(owned)
        try:
            yield
        finally:
            with torch.no_grad():
                for one, value in zip(owned, kept, strict=True):
                    one.stored.copy_(value)
                    one.combine()
                noted(owned)

    def _first_difference(
        self, k: int, worlds: list[tuple[Any, Callable[[Tensor], None]]], *, after: int, of_outputs: bool
    ) -> str:
        """Return the path of the first module with different outputs or random states in the two worlds."""
        paths, calls = {module: path for path, module in self.model.named_modules()}, []
        for given, change in worlds:
            calls.append(found := [])
            inside = [""]

            def begins(module: nn.Module, args: Any, kwargs: Any, found=found, inside=inside) -> None:
                found.append((inside[-1], seen((args, kwargs))))  # the calling module computed these
                inside.append(paths.get(module, inside[-1]))

            def ends(module: nn.Module, _: Any, output: Any, found=found, inside=inside) -> None:
                found.append((inside.pop(), seen(output)))

            def seen(values: Any) -> list[Tensor]:
                if not of_outputs:
                    return tree_leaves(random_state.get_state(self.device))
                return [leaf.detach().clone() for leaf in tensors(values)]

            hooks = [module.register_forward_pre_hook(begins, with_kwargs=True) for module in paths]
            hooks += [module.register_forward_hook(ends) for module in paths]
            try:
                with self._later_weights(after, change):
                    self._kept(lambda given=given: self._pass(k, given))
            finally:
                for hook in hooks:
                    hook.remove()
        pairs = zip(*calls, strict=False)
        return next((path for (path, one), (_, two) in pairs if not all(map(same, one, two))), "")


def _same(entries: Tensor) -> None:
    """Leave entries unchanged."""


def _poisoned(entries: Tensor) -> None:
    entries.fill_(torch.nan)


def _disturbed(entries: Tensor) -> None:
    entries.mul_(-2).add_(0.01)  # larger, to exceed a running maximum


def _after_hooks(parameter: nn.Parameter, grad: Tensor | None) -> Tensor | None:
    """Return a gradient after the user's post-accumulate hooks; those of libraries wait for other ranks."""
    hooks = (parameter._post_accumulate_grad_hooks or {}).values()
    if grad is None or not (own := [hook for hook in hooks if not is_of_library(getattr(hook, "func", hook))]):
        return grad
    parameter.grad = grad
    with torch.no_grad():
        for hook in own:
            hook(parameter)
    return parameter.grad


def _has_more_nan(one: Seen, other: Seen, name: str) -> bool:
    first, second = (each.values.get(name) for each in (one, other))
    return first is not None and second is not None and int(second.isnan().sum()) > int(first.isnan().sum())


def _size(output: Any) -> Tensor:
    """Return a loss for any output: the sum of the mean squares."""
    numbers = [leaf for leaf in tensors(output) if leaf.numel() and leaf.dtype != torch.bool]
    return sum((leaf.abs().float().square().mean() for leaf in numbers), torch.zeros((), device="cpu"))


def _varied(value: Any) -> Any:
    """Return a similar batch, with its numbers shuffled, and scaled if floating point."""
    if isinstance(value, Mapping):
        return {name: _varied(part) for name, part in value.items()}
    return tree_map(_shuffled, value)


def _shuffled(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    shuffled = leaf.flatten()[torch.randperm(leaf.numel(), device="cpu")].view(leaf.shape)
    return shuffled * 1.25 if leaf.is_floating_point() else shuffled
