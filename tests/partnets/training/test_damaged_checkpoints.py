"""A damaged checkpoint either loads its contents, or raises, names the file and changes nothing."""

import copy
import random
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import partnets
from partnets import hyper, optim
from partnets.training import checkpoint
from partnets.training.callbacks import every, record_loss_matrix

PROPORTIONS = (0.6, 0.2, 0.2)


def momentum(model, mask):
    optimizer, hyper_optimizer = optim.SGD(model, lr=0.1, momentum=0.9), torch.optim.SGD(mask.parameters(), 0.1, 0.9)
    return {
        "optimizer": optimizer,
        "hyper_optimizer": hyper_optimizer,
        "scheduler": lr_scheduler.MultiStepLR(optimizer, [4, 13]),
        "hyper_scheduler": lr_scheduler.CosineAnnealingLR(hyper_optimizer, 12),
    }


def adam(model, mask):
    groups = [{"params": [model[4].bias], "lr": 0.1}]
    optimizer = optim.AdamW(model, lr=0.02, groups=groups)
    return {"optimizer": optimizer, "scheduler": lr_scheduler.ExponentialLR(optimizer, 0.99)}


def per_partition(model, mask):
    return {"optimizer": optim.PerPartition(torch.optim.NAdam, model), "hyper_optimizer": None}


OPTIONS = {"momentum": momentum, "adam": adam, "per partition": per_partition}


def trainer(options, steps=0):
    """Return a trainer with everything a checkpoint can have: BatchNorm, stored defaults, groups, metrics, a best."""
    generator = torch.Generator().manual_seed(0)
    x, mask = torch.randn(50, 4, generator=generator), hyper.InputMask(4, temperature=0.5)
    torch.manual_seed(1)
    layers = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2)
    model = partnets.partition(nn.Sequential(mask, *layers), PROPORTIONS, defaults="stored" if steps else "seed")
    callbacks = [every(2, lambda one: {"draw": float(torch.rand(()))}), every(3, record_loss_matrix)]
    one = partnets.Trainer(
        model,
        partnets.chunk((x, (x[:, 0] > 0).long()), PROPORTIONS),
        hyper=mask,
        batch_size=8,
        lml_every=2,
        keep_best=True,
        callbacks=callbacks,
        **options(model, mask),
    )
    one.fit(steps)
    return one


def contents(one):
    """Return a copy of everything that a checkpoint of a trainer would contain."""
    return copy.deepcopy(checkpoint._state(one) | {"noises": [checkpoint.random_state(one)]})


def is_same(one, other):
    """Return whether two values are bitwise equal after casting the second to the dtype of the first."""
    if isinstance(one, torch.Tensor):
        if not isinstance(other, torch.Tensor) or one.shape != other.shape or other.is_meta:
            return False
        return bool(torch.isclose(one, other.to_dense().to(one.dtype), 0, 0, equal_nan=True).all())
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(is_same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return isinstance(other, list | tuple) and len(one) == len(other) and all(map(is_same, one, other))
    return one == other or (one != one and other != other)


def is_told(found, file, saved, name=""):
    """Return whether each loaded value equals the file's value, or the originally saved value."""
    if is_same(found, saved) or is_same(found, file):
        return True
    if "running_" in name and name.endswith("_rows"):  # subnetwork C's are in the buffer itself, and copied from there
        return isinstance(file, torch.Tensor) and is_told(found[:-1], file[:-1], saved[:-1])
    if isinstance(found, dict):
        return isinstance(file, dict) and all(is_told(found[k], file.get(k), saved.get(k), k) for k in found)
    if isinstance(found, list | tuple) and isinstance(file, list | tuple) and len(found) == len(file) == len(saved):
        return all(map(is_told, found, file, saved))
    return False


def places(value):
    """Yield each nested container with each of its keys."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places(value[key])


OTHERS = ("text", None, [], {}, -1, 3, 1.5, True, [0.1, "x"], {"a": 1}, torch.tensor(1.0), torch.zeros(2, 3))
NUMBERS = (float("nan"), float("inf"), -float("inf"), -1, -0.5, 0, 2**62, 10**30, 1e300, "0.1", True)
TENSORS = (
    lambda t: t[None],
    lambda t: t.flatten()[:-1],
    lambda t: torch.cat([t.flatten(), t.flatten()]),
    lambda t: t.double(),
    lambda t: t.half(),
    lambda t: t.long(),
    lambda t: t.to(torch.complex64),
    lambda t: t.bool(),
    lambda t: t.to_sparse(),
    lambda t: t.to("meta"),
    lambda t: torch.full_like(t, -7) if t.dtype != torch.uint8 else ~t,
    lambda t: t * float("nan"),
    lambda t: torch.full_like(t, torch.finfo(t.dtype).max) if t.is_floating_point() else t + 2**62,
    lambda t: t.tolist(),
)


def damaged(saved, rng):
    """Return a copy in which one value, or sometimes two, is missing or has another type, shape, dtype or value."""
    file = copy.deepcopy(saved)
    for _ in range(rng.choice((1, 1, 2))):
        part = rng.choice([name for name in file if name != "configuration"] + ["configuration"])
        inside = list(places(file[part])) if part in file else []
        container, key = rng.choice([(file, part), *inside]) if rng.random() > 0.1 else (file, part)
        if isinstance(container, dict) and key not in container:
            continue
        value, how = container[key], rng.random()
        if how < 0.15:
            del container[key]
        elif how < 0.35:
            container[key] = copy.deepcopy(rng.choice(OTHERS))
        elif isinstance(value, torch.Tensor):
            container[key] = rng.choice(TENSORS)(value)
        elif isinstance(value, tuple) and value:
            container[key] = (*value[:-1], rng.choice(NUMBERS))
        else:
            container[key] = rng.choice(NUMBERS)
    return file


def cases(quick, all):
    """Return seeds as parameters: the first `quick` in all runs, twice as many with FULL=1."""
    return [seed if seed < quick else pytest.param(seed, marks=pytest.mark.full) for seed in range(min(all, 2 * quick))]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return for each kind of optimiser a checkpoint's bytes, its contents, and the trainer's state."""
    found, path = {}, tmp_path_factory.mktemp("saved") / "checkpoint.pt"
    for name, options in OPTIONS.items():
        one = trainer(options, steps=6)
        one.save(path)
        found[name] = path.read_bytes(), torch.load(path, weights_only=True), contents(one)
    return found


def raises_and_changes_nothing(one, path):
    before, file = contents(one), path.read_bytes()
    try:
        one.load(path)
    except ValueError as error:
        assert str(path) in str(error)
        assert is_same(contents(one), before) and path.read_bytes() == file
        return True
    return False


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # damaged numbers cause warnings
@pytest.mark.parametrize("batch", cases(2, 40))
def test_a_structure_that_is_damaged_loads_to_what_it_says_or_changes_nothing(batch, saved, tmp_path):
    rng, path, loaded = random.Random(batch), tmp_path / "checkpoint.pt", 0
    for name, options in OPTIONS.items():
        _, whole, state = saved[name]
        one = trainer(options)
        for _ in range(9):
            file = damaged(whole, rng)
            file.pop("sealed", None)  # like a file of another program
            torch.save(file, path)
            if not raises_and_changes_nothing(one, path):
                loaded += 1
                assert is_told(contents(one), file, state)
                one.other_chunks = True  # the loaded chunks may differ
                with suppress(FloatingPointError):  # a weight may be NaN
                    one.fit(1)
                one = trainer(options)
    assert loaded < 24


@pytest.mark.parametrize("batch", cases(1, 20))
def test_each_bit_that_flips_is_noticed(batch, saved, tmp_path):
    rng, path = random.Random(batch), tmp_path / "checkpoint.pt"
    one = trainer(adam)
    content = saved["adam"][0]
    last = range(8 * len(content) - 400, 8 * len(content), 7) if batch == 0 else ()
    for bit in (*(rng.randrange(8 * len(content)) for _ in range(60)), *last):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        assert raises_and_changes_nothing(one, path)


def test_each_truncated_file_is_noticed(saved, tmp_path):
    rng, path, one = random.Random(0), tmp_path / "checkpoint.pt", trainer(adam)
    content = saved["adam"][0]
    for size in (0, 1, 47, 48, 49, *(len(content) - n for n in (1, 16, 32, 47, 48, 49)), rng.randrange(len(content))):
        path.write_bytes(content[:size])
        assert raises_and_changes_nothing(one, path)


def test_a_file_that_would_unpack_to_more_than_it_is_is_not_read(tmp_path):
    import zipfile

    path = tmp_path / "checkpoint.pt"
    torch.save({"format": 4, "x": torch.zeros(1000)}, tmp_path / "stored.pt")
    with zipfile.ZipFile(tmp_path / "stored.pt") as stored, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for entry in stored.infolist():
            packed.writestr(entry.filename, stored.read(entry))
    assert torch.equal(torch.load(path, weights_only=True)["x"], torch.zeros(1000))
    assert raises_and_changes_nothing(trainer(adam), path)


CASES = {
    "a rate that is NaN": ("adam", lambda f: f["optimizer"]["param_groups"][0].update(lr=float("nan")), "lr=nan"),
    "a rate of ψ": ("momentum", lambda f: f["hyper_optimizer"]["param_groups"][0].update(lr=float("nan")), "lr is nan"),
    "betas of 1": ("adam", lambda f: f["optimizer"]["param_groups"][0].update(betas=(0.9, 1.0)), "betas="),
    "ψ's betas": (
        "adam",
        lambda f: f["hyper_optimizer"]["param_groups"][0].update(betas=(0.9, 1.0)),
        "hyper_optimizer",
    ),
    "a negative step": ("adam", lambda f: f["optimizer"]["state"][0]["step"].neg_(), "numbers of steps"),
    "ψ's step": ("adam", lambda f: f["hyper_optimizer"]["state"][0]["step"].fill_(-1), "hyper_optimizer"),
    "no step": ("adam", lambda f: f["optimizer"]["state"][0].pop("step"), "state of shapes"),
    "ψ's moment": ("adam", lambda f: f["hyper_optimizer"]["state"][0].pop("exp_avg"), "hyper_optimizer: "),
    "a moment's dtype": (
        "momentum",
        lambda f: f["optimizer"]["state"][0].update(momentum=f["optimizer"]["state"][0]["momentum"].half()),
        r"state\.0\.momentum is torch\.float16",
    ),
    "a scheduler's type": ("momentum", lambda f: f["scheduler"].update(last_epoch="6"), "last_epoch"),
    "a scheduler's rate": ("adam", lambda f: f["scheduler"].update(gamma=float("nan")), "gamma is nan"),
    "a scheduler's next rate": ("adam", lambda f: f["scheduler"].update(gamma=-1.0), "rate after its next step is -"),
    "a scheduler's period": ("momentum", lambda f: f["hyper_scheduler"].update(T_max=0), "hyper_scheduler: "),
    "sparse defaults": (
        "momentum",
        lambda f: f["model"].update({"1.weight_stored": f["model"]["1.weight_stored"].to_sparse()}),
        r"1\.weight_stored is .* torch\.sparse_coo",
    ),
    "stored defaults of other entries": (
        "momentum",
        lambda f: f["model"].update({"1.weight_stored": f["model"]["1.weight_stored"][:-1]}),
        r"1\.weight_stored is .*; it must be torch\.float32",
    ),
    "no stored defaults": ("momentum", lambda f: f["model"].pop("1.weight_stored"), r"1\.weight_stored is missing"),
    "defaults of no kind": ("adam", lambda f: f["model"]["4.weight_defaults"].fill_(9), "of kind 9"),
    "a map of other partitions": ("adam", lambda f: f["model"]["4.weight_partition"].fill_(255), "above its count"),
    "a bias": ("adam", lambda f: f["model"]["4.bias"].add_(1), r"4\.bias and 4\.bias_rows do not agree"),
    "another shape": ("adam", lambda f: f["model"].update({"4.weight": torch.zeros(5, 2)}), r"4\.weight"),
    "more than the model": ("adam", lambda f: f["model"].update({"9.weight": torch.zeros(5, 2)}), r"9\.weight"),
    "a history of other lengths": ("adam", lambda f: f["history"]["steps"]["loss"].pop(), "lengths"),
    "no generator": ("adam", lambda f: f.pop("generator"), "no generator"),
    "a generator": ("adam", lambda f: f.update(generator=torch.zeros(3, dtype=torch.uint8)), "generator: "),
    "noise": ("adam", lambda f: f["noises"][0].update(python=(3, (1, 2), None)), "noises: "),
    "a best of NaN": ("adam", lambda f: f["best"].update(lml=float("nan")), "best: "),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_damaged_is_named_before_anything_changes(case, saved, tmp_path):
    name, damage, message = CASES[case]
    file = copy.deepcopy(saved[name][1])
    del file["sealed"]
    damage(file)
    path = tmp_path / "checkpoint.pt"
    torch.save(file, path)
    one = trainer(OPTIONS[name])
    before = contents(one)
    with pytest.raises(ValueError, match=rf"checkpoint\.pt is damaged.*nothing has changed\. (?s:.)*{message}"):
        one.load(path)
    assert is_same(contents(one), before)


def test_a_file_without_a_checksum_is_loaded_and_plain_torch_reads_those_that_have_one(saved, tmp_path):
    file = copy.deepcopy(saved["adam"][1])
    assert file.pop("sealed") is True
    torch.save(file, tmp_path / "older.pt")
    one = trainer(adam)
    one.load(tmp_path / "older.pt")
    assert is_same(contents(one), saved["adam"][2])
