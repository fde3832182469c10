"""audit: whether a model keeps to what every estimate rests on, tried on the model itself."""

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
from partnets.subnetworks.context import subnetwork, trying
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

LIVE = "read parameters as attributes (self.layer.weight), which gives those of the live subnetwork"
APART = (
    "let a module keep it, in buffers or attributes, and name that in partnets.partition(..., stateful=[...]), which"
    " keeps it for each subnetwork; or take one that keeps nothing, or put it into evaluation mode"
)
FOLLOWS = "follows the data: it carries what later chunks look like to earlier subnetworks"
KEPT_IN_A_MODE = (
    "name its module in partnets.partition(..., stateful=[...]), which keeps it for each subnetwork; or compute it at"
    " each call"
)
LOST = (
    "inside of a subnetwork a parameter is computed from its entries: compute with the changed value instead, or write"
    " dict(layer.named_parameters()) outside"
)
CHANGES_ALL = (
    "change it between passes, by data of chunk 1 alone; or let buffers keep what changes, of a module that is named in"
    " partnets.partition(..., stateful=[...])"
)
NOT_ITS_OWN = (
    "a module in a global variable or a function's closure is none of the model's: assign it to an attribute of one,"
    " before partnets.partition; or freeze it"
)
OUT_OF_SIGHT = (
    "what a class, a loss, slots or an object of a library keep is one for all subnetworks: let a module of the model"
    " keep it, in buffers or attributes, and name that in partnets.partition(..., stateful=[...])"
)
# Whether the last subnetwork trains, and whether the first does after it.
MODES = (True, True), (False, False), (True, False), (False, True)
# Devices that add up in the same order each time.
STEADY = {"cpu"}


class Leak(NamedTuple):
    """What carries later chunks into earlier subnetworks.

    Attributes:
        path: of the module, parameter or attribute.
        what: what it does, in words that follow the path.
        cure: what helps.
    """

    path: str
    what: str
    cure: str

    def __str__(self) -> str:
        return f"{self.path or 'the model itself'} {self.what}; {self.cure}."


class Seen(NamedTuple):
    """What a pass of a subnetwork gives: outputs and gradients by name, and the random state that it leaves."""

    values: dict[str, Tensor]
    drawn: dict

    def differing(self, other: Seen) -> list[str]:
        names = dict.fromkeys((*self.values, *other.values))
        return [name for name in names if not same(self.values.get(name), other.values.get(name))]


def audit(
    model: nn.Module, batch: Any, loss: Loss | None = None, *, other: Any = None, forward: Forward = call
) -> list[Leak]:
    """What of a model carries later chunks into earlier subnetworks, as far as two batches show; [] if nothing does.

    Partitions 1..k have not seen chunk k + 1: L_ML and the steps of ψ rest on it. So it is tried, in training mode and
    in evaluation mode, for each k:

    - the outputs, loss and gradients of subnetwork k stay to the bit where the weights of all later partitions are NaN;
    - a pass of subnetwork C leaves nothing behind, of its data or of its weights, that subnetwork 1 reads or keeps:
      buffers, attributes, what hooks remember, what its own train() will drop, and how many random numbers have been
      drawn;
    - no two parameters share memory, and no pass changes one: not their entries, which are of all partitions, nor what
      reading one gives, where it is lost;
    - the loss reaches no parameters but the model's own, as others would never learn.

    Afterwards model, gradients and random states are as before. It takes 4 passes for each of at most 4 subnetworks, 16
    for what is left behind, from each mode to each, and up to six times the weights' memory. Trainers do this before
    their first step.

    Args:
        model: with partitioned layers, in the mode in which it trains.
        batch: as chunks give them, at least 2 examples.
        loss: loss(output, y), whose gradients are looked at; the mean square of all outputs if None.
        other: a second batch of the same sizes; if None, the first with its numbers shuffled and scaled.
        forward: forward(model, batch), which returns output and y; see partnets.data.batch.call for the usual one.

    Raises:
        ValueError: the model has no partitioned layers, or the batch does not fit it.

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
        the model itself reads weights of partitions that are not live; read parameters as attributes ...
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
    """As audit, of a function that gives a batch's output and loss.

    Args:
        compute: of a batch on the model's device; both batches are there.
        last: of the subnetworks that learn; C if None.
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
        with random_state.preserved(trial.device), trying(model):
            ks = sorted({1, 2, parts // 2, parts - 1} & set(range(1, parts)))
            reading = (leak for k in ks for leak in trial.reads_later_weights(k, batch))
            remembering = trial.remembers(batch, other, last) if last > 1 else ()
            return [*found, *itertools.islice(reading, 1), *remembering, *trial.strangers()]
    finally:
        before.put_back()


class _Trial:
    """Passes of subnetworks, in worlds that differ in what earlier subnetworks must not see."""

    def __init__(self, model: nn.Module, compute: Callable[[Any], tuple[Any, Tensor]], before: Held) -> None:
        self.model, self.compute, self.before, self.device = model, compute, before, device_of(model)
        self.strange: set[nn.Parameter] = set()
        # What each subnetwork has of its own, and weights: the passes show whether they matter.
        self.apart = set()
        for path, module in model.named_modules():
            if (state := state_of(module)) is not None:
                names = [*state.weights, *state.vectors, *state.statistics]
                names += [name + end for name in names for end in (MAP, DEFAULTS, STORED, ROWS)] + [ESTIMATED]
                self.apart |= {f"{path}.{name}".lstrip(".") for name in names}

    def reads_later_weights(self, k: int, batch: Any) -> Iterator[Leak]:
        """A leak, if what subnetwork k computes or keeps depends on the weights of partitions above k."""
        run = partial(self._pass, k, batch)
        clean = self._kept(run)
        try:
            with self._later_weights(k, _poisoned):
                poisoned = self._kept(run)
        except Exception as error:  # whatever a model does about weights that are no numbers
            yield Leak("", f"fails where the weights of later partitions are NaN ({error})", LIVE)
            return
        differing, kept = self._changed_by_nan(run, clean, poisoned)
        if any(name.startswith("output") for name in differing):
            path = self._first_difference(k, [(batch, _same), (batch, _poisoned)], after=k, of_outputs=True)
            yield Leak(path, "reads weights of partitions that are not live", LIVE)
        elif "loss" in differing:
            yield Leak("", "has a loss that reads weights of partitions that are not live", LIVE)
        elif differing:
            yield Leak(differing[0], "has a gradient that depends on weights which are not live", LIVE)
        elif kept:
            yield Leak(kept[0], "keeps something of weights that are not live", APART)

    def strangers(self) -> Iterator[Leak]:
        """Parameters that the loss reaches and that are in no module of the model: no leak, but never learned."""
        if self.strange:
            shapes = ", ".join(sorted(str(list(parameter.shape)) for parameter in self.strange))
            yield Leak("", f"computes with parameters of shape {shapes} that it does not have", NOT_ITS_OWN)

    def remembers(self, batch: Any, other: Any, last: int) -> Iterator[Leak]:
        """Leaks, if a pass of the last subnetwork leaves something behind that subnetwork 1 reads, or keeps."""
        told: set[str] = set()
        for trains, first_trains in MODES:
            if told and trains != first_trains:
                return
            for leak in self._carries(trains, first_trains, batch, other, last):
                if (key := leak.path or leak.what) not in told:
                    told.add(key)
                    yield leak

    def _carries(self, trains: bool, first_trains: bool, batch: Any, other: Any, last: int) -> Iterator[Leak]:
        """Leaks from a pass of the last subnetwork to one of the first that comes next, in these modes."""
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
                within.append(self._held())  # before the mode changes, where the model's own train() may drop it
            return seen

        run = partial(first_after, *worlds[0])
        (one, left), (two, left_too) = self._kept(run), self._kept(partial(first_after, *worlds[1]))
        replaced, kept = behind[0].changed(behind[1]), within[0].changed(within[1])
        # What a mode keeps for itself alone, and overwrites in each pass, tells the other nothing.
        is_one, differing = trains == first_trains, one.differing(two)
        changed = left.changed(left_too) if is_one else []
        if differing or changed:
            again, left_again = self._kept(run)
            if self.device.type in STEADY and (one.differing(again) or (is_one and left.changed(left_again))):
                what = "gives something else each time, of one batch and one seed: it keeps something out of sight"
                yield Leak("", what, OUT_OF_SIGHT)
                return
            differing = [name for name in differing if name not in one.differing(again)]
            changed = [path for path in changed if path not in left.changed(left_again)]
        for path in changed:
            yield Leak(path, FOLLOWS, APART)
        if differing and not changed and kept and is_one:
            yield Leak(kept[0], "is kept until the mode changes, of one subnetwork, and others read it", KEPT_IN_A_MODE)
        elif differing and not changed and kept:
            yield Leak(kept[0], "is kept in one mode, of one subnetwork, and others read it in the other", APART)
        elif differing and not changed:
            what = f"gives another {differing[0]} after later chunks were seen, by what is kept out of sight"
            yield Leak("", what, APART)
        elif not changed and replaced and (path := self._read_first(replaced, run, (one, left), is_one)):
            yield Leak(path, FOLLOWS, APART)
        if trains and is_one and not all(map(same, *map(tree_leaves, drawn[:2]))):
            path = self._first_difference(last, worlds, after=1, of_outputs=False)
            what = "draws random numbers, and how many depends on the data: later noise tells of it"
            yield Leak(
                path, what, "draw as many for each batch: dropout before packing or selecting, LeakyReLU for RReLU"
            )

    def _read_first(
        self, replaced: list[str], run: Callable[..., Seen], clean: tuple[Seen, Held], is_one: bool
    ) -> str | None:
        """What subnetwork 1 replaces of the last one's and looks at before, as a running maximum does; None if nothing.

        NaN, which is no number to compare with, would be seen there, or stay.
        """
        try:
            differing, changed = self._changed_by_nan(run, clean, self._kept(partial(run, lost=replaced)))
        except Exception:  # whatever a model does about numbers that are none
            return replaced[0]
        if not differing and not (is_one and changed):
            return None
        return next((path for path in replaced if path in changed), replaced[0])

    def _changed_by_nan(
        self, run: Callable[[], Seen], clean: tuple[Seen, Held], other: tuple[Seen, Held]
    ) -> tuple[list[str], list[str]]:
        """The names of what is computed otherwise where something is NaN, and the paths of what is held otherwise.

        What differs by itself, as sums by atomics on a GPU, tells by its NaN alone.
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
        """What it gives, and what is held after it; then all is as before."""
        try:
            return run(), self._held()
        finally:
            self.before.put_back()

    def _held(self) -> Held:
        """What is held, without what each subnetwork has for itself."""
        return Held(self.model, without=self.apart, known=self.before)

    def _pass(self, k: int, batch: Any) -> Seen:
        """Both modes of subnetwork k."""
        trained = self._trained(k, batch)
        with evaluating(self.model):
            return Seen(trained.values | self._evaluated(k, batch).values, trained.drawn)

    def _mode(self, is_training: bool) -> AbstractContextManager:
        return nullcontext() if is_training else evaluating(self.model)

    def _computed(self, is_training: bool, k: int, batch: Any) -> Seen:
        """A pass in the mode that the model is in."""
        return self._trained(k, batch) if is_training else self._evaluated(k, batch)

    def _trained(self, k: int, batch: Any) -> Seen:
        """A pass in the mode in which the model trains, with gradients, those of ψ too.

        It computes with a batch of its own: a forward may take things out of it.
        """
        random_state.seed(0)
        still = evaluating(*other_norms(self.model))
        with subnetwork(self.model, k, k, hyper=True), still:
            output, loss, grads = self._learned(batch)
        values = {f"output {i}": leaf.detach().clone() for i, leaf in enumerate(tensors(output))} | {"loss": loss}
        values |= self._live_entries(grads, k)
        return Seen(values, random_state.get_state(self.device))

    def _evaluated(self, k: int, batch: Any) -> Seen:
        """A pass of a model in evaluation mode."""
        random_state.seed(0)
        with torch.no_grad(), subnetwork(self.model, k):
            output, _ = self.compute(copy.deepcopy(batch))
        values = {f"output {i} in evaluation": leaf.clone() for i, leaf in enumerate(tensors(output))}
        return Seen(values, random_state.get_state(self.device))

    def _learned(self, batch: Any) -> tuple[Any, Tensor, dict[nn.Parameter, Tensor]]:
        """The output in training mode, the loss, and the gradients."""
        learning = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        output, loss = self._penalised(batch)
        if not any(map(is_sharded, learning)):  # FSDP computes with parameters that it gathers
            self.strange |= {leaf for leaf in reached([loss]) if isinstance(leaf, nn.Parameter)}.difference(learning)
        if not (learning and loss.requires_grad):
            return output, loss.detach().clone(), {}
        try:  # without what waits for gradients to arrive, as DistributedDataParallel does
            grads = torch.autograd.grad(loss, learning, allow_unused=True)
        except RuntimeError as error:
            if "checkpoint" not in str(error):  # reentrant ones know backward() alone
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
        """The output and the loss by which weights are trained."""
        with penalties() as found:
            output, loss = self.compute(copy.deepcopy(batch))
        return output, with_terms(loss, found)

    def _live_entries(self, grads: dict[nn.Parameter, Tensor], k: int) -> dict[str, Tensor]:
        """The gradients of partitions 1..k, and of ψ."""
        named = {parameter: name for name, parameter in self.model.named_parameters()}
        own = [one.parameter for one in partitioned_parameters(self.model)] + list(hyperparameters(self.model))
        return {named[parameter]: grads[parameter] for parameter in own if parameter in grads}

    @contextmanager
    def _later_weights(self, k: int, change: Callable[[Tensor], None]) -> Iterator[None]:
        """Inside, `change` has been applied to all entries of partitions above k."""
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
        """The path of the module that first computes, or draws, otherwise in one world than in the other."""
        paths, calls = {module: path for path, module in self.model.named_modules()}, []
        for given, change in worlds:
            calls.append(found := [])
            inside = [""]

            def begins(module: nn.Module, args: Any, kwargs: Any, found=found, inside=inside) -> None:
                found.append((inside[-1], seen((args, kwargs))))  # whoever calls has computed these
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
    """Nothing."""


def _poisoned(entries: Tensor) -> None:
    entries.fill_(torch.nan)


def _disturbed(entries: Tensor) -> None:
    entries.mul_(-2).add_(0.01)  # louder: what a maximum so far is compared with


def _after_hooks(parameter: nn.Parameter, grad: Tensor | None) -> Tensor | None:
    """What one's own hooks make of a gradient that has been accumulated; those of libraries wait for other ranks."""
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
    """A loss for any output: the sum of the mean squares."""
    numbers = [leaf for leaf in tensors(output) if leaf.numel() and leaf.dtype != torch.bool]
    return sum((leaf.abs().float().square().mean() for leaf in numbers), torch.zeros((), device="cpu"))


def _varied(value: Any) -> Any:
    """A batch of the same kind: its numbers shuffled, and scaled where that leaves them what they are."""
    if isinstance(value, Mapping):
        return {name: _varied(part) for name, part in value.items()}
    return tree_map(_shuffled, value)


def _shuffled(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    shuffled = leaf.flatten()[torch.randperm(leaf.numel(), device="cpu")].view(leaf.shape)
    return shuffled * 1.25 if leaf.is_floating_point() else shuffled
