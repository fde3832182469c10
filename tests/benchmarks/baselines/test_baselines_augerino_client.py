"""AugerinoClient learns from its own training loss, in rounds with and without Flower."""

from functools import partial

import pytest
import torch
from torch import nn

import partnets
from partbench.baselines import AugerinoClient
from partnets import federated, hyper

# With this factor, the bonus is far larger than the loss.
Wide = partial(AugerinoClient, regularisation=1e6)


def make():
    """Return a reproducible dense model and its augmentation."""
    torch.manual_seed(0)
    augmentation = hyper.Affine(rotation=5.0)
    return partnets.Ensemble([nn.Sequential(augmentation, nn.Flatten(), nn.Linear(64, 10))]), augmentation


def load(number, clients=3):
    generator = torch.Generator().manual_seed(number)
    return torch.rand(20, 1, 8, 8, generator=generator), torch.randint(10, (20,), generator=generator)


def make_server():
    model, augmentation = make()
    return federated.Server(model, hyper=augmentation), augmentation, augmentation.widths().detach().clone()


def test_a_client_learns_from_its_own_training_loss():
    model, augmentation = make()
    one = Wide(model, load(0), hyper=augmentation)
    server, learned, widths = make_server()
    found = server.step([one.train(server.values(), 1)])
    assert found.contributors == {1: 1} and found.lml is None  # no data are unseen
    assert (learned.widths() > widths).all()


def test_the_gradient_is_that_of_the_targets_that_count_for_any_batch_size():
    x, y = load(0)
    y[::2] = 255
    found = []
    for size in (20, 7, 1):
        model, augmentation = make()
        augmentation.widths.raw.data.fill_(-20.0)  # draws change nothing
        options = {"loss": nn.CrossEntropyLoss(ignore_index=255), "optimizer": partial(partnets.optim.SGD, lr=0.0)}
        one = AugerinoClient(model, (x, y), hyper=augmentation, batch_size=size, **options)
        update = one.train(one.vectors.read(), 1)
        found.append((update.hyper_loss, update.gradients["hyper.float32"]))
    assert all(loss == pytest.approx(found[0][0], rel=1e-4) for loss, _ in found)
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-3, atol=1e-9)


def test_a_partitioned_model_is_refused():
    with pytest.raises(ValueError, match="Augerino learns from all data"):
        AugerinoClient(partnets.partition(nn.Linear(64, 10), (0.5, 0.5)), load(0), hyper=())


def test_clients_are_apps_of_flower():
    pytest.importorskip("flwr", reason="Flower needs Python 3.11")
    from partnets.federated.flower import LocalGrid, PartitionedFedAvg, client_app

    server, learned, widths = make_server()
    strategy = PartitionedFedAvg(server)
    strategy.start(LocalGrid(client_app(make, load, client=Wide), 3), num_rounds=1)
    assert not strategy.history[0].failed and (learned.widths() > widths).all()
