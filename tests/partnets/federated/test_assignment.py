from collections import Counter

import pytest
import torch

from partnets import federated


@pytest.mark.parametrize(
    "clients, proportions, expected",
    [(100, (0.7, 0.2, 0.1), {1: 70, 2: 20, 3: 10}), (20, (0.9, 0.1), {1: 18, 2: 2}), (3, (1.0,), {1: 3})],
)
def test_chunks_have_clients_in_these_proportions(clients, proportions, expected):
    found = [federated.assign(clients, proportions, seed) for seed in range(3)]
    assert all(Counter(each) == expected for each in found)
    assert len(set(found)) == (3 if len(proportions) > 1 else 1)
    assert found[0] == federated.assign(clients, proportions, 0)


def test_a_chunk_without_clients_is_an_error():
    with pytest.raises(ValueError, match=r"chunk 3 of 4 clients in proportions \(0.7, 0.2, 0.1\) would have no client"):
        federated.assign(4, (0.7, 0.2, 0.1))


@pytest.mark.parametrize("alpha, labels_seen", [(0.01, (1, 4)), (1000.0, (9.5, 10))])
def test_the_smaller_alpha_the_fewer_labels_a_client_sees(alpha, labels_seen):
    labels = torch.arange(2000) % 10
    parts = federated.dirichlet(labels, 20, alpha, seed=3)
    least, most = labels_seen
    assert least <= sum(len(labels[part].unique()) for part in parts) / 20 <= most
    assert [len(part) for part in parts] == [100] * 20
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(2000))


def test_bins_of_a_rotation_divide_as_labels_do():
    angles = torch.rand(600) * 360 - 180
    bins = torch.bucketize(angles, torch.linspace(-180, 180, 11)[1:-1])
    parts = federated.dirichlet(bins, 7, 0.1)
    assert sorted(len(part) for part in parts) == [85, 85, 86, 86, 86, 86, 86]
    assert all((part[1:] > part[:-1]).all() for part in parts)
    assert all(torch.equal(one, other) for one, other in zip(parts, federated.dirichlet(bins, 7, 0.1), strict=True))


@pytest.mark.parametrize("arguments", [([0, 1], 3, 1.0), ([0, 1], 1, 0.0), ([0, 1], 1, float("inf")), ([0], 0, 1.0)])
def test_what_cannot_be_divided_is_an_error(arguments):
    with pytest.raises(ValueError):
        federated.dirichlet(*arguments)
