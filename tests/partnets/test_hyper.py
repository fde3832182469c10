"""Hyperparameters as modules: what they do to the input, in which units, and that gradients reach them."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from partnets import hyper
from partnets.hyper.affine import GENERATORS, UNITS, warp

WIDTHS = {"translate_x": 0.1, "translate_y": 0.2, "rotation": 30.0, "scale": 0.3, "stretch": 0.2, "shear": 0.1}
ONLY = dict.fromkeys(GENERATORS)


def image(height=12, width=12, batch=2):
    """Smooth, so that bilinear interpolation is close to exact."""
    y, x = torch.meshgrid(torch.linspace(0, 1, height), torch.linspace(0, 1, width), indexing="ij")
    images = [torch.sin(3 * x + k) * torch.cos(2 * y) + x for k in range(batch)]
    return torch.stack(images)[:, None].double()


def moved(x, **amounts):
    """x moved by one transformation of exactly this amount, in the user's units."""
    (name, amount), *_ = amounts.items()
    augmentation = hyper.Affine(**ONLY | {name: abs(amount)}).double()
    return augmentation.transform(x, torch.full((len(x), 1), math.copysign(1.0, amount), dtype=torch.float64)).detach()


def test_values_are_in_the_users_units():
    values = hyper.Affine(**WIDTHS).values()
    assert values == pytest.approx(WIDTHS, rel=1e-5)
    assert list(hyper.Affine(**ONLY | {"shear": 0.5}).values()) == ["shear"]


def test_widths_towards_zero_give_the_identity():
    x = image()
    augmentation = hyper.Affine(**dict.fromkeys(GENERATORS, 1e-9)).double()
    torch.testing.assert_close(augmentation(x), x, rtol=0, atol=1e-6)


@pytest.mark.parametrize("turns", [1, 2, -1])
def test_quarter_turns_are_rot90(turns):
    x = image(9, 9)
    torch.testing.assert_close(moved(x, rotation=90.0 * turns), torch.rot90(x, turns, (2, 3)), rtol=0, atol=1e-5)


def test_a_quarter_turn_of_a_wide_image_turns_its_middle_in_pixel_space():
    x = image(8, 20)
    middle = (..., slice(6, 14))
    torch.testing.assert_close(moved(x, rotation=90.0)[middle], torch.rot90(x[middle], 1, (2, 3)), rtol=0, atol=1e-5)


def test_translations_are_fractions_of_the_width_to_the_right_and_downwards():
    x = image(8, 20)
    torch.testing.assert_close(moved(x, translate_x=0.1)[..., 2:], x[..., :-2], rtol=0, atol=1e-5)
    torch.testing.assert_close(moved(x, translate_y=0.1)[..., 2:, :], x[..., :-2, :], rtol=0, atol=1e-5)
    assert (moved(x, translate_x=0.1)[..., :2] == 0).all()


def test_scale_stretch_and_shear_are_log_factors():
    x = torch.zeros(1, 1, 33, 33, dtype=torch.float64)
    x[..., 12:21, 12:21] = 1  # 9 pixels a side, about the centre

    def sides(image):
        return [image[0, 0].sum(dim)[16].item() for dim in (1, 0)]

    assert sides(moved(x, scale=math.log(2))) == pytest.approx([18, 18], abs=0.6)
    assert sides(moved(x, stretch=math.log(2))) == pytest.approx([18, 4.5], abs=0.6)
    diagonal = moved(x, shear=math.log(2))[0, 0]
    assert diagonal.diagonal().sum() > 1.8 * x[0, 0].diagonal().sum()
    assert diagonal.flip(1).diagonal().sum() < 0.6 * x[0, 0].diagonal().sum()


def test_transformations_that_do_not_commute_are_added_in_the_exponent():
    exponent = sum(a * torch.tensor(GENERATORS[name]) for name, a in (("rotation", 0.7), ("translate_x", 0.4)))
    exponent = exponent.double()[None]
    x = image(16, 16, batch=1)
    twice = warp(warp(x, exponent / 2), exponent / 2)[..., 5:11, 5:11]
    torch.testing.assert_close(warp(x, exponent)[..., 5:11, 5:11], twice, rtol=0, atol=0.02)


@pytest.mark.parametrize("shape", [(9, 9), (7, 12)])
def test_gradients_reach_every_width(shape):
    augmentation = hyper.Affine(**WIDTHS).double()
    x, weight = image(*shape), torch.randn(2, 1, *shape, dtype=torch.float64)
    draws = 2 * torch.rand(2, 6, dtype=torch.float64) - 1

    def loss():
        return (augmentation.transform(x, draws) * weight).sum()

    loss().backward()
    for i in range(6):
        step = 1e-6
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                augmentation.raw[i] += sign * step
                values.append(loss().item())
                augmentation.raw[i] -= sign * step
        difference = (values[0] - values[1]) / (2 * step)
        assert augmentation.raw.grad[i].item() == pytest.approx(difference, rel=1e-4, abs=1e-6)


def test_each_image_is_moved_by_a_draw_of_its_own_within_the_widths():
    torch.manual_seed(0)
    x = image(9, 9, batch=1).float().expand(200, -1, -1, -1)
    augmentation = hyper.Affine(**ONLY | {"rotation": 40.0})
    results = augmentation(x).detach()
    assert len({tuple(result.flatten().tolist()) for result in results}) == 200
    extremes = [augmentation.transform(x[:1], torch.tensor([[side]])).detach() for side in (-1.0, 1.0)]
    centre, low, high = (tensor[:, 0, 4, 7] for tensor in (results, *extremes))
    assert min(low, high) <= centre.min() and centre.max() <= max(low, high)


@pytest.mark.parametrize("width", [0.0, -1.0, float("nan"), float("inf")])
def test_widths_that_are_not_positive_raise(width):
    with pytest.raises(ValueError, match="rotation"):
        hyper.Affine(rotation=width)


def test_an_augmentation_of_nothing_raises():
    with pytest.raises(ValueError, match="at least one"):
        hyper.Affine(**ONLY)


def test_every_generator_has_a_unit():
    assert GENERATORS.keys() == UNITS.keys()


class Shift(nn.Module):
    """Adds 0, 1, 2, ... to the copies, to tell them apart."""

    def forward(self, x):
        return x + torch.arange(len(x) // 2).repeat_interleave(2)[:, None]


@pytest.mark.parametrize("average", ["logits", "log_probabilities", "probabilities"])
def test_averaged_averages_over_copies_of_each_example(average):
    network = nn.Linear(3, 4)
    x = torch.randn(2, 3)
    logits = torch.stack([network(x + copy) for copy in range(5)])
    expected = {
        "logits": logits.mean(0),
        "log_probabilities": logits.log_softmax(-1).mean(0),
        "probabilities": logits.softmax(-1).mean(0).log(),
    }[average]
    torch.testing.assert_close(hyper.Averaged(Shift(), network, samples=5, average=average)(x), expected)


def test_averaged_serves_dense_outputs():
    network = hyper.Averaged(hyper.Affine(), nn.Conv2d(1, 3, 3), samples=2, average="probabilities")
    output = network(image().float())
    assert output.shape == (2, 3, 10, 10)
    torch.testing.assert_close(output.exp().sum(1), torch.ones(2, 10, 10))


@pytest.mark.parametrize("arguments", [{"samples": 0}, {"average": "votes"}])
def test_averaged_refuses_what_it_cannot_do(arguments):
    with pytest.raises(ValueError, match="pass"):
        hyper.Averaged(nn.Identity(), nn.Identity(), **arguments)


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
    with pytest.raises(ValueError, match="pass"):
        hyper.InputMask(**{"features": 2} | arguments)


def test_a_hyperparameter_without_values_says_what_is_missing():
    with pytest.raises(NotImplementedError, match=r"values\(\)"):
        hyper.Hyperparameter().values()
