"""step: cost of the updates of weights and of hyperparameters, over a dense training step (Table 8).

Ours are partnets.step_weights, step_hyper and Trainer, which users call.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

import partkernels as pk
from partbench.measuring.clock import WallClock
from partbench.measuring.timing import Batch, Missing, Run, Workload
from partbench.peers.layer import CPU, THREE, Partitioning
from partbench.peers.models import Model, loss
from partbench.peers.operators import obstacles
from partbench.peers.schemes import inside, nested, partitioned, under, weight, weighted_layers
from partbench.peers.train_step import Iterations, TrainStep, seeded
from partbench.suites.options import Options
from partnets import hyper
from partnets.subnetworks.state import partition_of
from partnets.utils.modules import evaluating

ABOUT = "updates of weights and of hyperparameters beside a dense training step (Table 8)"
# Factor of the allowed error: rounding errors grow through a network by chance, in every implementation.
SLACK = 4.0
# The gradient jumps where a ReLU's input changes its sign, which rounding can cause: one jump of 2e-3 was seen in some
# thousand checks. The layers' suite checks the same kernels by the tolerance rule.
JUMP = 1e-2
CHECKED = 8
# The peers with nested partitions, and the schemes of partbench.peers.schemes that make them.
NESTED = {"nested": "partkernels", "smaller": "dense"}
# The batches in the data set of an iteration.
BATCHES = 10


@dataclass(frozen=True)
class Training:
    """A model in training, behind learned affine augmentations with averaged samples if it sees images."""

    model: Model
    batch: int
    samples: int = 1
    partitioning: Partitioning = THREE
    device: torch.device = CPU


@dataclass(frozen=True)
class Data:
    """The partitioned model with its hyperparameters, the same with nested partitions if it has any, and a batch."""

    model: nn.Module
    nested: nn.Module | Missing
    x: Tensor
    y: Tensor


def batch(options: Options) -> Batch:
    preset, partitioning, device = options.preset, options.partitionings[0], options.device
    trainings = [
        Training(options.model(name), batch, samples, partitioning, device) for name, batch, samples in preset.step
    ]
    found = workloads(trainings, options.backends, paper=preset.paper)
    return Batch(found, WallClock(device, preset.step_plan.sample), preset.step_plan)


def workloads(trainings: Iterable[Training], backends: Sequence[str], *, paper: bool = True) -> list[Workload]:
    """Return a workload for each training and active subnetwork k.

    Its peers update the weights of partition k by subnetwork k, or the hyperparameters by the loss of subnetwork k on
    chunk k + 1, so the last subnetwork has no update of hyperparameters. Beside them are the dense network's updates.
    The first subnetwork's workload also has iterations of a Trainer, whose k are drawn as in training. The dense
    network of the widths of a nested one is the bound of nested partitions.
    """
    schemes = [("dense", "dense", "auto")] + [("paper", "paper", "auto")] * paper
    schemes += [(f"partkernels {backend}", "partkernels", backend) for backend in backends]
    schemes += [("partkernels nested", "nested", "auto"), ("smaller dense", "smaller", "auto")]
    found = []
    for of in trainings:
        u = of.partitioning.proportions
        for active in range(1, of.partitioning.num_partitions + 1):
            # How often training draws this update, according to Appendix I.1.
            facts = {"share of parameters": u[active - 1]}
            peers = {}
            for name, scheme, backend in schemes:
                weights = "dense" if name == "dense" else f"{name}, parameters"
                peers[weights] = partial(_run, of, scheme, backend, active, active)
                if active < of.partitioning.num_partitions:
                    peers[f"{name}, hyperparameters"] = partial(_run, of, scheme, backend, active, None)
                    facts["share of hyperparameters"] = u[active] / sum(u[1:])
            if active == 1 and of.partitioning.num_partitions > 1:
                peers["dense, iteration"] = partial(_iterations, of, "dense", "auto")
                trained = {f"partkernels {backend} Trainer": ("partkernels", backend) for backend in backends}
                trained |= {"partkernels nested one pass": ("nested", "auto")}
                for name, (scheme, backend) in trained.items():
                    peers[f"{name}, iteration"] = partial(_iterations, of, scheme, backend)
                facts["share of iteration"] = 1.0
            case = {"model": of.model.name, "batch": of.batch, "samples": of.samples, "optimizer": of.model.optimizer}
            case |= {"device": of.device.type, **of.partitioning.case(), "active": active}
            found.append(Workload("step", case, partial(_setup, of), peers, facts))
    return found


def _setup(training: Training, seed: int) -> Data:
    with seeded(seed):
        x, y = (tensor.to(training.device) for tensor in training.model.examples(training.batch))
        networks = [training.model.make().to(training.device) for _ in range(2)]
        model, narrow = networks
        if len(training.model.input) == 3:
            affine = hyper.Affine().to(training.device)
            model, narrow = (hyper.Averaged(affine, network, samples=training.samples) for network in networks)
        partitioned(networks[0], training.partitioning, seed)
        try:
            nested(networks[1], training.partitioning, x[:CHECKED])
        except Missing as error:
            narrow = error
    return Data(model, narrow, x, y)


def _network(model: nn.Module) -> nn.Module:
    """Return the network behind the augmentation."""
    return model.network if isinstance(model, hyper.Averaged) else model


def _run(training: Training, scheme: str, backend: str, active: int, update: int | None, data: Data) -> Run:
    if backend in obstacles():
        raise Missing(obstacles()[backend])
    is_nested = scheme in NESTED
    model = _nested(data) if is_nested else data.model
    step = TrainStep(NESTED.get(scheme, scheme), model, data.x, data.y, active, update, training.model.optimizer)

    def call() -> None:
        with pk.use_backend(backend):
            step()

    def check() -> None:
        if is_nested:
            _check_nested(step, data)
            return
        with pk.use_backend(backend), step.inside():
            got = _gradients(_network(step.model), data, torch.float32)
        _check(got, data, active, update, masked=scheme != "dense")

    return Run(call, check)


def _nested(data: Data) -> nn.Module:
    if isinstance(data.nested, Missing):
        raise data.nested
    return data.nested


def _iterations(training: Training, scheme: str, backend: str, data: Data) -> Run:
    """Return iterations, refused if a step of the first partition is wrong."""
    step = _run(training, scheme, backend, 1, 1, data)
    is_nested = scheme in NESTED
    model = _nested(data) if is_nested else data.model
    x, y = training.model.examples(BATCHES * training.batch)
    proportions, optimizer = training.partitioning.proportions, training.model.optimizer
    how = {"batch": training.batch, "proportions": proportions, "optimizer": optimizer, "one_pass": is_nested}
    try:
        iterations = Iterations(NESTED.get(scheme, scheme), model, x.to(data.x.device), y.to(data.y.device), **how)
    except ValueError as error:  # a batch is too small to be divided
        raise Missing(str(error)) from error

    def call() -> None:
        with pk.use_backend(backend):
            iterations()

    return Run(call, step.check)


def _gradients(network: nn.Module, data: Data, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the logits of a few examples without augmentation, and the loss's gradients of x and of all weights.

    Modules are in evaluation mode, without noise.
    """
    x, y = data.x[:CHECKED], data.y[:CHECKED]
    paths = [path for path, _ in weighted_layers(_network(data.model))]
    weights = {path: weight(network.get_submodule(path)) for path in paths}
    leaves = {path: w for path, w in weights.items() if w.requires_grad}
    if x.is_floating_point():
        leaves["x"] = x = x.to(dtype).requires_grad_()
    with evaluating(network):
        logits = network(x)
    gradients = torch.autograd.grad(loss(logits, y), [*leaves.values()]) if leaves else ()
    return {"logits": logits.detach(), **dict(zip(leaves, gradients, strict=True))}


def _check_nested(step: TrainStep, data: Data) -> None:
    """Check against the definition of nested partitions in float64; see _check."""
    with step.inside():
        got = _gradients(_network(step.model), data, torch.float32)
    with pk.use_backend("reference"):
        truth, rough = (_gradients_of_copy(step, data, dtype) for dtype in (torch.float64, torch.float32))
    for name, value in got.items():
        _check_close(name, value.double(), truth[name], rough[name].double())


def _gradients_of_copy(step: TrainStep, data: Data, dtype: torch.dtype) -> dict[str, Tensor]:
    model = copy.deepcopy(step.model).to(dtype)
    with inside(step.scheme, model, step.active, step.update):
        return _gradients(_network(model), data, dtype)


def _check(got: dict[str, Tensor], data: Data, active: int, update: int | None, *, masked: bool) -> None:
    """Check against the reference's merged model in float64, allowing a multiple of the error in float32."""
    with pk.use_backend("reference"):
        dense = under("dense", _network(data.model), active, update)
    truth = _gradients(copy.deepcopy(dense).double(), data, torch.float64)
    rough = _gradients(dense, data, torch.float32)
    layers = dict(weighted_layers(_network(data.model)))
    for name, value in got.items():
        mine, right, usual = value.double(), truth[name], rough[name].double()
        if name in layers:
            owned = partition_of(layers[name], "weight").mask(update)
            assert not masked or not mine[~owned].any(), f"the gradient of {name} is not 0 outside partition {update}"
            mine, right, usual = mine[owned], right[owned], usual[owned]
        _check_close(name, mine, right, usual)


def _check_close(name: str, mine: Tensor, right: Tensor, usual: Tensor) -> None:
    """Check that the error of mine is at most a multiple of the usual one."""
    norm = right.norm().item() or 1.0  # 1.0 for a layer that the loss does not reach
    error, allowed = ((each - right).norm().item() / norm for each in (mine, usual))
    allowed = max(SLACK * allowed, SLACK * torch.finfo(torch.float32).eps if name == "logits" else JUMP)
    assert error <= allowed, f"{name} is off by {error:.1e} from float64, relative; {allowed:.1e} is allowed"
