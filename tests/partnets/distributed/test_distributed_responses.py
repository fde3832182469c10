"""Best-response models on ranks that share a batch learn the same as one process with the complete batch."""

import itertools
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import partnets
from partnets import distributed, hyper, optim, stn
from partnets.hyper import hyperparameters
from partnets.stn.converting import vector_of

EXAMPLES = 8
DATA = torch.Generator().manual_seed(1)
X = torch.randn(EXAMPLES, 1, 8, 8, dtype=torch.float64, generator=DATA)
Y = torch.randint(3, (EXAMPLES,), generator=DATA)


def made(kind, options):
    skipped = [] if "linearised" in options else ["6"]  # no forward-mode AD in partitioned layers
    torch.manual_seed(0)
    dropout, noise = hyper.Dropout(0.3), hyper.InputNoise(0.1)
    layers = nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.LayerNorm(36), dropout, nn.Linear(36, 3)
    network = stn.convert(nn.Sequential(noise, *layers), [noise, dropout], skip=skipped, **options)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name.endswith("_scale"):
                parameter.normal_(std=0.1)
    if kind == "L_ML":
        return partnets.partition(network, (0.5, 0.3, 0.2), defaults="stored").double()
    return partnets.Ensemble([network], count=2).double()


def learn(model, call, part):
    """Take two steps of weights and two of hyperparameters, without dropout and with independent noise per example."""
    vector, steps = vector_of(model.eval()), itertools.count(5)

    @contextmanager
    def as_of_the_whole_batch(examples, *, learns=False):
        drawn = torch.randn(EXAMPLES, vector.size, generator=torch.Generator().manual_seed(next(steps))).double()
        present, scale = vector.present(), vector.scale()
        value = present + scale * drawn[part]
        with vector.at(value if learns else value.detach()):
            yield

    vector.perturbed = as_of_the_whole_batch
    weights, psi = optim.SGD(model, lr=0.1), torch.optim.SGD(hyperparameters(model), lr=0.1)
    batch = X[part], Y[part]

    def loss(batch):
        return F.cross_entropy(call(batch[0]), batch[1])

    for _ in range(2):
        stn.step_weights(model, weights, 1, batch, loss)
        stn.step_hyper(model, psi, {2: batch}, loss)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def learn_on_ranks(kind, options):
    model = made(kind, options)
    rows = EXAMPLES // dist.get_world_size()
    part = slice(dist.get_rank() * rows, (dist.get_rank() + 1) * rows)
    if kind == "torch's":
        call = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    else:
        call = distributed.DDP(model, bucket_cap_mb=0.001)
    return learn(model, call, part)


@pytest.mark.parametrize("kind", ["validation set", "L_ML", "torch's"])
@pytest.mark.parametrize("options", [{"centred": False}, {}, {"linearised": True}], ids=str)
def test_two_ranks_learn_the_response_of_one_process_with_the_joint_batch(kind, options, two_ranks):
    model = made(kind, options)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    expected = learn(model, model, slice(None))
    assert not any(torch.equal(before[name], parameter) for name, parameter in expected.items())
    first, second = two_ranks(learn_on_ranks, kind, options)
    torch.testing.assert_close(first, expected, rtol=1e-10, atol=1e-12)
    assert all(torch.equal(first[name], second[name]) for name in first)
