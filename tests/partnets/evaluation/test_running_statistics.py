"""BatchNorm's statistics match the current weights when a model is evaluated, and contain no later chunks."""

import copy
import random
import warnings

import numpy
import pytest
import torch
from torch import nn

import partnets
from partnets import hyper
from partnets.subnetworks.statistics import is_stale

PROPORTIONS = (0.5, 0.3, 0.2)
STATISTICS = "running_mean", "running_var", "num_batches_tracked"


def of_each(norm, name):
    """Return a copy of a statistic of all subnetworks, [C, ...]; outside of them the buffer is that of the last."""
    return torch.cat([norm.get_buffer(f"{name}_rows")[:-1], norm.get_buffer(name)[None]])


def network(seed=0):
    torch.manual_seed(seed)
    mask = hyper.InputMask(6)
    layers = nn.Sequential(mask, nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    return partnets.partition(layers, PROPORTIONS)


def examples(count=100):
    generator = torch.Generator().manual_seed(3)
    x = 2 + torch.randn(count, 6, generator=generator)
    return x, (x[:, 0] > 2).long()


def trainer(model, chunks, **options):
    torch.manual_seed(1)
    return partnets.Trainer(model, chunks, hyper=model[0], batch_size=10, **options)


def trained(steps=12, **options):
    chunks = partnets.chunk(examples(), PROPORTIONS)
    one = trainer(network(), chunks, **options)
    for _ in range(steps):
        one.step()
    return one.model, chunks


def test_estimated_statistics_are_means_over_batches_of_seen_chunks():
    model, chunks = trained()
    weights = [parameter.clone() for parameter in model.parameters()]
    assert is_stale(model[2]) and model.training
    partnets.estimate_statistics(model, chunks, batch_size=25)
    assert not is_stale(model[2]) and model.training and model[2].momentum == 0.1
    assert of_each(model[2], "num_batches_tracked").tolist() == [2, 3, 4]
    for k, seen in ((1, 50), (2, 80), (3, 100)):
        with partnets.subnetwork(model.eval(), k), torch.no_grad():
            drawn = chunks.order[torch.randperm(seen, generator=torch.Generator().manual_seed(0))]
            drawn = drawn[: seen // 25 * 25]  # complete batches
            hidden = model[1](model[0](chunks.dataset.tensors[0][drawn])).split(25)
        means = torch.stack([part.mean(0) for part in hidden])
        variances = torch.stack([part.var(0) for part in hidden])
        torch.testing.assert_close(of_each(model[2], "running_mean")[k - 1], means.mean(0))
        torch.testing.assert_close(of_each(model[2], "running_var")[k - 1], variances.mean(0))
    assert all(map(torch.equal, model.parameters(), weights))


def test_instance_norms_are_estimated_too():
    torch.manual_seed(0)
    layers = nn.Conv1d(2, 4, 1), nn.InstanceNorm1d(4, track_running_stats=True)
    model, x = partnets.partition(nn.Sequential(*layers), PROPORTIONS), torch.randn(60, 2, 5) + 3
    chunks = partnets.chunk((x, torch.zeros(60)), PROPORTIONS)
    with partnets.subnetwork(model, 1, 1):
        model(x)
    assert is_stale(model[1])
    partnets.estimate_statistics(model, chunks)
    assert not is_stale(model[1])
    for k, seen in ((1, 30), (2, 48), (3, 60)):
        with partnets.subnetwork(model, k), torch.no_grad():
            expected = model[0](x[chunks.order[:seen]]).mean((0, 2))
        torch.testing.assert_close(of_each(model[1], "running_mean")[k - 1], expected)


def test_an_estimate_from_other_chunks_is_refused():
    model, _ = trained()
    other = partnets.chunk(examples(), PROPORTIONS, seed=7)
    before = of_each(model[2], "running_mean")
    with pytest.raises(ValueError, match="has learned from other chunks"):
        partnets.estimate_statistics(model, other)
    assert torch.equal(of_each(model[2], "running_mean"), before) and is_stale(model[2])
    partnets.estimate_statistics(model, other, other_chunks=True)
    assert not is_stale(model[2])


def test_an_estimate_that_fails_changes_nothing():
    model, chunks = trained()
    before = {name: value.clone() for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    calls = iter(range(2))

    def forward(model, batch):
        next(calls)
        return model(batch[0]), batch[1]

    with pytest.raises(StopIteration):
        partnets.estimate_statistics(model, chunks, batch_size=10, forward=forward)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert is_stale(model[2])


@pytest.mark.full
def test_evaluations_take_fresh_statistics_and_leave_the_model_as_it_was():
    model, chunks = trained()
    before = {name: value.clone() for name, value in model.named_buffers()}
    fresh = copy.deepcopy(model)
    partnets.estimate_statistics(fresh, chunks)
    assert partnets.lml(model, chunks) == partnets.lml(fresh, chunks)
    assert torch.equal(partnets.loss_matrix(model, chunks), partnets.loss_matrix(fresh, chunks))
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers()) and is_stale(model[2])


@pytest.mark.full
@pytest.mark.parametrize("judge", [partnets.merge, lambda model: partnets.accuracy(model, examples())])
def test_merging_or_evaluating_with_stale_statistics_warns(judge):
    model, chunks = trained()
    with pytest.warns(UserWarning, match=r"1 BatchNorm layers \(2 is the first\) are older"):
        judge(model)
    partnets.estimate_statistics(model, chunks)
    with warnings.catch_warnings(action="error"):
        judge(model)


class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, i):
        return random.gauss() + numpy.random.randn() + torch.randn(6), i % 2


def test_with_a_seed_the_noise_of_examples_is_the_same_in_each_evaluation():
    model, chunks, found = network(), partnets.chunk(Noisy(), PROPORTIONS), []
    with partnets.subnetwork(model, 1, 1):
        model(torch.randn(9, 6))
    for _ in range(2):
        found.append(partnets.lml(model, chunks, seed=0))
        Noisy()[0]
    assert found[0] == found[1]


@pytest.mark.full
def test_a_norm_that_does_not_learn_keeps_its_statistics():
    model = network()
    for mean in (model[2].running_mean, model[2].running_mean_rows):
        mean += 1.0
    model[2].eval()
    trainer(model, partnets.chunk(examples(), PROPORTIONS), lml_every=5).fit(10)
    assert (of_each(model[2], "running_mean") == 1.0).all() and not is_stale(model[2])


def test_a_norm_that_stops_learning_keeps_its_statistics():
    model, chunks = trained(4)
    partnets.estimate_statistics(model, chunks)
    before = of_each(model[2], "running_mean")
    model[2].eval()
    trainer(model, chunks).fit(4)
    assert torch.equal(of_each(model[2], "running_mean"), before)
    partnets.lml(model.eval(), chunks)
    with warnings.catch_warnings(action="error"):
        partnets.merge(model)


@pytest.mark.cases(usual=1)
@pytest.mark.parametrize("is_plain", [True, False], ids=["a dict", "a state_dict"])
@pytest.mark.parametrize("left_out", ["2.", "2.running_"])
def test_weights_without_the_statistics_that_belong_to_them_leave_those_stale(left_out, is_plain):
    (model, chunks), (other, _) = trained(4), trained(8)
    for one in (model, other):
        partnets.estimate_statistics(one, chunks)
    given = other.state_dict()
    for name in [name for name in given if name.startswith(left_out)]:
        del given[name]
    model.load_state_dict(dict(given) if is_plain else given, strict=False)
    with pytest.warns(UserWarning, match="older than the weights"):
        partnets.merge(model)
    partnets.estimate_statistics(model, chunks)
    for name in STATISTICS:
        torch.testing.assert_close(of_each(model[2], name), of_each(other[2], name))
