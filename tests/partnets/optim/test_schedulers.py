"""torch's learning-rate schedulers work with our optimisers as with torch's."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import partnets
from partnets import optim

PROPORTIONS = (0.6, 0.3, 0.1)
STEPS, RESUMED = 12, 5
OPTIMIZERS = {
    "SGD": (optim.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "Adam": (optim.Adam, torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.1}),
    "AdamW": (optim.AdamW, torch.optim.AdamW, {"lr": 0.1}),
    "RMSprop": (
        lambda model, **settings: optim.PerPartition(torch.optim.RMSprop, model, **settings),
        torch.optim.RMSprop,
        {"lr": 0.1, "momentum": 0.9},
    ),
    "NAdam": (
        lambda model, **settings: optim.PerPartition(torch.optim.NAdam, model, **settings),
        torch.optim.NAdam,
        {"lr": 0.1},
    ),
}
SCHEDULERS = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 3, gamma=0.5),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, STEPS, eta_min=1e-3),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, [0.1, 0.2], total_steps=STEPS + 1),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1),
    "function": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "warm-up and cosine": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4), lr_scheduler.CosineAnnealingLR(optimizer, 8)],
        milestones=[4],
    ),
}
every_pair = pytest.mark.parametrize(
    ("optimizer", "schedule"),
    [pytest.param(one, other, id=f"{o}-{s}") for o, one in OPTIMIZERS.items() for s, other in SCHEDULERS.items()],
)


def network(proportions):
    layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    return partnets.partition(layers, proportions, seed=1)


def groups(model):
    """Return a group with a separate learning rate for the last layer."""
    return [{"params": list(model[2].parameters()), "lr": 0.05}]


def run(model, step_optimizer, scheduler, steps):
    """Take steps and return the learning rates, momenta and betas used in each."""
    settings = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator)
        names = ("lr", "momentum", "betas")
        settings.append([[group.get(name) for name in names] for group in scheduler.optimizer.param_groups])
        step_optimizer(step)
        scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
    return settings


@every_pair
def test_with_one_partition_the_weights_move_as_torchs(optimizer, schedule):
    ours, theirs, settings = optimizer
    model = network((1.0,))
    twin = copy.deepcopy(model)
    one = ours(model, **settings, groups=groups(model))
    reference = theirs([*groups(twin), {"params": list(twin[0].parameters())}], **settings)
    seen = run(model, lambda step: one.step(update=1), schedule(one), range(STEPS))
    assert seen == run(twin, lambda step: reference.step(), schedule(reference), range(STEPS))
    assert len({str(settings) for settings in seen}) > 1, "the schedule did nothing"
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.cases(usual=4, full=12)
@every_pair
def test_a_run_resumes_from_the_three_states_with_the_same_bits(optimizer, schedule):
    ours, _, settings = optimizer
    model = network(PROPORTIONS)

    def parts(model):
        one = ours(model, **settings, groups=groups(model))
        return model, lambda step: one.step(update=1 + step % 3), schedule(one)

    whole = parts(model)
    run(*whole, range(RESUMED))
    states = [model.state_dict(), whole[2].optimizer.state_dict(), whole[2].state_dict()]
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    states = torch.load(file, weights_only=True)
    resumed = parts(network(PROPORTIONS))
    for stateful, state in zip((resumed[0], resumed[2].optimizer, resumed[2]), states, strict=True):
        stateful.load_state_dict(state)
    rest = range(RESUMED, STEPS)
    assert run(*whole, rest) == run(*resumed, rest)
    assert all(map(torch.equal, whole[0].parameters(), resumed[0].parameters()))


@pytest.mark.parametrize("kind", [optim.SGD, optim.Adam])
def test_a_rate_that_rounding_leaves_below_0_steps(kind):
    layer = partnets.Linear(4, 3, proportions=(0.5, 0.5), seed=0)
    optimizer = kind(layer, lr=0.1)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, end_factor=0.0, total_iters=5)
    for _ in range(6):
        layer.weight.grad = torch.ones(3, 4)
        optimizer.step(update=1)
        scheduler.step()
    assert -1e-15 < optimizer.param_groups[0]["lr"] < 0
    optimizer.load_state_dict(optimizer.state_dict())


def test_a_momentum_that_a_schedule_takes_through_0_steps_as_torchs():
    layer, other = (partnets.Linear(4, 3, bias=False, seed=0) for _ in range(2))
    options = {"lr": 0.1, "momentum": 0.9, "nesterov": True}
    optimizers = optim.SGD(layer, **options), torch.optim.SGD(other.parameters(), **options)
    cycle = {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 4, "base_momentum": 0.0, "max_momentum": 0.9}
    schedulers = [torch.optim.lr_scheduler.CyclicLR(optimizer, **cycle) for optimizer in optimizers]
    for _ in range(10):
        layer.weight.grad, other.weight.grad = (torch.ones(3, 4) for _ in range(2))
        optimizers[0].step(update=1)
        optimizers[1].step()
        for scheduler in schedulers:
            scheduler.step()
    torch.testing.assert_close(layer.weight, other.weight)
