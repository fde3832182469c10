"""Partitions without a map: a module of complete networks works wherever a partitioned model is accepted."""

import copy

import pytest
import torch
from torch import nn

import partnets
from partnets import optim
from partnets.nn.partitioned import Partitioned

PROPORTIONS = (0.5, 0.3, 0.2)


class Networks(Partitioned):
    """A module in which subnetwork k is network k, and partition k has all of its parameters."""

    def __init__(self):
        super().__init__()
        self.networks = nn.ModuleList(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)) for _ in PROPORTIONS)
        self.count = self.active = self.update = len(PROPORTIONS)

    def owned(self):
        return self.named_parameters()

    def entries(self, name, tensors, update):
        return (tensors, None) if name.startswith(f"networks.{update - 1}.") else None

    def to_ordinary(self, active):
        return copy.deepcopy(self.networks[active - 1])

    def forward(self, x):
        return self.networks[self.active - 1](x)


def data():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(40, 4, generator=generator), torch.randint(2, (40,), generator=generator)


def made():
    torch.manual_seed(0)
    return nn.Sequential(Networks())


def test_a_subnetwork_is_its_network():
    model, (x, _) = made(), data()
    for k in (1, 2, 3):
        with partnets.subnetwork(model, k, k):
            assert torch.equal(model(x), model[0].networks[k - 1](x))
    with pytest.raises(ValueError, match="active=4"), partnets.subnetwork(model, 4):
        pass


def test_merging_gives_the_network():
    model, (x, _) = made(), data()
    merged = partnets.merge(model, 2)
    assert type(merged[0]) is nn.Sequential and torch.equal(merged(x), model[0].networks[1](x))


@pytest.mark.parametrize(
    ("ours", "theirs", "arguments"),
    [
        (optim.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (optim.Adam, torch.optim.Adam, {"lr": 0.01}),
        (optim.AdamW, torch.optim.AdamW, {"lr": 0.01}),
    ],
)
def test_each_network_moves_as_torchs_optimiser_would_move_it_alone(ours, theirs, arguments):
    model, (x, y), decays = made(), data(), (0.1, 0.02, 0.0)
    alone = copy.deepcopy(model[0].networks)
    references = [theirs(alone[i].parameters(), weight_decay=decay, **arguments) for i, decay in enumerate(decays)]
    optimizer = ours(model, weight_decay=decays, **arguments)
    for k in (1, 2, 1, 3, 2, 1):
        with partnets.subnetwork(model, k, k):
            nn.functional.cross_entropy(model(x), y).backward()  # other networks' gradients accumulate
        nn.functional.cross_entropy(alone[k - 1](x), y).backward()
        optimizer.step(update=k)
        references[k - 1].step()
    torch.testing.assert_close(model[0].networks.state_dict(), alone.state_dict())


@pytest.mark.full
def test_a_trainer_resumes_from_its_checkpoint(tmp_path):
    chunks = partnets.chunk(data(), PROPORTIONS)
    trainer = partnets.Trainer(made(), chunks, batch_size=8, lml_every=4)
    trainer.fit(4)
    trainer.save(tmp_path / "checkpoint.pt")
    trainer.fit(4)
    resumed = partnets.Trainer(made(), chunks, batch_size=8, lml_every=4)
    resumed.load(tmp_path / "checkpoint.pt")
    resumed.fit(4)
    assert all(map(torch.equal, trainer.model.parameters(), resumed.model.parameters()))
    assert trainer.history.lml == resumed.history.lml


def test_a_network_of_another_count_raises():
    model = nn.Sequential(Networks(), partnets.Linear(2, 2, proportions=(0.5, 0.5)))
    with pytest.raises(ValueError, match="differ in their number of partitions"):
        optim.SGD(model)


def test_a_module_without_to_ordinary_says_so():
    with pytest.raises(NotImplementedError, match=r"no to_ordinary\(active\); define it"):
        Partitioned().to_ordinary(1)
