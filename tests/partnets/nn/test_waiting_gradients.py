"""Gradients of vectors that wait for the step of their partition, and what users do with `.grad` meanwhile."""

import copy

import pytest
import torch
from torch import nn

import partnets
from partnets import optim

PROPORTIONS = (0.5, 0.3, 0.2)


@pytest.fixture
def model():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2)).double()
    model = partnets.partition(layers, PROPORTIONS, seed=1)
    with torch.no_grad():
        for name, rows in model.named_buffers():
            if name.endswith("rows"):
                rows += 0.3 * torch.randn_like(rows)
    return model


def loss(model):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 3, generator=generator, dtype=torch.float64)
    return model(x).square().mean()


def returned(model, k):
    """Return the gradients of partition k, and leave `.grad` as it is."""
    with partnets.subnetwork(model, k, k):
        return torch.autograd.grad(loss(model), list(model.parameters()))


def backward(model, k, *, factor=1.0, masked=True):
    with partnets.subnetwork(model, k, k, masked=masked):
        (factor * loss(model)).backward()


def rows_of(model):
    return [rows.clone() for name, rows in model.named_buffers() if name.endswith("rows")]


def assert_stepped(model, k, gradients, *, scale=1.0):
    """Step partition k by SGD with a rate of 1, and check how the vectors of all partitions move."""
    expected = [grad for (name, _), grad in zip(model.named_parameters(), gradients, strict=True) if is_vector(name)]
    before = rows_of(model)
    optim.SGD(model, lr=1.0).step(update=k)
    for old, new, grad in zip(before, rows_of(model), expected, strict=True):
        old[k - 1] -= scale * grad
        torch.testing.assert_close(new, old, rtol=1e-12, atol=1e-12)


def is_vector(name):
    return name not in ("0.weight", "3.weight")


def test_a_hook_that_raises_leaves_the_gradient_of_another_partition(model):
    def check(grad):
        if not grad.isfinite().all():
            raise ValueError("NaN")

    expected = returned(model, 1)
    model[0].bias.register_hook(check)
    backward(model, 1)
    with pytest.raises(ValueError, match="NaN"):
        backward(model, 2, factor=float("nan"))
    for parameter in model.parameters():
        if parameter.grad is not None and not parameter.grad.isfinite().all():
            parameter.grad = None
    before = model[0].bias_rows[0].clone()
    optim.SGD(model, lr=1.0).step(update=1)
    torch.testing.assert_close(model[0].bias_rows[0], before - expected[1])


@pytest.mark.parametrize("clear", [lambda model: model.zero_grad(), lambda model: model.zero_grad(set_to_none=False)])
def test_gradients_returned_for_another_partition_do_not_keep_cleared_ones(model, clear):
    backward(model, 1, factor=5.0)
    returned(model, 2)
    clear(model)
    expected = returned(model, 1)
    backward(model, 1)
    assert_stepped(model, 1, expected)


def test_gradients_returned_for_another_partition_leave_those_that_are_clipped(model):
    expected = returned(model, 1)
    backward(model, 1)
    returned(model, 2)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert_stepped(model, 1, expected, scale=(1e-3 / (norm + 1e-6)).item())


def test_a_lookahead_leaves_the_gradients_of_another_partition(model):
    decay = partnets.hyper.WeightDecay([model[0], model[3]], 1e-2)
    network = nn.Sequential(model, decay)
    optimizer, psi = optim.SGD(network, lr=0.1), torch.optim.SGD(decay.parameters(), lr=0.0)
    expected = returned(model, 2)
    backward(model, 2)

    def value(batch):
        return loss(network)

    partnets.step_lookahead(network, optimizer, psi, {2: (None, [None])}, value, value)
    assert_stepped(model, 2, expected)


def unscaled(model):
    """Unscale gradients as GradScaler does, which counts as no write."""
    grads = [parameter.grad for parameter in model.parameters()]
    infinite, factor = torch.zeros(1), torch.tensor(0.5)
    torch._amp_foreach_non_finite_check_and_unscale_(grads, infinite, factor)


def clipped_data(model):
    for parameter in model.parameters():
        parameter.grad.data.mul_(0.5)


@pytest.mark.parametrize("change", [unscaled, clipped_data])
def test_changes_that_torch_does_not_count_are_refused_while_gradients_wait(model, change):
    for k in (1, 2):
        backward(model, k)
    change(model)
    with pytest.raises(RuntimeError, match="was changed while that of partition 1 waits"):
        optim.SGD(model).step(update=1)


def test_each_gradient_may_be_divided_before_the_next_partition_learns(model):
    expected = [returned(model, k) for k in (1, 2, 3)]
    for k in (1, 2, 3):
        backward(model, k)
        for parameter in model.parameters():
            parameter.grad /= 2
    optimizer = optim.SGD(model, lr=1.0)
    for k in (1, 2, 3):
        before = model[1].weight_rows[k - 1].clone()
        optimizer.step(update=k)
        torch.testing.assert_close(model[1].weight_rows[k - 1], before - expected[k - 1][2] / 2)


def test_gradients_without_masks_are_scaled_for_a_step_inside_and_after_an_error(model):
    expected = returned(model, 2)
    with partnets.subnetwork(model, 2, 2, masked=False):
        loss(model).backward()
        assert_stepped(model, 2, expected)
    optim.SGD(model).zero_grad()
    expected = returned(model, 2)
    with pytest.raises(KeyError), partnets.subnetwork(model, 2, 2, masked=False):
        loss(model).backward()
        raise KeyError
    torch.testing.assert_close(model[1].weight.grad, expected[2])


def test_gradients_without_masks_are_scaled_if_returned_or_accumulated_in_another_subnetwork(model):
    expected = returned(model, 2)
    with partnets.subnetwork(model, 2, 2, masked=False):
        (found,) = torch.autograd.grad(loss(model), [model[1].weight])
    torch.testing.assert_close(found, expected[2])
    others = returned(model, 3)
    with partnets.subnetwork(model, 2, 2, masked=False):
        loss(model).backward()
        with partnets.subnetwork(model, 3, 3):
            loss(model).backward()
    assert_stepped(model, 3, others)


def test_hooks_of_parameters_read_masked_gradients_in_a_step(model):
    seen, expected = [], returned(model, 2)
    model[1].weight.register_hook(lambda grad: seen.append(grad.clone()))
    model[0].weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    partnets.step_weights(model, optim.SGD(model, lr=0.1), 2, None, lambda batch: loss(model))
    assert {tuple(grad.shape) for grad in seen} == {(4,), (4, 3)}
    for grad in seen:
        torch.testing.assert_close(grad, expected[2 if grad.dim() == 1 else 0])


def test_an_assigned_gradient_steps_the_partition_that_is_asked_for(model):
    backward(model, 1)
    optimizer = optim.SGD(model, lr=1.0)
    optimizer.step(update=1)
    model.zero_grad()
    twin = copy.deepcopy(model)
    backward(twin, 2)
    for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
        parameter.grad = other.grad.clone()
    assert_stepped(model, 2, returned(model, 2))
    with pytest.raises(RuntimeError, match="gradient of partition 3 is 0"):
        optimizer.step(update=3)


@pytest.mark.parametrize("writes", [1, 2])
def test_rows_may_be_written_into_after_a_conversion(model, writes):
    model.float()
    with torch.no_grad():
        for _ in range(writes):
            model[0].bias_rows[1].add_(1.0)
    with partnets.subnetwork(model, 3):
        torch.testing.assert_close(model[0].bias.detach(), model[0].bias_rows.sum(0))
