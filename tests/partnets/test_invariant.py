"""The invariant that makes the method true: nothing learned from D_k reaches w_1..w_{k-1}."""

import pytest
import torch
from torch import nn

import partnets
from partnets import hyper, optim

PROPORTIONS = (0.5, 0.3, 0.2)
COUNT = len(PROPORTIONS)
STEPS = 25
OPTIMIZERS = {
    "sgd": lambda model: optim.SGD(model, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda model: optim.Adam(model, lr=0.01, weight_decay=0.01),
    "adamw": lambda model: optim.AdamW(model, lr=0.01),
}


def trainer(optimizer, changed=None, cls=partnets.Trainer):
    """A new trainer with ψ present but frozen, the same each time, except for the examples of chunk `changed`."""
    torch.manual_seed(0)
    x, y = torch.randn(60, 1, 5, 5), torch.randint(3, (60,))
    chunks = partnets.chunk((x, y), PROPORTIONS)
    if changed is not None:
        x[chunks.indices(changed)] = torch.randn(chunks.sizes[changed - 1], 1, 5, 5)
        y[chunks.indices(changed)] = (y[chunks.indices(changed)] + 1) % 3
    torch.manual_seed(1)
    network = nn.Sequential(nn.Conv2d(1, 5, 2), nn.ReLU(), nn.Flatten(), nn.Linear(80, 7), nn.ReLU(), nn.Linear(7, 3))
    model = partnets.partition(hyper.Averaged(hyper.Affine(), network, samples=2), PROPORTIONS)
    return cls(model, chunks, optimizer=OPTIMIZERS[optimizer](model), batch_size=8)


def owned(trainer, partitions):
    """The entries of these partitions in every weight, bias, moment and step count."""
    tensors = []
    for _, layer in partnets.partitioned.partitioned_layers(trainer.model):
        rows = [k - 1 for k in partitions]
        mask = torch.isin(layer.partition.ids(), torch.tensor(partitions))
        for parameter, index in ((layer.weight, mask), (layer.bias, rows)):
            state = trainer.optimizer.state[parameter]
            tensors += [
                parameter.detach()[index],
                *(value[rows if name == "step" else index] for name, value in state.items()),
            ]
    return tensors


def check_invariant(optimizer, k, folder, cls=partnets.Trainer):
    """Trains twice, with other examples in D_k the second time, and compares the bits, also of reloaded checkpoints."""
    pair = [trainer(optimizer, changed, cls) for changed in (None, k)]
    for i, one in enumerate(pair):
        torch.manual_seed(2)  # the augmentation's noise is torch's
        one.fit(STEPS)
        one.save(folder / f"{i}.pt")
    reloaded = [trainer(optimizer, changed, cls) for changed in (None, k)]
    for i, one in enumerate(reloaded):
        one.load(folder / f"{i}.pt")
    earlier, later = list(range(1, k)), list(range(k, COUNT + 1))
    for first, second in (pair, reloaded):
        assert first.history.steps["k"] == second.history.steps["k"]
        assert not any(map(torch.equal, owned(first, later)[:1], owned(second, later)[:1])), "the change had no effect"
        assert all(map(torch.equal, owned(first, earlier), owned(second, earlier))), "D_k reached an earlier partition"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("k", range(1, COUNT + 1))
def test_examples_of_a_later_chunk_never_reach_earlier_partitions(optimizer, k, tmp_path):
    check_invariant(optimizer, k, tmp_path)


class DrawsFromAllChunks(partnets.Trainer):
    def step_weights(self):
        sample_upto, self.chunks.sample_upto = self.chunks.sample_upto, lambda k, *rest: sample_upto(COUNT, *rest)
        try:
            return super().step_weights()
        finally:
            del self.chunks.sample_upto


class StepsAllPartitions(partnets.Trainer):
    def step_weights(self):
        k = self._draw_chunk(first=1)
        x, y = self.chunks.sample_upto(k, self.batch_size, self.generator)
        for update in range(1, k + 1):
            self.optimizer.zero_grad()
            with partnets.subnetwork(self.model, active=k, update=update):
                loss = self.loss(self.model(x), y)
            loss.backward()
            self.optimizer.step(update)
        return k, loss.item()


@pytest.mark.parametrize("broken", [DrawsFromAllChunks, StepsAllPartitions])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("k", range(2, COUNT + 1))
def test_a_broken_trainer_fails_that_check(broken, optimizer, k, tmp_path):
    with pytest.raises(AssertionError, match="reached an earlier partition"):
        check_invariant(optimizer, k, tmp_path, broken)
