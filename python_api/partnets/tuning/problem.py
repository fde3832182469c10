"""Problem: the checked arguments of partnets.tune: a network, data, a loss, an optimizer and settings."""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset, TensorDataset

from partnets.data.batch import Forward, Loss, call, mean, scores
from partnets.data.chunks import Chunks, chunk
from partnets.data.dataset import Data
from partnets.data.examples import Collate, as_dataset, as_tensor, collated
from partnets.hyper import Hyperparameter, hyperparameters
from partnets.subnetworks.state import partitioned_modules
from partnets.training.preflight import warn_of_unused_losses
from partnets.training.step import check_clip, parameters_of
from partnets.tuning.settings import Setting, check_names, find_settings, put_before
from partnets.utils.checks import check_at_least
from partnets.utils.likelihood import BINARY_OF_LOGITS, SQUARED, check_mean, name_of, plain
from partnets.utils.modules import device_of, evaluating, to_device
from partnets.utils.random_state import preserved
from partnets.utils.targets import ROUNDING, check_broadcast, check_range, check_targets, token_cross_entropy, tried

# Depth to which references between objects are followed for the identity of a search.
DEPTH = 20
Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Scheduler = Callable[[torch.optim.Optimizer], LRScheduler]


@dataclass(frozen=True)
class Problem:
    """The parts shared by all trainings in one call of partnets.tune.

    Attributes:
        network: the network with modules of partnets.hyper; trainings copy it.
        outside: the number of these modules in front of the user's network.
        settings: the numbers to choose.
        direct: modules with numbers that learn by gradient descent.
        starts: among these, the settings of augmentations.
        loss: the training loss, into which settings of the loss are put.
        optimizer: makes an optimizer of a list of parameters.
        scheduler: makes a scheduler of an optimizer, which steps after each training step; or None.
        chunks: D_1, ..., D_C.
        everything: all examples as a single chunk.
        steps, batch_size: those of a training at full length and batch size.
        forward: as in partnets.data.batch.call.
        device: the device of the trainings.
        clip: the largest norm of a gradient, or None.
        squared: the number of targets per example for a squared error, otherwise 0.
        still: the paths of modules in evaluation mode, such as a frozen backbone, in a network in training mode.
        identity: a digest that identifies this problem.
    """

    network: nn.Module
    outside: int
    settings: list[Setting]
    direct: list[Hyperparameter]
    starts: list[Setting]
    loss: Loss
    optimizer: Optimizer
    scheduler: Scheduler | None
    chunks: Chunks
    everything: Chunks
    steps: int
    batch_size: int
    forward: Forward
    device: torch.device
    clip: float | None
    squared: int
    still: list[str]
    identity: str

    @property
    def judge(self) -> Loss:
        """The loss of unseen data: without label smoothing, but with the user's class weights."""
        return plain(self.loss, weighed=True)


def make_problem(
    network: nn.Module,
    data: Any,
    hyper: str | Hyperparameter | Sequence[str | Hyperparameter],
    *,
    steps: int,
    batch_size: int,
    optimizer: Optimizer,
    scheduler: Scheduler | None = None,
    loss: Loss | None = None,
    proportions: Sequence[float] = (0.8, 0.2),
    clip: float | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    groups: Any = None,
    stratify: Any = None,
    collate: Collate | None = None,
    forward: Forward = call,
) -> Problem:
    """Check the arguments of partnets.tune, try a batch, and find the settings. Arguments and errors: see tune.

    Example:
        >>> data = torch.randn(20, 4), torch.zeros(20, dtype=torch.int64)
        >>> options = {"steps": 5, "batch_size": 8, "optimizer": torch.optim.Adam}
        >>> [setting.name for setting in make_problem(nn.Linear(4, 2), data, "weight_decay", **options).settings]
        ['weight_decay']
    """
    check_at_least(1, steps=steps, batch_size=batch_size)
    check_clip(clip)
    _check_network(network)
    check_function("optimizer", optimizer, "a list of parameters, such as functools.partial(torch.optim.Adam, lr=1e-3)")
    optimizer = functools.partial(_with_own_rates, optimizer)
    check_function("forward", forward, "the network and a batch, which returns outputs and targets")
    if loss is not None:
        check_function("loss", loss, "outputs and targets, such as torch.nn.CrossEntropyLoss()")
    if collate is not None:
        check_function("collate", collate, "a list of examples, which returns a batch")
    if isinstance(loss, nn.Module) and (own := [p for p in loss.parameters() if p.requires_grad]):
        missing = len(set(own) - set(network.parameters()))
        if missing:
            raise ValueError(
                f"the loss has {missing} parameters that are not in the network, which nothing would train; put the"
                " module in the network, or call requires_grad_(False)."
            )
    dtype = next((p.dtype for p in network.parameters() if p.is_floating_point()), torch.get_default_dtype())
    dataset, options = as_data(data, dtype), {} if collate is None else {"collate": collate}
    chunks = chunk(dataset, proportions, seed=seed, groups=groups, stratify=stratify, **options)
    if chunks.count < 2:
        raise ValueError(f"proportions={tuple(proportions)}; pass two or more: unseen data judge the trainings.")
    device = _usable(device_of(network) if device is None else device)
    wrapped, hyper, outside = put_before(network, hyper)
    copied = _copied(wrapped)
    with preserved(device):
        generator = torch.Generator()
        batch, again = (chunks.sample(1, min(batch_size, 32), generator.manual_seed(0)) for _ in range(2))
        tensors = dataset.tensors if isinstance(dataset, TensorDataset) else ()
        targets = tensors[-1] if tensors and forward is call else lambda: _some_targets(copied, chunks, forward, device)
        try:
            loss, y = checked_loss(copied, batch, forward, device, loss, targets)
        except ValueError as error:
            if not outside or (isinstance(batch, tuple | list) and isinstance(batch[0], Tensor)):
                raise
            raise ValueError(
                f"{error} Modules of hyper that are not in the network are put before it, and take one tensor; put them"
                " into it, such as hyper.InTraining(hyper.Affine()), at the place of the images."
            ) from error
        _check_finite(copied, chunks, forward, device, loss)
        psi = set(hyperparameters(copied))
        given = [parameter for parameter in copied.parameters() if parameter.requires_grad and parameter not in psi]
        if not given:
            raise ValueError(
                "no parameter of the network requires a gradient; call requires_grad_() on the parameters to train."
            )
        made = optimizer(given)
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(f"optimizer returned a {type(made).__name__}; return a torch.optim.Optimizer.")
    if scheduler is not None:
        _check_scheduler(scheduler, optimizer, given, steps)
    closure = inspect.signature(made.step).parameters.get("closure")
    if closure and closure.default is closure.empty:
        raise ValueError(f"step of {type(made).__name__} needs a closure; pass an optimizer that needs no closure.")
    if strange := len(set(parameters_of(made)) - set(given)):
        raise ValueError(
            f"optimizer steps {strange} parameters that it was not given, and would train nothing: each training has a"
            " copy of the network. Make it of the list of parameters that it is called with."
        )
    settings, direct, starts = find_settings(wrapped, hyper, outside, loss, made, steps)
    check_names(settings, direct)
    warn_of_unused_losses(wrapped, {}, loss)
    still = [path for path, module in wrapped.named_modules() if network.training and not module.training]
    everything = chunk(dataset, (1.0,), seed=seed, **options)
    states = [{name: value for name, value in group.items() if name != "params"} for group in made.param_groups]
    parts = [
        *(chunks.fingerprint, steps, batch_size, clip, proportions, type(made).__name__, states),
        *[[(one.name, one.low, one.high, one.untuned) for one in some] for some in (settings, starts)],
        [path for path, module in wrapped.named_modules() if module in direct],
        [(path, type(module).__name__, _attributes(module)) for path, module in wrapped.named_modules()],
        [_plain(type(module).forward) for module in wrapped.modules() if not _is_of_a_library(module)],
        *map(_plain, (loss, forward, scheduler, collate, optimizer)),
        [(name, parameter.requires_grad) for name, parameter in wrapped.named_parameters()],
        [len(group["params"]) for group in made.param_groups],
        # A batch with random transforms differs between draws and identifies nothing.
        *({_plain(batch)} & {_plain(again)}),
    ]
    identity = _digest(parts, *_states(wrapped, loss), *tensors, y)
    squared = y[0].numel() if name_of(loss) in SQUARED else 0
    return Problem(
        *(wrapped, outside, settings, direct, starts, loss, optimizer, scheduler, chunks, everything, steps),
        *(batch_size, forward, device, clip, squared, still, identity),
    )


def _with_own_rates(optimizer: Optimizer, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer without tensors shared with others, such as a learning rate that is changed in place."""
    made = optimizer(parameters)
    for group in made.param_groups if isinstance(made, torch.optim.Optimizer) else ():
        group.update({name: value.clone() for name, value in group.items() if isinstance(value, Tensor)})
    return made


def check_function(name: str, given: Any, arguments: str) -> None:
    """Raise TypeError unless `given` is callable and not a module class."""
    if callable(given) and not (isinstance(given, type) and issubclass(given, nn.Module)):
        return
    kind = f"the class {given.__name__}" if isinstance(given, type) else f"of type {type(given).__name__}"
    raise TypeError(f"{name} is {kind}; pass a function of {arguments}.")


def rates(schedule: LRScheduler, steps: int) -> list[list[float]]:
    """Return the learning rate of each group in each step, from a scheduler that has taken no step.

    Raises:
        ValueError: the scheduler has fewer steps.

    Example:
        >>> optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.4)
        >>> rates(torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), 4)
        [[0.4], [0.4], [0.2], [0.2]]
    """
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the optimizer takes no steps here
        for step in range(steps):
            found.append([float(group["lr"]) for group in schedule.optimizer.param_groups])
            try:
                schedule.step()
            except ValueError as error:
                raise ValueError(f"the scheduler fails after {step} of {steps} steps: {error}") from error
    return found


def _check_scheduler(scheduler: Any, optimizer: Optimizer, given: list[nn.Parameter], steps: int) -> None:
    """Raise an error unless `scheduler` makes a scheduler of an optimizer that sets rates for this many steps."""
    check_function("scheduler", scheduler, "an optimizer, which returns a scheduler")
    made = optimizer(given)
    try:
        schedule = scheduler(made)
    except TypeError as error:
        raise TypeError(
            f"scheduler cannot be called with only an optimizer: {error}. Pass a function of it, such as lambda"
            " optimizer: StepLR(optimizer, 100)."
        ) from error
    if not isinstance(schedule, LRScheduler) or isinstance(schedule, ReduceLROnPlateau):
        raise TypeError(
            f"scheduler returned a {type(schedule).__name__}; return one that steps without a loss, such as"
            " torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)."
        )
    if schedule.optimizer is not made:
        raise ValueError("scheduler returned one of another optimizer; make it of its argument, an optimizer.")
    if not any(map(any, rates(schedule, steps))):
        raise ValueError(f"the scheduler has a learning rate of 0 in all {steps} steps; pass another.")


def _check_finite(network: nn.Module, chunks: Chunks, forward: Forward, device: torch.device, loss: Loss) -> None:
    """Raise ValueError if NaN or infinite numbers in tensors make the loss non-finite.

    A network or a loss may handle them, such as missing inputs or targets. Half of the tested examples have none.
    """
    if not isinstance(chunks.dataset, TensorDataset):
        return
    fine = torch.ones(len(chunks.dataset), dtype=torch.bool, device="cpu")
    for tensor in chunks.dataset.tensors:
        if tensor.is_floating_point():
            fine &= tensor.reshape(len(tensor), -1).sum(1).isfinite().cpu()
    if fine.all():
        return
    places = torch.cat([part.nonzero().flatten()[:16] for part in (fine, ~fine)])
    batch = to_device(collated(chunks.dataset, places, chunks.collate), device)
    with torch.no_grad(), evaluating(network):
        value = float(mean(loss, *forward(network, batch)))
    if not math.isfinite(value):
        raise ValueError(
            f"{int((~fine).sum())} of {len(fine)} examples have NaN or infinite numbers, and the loss of a batch with"
            f" them is {value}; leave them out, or replace these numbers, such as by x.nan_to_num()."
        )


def _check_network(network: Any) -> None:
    """Raise an error unless `network` can be copied and trained, or if gradients are disabled."""
    if not isinstance(network, nn.Module):
        raise TypeError(f"network is a {type(network).__name__}; pass a torch module.")
    if isinstance(network, torch.jit.ScriptModule):
        raise TypeError("network is compiled by torch.jit; pass the module from which it was made.")
    if partitioned_modules(network):
        raise ValueError(
            "network is partitioned; pass the plain one, with proportions=(0.8, 0.1, 0.1) to have it partitioned here."
        )
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        raise RuntimeError("gradients are disabled here; call tune outside of torch.no_grad() and inference_mode().")
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise RuntimeError(
            "tune is called within torch.autocast, which would share cached copies of weights between trainings; call"
            " it outside, and use autocast in forward=."
        )
    if any(map(is_lazy, network.parameters())):
        raise ValueError("network has lazy modules without parameters; call it once on a batch before you pass it.")
    if any(tensor.is_meta for tensor in (*network.parameters(), *network.buffers())):
        raise ValueError("network has parameters on the meta device, without numbers; call to_empty and initialise it.")


def _copied(network: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(network)
    except Exception as error:  # depends on the network's contents
        raise ValueError(
            f"network cannot be copied, and each training has a copy: {error}. Leave out of it objects that"
            " copy.deepcopy does not take: locks, generators, stored outputs; replace torch.nn.utils.weight_norm by"
            " torch.nn.utils.parametrizations.weight_norm."
        ) from error


def _usable(device: torch.device | str) -> torch.device:
    try:
        device = torch.device(device)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ValueError(f"device={device!r} cannot be used here: {error}") from error
    if device.type == "meta":
        raise ValueError("device='meta' has no numbers to train; pass 'cpu' or a device of this machine.")
    return device


def _some_targets(network: nn.Module, chunks: Chunks, forward: Forward, device: torch.device) -> Tensor:
    """Return the targets of up to 512 examples, since those of one batch may be zeros and ones by chance."""
    places = torch.linspace(0, len(chunks.order) - 1, min(512, len(chunks.order)), device="cpu").long()
    found = []
    with torch.no_grad(), evaluating(network):
        for part in chunks.order[places].split(32):
            batch = to_device(collated(chunks.dataset, part, chunks.collate), device)
            found.append(forward(network, batch)[1])
    return torch.cat(found)


def _plain(value: Any, above: tuple = ()) -> str:
    """Return a text, without addresses, that differs between values and between functions with their references.

    Args:
        value: anything: of containers, each member is included; of functions the code, closure, defaults and globals;
            of other objects the attributes.
        above: the objects that refer to it.
    """
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | torch.dtype | torch.device):
        return repr(value)
    if isinstance(value, Tensor):
        return _digest([], value)
    if isinstance(value, numpy.ndarray):
        return f"{value.dtype} {value.shape} {_digest([value.tobytes()])}"
    if isinstance(value, CodeType):
        constants = [_plain(each, above) for each in value.co_consts]
        return f"{value.co_code.hex()} {value.co_names} {constants}"
    if len(above) > DEPTH or any(value is each for each in above):
        return type(value).__name__

    def inner(each: Any) -> str:
        return _plain(each, (*above, value))

    if isinstance(value, dict):
        return str({str(name): inner(each) for name, each in value.items()})
    if isinstance(value, tuple | list):
        return str([inner(each) for each in value])
    if isinstance(value, set | frozenset):  # the order differs between processes
        return str(sorted(map(inner, value)))
    if isinstance(value, functools.partial):
        return inner([value.func, value.args, value.keywords])
    if isinstance(value, nn.Module):
        return f"{type(value).__name__} {[_attributes(module) for module in value.modules()]}"
    if isinstance(value, MethodType):
        return inner([value.__func__, value.__self__])
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
        parts = [value.__code__, cells, value.__defaults__, value.__kwdefaults__, _read_globals(value)]
        return f"{value.__qualname__} {inner(parts)}"
    name = getattr(value, "__qualname__", type(value).__name__)
    return name if isinstance(value, type | ModuleType) else f"{name} {inner(getattr(value, '__dict__', {}))}"


def _read_globals(function: FunctionType) -> dict[str, Any]:
    """Return the globals that a function reads; callables only if they are from its own module."""
    codes = [function.__code__]
    for code in codes:
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
    names = sorted({name for code in codes for name in code.co_names} & function.__globals__.keys())
    found = {name: function.__globals__[name] for name in names}
    own = function.__module__
    return {name: each for name, each in found.items() if not callable(each) or getattr(each, "__module__", "") == own}


def _is_of_a_library(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] in ("torch", "partnets")


def _attributes(module: nn.Module) -> dict[str, str]:
    kept = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    return {name: _plain(value) for name, value in kept.items() if not isinstance(value, Tensor)}


def _states(*holders: Any) -> Iterator[Tensor]:
    """Yield the tensors of modules."""
    for module in holders:
        if isinstance(module, nn.Module):
            yield from (value for value in module.state_dict().values() if isinstance(value, Tensor))


def _digest(parts: list, *tensors: Any) -> str:
    """Return a hexadecimal digest of values and tensors."""
    found = hashlib.blake2b(repr(parts).encode(), digest_size=16)
    for value in tensors:
        if isinstance(value, Tensor):
            found.update(f"{list(value.shape)} {value.dtype}".encode())
            found.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def as_data(data: Any, dtype: torch.dtype = torch.float32) -> Dataset | Sequence:
    """Return a dataset: a Data's training set, arrays as tensors, with float64 in `dtype` and labels in int64.

    Example:
        >>> import numpy
        >>> [part.dtype for part in as_data((numpy.zeros((3, 2)), numpy.zeros(3, dtype=int))).tensors]
        [torch.float32, torch.int64]
    """
    if isinstance(data, Data):
        data = data.train
    if isinstance(data, DataLoader):
        raise TypeError(
            "data are a DataLoader; pass loader.dataset, batch_size=loader.batch_size and collate=loader.collate_fn."
        )
    if isinstance(data, tuple | list) and data and all(hasattr(part, "__array__") for part in data):
        *inputs, y = (part.to(dtype) if part.dtype == torch.float64 else part for part in map(as_tensor, data))
        data = *inputs, y.long() if y.dtype in (torch.uint8, torch.int8, torch.int16, torch.int32) else y
    return as_dataset(data)


def usual_loss(output: Any, y: Any, targets: Any = None) -> Loss:
    """Return the default loss for outputs and targets: cross-entropy, its binary version, or squared error.

    Args:
        output, y: output and targets of a batch.
        targets: all targets, or a function that returns many, since those of one batch may be zeros and ones by chance.

    Raises:
        ValueError: no default is known, or each row of targets has a single one; pass loss=.

    Example:
        >>> usual_loss(torch.zeros(4, 3), torch.tensor([0, 1, 2, 0])) is F.cross_entropy
        True
        >>> usual_loss(torch.zeros(4, 3), torch.ones(4, 3)) is F.binary_cross_entropy_with_logits
        True
        >>> usual_loss(torch.zeros(4, 1), torch.randn(4, 1)) is F.mse_loss
        True
    """
    output = scores(output)
    if not isinstance(output, Tensor) or not isinstance(y, Tensor):
        raise ValueError(
            f"the network returns a {type(output).__name__} for targets of type {type(y).__name__}; pass loss=, a"
            " function of both that returns the mean negative log-likelihood."
        )
    if y.is_floating_point():
        if output.shape != y.shape or not _is_binary(y):
            return F.cross_entropy if output.shape == y.shape and _are_probabilities(y) else F.mse_loss
        every = targets() if callable(targets) else y if targets is None else targets
        if not _is_binary(every):
            return F.mse_loss
        rows = every.reshape(-1, y.shape[-1]) if y.dim() > 1 else every[:, None]
        if rows.shape[1] > 2 and bool((rows.sum(1) == 1).all()):
            raise ValueError(
                f"each of the targets {list(y.shape)} has a single one: pass y.argmax(1) as the classes; or, if an"
                " example may have several labels, loss=F.binary_cross_entropy_with_logits."
            )
        return F.binary_cross_entropy_with_logits
    if output.dim() == y.dim() + 1 and output.dim() > 2 and output.shape[:-1] == y.shape:
        if output[:, 0].shape == y.shape:
            raise ValueError(
                f"the outputs are {list(output.shape)}, where either the second or the last dimension may be the"
                " classes; pass loss=F.cross_entropy for the second, or loss=lambda output, y:"
                " F.cross_entropy(output.flatten(0, -2), y.flatten()) for the last."
            )
        return token_cross_entropy
    return F.cross_entropy


def _are_probabilities(y: Tensor) -> bool:
    """Return whether each row has probabilities of several classes."""
    return y.dim() == 2 and y.shape[1] > 1 and bool((y >= 0).all() and ((y.sum(1) - 1).abs() < ROUNDING).all())


def _is_binary(y: Tensor) -> bool:
    return bool(((y == 0) | (y == 1)).all())


def checked_loss(
    network: nn.Module, batch: Any, forward: Forward, device: torch.device, loss: Loss | None, targets: Any = None
) -> tuple[Loss, Any]:
    """Try a batch, and return the loss, or the default loss if it is None, and the targets of the batch.

    Raises:
        ValueError: the network does not take the batch, or the loss does not take its outputs and targets.
    """
    network.to(device)
    with torch.no_grad(), evaluating(network):
        output, y = tried(network, to_device(batch, device), forward)
    loss = loss or usual_loss(output, y, targets)
    check_mean(loss)
    check_targets(loss, output, y)
    check_broadcast(loss, output, y)
    if name_of(loss) in BINARY_OF_LOGITS and isinstance([network, *network.modules()][-1], nn.Sigmoid):
        raise ValueError(
            f"the network ends in nn.Sigmoid, and {name_of(loss)} takes logits; leave out the sigmoid, or pass"
            " loss=F.binary_cross_entropy."
        )
    if isinstance(targets, Tensor):
        check_range(loss, output, targets)
    return loss, y
