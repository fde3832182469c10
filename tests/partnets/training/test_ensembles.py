"""Ensembles and dense networks train like partitioned ones: each network learns only from its chunks."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import partnets
from partnets import Ensemble, held_out, hyper, optim, single_chunk

PROPORTIONS = (0.5, 0.3, 0.2)
COUNT = len(PROPORTIONS)


def examples(n=60):
    x = torch.randn(n, 4)
    return x, (x[:, 0] > 0).long()


def ensemble(count=None, networks=COUNT):
    mask = hyper.InputMask(4, temperature=0.5)
    return Ensemble([nn.Sequential(mask, nn.Linear(4, 2)) for _ in range(networks)], count), mask


def copies(tensors):
    return [tensor.detach().clone() for tensor in tensors]


def weights(network):
    return list(network[1].parameters())


@pytest.mark.parametrize(("networks", "count"), [(3, None), (2, 4), (1, 2), (1, None)])
def test_subnetwork_k_is_network_k_and_the_last_from_there_on(networks, count):
    model, _ = ensemble(count, networks)
    model.eval()
    x, expected = torch.randn(5, 4), []
    for k in range(1, (count or networks) + 1):
        expected.append(model.networks[min(k, networks) - 1](x))
        with partnets.subnetwork(model, active=k):
            assert torch.equal(model(x), expected[-1])
        plain = partnets.merge(model, k)
        assert type(plain) is nn.Sequential and torch.equal(plain(x), expected[-1])
        assert not set(plain.parameters()) & set(model.parameters())
        assert all(parameter.requires_grad for parameter in plain.parameters())
    assert torch.equal(model(x), expected[-1])  # the default is the last subnetwork
    assert len({tuple(output.flatten().tolist()) for output in expected}) == networks


@pytest.mark.parametrize("k", range(1, COUNT + 1))
def test_a_step_of_a_partition_changes_only_one_network(k):
    model, mask = ensemble()
    sampling = [float(j == k) for j in range(1, COUNT + 1)]
    one = partnets.Trainer(
        model, partnets.chunk(examples(), PROPORTIONS), hyper=mask, optimizer=optim.Adam(model), sampling=sampling
    )
    before = [copies(weights(network)) for network in model.networks]
    for _ in range(3):
        one.step_weights()
    for j, (network, old) in enumerate(zip(model.networks, before, strict=True), start=1):
        assert all(torch.equal(weight, was) == (j != k) for weight, was in zip(weights(network), old, strict=True))
    assert torch.equal(mask.logits, torch.zeros(4)) and mask.logits.grad is None


def run(build, sampling=None, changed=None):
    """Return each network's weights after training with ψ frozen, with other examples in chunk `changed` if given."""
    torch.manual_seed(0)
    x, y = examples()
    model, chunks = build((x, y))
    if changed is not None:
        x[chunks.indices(changed)] *= -3
        y[chunks.indices(changed)] = 1 - y[chunks.indices(changed)]
    torch.manual_seed(1)
    one = partnets.Trainer(model, chunks, hyper=[], sampling=sampling, batch_size=8, lml_every=5)
    one.fit(20)
    moments = [value for state in one.optimizer.state.values() for value in state.values()]
    return [copies(weights(network)) for network in model.networks], copies(moments), one.history.lml["lml"]


@pytest.mark.full
def test_examples_of_a_chunk_do_not_change_earlier_networks():
    def build(data):
        return ensemble()[0], partnets.chunk(data, PROPORTIONS)

    first, _, _ = run(build)
    for k in range(1, COUNT + 1):
        second, _, _ = run(build, changed=k)
        for j, pair in enumerate(zip(first, second, strict=True), start=1):
            assert all(map(torch.equal, *pair)) == (j < k)


@pytest.mark.full
def test_the_validation_set_never_reaches_a_weight():
    def build(data):
        return held_out(nn.Sequential(hyper.InputMask(4), nn.Linear(4, 2)), data, validation=0.25)

    (first, moments, lml), (second, other_moments, other_lml), (third, _, _) = (
        run(build, sampling=(1, 0), changed=changed) for changed in (None, 2, 1)
    )
    assert all(map(torch.equal, first[0], second[0])) and all(map(torch.equal, moments, other_moments))
    assert lml != other_lml
    assert not any(map(torch.equal, first[0], third[0]))


@pytest.mark.parametrize("validation", [0.1, 0.5])
def test_the_validation_set_has_its_share_and_psi_learns_from_it(validation):
    mask = hyper.InputMask(4)
    model, chunks = held_out(nn.Sequential(mask, nn.Linear(4, 2)), examples(), validation=validation, seed=3)
    assert chunks.sizes == [round(60 * (1 - validation)), round(60 * validation)]
    assert torch.equal(chunks.order, partnets.chunk(examples(), (1.0,), seed=3).order)
    one = partnets.Trainer(model, chunks, hyper=mask, sampling=(1, 0), batch_size=8, lml_every=3)
    before = copies(model.networks[0].parameters())
    one.fit(3)
    assert not any(map(torch.equal, before, model.networks[0].parameters()))
    x, y = (tensor[chunks.indices(2)] for tensor in chunks.dataset.tensors)
    expected = -F.cross_entropy(model.networks[0].eval()(x), y, reduction="sum").item()
    assert one.history.lml["lml"] == [pytest.approx(expected, rel=1e-5)]


def test_a_validation_set_of_another_dtype_changes_no_training_example():
    images, y = torch.full((6, 4), 255, dtype=torch.uint8), torch.zeros(6, dtype=torch.int64)
    _, chunks = held_out(nn.Linear(4, 2), (images, y), validation=(images / 255, y))
    for k, expected in ((1, images[:2]), (2, torch.ones(2, 4))):
        assert torch.equal(chunks.sample(k, 2)[0], expected) and chunks.sample(k, 2)[0].dtype == expected.dtype


@pytest.mark.parametrize("norm", [nn.Identity(), nn.BatchNorm1d(6), nn.BatchNorm1d(6, affine=False)], ids=str)
def test_standard_training_is_the_plain_pytorch_loop(norm):
    network = nn.Sequential(nn.Linear(4, 6), copy.deepcopy(norm), nn.Tanh(), nn.Linear(6, 2)).double()
    plain, (x, y) = copy.deepcopy(network), examples()
    x = x.double()
    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}
    model, chunks = single_chunk(network, (x, y), seed=5)
    assert model.networks[0] is network
    partnets.Trainer(model, chunks, optimizer=optim.SGD(model, **settings), batch_size=16, seed=3).fit(25)

    generator, order = torch.Generator().manual_seed(3), chunks.order
    assert sorted(order.tolist()) == list(range(60)) and order.tolist() != single_chunk(plain, (x, y))[1].order.tolist()
    optimizer = torch.optim.SGD(plain.parameters(), **settings)
    for _ in range(25):
        torch.multinomial(torch.ones(1), 1, generator=generator)  # draws k, which is always 1
        batch = order[torch.randint(60, (16,), generator=generator)]
        optimizer.zero_grad()
        F.cross_entropy(plain(x[batch]), y[batch]).backward()
        optimizer.step()
    torch.testing.assert_close(network.state_dict(), plain.state_dict(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("construct", "message"),
    [
        (lambda: Ensemble([]), "0 networks for 0 partitions"),
        (lambda: Ensemble([nn.Linear(2, 2)] * 3, num_partitions=2), "3 networks for 2 partitions; pass 1 to 2"),
        (lambda: Ensemble([partnets.Linear(2, 2)]), "has partitions itself"),
        (lambda: Ensemble([nn.Linear(2, 2)] * 2), "1 and 2 share the parameter weight"),
        (lambda: Ensemble([nn.BatchNorm1d(2, affine=False)] * 2), "1 and 2 share batch normalisation"),
        (lambda: single_chunk(partnets.Linear(2, 2), examples()), "has partitions itself"),
        (lambda: held_out(nn.Linear(2, 2), examples(), validation=0.0), "would be empty"),
        (lambda: held_out(nn.Linear(2, 2), examples(), validation=1.5), "proportions"),
    ],
)
def test_invalid_ensembles_and_splits_raise(construct, message):
    with pytest.raises(ValueError, match=message):
        construct()
