"""The invariant on which the method relies: nothing learned from D_k reaches w_1..w_{k-1}."""

import pytest
import torch
from pairwise import pairwise
from torch import nn

import partnets
from partbench import models
from partnets import hyper, optim
from partnets.subnetworks.parameters import PartitionedParameter

PROPORTIONS = (0.5, 0.3, 0.2)
COUNT = len(PROPORTIONS)
STEPS = 25
OPTIMIZERS = {
    "sgd": lambda model: optim.SGD(model, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda model: optim.Adam(model, lr=0.01, weight_decay=0.01),
    "adamw": lambda model: optim.AdamW(model, lr=0.01),
    "nadam": lambda model: optim.PerPartition(torch.optim.NAdam, model, lr=0.01, weight_decay=0.01),
}


# Networks for images of 1 x SIZE x SIZE.
SIZE = 6
NETWORKS = {
    "layers": lambda: nn.Sequential(
        nn.Conv2d(1, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(80, 7), nn.ReLU(), nn.Linear(7, 3)
    ),
    "norms": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 7),
        nn.LayerNorm(7),
        nn.Linear(7, 3),
    ),
    "FixUp": lambda: models.FixupResNet(8, in_channels=1, classes=3),
}


def trainer(optimizer, network="layers", changed=None, cls=partnets.Trainer, scheme="weight", **options):
    """Return a reproducible trainer with frozen ψ, with different examples in chunk `changed` if given."""
    torch.manual_seed(0)
    x, y = torch.randn(60, 1, SIZE, SIZE), torch.randint(3, (60,))
    chunks = partnets.chunk((x, y), PROPORTIONS)
    if changed is not None:
        x[chunks.indices(changed)] = torch.randn(chunks.sizes[changed - 1], 1, SIZE, SIZE)
        y[chunks.indices(changed)] = (y[chunks.indices(changed)] + 1) % 3
    torch.manual_seed(1)
    averaged = hyper.Averaged(hyper.Affine(), NETWORKS[network](), samples=2)
    example = {"example": x[:2]} if scheme == "nested" else {}
    model = partnets.partition(averaged, PROPORTIONS, scheme=scheme, **example)
    return cls(model, chunks, **{"optimizer": OPTIMIZERS[optimizer](model), "batch_size": 8, "hyper": []} | options)


def owned(trainer, partitions):
    """Return these partitions' entries of all parameters except ψ, their moments and their step counts."""
    tensors, rows = [], [k - 1 for k in partitions]
    maps, buffers = partnets.partitions(trainer.model), dict(trainer.model.named_buffers())
    for path, parameter in trainer.model.network.named_parameters(prefix="network"):
        partition, stored = maps.get(path), buffers.get(f"{path}_rows", parameter)
        index = rows if partition is None else torch.isin(partition.ids(), torch.tensor(partitions))
        state = trainer.optimizer.state[parameter]
        tensors.append(stored.detach()[index])
        if isinstance(trainer.optimizer, optim.PerPartition):
            tensors += [value for k in partitions for value in state.get(k, {}).values()]
        else:
            tensors += [value[rows if name == "step" else index] for name, value in state.items()]
    return tensors


def check_invariant(
    optimizer, k, folder, network="layers", cls=partnets.Trainer, steps=STEPS, scheme="weight", **options
):
    """Train twice, with other examples in D_k the second time, and compare the bits, also of loaded checkpoints."""
    pair = [trainer(optimizer, network, changed, cls, scheme, **options) for changed in (None, k)]
    for i, one in enumerate(pair):
        torch.manual_seed(2)  # seeds the augmentation's noise
        one.fit(steps)
        one.save(folder / f"{i}.pt")
    reloaded = [trainer(optimizer, network, changed, cls, scheme, **options) for changed in (None, k)]
    for i, one in enumerate(reloaded):
        one.load(folder / f"{i}.pt")
    earlier, later = list(range(1, k)), list(range(k, COUNT + 1))
    for first, second in (pair, reloaded):
        assert first.history.steps["k"] == second.history.steps["k"]
        assert not all(map(torch.equal, owned(first, later), owned(second, later))), "the change had no effect"
        assert all(map(torch.equal, owned(first, earlier), owned(second, earlier))), "D_k reached an earlier partition"


@pytest.mark.cases(usual=2, full=6)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("k", range(1, COUNT + 1))
def test_examples_of_a_later_chunk_never_reach_earlier_partitions(optimizer, k, tmp_path):
    check_invariant(optimizer, k, tmp_path)


@pytest.mark.cases(usual=0, full=5)
@pytest.mark.parametrize(
    ("network", "optimizer"), [("norms", "sgd"), ("norms", "adam"), ("norms", "nadam"), ("FixUp", "sgd")]
)
@pytest.mark.parametrize("k", range(1, COUNT + 1))
def test_later_chunks_do_not_reach_earlier_partitions_with_norms_or_scales(network, optimizer, k, tmp_path):
    check_invariant(optimizer, k, tmp_path, network, steps=12)


@pytest.mark.cases(usual=0, full=2)
@pytest.mark.parametrize(
    ("network", "optimizer"), [("layers", "adamw"), ("norms", "sgd"), ("norms", "nadam"), ("FixUp", "adam")]
)
@pytest.mark.parametrize("k", [pytest.param(1, marks=pytest.mark.full), 2, pytest.param(3, marks=pytest.mark.full)])
def test_later_chunks_do_not_reach_earlier_nested_partitions(network, optimizer, k, tmp_path):
    check_invariant(optimizer, k, tmp_path, network, steps=12, scheme="nested")


@pytest.mark.full
@pytest.mark.parametrize(("scheme", "network", "k"), [("nested", "norms", 3), ("weight", "layers", 2)])
def test_later_chunks_do_not_reach_earlier_partitions_with_one_pass(scheme, network, k, tmp_path):
    check_invariant("adam", k, tmp_path, network, steps=8, scheme=scheme, one_pass=True)


class DrawsFromAllChunks(partnets.Trainer):
    def step_weights(self):
        sample_upto, self.chunks.sample_upto = self.chunks.sample_upto, lambda k, *rest: sample_upto(COUNT, *rest)
        try:
            return super().step_weights()
        finally:
            del self.chunks.sample_upto


class StepsAllPartitions(partnets.Trainer):
    def step_weights(self):
        k = 1 + int(torch.multinomial(torch.tensor(PROPORTIONS), 1, generator=self.generator))
        x, y = self.chunks.sample_upto(k, self.settings.batch_size, self.generator)
        for update in range(1, k + 1):
            self.optimizer.zero_grad()
            with partnets.subnetwork(self.model, active=k, update=update):
                loss = self.loss(self.model(x), y)
                loss.backward()
            self.optimizer.step(update)
        return k, loss.item()


@pytest.mark.cases(usual=0, full=4)
@pairwise(
    broken={"draws": DrawsFromAllChunks, "steps": StepsAllPartitions},
    optimizer=list(OPTIMIZERS),
    k=range(2, COUNT + 1),
)
def test_a_broken_trainer_fails_that_check(broken, optimizer, k, tmp_path):
    with pytest.raises(AssertionError, match="reached an earlier partition"):
        check_invariant(optimizer, k, tmp_path, cls=broken)


def is_scale(one):
    return one.state.vectors.get(one.name, False)


@pytest.mark.full
@pytest.mark.parametrize("network", ["norms", "FixUp"])
@pytest.mark.parametrize("k", range(2, COUNT + 1))
def test_scales_that_all_partitions_share_fail_that_check(network, k, monkeypatch, tmp_path):
    of = PartitionedParameter.of
    monkeypatch.setattr(PartitionedParameter, "of", lambda one, tensor, k: of(one, tensor, 1 if is_scale(one) else k))
    monkeypatch.setattr("partnets.training.preflight.check_leaks", lambda *_: None)  # it would raise first
    with pytest.raises(AssertionError, match="reached an earlier partition"):
        check_invariant("sgd", k, tmp_path, network, steps=12)
