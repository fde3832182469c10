"""Data sets in memory: subsets, rotations, moments, and the conversion of bytes to inputs of a network."""

import math
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import partnets
from partnets import hyper
from partnets.data import Data, Normalise, ToFloat, digits, load, moments


def data(n=2300, dtype=torch.uint8):
    """Return smooth 9x9 colour images, more than are rotated in one batch."""
    y, x = torch.meshgrid(torch.linspace(0, 1, 9), torch.linspace(0, 1, 9), indexing="ij")
    phase = torch.rand(n, 3, 1, 1) * 6
    images = (torch.sin(2 * x + phase) * torch.cos(y - phase) + 1) / 2
    images = (255 * images).to(torch.uint8) if dtype == torch.uint8 else images
    labels = torch.arange(n) % 7
    return Data("waves", (images, labels), (images[:40], labels[:40]), 7, *moments(images))


def test_smaller_subsets_lie_in_larger_ones_and_keep_their_labels():
    whole = Data("numbers", *[(torch.arange(100.0)[:, None], torch.arange(100))] * 2, 100, (0.0,), (1.0,))
    subsets = [whole.subset(n, seed=4).train for n in (1, 10, 60, 100)]
    assert [len(x) for x, _ in subsets] == [1, 10, 60, 100]
    assert all(torch.equal(x[:, 0].long(), y) for x, y in subsets)
    chosen = [set(y.tolist()) for _, y in subsets]
    assert chosen[0] < chosen[1] < chosen[2] < chosen[3] == set(range(100))
    assert whole.subset(10, seed=5).train[1].tolist() != subsets[1][1].tolist()
    assert whole.subset(10).test is whole.test


@pytest.mark.parametrize("n", [0, -1, 41, 2.0, True])
def test_subsets_out_of_range_raise(n):
    with pytest.raises(ValueError, match=r"1\.\.40"):
        data(40).subset(n)


def rotated_one_by_one(image, angle):
    """Rotate one image [channels, side, side] with explicit bilinear interpolation."""
    channels, side, _ = image.shape
    padded = F.pad(image.double(), (1, 1, 1, 1))
    centre = (side - 1) / 2
    rows, cols = torch.meshgrid(torch.arange(side) - centre, torch.arange(side) - centre, indexing="ij")
    # A counterclockwise rotation by `angle`; the y axis points downwards.
    from_x = math.cos(angle) * cols - math.sin(angle) * rows + centre
    from_y = math.sin(angle) * cols + math.cos(angle) * rows + centre
    total = torch.zeros(channels, side, side, dtype=torch.float64)
    for dy in (0, 1):
        for dx in (0, 1):
            y, x = from_y.floor() + dy, from_x.floor() + dx
            weight = (1 - (from_y - y).abs()) * (1 - (from_x - x).abs())
            y, x = ((index + 1).clamp(0, side + 1).long() for index in (y, x))
            total += weight * padded[:, y, x]
    return total


def angles(seed, sizes):
    """Return the angles that rotated(seed) draws for parts of these sizes, in order."""
    generator = torch.Generator().manual_seed(seed)
    return [(math.pi * (2 * torch.rand(n, generator=generator) - 1)).tolist() for n in sizes]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.uint8, 0.51), (torch.float32, 1e-5)])
def test_every_image_is_turned_by_an_angle_of_its_own(dtype, tolerance):
    whole = data(dtype=dtype)
    turned = whole.rotated(seed=3)
    by_part = dict(zip(("test", "train"), angles(3, (40, 2300)), strict=True))
    for part, indices in (("test", (0, 39)), ("train", (0, 999, 1000, 2299))):
        (x, y), (moved, labels) = getattr(whole, part), getattr(turned, part)
        assert moved.dtype == dtype and moved.shape == x.shape and torch.equal(labels, y)
        for i in indices:
            expected = rotated_one_by_one(x[i], by_part[part][i])
            torch.testing.assert_close(moved[i].double(), expected, rtol=0, atol=tolerance)


def test_rotations_follow_the_seed_and_test_images_do_not_depend_on_the_training_set():
    whole = data(300)
    first, again, other = (whole.rotated(seed) for seed in (1, 1, 2))
    assert torch.equal(first.train[0], again.train[0]) and not torch.equal(first.train[0], other.train[0])
    assert torch.equal(whole.subset(17).rotated(1).test[0], first.test[0])
    assert (first.mean, first.std, first.name) == (whole.mean, whole.std, "rotated-waves")


def test_only_images_rotate():
    with pytest.raises(ValueError, match=r"\[40, 1\]; only images"):
        Data("numbers", *[(torch.arange(40.0)[:, None], torch.arange(40))] * 2, 40, (0.0,), (1.0,)).rotated()


@pytest.mark.parametrize(
    "use", [data(9).rotated, lambda seed: data(9).subset(3, seed), lambda seed: load("x", seed=seed)]
)
def test_negative_seeds_raise(use):
    with pytest.raises(ValueError, match="seed=-1"):
        use(seed=-1)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_moments_are_those_of_all_pixels_of_a_channel(dtype):
    x = data(dtype=dtype).train[0]
    units = x.double() / 255 if dtype == torch.uint8 else x.double()
    mean, std = moments(x)
    assert mean == pytest.approx(units.mean((0, 2, 3)).tolist(), rel=1e-9)
    assert std == pytest.approx(units.std((0, 2, 3), correction=0).tolist(), rel=1e-9)


def test_to_float_maps_bytes_to_the_unit_interval_and_leaves_floats():
    every = torch.arange(256, dtype=torch.uint8)
    assert ToFloat()(every).tolist() == (torch.arange(256, dtype=torch.float32) / 255).tolist()
    floats = torch.rand(3).double()
    assert ToFloat()(floats) is floats
    with pytest.raises(TypeError, match="int64"):
        ToFloat()(torch.arange(3))


def test_normalised_images_have_mean_0_and_std_1():
    whole = data()
    x = Normalise(whole.mean, whole.std)(ToFloat()(whole.train[0]))
    torch.testing.assert_close(x.mean((0, 2, 3)), torch.zeros(3), rtol=0, atol=1e-5)
    torch.testing.assert_close(x.std((0, 2, 3)), torch.ones(3), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (lambda: Normalise((0.5,), (0.5, 0.5)), ValueError, "1 means and 2 stds"),
        (lambda: Normalise((0.5,), (0.0,)), ValueError, "positive"),
        (lambda: Normalise((0.5,), (0.5,))(torch.zeros(1, 3, 2, 2)), ValueError, "3 channels"),
        (lambda: Normalise((0.5,), (0.5,))(torch.zeros(1, 1, 2, 2, dtype=torch.uint8)), TypeError, "ToFloat"),
    ],
)
def test_what_cannot_be_normalised_raises(use, error, message):
    with pytest.raises(error, match=message):
        use()


@pytest.mark.full
def test_a_partitioned_network_trains_on_chunks_of_bytes():
    whole = data(60)
    augmentation = hyper.Affine()
    network = nn.Sequential(Normalise(whole.mean, whole.std), nn.Flatten(), nn.Linear(3 * 81, 7))
    model = nn.Sequential(ToFloat(), hyper.Averaged(augmentation, network, samples=2))
    partnets.partition(model, (0.8, 0.2), defaults="zero")
    chunks = partnets.chunk(whole.train, (0.8, 0.2))
    history = partnets.Trainer(model, chunks, hyper=augmentation, batch_size=16).fit(3)
    assert all(math.isfinite(loss) for loss in history.steps["loss"] + history.steps["hyper_loss"])
    assert model(whole.test[0]).shape == (40, 7)


@pytest.mark.parametrize("size", [8, 16])
def test_digits_are_scikit_learns_split_at_random(size):
    whole = digits(size, test=297, seed=2)
    assert whole.train[0].shape == (1500, 1, size, size) and whole.test[0].shape == (297, 1, size, size)
    assert whole.train[0].dtype == torch.float32 and whole.train[1].dtype == torch.int64
    images, labels = (torch.cat(parts) for parts in zip(whole.train, whole.test, strict=True))
    assert images.min() == 0 and 0.9 < images.max() <= 1
    from sklearn.datasets import load_digits

    originals, targets = load_digits(return_X_y=True)
    assert labels.bincount().tolist() == torch.tensor(targets).bincount().tolist()
    if size == 8:
        rows = [
            (*row, label) for row, label in zip((16 * images).flatten(1).int().tolist(), labels.tolist(), strict=True)
        ]
        expected = [(*row, label) for row, label in zip(originals.astype(int).tolist(), targets.tolist(), strict=True)]
        assert sorted(map(tuple, rows)) == sorted(map(tuple, expected)) and rows != expected


def test_the_split_of_the_digits_follows_the_seed():
    first, again, other = (digits(8, seed=seed).test[1] for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize("arguments", [{"size": 0}, {"test": 0}, {"test": 1797}, {"seed": -1}])
def test_digits_out_of_range_raise(arguments):
    with pytest.raises(ValueError, match="pass"):
        digits(**arguments)


def test_digits_without_scikit_learn_name_the_cure(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match="pip install scikit-learn"):
        digits()


def test_load_finds_data_sets_by_name_and_rotates_them():
    assert torch.equal(load("digits", seed=5).train[0], digits(seed=5).train[0])
    assert torch.equal(load("digits", rotated=True, seed=5).test[0], digits(seed=5).rotated(5).test[0])
    with pytest.raises(ValueError, match="'svhn'; pass one of digits, mnist, cifar10, tiny-imagenet"):
        load("svhn")


@pytest.mark.parametrize("name", ["mnist", "cifar10", "tiny-imagenet"])
def test_load_looks_in_root_else_in_the_environments_folder_else_in_data(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PARTNETS_DATA", "elsewhere")
    for root, folder in (("here", "here"), (None, "elsewhere")):
        with pytest.raises(FileNotFoundError, match=f"there is no {folder}/"):
            load(name, root)
    monkeypatch.delenv("PARTNETS_DATA")
    with pytest.raises(FileNotFoundError, match="there is no data/"):
        load(name)
