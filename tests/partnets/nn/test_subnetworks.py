"""Subnetworks of a whole network: outputs, gradients, nested contexts, and refused calls."""

import copy

import pytest
import torch
from layers import assert_learns, dense
from small_network import perturbed
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import partnets
from partnets.subnetworks.parameters import partitioned_parameters
from partnets.subnetworks.state import partitioned_modules, state_of

PROPORTIONS = (0.8, 0.1, 0.1)


def network():
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5), nn.GELU(), nn.Flatten(), nn.Linear(5 * 3 * 4, 7), nn.LayerNorm(7),
        nn.PReLU(), nn.Linear(7, 3),
    )  # fmt: skip
    return perturbed(partnets.partition(layers.double(), PROPORTIONS, seed=1), 0.1)


def inputs():
    return torch.randn(4, 2, 5, 6, dtype=torch.float64)


def now(model):
    """Return the pairs of active subnetwork and partition that learns that modules are in."""
    return {(state.active, state.update) for state in map(state_of, partitioned_modules(model))}


def test_outside_subnetworks_all_partitions_are_active_and_the_last_learns():
    model, x = network(), inputs()
    twin = dense(model, 3)
    partnets.optim.SGD(model, lr=0.1)  # from which on gradients are masked
    torch.testing.assert_close(y := model(x), z := twin(x), rtol=1e-12, atol=1e-12)
    y.square().sum().backward()
    z.square().sum().backward()
    assert_learns(model, twin, 3, 3)


def test_gradients_of_several_subnetworks_wait_for_the_step_of_their_partition():
    model, x = network().eval(), inputs()
    owners, expected = partitioned_parameters(model), {}

    def learn(*updates):
        model.zero_grad()
        for one in owners:
            one.clear_gradients()
        for k in updates:
            with partnets.subnetwork(model, k, k):
                model(x).square().sum().backward()

    def gradients(k):
        found = [one.gradient(k) for one in owners]
        return [grad if one.is_vector else grad[one.partition.mask(k)] for one, grad in zip(owners, found, strict=True)]

    for k in (1, 2, 3):
        learn(k)
        expected[k] = [grad.clone() * (2 if k == 1 else 1) for grad in gradients(k)]
    learn(1, 2, 1, 3)
    for k in (1, 2, 3):
        torch.testing.assert_close(gradients(k), expected[k], rtol=1e-12, atol=1e-12)


def test_contexts_nest_and_are_undone_by_exceptions():
    model, x, states = network().eval(), inputs(), []
    expected = {k: dense(model, k)(x) for k in (1, 2, 3)}

    def look():
        states.append(now(model))
        ((active, _),) = states[-1]
        torch.testing.assert_close(model(x), expected[active], rtol=1e-12, atol=1e-12)

    with pytest.raises(KeyError), partnets.subnetwork(model, 2, 1):
        look()
        with partnets.subnetwork(model, 1):
            look()
        look()
        with partnets.subnetwork(model, 3, 2):
            look()
        raise KeyError
    look()
    assert states == [{(2, 1)}, {(1, None)}, {(2, 1)}, {(3, 2)}, {(3, 3)}]


def test_a_submodule_can_be_in_another_subnetwork_than_its_model():
    model, x = network().eval(), inputs()
    first, second, whole = (dense(model, k) for k in (1, 2, 3))
    with partnets.subnetwork(model, 1):
        with partnets.subnetwork(model[4:], 2):
            torch.testing.assert_close(model(x), second[4:](first[:4](x)), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(model(x), first(x), rtol=1e-12, atol=1e-12)
    with partnets.subnetwork(model[4:], 2):
        torch.testing.assert_close(model(x), second[4:](whole[:4](x)), rtol=1e-12, atol=1e-12)
        with partnets.subnetwork(model, 1):
            torch.testing.assert_close(model(x), first(x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model(x), whole(x), rtol=1e-12, atol=1e-12)


def test_a_part_that_is_tied_to_another_part_is_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    partnets.partition(model, PROPORTIONS)
    for part in (model[1], nn.Sequential(model[1])):
        with pytest.raises(RuntimeError, match="enter subnetworks of the whole model"), partnets.subnetwork(part, 1):
            pytest.fail("entered")
    with partnets.subnetwork(model, 1, 1):
        model(torch.ones(2, 4)).sum().backward()
    assert not model[1].weight.grad[~partnets.partitions(model)["1.weight"].mask(1)].any()


def test_writing_into_weights_outside_is_taken_over_and_into_sums_refused():
    model, x = network().eval(), inputs()
    with partnets.subnetwork(model, 1):
        pass
    with torch.no_grad():
        model[0].weight.clamp_(-0.1, 0.1)
    nn.init.ones_(model[7].weight)
    model[4].weight = nn.Parameter(torch.randn_like(model[4].weight))
    for k in (1, 2, 3):
        expected = dense(model, k)(x)
        with partnets.subnetwork(model, k, k):
            torch.testing.assert_close(y := model(x), expected, rtol=1e-12, atol=1e-12)
            y.sum().backward()
        assert not model[4].weight.grad[~partnets.partitions(model)["4.weight"].mask(k)].any()
        model.zero_grad()
    with torch.no_grad():
        model[5].weight.clamp_(0, 0.5)
    refused = pytest.raises(RuntimeError, match=r"weight of LayerNorm was written into, .* weight_rows \[C, \.\.\.\]")
    with refused, partnets.subnetwork(model, 1):
        pass


class Collecting(nn.Module):
    """A network that keeps an intermediate output, raises if asked to, and returns its output in an object."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.fails = nn.Linear(6, 5), nn.Linear(5, 3), False

    def forward(self, x):
        self.kept = self.first(x)
        if self.fails:
            raise KeyError("asked to")
        return self.second(self.kept.relu())


def kept(model, x):
    model(x)
    return model.kept


def part_after_a_failure(model, x):
    model.fails = True
    with pytest.raises(KeyError):
        model(x)
    return model.second(model.kept)


def own_call(model, x):
    return model.forward(x)


def of_a_copy(model, x):
    return model(x)


@pytest.mark.parametrize("is_learned", [False, True])
@pytest.mark.parametrize("call", [own_call, kept, part_after_a_failure, of_a_copy, Collecting.__call__])
def test_no_part_of_a_graph_escapes_to_another_subnetwork(call, is_learned):
    torch.manual_seed(0)
    model = partnets.partition(Collecting(), (0.5, 0.3, 0.2), seed=1)
    if call is of_a_copy:
        with partnets.subnetwork(model, 1, 1):
            model(torch.randn(2, 6)).sum().backward()
        model.zero_grad()
        del model.kept
        model = copy.deepcopy(model)
    x = torch.randn(4, 6, requires_grad=is_learned)
    for other in ((3, 2), (1, 1), (3, None), None):
        with partnets.subnetwork(model, 3, 3):
            output = call(model, x)
        with pytest.raises(RuntimeError, match=r"computed by subnetwork active=3, update=3|modified by an inplace"):
            if other is None:
                with partnets.subnetwork(model, 2, 2):
                    torch.autograd.grad(output.sum(), model.first.weight)
            else:
                with partnets.subnetwork(model, *other):
                    output.sum().backward()
        assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(state.entry.running and state.entry.thread for state in map(state_of, partitioned_modules(model)))


def test_writing_into_data_inside_leaves_the_defaults_of_later_partitions():
    model = network()
    partition, before = partnets.partitions(model)["4.weight"], model[4].weight.detach().clone()
    with partnets.subnetwork(model, 2, 2):
        model[4].weight.data.mul_(0.5)
    assert torch.equal(model[4].weight, torch.where(partition.mask(3), before, 0.5 * before))
    with partnets.subnetwork(model, 1):
        defaults = partition.defaults.values(before.shape, before.dtype)
        assert torch.equal(model[4].weight[~partition.mask(1)], defaults[~partition.mask(1)])


def test_averages_of_maps_are_refused():
    model = network()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    for _ in range(2):
        average.update_parameters(model)
    refused = pytest.raises(RuntimeError, match=r"weight_partition of a \w+, .* written into; .*partnets\.merge")
    with refused, partnets.subnetwork(average.module, 1):
        pass
    with refused:
        average.module.state_dict()


def accumulated():
    model, x = network(), inputs()
    for k in (1, 2):
        with partnets.subnetwork(model, k, k):
            model(x).square().sum().backward()
    return model


def test_changing_gradients_while_others_wait_is_refused():
    model = accumulated()
    for parameter in model.parameters():
        parameter.grad /= 2
    with pytest.raises(RuntimeError, match="was changed while that of partition 1 waits"):
        partnets.optim.SGD(model).step(update=1)


def test_gradients_that_are_set_to_0_are_forgotten_with_those_that_wait():
    model = accumulated()
    model.zero_grad(set_to_none=False)
    x = inputs()
    with partnets.subnetwork(model, 1, 1):
        expected = torch.autograd.grad(model(x).square().sum(), model[4].bias)[0]
        model(x).square().sum().backward()
    torch.testing.assert_close(model[4].bias.grad, expected)


def test_a_gradient_waits_while_that_of_another_partition_is_only_returned():
    model, x = network(), inputs()
    with partnets.subnetwork(model, 1, 1):
        model(x).square().sum().backward()
    expected = model[4].bias.grad.clone()
    with partnets.subnetwork(model, 2, 2):
        torch.autograd.grad(model(x).square().sum(), list(model.parameters()), allow_unused=True)
    rows = model[4].bias_rows.clone()
    partnets.optim.SGD(model, lr=1.0).step(update=1)
    torch.testing.assert_close(model[4].bias_rows[0], rows[0] - expected)


def test_gradients_that_are_returned_and_assigned_belong_to_no_partition_before_the_step():
    model, x = network(), inputs()
    optimizer = partnets.optim.SGD(model, lr=1.0)
    for k in (1, 2):  # without zero_grad
        with partnets.subnetwork(model, k, k):
            grads = torch.autograd.grad(model(x).square().sum(), list(model.parameters()), allow_unused=True)
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            parameter.grad = grad
        before, grad = model[4].bias_rows[k - 1].clone(), model[4].bias.grad.clone()
        optimizer.step(update=k)
        torch.testing.assert_close(model[4].bias_rows[k - 1], before - grad)


def test_a_gradient_of_the_gradient_is_computed_inside():
    model, x = network().eval(), inputs().requires_grad_()
    twin = dense(model, 2)
    with partnets.subnetwork(model, 2, 2):
        (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        first.square().sum().backward()
    (theirs,) = torch.autograd.grad(twin(x).square().sum(), x, create_graph=True)
    theirs.square().sum().backward()
    torch.testing.assert_close(first, theirs, rtol=1e-12, atol=1e-12)
    assert_learns(model, twin, 2, 2)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:Dynamo")
def test_compiled_contexts_mask_gradients_once():
    torch.compiler.reset()
    model, x = network(), inputs()
    with partnets.subnetwork(model, 2, 2):
        expected = torch.autograd.grad(model(x).square().sum(), model[5].weight)[0]

    @torch.compile(backend="eager")
    def evaluated(k):
        with partnets.subnetwork(model, k), torch.no_grad():
            return model(x)

    for k in (1, 2, 3):
        evaluated(k)
    assert {len(parameter._backward_hooks) for parameter in model.parameters()} == {1}
    with partnets.subnetwork(model, 2, 2):
        model(x).square().sum().backward()
    torch.testing.assert_close(model[5].weight.grad, expected)


@pytest.mark.parametrize(
    ("active", "update"), [(0, None), (4, None), (2, 3), (2, 0), (True, None), (1.0, None), ("2", None)]
)
def test_numbers_out_of_range_raise_and_change_nothing(active, update):
    model = network()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="pass an int from 1"), partnets.subnetwork(model, active, update):
        pass
    assert now(model) == {(3, 3)}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Linear(2, 2), r"partnets\.partition"),
        (lambda: nn.ModuleList(partnets.Linear(4, 4, proportions=p) for p in ((0.5, 0.5), PROPORTIONS)), "differ"),
    ],
)
def test_models_without_one_number_of_partitions_raise(make, message):
    with pytest.raises(ValueError, match=message), partnets.subnetwork(make(), 1):
        pass


def is_trained_by_torch(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(inputs()).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def has_another_shape(model):
    model[4].weight = nn.Parameter(torch.zeros(7, 61, dtype=torch.float64))


def has_a_resized_bias(model):
    model[4].bias = nn.Parameter(torch.zeros(6, dtype=torch.float64))


def has_another_bias(model):
    model[4].bias = nn.Parameter(torch.ones(7, dtype=torch.float64))


def shares_memory(model):
    model[7].weight.data = model[4].weight.data.view(-1)[3:24].view(3, 7)


def has_a_written_bias(model):
    model[4].bias.data.fill_(0.5)


def has_another_dtype(model):
    model[4].bias.data = model[4].bias.data.float()


def has_a_map_that_nobody_filled(model):
    model[4].weight_partition = torch.full_like(model[4].weight_partition, 255)


def is_an_average(model):
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for one in (model, perturbed(copy.deepcopy(model), 0.1)):
        average.update_parameters(one)
    with torch.no_grad():  # of the parameters only
        for mine, other in zip(model.parameters(), average.module.parameters(), strict=True):
            mine.copy_(other)


def test_a_parameter_that_another_partitioned_model_has_is_refused_before_anything_changes():
    one, other = nn.Sequential(nn.Linear(4, 3)), nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    other[0].weight = one[0].weight
    partnets.partition(one, PROPORTIONS)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match=r"0\.weight is a parameter of another model"):
        partnets.partition(other, PROPORTIONS)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
    del one  # its parameter is free again
    partnets.partition(other, PROPORTIONS)


@pytest.mark.parametrize("is_entered", [False, True])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (is_trained_by_torch, RuntimeError, r"was written into, but is the .*_rows \[C, \.\.\.\] instead"),
        (has_a_written_bias, RuntimeError, "bias of Linear was written into"),
        (has_another_bias, RuntimeError, "bias of Linear was written into"),
        (has_another_shape, ValueError, "does not fit its partitions(.|\n)*427 entries"),
        (has_a_resized_bias, ValueError, r"has shape \(6,\), and its vectors \(7,\)"),
        (has_another_dtype, RuntimeError, r"\[7\] of torch\.float32 does not fit its rows"),
        (shares_memory, ValueError, r"4\.weight and 7\.weight are two parameters that share memory"),
        (has_a_map_that_nobody_filled, RuntimeError, "weight_partition of a Linear, .* written into"),
        (is_an_average, RuntimeError, "was written into, but is the"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_parameters_that_no_longer_fit_their_partitions_are_refused(change, error, message, is_entered):
    model = network()
    if is_entered:
        with partnets.subnetwork(model, 1):
            pass
    change(model)
    with pytest.raises(error, match=message), partnets.subnetwork(model, 1):
        pass
    assert now(model) == {(3, 3)}


def test_parameters_may_move_in_memory_inside_of_a_subnetwork():
    model = network()
    before = [tensor.clone() for tensor in model.state_dict().values()]
    for move in (lambda: None, model.share_memory, lambda: None):
        with partnets.subnetwork(model, 1):
            move()
        assert all(map(torch.equal, model.state_dict().values(), before))
