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


def test_a_step_is_taken_at_the_scheduled_rate():
    one = trainer()
    before = psi(one.model).detach().clone()
    one.hyper_scheduler = lr_scheduler.LambdaLR(one.hyper_optimizer, lambda step: float(step > 0))
    one.step_hyper()
    assert torch.equal(psi(one.model), before)  # the first rate is 0
    one.step_hyper()
    torch.testing.assert_close(psi(one.model), before - 1e-3 * psi(one.model).grad, rtol=0, atol=1e-15)


@pytest.mark.parametrize("name", ["scheduler", "hyper_scheduler"])
def test_a_scheduler_of_another_optimiser_raises(name):
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(ValueError, match=f"^{name} belongs to another optimiser"):
        trainer(**{name: lr_scheduler.StepLR(other, 3)})


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


@pytest.mark.cases(usual=1)
@pytest.mark.parametrize("progress", [0, 3])
def test_a_step_on_all_unseen_chunks_has_the_gradient_of_their_weighted_sum(progress):
    one = trainer(hyper_chunks="all", hyper_batch_size=5, seed=4)
    one.fit(progress)
    model, generator = one.model, torch.Generator()
    generator.set_state(one.generator.get_state())
    x, y = one.chunks.dataset.tensors
    unseen = one.chunks.sizes[1:]
    total = 0.0
    networks = [partnets.merge(model, k) for k in range(1, COUNT)]
    for k, network in enumerate(networks, start=2):
        indices = one.chunks.indices(k)
        batch = indices[torch.randint(len(indices), (5,), generator=generator)]
        loss = F.cross_entropy(network(x[batch]), y[batch]) * unseen[k - 2] / sum(unseen)
        loss.backward()
        total += loss.item()
    before = psi(model).detach().clone()
    one.optimizer.zero_grad()
    k, loss = one.step_hyper()
    assert k is None and loss == pytest.approx(total, rel=1e-12)
    expected = sum(psi(network).grad for network in networks)
    torch.testing.assert_close(psi(model).grad, expected, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(psi(model), before - 1e-3 * expected, rtol=1e-12, atol=0)
    assert all(parameter.grad is None for parameter in model[1:].parameters())


@pytest.mark.full
def test_steps_on_one_chunk_and_on_all_have_the_same_mean_gradient(monkeypatch):
    gradients, losses = {}, {}
    for hyper_chunks in ("one", "all"):
        torch.manual_seed(0)
        one = trainer(rate=0.0, hyper_chunks=hyper_chunks)
        # Use complete chunks as batches, so that only k is random.
        monkeypatch.setattr(one.chunks, "sample", lambda k, *_, chunks=one.chunks: chunks.fetch(chunks.indices(k)))
        for _ in range(40):
            k, loss = one.step_hyper()
            gradients[k], losses[k] = psi(one.model).grad.clone(), loss
    assert set(gradients) == {2, 3, 4, None}
    sizes = dict(enumerate(one.chunks.sizes, start=1))
    for by_k in (gradients, losses):
        mean = sum(sizes[k] * by_k[k] for k in (2, 3, 4)) / (sizes[2] + sizes[3] + sizes[4])
        torch.testing.assert_close(by_k[None], mean, rtol=1e-12, atol=1e-15)


@pytest.mark.full
def test_no_chunk_is_recorded_for_a_step_on_all():
    one = trainer(hyper_chunks="all", hyper_every=2)
    one.fit(4)
    assert one.history.steps["hyper_k"] == [None] * 4
    assert [loss is None for loss in one.history.steps["hyper_loss"]] == [True, False] * 2


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
    ("options", "message"),
    [
        ({"batch_size": 3}, "batch_size=3, divided by 0.4, 0.3, 0.2, 0.1, leaves no example for k=4; pass a larger"),
        ({"hyper_batch_size": 2}, "hyper_batch_size=2, divided by 0.3, 0.2, 0.1, leaves no example for k=4"),
        ({"hyper_chunks": "all"}, "pass one of them"),
        ({"one_pass": "no"}, "one_pass='no'; pass True or False"),
    ],
)
def test_a_batch_that_cannot_be_divided_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        trainer(**{"one_pass": True, **options})


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sampling": (1, 0)}, r"sampling=\(1.0, 0.0\); pass 4 probabilities"),
        ({"sampling": (0.5, 0.5, 0.5, -0.5)}, "pass 4 probabilities"),
        ({"sampling": (0, 0, 0, 0)}, "pass 4 probabilities"),
        ({"sampling": (1, 0, 0, float("nan"))}, "pass 4 probabilities"),
        ({"sampling": ()}, "pass 4 probabilities"),
        ({"clip": 0}, "clip=0; pass the greatest norm"),
        ({"clip": -1.0}, "clip=-1.0"),
        ({"clip": float("nan")}, "clip=nan"),
        ({"hyper_every": 0}, "hyper_every=0; pass an int, at least 1"),
        ({"hyper_every": 1.5}, "hyper_every=1.5"),
        ({"hyper_after": -1}, "hyper_after=-1; pass an int, at least 0"),
        ({"hyper_after": True}, "hyper_after=True"),
        ({"hyper_chunks": "both"}, "hyper_chunks='both'; pass 'one' or 'all'"),
        ({"hyper_chunks": 2}, "hyper_chunks=2"),
    ],
)
def test_what_is_out_of_range_raises(arguments, message):
    with pytest.raises(ValueError, match=message):
        trainer(**arguments)


def test_a_scheduler_that_needs_a_metric_is_refused():
    model = network()
    optimizer = optim.Adam(model)
    with pytest.raises(ValueError, match="metric"):
        trainer(model, optimizer=optimizer, scheduler=lr_scheduler.ReduceLROnPlateau(optimizer))


def test_an_optimiser_of_psi_that_needs_a_closure_is_refused():
    model = network()
    with pytest.raises(ValueError, match="hyper_optimizer is LBFGS, which needs a closure"):
        trainer(model, hyper_optimizer=torch.optim.LBFGS([psi(model)]))


def test_a_training_loss_that_is_a_sum_is_refused_without_psi_too():
    chunks = partnets.chunk((torch.randn(20, 6), torch.randint(2, (20,))), (0.5, 0.5))
    with pytest.raises(ValueError, match="reduction='sum'"):
        partnets.Trainer(
            partnets.Linear(6, 2, proportions=(0.5, 0.5)), chunks, loss=nn.CrossEntropyLoss(reduction="sum")
        )


def test_drawing_a_partition_that_owns_nothing_is_refused_with_the_cure():
    model, chunks = partnets.held_out(nn.Linear(6, 2), (torch.randn(20, 6), torch.randint(2, (20,))))
    with pytest.raises(ValueError, match=r"partition 2 has no parameter .* \(1\.0, 0\.0\)"):
        partnets.Trainer(model, chunks)
