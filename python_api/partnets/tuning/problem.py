"""Problem: the checked arguments of partnets.tune: a network, data, a loss, an optimizer and settings."""

from __future__ import annotations

import copy
import functools
import hashlib
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset, TensorDataset

from partnets.data.batch import Forward, call, tried
from partnets.data.chunks import Chunks, chunk
from partnets.data.dataset import Data
from partnets.data.examples import Collate, as_dataset, as_tensor, collated
from partnets.hyper import Hyperparameter, hyperparameters
from partnets.subnetworks.state import partitioned_modules
from partnets.training.preflight import warn_of_unused_losses
from partnets.training.step import check_clip, parameters_of
from partnets.tuning.hyperparameters import Setting, find_settings, put_before
from partnets.tuning.loss import usual_loss
from partnets.utils.checks import check_at_least
from partnets.utils.losses import BINARY_OF_LOGITS, SQUARED, Loss, check_mean, mean, name_of, plain, scores, setting
from partnets.utils.modules import device_of, evaluating, to_device
from partnets.utils.random_state import preserved
from partnets.utils.targets import check_broadcast, check_range, check_targets

Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Scheduler = Callable[[torch.optim.Optimizer], LRScheduler]

# The factor of parameters at which logits leave [0, 1], but the outputs of a sigmoid do not.
LARGE = 30.0
# The arguments of functions that users pass.
TAKES = {
    "optimizer": "a list of parameters, such as functools.partial(torch.optim.Adam, lr=1e-3)",
    "scheduler": "an optimizer, which returns a scheduler",
    "loss": "outputs and targets, such as torch.nn.CrossEntropyLoss()",
    "forward": "the network and a batch, which returns outputs and targets",
    "collate": "a list of examples, which returns a batch",
    "callbacks": "a training, or a list of such functions",
}


@dataclass(frozen=True)
class Problem:
    """The parts shared by all trainings in one call of partnets.tune.

    Attributes:
        network: the network with modules of partnets.hyper; trainings copy it.
        outside: the number of these modules in front of the user's network.
        settings: the numbers to choose.
        direct: the paths of modules with numbers that learn by gradient descent.
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
        squared: the numbers in each target that a squared error counts; 0 for other losses.
        identity: a text that identifies network, data and options.
    """

    network: nn.Module
    outside: int
    settings: list[Setting]
    direct: list[str]
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
    """Check the arguments of partnets.tune, try a batch, and find the settings. Arguments and errors: see tune."""
    check_at_least(1, steps=steps, batch_size=batch_size)
    check_clip(clip)
    check_functions(optimizer=optimizer, scheduler=scheduler, loss=loss, forward=forward, collate=collate)
    _check_network(network, loss)
    dtype = next((p.dtype for p in network.parameters() if p.is_floating_point()), torch.get_default_dtype())
    dataset, options = _as_data(data, dtype), {} if collate is None else {"collate": collate}
    chunks = chunk(dataset, proportions, seed=seed, groups=groups, stratify=stratify, **options)
    if len(chunks) < 2:
        raise ValueError(f"proportions={tuple(proportions)}; pass two or more: unseen data judge the trainings.")
    device = device_of(network) if device is None else _usable(device)
    wrapped, hyper, outside = put_before(network, hyper)
    copied = _copied(wrapped)
    with preserved(device):
        batch = chunks.sample(1, min(batch_size, 32), torch.Generator().manual_seed(0))
        try:
            loss, y = _try_loss(copied, chunks, batch, forward, device, loss)
        except ValueError as error:
            if not outside or (isinstance(batch, tuple | list) and isinstance(batch[0], Tensor)):
                raise
            raise ValueError(
                f"{error} Modules of hyper that are not in the network are put before it, and take one tensor; put them"
                " into it, such as hyper.InTraining(hyper.Affine()), at the place of the images."
            ) from error
        psi = set(hyperparameters(copied))
        given = [parameter for parameter in copied.parameters() if parameter.requires_grad and parameter not in psi]
        optimizer = functools.partial(_with_own_rates, optimizer)
        made = _try_optimizer(optimizer, given)
        schedule = None if scheduler is None else _try_scheduler(scheduler, optimizer(given), steps)
    settings, direct, starts = find_settings(wrapped, hyper, outside, loss, made, steps)
    warn_of_unused_losses(wrapped, {}, loss)
    states = [{name: value for name, value in group.items() if name != "params"} for group in made.param_groups]
    parts = [
        *(chunks.fingerprint, steps, batch_size, clip, proportions, type(made).__name__, states, schedule, direct),
        *[[(one.name, one.low, one.high, one.untuned) for one in some] for some in (settings, starts)],
        [(path, type(module).__name__) for path, module in wrapped.named_modules()],
        [(name, parameter.requires_grad) for name, parameter in wrapped.named_parameters()],
        [len(group["params"]) for group in made.param_groups],
    ]
    tensors = dataset.tensors if isinstance(dataset, TensorDataset) else ()
    return Problem(
        network=wrapped,
        outside=outside,
        settings=settings,
        direct=direct,
        starts=starts,
        loss=loss,
        optimizer=optimizer,
        scheduler=scheduler,
        chunks=chunks,
        everything=chunk(dataset, (1.0,), seed=seed, **options),
        steps=steps,
        batch_size=batch_size,
        forward=forward,
        device=device,
        clip=clip,
        squared=name_of(loss) in SQUARED and (y[0].numel() if setting(loss, "reduction", "mean") == "mean" else 1),
        identity=_digest(parts, *wrapped.state_dict().values(), *tensors, y),
    )


def check_functions(**given: Any) -> None:
    """Raise TypeError for an argument that is not callable, or is a module class instead of a module."""
    for name, value in given.items():
        if value is None or (callable(value) and not (isinstance(value, type) and issubclass(value, nn.Module))):
            continue
        kind = f"the class {value.__name__}" if isinstance(value, type) else f"of type {type(value).__name__}"
        raise TypeError(f"{name} is {kind}; pass a function of {TAKES[name]}.")


def _check_network(network: Any, loss: Any) -> None:
    """Raise an error unless `network` can be trained here, with all parameters of the loss."""
    if not isinstance(network, nn.Module):
        raise TypeError(f"network is a {type(network).__name__}; pass a torch module.")
    if partitioned_modules(network):
        raise ValueError(
            "network is partitioned; pass the plain one, with proportions=(0.8, 0.1, 0.1) to have it partitioned here."
        )
    if any(is_lazy(parameter) or parameter.is_meta for parameter in network.parameters()):
        raise ValueError(
            "network has parameters without numbers; call it once on a batch if it has lazy modules, or call to_empty"
            " and initialise it if it is on the meta device."
        )
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise ValueError("no parameter of the network requires a gradient; call requires_grad_() on those to train.")
    own = {p for p in loss.parameters() if p.requires_grad} if isinstance(loss, nn.Module) else set()
    if missing := len(own - set(network.parameters())):
        raise ValueError(
            f"the loss has {missing} parameters that are not in the network, which nothing would train; put the"
            " module in the network, or call requires_grad_(False)."
        )
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        raise RuntimeError("gradients are disabled here; call tune outside of torch.no_grad() and inference_mode().")
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise RuntimeError(
            "tune is called within torch.autocast, which would share cached copies of weights between trainings; call"
            " it outside, and use autocast in forward=."
        )


def _as_data(data: Any, dtype: torch.dtype) -> Dataset | Sequence:
    """Return a dataset: a Data's training set, arrays as tensors, with float64 in `dtype` and labels in int64."""
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


def _copied(network: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(network)
    except Exception as error:  # depends on the network's contents
        raise ValueError(
            f"network cannot be copied, and each training has a copy: {error}. Leave out of it objects that"
            " copy.deepcopy does not take: locks, generators, stored outputs; replace torch.nn.utils.weight_norm by"
            " torch.nn.utils.parametrizations.weight_norm."
        ) from error


def _try_loss(
    network: nn.Module, chunks: Chunks, batch: Any, forward: Forward, device: torch.device, loss: Loss | None
) -> tuple[Loss, Any]:
    """Return the loss, or the default one if it is None, and the targets of a batch; raise unless both fit."""
    tensors = chunks.dataset.tensors if isinstance(chunks.dataset, TensorDataset) and forward is call else ()

    def targets() -> Tensor:
        return tensors[-1] if tensors else _some_targets(network, chunks, forward, device)

    network.to(device)
    with torch.no_grad(), evaluating(network):
        output, y = tried(network, to_device(batch, device), forward)
    loss = loss or usual_loss(output, y, targets)
    check_mean(loss)
    check_targets(loss, output, y)
    check_broadcast(loss, output, y)
    if name_of(loss) in BINARY_OF_LOGITS and _is_squashed(network, output, batch, forward, device):
        raise ValueError(
            f"the network ends in a sigmoid, and {name_of(loss)} takes logits; leave out the sigmoid, or pass"
            " loss=F.binary_cross_entropy."
        )
    if tensors:
        check_range(loss, output, tensors[-1])
    _check_finite(network, chunks, forward, device, loss)
    return loss, y


def _is_squashed(network: nn.Module, output: Any, batch: Any, forward: Forward, device: torch.device) -> bool:
    """Return whether outputs are in [0, 1] for large parameters too, unlike logits that happen to be there."""

    def are_in_range(found: Any) -> bool:
        return isinstance(found := scores(found), Tensor) and bool(((found >= 0) & (found <= 1)).all())

    if not are_in_range(output):
        return False
    large = copy.deepcopy(network)
    with torch.no_grad(), evaluating(large):
        for parameter in large.parameters():
            if parameter.is_floating_point():
                parameter.mul_(LARGE)
        return are_in_range(tried(large, to_device(batch, device), forward)[0])


def _some_targets(network: nn.Module, chunks: Chunks, forward: Forward, device: torch.device) -> Tensor:
    """Return the targets of up to 512 examples, since those of one batch may be zeros and ones by chance."""
    places = torch.linspace(0, len(chunks.order) - 1, min(512, len(chunks.order)), device="cpu").long()
    found = []
    with torch.no_grad(), evaluating(network):
        for part in chunks.order[places].split(32):
            batch = to_device(collated(chunks.dataset, part, chunks.collate), device)
            found.append(forward(network, batch)[1])
    return torch.cat(found)


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


def _with_own_rates(optimizer: Optimizer, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer without tensors shared with others, such as a learning rate that is changed in place."""
    made = optimizer(parameters)
    for group in made.param_groups if isinstance(made, torch.optim.Optimizer) else ():
        group.update({name: value.clone() for name, value in group.items() if isinstance(value, Tensor)})
    return made


def _try_optimizer(optimizer: Optimizer, given: list[nn.Parameter]) -> torch.optim.Optimizer:
    made = optimizer(given)
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(f"optimizer returned a {type(made).__name__}; return a torch.optim.Optimizer.")
    if strange := len(set(parameters_of(made)) - set(given)):
        raise ValueError(
            f"optimizer steps {strange} parameters that it was not given, and would train nothing: each training has a"
            " copy of the network. Make it of the list of parameters that it is called with."
        )
    return made


def _try_scheduler(scheduler: Scheduler, optimizer: torch.optim.Optimizer, steps: int) -> list[list[float]]:
    """Return the learning rates in each step; raise unless the scheduler sets them for this many steps."""
    schedule = scheduler(optimizer)
    if not isinstance(schedule, LRScheduler) or isinstance(schedule, ReduceLROnPlateau):
        raise TypeError(
            f"scheduler returned a {type(schedule).__name__}; return one that steps without a loss, such as"
            " torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)."
        )
    if schedule.optimizer is not optimizer:
        raise ValueError("scheduler returned one of another optimizer; make it of its argument, an optimizer.")
    return rates(schedule, steps)


def rates(schedule: LRScheduler, steps: int) -> list[list[float]]:
    """Return the learning rate of each group in each step, from a scheduler that has taken no step."""
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


def _digest(parts: list, *values: Any) -> str:
    """Return a hexadecimal digest of plain values, and of those of `values` that are tensors."""
    found = hashlib.blake2b(repr(parts).encode(), digest_size=16)
    for value in values:
        if isinstance(value, Tensor):
            found.update(f"{list(value.shape)} {value.dtype}".encode())
            found.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def _usable(device: torch.device | str) -> torch.device:
    try:
        device = torch.device(device)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ValueError(f"device={device!r} cannot be used here: {error}") from error
    return device
