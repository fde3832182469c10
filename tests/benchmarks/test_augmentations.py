"""ImmerAffine and SchwobelAffine: their maps, units and gradients."""

import math

import pytest
import torch

from partbench.paper.augmentations import ImmerAffine, SchwobelAffine
from partnets import hyper

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


def images(size=9):
    y, x = torch.meshgrid(torch.linspace(0, 1, size), torch.linspace(0, 1, size), indexing="ij")
    return torch.stack([torch.sin(3 * x + k) * torch.cos(2 * y) + x for k in range(2)])[:, None].double()


def transformed(augmentation, x, draw=1.0):
    """Transform images with the same draw for every number of every image."""
    return augmentation.double().transform(x, torch.full((len(x), len(augmentation.names)), draw).double()).detach()


def test_values_are_in_user_units():
    assert ImmerAffine(**IMMER).values() == pytest.approx(IMMER, rel=1e-5)
    expected = {f"{name}_{side}": pair[i] for name, pair in SCHWOBEL.items() for i, side in enumerate(("min", "max"))}
    assert SchwobelAffine(**SCHWOBEL).values() == pytest.approx(expected, rel=1e-5)


def test_equal_scales_of_both_axes_are_the_isotropic_one():
    theirs = ImmerAffine(**dict.fromkeys(IMMER) | {"scale_x": 0.2, "scale_y": 0.2, "rotation": 20.0})
    ours = hyper.Affine(**dict.fromkeys(("translate_x", "translate_y", "stretch", "shear")), scale=0.2, rotation=20.0)
    torch.testing.assert_close(transformed(theirs, images()), transformed(ours, images()))


def test_a_rotation_beyond_180_degrees_is_clamped_and_gets_no_gradient():
    x, augmentation = images(), ImmerAffine(**dict.fromkeys(IMMER) | {"rotation": 90.0}).double()
    with torch.no_grad():
        augmentation.rotation.raw.fill_(4.0)
    assert augmentation.values() == {"rotation": pytest.approx(180.0)}
    result = augmentation.transform(x, torch.ones(2, 1).double())
    torch.testing.assert_close(result.detach(), torch.rot90(x, 2, (2, 3)), rtol=0, atol=1e-5)
    (result * torch.rand_like(result)).sum().backward()
    assert augmentation.rotation.raw.grad == 0


def test_at_zero_opposite_draws_give_opposite_gradients_that_are_not_zero():
    x, augmentation = images(12)[:1], ImmerAffine().double()
    weight, draws = torch.randn_like(x), torch.rand(1, 6, dtype=torch.float64) + 0.1
    there, back = (
        torch.autograd.grad((augmentation.transform(x, d) * weight).sum(), list(augmentation.parameters()))
        for d in (draws, -draws)
    )
    assert all(gradient.abs() > 1e-4 for gradient in there)
    torch.testing.assert_close(there, tuple(-gradient for gradient in back))


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
    result = transformed(SchwobelAffine(**SCHWOBEL), linear(x, y).double()[None, None], draw)[0, 0]
    # Linear images are interpolated exactly, except for pixels that read from outside the image.
    read = place(x, y)
    inside = (read[0].abs() < 15 / 15.5) & (read[1].abs() < 12 / 15.5)
    assert inside.sum() > 100
    torch.testing.assert_close(result[inside], linear(*read).double()[inside], rtol=0, atol=1e-5)
