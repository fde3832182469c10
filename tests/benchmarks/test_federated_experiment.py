"""Tests of the paper's federated experiment: each method trains, resumes after an interruption, and counts bytes."""

import dataclasses

import pandas as pd
import pytest
import torch

pytest.importorskip("flwr", reason="Flower needs Python 3.11")

from partbench import federated as costs
from partbench.paper import federated, federated_cost
from partnets.data import Data, moments
from partnets.hyper import Affine, ConcreteDropout
from partnets.subnetworks.state import num_partitions


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Use few clients, and few rounds between evaluations."""
    monkeypatch.setattr(federated, "EVERY", 2)
    own = dataclasses.replace(federated.SETTINGS["digits"], clients=10, samples=1, batch=64)
    monkeypatch.setitem(federated.SETTINGS, "digits", own)


def setting(method, rounds=4, rotated=True):
    return {
        "dataset": "digits", "rotated": rotated, "method": method, "examples": 200, "seed": 1, "rounds": rounds
    }  # fmt: skip


@pytest.mark.cases(usual=1)
@pytest.mark.parametrize("method", federated.METHODS)
def test_an_interrupted_training_goes_on(method, tmp_path):
    whole = federated.Federated().train(setting(method), tmp_path / "whole.checkpoint")
    federated.Federation(setting(method)).run(3, tmp_path / "part.checkpoint")
    part = federated.Federated().train(setting(method), tmp_path / "part.checkpoint")
    assert [point for point in part["curve"] if point["round"] != 3] == whole["curve"]
    assert (
        part["psi"] == whole["psi"]
        and part["rates"] == whole["rates"] == []
        and part["uploaded"] == whole["uploaded"] > 0
    )
    assert [point["round"] for point in whole["curve"]] == [0, 2, 4]
    assert bool(whole["psi"]) == (method != "fedavg")


def test_methods_of_the_cost_experiment_share_a_fixed_augmentation():
    experiment, found = federated_cost.FederatedCost(), {}
    for each in experiment.settings("digits", (1,), quick=True):
        own = federated_cost.Known({**each, "examples": 200})
        model, psi = own.make_model()
        (augmentation,) = (module for module in model.modules() if isinstance(module, Affine))
        assert not psi and augmentation.values()["rotation"] == pytest.approx(180)
        assert not augmentation.widths.raw.requires_grad
        found[each["method"]] = own
    whole, first, partitioned, twice = found.values()
    assert len(whole.parts) == 10 and len(first.parts) == 7 and first.of.clients == 7
    assert (partitioned.epochs, twice.epochs) == (1, 2) and num_partitions(whole.make_model()[0]) == 1


def test_seeds_and_methods_share_clients_and_images():
    one, other = (federated.Federation({**setting(method), "seed": seed}) for method, seed in
                  (("fedavg", 1), ("partitioned", 2)))  # fmt: skip
    assert all((a == b).all() for a, b in zip(one.parts, other.parts, strict=True))
    assert (one.data.train[0] == other.data.train[0]).all()


@pytest.mark.parametrize("dataset, count, image", [("mnist", 4, (1, 28, 28)), ("cifar10", 4, (3, 32, 32))])
def test_the_papers_networks_have_concrete_dropout_between_layers(dataset, count, image):
    network = federated.SETTINGS[dataset].network()
    rates = [module.values()["rate"] for module in network.modules() if isinstance(module, ConcreteDropout)]
    assert rates == pytest.approx([0.1] * count)
    assert network(next(network.parameters()).new_zeros(2, *image)).shape == (2, 10)


@pytest.mark.full
@pytest.mark.parametrize(("dataset", "image"), [("mnist", (1, 28, 28))])
def test_the_papers_settings_train(dataset, image, monkeypatch, tmp_path):
    """Train on noise, because the data's files are not here: one round of three clients."""

    def noise(name, *, rotated, seed):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randint(256, (6, *image), generator=generator, dtype=torch.uint8)
        data = Data(name, (x, torch.arange(6)), (x, torch.arange(6)), 10, *moments(x))
        return data.rotated(seed) if rotated else data

    own = dataclasses.replace(federated.SETTINGS[dataset], clients=len(federated.SETTINGS[dataset].proportions))
    own = dataclasses.replace(own, samples=1, batch=2, proportions=[1 / own.clients] * own.clients)
    monkeypatch.setitem(federated.SETTINGS, dataset, own)
    monkeypatch.setattr(federated, "load", noise)
    found = federated.Federated().train({**setting("partitioned", 1), "dataset": dataset, "examples": 6},
                                        tmp_path / "checkpoint")  # fmt: skip
    assert found["uploaded"] < found["sent"] and len(found["rates"]) == 4 and "rotation" in found["psi"]


@pytest.mark.full
def test_uploads_are_proportional_to_the_partitions(monkeypatch):
    """Check bytes of 10 clients: the upload is proportional to the partitions, and replies are larger than arrays."""
    monkeypatch.setattr(costs, "ROUNDS", 1)
    found = pd.DataFrame([costs.measured(method, 10) for method in costs.METHODS])
    plain, three, two = found.up
    assert three / plain == pytest.approx(0.77, abs=0.01) and two / plain == pytest.approx(0.91, abs=0.01)
    assert found.down.max() / found.down.min() == pytest.approx(1, abs=0.02)
    assert (found.whole > found.up).all() and (found.whole < 1.05 * found.up).all()
    assert (found.seconds > 0).all() and (found.peak > 0.05).all()
    lines = costs.table(found).splitlines()
    assert len(lines) == 5 and f"| {three / plain:.3f} |" in lines[3]
