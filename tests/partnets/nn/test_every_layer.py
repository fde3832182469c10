"""Properties of every layer: merging, copies, files, dtypes, modes and hooks."""

import copy
import io
import pickle

import pytest
import torch
from layers import CASES
from torch import nn
from torch.utils._pytree import tree_leaves

import partnets

every_layer = pytest.mark.parametrize("name", CASES)


def computed(layer, case):
    """Return the first output for the case's arguments, without noise."""
    return tree_leaves(layer.eval()(*case.arguments()))[0].detach()


def clear(layer):
    for parameter in layer.parameters():
        nn.init.constant_(parameter, 7.0)


@every_layer
@pytest.mark.parametrize("active", [1, 2, 3])
def test_merging_gives_the_ordinary_layer(name, active):
    case = CASES[name]
    layer = case.partitioned()
    merged = partnets.merge(layer, active)
    assert type(merged) is type(case.make()) and not hasattr(merged, "active")
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in merged.parameters())
    with partnets.subnetwork(layer, active):
        torch.testing.assert_close(computed(merged, case), computed(layer, case))
    case.make().load_state_dict(merged.state_dict())


@every_layer
def test_a_merged_layer_shares_no_memory(name):
    layer = CASES[name].partitioned()
    before = copy.deepcopy(list(layer.parameters()))
    clear(partnets.merge(layer, 1))
    assert all(map(torch.equal, layer.parameters(), before))


@every_layer
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_compute_the_same_and_share_nothing(name, duplicate):
    case = CASES[name]
    layer = case.partitioned()
    twin = duplicate(layer)
    expected = computed(layer, case)
    assert torch.equal(computed(twin, case), expected)
    clear(twin)
    assert torch.equal(computed(layer, case), expected) and not torch.equal(computed(twin, case), expected)


@pytest.mark.cases(usual=15)
@every_layer
def test_a_file_restores_every_subnetwork_also_on_the_meta_device(name):
    case, file = CASES[name], io.BytesIO()
    saved = case.partitioned()
    torch.save(saved.state_dict(), file)
    for device, assign in (("cpu", False), ("meta", True)):
        loaded = partnets.partition(nn.Sequential(case.make()), (0.5, 0.3, 0.2), seed=5, defaults="seed")[0].to(device)
        file.seek(0)
        loaded.load_state_dict(torch.load(file, weights_only=True), assign=assign)
        for active in (1, 2, 3):
            with partnets.subnetwork(saved, active), partnets.subnetwork(loaded, active):
                assert torch.equal(computed(loaded, case), computed(saved, case))


@every_layer
def test_dtype_mode_hooks_and_frozen_parameters_stay(name):
    ordinary = CASES[name].make().double().eval()
    for parameter in ordinary.parameters():
        parameter.requires_grad_(False)
    calls = []
    ordinary.register_forward_hook(lambda *_: calls.append(1))
    layer = partnets.partition(nn.Sequential(ordinary), (0.5, 0.3, 0.2), defaults="seed", frozen=True)[0]
    x = [x.detach().double() if x.is_floating_point() else x for x in CASES[name].arguments()]
    output = tree_leaves(layer(*x))[0]
    assert calls == [1] and output.dtype == torch.float64 and not output.requires_grad and not layer.training
    assert not any(parameter.requires_grad for parameter in layer.parameters())
    assert not any(parameter.requires_grad for parameter in partnets.merge(layer).parameters())


@every_layer
def test_the_output_does_not_depend_on_what_is_updated(name):
    case, outputs = CASES[name], []
    layer = case.partitioned()
    for update in (None, 1, 2, 3):
        with partnets.subnetwork(layer, 3, update):
            outputs.append(computed(layer, case))
    assert all(torch.equal(output, outputs[0]) for output in outputs)
