"""Steps that accumulate gradients over the parts of a batch equal those on the whole batch."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import partnets
from partnets import hyper
from partnets.data import Parts

PROPORTIONS = (0.5, 0.3, 0.2)
LOOKAHEADS = [
    partnets.Lookahead(steps=2),
    partnets.Lookahead(exact=False),
    partnets.Implicit(terms=2),
]


def examples(n=60):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, 4, generator=generator).double(), torch.randint(3, (n,), generator=generator)


def model_of(decays=False):
    torch.manual_seed(0)
    layer = nn.Linear(4, 8)
    psi = hyper.WeightDecay(layer, 0.1) if decays else hyper.InputMask(4)
    model = nn.Sequential(psi, layer, nn.Tanh(), nn.Linear(8, 3)).double()
    return partnets.partition(model, PROPORTIONS, seed=0)


def both(take):
    """Return the tensors of two models after a step on a batch, and on the same one in three parts."""
    x, y = examples(12)
    found = []
    for batch in ((x, y), Parts(zip(x.chunk(3), y.chunk(3), strict=True))):
        value, model = take(batch)
        found.append([value, *model.state_dict().values()])
    return found


def loss_of(model):
    return lambda batch: F.cross_entropy(model(batch[0]), batch[1])


def check_equal(found):
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("clip", [None, 0.01])
def test_a_step_of_the_weights_in_parts_is_that_of_the_whole_batch(clip):
    def take(batch):
        model = model_of(decays=True)
        optimizer = partnets.optim.SGD(model, lr=0.5)
        return partnets.step_weights(model, optimizer, 2, batch, loss_of(model), clip=clip), model

    found, before = both(take), model_of(decays=True).state_dict().values()
    check_equal(found)
    assert not all(torch.equal(a, b) for a, b in zip(found[1][1:], before, strict=True))


def test_a_direct_step_of_hyperparameters_in_parts_is_that_of_the_whole_batch():
    def take(batch):
        model = model_of()
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.5)
        weights = {2: 0.7, 3: 0.3}
        return partnets.step_hyper(model, optimizer, {2: batch, 3: batch}, loss_of(model), weights=weights), model

    check_equal(both(take))


@pytest.mark.parametrize("by", LOOKAHEADS, ids=["exact", "differences", "implicit"])
def test_a_lookahead_in_parts_is_that_of_the_whole_batch(by):
    def take(batch):
        model = model_of(decays=True)
        optimizer = partnets.optim.SGD(model, lr=0.5)
        psi = torch.optim.SGD(model[0].parameters(), lr=0.5)
        batches, loss = {3: (batch, [batch] * by.steps)}, loss_of(model)
        return partnets.step_lookahead(model, optimizer, psi, batches, loss, loss, by=by), model

    check_equal(both(take))


def test_weights_make_parts_equal_a_mean_over_targets():
    x, y = examples(12)
    y[:5] = -100  # the first part has no target
    parts = Parts(zip(x.chunk(3), y.chunk(3), strict=True), weights=[0.0, 3 / 7, 4 / 7])
    found = []
    for batch in ((x, y), parts):
        model = model_of()
        model[0].eval()
        value = partnets.step_weights(model, partnets.optim.SGD(model, lr=0.5), 2, batch, loss_of(model))
        found.append([value, *model.state_dict().values()])
    check_equal(found)


@pytest.mark.parametrize("weights", [[1.0], [0.5, 0.6], [1.5, -0.5]])
def test_weights_of_parts_have_a_sum_of_one(weights):
    with pytest.raises(ValueError, match="of 2 parts; pass one for each"):
        Parts([1, 2], weights)


def test_parts_need_the_memory_of_one_at_a_time():
    model, alive, most = model_of(), [], []

    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            alive.append(ctx)
            most.append(len(alive))
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            alive.remove(ctx)
            return grad

    def loss(batch):
        return F.cross_entropy(Kept.apply(model(batch[0])), batch[1])

    x, y = examples(12)
    parts = Parts(zip(x.chunk(3), y.chunk(3), strict=True))
    partnets.step_weights(model, partnets.optim.SGD(model, lr=0.5), 2, parts, loss)
    partnets.step_hyper(model, torch.optim.SGD(model[0].parameters(), lr=0.5), {2: parts}, loss)
    assert most == [1] * 6


def test_a_loader_draws_the_same_examples_in_parts():
    chunks = partnets.chunk(examples(), PROPORTIONS)
    options = {"steps": 5, "hyper_batch_size": 6, "steps_ahead": 1, "seed": 3}
    for whole, parts in zip(
        partnets.Loader(chunks, 12, **options), partnets.Loader(chunks, 12, accumulate=3, **options), strict=True
    ):
        assert (whole.k, whole.hyper_k) == (parts.k, parts.hyper_k)
        unseen, (seen,) = whole.hyper_batch
        of_parts = parts.batch, parts.hyper_batch[0], parts.hyper_batch[1][0]
        for one, some in zip((whole.batch, unseen, seen), of_parts, strict=True):
            assert isinstance(some, Parts) and len(some) == 3
            assert all(torch.equal(a, torch.cat(b)) for a, b in zip(one, zip(*some, strict=True), strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate": 5}, "batch_size=12 has no 5 equal parts"),
        ({"accumulate": 3, "hyper_batch_size": 4}, "hyper_batch_size=4 has no 3"),
        ({"accumulate": 0}, "accumulate=0"),
    ],
)
def test_a_loader_refuses_parts_of_different_sizes(options, message):
    with pytest.raises(ValueError, match=message):
        partnets.Loader(partnets.chunk(examples(), PROPORTIONS), 12, steps=1, **options)
