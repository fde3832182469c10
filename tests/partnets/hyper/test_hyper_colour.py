"""ColourJitter: the effect of each change on colours, compared with explicit formulas and Python's colorsys."""

import colorsys
import math

import pytest
import torch

from partnets import hyper

WIDTHS = {"brightness": 0.3, "contrast": 0.4, "saturation": 0.5, "hue": 40.0}
GREY = torch.tensor([0.299, 0.587, 0.114], dtype=torch.float64)
CLOSE = {"rtol": 1e-6, "atol": 1e-6}


def only(**widths):
    return hyper.ColourJitter(**dict.fromkeys(WIDTHS) | widths).double()


def images(channels=3):
    return torch.rand(2, channels, 5, 6, dtype=torch.float64)


def greys(x):
    return (x * GREY[:, None, None]).sum(1, keepdim=True) if x.shape[1] == 3 else x


def changed(x, draw=1.0, **widths):
    jitter = only(**widths)
    return jitter.transform(x, torch.full((len(x), len(jitter.names)), draw).double()).detach()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("draw", [1.0, -0.5])
def test_brightness_and_contrast_are_log_factors(channels, draw):
    x, factor = images(channels), math.exp(draw * math.log(1.5))
    torch.testing.assert_close(changed(x, draw, brightness=math.log(1.5)), factor * x, **CLOSE)
    mean = greys(x).mean((1, 2, 3), keepdim=True)
    torch.testing.assert_close(changed(x, draw, contrast=math.log(1.5)), mean + factor * (x - mean), **CLOSE)


def test_contrast_is_about_the_grey_of_the_brightened_image():
    x = images()
    both = changed(x, brightness=0.3, contrast=0.4)
    torch.testing.assert_close(both, changed(changed(x, brightness=0.3), contrast=0.4), **CLOSE)


def test_saturation_is_about_each_pixels_grey():
    x, factor = images(), math.exp(-0.5 * 0.4)
    expected = greys(x) + factor * (x - greys(x))
    torch.testing.assert_close(changed(x, -0.5, saturation=0.4), expected, **CLOSE)


@pytest.mark.parametrize("degrees", [30.0, 120.0, 180.0])
def test_hue_turns_the_chroma_plane_of_yiq(degrees):
    def turned(red, green, blue):
        y, i, q = colorsys.rgb_to_yiq(red, green, blue)
        angle = math.radians(-degrees)
        return y, i * math.cos(angle) - q * math.sin(angle), i * math.sin(angle) + q * math.cos(angle)

    colours = torch.tensor([[0.6, 0.4, 0.5], [0.5, 0.55, 0.4]])
    result = changed(colours.double()[..., None, None], hue=degrees)[..., 0, 0].tolist()
    for before, after in zip(colours.tolist(), result, strict=True):
        # Python's YIQ rounds the standard's coefficients to two digits.
        assert colorsys.rgb_to_yiq(*after) == pytest.approx(turned(*before), abs=0.01)


def test_grey_has_neither_saturation_nor_hue():
    x = images(1).expand(-1, 3, -1, -1)
    torch.testing.assert_close(changed(x, saturation=1.0, hue=90.0), x, **CLOSE)


def test_each_image_has_a_separate_draw_within_the_widths():
    torch.manual_seed(0)
    factors = only(brightness=0.4)(torch.ones(500, 3, 1, 1).double()).detach()[:, 0, 0, 0].log()
    assert len(factors.unique()) == 500
    assert -0.4 <= factors.min() < -0.38 and 0.38 < factors.max() <= 0.4


def test_values_are_half_widths_in_user_units():
    assert hyper.ColourJitter(**WIDTHS).values() == pytest.approx(WIDTHS, rel=1e-5)
    assert list(only(hue=20.0).values()) == ["hue"]
