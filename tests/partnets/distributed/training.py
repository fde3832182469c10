"""Models without noise and their trainings, on each rank of a group or, without a group, in one process."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import partnets
from partnets import distributed, hyper, optim
from partnets.subnetworks.parameters import partitioned_parameters

PROPORTIONS = (0.8, 0.1, 0.1)
STEPS = 24
OPTIMIZERS = {
    "SGD": lambda model: optim.SGD(model, lr=0.1, momentum=0.9),
    "Adam": lambda model: optim.Adam(model, lr=0.02),
    "NAdam": lambda model: optim.PerPartition(torch.optim.NAdam, model, lr=0.02),
}


def mesh(*shape, names=None):
    return dist.init_device_mesh("cpu", shape or (dist.get_world_size(),), mesh_dim_names=names)


def network(scheme="weight"):
    torch.manual_seed(0)  # nested partitions keep the layers' weights
    mask = hyper.InputMask(3 * 8 * 8, temperature=0.5)
    model = nn.Sequential(
        mask,
        nn.Unflatten(1, (3, 8, 8)),
        nn.Conv2d(3, 8, 3),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 6 * 6, 17),  # not divisible by two ranks
        nn.LayerNorm(17),
        nn.ReLU(),
        nn.Linear(17, 4),
    )
    example = {"example": torch.ones(2, 192)} if scheme == "nested" else {}
    return partnets.partition(model, PROPORTIONS, seed=3, scheme=scheme, **example).double()


def mine(tensor):
    """Return this rank's part of the joint batch, or all of it without a process group."""
    return tensor.chunk(dist.get_world_size())[dist.get_rank()] if dist.is_initialized() else tensor


def loss(model, step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 192, generator=generator, dtype=torch.float64)
    y = torch.randint(4, (8,), generator=generator)
    # Evaluation mode, because the mask's noise would differ on each rank.
    return F.cross_entropy(model.eval()(mine(x)), mine(y))


def learn(model, call, optimizer, steps=range(STEPS)):
    """Take steps of all partitions and of ψ in turn, and return the weights; `call` is the model or its wrapper."""
    psi = torch.optim.SGD(hyper.hyperparameters(model), lr=0.5)
    for step in steps:
        k = 1 + step * step % 7 % 3
        optimizer.zero_grad()
        with partnets.subnetwork(model, active=k, update=k):
            loss(call, step).backward()
        optimizer.step(update=k)
        psi.zero_grad()
        with partnets.subnetwork(call, active=1 + step % 2):
            loss(call, STEPS + step).backward()
        psi.step()
    return [whole(parameter) for parameter in model.parameters()]


def gradients(model):
    """Return the gradients of all partitions of each parameter, and those of ψ."""
    owned = partitioned_parameters(model)
    found = [one.gradient(k) for one in owned for k in range(1, one.state.num_partitions + 1)]
    return [*found, *(parameter.grad for parameter in hyper.hyperparameters(model))]


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "placements") else tensor).detach().clone()


def examples():
    x = torch.randn(60, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return x, (x[:, 0] > 0).long()


def trainer_of(model, **options):
    """Return a Trainer for examples(), on ranks one of partnets.distributed."""
    kind = distributed.Trainer if dist.is_initialized() else partnets.Trainer
    return kind(model, partnets.chunk(examples(), (0.6, 0.2, 0.2)), **{"batch_size": 16} | options)


def trainer(*, dropout=0.0, sharded=False, **options):
    torch.manual_seed(0)
    extractor = hyper.Submodule(nn.Linear(6, 5))  # ψ without noise
    model = nn.Sequential(extractor, nn.Linear(5, 8), nn.Dropout(dropout), nn.LayerNorm(8), nn.Linear(8, 2))
    model = partnets.partition(model, (0.6, 0.2, 0.2)).double()
    options = {"hyper": extractor, "lml_every": 4, "keep_best": True} | options
    if sharded:
        distributed.fully_shard(model, mesh=mesh())
    return trainer_of(model, **options)


def learned(one):
    """Return everything that a run learned, as tensors."""
    history = [torch.tensor(one.history.steps[name]) for name in ("step", "k", "loss")]
    return [*map(whole, one.model.parameters()), *history, torch.tensor(one.history.lml["lml"])]
