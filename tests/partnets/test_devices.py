"""Models on a device other than the CPU: all tensors are on it, and results equal those on the CPU."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from elsewhere import DEVICE, Elsewhere, elsewhere, put
from pairwise import pairwise
from tiers import is_full
from torch import Tensor, nn

import partkernels as pk
import partnets
from partnets import hyper, optim

PROPORTIONS = (0.6, 0.2, 0.2)


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.position = nn.Parameter(torch.randn(1, 6, 16))
        self.encoder = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.encoder(x + self.position).mean(1))


def convolutional():
    return nn.Sequential(
        hyper.InputMask(8), nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 20),
        nn.LayerNorm(20), nn.GELU(), nn.Linear(20, 3),
    )  # fmt: skip


MODELS = {"convolutional": (convolutional, (3, 8, 8)), "attending": (Attending, (6, 16))}


def trained(model: nn.Module, scheme: str, x: Tensor, y: Tensor) -> list[Tensor]:
    """Return the results of every operation on a model, moved to the CPU."""
    found = []

    def loss(batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    partnets.partition(model, PROPORTIONS, scheme=scheme, seed=1, **({"example": x} if scheme == "nested" else {}))
    optimizers = [optim.Adam(model), optim.SGD(model, lr=0.01, momentum=0.9)]
    optimizers.append(optim.PerPartition(torch.optim.RMSprop, model))
    for optimizer in optimizers:
        for k in (1, 2, 3):
            found.append(partnets.step_weights(model, optimizer, k, (x, y), loss))
    which = torch.tensor([1, 2, 3, 1])
    with partnets.subnetwork(model, active=which, update=which):
        loss((x, y)).backward()
    found += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    chunks = partnets.chunk((x.cpu().repeat(8, *[1] * (x.dim() - 1)), y.cpu().repeat(8)), PROPORTIONS)
    options = {"batch_size": 6, "lml_every": 2, "keep_best": True, "optimizer": optim.Adam(model)}
    trainer = partnets.Trainer(model, chunks, hyper=[], **options)
    trainer.fit(3)
    found.append(torch.tensor([trainer.restore_best(), *trainer.history.lml["lml"]]))
    partnets.estimate_statistics(model, chunks)
    partnets.explain_partition(model)
    for k in (1, 3):
        found.append(partnets.merge(model, active=k).eval()(x))
    found.append(partnets.finalize(model, "deploy")(x))
    return [one.detach().cpu() for one in found]


@pytest.mark.full
@pairwise(strength=1, name=[*MODELS], scheme=["weight", "nested", *(["node"] if is_full() else [])])
def test_training_on_a_device_gives_the_results_of_the_cpu(name, scheme):
    make, shape = MODELS[name]
    x, y = torch.randn(4, *shape), torch.tensor([0, 1, 2, 1])
    with pk.use_backend("reference"):
        torch.manual_seed(0)
        expected = trained(make(), scheme, x, y)
        torch.manual_seed(0)
        plain = make()
        # New tensors are on the device, as after torch.set_default_device("cuda"), or on the CPU.
        with elsewhere(), torch.device(DEVICE) if scheme == "nested" else nullcontext():
            found = trained(put(plain), scheme, Elsewhere(x), Elsewhere(y))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def looking_ahead(how, place) -> list[Tensor]:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    smoothing = hyper.LabelSmoothing(0.2)
    model = place(nn.Sequential(network, hyper.WeightDecay(network, 0.01), smoothing))
    partnets.partition(model, PROPORTIONS, seed=1)
    chunks = partnets.chunk((torch.randn(30, 4), torch.randint(3, (30,))), PROPORTIONS)
    options = {"hyper": [*model[1:]], "loss": smoothing, "hyper_gradient": how, "batch_size": 6}
    partnets.Trainer(model, chunks, **options).fit(4)
    return [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.full
@pytest.mark.parametrize("how", [partnets.Lookahead(), partnets.Lookahead(exact=False), partnets.Implicit()], ids=str)
def test_lookahead_and_implicit_training_agree_on_device_and_cpu(how):
    with pk.use_backend("reference"):
        expected = looking_ahead(how, lambda model: model)
        with elsewhere():
            found = looking_ahead(how, put)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_operations_on_tensors_of_two_devices_raise():
    with elsewhere():
        x = torch.ones(3, device=DEVICE)
        assert isinstance(x + 1, Elsewhere) and (x + torch.tensor(1.0)).device == DEVICE
        with pytest.raises(RuntimeError, match=r"found privateuseone:0 and cpu"):
            x + torch.ones(3)


def without_a_model_there() -> list[Tensor]:
    """Return results of batches, splits and a search, with data and network on the CPU."""
    torch.manual_seed(0)
    with torch.device("cpu"):
        network = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.1), nn.Linear(6, 3))
        data = torch.randn(40, 4), torch.arange(40) % 3
    chunks = partnets.chunk(data, PROPORTIONS, stratify=data[1])
    found = []
    for options in ({}, {"num_workers": 1}):
        found += [draw.batch[0] for draw in partnets.Loader(chunks, batch_size=4, steps=3, **options)]
    tuned = partnets.tune(network, data, ["dropout", "weight_decay"], steps=10, batch_size=16)
    partnets.partition(network, PROPORTIONS, scheme="node")
    return [one.cpu() for one in (*found, *tuned.model.parameters(), *network.parameters())]


@pytest.mark.full
def test_batches_and_searches_do_not_depend_on_the_default_device():
    expected = without_a_model_there()
    with elsewhere(), torch.device(DEVICE):
        found = without_a_model_there()
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
