"""Random affine transformations: their effect on images, their units, and gradients of all their numbers."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from partnets import hyper
from partnets.hyper.affine import GENERATORS, UNITS
from partnets.hyper.warp import exponential, warp

WIDTHS = {"translate_x": 0.1, "translate_y": 0.2, "rotation": 30.0, "scale": 0.3, "stretch": 0.2, "shear": 0.1}
IMMER = {"translate_x": 0.1, "translate_y": 0.2, "rotation": 30.0, "scale_x": 0.3, "scale_y": 0.2, "shear": 0.1}
SCHWOBEL = {
    "rotation": (-20.0, 40.0),
    "scale_x": (0.7, 1.2),
    "scale_y": (0.9, 1.4),
    "shear_x": (-0.2, 0.1),
    "shear_y": (0.0, 0.3),
    "translate_x": (-0.1, 0.2),
    "translate_y": (-0.2, 0.1),
}
KINDS = {hyper.Affine: WIDTHS, hyper.ImmerAffine: IMMER, hyper.SchwobelAffine: SCHWOBEL}
every_kind = pytest.mark.parametrize(
    ("kind", "initial"), KINDS.items(), ids=lambda value: getattr(value, "__name__", "")
)


def image(height=12, width=12, batch=2):
    """Return smooth images, for which bilinear interpolation is nearly exact."""
    y, x = torch.meshgrid(torch.linspace(0, 1, height), torch.linspace(0, 1, width), indexing="ij")
    images = [torch.sin(3 * x + k) * torch.cos(2 * y) + x for k in range(batch)]
    return torch.stack(images)[:, None].double()


def only(kind, **initial):
    return kind(**dict.fromkeys(KINDS[kind]) | initial).double()


def transformed(augmentation, x, draw=1.0):
    """Transform images with the same draw for every number of every image."""
    return augmentation.transform(x, torch.full((len(x), len(augmentation.names)), draw).double()).detach()


def moved(x, **amounts):
    """Transform x by exactly this amount of one transformation, in the user's units."""
    ((name, amount),) = amounts.items()
    kind = hyper.Affine if name in WIDTHS else hyper.ImmerAffine
    return transformed(only(kind, **{name: abs(amount)}), x, math.copysign(1.0, amount))


@pytest.mark.parametrize(("kind", "initial"), [(hyper.Affine, WIDTHS), (hyper.ImmerAffine, IMMER)])
def test_half_widths_are_in_the_users_units(kind, initial):
    assert kind(**initial).values() == pytest.approx(initial, rel=1e-5)
    assert list(only(kind, shear=0.5).values()) == ["shear"]


@pytest.mark.parametrize("kind", [hyper.Affine, hyper.ImmerAffine, hyper.SchwobelAffine])
def test_no_images_become_no_images(kind):
    assert kind()(torch.zeros(0, 3, 8, 5)).shape == (0, 3, 8, 5)


def test_affine_has_the_widths_of_augerino():
    augmentation = hyper.Affine()
    with torch.no_grad():
        augmentation.widths.raw.zero_()
    translations, others = augmentation.half_widths().split([2, 4])
    torch.testing.assert_close(translations, torch.full((2,), 0.1 * math.log(2) / 2))
    torch.testing.assert_close(others, torch.full((4,), math.log(2) / 2))


def test_minima_and_maxima_are_in_the_users_units():
    values = hyper.SchwobelAffine(**SCHWOBEL).values()
    expected = {f"{name}_{side}": pair[i] for name, pair in SCHWOBEL.items() for i, side in enumerate(("min", "max"))}
    assert values == pytest.approx(expected, rel=1e-5)
    assert list(only(hyper.SchwobelAffine, shear_x=(0.0, 0.1)).values()) == ["shear_x_min", "shear_x_max"]


NOTHING = [
    hyper.Affine(**dict.fromkeys(WIDTHS, 1e-9)),
    hyper.ImmerAffine(),
    hyper.SchwobelAffine(**dict.fromkeys(SCHWOBEL, (0.0, 0.0)) | dict.fromkeys(("scale_x", "scale_y"), (1.0, 1.0))),
    only(hyper.SchwobelAffine, translate_x=(0.0, 0.0)),
]


@pytest.mark.parametrize("augmentation", NOTHING, ids=lambda augmentation: type(augmentation).__name__)
def test_ranges_of_nothing_give_the_identity(augmentation):
    x = image()
    torch.testing.assert_close(augmentation.double()(x), x, rtol=0, atol=1e-6)


@pytest.mark.parametrize("turns", [1, 2, -1])
def test_quarter_turns_are_rot90(turns):
    x = image(9, 9)
    expected = torch.rot90(x, turns, (2, 3))
    torch.testing.assert_close(moved(x, rotation=90.0 * turns), expected, rtol=0, atol=1e-5)
    fixed = only(hyper.SchwobelAffine, rotation=(90.0 * turns, 90.0 * turns))
    torch.testing.assert_close(fixed(x).detach(), expected, rtol=0, atol=1e-5)


def test_a_quarter_turn_of_a_wide_image_turns_its_middle_in_pixel_space():
    x = image(8, 20)
    middle = (..., slice(6, 14))
    torch.testing.assert_close(moved(x, rotation=90.0)[middle], torch.rot90(x[middle], 1, (2, 3)), rtol=0, atol=1e-5)


def test_translations_are_fractions_of_the_width_to_the_right_and_downwards():
    x = image(8, 20)
    torch.testing.assert_close(moved(x, translate_x=0.1)[..., 2:], x[..., :-2], rtol=0, atol=1e-5)
    torch.testing.assert_close(moved(x, translate_y=0.1)[..., 2:, :], x[..., :-2, :], rtol=0, atol=1e-5)
    assert (moved(x, translate_x=0.1)[..., :2] == 0).all()


def sides(image):
    """Return width and height in pixels of the bright area, measured through the centre."""
    return [image[0, 0].sum(dim)[16].item() for dim in (1, 0)]


def square():
    x = torch.zeros(1, 1, 33, 33, dtype=torch.float64)
    x[..., 12:21, 12:21] = 1  # 9 x 9 pixels around the centre
    return x


@pytest.mark.parametrize(
    ("name", "expected"),
    [("scale", [18, 18]), ("stretch", [18, 4.5]), ("scale_x", [18, 9]), ("scale_y", [9, 18])],
)
def test_scales_and_stretches_are_log_factors(name, expected):
    assert sides(moved(square(), **{name: math.log(2)})) == pytest.approx(expected, abs=0.6)


def test_shears_lengthen_one_diagonal_and_shorten_the_other():
    x = square()
    diagonal = moved(x, shear=math.log(2))[0, 0]
    assert diagonal.diagonal().sum() > 1.8 * x[0, 0].diagonal().sum()
    assert diagonal.flip(1).diagonal().sum() < 0.6 * x[0, 0].diagonal().sum()


def test_transformations_that_do_not_commute_are_added_in_the_exponent():
    exponent = sum(a * torch.tensor(GENERATORS[name]) for name, a in (("rotation", 0.7), ("translate_x", 0.4)))
    exponent = exponent.double()[None]
    x = image(16, 16, batch=1)
    twice = warp(warp(x, exponent / 2), exponent / 2)[..., 5:11, 5:11]
    torch.testing.assert_close(warp(x, exponent)[..., 5:11, 5:11], twice, rtol=0, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("degrees", [0.0, 1e-3, 90.0, 180.0, -180.0, 720.0])
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


def test_an_equal_scale_of_both_axes_is_the_isotropic_one():
    x = image()
    both = transformed(only(hyper.ImmerAffine, scale_x=0.2, scale_y=0.2, rotation=20.0), x)
    torch.testing.assert_close(both, transformed(only(hyper.Affine, scale=0.2, rotation=20.0), x))


@pytest.mark.parametrize("draw", [-1.0, -0.5, 0.0, 1.0])
def test_minima_and_maxima_are_composed_as_documented(draw):
    def place(x, y):
        """Return the coordinates that a pixel reads, computed by one elementary map after another."""
        number = {name: low + (draw + 1) / 2 * (high - low) for name, (low, high) in SCHWOBEL.items()}
        x, y = x - 2 * number["translate_x"], y - 2 * number["translate_y"]
        x, y = x * number["scale_x"], y * number["scale_y"]
        x = x + number["shear_x"] * y
        y = y + number["shear_y"] * x
        angle = math.radians(number["rotation"])
        return x * math.cos(angle) - y * math.sin(angle), x * math.sin(angle) + y * math.cos(angle)

    def linear(x, y):
        return 3 + 0.7 * x - 0.4 * y

    y, x = torch.meshgrid((torch.arange(25.0) - 12) / 15.5, (torch.arange(31.0) - 15) / 15.5, indexing="ij")
    result = transformed(hyper.SchwobelAffine(**SCHWOBEL).double(), linear(x, y).double()[None, None], draw)[0, 0]
    # Linear images are interpolated exactly, except for pixels that read from outside the image.
    read = place(x, y)
    inside = (read[0].abs() < 15 / 15.5) & (read[1].abs() < 12 / 15.5)
    assert inside.sum() > 100
    torch.testing.assert_close(result[inside], linear(*read).double()[inside], rtol=0, atol=1e-5)


def test_a_scale_of_zero_reads_one_line():
    x = image(9, 9)
    result = only(hyper.SchwobelAffine, scale_x=(0.0, 0.0))(x).detach()
    torch.testing.assert_close(result, x[..., 4:5].expand_as(x))


def test_ranges_need_not_be_symmetric():
    torch.manual_seed(0)
    x = torch.zeros(2000, 1, 9, 9, dtype=torch.float64)
    x[..., 4] = 1
    columns = only(hyper.SchwobelAffine, translate_x=(0.0, 4 / 9))(x).detach().mean((0, 1, 2)).tolist()
    assert columns[:4] == [0.0] * 4
    assert columns[4:] == pytest.approx([1 / 8, 1 / 4, 1 / 4, 1 / 4, 1 / 8], abs=0.02)


def test_a_rotation_beyond_180_degrees_is_clamped_and_gets_no_gradient():
    x = image(9, 9)
    augmentation = only(hyper.ImmerAffine, rotation=90.0)
    with torch.no_grad():
        augmentation.rotation.raw.fill_(4.0)
    assert augmentation.values() == {"rotation": pytest.approx(180.0)}
    result = augmentation.transform(x, torch.ones(2, 1).double())
    torch.testing.assert_close(result.detach(), torch.rot90(x, 2, (2, 3)), rtol=0, atol=1e-5)
    (result * torch.rand_like(result)).sum().backward()
    assert augmentation.rotation.raw.grad == 0


def test_at_zero_opposite_draws_give_opposite_gradients_that_are_not_zero():
    x, weight = image(batch=1), torch.randn(1, 1, 12, 12, dtype=torch.float64)
    augmentation = hyper.ImmerAffine().double()
    draws = torch.rand(1, 6, dtype=torch.float64) + 0.1
    there, back = (
        torch.autograd.grad((augmentation.transform(x, d) * weight).sum(), list(augmentation.parameters()))
        for d in (draws, -draws)
    )
    assert all(gradient.abs() > 1e-4 for gradient in there)
    torch.testing.assert_close(there, tuple(-gradient for gradient in back))


@pytest.mark.parametrize("shape", [(9, 9), (7, 12)])
@every_kind
def test_gradients_reach_every_number(kind, initial, shape):
    augmentation = kind(**initial).double()
    x, weight = image(*shape), torch.randn(2, 1, *shape, dtype=torch.float64)
    draws = 2 * torch.rand(2, len(augmentation.names), dtype=torch.float64) - 1

    def loss():
        return (augmentation.transform(x, draws) * weight).sum()

    loss().backward()
    step = 1e-6
    for parameter in augmentation.parameters():
        for number, gradient in zip(parameter.detach().view(-1), parameter.grad.view(-1), strict=True):
            number += step
            above = loss().item()
            number -= 2 * step
            below = loss().item()
            number += step
            assert gradient.item() == pytest.approx((above - below) / (2 * step), rel=1e-4, abs=1e-6)


def test_each_image_is_moved_by_a_draw_of_its_own_within_the_widths():
    torch.manual_seed(0)
    x = image(9, 9, batch=1).float().expand(200, -1, -1, -1)
    augmentation = only(hyper.Affine, rotation=40.0).float()
    results = augmentation(x).detach()
    assert len({tuple(result.flatten().tolist()) for result in results}) == 200
    extremes = [augmentation.transform(x[:1], torch.tensor([[side]])).detach() for side in (-1.0, 1.0)]
    centre, low, high = (tensor[:, 0, 4, 7] for tensor in (results, *extremes))
    assert min(low, high) <= centre.min() and centre.max() <= max(low, high)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_kind
def test_images_in_half_precision_and_under_autocast_move_to_the_same_places(kind, initial, dtype):
    augmentation, x = kind(**initial), image(32, 32).to(dtype)

    def drawn(x):
        torch.manual_seed(0)
        return augmentation(x).detach()

    expected = drawn(x.float())
    with torch.autocast("cpu", torch.bfloat16):
        result = drawn(x)
    assert result.dtype == drawn(x).dtype == dtype
    torch.testing.assert_close(result, expected.to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize("width", [0.0, -1.0, float("nan"), float("inf")])
def test_widths_that_are_not_positive_raise(width):
    with pytest.raises(ValueError, match=r"rotation.*pass a finite number above 0"):
        hyper.Affine(rotation=width)


@pytest.mark.parametrize("width", [180.0, -200.0, float("nan")])
def test_rotations_that_would_be_clamped_at_once_raise(width):
    with pytest.raises(ValueError, match=r"rotation.*between -180 and 180"):
        hyper.ImmerAffine(rotation=width)


@pytest.mark.parametrize("pair", [15.0, (15.0,), (10.0, -10.0), (float("nan"), 1.0), (0.0, float("inf"))])
def test_ranges_that_are_no_pairs_raise(pair):
    with pytest.raises(ValueError, match=r"rotation.*pass a"):
        hyper.SchwobelAffine(rotation=pair)


@pytest.mark.parametrize("kind", KINDS)
def test_an_augmentation_of_nothing_raises(kind):
    with pytest.raises(ValueError, match="at least one"):
        only(kind)


def test_every_generator_has_a_unit():
    assert GENERATORS.keys() == UNITS.keys()
