"""Random masks, InputMask and ConcreteDropout: their distribution, their mean, and the gradient of their rates."""

import math

import pytest
import torch
import torch.nn.functional as F

from partnets import hyper


def test_a_mask_is_nearly_binary_and_as_probable_as_it_says():
    torch.manual_seed(0)
    mask = hyper.InputMask(3, probability=0.8)
    drawn = mask(torch.ones(5000, 3)).detach()
    assert ((drawn < 0.05) | (drawn > 0.95)).float().mean() > 0.8
    torch.testing.assert_close((drawn > 0.5).float().mean(0), torch.full((3,), 0.8), rtol=0, atol=0.02)
    assert mask.values() == pytest.approx({"0": 0.8, "1": 0.8, "2": 0.8})


def test_a_mask_in_evaluation_is_its_mean():
    x = torch.randn(4, 3)
    torch.testing.assert_close(hyper.InputMask(3, probability=0.3).eval()(x), 0.3 * x)


def test_gradients_reach_every_probability():
    mask = hyper.InputMask(3, temperature=0.5)
    F.mse_loss(mask(torch.ones(64, 3)), torch.tensor([1.0, 0.0, 1.0]).expand(64, 3)).backward()
    assert mask.logits.grad.sign().tolist() == [-1.0, 1.0, -1.0]


@pytest.mark.parametrize(
    "arguments", [{"features": 0}, {"probability": 1.0}, {"probability": 0.0}, {"temperature": 0.0}]
)
def test_masks_out_of_range_raise(arguments):
    (name,) = arguments
    with pytest.raises(ValueError, match=f"{name}=.*pass"):
        hyper.InputMask(**{"features": 2} | arguments)


@pytest.mark.parametrize(("features", "shape"), [(4, (5, 1)), (1, (5, 4)), (4, (5, 3)), (4, ())])
def test_another_number_of_features_raises(features, shape):
    with pytest.raises(ValueError, match=rf"pass \[\.\.\., {features}\], an entry for each feature"):
        hyper.InputMask(features)(torch.rand(shape))


def test_the_gradient_at_a_rate_of_exactly_0_is_finite():
    dropout = hyper.ConcreteDropout(0.5, range=hyper.clamped(0, 0.9))
    with torch.no_grad():
        dropout.rate.raw.zero_()
    dropout(torch.ones(50)).sum().backward()
    assert dropout.rate.raw.grad.isfinite()


@pytest.mark.parametrize("kind", [hyper.Affine, hyper.ConcreteDropout, lambda: hyper.InputMask(4)])
def test_they_can_be_made_without_memory(kind):
    with torch.device("meta"):
        assert all(parameter.is_meta for parameter in kind().parameters())


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.8])
def test_dropout_drops_at_its_rate_and_keeps_the_mean(rate):
    torch.manual_seed(0)
    result = hyper.ConcreteDropout(rate)(torch.ones(300, 100)).detach()
    assert (result < 0.5 / (1 - rate)).float().mean() == pytest.approx(rate, abs=0.01)
    # The relaxed mask's mean differs from 1 - p, by at most 2 % at temperature 0.1.
    assert result.mean() == pytest.approx(1.0, abs=0.03)


def test_dropout_is_the_published_formula():
    x, rate, temperature = torch.randn(20, 7), 0.3, 0.1
    dropout = hyper.ConcreteDropout(rate, temperature=temperature)
    torch.manual_seed(0)
    result = dropout(x).detach()
    torch.manual_seed(0)
    kept = torch.rand(20, 7)
    # Gal et al. (2017), Equation 5, with u = 1 - kept.
    dropped = torch.sigmoid((math.log(rate / (1 - rate)) + (1 - kept).log() - kept.log()) / temperature)
    torch.testing.assert_close(result, x * (1 - dropped) / (1 - rate), rtol=1e-4, atol=1e-5)


def test_dropout_in_evaluation_is_the_identity():
    x = torch.randn(4, 3)
    assert torch.equal(hyper.ConcreteDropout(0.5).eval()(x), x)


@pytest.mark.parametrize("range", [hyper.probability, hyper.interval(0.0, 0.9)])
@pytest.mark.parametrize("rate", [0.05, 0.4, 0.8])
def test_the_gradient_of_the_rate_is_a_finite_difference_under_common_noise(rate, range):
    dropout = hyper.ConcreteDropout(rate, temperature=0.5, range=range).double()
    x, weight = torch.randn(2, 30, 10, dtype=torch.float64)

    def loss():
        torch.manual_seed(0)
        return (dropout(x) * weight).sum().square()

    def rate_and_loss(step):
        with torch.no_grad():
            dropout.rate.raw += step
            result = dropout.rate().item(), loss().item()
            dropout.rate.raw -= step
        return result

    (above, loss_above), (below, loss_below) = rate_and_loss(1e-6), rate_and_loss(-1e-6)
    raw_gradient = torch.autograd.grad(loss(), dropout.rate.raw)[0]
    rate_gradient = raw_gradient / torch.autograd.grad(dropout.rate(), dropout.rate.raw)[0]
    assert rate_gradient.item() == pytest.approx((loss_above - loss_below) / (above - below), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("range", [hyper.probability, hyper.interval(0.0, 0.9), hyper.interval(0.05, 1.0)])
@pytest.mark.parametrize("raw", [-200.0, 200.0])
def test_extreme_rates_stay_in_their_range_and_finite(range, raw, dtype):
    torch.manual_seed(0)
    dropout = hyper.ConcreteDropout(0.1, range=range).to(dtype)
    with torch.no_grad():
        dropout.rate.raw.fill_(raw)
    result = dropout(torch.ones(1000, dtype=dtype))
    result.sum().backward()
    assert result.isfinite().all() and dropout.rate.raw.grad.isfinite()
    assert range.low <= dropout.values()["rate"] <= range.high + 1e-2 * (dtype == torch.bfloat16)


@pytest.mark.parametrize("module", [hyper.InputMask(8), hyper.ConcreteDropout(0.3)], ids=["mask", "dropout"])
@pytest.mark.parametrize("training", [True, False])
def test_masks_keep_the_inputs_dtype(module, training):
    x = torch.ones(2, 8, dtype=torch.bfloat16)
    assert module.train(training)(x).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rate": 0.0}, r"rate=0\.0; pass a number between 0 and 1"),
        ({"rate": 0.95, "range": hyper.interval(0.0, 0.9)}, r"rate=0\.95; pass a number between 0 and 0\.9"),
        ({"range": hyper.positive}, r"\(0, inf\); pass one inside \[0, 1\]"),
        ({"temperature": -1.0}, r"temperature=-1\.0; pass a positive number"),
    ],
)
def test_dropout_out_of_range_raises(arguments, message):
    with pytest.raises(ValueError, match=message):
        hyper.ConcreteDropout(**arguments)


def test_no_mask_is_kept_for_the_gradient_of_the_rate():
    """Check that the mask is redrawn: only the input is saved; gradients and subsequent noise are unchanged."""
    dropout, x, kept = hyper.ConcreteDropout(0.3), torch.randn(50, 40, requires_grad=True), []

    def gradients(call):
        torch.manual_seed(0)
        y = call(x)
        following = torch.rand(())
        found = torch.autograd.grad(y.square().sum(), (x, dropout.rate.raw))
        return y, following, *found, torch.rand(())

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        dropout(x)
    assert {tensor.data_ptr() for tensor in kept if tensor.numel() > 1} == {x.data_ptr()}
    with torch.autograd.forward_ad.dual_level():  # uses the plain implementation
        expected = gradients(dropout)
    for ours, definition in zip(gradients(dropout), expected, strict=True):
        assert torch.equal(ours, definition)


def test_its_second_derivatives_are_right():
    dropout = hyper.ConcreteDropout(0.3).double()
    raw, x = dropout.rate.raw.detach().clone().requires_grad_(), torch.randn(3, 4, dtype=torch.float64).requires_grad_()

    def dropped(x, raw):
        torch.manual_seed(0)
        return torch.func.functional_call(dropout, {"rate.raw": raw}, (x,))

    assert torch.autograd.gradcheck(dropped, (x, raw)) and torch.autograd.gradgradcheck(dropped, (x, raw))
