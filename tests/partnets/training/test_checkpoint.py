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
from partnets.training.callbacks import every, record_loss_matrix

PROPORTIONS = (0.6, 0.2, 0.2)


def examples():
    x = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] > 0).long()


def parts(proportions=PROPORTIONS, width=5):
    mask = hyper.InputMask(4, temperature=0.5)
    model = nn.Sequential(mask, nn.Linear(4, width), nn.Dropout(0.1), nn.ReLU(), nn.Linear(width, 2))
    return partnets.partition(model, proportions), partnets.chunk(examples(), proportions), mask


def trainer(**arguments):
    model, chunks, mask = parts()
    return partnets.Trainer(model, chunks, **{"hyper": mask, "batch_size": 16} | arguments)


def bits(trainer):
    """Return all tensors that training changes."""
    tensors = [*trainer.model.state_dict().values()]
    for optimizer in filter(None, (trainer.optimizer, trainer.hyper_optimizer)):
        tensors += [value for state in optimizer.state_dict()["state"].values() for value in state.values()]
    if trainer.best is not None:
        tensors += [torch.tensor([trainer.best.step, trainer.best.lml]), *trainer.best.state.values()]
    return [tensor.detach().clone() for tensor in [*tensors, trainer.generator.get_state(), torch.get_rng_state()]]


def every_option(model, mask):
    optimizer = optim.AdamW(model, lr=0.02)
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
        "hyper_chunks": "all",
        "keep_best": True,
        "callbacks": [every(3, lambda one: {"draw": float(torch.rand(()))}), every(4, record_loss_matrix)],
    }


OPTIONS = {
    "Adam": lambda model, mask: {"optimizer": optim.Adam(model)},
    "SGD": lambda model, mask: {"optimizer": optim.SGD(model, lr=0.1, momentum=0.9)},
    "every option": every_option,
    "one pass": lambda model, mask: {"one_pass": True},
}


@pytest.mark.cases(usual=1)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(options, tmp_path):
    def fresh():
        model, chunks, mask = parts()
        return partnets.Trainer(model, chunks, hyper=mask, batch_size=16, lml_every=4, **options(model, mask))

    torch.manual_seed(5)
    whole = fresh()
    whole.fit(20)
    expected = bits(whole)

    torch.manual_seed(5)
    first = fresh()
    first.fit(10)
    first.save(tmp_path / "checkpoint.pt")
    torch.manual_seed(99)
    resumed = fresh()
    resumed.load(tmp_path / "checkpoint.pt")
    assert resumed.steps == 10
    resumed.fit(10)
    assert all(map(torch.equal, bits(resumed), expected))
    assert resumed.history == whole.history
    for name in ("scheduler", "hyper_scheduler"):
        if getattr(whole, name) is not None:
            assert getattr(resumed, name).state_dict() == getattr(whole, name).state_dict()


@pytest.mark.full
def test_one_that_a_callback_saves_after_drawing_noise_resumes_to_the_same_bits(tmp_path):
    path = tmp_path / "checkpoint.pt"

    def draw_and_save(one):
        noise = torch.rand(3).mean()
        if one.steps == 5:
            one.save(path)
        return {"noise": noise}

    torch.manual_seed(5)
    whole = trainer(callbacks=[draw_and_save])
    whole.fit(9)
    torch.manual_seed(99)
    resumed = trainer(callbacks=[draw_and_save])
    resumed.load(path)
    resumed.fit(4)
    assert all(map(torch.equal, bits(resumed), bits(whole)))


@pytest.mark.full
def test_one_saved_later_than_a_callback_that_raised_resumes_to_the_same_bits(tmp_path):
    def fails(one):
        raise RuntimeError("the disk is full")

    whole = trainer(callbacks=[fails])
    with pytest.raises(RuntimeError, match="the disk is full"):
        whole.fit(1)
    whole.callbacks.clear()
    whole.fit(2)
    whole.save(tmp_path / "checkpoint.pt")
    whole.fit(3)
    resumed = trainer()
    resumed.load(tmp_path / "checkpoint.pt")
    resumed.fit(3)
    assert all(map(torch.equal, bits(resumed), bits(whole)))


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
    resumed = fresh(2)
    resumed.load(tmp_path / "checkpoint.pt")
    resumed.fit(2)
    assert all(map(torch.equal, bits(resumed), bits(whole)))


def test_what_could_not_be_loaded_is_not_saved(tmp_path):
    one, path = trainer(), tmp_path / "checkpoint.pt"
    one.save(path)
    before = path.read_bytes()
    one.optimizer.param_groups[0]["lr"] = np.float64(0.1)
    with pytest.raises(ValueError, match=r"would need numpy\S+, .*which Trainer\.load does not run; give optimisers"):
        one.save(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("subset", [False, True])
def test_the_checkpoint_of_data_in_another_order_raises(tmp_path, subset):
    def fresh(order):
        model, _, mask = parts()
        data = (
            Subset(TensorDataset(*examples()), order.tolist())
            if subset
            else TensorDataset(*(part[order] for part in examples()))
        )
        return partnets.Trainer(model, partnets.chunk(data, PROPORTIONS), hyper=mask, batch_size=16)

    fresh(torch.arange(50)).save(tmp_path / "checkpoint.pt")
    fresh(torch.arange(50)).load(tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError, match=r"with other chunks.*in the same order"):
        fresh(torch.arange(50).flip(0)).load(tmp_path / "checkpoint.pt")


@pytest.mark.full
def test_a_trainer_can_be_copied():
    one = trainer()
    one.fit(2)
    torch.manual_seed(1)
    other = copy.deepcopy(one)
    other.fit(3)
    torch.manual_seed(1)
    one.fit(3)
    assert all(map(torch.equal, bits(one), bits(other)))


@pytest.mark.full
def test_the_best_state_is_resumed(tmp_path):
    def fresh():
        return trainer(keep_best=True, lml_every=1)

    first, path = fresh(), tmp_path / "checkpoint.pt"
    first.fit(4)
    first.save(path)
    resumed = fresh()
    resumed.load(path)
    assert (resumed.best.step, resumed.best.lml) == (first.best.step, first.best.lml)
    resumed.model[1].weight.data.fill_(9.0)
    assert resumed.restore_best() == first.restore_best()
    assert all(map(torch.equal, resumed.model.parameters(), first.model.parameters()))


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


def test_saving_leaves_one_file_and_an_interruption_the_old_one(tmp_path, monkeypatch):
    one, path = trainer(), tmp_path / "checkpoint.pt"
    one.save(path)
    before = path.read_bytes()
    one.fit(1)

    def interrupted(contents, file):
        file.write(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch, "save", interrupted)
        one.save(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_a_checkpoint_has_the_permissions_of_any_new_file(tmp_path):
    trainer().save(tmp_path / "checkpoint.pt")
    (tmp_path / "other").touch()
    assert (tmp_path / "checkpoint.pt").stat().st_mode == (tmp_path / "other").stat().st_mode


def grouped():
    model, chunks, mask = parts()
    optimizer = optim.Adam(model, groups=[{"params": model[4].parameters(), "lr": 0.1}])
    return partnets.Trainer(model, chunks, hyper=mask, optimizer=optimizer, batch_size=16)


def scheduled(name, schedule):
    model, chunks, mask = parts()
    optimizers = {"scheduler": optim.Adam(model), "hyper_scheduler": torch.optim.Adam(mask.parameters())}
    options = {"optimizer": optimizers["scheduler"], "hyper_optimizer": optimizers["hyper_scheduler"]}
    return partnets.Trainer(
        model, chunks, hyper=mask, batch_size=16, **options, **{name: schedule(optimizers[name], 3)}
    )


OTHERS = {
    "batch_size": lambda: trainer(batch_size=8),
    "hyper_batch_size": lambda: trainer(hyper_batch_size=8),
    "optimizer groups": grouped,
    "scheduler": lambda: scheduled("scheduler", lr_scheduler.StepLR),
    "hyper_scheduler": lambda: scheduled("hyper_scheduler", lr_scheduler.StepLR),
    "sampling": lambda: trainer(sampling=(1, 1, 1)),
    "clip": lambda: trainer(clip=1.0),
    "hyper_every": lambda: trainer(hyper_every=2),
    "hyper_after": lambda: trainer(hyper_after=5),
    "hyper_chunks": lambda: trainer(hyper_chunks="all"),
    "one_pass": lambda: trainer(one_pass=True),
    "keep_best": lambda: trainer(keep_best=True, lml_every=5),
    "parameters": lambda: partnets.Trainer(*parts(width=7)[:2], hyper=[], batch_size=16),
    "parameters of another type": lambda: partnets.Trainer((split := parts())[0].double(), split[1], hyper=split[2]),
    "partitions": lambda: partnets.Trainer(*parts(proportions=(0.9, 0.1))[:2], hyper=[], batch_size=16),
    "hyper": lambda: trainer(hyper=[]),
    "other chunks": lambda: partnets.Trainer(
        *(split := parts())[:1], partnets.chunk(examples(), PROPORTIONS, seed=1), hyper=split[2], batch_size=16
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
    message = {"partitions": "chunk sizes", "parameters of another type": "parameters"}.get(name, name)
    with pytest.raises(ValueError, match=rf"with {message} " if name != "other chunks" else message):
        other.load(path)
    assert all(map(torch.equal, bits(other), before))
    assert other.steps == 0 and other.history == partnets.History()


def test_settings_are_those_of_the_checkpoint_with_a_warning_if_they_were_others(tmp_path):
    path = tmp_path / "checkpoint.pt"

    def made(lr, step_size, decay):
        model, chunks, mask = parts()
        optimizer = optim.AdamW(model, lr=lr, weight_decay=decay)
        schedule = lr_scheduler.StepLR(optimizer, step_size, gamma=0.5)
        of_psi = torch.optim.SGD(mask.parameters(), lr=lr)
        options = {"optimizer": optimizer, "scheduler": schedule, "hyper_optimizer": of_psi, "batch_size": 16}
        return partnets.Trainer(model, chunks, hyper=mask, **options)

    saved = made(0.1, 2, 0.01)
    saved.fit(3)
    saved.save(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # equal settings, and a learning rate that the schedule changed, do not warn
        made(0.1, 2, 0.01).load(path)
    other = made(0.3, 5, 0.02)
    with pytest.warns(UserWarning) as told:
        other.load(path)
    (message,) = [str(one.message) for one in told]
    for name in ("optimizer.param_groups[0].weight_decay is (0.01", "scheduler.step_size is 2, not 5",
                 "hyper_optimizer.param_groups[0].lr is 0.1, not 0.3", "initial_lr is 0.1, not 0.3"):  # fmt: skip
        assert name in message
    assert told[0].filename == __file__ and "epoch" not in message
    group, before = other.optimizer.param_groups[0], saved.optimizer.param_groups[0]
    assert group["lr"] == before["lr"] == 0.05 and other.scheduler.step_size == 2
    group["weight_decay"] = 0.5  # later changes are kept
    other.fit(1)
    assert other.optimizer.param_groups[0]["weight_decay"] == 0.5


@pytest.mark.parametrize("kind", ["scheduler", "hyper_scheduler"])
def test_the_checkpoint_of_a_run_with_another_scheduler_raises(kind, tmp_path):
    scheduled(kind, lr_scheduler.StepLR).save(tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError, match=f"with {kind} 'StepLR', but this trainer has 'CosineAnnealingLR'"):
        scheduled(kind, lr_scheduler.CosineAnnealingLR).load(tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError, match=f"with {kind} 'StepLR', but this trainer has 'NoneType'"):
        trainer().load(tmp_path / "checkpoint.pt")


@pytest.mark.parametrize(
    "contents",
    [{"model": 1}, {"format": 1, "configuration": {}}, {"format": 3, "configuration": {}}, [1], {"format": 4}],
)
def test_a_file_that_is_no_checkpoint_of_this_format_raises(contents, tmp_path):
    torch.save(contents, tmp_path / "model.pt")
    with pytest.raises(ValueError, match=r"not a checkpoint of format 4; pass a file that Trainer\.save wrote"):
        trainer().load(tmp_path / "model.pt")


@pytest.mark.parametrize("damage", [lambda content: b"", lambda content: b"hello", lambda content: content[:-500]])
def test_what_is_no_file_of_torch_raises_and_changes_nothing(damage, tmp_path):
    path = tmp_path / "checkpoint.pt"
    trainer().save(path)
    path.write_bytes(damage(path.read_bytes()))
    one = trainer()
    before = bits(one)
    with pytest.raises(ValueError, match=r"checkpoint\.pt is not a checkpoint of format 4"):
        one.load(path)
    assert all(map(torch.equal, bits(one), before))
    with pytest.raises(FileNotFoundError):
        one.load(tmp_path / "none.pt")
