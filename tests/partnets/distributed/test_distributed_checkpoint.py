"""Checkpoints from one or two ranks, sharded or not, resume on two ranks or one, also after a save that was killed."""

import copy
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils._pytree import tree_flatten
from training import OPTIMIZERS, STEPS, learn, learned, mesh, network, trainer, whole

import partnets
from partnets import distributed, optim
from partnets.subnetworks.statistics import is_stale
from partnets.training import checkpoint

# Some tests use torch.distributed.checkpoint in a single process on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
EXAMPLE = Path(__file__).parents[3] / "examples" / "distributed.py"


def half(name, sharded, scheme, folder, saves):
    """Learn half the steps and save model and optimiser, or load them and learn the other half."""
    model = network(scheme)
    if sharded and dist.is_initialized():
        distributed.fully_shard(model, mesh=mesh())
    call = distributed.DDP(model) if dist.is_initialized() and not sharded else model
    optimizer = OPTIMIZERS[name](model)
    both = {"model": model, "optimizer": distributed.OptimizerState(model, optimizer)}
    if saves:
        learn(model, call, optimizer, range(STEPS // 2))
        return dcp.save(both, checkpoint_id=folder)
    dcp.load(both, checkpoint_id=folder)
    return learn(model, call, optimizer, range(STEPS // 2, STEPS))


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "sharded", "scheme"),
    [("SGD", False, "weight"), ("Adam", True, "weight"), ("Adam", True, "nested"), ("NAdam", True, "nested")],
)
def test_model_and_optimiser_resume_from_two_ranks_in_one_and_vice_versa(name, sharded, scheme, two_ranks, tmp_path):
    model = network(scheme)
    expected = learn(model, model, OPTIMIZERS[name](model))
    two_ranks(half, name, sharded, scheme, tmp_path / "two", True)
    half(name, sharded, scheme, tmp_path / "one", True)
    found = half(name, sharded, scheme, tmp_path / "two", False)
    for weights in [found, *two_ranks(half, name, sharded, scheme, tmp_path / "one", False)]:
        torch.testing.assert_close(weights, expected, rtol=1e-10, atol=1e-12)


def fit(folder, before, after, sharded):
    """Train, save and train on, or load and train on; return the learned tensors and the best step."""
    one = trainer(sharded=sharded and dist.is_initialized())
    if before:
        one.fit(before)
    if sharded:
        (distributed.save if before else distributed.load)(one, folder)
    else:
        (one.save if before else one.load)(folder)
    assert one.best is None or (one.best.step > 0) == bool(one.best.state)
    one.fit(after)
    return learned(one), one.best.step, torch.tensor(one.best.lml)


@pytest.mark.full
@pytest.mark.parametrize(("before", "sharded"), [(3, True), (6, True), (6, False)])  # L_ML is evaluated after 4 steps
def test_a_trainer_resumes_from_two_ranks_in_one_and_vice_versa(before, sharded, two_ranks, tmp_path):
    expected = fit(tmp_path / "one", before, 12 - before, sharded)
    found = two_ranks(fit, tmp_path / "two", before, 12 - before, sharded)
    found += [fit(tmp_path / "two", 0, 12 - before, sharded)]
    for one in [*found, *two_ranks(fit, tmp_path / "one", 0, 12 - before, sharded)]:
        torch.testing.assert_close(one, expected, rtol=1e-9, atol=1e-11)


def resume(path):
    """Compare an uninterrupted run with one from its checkpoint, with different noise on each rank."""
    whole = trainer(dropout=0.3)
    torch.manual_seed(dist.get_rank())
    whole.fit(5)
    whole.save(path)
    whole.fit(5)
    resumed = trainer(dropout=0.3)
    torch.manual_seed(99)
    resumed.load(path)
    resumed.fit(5)
    noise = torch.get_rng_state()
    return all(map(torch.equal, learned(resumed), learned(whole))), noise


def test_ranks_that_resume_have_the_bits_of_an_uninterrupted_run_and_each_its_own_noise(two_ranks, tmp_path):
    (first, noise), (second, other) = two_ranks(resume, tmp_path / "checkpoint.pt")
    assert first and second and not torch.equal(noise, other)


def run(checkpoint):
    """Run the example without torchrun and without interruption."""
    torch.manual_seed(dist.get_rank())
    one = runpy.run_path(str(EXAMPLE))["trainer"](checkpoint, save_every=10, kill_at=None)
    one.fit(30)
    one.save(checkpoint)


@pytest.mark.full  # starts torchrun and two processes, twice
def test_a_run_resumed_after_a_killed_process_ends_with_the_same_bits(two_ranks, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    options = ["--steps=30", "--save-every=10", "--kill-at=25", f"--checkpoint={tmp_path / 'killed.pt'}"]
    environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command = [*torchrun, str(EXAMPLE), *options]
    killed = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert killed.returncode == 0 and killed.stdout.startswith("steps 20 to 30"), killed.stderr
    two_ranks(run, tmp_path / "whole.pt")
    found = [torch.load(tmp_path / f"{name}.pt") for name in ("whole", "killed")]
    noises = [[noise["torch"] for noise in one.pop("noises")] for one in found]  # only torch's random state is seeded
    torch.testing.assert_close(*noises, rtol=0, atol=0)
    assert len(noises[0]) == 2 and not torch.equal(*noises[0])
    for saved in found:
        saved.pop("checksum", None)
    (leaves, structure), (others, its) = map(tree_flatten, found)
    assert structure == its
    for pair in zip(leaves, others, strict=True):
        assert torch.equal(*pair) if isinstance(pair[0], torch.Tensor) else pair[0] == pair[1]


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def nested_trainer(measure):
    torch.manual_seed(0)
    layers, x = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3)), torch.randn(60, 4)
    nested = {"scheme": "nested", "example": x[:2], "proportions_of": measure}
    model = partnets.partition(layers, (0.6, 0.4), **nested)
    return partnets.Trainer(model, partnets.chunk((x, torch.arange(60) % 3), (0.6, 0.4)), batch_size=8)


@pytest.mark.full
def test_nested_channels_of_another_number_are_refused_before_anything_is_written(alone, tmp_path):
    saved, other = nested_trainer("weights"), nested_trainer("channels")
    before = [parameter.clone() for parameter in other.model.parameters()]
    dcp.save({"model": saved.model}, checkpoint_id=tmp_path / "model")
    distributed.save(saved, tmp_path / "trainer")
    with pytest.raises(ValueError, match="was saved with channels"):
        distributed.load(other, tmp_path / "trainer")
    assert all(map(torch.equal, before, other.model.parameters()))
    with pytest.raises(RuntimeError, match=r"0\.weight_partition has other partitions than those of this model's"):
        dcp.load({"model": other.model}, checkpoint_id=tmp_path / "model")
    distributed.load(nested_trainer("weights"), tmp_path / "trainer")
    dcp.load({"model": nested_trainer("weights").model}, checkpoint_id=tmp_path / "model")


def with_norm(seed=0):
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))
    return partnets.partition(layers, (0.6, 0.4), defaults="seed", seed=seed)


@pytest.mark.full
def test_a_saved_model_keeps_partitions_chunks_and_fresh_statistics(alone, tmp_path):
    x, model = torch.randn(60, 4), with_norm()
    chunks, others = (partnets.chunk((x, torch.arange(60) % 3), (0.6, 0.4), seed=seed) for seed in (0, 1))
    partnets.Trainer(model, chunks, batch_size=8).fit(2)
    dcp.save({"model": model}, checkpoint_id=tmp_path)
    loaded = with_norm(1)
    dcp.load({"model": loaded}, checkpoint_id=tmp_path)
    assert not is_stale(loaded[1]) and partnets.lml(loaded, chunks) == partnets.lml(model, chunks)
    with pytest.raises(ValueError, match="other chunks"):
        partnets.lml(loaded, others)
    expected, found = (partnets.partitions(one)["0.weight"] for one in (model, loaded))
    assert torch.equal(expected.map, found.map) and expected.defaults == found.defaults


def load_other_partitions():
    """Return whether a layer with tensor parallelism computes with the partition that it has loaded."""
    saved, model = (parallelize_module(with_norm(seed), mesh(), {"0": ColwiseParallel()}) for seed in (1, 0))
    x, found = torch.randn(2, 4), []
    for one in (model, saved, model):
        with torch.no_grad(), partnets.subnetwork(one[0], active=1):
            found.append(whole(one[0](x)))
        model.load_state_dict(saved.state_dict())
    return torch.equal(found[1], found[2]) and not torch.equal(found[0], found[1])


def test_a_layer_computes_with_the_partition_that_it_has_loaded(two_ranks):
    assert all(two_ranks(load_other_partitions))


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


def test_the_state_of_an_optimiser_with_other_groups_raises():
    model = network()
    saved = distributed.OptimizerState(model, optim.SGD(model)).state_dict()
    groups = [{"params": [model[6].weight], "lr": 0.2}]
    other = distributed.OptimizerState(model, optim.SGD(model, groups=groups))
    with pytest.raises(ValueError, match="the saved optimiser's groups have other parameters than this one's"):
        other.load_state_dict(saved)


def test_a_folder_that_is_damaged_is_named_and_nothing_of_the_trainer_changes(tmp_path):
    saved, other = trainer(), trainer()
    saved.fit(6)
    distributed.save(saved, tmp_path)
    other.fit(1)
    before = [tensor.detach().clone() for tensor in (*learned(other), other.generator.get_state())]
    rest = tmp_path / "trainer.pt"
    content = rest.read_bytes()

    def unchanged():
        return all(map(torch.equal, (*learned(other), other.generator.get_state()), before))

    with pytest.raises(ValueError, match=r"trainer\.pt has no best, model, optimizer, as partnets\.distributed\.save"):
        other.load(rest)
    assert unchanged()
    rest.write_bytes(content[:900] + bytes([content[900] ^ 4]) + content[901:])
    with pytest.raises(ValueError, match=r"trainer\.pt is damaged: it has another checksum"):
        distributed.load(other, tmp_path)
    assert unchanged()
    rest.write_bytes(content)
    next(tmp_path.glob("dcp.*/.metadata")).unlink()
    with pytest.raises(FileNotFoundError, match="metadata"):
        distributed.load(other, tmp_path)
    assert unchanged()


def kill(*_, **__):
    raise KeyboardInterrupt("killed")


# Interrupt a save after all ranks have written their parts, or after all tensors but before trainer.pt.
KILLED = {"in dcp.save": (dcp.FileSystemWriter, "finish"), "after it": (checkpoint, "save")}


@pytest.mark.parametrize("at", KILLED)
def test_a_save_that_is_killed_leaves_the_checkpoint_before_it(at, monkeypatch, tmp_path):
    def killed_save():
        """Save until the given point and stop as if killed, without deleting anything."""
        with monkeypatch.context() as patch, pytest.raises((KeyboardInterrupt, CheckpointException)):
            patch.setattr(*KILLED[at], kill)
            distributed.save(one, tmp_path)

    one = trainer()
    (tmp_path / "notes.txt").write_text("of the user")
    killed_save()
    with pytest.raises(FileNotFoundError, match=r"has no trainer\.pt: a save into it was never finished; load another"):
        distributed.load(one, tmp_path)
    one.fit(6)
    distributed.save(one, tmp_path)
    weights, random = copy.deepcopy(learned(one)), one.generator.get_state()
    one.fit(2)
    killed_save()
    loaded = trainer()
    distributed.load(loaded, tmp_path)
    torch.testing.assert_close(learned(loaded), weights, rtol=0, atol=0)
    assert loaded.steps == 6 and torch.equal(loaded.generator.get_state(), random)
    distributed.save(one, tmp_path)
    assert sorted(path.name[:4] for path in tmp_path.iterdir()) == ["dcp.", "note", "trai"]


def saved_over(folder):
    """Check that weights of a second save that rank 0 did not finish are not loaded."""
    one = trainer(sharded=True)
    one.fit(3)
    distributed.save(one, folder)
    before = copy.deepcopy(learned(one))
    one.fit(3)
    write = dcp.FileSystemWriter.write_data
    with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointException):
        patch.setattr(dcp.FileSystemWriter, "write_data", write if dist.get_rank() else kill)
        distributed.save(one, folder)
    distributed.load(one, folder)
    torch.testing.assert_close(learned(one), before, rtol=0, atol=0)


def test_loading_after_an_incomplete_save_gives_the_previous_weights(two_ranks, tmp_path):
    two_ranks(saved_over, tmp_path)


def other_files(folder):
    """Return the errors of loading files that differ, or that one rank lacks, and of saving where nothing can be."""
    one = trainer()
    path = folder / f"{dist.get_rank()}.pt"
    for step in (1, 2):
        one.fit(1)
        one.save(folder / f"{step - 1}.pt")
    found, before = [], [parameter.clone() for parameter in one.model.parameters()]
    for given in (path, folder / "none.pt" if dist.get_rank() else path):
        with pytest.raises((ValueError, OSError, RuntimeError)) as error:
            one.load(given)
        found.append(str(error.value))
    assert all(map(torch.equal, before, one.model.parameters()))
    with pytest.raises(NotADirectoryError):
        one.save(path / "checkpoint.pt")
    return found


def test_ranks_that_would_load_different_files_raise_and_none_loads(two_ranks, tmp_path):
    first, last = two_ranks(other_files, tmp_path)
    assert all("is not the same file on all ranks" in one[0] for one in (first, last))
    assert "No such file" in last[1] and first[1].startswith("rank 1 raised FileNotFoundError")
