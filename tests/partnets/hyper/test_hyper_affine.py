"""Random affine transformations: their effect on images, their units, and gradients of their widths."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from partnets import hyper
from partnets.hyper.affine import GENERATORS, exponential

WIDTHS = {"translate_x": 0.1, "translate_y": 0.2, "rotation": 30.0, "scale": 0.3, "stretch": 0.2, "shear": 0.1}


def image(height=12, width=12, batch=2):
    """Return smooth images, for which bilinear interpolation is nearly exact."""
    y, x = torch.meshgrid(torch.linspace(0, 1, height), torch.linspace(0, 1, width), indexing="ij")
    images = [torch.sin(3 * x + k) * torch.cos(2 * y) + x for k in range(batch)]
    return torch.stack(images)[:, None].double()


def only(**widths):
    return hyper.Affine(**dict.fromkeys(WIDTHS) | widths).double()


def moved(x, **amounts):
    """Transform x by exactly this amount of one transformation, in user units."""
    ((name, amount),) = amounts.items()
    draws = torch.full((len(x), 1), math.copysign(1.0, amount)).double()
    return only(**{name: abs(amount)}).transform(x, draws).detach()


def test_values_are_half_widths_in_user_units():
    assert hyper.Affine(**WIDTHS).values() == pytest.approx(WIDTHS, rel=1e-5)
    assert list(only(shear=0.5).values()) == ["shear"]


def test_affine_has_the_widths_of_augerino():
    augmentation = hyper.Affine()
    with torch.no_grad():
        augmentation.widths.raw.zero_()
    translations, others = augmentation.half_widths().split([2, 4])
    torch.testing.assert_close(translations, torch.full((2,), 0.1 * math.log(2) / 2))
    torch.testing.assert_close(others, torch.full((4,), math.log(2) / 2))


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


def square():
    x = torch.zeros(1, 1, 33, 33, dtype=torch.float64)
    x[..., 12:21, 12:21] = 1  # 9 x 9 pixels around the centre
    return x


@pytest.mark.parametrize(("name", "expected"), [("scale", [18, 18]), ("stretch", [18, 4.5])])
def test_scale_and_stretch_are_log_factors(name, expected):
    result = moved(square(), **{name: math.log(2)})
    sides = [result[0, 0].sum(dim)[16].item() for dim in (1, 0)]  # measured through the centre
    assert sides == pytest.approx(expected, abs=0.6)


def test_shear_lengthens_one_diagonal_and_shortens_the_other():
    x = square()
    diagonal = moved(x, shear=math.log(2))[0, 0]
    assert diagonal.diagonal().sum() > 1.8 * x[0, 0].diagonal().sum()
    assert diagonal.flip(1).diagonal().sum() < 0.6 * x[0, 0].diagonal().sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("degrees", [0.0, 1e-3, 180.0, 720.0])
def test_exponentials_are_exact_to_rounding(degrees, dtype):
    amounts = torch.rand(50, len(GENERATORS), dtype=torch.float64) - 0.5
    exponent = torch.einsum("bn,nij->bij", amounts, torch.tensor(list(GENERATORS.values())).double())
    exponent[:25] *= 1e-3
    exponent += math.radians(degrees) * torch.tensor(GENERATORS["rotation"]).double()
    exponent = exponent.to(dtype).requires_grad_()
    weights = torch.randn(50, 2, 3, dtype=dtype)
    found = exponential(exponent)
    (grad,) = torch.autograd.grad(found, exponent, weights)
    wide = exponent.detach().double().requires_grad_()
    exact = torch.linalg.matrix_exp(-wide)[:, :2]
    (exact_grad,) = torch.autograd.grad(exact, wide, weights.double())
    eps = torch.finfo(dtype).eps if dtype == torch.float32 else 1e-14
    assert found.dtype == dtype
    for one, other in ((found, exact), (grad, exact_grad)):
        torch.testing.assert_close(one.double(), other, rtol=eps, atol=eps * other.abs().max().item())


@pytest.mark.parametrize("shape", [(4, 1, 8, 8), (4, 1, 8, 12)])
def test_augmenting_waits_for_no_gpu(shape):
    waiting = set()

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            if operator._schema.name in ("aten::_local_scalar_dense", "aten::nonzero", "aten::lift_fresh"):
                waiting.add(operator._schema.name)
            return operator(*args, **(kwargs or {}))

    augmentation, x = hyper.Affine(), torch.rand(shape)
    with Watching():
        augmentation(x).sum().backward()
    assert not waiting


@pytest.mark.parametrize("shape", [(9, 9), (7, 12)])
def test_gradients_reach_every_width(shape):
    augmentation = hyper.Affine(**WIDTHS).double()
    x, weight = image(*shape), torch.randn(2, 1, *shape, dtype=torch.float64)
    draws = 2 * torch.rand(2, len(augmentation.names), dtype=torch.float64) - 1

    def loss():
        return (augmentation.transform(x, draws) * weight).sum()

    loss().backward()
    step, raw = 1e-6, augmentation.widths.raw
    for number, gradient in zip(raw.detach(), raw.grad, strict=True):
        number += step
        above = loss().item()
        number -= 2 * step
        below = loss().item()
        number += step
        assert gradient.item() == pytest.approx((above - below) / (2 * step), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_images_in_half_precision_and_under_autocast_move_to_the_same_places(dtype):
    augmentation, x = hyper.Affine(**WIDTHS), image(32, 32).to(dtype)

    def drawn(x):
        torch.manual_seed(0)
        return augmentation(x).detach()

    expected = drawn(x.float())
    with torch.autocast("cpu", torch.bfloat16):
        result = drawn(x)
    assert result.dtype == drawn(x).dtype == dtype
    torch.testing.assert_close(result, expected.to(dtype), rtol=0, atol=0)
