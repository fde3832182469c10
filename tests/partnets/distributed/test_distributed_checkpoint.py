"""Checkpoints of torch.distributed.checkpoint from one or two ranks, sharded or not, resume on two ranks or one."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from training import OPTIMIZERS, STEPS, learn, learned, network, trainer

import partnets
from partnets import distributed, optim
from partnets.subnetworks.statistics import is_stale
from partnets.training import checkpoint

# Some tests use torch.distributed.checkpoint in a single process on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")


def parts(name, sharded, scheme):
    model = network(scheme)
    if sharded:
        distributed.fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    call = distributed.DDP(model) if dist.is_initialized() and not sharded else model
    optimizer = OPTIMIZERS[name](model)
    return call, model, optimizer, {"model": model, "optimizer": distributed.OptimizerState(model, optimizer)}


def first_half(name, sharded, scheme, folder):
    call, model, optimizer, both = parts(name, sharded, scheme)
    learn(model, call, optimizer, range(STEPS // 2))
    dcp.save(both, checkpoint_id=folder)


def second_half(name, sharded, scheme, folder):
    call, model, optimizer, both = parts(name, sharded, scheme)
    dcp.load(both, checkpoint_id=folder)
    return learn(model, call, optimizer, range(STEPS // 2, STEPS))


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "sharded", "scheme"),
    [("SGD", False, "weight"), ("Adam", True, "weight"), ("Adam", True, "nested"), ("NAdam", True, "nested")],
)
def test_model_and_optimiser_go_on_from_two_ranks_in_one_process_and_the_other_way_round(
    name, sharded, scheme, two_ranks, tmp_path
):
    _, model, optimizer, _ = parts(name, False, scheme)
    expected = learn(model, model, optimizer)
    two_ranks(first_half, name, sharded, scheme, tmp_path / "two")
    first_half(name, False, scheme, tmp_path / "one")
    found = [
        second_half(name, False, scheme, tmp_path / "two"),
        *two_ranks(second_half, name, sharded, scheme, tmp_path / "one"),
    ]
    for weights in found:
        torch.testing.assert_close(weights, expected, rtol=1e-10, atol=1e-12)


def nested_trainer(measure):
    torch.manual_seed(0)
    layers, x = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3)), torch.randn(60, 4)
    nested = {"scheme": "nested", "example": x[:2], "proportions_of": measure}
    model = partnets.partition(layers, (0.6, 0.4), **nested)
    return partnets.Trainer(model, partnets.chunk((x, torch.arange(60) % 3), (0.6, 0.4)), batch_size=8)


@pytest.mark.full
def test_nested_channels_of_another_number_are_refused_before_anything_is_written(tmp_path):
    saved = nested_trainer("weights")
    saved.fit(1)
    distributed.save(saved, tmp_path)
    other = nested_trainer("units")
    before = [parameter.clone() for parameter in other.model.parameters()]
    with pytest.raises(ValueError, match="was saved with channels"):
        distributed.load(other, tmp_path)
    assert all(map(torch.equal, before, other.model.parameters()))
    distributed.load(nested_trainer("weights"), tmp_path)


@pytest.mark.full
def test_a_model_alone_is_refused_other_nested_channels(alone, tmp_path):
    saved, other = (nested_trainer(measure).model for measure in ("weights", "units"))
    dcp.save({"model": saved}, checkpoint_id=tmp_path)
    with pytest.raises(RuntimeError, match=r"0\.weight_partition has other partitions than those of this model's"):
        dcp.load({"model": other}, checkpoint_id=tmp_path)
    dcp.load({"model": nested_trainer("weights").model}, checkpoint_id=tmp_path)


def other_partitions(seed):
    return partnets.partition(nn.Sequential(nn.Linear(4, 3)), (0.5, 0.5), seed=seed)


def test_the_partitions_are_loaded_and_checked(tmp_path):
    saved, loaded = other_partitions(0), other_partitions(1)
    dcp.save({"model": saved}, checkpoint_id=tmp_path)
    dcp.load({"model": loaded}, checkpoint_id=tmp_path)
    x = torch.randn(2, 4)
    with partnets.subnetwork(saved, active=1), partnets.subnetwork(loaded, active=1):
        assert torch.equal(saved(x), loaded(x))
    expected, found = partnets.partitions(saved)["0.weight"], partnets.partitions(loaded)["0.weight"]
    assert torch.equal(expected.map, found.map)
    assert expected.defaults == found.defaults


def test_the_state_of_an_optimiser_with_other_groups_raises():
    model = network()
    saved = distributed.OptimizerState(model, optim.SGD(model)).state_dict()
    groups = [{"params": [model[6].weight], "lr": 0.2}]
    other = distributed.OptimizerState(model, optim.SGD(model, groups=groups))
    with pytest.raises(ValueError, match="the saved optimiser's groups have other parameters than this one's"):
        other.load_state_dict(saved)


def train_sharded(folder, before, after):
    one = trainer(distributed.Trainer, sharded=True)
    if before:
        one.fit(before)
        distributed.save(one, folder)
    else:
        distributed.load(one, folder)
    one.fit(after)
    return learned(one), one.best.step, one.best.lml


@pytest.mark.full
@pytest.mark.parametrize("half", [3, 6])  # L_ML is evaluated after 4 steps
def test_a_trainer_goes_on_from_two_ranks_in_one_process_and_the_other_way_round(half, two_ranks, tmp_path):
    alone = trainer(partnets.Trainer)
    alone.fit(half)
    distributed.save(alone, tmp_path / "one")
    alone.fit(12 - half)
    uninterrupted = two_ranks(train_sharded, tmp_path / "two", half, 12 - half)
    resumed = trainer(partnets.Trainer)
    distributed.load(resumed, tmp_path / "two")
    assert (resumed.best.step > 0) == bool(resumed.best.state) == (half > 4)
    resumed.fit(12 - half)
    found = [(learned(resumed), resumed.best.step, resumed.best.lml), *uninterrupted]
    for weights, step, lml in [*found, *two_ranks(train_sharded, tmp_path / "one", 0, 12 - half)]:
        torch.testing.assert_close(weights, learned(alone), rtol=1e-9, atol=1e-11)
        assert step == alone.best.step
        assert lml == pytest.approx(alone.best.lml)


def test_a_folder_that_is_damaged_is_named_and_nothing_of_the_trainer_changes(tmp_path):
    saved = trainer(partnets.Trainer)
    saved.fit(6)
    distributed.save(saved, tmp_path)
    other = trainer(partnets.Trainer)
    other.fit(1)
    before = [tensor.detach().clone() for tensor in (*learned(other), other.generator.get_state())]

    def unchanged():
        return all(map(torch.equal, (*learned(other), other.generator.get_state()), before))

    rest = tmp_path / "trainer.pt"
    with pytest.raises(
        ValueError, match=r"trainer\.pt has no best, model, optimizer, as partnets\.distributed\.save wrote it"
    ):
        other.load(rest)
    assert unchanged()
    whole = rest.read_bytes()
    rest.write_bytes(whole[:900] + bytes([whole[900] ^ 4]) + whole[901:])
    with pytest.raises(ValueError, match=r"trainer\.pt is damaged: it has another checksum"):
        distributed.load(other, tmp_path)
    assert unchanged()
    rest.write_bytes(whole)
    next(tmp_path.glob("dcp.*/.metadata")).unlink()
    with pytest.raises(FileNotFoundError, match="metadata"):
        distributed.load(other, tmp_path)
    assert unchanged()


def test_a_file_of_a_trainer_on_one_process_is_refused_with_the_cure(tmp_path):
    one = trainer(partnets.Trainer)
    one.save(tmp_path / "trainer.pt")
    with pytest.raises(ValueError, match=r"trainer\.pt was written by Trainer\.save; pass it to the load method"):
        distributed.load(one, tmp_path)


def kill(*_, **__):
    raise KeyboardInterrupt("killed")


# Interrupt a save after all ranks have written their parts, or after all tensors but before trainer.pt.
KILLED = {"in dcp.save": (dcp.FileSystemWriter, "finish"), "after it": (checkpoint, "save")}


def killed(one, folder, at, monkeypatch):
    """Save until the given point and stop as if killed, without deleting anything."""
    with monkeypatch.context() as patch, pytest.raises((KeyboardInterrupt, CheckpointException)):
        patch.setattr(*KILLED[at], kill)
        distributed.save(one, folder)


@pytest.mark.full
@pytest.mark.parametrize("at", KILLED)
def test_a_save_that_is_killed_leaves_the_checkpoint_before_it(at, monkeypatch, tmp_path):
    one = trainer(partnets.Trainer)
    one.fit(6)
    distributed.save(one, tmp_path)
    weights, random = copy.deepcopy(learned(one)), one.generator.get_state()
    one.fit(2)
    killed(one, tmp_path, at, monkeypatch)
    loaded = trainer(partnets.Trainer)
    distributed.load(loaded, tmp_path)
    torch.testing.assert_close(learned(loaded), weights, rtol=0, atol=0)
    assert loaded.steps == 6 and torch.equal(loaded.generator.get_state(), random)


@pytest.mark.parametrize("at", KILLED)
def test_what_killed_saves_and_earlier_ones_left_is_deleted_and_nothing_else(at, monkeypatch, tmp_path):
    one = trainer(partnets.Trainer)
    (tmp_path / "notes.txt").write_text("of the user")
    for _ in range(2):
        killed(one, tmp_path, at, monkeypatch)
    assert len([*tmp_path.glob("dcp.*")]) == 1
    for _ in range(2):
        distributed.save(one, tmp_path)
        assert sorted(path.name[:4] for path in tmp_path.iterdir()) == ["dcp.", "note", "trai"]


def test_what_a_damaged_file_may_have_named_is_kept_until_there_is_a_new_checkpoint(monkeypatch, tmp_path):
    one = trainer(partnets.Trainer)
    distributed.save(one, tmp_path)
    [first] = tmp_path.glob("dcp.*")
    (tmp_path / "trainer.pt").write_bytes(b"damaged")
    killed(one, tmp_path, "after it", monkeypatch)
    assert first.exists()
    distributed.save(one, tmp_path)
    assert len([*tmp_path.glob("dcp.*")]) == 1 and not first.exists()


@pytest.mark.parametrize("at", [*KILLED, "never begun"])
def test_a_folder_without_a_finished_save_is_told(at, monkeypatch, tmp_path):
    one = trainer(partnets.Trainer)
    if at in KILLED:
        killed(one, tmp_path, at, monkeypatch)
    with pytest.raises(FileNotFoundError, match=r"has no trainer\.pt: a save into it was never finished; load another"):
        distributed.load(one, tmp_path)


def saved_over(folder):
    """Return weights of a first save, and those loaded after a second save that rank 0 did not finish."""
    one = trainer(distributed.Trainer, sharded=True)
    one.fit(3)
    distributed.save(one, folder)
    before = copy.deepcopy(learned(one))
    one.fit(3)
    write = dcp.FileSystemWriter.write_data
    with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointException):
        patch.setattr(dcp.FileSystemWriter, "write_data", write if dist.get_rank() else kill)
        distributed.save(one, folder)
    distributed.load(one, folder)
    return before, learned(one), one.steps


def test_weights_of_which_one_rank_alone_wrote_its_part_are_not_loaded(two_ranks, tmp_path):
    for before, loaded, steps in two_ranks(saved_over, tmp_path):
        torch.testing.assert_close(loaded, before, rtol=0, atol=0)
        assert steps == 3


def use_one_file(function, path):
    getattr(trainer(distributed.Trainer, sharded=True), function)(path)


@pytest.mark.parametrize("function", ["save", "load"])
def test_a_sharded_model_is_not_kept_in_one_file(function, two_ranks, tmp_path):
    with pytest.raises(
        AssertionError,
        match=f"ValueError: no rank has the whole model, which is sharded; use partnets.distributed.{function}",
    ):
        two_ranks(use_one_file, function, tmp_path / "checkpoint.pt")


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def with_norm(seed=0):
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))
    return partnets.partition(layers, (0.6, 0.4), defaults="seed", seed=seed)


@pytest.mark.full
def test_a_model_alone_remembers_its_chunks_and_that_its_statistics_are_fresh(alone, tmp_path):
    x, model = torch.randn(60, 4), with_norm()
    chunks, others = (partnets.chunk((x, torch.arange(60) % 3), (0.6, 0.4), seed=seed) for seed in (0, 1))
    partnets.Trainer(model, chunks, batch_size=8).fit(2)
    dcp.save({"model": model}, checkpoint_id=tmp_path)
    loaded = with_norm(1)
    dcp.load({"model": loaded}, checkpoint_id=tmp_path)
    assert not is_stale(loaded[1]) and partnets.lml(loaded, chunks) == partnets.lml(model, chunks)
    with pytest.raises(ValueError, match="other chunks"):
        partnets.lml(loaded, others)


@pytest.mark.parametrize("make", [with_norm, lambda: partnets.MultiheadAttention(8, 2, proportions=(0.5, 0.5))])
def test_torchs_functions_take_the_state_of_a_model(make, alone):
    model = make()
    state, before = get_model_state_dict(model), [parameter.detach().clone() for parameter in model.parameters()]
    assert state.keys() == model.state_dict().keys()
    state = copy.deepcopy(state)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    set_model_state_dict(model, state)
    assert all(map(torch.equal, model.parameters(), before))


def other_files(folder):
    one = trainer(distributed.Trainer)
    path = folder / f"{dist.get_rank()}.pt"
    for step in (1, 2):
        one.fit(1)
        one.save(folder / f"{step - 1}.pt")
    told, before = [], [parameter.clone() for parameter in one.model.parameters()]
    for given in (path, folder / "none.pt" if dist.get_rank() else path):
        with pytest.raises((ValueError, OSError, RuntimeError)) as error:
            one.load(given)
        told.append(str(error.value))
    assert all(map(torch.equal, before, one.model.parameters()))
    return told


def test_ranks_that_would_load_different_files_are_told_and_none_loads(two_ranks, tmp_path):
    first, last = two_ranks(other_files, tmp_path)
    assert all("is not the same file on all ranks" in told[0] for told in (first, last))
    assert "No such file" in last[1] and first[1].startswith("rank 1 raised FileNotFoundError")


def wrapped():
    one = trainer(partnets.Trainer)
    with pytest.raises(ValueError, match="is inside of DistributedDataParallel; pass the wrapped model"):
        distributed.Trainer(nn.parallel.DistributedDataParallel(one.model), one.chunks)


def test_a_model_that_is_wrapped_already_is_refused(two_ranks):
    two_ranks(wrapped)
