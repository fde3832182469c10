"""reassign gives the requested shares with few moves, and leaks nothing of later chunks into earlier subnetworks."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import partnets
from partbench.paper.reassigning import reassign
from partkernels.arguments import sizes
from partnets import optim
from partnets.subnetworks.parameters import partitioned_parameters
from partnets.subnetworks.state import partition_of
from partnets.subnetworks.switch import noted

BEFORE = (0.6, 0.2, 0.2)
SHARES = {
    "to the last": (0.1, 0.2, 0.7),
    "to the first": (0.9, 0.05, 0.05),
    "both": (0.7, 0.0, 0.3),
    "as they are": BEFORE,
}
OPTIMIZERS = {
    "Adam": optim.Adam,
    "momentum": lambda model: optim.SGD(model, lr=0.01, momentum=0.9),
    "RMSprop": lambda model: optim.PerPartition(torch.optim.RMSprop, model),
}


def network():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 4 * 4, 20), nn.Tanh(), nn.Linear(20, 3)
    )


def trained(scheme, make=optim.Adam, defaults="seed"):
    """Return a model after steps of all partitions, and its optimiser."""
    torch.manual_seed(0)
    model = partnets.partition(network(), BEFORE, scheme=scheme, seed=1, defaults=defaults)
    optimizer = make(model)
    step(model, optimizer, 6)
    return model, optimizer


def step(model, optimizer, times):
    for i in range(times):
        x, y = torch.randn(8, 1, 6, 6), torch.randint(3, (8,))
        partnets.step_weights(
            model, optimizer, i % 3 + 1, (x, y), lambda batch: F.cross_entropy(model(batch[0]), batch[1])
        )


def weights(model):
    """Return each partitioned weight with its partition."""
    owners = [one for one in partitioned_parameters(model) if not one.is_vector]
    return [(one.parameter, partition_of(one.module, one.name)) for one in owners]


def ids_of(model):
    return partnets.partitions(model)["3.weight"].ids()


def whole(optimizer):
    return optimizer.full_states()


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("by", ["random", "magnitude"])
@pytest.mark.parametrize("shares", SHARES)
def test_entries_moved_to_earlier_partitions_restart_at_their_defaults(shares, by, make):
    model, optimizer = trained("weight", OPTIMIZERS[make])
    before = [(partition.ids(), weight.detach().clone()) for weight, partition in weights(model)]
    states = copy.deepcopy(list(whole(optimizer).values()))
    moved = reassign(model, SHARES[shares], optimizer, by=by, seed=3)
    found = {"later": 0, "earlier": 0}
    places = {parameter: i for i, parameter in enumerate(optimizer.parameters())}
    for (parameter, partition), (old, value) in zip(weights(model), before, strict=True):
        new = partition.ids()
        assert partition.sizes() == sizes(new.numel(), SHARES[shares])
        later, earlier = new > old, new < old
        found["later"] += int(later.sum())
        found["earlier"] += int(earlier.sum())
        defaults = partition.defaults.values(parameter.shape, parameter.dtype, parameter.device)
        assert torch.equal(parameter, torch.where(earlier, defaults, value))
        for key, moment in whole(optimizer)[parameter].items():
            if moment.shape == parameter.shape:
                was = states[places[parameter]][key]
                for k in (1, 2):
                    own = was[old == k]
                    was = torch.where(earlier & (new == k), own.mean(), was)
                torch.testing.assert_close(moment, was)
        # The number of moves is minimal, and each border is crossed in one direction only.
        kept = sum(min(int((old == k).sum()), size) for k, size in enumerate(partition.sizes(), 1))
        assert int((new == old).sum()) == kept
        for k in (1, 2):
            assert not (((new <= k) & (old > k)).any() and ((new > k) & (old <= k)).any())
    assert moved == found
    step(model, optimizer, 3)


@pytest.mark.parametrize("scheme", ["weight", "node"])
@pytest.mark.parametrize("by", ["random", "magnitude"])
@pytest.mark.parametrize("shares", SHARES)
def test_nothing_of_later_partitions_reaches_earlier_subnetworks(shares, by, scheme):
    """Change later partitions' values, moments and ownership as training on later chunks could."""
    x = torch.randn(4, 1, 6, 6)
    for k in (1, 2):
        found = []
        for change in (False, True):
            model, optimizer = trained(scheme, OPTIMIZERS["momentum"])
            if change:
                for one in partitioned_parameters(model):
                    for j in range(k + 1, 4):
                        for tensor in (one.stored.data, optimizer.state[one.parameter]["momentum"]):
                            one.put(tensor, j, torch.randn(one.numel(j)))
                    with torch.no_grad():
                        one.combine()
                noted(partitioned_parameters(model))
            reassign(model, SHARES[shares], optimizer, by=by, seed=3)
            torch.manual_seed(5)
            with torch.no_grad(), partnets.subnetwork(model, k):
                y = model(x)
            maps = [partition.ids() <= k for _, partition in weights(model)]
            state = whole(optimizer)
            moments = [state[weight]["momentum"][mask] for (weight, _), mask in zip(weights(model), maps, strict=True)]
            found.append([y, *maps, *moments])
        assert all(map(torch.equal, *found))


def test_outputs_that_have_one_owner_move_as_a_whole():
    model, optimizer = trained("node")
    reassign(model, (0.2, 0.2, 0.6), optimizer, by="magnitude")
    for _, partition in weights(model):
        ids = partition.ids().flatten(1)
        assert (ids == ids[:, :1]).all()
    assert torch.bincount(ids_of(model)[:, 0].long(), minlength=4)[1:].tolist() == [4, 4, 12]


def test_a_reassigned_model_can_be_saved_merged_and_trained_further(tmp_path):
    model, optimizer = trained("weight")
    reassign(model, (0.2, 0.2, 0.6), optimizer)
    again = partnets.partition(network(), BEFORE, seed=1)
    again.load_state_dict(model.state_dict())
    x = torch.randn(4, 1, 6, 6)
    for k in (1, 2, 3):
        merged = partnets.merge(model, active=k)
        with torch.no_grad(), partnets.subnetwork(model, k), partnets.subnetwork(again, k):
            torch.testing.assert_close(again(x), model(x))
            torch.testing.assert_close(merged(x), model(x))
    loaded = optim.Adam(again)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    torch.manual_seed(7)
    step(model, optimizer, 3)
    torch.manual_seed(7)
    step(again, loaded, 3)
    assert all(map(torch.equal, model.parameters(), again.parameters()))


def test_a_weight_that_two_layers_share_has_one_partition():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(9, 6), nn.Linear(6, 9, bias=False)
            self.head.weight = self.table.weight

    model = partnets.partition(Tied(), BEFORE, defaults="zero")
    reassign(model, (0.1, 0.1, 0.8))
    assert model.table.weight_partition is model.head.weight_partition
    assert [one.sizes() for one in partnets.partitions(model).values()] == [[6, 5, 43]] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"proportions": (0.5, 0.5)}, "2 proportions and 3 partitions"),
        ({"proportions": (0.5, 0.4, 0.4)}, "sum to 1.3"),
        ({"by": "gradient"}, "by='gradient'; pass one of 'random', 'magnitude'"),
        ({"seed": -1}, "seed"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)], lr=0.1)}, "steps all partitions at once"),
        ({}, "the model has learned, and moments .* pass optimizer, that which has stepped it"),
    ],
)
def test_bad_input_is_named_and_nothing_moves(options, message):
    model, _ = trained("weight")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        reassign(model, **{"proportions": BEFORE, **options})
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_nested_partitions_are_refused():
    model = partnets.partition(
        nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), BEFORE, scheme="nested", example=torch.ones(2, 4)
    )
    with pytest.raises(ValueError, match=r"0 is nested, .* schemes 'weight' and 'node'"):
        reassign(model, (0.1, 0.1, 0.8))
