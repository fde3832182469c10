"""Node partitioning (Appendix C): all weights that an output depends on belong to one partition."""

import pytest
import torch
from torch import nn

import partnets

PROPORTIONS = (0.5, 0.25, 0.25)
# A layer, one of its weights, and how to get each output's weights from it: [outputs, ...].
CASES = {
    "Linear": (lambda: nn.Linear(5, 8), "weight", lambda w: w),
    "Conv2d in groups": (lambda: nn.Conv2d(4, 8, 3, groups=2), "weight", lambda w: w),
    "ConvTranspose2d in groups": (
        lambda: nn.ConvTranspose2d(6, 8, 3, groups=2),
        "weight",
        lambda w: torch.cat([w[:3].transpose(0, 1), w[3:].transpose(0, 1)]),
    ),
    "Bilinear": (lambda: nn.Bilinear(3, 4, 8), "weight", lambda w: w),
    "Embedding": (lambda: nn.Embedding(9, 8), "weight", lambda w: w.t()),
    "Attention": (lambda: nn.MultiheadAttention(8, 2), "in_proj_weight", lambda w: w),
    "LSTM": (lambda: nn.LSTM(3, 8), "weight_ih_l0", lambda w: w.view(4, 8, 3).transpose(0, 1)),
    "LSTM, recurrent": (lambda: nn.LSTM(3, 8), "weight_hh_l0", lambda w: w.view(4, 8, 8).transpose(0, 1)),
    "LSTM, projected": (lambda: nn.LSTM(3, 8, proj_size=4), "weight_hr_l0", lambda w: w),
}


@pytest.mark.parametrize("name", CASES)
def test_an_outputs_weights_belong_to_one_partition(name):
    make, weight, by_output = CASES[name]
    layer = partnets.partition(make(), PROPORTIONS, scheme="node")
    ids = by_output(partnets.partitions(layer)[weight].ids()).flatten(1)
    assert (ids == ids[:, :1]).all()
    outputs = len(ids)
    assert torch.bincount(ids[:, 0].int() - 1).tolist() == [outputs // 2, outputs // 4, outputs // 4]


def test_both_weights_of_a_recurrent_layer_have_the_same_partitions():
    layer = partnets.partition(nn.LSTM(3, 8, num_layers=2, bidirectional=True), PROPORTIONS, scheme="node")
    owners = {name: partition.ids()[:8, 0] for name, partition in partnets.partitions(layer).items()}
    for suffix in ("l0", "l0_reverse", "l1", "l1_reverse"):
        assert torch.equal(owners[f"weight_ih_{suffix}"], owners[f"weight_hh_{suffix}"])
    assert not torch.equal(owners["weight_ih_l0"], owners["weight_ih_l0_reverse"])
