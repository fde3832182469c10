"""Averaged: the mean over copies of logits or probabilities, for any shape of output."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from partnets import hyper


class Shift(nn.Module):
    """An augmentation that adds 0, 1, 2, ... to the copies to distinguish them."""

    def forward(self, x):
        return x + torch.arange(len(x) // 2).repeat_interleave(2)[:, None]


@pytest.mark.parametrize("average", ["logits", "log_probabilities", "probabilities"])
def test_averaged_averages_over_copies_of_each_example(average):
    network = nn.Linear(3, 4)
    x = torch.randn(2, 3)
    logits = torch.stack([network(x + copy) for copy in range(5)])
    expected = {
        "logits": logits.mean(0),
        "log_probabilities": logits.log_softmax(-1).mean(0),
        "probabilities": logits.softmax(-1).mean(0).log(),
    }[average]
    torch.testing.assert_close(hyper.Averaged(Shift(), network, samples=5, average=average)(x), expected)


def test_under_cross_entropy_log_probabilities_are_logits_and_probabilities_are_not():
    network, x, y = nn.Linear(3, 4), torch.randn(2, 3), torch.tensor([0, 3])
    losses = [
        F.cross_entropy(hyper.Averaged(Shift(), network, samples=5, average=average)(x), y)
        for average in ("logits", "log_probabilities", "probabilities")
    ]
    torch.testing.assert_close(losses[1], losses[0])
    assert abs(losses[2] - losses[0]) > 1e-3


def test_averaged_serves_dense_outputs():
    network = hyper.Averaged(hyper.Affine(), nn.Conv2d(1, 3, 3), samples=2, average="probabilities")
    output = network(torch.rand(2, 1, 12, 12))
    assert output.shape == (2, 3, 10, 10)
    torch.testing.assert_close(output.exp().sum(1), torch.ones(2, 10, 10))


@pytest.mark.parametrize("arguments", [{"samples": 0}, {"average": "votes"}])
def test_averaged_refuses_what_it_cannot_do(arguments):
    with pytest.raises(ValueError, match="pass"):
        hyper.Averaged(nn.Identity(), nn.Identity(), **arguments)
