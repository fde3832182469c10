"""Splits of a data set among clients with different mixtures of labels."""

import pytest
import torch

from partbench.paper.dirichlet import dirichlet


@pytest.mark.parametrize("alpha, labels_seen", [(0.01, (1, 4)), (1000.0, (9.5, 10))])
def test_the_smaller_alpha_the_fewer_labels_a_client_sees(alpha, labels_seen):
    labels = torch.arange(2000) % 10
    parts = dirichlet(labels, 20, alpha, seed=3)
    least, most = labels_seen
    assert least <= sum(len(labels[part].unique()) for part in parts) / 20 <= most
    assert [len(part) for part in parts] == [100] * 20
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(2000))
    assert all((part[1:] > part[:-1]).all() for part in parts)
    assert all(map(torch.equal, parts, dirichlet(labels, 20, alpha, seed=3)))


@pytest.mark.parametrize("arguments", [([0, 1], 3, 1.0), ([0, 1], 1, 0.0), ([0, 1], 1, float("inf")), ([0], 0, 1.0)])
def test_invalid_arguments_of_a_dirichlet_split_raise(arguments):
    with pytest.raises(ValueError):
        dirichlet(*arguments)
