"""Partitioned layers survive state_dicts, files, copies and moves; and refuse what does not fit."""

import copy
import dataclasses
import io
import pickle

import pytest
import torch
from torch import nn

import partkernels
import partnets

DEFAULTS = ["seed", "zero", "stored"]


def layer(defaults="seed", seed=0, proportions=(0.8, 0.1, 0.1)):
    return partnets.Conv2d(3, 5, 3, proportions=proportions, seed=seed, defaults=defaults)


def outputs(layer):
    x = torch.linspace(-1, 1, 3 * 36).view(1, 3, 6, 6).to(layer.weight.dtype)
    results = []
    for active in range(1, layer.count + 1):
        with partnets.subnetwork(layer, active):
            results.append(layer(x).detach())
    return torch.stack(results)


def through_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("defaults", DEFAULTS)
def test_a_state_dict_restores_the_partition_and_its_defaults(defaults):
    saved = layer(defaults, seed=0)
    nn.init.normal_(saved.weight)
    loaded = layer("seed", seed=1)
    loaded.load_state_dict(through_file(saved.state_dict()), strict=True)
    assert torch.equal(loaded.partition.map, saved.partition.map)
    assert torch.equal(outputs(loaded), outputs(saved))


def test_a_state_dict_has_one_entry_more_than_torchs():
    assert list(nn.Sequential(layer()).state_dict()) == ["0.weight", "0.bias", "0.partition"]


@pytest.mark.parametrize("defaults", DEFAULTS)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_compute_the_same_and_share_nothing(defaults, duplicate):
    original = layer(defaults)
    nn.init.normal_(original.weight)
    twin = duplicate(original)
    before = outputs(original)
    assert torch.equal(outputs(twin), before)
    nn.init.zeros_(twin.weight)
    assert torch.equal(outputs(original), before)


@pytest.mark.parametrize("defaults", DEFAULTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_cast_takes_weight_bias_and_defaults_along(defaults, dtype):
    original = layer(defaults)
    cast = copy.deepcopy(original).to(dtype)
    assert cast.weight.dtype == cast.bias.dtype == dtype and cast.partition.map.dtype == torch.uint8
    assert defaults != "stored" or cast.partition.defaults.tensor.dtype == dtype
    torch.testing.assert_close(outputs(cast).float(), outputs(original), rtol=0, atol=0.03)


def test_the_map_follows_a_move_to_another_device():
    moved = layer("stored").to("meta")
    assert moved.partition.map.is_meta and moved.partition.defaults.tensor.is_meta and moved.weight.is_meta


def test_shared_memory_holds_the_map_too():
    shared = layer("stored").share_memory()
    assert (
        shared.weight.is_shared() and shared.partition.map.is_shared() and shared.partition.defaults.tensor.is_shared()
    )


def test_a_meta_layer_takes_its_partition_from_a_state_dict():
    saved = layer("stored")
    loaded = partnets.Conv2d(3, 5, 3, proportions=(0.8, 0.1, 0.1), device="meta")
    loaded.load_state_dict(saved.state_dict(), assign=True)
    assert torch.equal(outputs(loaded), outputs(saved))


def test_a_meta_layer_cannot_be_filled_with_garbage():
    with pytest.raises(RuntimeError, match="assign=True"):
        partnets.Linear(3, 2, proportions=(0.5, 0.5), device="meta").to_empty(device="cpu")


def shard(seed):
    """Rows 1 to 3 of a layer, whose weights are 0."""
    part = layer(seed=seed)
    part.weight, part.bias = nn.Parameter(torch.zeros(3, 3, 3, 3)), nn.Parameter(part.bias[:, 1:4])
    part.partition = part.partition.rows(1, 4)
    return part


def test_a_shard_is_restored_where_it_was():
    whole, loaded = layer(seed=0), shard(seed=1)
    loaded.partition = dataclasses.replace(loaded.partition, row=0)
    loaded.load_state_dict(through_file(shard(seed=0).state_dict()))
    expected = partkernels.subnetwork_weight(torch.zeros(5, 3, 3, 3), whole.partition, 1)[1:4]
    assert torch.equal(partkernels.subnetwork_weight(loaded.weight, loaded.partition, 1), expected)
    loaded.reset_parameters()
    assert torch.equal(loaded.weight, whole.weight[1:4])


def test_format_1_had_no_shards_and_is_read_as_a_whole():
    state = layer(seed=0).state_dict()
    state["partition"] = {name: value for name, value in state["partition"].items() if name not in ("row", "col")}
    state["partition"]["format"] = 1
    loaded = layer(seed=1)
    loaded.load_state_dict(through_file(state))
    assert torch.equal(outputs(loaded), outputs(layer(seed=0)))


def damage(**changes):
    def change(state):
        state["partition"] = state["partition"] | changes

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (damage(map=torch.full((5, 16), 255, dtype=torch.uint8)), "above its count"),
        (damage(map=torch.zeros(5, 8, dtype=torch.uint8)), "shape"),
        (damage(map=torch.zeros(5, 16)), "uint8"),
        (damage(map="map"), "uint8"),
        (damage(count=2), "3"),
        (damage(format=9), "format 9"),
        (damage(format=1), "format 1, with col, count"),
        (damage(row=-1), "row=-1"),
        (damage(row="first"), "row='first'"),
        (damage(defaults={"kind": "cauchy"}), "cauchy"),
        (damage(defaults={"kind": "uniform", "scale": float("nan"), "seed": 0}), "scale"),
        (damage(defaults={"kind": "stored", "tensor": torch.zeros(2, 2)}), "stored defaults"),
        (lambda state: state.update(partition=7), "no saved partition"),
        (lambda state: state.pop("partition"), r"partnets\.partition"),
    ],
)
def test_a_damaged_entry_raises_and_changes_nothing(change, message):
    loaded = layer(seed=1)
    before = copy.deepcopy(loaded)
    state = layer(seed=0).state_dict()
    change(state)
    with pytest.raises(RuntimeError, match=message):
        loaded.load_state_dict(state)
    assert torch.equal(loaded.weight, before.weight) and torch.equal(loaded.bias, before.bias)
    assert torch.equal(loaded.partition.map, before.partition.map)


def test_a_state_dict_of_another_count_raises():
    with pytest.raises(RuntimeError, match="3 partitions and this one 2"):
        layer(proportions=(0.5, 0.5)).load_state_dict(layer().state_dict())


def test_a_state_dict_of_an_ordinary_layer_raises_with_the_cure():
    with pytest.raises(RuntimeError, match=r"load it into the ordinary model and partition that"):
        layer().load_state_dict(nn.Conv2d(3, 5, 3).state_dict())


def test_loading_without_strictness_keeps_the_partition_that_is_there():
    loaded = layer(seed=1)
    expected = loaded.partition.map.clone()
    loaded.load_state_dict({}, strict=False)
    assert torch.equal(loaded.partition.map, expected)
