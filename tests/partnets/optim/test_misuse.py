"""Loops that would train nothing, or the wrong parameters, raise before anything changes."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import partnets
from partnets import hyper, optim
from partnets.subnetworks.parameters import partitioned_parameters

PROPORTIONS = (0.5, 0.3, 0.2)


def network():
    torch.manual_seed(0)
    return partnets.partition(
        nn.Sequential(hyper.InputMask(6), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), PROPORTIONS
    )


def loss(model):
    torch.manual_seed(1)
    return F.cross_entropy(model(torch.randn(10, 6)), torch.arange(10) % 3)


def refused(model, step, message):
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(RuntimeError, match=message):
        step()
    assert all(map(torch.equal, model.parameters(), before))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
def test_a_step_of_all_partitions_at_once_is_refused_by_the_next_subnetwork(kind, when):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    if when == "before":
        optimizer = kind(model.parameters(), lr=0.1)
    partnets.partition(model, PROPORTIONS)
    if when == "after":
        optimizer = kind(model.parameters(), lr=0.1)
    with partnets.subnetwork(model, 1, 1):
        loss(model).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="the bias of Linear was written into"), partnets.subnetwork(model, 1, 1):
        pytest.fail("entered")


def test_a_step_inside_of_a_subnetwork_raises():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="was written into inside"), partnets.subnetwork(model, 1, 1):
        loss(model).backward()
        optimizer.step()


def test_a_step_of_a_partition_that_is_inactive_raises():
    model = network()
    optimizer = optim.SGD(model, lr=0.1)
    with partnets.subnetwork(model, 2, 2):
        loss(model).backward()
    with partnets.subnetwork(model, 1):
        refused(model, lambda: optimizer.step(update=2), "partition 2 is inactive in subnetwork 1")
    optimizer.step(update=2)


MADE = {
    "SGD": lambda model: optim.SGD(model, lr=0.1, momentum=0.9, weight_decay=0.1),
    "Adam": lambda model: optim.Adam(model, weight_decay=0.1),
    "RMSprop": lambda model: optim.PerPartition(torch.optim.RMSprop, model),
}
each = pytest.mark.parametrize("name", MADE)


@each
def test_a_step_of_a_partition_without_a_gradient_raises(name):
    model = network()
    optimizer = MADE[name](model)
    refused(model, lambda: optimizer.step(update=2), "no parameter of this optimiser has a gradient")
    loss(model).backward()  # outside a subnetwork context, the last partition learns
    refused(model, lambda: optimizer.step(update=1), "the gradient of partition 1 is 0 everywhere")
    optimizer.step(update=3)
    optimizer.zero_grad()
    with partnets.subnetwork(model, 2, 2):
        loss(model).backward()
    refused(model, lambda: optimizer.step(update=1), r"partnets\.subnetwork\(model, active=1, update=1\)")
    optimizer.step(update=2)


@each
def test_gradients_of_several_partitions_and_by_hand_step(name):
    model = network()
    optimizer = MADE[name](model)
    for k in (1, 2):
        with partnets.subnetwork(model, k, k):
            loss(model).backward()
    for k in (1, 2, 1):  # partition 1 steps twice with one gradient
        optimizer.step(update=k)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for one in partitioned_parameters(model[1]):
        one.put_gradient(3, torch.ones(one.numel(3)))
    optimizer.step(update=3)
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert {"1.weight", "1.bias_rows", "1.bias"} <= moved


def test_the_optimiser_of_a_copy_is_not_taken_for_the_models():
    model = network()
    optimizer = optim.Adam(copy.deepcopy(model))
    refused(
        model, lambda: partnets.step_weights(model, optimizer, 1, None, lambda _: loss(model)), "no parameter of this"
    )


def test_a_step_without_a_partition_names_them():
    cure = r"pass an int in 1\.\.3\. .*partnets\.step_weights.* PartitionedModule or PartitionedTrainer"
    with pytest.raises(ValueError, match=f"update=None, but there are 3 partitions; {cure}"):
        optim.Adam(network()).step()
    with pytest.raises(ValueError, match=r"update=4, but there are 3 partitions; pass an int in 1\.\.3\.$"):
        optim.Adam(network()).step(4)


@pytest.mark.parametrize("make", [optim.SGD, optim.Adam])
def test_a_sparse_gradient_is_named(make):
    model = partnets.partition(nn.Linear(4, 3), (0.5, 0.5))
    optimizer, before = make(model), [parameter.clone() for parameter in model.parameters()]
    with partnets.subnetwork(model, 1, 1):
        model(torch.ones(2, 4)).sum().backward()
    model.weight.grad = model.weight.grad.to_sparse()
    with pytest.raises(ValueError, match=r"grad is torch\.sparse_coo; pass a dense tensor"):
        optimizer.step(update=1)
    assert all(map(torch.equal, model.parameters(), before))


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_a_model_that_was_converted_after_a_step_needs_a_new_optimiser(name):
    model = network()
    frozen = {"params": [model[1].weight], "lr": 0.2}  # only the second group is invalid
    optimizer = {"SGD": partial(optim.SGD, momentum=0.9), "Adam": optim.Adam}[name](model, groups=[frozen])
    partnets.step_weights(model, optimizer, 1, None, lambda _: loss(model))
    model[3].double()
    with partnets.subnetwork(model, 1, 1):
        hidden = model[:3](torch.randn(10, 6))
        F.cross_entropy(model[3](hidden.double()), torch.arange(10) % 3).backward()
    states = copy.deepcopy(optimizer.state_dict())
    message = "of the weight of a Linear is torch.float32 on cpu, and the parameter torch.float64 on cpu: .*Make a new"
    refused(model, lambda: optimizer.step(update=1), message)
    for index, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, states["state"][index][key]) for key, value in state.items())
    new = type(optimizer)(model, groups=[frozen], **({"momentum": 0.9} if name == "SGD" else {}))
    new.load_state_dict(optimizer.state_dict())
    new.step(update=1)


@pytest.mark.cases(usual=2)
@pytest.mark.parametrize("make", [optim.SGD, optim.AdamW, partial(optim.PerPartition, torch.optim.RMSprop)])
def test_a_schedule_may_set_one_weight_decay_for_all_partitions(make):
    models = network(), network()
    optimizers = [make(model, weight_decay=0.3) for model in models]
    (group,) = optimizers[1].param_groups
    group["weight_decay"] = 0.3
    for model, optimizer in zip(models, optimizers, strict=True):
        for k in (1, 2, 3):
            partnets.step_weights(model, optimizer, k, None, lambda _, model=model: loss(model))
            resumed = make(model)
            resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            optimizer = resumed
    assert all(map(torch.equal, *(model.parameters() for model in models)))


@pytest.mark.parametrize(("make", "name"), [(optim.SGD, "maximize"), (optim.AdamW, "amsgrad")])
def test_a_setting_of_torchs_that_a_group_is_given_later_is_not_ignored(make, name):
    model = network()
    optimizer = make(model, lr=0.1)
    before = [parameter.clone() for parameter in model.parameters()]
    optimizer.param_groups[0][name] = True
    with pytest.raises(ValueError, match=rf"{name}=True, which partnets.optim.{make.__name__} does not have; take"):
        partnets.step_weights(model, optimizer, 1, None, lambda _: loss(model))
    assert all(map(torch.equal, model.parameters(), before))


def tied(**options):
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    if options.pop("before", False):
        model[1].weight = model[0].weight
    model = partnets.partition(model, PROPORTIONS, **options)
    model[1].weight = model[0].weight
    return model


@pytest.mark.parametrize("scheme", ["weight", "node"])
@pytest.mark.parametrize("make", [optim.Adam, partial(optim.PerPartition, torch.optim.Adam)])
def test_a_tied_weight_with_two_different_partitions_is_refused(make, scheme):
    with pytest.raises(ValueError, match=r"1\.weight is another layer's parameter too.*before partnets.partition"):
        make(tied(scheme=scheme), lr=0.1)
    make(tied(scheme=scheme, before=True), lr=0.1)


def test_invalid_values_in_a_parameter_group_raise_before_any_change():
    model = network()
    optimizer = optim.Adam(model)
    with partnets.subnetwork(model, 1, 1):
        loss(model).backward()
    group = optimizer.param_groups[0]
    for name, value in (("lr", float("nan")), ("lr", "fast"), ("weight_decay", (0.1,)), ("betas", (0.9,)), ("eps", -1)):
        before, own = [parameter.clone() for parameter in model.parameters()], group[name]
        group[name] = value
        with pytest.raises((ValueError, TypeError), match=name):
            optimizer.step(update=1)
        group[name] = own
        assert all(map(torch.equal, model.parameters(), before))
    optimizer.step(update=1)


def test_a_gradient_of_another_dtype_is_named():
    layer = partnets.Linear(4, 3, proportions=(0.5, 0.5), seed=0)
    layer.weight.grad_dtype = None
    layer.weight.grad = torch.ones(3, 4, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"the weight of a Linear is torch\.bfloat16, and the parameter"):
        optim.SGD(layer).step(update=1)


def test_a_parameter_with_entries_that_share_memory_is_refused():
    layer = partnets.Linear(4, 3, proportions=(0.5, 0.5), seed=0)
    layer.weight = nn.Parameter(torch.zeros(1, 4).expand(3, 4))
    with pytest.raises(ValueError, match="weight has entries that share memory"):
        optim.SGD(layer)


@pytest.mark.parametrize("decay", [torch.tensor(0.1), np.array(0.1), torch.full((3,), 0.1), [0.1] * 3])
def test_a_decay_of_any_kind_of_number_is_that_of_all_partitions(decay):
    assert [float(one) for one in optim.SGD(network(), weight_decay=decay).param_groups[0]["weight_decay"]] == [
        pytest.approx(0.1)
    ] * 3
