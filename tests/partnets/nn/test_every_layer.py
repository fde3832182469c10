"""Properties of every layer: subnetworks and their gradients, isolation, merging, copies, files, dtypes and modes."""

import copy
import io
import pickle

import pytest
import torch
from layers import CASES, assert_learns, dense, owned, spoil
from small_network import CASES as PAIRS
from small_network import PROPORTIONS
from torch import nn
from torch.utils._pytree import tree_leaves

import partnets
from partnets.subnetworks.state import partitioned_modules, state_of

every_layer = pytest.mark.parametrize("name", CASES)
every_pair = pytest.mark.parametrize(("active", "update"), PAIRS)


def computed(layer, case):
    """Return the first output for the case's arguments, in evaluation mode."""
    with torch.no_grad():
        return tree_leaves(layer.eval()(*case.arguments()))[0]


def learned(layer, case):
    """Return the first output and the gradients of the case's arguments by the sum of its squares, in float64."""
    arguments = [x.detach().double().requires_grad_() if x.is_floating_point() else x for x in case.arguments()]
    y = tree_leaves(layer(*arguments))[0]
    if y.requires_grad:
        y.square().sum().backward()
    return y.detach(), [x.grad for x in arguments]


def clear(layer):
    for parameter in layer.parameters():
        nn.init.constant_(parameter, 7.0)


def state(layer):
    """Return a copy of all parameters and buffers, as bytes that NaN and -0 do not make equal to others."""
    return {name: value.detach().clone().reshape(-1).view(torch.uint8) for name, value in layer.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.cases(usual=60)
@every_layer
@every_pair
@pytest.mark.parametrize("options", [{}, {"scheme": "node"}, {"defaults": "zero"}, {"defaults": "stored"}], ids=str)
def test_a_subnetwork_and_its_gradients_are_those_of_the_dense_layer(name, active, update, options):
    case = CASES[name]
    layer = case.partitioned(**options).double()
    twin = dense(layer, active)
    with partnets.subnetwork(layer, active, update):
        output, of_inputs = learned(layer, case)
    expected, expected_of_inputs = learned(twin, case)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(of_inputs, expected_of_inputs, rtol=1e-10, atol=1e-11)
    assert_learns(layer, twin, active, update)


@pytest.mark.cases(usual=10)
@every_layer
def test_a_product_of_scales_has_a_gradient_where_one_is_zero(name):
    case = CASES[name]
    layer = case.partitioned().double()
    for module in partitioned_modules(layer):
        for vector, is_product in state_of(module).vectors.items():
            if is_product:
                module.get_buffer(f"{vector}_rows")[1].flatten()[0] = 0
                module.get_parameter(vector).data.flatten()[0] = 0
    twin = dense(layer, 3)
    for update in (1, 2, 3):
        layer.zero_grad()
        twin.zero_grad()
        with partnets.subnetwork(layer, 3, update):
            learned(layer, case)
        learned(twin, case)
        assert_learns(layer, twin, 3, update)


@pytest.mark.cases(usual=15)
@every_layer
def test_after_each_subnetwork_all_bits_are_as_before(name):
    layer = CASES[name].partitioned()
    for parameter in layer.parameters():
        parameter.data.flatten()[:2] = torch.tensor([-0.0, torch.nan]) if parameter.dim() > 1 else 0.5
    for module in partitioned_modules(layer):
        for vector, is_product in state_of(module).vectors.items():
            rows = module.get_buffer(f"{vector}_rows")
            module.get_parameter(vector).data.copy_(rows.prod(0) if is_product else rows.sum(0))
    before = state(layer)
    for active, update in PAIRS:
        with partnets.subnetwork(layer, active, update):
            pass
        assert same(state(layer), before)
    with partnets.subnetwork(layer, 1), partnets.subnetwork(layer, 3), partnets.subnetwork(layer, 2):
        pass
    assert same(state(layer), before)


@pytest.mark.cases(usual=30)
@every_layer
@pytest.mark.parametrize("k", [1, 2])
def test_nothing_of_later_partitions_reaches_a_subnetwork(name, k):
    case, found = CASES[name], []
    for change in (lambda layer: layer, lambda layer: spoil(layer, k)):
        layer = change(case.partitioned().double())
        with partnets.subnetwork(layer.eval(), k, k):
            output, of_inputs = learned(layer, case)
        grads = [parameter.grad for parameter in layer.parameters()]
        found.append([output, *(x for x in (*of_inputs, *grads) if x is not None)])
    assert all(map(torch.equal, *found)) and found[0][0].isfinite().all()


@pytest.mark.cases(usual=30)
@every_layer
@pytest.mark.parametrize(("active", "update"), [(1, 1), (2, 1), (3, 3)])
def test_a_step_changes_only_entries_of_its_partition(name, active, update):
    case = CASES[name]
    layer = case.partitioned()
    optimizer = partnets.optim.SGD(layer, lr=0.1, momentum=0.9)
    before = {k: owned(layer, k) for k in (1, 2, 3)}
    with partnets.subnetwork(layer, active, update):
        tree_leaves(layer(*case.arguments()))[0].square().sum().backward()
    optimizer.step(update=update)
    for k, values in before.items():
        changed = {path for path, value in owned(layer, k).items() if not torch.equal(value, values[path])}
        assert changed <= (values.keys() if k == update else set()) and bool(changed) == (k == update)


@pytest.mark.cases(usual=30)
@every_layer
@pytest.mark.parametrize("active", [1, 2, 3])
def test_merging_gives_the_dense_layer(name, active):
    case = CASES[name]
    layer = case.partitioned()
    merged, twin = partnets.merge(layer, active), dense(layer, active)
    assert type(merged) is type(case.make()) and not partitioned_modules(merged)
    for parameter in merged.parameters():
        assert parameter.requires_grad and parameter.is_leaf and not parameter._backward_hooks
    for module in merged.modules():
        assert not module._load_state_dict_post_hooks and not module._state_dict_pre_hooks
        assert not module._forward_hooks and not module._forward_pre_hooks
    torch.testing.assert_close(dict(merged.state_dict()), dict(twin.state_dict()), rtol=1e-6, atol=1e-6)
    with partnets.subnetwork(layer, active, 1):
        assert torch.equal(computed(merged, case), computed(layer, case))
    case.make().load_state_dict(merged.state_dict())
    before = copy.deepcopy(list(layer.parameters()))
    clear(merged)
    assert all(map(torch.equal, layer.parameters(), before))


@pytest.mark.cases(usual=15)
@every_layer
@pytest.mark.parametrize("defaults", ["seed", "zero", "stored"])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_compute_the_same_and_share_nothing(name, duplicate, defaults):
    case = CASES[name]
    layer = case.partitioned(defaults=defaults)
    twin = duplicate(layer)
    before = state(layer)
    for active in (1, 2, 3):
        with partnets.subnetwork(layer, active), partnets.subnetwork(twin, active):
            assert torch.equal(computed(twin, case), computed(layer, case))
    clear(twin)
    assert same(state(layer), before) and not torch.equal(computed(twin, case), computed(layer, case))


@pytest.mark.cases(usual=15)
@every_layer
def test_a_state_dict_has_tensors_only_and_keeps_torchs_names(name):
    layer = CASES[name].partitioned()
    found, theirs = layer.state_dict(), CASES[name].make().state_dict()
    assert all(isinstance(value, torch.Tensor) for value in found.values())
    assert {key: found[key].shape for key in theirs} == {key: value.shape for key, value in theirs.items()}
    ends = "_partition", "_defaults", "_stored", "_rows", "statistics_estimated", "learned_from"
    assert all(key.endswith(ends) for key in found.keys() - theirs.keys())


@pytest.mark.cases(usual=15)
@every_layer
@pytest.mark.parametrize("defaults", ["seed", "zero", "stored"])
def test_a_file_restores_every_subnetwork_also_on_the_meta_device(name, defaults):
    case, file = CASES[name], io.BytesIO()
    saved = case.partitioned(defaults=defaults)
    torch.save(saved.state_dict(), file)
    for device, assign in (("cpu", False), ("meta", True)):
        loaded = partnets.partition(case.make(), PROPORTIONS, seed=5, defaults=defaults).to(device)
        file.seek(0)
        loaded.load_state_dict(torch.load(file, weights_only=True), assign=assign)
        if assign and name == "tied weights":
            with pytest.raises(ValueError, match="two parameters that share memory"), partnets.subnetwork(loaded, 1):
                pass
            loaded.head.weight = loaded.table.weight
        for active in (1, 2, 3):
            with partnets.subnetwork(saved, active), partnets.subnetwork(loaded, active):
                assert torch.equal(computed(loaded, case), computed(saved, case))


@pytest.mark.cases(usual=15)
@every_layer
def test_class_dtype_mode_hooks_and_frozen_parameters_stay(name):
    dense = CASES[name].make().double().eval()
    for parameter in dense.parameters():
        parameter.requires_grad_(False)
    calls, before = [], list(dense.parameters())
    dense.register_forward_hook(lambda *_: calls.append(1))
    layer = partnets.partition(dense, PROPORTIONS, defaults="seed", frozen=True)
    assert layer is dense and all(one is other for one, other in zip(layer.parameters(), before, strict=True))
    x = [x.detach().double() if x.is_floating_point() else x for x in CASES[name].arguments()]
    output = tree_leaves(layer(*x))[0]
    assert calls == [1] and output.dtype == torch.float64 and not output.requires_grad and not layer.training
    assert not any(parameter.requires_grad for parameter in layer.parameters())
    assert not any(parameter.requires_grad for parameter in partnets.merge(layer).parameters())


@pytest.mark.cases(usual=15)
@every_layer
def test_a_fresh_layer_starts_at_its_defaults_in_every_subnetwork(name):
    case, outputs = CASES[name], []
    torch.manual_seed(0)
    layer = partnets.partition(case.make(), PROPORTIONS, defaults="seed")
    for active in (1, 2, 3):
        with partnets.subnetwork(layer, active):
            outputs.append(computed(layer, case))
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
