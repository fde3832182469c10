"""Batch norm keeps separate statistics for each subnetwork, from only the batches that it learns from."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import partnets
from partnets.subnetworks.statistics import other_norms, partitioned_norms
from partnets.training.step import hyper_learning, weights_learning

PROPORTIONS = (0.5, 0.3, 0.2)
LAYERS = {"BatchNorm1d": (5, 4), "BatchNorm2d": (5, 4, 3, 2), "BatchNorm3d": (5, 4, 3, 2, 2)}
every_layer = pytest.mark.parametrize("name", LAYERS)


NAMES = "running_mean", "running_var", "num_batches_tracked"


def made(name):
    """Return a layer with different statistics in each subnetwork, and a batch far from all of them."""
    layer = getattr(partnets, name)(4, proportions=PROPORTIONS)
    for k in (1, 2, 3):
        set_statistics(layer, k, k, k + 1.0)
    return layer, 10 + torch.randn(LAYERS[name])


def set_statistics(layer, k, mean, var):
    with partnets.subnetwork(layer, k, k):
        layer.running_mean.fill_(mean)
        layer.running_var.fill_(var)


def statistics(layer):
    """Return the means, variances and numbers of batches of all subnetworks, [C, ...] each."""
    found = []
    for k in (1, 2, 3):
        with partnets.subnetwork(layer, k, k):
            found.append([layer.get_buffer(name).clone() for name in NAMES])
    return [torch.stack(rows) for rows in zip(*found, strict=True)]


@every_layer
@pytest.mark.parametrize(("active", "update"), [(1, 1), (2, 1), (2, 2), (3, 3)])
def test_a_batch_moves_the_statistics_of_the_active_subnetwork_only(name, active, update):
    layer, x = made(name)
    before = statistics(layer)
    theirs = getattr(nn, name)(4)
    theirs.running_mean.fill_(float(active))
    theirs.running_var.fill_(active + 1.0)
    with partnets.subnetwork(layer, active, update):
        torch.testing.assert_close(layer(x), theirs(x))
    expected = theirs.running_mean, theirs.running_var, theirs.num_batches_tracked
    for old, new, moved in zip(before, statistics(layer), expected, strict=True):
        torch.testing.assert_close(new[active - 1], moved)
        others = [k for k in range(3) if k != active - 1]
        assert torch.equal(new[others], old[others])


@every_layer
def test_where_nothing_learns_a_batch_leaves_no_statistics(name):
    layer, x = made(name)
    before = statistics(layer)
    with partnets.subnetwork(layer, 2):
        y = layer.train()(x)
    assert all(map(torch.equal, before, statistics(layer)))
    torch.testing.assert_close(y, F.batch_norm(x, None, None, training=True))


def test_where_nothing_learns_a_batch_leaves_no_statistics_of_narrow_norms():
    pytest.importorskip("torch_pruning")
    x = torch.randn(6, 4)
    layers = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
    model = partnets.partition(layers, PROPORTIONS, scheme="nested", example=x).train()
    before = copy.deepcopy(model.state_dict())
    with partnets.subnetwork(model, 1):
        assert len(model[1].running_mean) < 16
        model(x)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@every_layer
@pytest.mark.parametrize("active", [1, 2, 3])
def test_in_evaluation_a_subnetwork_is_normalised_by_its_own(name, active):
    layer, x = made(name)
    before = statistics(layer)
    with partnets.subnetwork(layer.eval(), active, active):
        torch.testing.assert_close(layer(x), (x - active) / (active + 1.0 + layer.eps) ** 0.5)
    assert all(map(torch.equal, before, statistics(layer)))


def test_a_step_of_psi_normalises_by_its_batch_and_leaves_no_statistics():
    layer, x = made("BatchNorm1d")
    model, before = nn.Sequential(layer), statistics(layer)
    with hyper_learning(model.train(), 3):
        torch.testing.assert_close(model(x), F.batch_norm(x, None, None, training=True))
    assert all(map(torch.equal, before, statistics(layer)))
    with hyper_learning(model.eval(), 3):  # like a frozen norm
        torch.testing.assert_close(model(x), (x - 2) / (3 + layer.eps) ** 0.5)


def test_norms_that_partition_left_out_learn_from_no_chunk():
    model = partnets.partition(
        nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4)), PROPORTIONS, skip="0"
    )
    assert (partitioned_norms(model), other_norms(model)) == ([model[2]], [model[0]])
    with weights_learning(model.train(), 2):
        model(10 + torch.randn(5, 4))
    assert not model[0].running_mean.any() and model[0].num_batches_tracked == 0 and model[0].training
    assert statistics(model[2])[2].tolist() == [0, 1, 0]


def test_statistics_are_stale_where_other_weights_are_loaded_beside_them():
    x = torch.randn(80, 4)
    chunks = partnets.chunk((x, (x[:, 0] > 0).long()), (0.6, 0.4))

    def fresh():
        return partnets.partition(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)), (0.6, 0.4))

    model = fresh()
    partnets.Trainer(model, chunks, batch_size=16).fit(4)
    state = model.state_dict()
    loaded = fresh()
    loaded.load_state_dict(state)
    partnets.merge(loaded)
    loaded.load_state_dict(state | {"0.weight": 2 * state["0.weight"]})
    with pytest.warns(UserWarning, match="older than the weights"):
        partnets.merge(loaded)
    partnets.merge(copy.deepcopy(loaded).to(torch.bfloat16))  # checksums of other dtypes say nothing
    partnets.merge(loaded[:2])  # staleness of a submodel is unknown, so it does not warn


def frozen_by_timm(model):
    return pytest.importorskip("timm.utils.model").freeze_batch_norm_2d(model)


@pytest.mark.parametrize("convert", [nn.SyncBatchNorm.convert_sync_batchnorm, frozen_by_timm])
def test_norms_that_replace_partitioned_ones_are_refused(convert):
    def partitioned():
        layers = nn.Conv2d(3, 4, 3), nn.Sequential(nn.BatchNorm2d(4)), nn.Conv2d(4, 2, 1)
        return partnets.partition(nn.Sequential(*layers), PROPORTIONS)

    model = convert(partitioned())
    for _ in range(2):
        with (
            pytest.raises(RuntimeError, match=r"1\.0 was a partitioned BatchNorm2d, .* before partnets\.partition"),
            partnets.subnetwork(model, 1),
        ):
            raise AssertionError
    assert not isinstance(convert(partnets.merge(partitioned()))[1][0], nn.BatchNorm2d)


@pytest.mark.parametrize("bias", [True, False])
def test_a_convolution_fused_with_its_norm_is_refused(bias):
    model = partnets.partition(nn.Sequential(nn.Conv2d(3, 4, 3, bias=bias), nn.BatchNorm2d(4)), PROPORTIONS).eval()
    for k in (1, 2, 3):
        set_statistics(model[1], k, k, k + 1.0)
    fused = nn.utils.fuse_conv_bn_eval(*model)
    with pytest.raises(RuntimeError, match=r"partitioned without bias|bias of Conv2d was written into"):
        partnets.merge(fused, 1)
