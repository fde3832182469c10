"""A run resumes with the same bits for all options; loading a file that does not fit raises and changes nothing."""

import copy
import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import Subset, TensorDataset

import partnets
from partnets import hyper, optim
from partnets.training.callbacks import every
from partnets.utils import sealed

PROPORTIONS = (0.6, 0.2, 0.2)


def examples():
    x = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] > 0).long()


def parts(proportions=PROPORTIONS, width=5, **options):
    mask = hyper.InputMask(4, temperature=0.5)
    layers = nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.1), nn.ReLU(), nn.Linear(width, 2)
    model = partnets.partition(nn.Sequential(mask, *layers), proportions, **options)
    return model, partnets.chunk(examples(), proportions), mask


def trainer(make=None, **arguments):
    model, chunks, mask = parts()
    options = {} if make is None else make(model, mask)
    return partnets.Trainer(model, chunks, **{"hyper": mask, "batch_size": 16} | options | arguments)


def bits(trainer):
    """Return all tensors that training changes."""
    tensors = [value for value in trainer.model.state_dict().values() if torch.is_tensor(value)]
    for optimizer in filter(None, (trainer.optimizer, trainer.hyper_optimizer)):
        tensors += [value for state in optimizer.state_dict()["state"].values() for value in state.values()]
    if trainer.best is not None:
        tensors += [torch.tensor([trainer.best.step, trainer.best.lml]), *trainer.best.state.values()]
    return [tensor.detach().clone() for tensor in [*tensors, trainer.generator.get_state(), torch.get_rng_state()]]


def same(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


def every_option(model, mask):
    optimizer = optim.AdamW(model, lr=0.02, groups=[{"params": [model[5].bias], "lr": 0.1}])
    hyper_optimizer = torch.optim.SGD(mask.parameters(), lr=0.5, momentum=0.9)
    return {
        "optimizer": optimizer,
        "hyper_optimizer": hyper_optimizer,
        "scheduler": lr_scheduler.MultiStepLR(optimizer, [4, 13], gamma=0.5),
        "hyper_scheduler": lr_scheduler.CosineAnnealingLR(hyper_optimizer, 12),
        "sampling": (0.5, 0.25, 0.25),
        "clip": 0.3,
        "hyper_every": 2,
        "hyper_after": 1,
        "keep_best": True,
        "callbacks": [every(3, lambda one: {"draw": float(torch.rand(()))})],
    }


OPTIONS = {
    "Adam": lambda model, mask: {"optimizer": optim.Adam(model)},
    "SGD": lambda model, mask: {"optimizer": optim.SGD(model, lr=0.1, momentum=0.9)},
    "NAdam": lambda model, mask: {"optimizer": optim.PerPartition(torch.optim.NAdam, model)},
    "every option": every_option,
    "one pass": lambda model, mask: {"one_pass": True},
}


@pytest.mark.cases(usual=2)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(options, tmp_path):
    torch.manual_seed(5)
    whole = trainer(options, lml_every=4)
    whole.fit(20)
    expected = bits(whole)
    torch.manual_seed(5)
    first = trainer(options, lml_every=4)
    first.fit(10)
    first.save(tmp_path / "checkpoint.pt")
    torch.manual_seed(99)
    resumed = trainer(options, lml_every=4)
    resumed.load(tmp_path / "checkpoint.pt")
    assert resumed.steps == 10
    resumed.fit(10)
    assert same(bits(resumed), expected) and resumed.history == whole.history
    for name in ("scheduler", "hyper_scheduler"):
        if getattr(whole, name) is not None:
            assert getattr(resumed, name).state_dict() == getattr(whole, name).state_dict()


@pytest.mark.full
def test_a_checkpoint_saved_by_a_callback_that_drew_noise_resumes_exactly(tmp_path):
    def draw_and_save(one):
        noise = torch.rand(3).mean()
        if one.steps == 5:
            one.save(tmp_path / "checkpoint.pt")
        return {"noise": noise}

    whole = trainer(callbacks=[draw_and_save])
    whole.fit(9)
    expected = bits(whole)
    torch.manual_seed(99)
    resumed = trainer(callbacks=[draw_and_save])
    resumed.load(tmp_path / "checkpoint.pt")
    resumed.fit(4)
    assert same(bits(resumed), expected)


@pytest.mark.full
def test_a_checkpoint_saved_after_a_callback_raised_resumes_exactly(tmp_path):
    def fails(one):
        raise RuntimeError("the disk is full")

    whole = trainer(callbacks=[fails])
    with pytest.raises(RuntimeError, match="the disk is full"):
        whole.fit(1)
    whole.callbacks.clear()
    whole.fit(2)
    whole.save(tmp_path / "checkpoint.pt")
    whole.fit(3)
    expected, resumed = bits(whole), trainer()
    resumed.load(tmp_path / "checkpoint.pt")
    resumed.fit(3)
    assert same(bits(resumed), expected)


class Augmented(torch.utils.data.Dataset):
    """A data set that draws from Python's and NumPy's generators."""

    def __len__(self):
        return 50

    def __getitem__(self, i):
        x, y = examples()
        return x[i] * random.random() + float(np.random.rand()), y[i]


@pytest.mark.full
def test_python_and_numpy_draw_the_same_after_resuming(tmp_path):
    def fresh(seed):
        model, _, mask = parts()
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        return partnets.Trainer(model, partnets.chunk(Augmented(), PROPORTIONS), hyper=mask, batch_size=4)

    whole = fresh(1)
    whole.fit(2)
    whole.save(tmp_path / "checkpoint.pt")
    whole.fit(2)
    expected, resumed = bits(whole), fresh(2)
    resumed.load(tmp_path / "checkpoint.pt")
    resumed.fit(2)
    assert same(bits(resumed), expected)


@pytest.mark.full
def test_a_trainer_can_be_copied():
    one = trainer()
    one.fit(2)
    found = []
    for each in (copy.deepcopy(one), one):
        torch.manual_seed(1)
        each.fit(3)
        found.append(bits(each))
    assert same(*found)


@pytest.mark.full
def test_an_exhausted_run_stays_so_when_it_is_resumed(tmp_path, monkeypatch):
    monkeypatch.setattr(partnets.training.trainer, "lml", lambda *_, **__: -1.0)
    first, path = trainer(lml_every=1, patience=2), tmp_path / "checkpoint.pt"
    first.fit(9)
    first.save(path)
    resumed, patient = trainer(lml_every=1, patience=2), trainer(lml_every=1, patience=4)
    for one, steps in ((resumed, 3), (patient, 5)):
        one.load(path)
        one.fit(9)
        assert one.steps == steps


def interrupted(contents, file):
    file.write(b"half")
    raise KeyboardInterrupt


def test_a_save_that_fails_or_is_interrupted_leaves_the_old_file(tmp_path, monkeypatch):
    one, path = trainer(), tmp_path / "checkpoint.pt"
    one.save(path)
    before = path.read_bytes()
    one.fit(1)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch, "save", interrupted)
        one.save(path)
    one.optimizer.param_groups[0]["lr"] = np.float64(0.1)
    with pytest.raises(ValueError, match=r"would need numpy\S+, .*which Trainer\.load does not run; give optimisers"):
        one.save(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("subset", [False, True])
def test_the_checkpoint_of_data_in_another_order_raises(tmp_path, subset):
    def fresh(order):
        model, _, mask = parts()
        if subset:
            data = Subset(TensorDataset(*examples()), order.tolist())
        else:
            data = TensorDataset(*(part[order] for part in examples()))
        return partnets.Trainer(model, partnets.chunk(data, PROPORTIONS), hyper=mask, batch_size=16)

    fresh(torch.arange(50)).save(tmp_path / "checkpoint.pt")
    fresh(torch.arange(50)).load(tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError, match=r"with other chunks.*in the same order"):
        fresh(torch.arange(50).flip(0)).load(tmp_path / "checkpoint.pt")


def scheduled(name, schedule=lr_scheduler.StepLR):
    def make(model, mask):
        optimizers = {"scheduler": optim.Adam(model), "hyper_scheduler": torch.optim.Adam(mask.parameters())}
        options = {"optimizer": optimizers["scheduler"], "hyper_optimizer": optimizers["hyper_scheduler"]}
        return options | {name: schedule(optimizers[name], 3)}

    return trainer(make)


def other_parts(cast=nn.Module.float, **options):
    model, chunks, mask = parts(**options)
    return partnets.Trainer(cast(model), chunks, hyper=mask, batch_size=16)


# By the fact that the error names.
OTHERS = {
    "batch_size": lambda: trainer(batch_size=8),
    "hyper_batch_size": lambda: trainer(hyper_batch_size=8),
    "optimizer groups": lambda: trainer(
        lambda model, _: {"optimizer": optim.Adam(model, groups=[{"params": [model[5].weight]}])}
    ),
    "optimizer": lambda: trainer(OPTIONS["NAdam"]),
    "hyper_optimizer": lambda: trainer(lambda _, mask: {"hyper_optimizer": torch.optim.SGD(mask.parameters())}),
    "scheduler": lambda: scheduled("scheduler"),
    "hyper_scheduler": lambda: scheduled("hyper_scheduler"),
    "sampling": lambda: trainer(sampling=(1, 1, 1)),
    "clip": lambda: trainer(clip=1.0),
    "hyper_every": lambda: trainer(hyper_every=2),
    "hyper_after": lambda: trainer(hyper_after=5),
    "one_pass": lambda: trainer(one_pass=True),
    "keep_best": lambda: trainer(keep_best=True, lml_every=5),
    "hyper_gradient": lambda: trainer(hyper_gradient="lookahead"),
    "parameters": lambda: other_parts(width=7),
    "parameters ": lambda: other_parts(nn.Module.double),
    "parameters  ": lambda: other_parts(defaults="stored"),
    "chunk sizes": lambda: other_parts(proportions=(0.9, 0.1)),
    "hyper": lambda: trainer(hyper=[]),
    "other chunks": lambda: partnets.Trainer(
        (split := parts())[0], partnets.chunk(examples(), PROPORTIONS, seed=1), hyper=split[2], batch_size=16
    ),
}


@pytest.mark.cases(usual=5)
@pytest.mark.parametrize("name", OTHERS)
def test_the_checkpoint_of_another_configuration_raises_and_changes_nothing(name, tmp_path):
    saved, path = trainer(), tmp_path / "checkpoint.pt"
    saved.fit(1)
    saved.save(path)
    other = OTHERS[name]()
    before = bits(other)
    with pytest.raises(ValueError, match=f"was saved with {name.strip()}"):
        other.load(path)
    assert same(bits(other), before) and other.steps == 0 and other.history == partnets.History()


def test_loading_restores_the_saved_settings_and_warns_if_they_differ(tmp_path):
    path = tmp_path / "checkpoint.pt"

    def made(lr, step_size, decay):
        def make(model, mask):
            optimizer = optim.AdamW(model, lr=lr, weight_decay=decay)
            schedule = lr_scheduler.StepLR(optimizer, step_size, gamma=0.5)
            return {
                "optimizer": optimizer,
                "scheduler": schedule,
                "hyper_optimizer": torch.optim.SGD(mask.parameters(), lr=lr),
            }

        return trainer(make)

    saved = made(0.1, 2, 0.3)
    saved.fit(3)
    saved.save(path)
    with warnings.catch_warnings(action="error"):
        made(0.1, 2, 0.3).load(path)
    one = made(0.7, 5, (0.1, 0.2, 0.3))
    told = r"weight_decay is \(0\.3, 0\.3, 0\.3\), not .*hyper_optimizer.*lr is 0\.1, not 0\.7.*step_size is 2, not 5"
    with pytest.warns(UserWarning, match=told):
        one.load(path)
    assert one.optimizer.param_groups[0]["lr"] == 0.05 and one.hyper_optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize(
    "around",
    [
        lambda optimizer, one: lr_scheduler.SequentialLR(optimizer, [one, lr_scheduler.StepLR(optimizer, 3)], [20]),
        lambda _, one: lr_scheduler.ChainedScheduler([one]),
    ],
)
def test_settings_of_a_schedule_inside_another_one_count(tmp_path, around):
    def made(gamma):
        def make(model, mask):
            optimizer = optim.SGD(model, lr=1.0)
            return {"optimizer": optimizer, "scheduler": around(optimizer, lr_scheduler.StepLR(optimizer, 2, gamma))}

        return trainer(make)

    made(0.5).save(path := tmp_path / "checkpoint.pt")
    with warnings.catch_warnings(action="error"):
        made(0.5).load(path)
    with pytest.warns(UserWarning, match=r"schedulers\[0\]\.gamma is 0\.5, not 0\.1"):
        made(0.1).load(path)


def flipped(at):
    def damage(content):
        content = bytearray(content)
        content[int(at * (len(content) - 1))] ^= 4
        return bytes(content)

    return damage


DAMAGES = {
    **{f"a flipped bit at {at}": (flipped(at), "damaged") for at in (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)},
    "a flipped bit of the mark": (flipped(0.9999), "damaged|not a checkpoint"),
    **{f"an end {n} bytes early": (lambda c, n=n: c[:-n], "not a checkpoint") for n in (1, 32, 48, 500)},
    "half of it": (lambda content: content[: len(content) // 2], "not a checkpoint"),
    "nothing": (lambda content: b"", "not a checkpoint"),
    "a byte more": (lambda content: content + b"0", "not a checkpoint"),
    "a block of zeros": (lambda content: content[:2000] + bytes(512) + content[2512:], "damaged"),
    "two exchanged blocks": (lambda content: content[1024:2048] + content[:1024] + content[2048:], "damaged"),
    "no checksum": (lambda content: content[:-48], "not a checkpoint"),
    "text": (lambda content: b"step,k,loss\n1,1,0.7\n" * 10, "not a checkpoint"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_refused_and_changes_nothing(name, tmp_path):
    damage, message = DAMAGES[name]
    path, one = tmp_path / "checkpoint.pt", trainer()
    trainer(lml_every=1, callbacks=[lambda one: {"x": 1.0}]).save(path)
    path.write_bytes(damage(path.read_bytes()))
    before = bits(one)
    with pytest.raises(ValueError, match=rf"checkpoint\.pt is ({message})"):
        one.load(path)
    assert same(bits(one), before) and one.steps == 0


def test_a_missing_file_another_version_or_a_state_dict_is_refused(tmp_path, monkeypatch):
    path, one = tmp_path / "checkpoint.pt", trainer()
    with monkeypatch.context() as patch:
        patch.setattr(sealed, "VERSION", 4)
        one.save(path)
    assert torch.load(path, weights_only=True)["version"] == 4  # plain torch reads it
    with pytest.raises(ValueError, match="of version 4, but this program has version"):
        one.load(path)
    torch.save(one.model.state_dict(), path)
    with pytest.raises(ValueError, match="is not a checkpoint"):
        one.load(path)
    with pytest.raises(FileNotFoundError):
        one.load(tmp_path / "none.pt")
