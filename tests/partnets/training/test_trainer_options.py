"""The trainer's options: learning rates, timing and chunks of ψ's steps, and the sampling of partitions."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler

import partnets
from partnets import hyper, optim

PROPORTIONS = (0.4, 0.3, 0.2, 0.1)
COUNT = len(PROPORTIONS)


class Scale(hyper.Hyperparameter):
    """A factor for each feature, without noise, so that gradients depend only on the batches."""

    def __init__(self):
        super().__init__()
        self.factors = hyper.Learned([1.0] * 4, hyper.positive)

    def forward(self, x):
        return x * self.factors()


def network():
    layers = nn.Sequential(Scale(), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    return partnets.partition(layers, PROPORTIONS).double()


def trainer(model=None, rate=1e-3, **arguments):
    """Return a trainer in float64 with SGD for ψ at this learning rate."""
    model, x = model or network(), torch.randn(50, 4, dtype=torch.float64)
    chunks = partnets.chunk((x, (x[:, 0] + x[:, 1] > 0).long()), PROPORTIONS)
    options = {"hyper": model[0], "hyper_optimizer": torch.optim.SGD(model[0].parameters(), lr=rate), "batch_size": 8}
    return partnets.Trainer(model, chunks, **options | arguments)


def psi(model):
    return model[0].factors.raw


SCHEDULES = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 3, gamma=0.5),
    "milestones": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 5], gamma=0.1),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 10),
    "function": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "warm-up and cosine": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4), lr_scheduler.CosineAnnealingLR(optimizer, 6)],
        milestones=[4],
    ),
}


def torchs_rates(schedule, steps, lr):
    """Return the learning rates of a torch optimiser after 0..steps steps."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = schedule(optimizer)
    rates = [optimizer.param_groups[0]["lr"]]
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.cases(usual=1)
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_schedulers_count_the_steps_of_any_partition_and_those_of_psi(schedule):
    model, rates = network(), []
    optimizer, hyper_optimizer = optim.SGD(model, lr=0.5), torch.optim.SGD(model[0].parameters(), lr=0.2)
    one = trainer(
        model,
        optimizer=optimizer,
        hyper_optimizer=hyper_optimizer,
        scheduler=schedule(optimizer),
        hyper_scheduler=schedule(hyper_optimizer),
        hyper_every=2,
        callbacks=[lambda _: rates.append([one.param_groups[0]["lr"] for one in (optimizer, hyper_optimizer)])],
    )
    one.fit(10)
    of_weights, of_psi = torchs_rates(schedule, 10, lr=0.5), torchs_rates(schedule, 5, lr=0.2)
    assert rates == [[of_weights[step], of_psi[step // 2]] for step in range(1, 11)]


@pytest.mark.cases(usual=1)
@pytest.mark.parametrize(("every", "after"), [(1, 0), (3, 0), (1, 4), (3, 2), (4, 9), (2, 20)])
def test_psi_takes_a_step_after_each_so_many_once_enough_are_done(every, after):
    values = []
    one = trainer(
        rate=0.1,
        hyper_every=every,
        hyper_after=after,
        callbacks=[lambda one: values.append(psi(one.model).detach().clone())],
    )
    values.append(psi(one.model).detach().clone())
    one.fit(14)
    expected = list(range(after + every, 15, every))
    assert [step for step in range(1, 15) if not torch.equal(values[step], values[step - 1])] == expected
    for name in ("hyper_k", "hyper_loss"):
        column = one.history.steps[name]
        assert [step for step, value in enumerate(column, start=1) if value is not None] == expected


@pytest.mark.full
def test_until_its_first_step_psi_draws_nothing():
    runs = []
    for arguments in ({"hyper": [], "hyper_optimizer": None}, {"hyper_after": 6}, {"hyper_every": 7}):
        torch.manual_seed(0)
        one = trainer(**arguments)
        one.fit(6)
        runs.append([*one.model.parameters(), one.generator.get_state()])
    assert all(map(torch.equal, runs[0], runs[1])) and all(map(torch.equal, runs[0], runs[2]))


def test_one_pass_updates_all_partitions_and_psi_on_parts_of_a_batch():
    one = trainer(one_pass=True, batch_size=10, hyper_batch_size=6, sampling=(5, 3, 0, 2), clip=0.1)
    model, generator = copy.deepcopy(one.model), one.generator.clone_state()
    optimizer, hyper_optimizer = optim.Adam(model), torch.optim.SGD(model[0].parameters(), lr=1e-3)

    def loss(batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    for step in range(1, 4):
        expected = 0.0
        for k, examples in {1: 5, 2: 3, 4: 2}.items():
            batch = one.chunks.sample_upto(k, examples, generator)
            expected += examples / 10 * partnets.step_weights(model, optimizer, k, batch, loss, clip=0.1).item()
        batches = {k: one.chunks.sample(k, examples, generator) for k, examples in {2: 3, 3: 2, 4: 1}.items()}
        shares = {k: one.chunks.proportions[k - 1] / sum(one.chunks.proportions[1:]) for k in batches}
        found = partnets.step_hyper(model, hyper_optimizer, batches, loss, weights=shares).item()
        one.step()
        assert {name: values[-1] for name, values in one.history.steps.items()} == {
            "step": step, "k": 0, "loss": pytest.approx(expected, rel=1e-12), "hyper_k": None, "hyper_loss": found,
        }  # fmt: skip
        assert all(map(torch.equal, one.model.parameters(), model.parameters()))


@pytest.mark.parametrize(
    ("sampling", "drawn"),
    [((1, 0, 0, 0), {1}), ((0, 0, 3.5, 0), {3}), ((2, 0, 2, 0), {1, 3}), ([0, 0.5, 0, 0.5], {2, 4})],
)
def test_partitions_of_probability_0_are_never_drawn(sampling, drawn):
    one = trainer(sampling=sampling)
    assert {one.step_weights()[0] for _ in range(30)} == drawn


@pytest.mark.full
def test_partitions_are_drawn_with_the_given_probabilities():
    one = trainer(sampling=(0.1, 0.2, 0.3, 0.4), batch_size=1)
    counts = torch.bincount(torch.tensor([one.step_weights()[0] for _ in range(500)]))[1:] / 500
    torch.testing.assert_close(counts, torch.tensor([0.1, 0.2, 0.3, 0.4]), rtol=0, atol=0.06)


def test_the_weights_of_a_partition_that_is_not_drawn_keep_their_bits():
    one = trainer(sampling=(1, 0, 0, 0))
    owned = [(one.model.get_parameter(name), map.ids()) for name, map in partnets.partitions(one.model).items()]
    owned += [(one.model[i].bias_rows, torch.arange(1, COUNT + 1)) for i in (1, 3)]
    before = [tensor.detach().clone() for tensor, _ in owned]
    one.fit(5)
    for (tensor, ids), old in zip(owned, before, strict=True):
        assert torch.equal(tensor[ids > 1], old[ids > 1])
        assert (tensor[ids == 1] != old[ids == 1]).any()
