"""Random masks: their distribution, their mean, and the gradient of their rates."""

import copy
import math
import threading
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from partnets import hyper, stn


def test_a_mask_is_nearly_binary_with_its_stated_probability():
    torch.manual_seed(0)
    mask = hyper.InputMask(3, probability=0.8)
    drawn = mask(torch.ones(5000, 3)).detach()
    assert ((drawn < 0.05) | (drawn > 0.95)).float().mean() > 0.8
    torch.testing.assert_close((drawn > 0.5).float().mean(0), torch.full((3,), 0.8), rtol=0, atol=0.02)
    assert mask.values() == pytest.approx({"0": 0.8, "1": 0.8, "2": 0.8})


def test_a_mask_in_evaluation_is_its_mean():
    x = torch.randn(4, 3)
    torch.testing.assert_close(hyper.InputMask(3, probability=0.3).eval()(x), 0.3 * x)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.8])
def test_concrete_dropout_drops_at_its_rate_and_keeps_the_mean(rate):
    torch.manual_seed(0)
    result = hyper.ConcreteDropout(rate)(torch.ones(300, 100)).detach()
    assert (result < 0.5 / (1 - rate)).float().mean() == pytest.approx(rate, abs=0.01)
    # The relaxed mask's mean differs from 1 - p, by at most 2 % at temperature 0.1.
    assert result.mean() == pytest.approx(1.0, abs=0.03)


def test_concrete_dropout_is_the_published_formula():
    x, rate, temperature = torch.randn(20, 7), 0.3, 0.1
    dropout = hyper.ConcreteDropout(rate, temperature=temperature)
    torch.manual_seed(0)
    result = dropout(x).detach()
    torch.manual_seed(0)
    kept = torch.rand(20, 7)
    # Gal et al. (2017), Equation 5, with u = 1 - kept.
    dropped = torch.sigmoid((math.log(rate / (1 - rate)) + (1 - kept).log() - kept.log()) / temperature)
    torch.testing.assert_close(result, x * (1 - dropped) / (1 - rate), rtol=1e-4, atol=1e-5)


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


def test_dropout_rates_and_masks():
    x = torch.ones(2000, 4, 3)
    for rate in (0.1, 0.6):
        y = hyper.Dropout(rate)(x)
        assert y.unique().tolist() == pytest.approx([0.0, 1 / (1 - rate)])
        assert (y == 0).float().mean() == pytest.approx(rate, abs=0.02)
        locked = hyper.Dropout(rate, same_along=(1,))(x)
        assert torch.equal(locked, locked[:, :1].expand_as(locked)) and len(locked.unique()) == 2
    module = hyper.Dropout(0.5)
    (module(x).sum() + 0 * module.rate.raw).backward()
    assert not module.rate.raw.grad.any()


def test_word_dropout_drops_a_word_everywhere_with_a_fixed_number_of_draws():
    dropout, left = hyper.EmbeddingDropout(0.5), []
    for words in (torch.randint(5, (50, 3)), torch.randint(900, (50, 3)), torch.zeros(50, 3, dtype=torch.long)):
        torch.manual_seed(0)
        kept = dropout(torch.ones(50, 3, 8), words)
        assert all(len(kept[words == word].unique()) == 1 for word in words.unique())
        assert set(kept.unique().tolist()) <= {0.0, 2.0}
        left.append(torch.rand(1))
    assert left[0] == left[1] == left[2]
    dropped = [dropout(torch.ones(1, 200, 1), torch.arange(200)[None]).eq(0).double().mean() for _ in range(50)]
    assert abs(sum(dropped) / 50 - 0.5) < 0.03
    assert dropout.eval()(torch.ones(1, 2, 8), torch.zeros(1, 2, dtype=torch.long)).eq(1).all()


def test_cutout_blanks_squares_of_an_integer_size():
    x = torch.ones(500, 2, 16, 16)
    blank = hyper.Cutout(1.9, 3.2)(x) == 0
    assert torch.equal(blank[:, 0], blank[:, 1])
    counts = blank[:, 0].sum((1, 2))
    assert counts.max() == 9 and counts.min() >= 4  # one 3 x 3 square, smaller at a border
    rows, cols = blank[:, 0].any(2).sum(1), blank[:, 0].any(1).sum(1)
    assert torch.equal(rows * cols, counts)
    assert not (hyper.Cutout(0.9, 3.2)(x) == 0).any() and not (hyper.Cutout(2.2, 0.9)(x) == 0).any()
    two = (hyper.Cutout(2.2, 3.2)(x) == 0)[:, 0].sum((1, 2))
    assert two.max() > 9 and two.max() <= 18


def test_nothing_is_perturbed_outside_in_copies_and_in_other_threads():
    dropout, seen = hyper.Dropout(0.25), {}

    def look(name, module=dropout):
        seen[name] = module.rate(torch.ones(4, 1)).shape

    with stn.HyperVector(dropout).perturbed(4):
        look("inside")
        look("copy", copy.deepcopy(dropout))
        thread = threading.Thread(target=look, args=("thread",))
        thread.start()
        thread.join()
    look("outside")
    assert seen == {"inside": (4, 1), "copy": (), "thread": (), "outside": ()}
    assert dropout.values() == {"rate": 0.25}


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
    for call in (dropout, partial(checkpoint, dropout, use_reentrant=False)):
        assert all(map(torch.equal, gradients(call), expected))


@pytest.mark.parametrize("range", [hyper.probability, hyper.interval(0.0, 0.9)])
@pytest.mark.parametrize(("rate", "temperature"), [(0.05, 0.5), (0.3, 0.1), (0.8, 0.5)])
def test_concrete_dropout_passes_gradgradcheck(rate, temperature, range):
    dropout = hyper.ConcreteDropout(rate, temperature=temperature, range=range).double()
    raw, x = dropout.rate.raw.detach().clone().requires_grad_(), torch.randn(3, 4, dtype=torch.float64).requires_grad_()

    def dropped(x, raw):
        torch.manual_seed(0)
        return torch.func.functional_call(dropout, {"rate.raw": raw}, (x,))

    assert torch.autograd.gradcheck(dropped, (x, raw)) and torch.autograd.gradgradcheck(dropped, (x, raw))
