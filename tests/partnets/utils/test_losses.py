"""A mean is multiplied by the number of targets over which it was taken, in any output, for any loss."""

from collections import namedtuple

import pytest
import torch
import torch.nn.functional as F

from partnets.hyper import expected_error
from partnets.utils.losses import summed

CLASSES = 5
Pair = namedtuple("Pair", "scores state")
CONTAINERS = {
    "tensor": (lambda z: z, lambda output: output),
    "dict": (lambda z: {"logits": z}, lambda output: output["logits"]),
    "tuple": (lambda z: (z, torch.ones(len(z), 2)), lambda output: output[0]),
    "namedtuple": (lambda z: Pair(z, None), lambda output: output.scores),
}


def labels(shape, ignored=255, seed=0):
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, shape, generator=generator)
    return y.masked_fill(torch.rand(shape, generator=generator) < 0.5, ignored)


def smoothed(z, y, ignore_index):
    return F.cross_entropy(z, y, ignore_index=ignore_index, label_smoothing=0.2)


def of_log_probabilities(z, y, ignore_index):
    return F.nll_loss(z.log_softmax(-1), y, ignore_index=ignore_index)


def hinge(z, y, ignore_index):
    return F.multi_margin_loss(z[y != ignore_index], y[y != ignore_index])


def of_probabilities(z, y, ignore_index):
    return expected_error(z[y != ignore_index], y[y != ignore_index])


LOSSES = [F.cross_entropy, smoothed, of_log_probabilities, hinge, of_probabilities]


@pytest.mark.parametrize("function", LOSSES)
@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("ignored", [255, -1, 0])  # 0 is a class
def test_labels_that_a_mean_ignores_do_not_count(function, container, ignored):
    around, inside = CONTAINERS[container]
    y = labels((12,), ignored)
    z = 200 * torch.randn(12, CLASSES, generator=torch.Generator().manual_seed(1))  # saturated
    found, count = summed(lambda output, y: function(inside(output), y, ignore_index=ignored), around(z), y, 12)
    assert count == (y != ignored).sum()
    assert found.item() == pytest.approx(count * function(z, y, ignore_index=ignored).item(), rel=1e-5)


@pytest.mark.parametrize("function", [F.cross_entropy, smoothed, of_log_probabilities])
@pytest.mark.parametrize("length", [4, CLASSES, 6])
@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("container", CONTAINERS)
def test_tokens_that_count_are_found_wherever_the_classes_are(function, length, axis, container):
    if function is of_log_probabilities and length == CLASSES:
        pytest.skip("the classes' dimension is ambiguous")
    (around, inside), y = CONTAINERS[container], labels((8, length))
    z = torch.randn(8, length, CLASSES, generator=torch.Generator().manual_seed(1)).movedim(2, axis)

    def loss(output, y):
        return function(inside(output).movedim(axis, 2).flatten(0, 1), y.flatten(), ignore_index=255)

    found, count = summed(loss, around(z), y, 8)
    assert count == (y != 255).sum()
    assert found.item() == pytest.approx(count * loss(around(z), y).item(), rel=1e-5)


def test_tokens_that_a_loss_shifts_away_do_not_count():
    z, y = torch.randn(3, 4, CLASSES), labels((3, 4))
    assert (
        summed(lambda z, y: F.cross_entropy(z[:, :-1].flatten(0, 1), y[:, 1:].flatten(), ignore_index=255), z, y, 3)[1]
        == (y[:, 1:] != 255).sum()
    )


def error_of_known(z, y):
    return F.mse_loss(z[y[:, 0] >= 0], y[y[:, 0] >= 0])


@pytest.mark.parametrize(
    ("loss", "y", "count"),
    [
        (lambda z, y: F.mse_loss(z, y), torch.randn(6, 2), 6),
        (lambda z, y: F.mse_loss(z, y), torch.zeros(6, 2), 6),  # also where the gradient is 0
        (lambda z, y: (z - y)[~y.isnan()].square().mean(), torch.tensor([[1.0, torch.nan]]).expand(6, 2), 6),
        (lambda z, y: (z - y)[~y.isnan()].square().mean(), torch.tensor([[torch.nan, torch.nan], [0, 1]] * 3), 3),
        (error_of_known, torch.tensor([[-1.0, -1.0], [0, 1], [0, 0]] * 2), 4),
        (lambda z, y: (z.argmax(1) != y).float().mean(), torch.tensor([0, 1] * 3), 6),  # without a gradient
    ],
)  # fmt: skip
def test_other_means_are_over_examples_without_missing_targets(loss, y, count):
    found, counted = summed(loss, z := torch.zeros(6, 2), y, 6)
    assert counted == count and found.item() == pytest.approx(count * loss(z, y).item())


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize(
    "loss",
    [
        lambda z, y: F.cross_entropy(z, y, ignore_index=255),
        lambda z, y: F.binary_cross_entropy_with_logits(z[y < 2, 0], y[y < 2].float()),
    ],
)
def test_a_batch_in_which_nothing_counts_adds_nothing_but_nan_outputs_do(loss, container):
    (around, inside), y = CONTAINERS[container], torch.full((3,), 255)
    z = torch.randn(3, CLASSES)
    found, count = summed(lambda output, y: loss(inside(output), y), around(z), y, 3)
    assert (found.item(), count) == (0.0, 0)
    found, _ = summed(lambda output, y: F.cross_entropy(inside(output), y), around(z * torch.nan), y * 0, 3)
    assert found.isnan()
