"""Partitioned layers survive state_dicts, files, copies and moves, and reject state that does not fit."""

import copy
import dataclasses
import io
import pickle

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten

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


def test_a_state_dict_has_two_entries_more_than_torchs():
    assert list(nn.Sequential(layer()).state_dict()) == ["0.weight", "0.bias", "0.partition", "0.learned_from"]


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


def test_a_model_that_is_made_on_the_meta_device_takes_everything_from_a_state_dict():
    def made(device):
        with torch.device(device):
            layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(64, 2))
            return partnets.partition(layers, (0.8, 0.1, 0.1))

    saved, loaded, x = made("cpu"), made("meta"), torch.randn(2, 3, 6, 6)
    assert loaded(x.to("meta")).shape == (2, 2)
    loaded.load_state_dict(through_file(saved.state_dict()), assign=True)
    for active in (1, 2, 3):
        with partnets.subnetwork(saved, active), partnets.subnetwork(loaded, active):
            assert torch.equal(loaded(x), saved(x))


def test_a_meta_layer_cannot_be_filled_with_garbage():
    with pytest.raises(RuntimeError, match="assign=True"):
        partnets.Linear(3, 2, proportions=(0.5, 0.5), device="meta").to_empty(device="cpu")


def shard(seed):
    """Return rows 1 to 3 of a layer, with zero weights."""
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


def test_a_nested_partition_given_to_a_layer_is_saved():
    layer, again = (partnets.Linear(4, 3, proportions=(0.5, 0.5), seed=seed) for seed in (0, 1))
    for each in (layer, again):
        each.partition = partkernels.Partition.nested((3, 4), ((1, 2), (0, 1)), (2, 4))
    state = through_file(layer.state_dict())
    assert state["partition"]["row_units"] == [[1, 2], [0, 1]] and state["partition"]["format"] == 3
    again.load_state_dict(state)
    assert torch.equal(again.weight, layer.weight)
    for damage in ({"row_units": [[2, 2], [0, 1]]}, {"format": 2}, {"count": 3}, {"col": 1}):
        with pytest.raises(RuntimeError, match="partition:"):
            again.load_state_dict(state | {"partition": state["partition"] | damage})


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
        (damage(defaults={"kind": "uniform", "scale": float("nan"), "seed": 0, "stream": 0}), "scale"),
        (damage(defaults={"kind": "uniform", "scale": 0.5}), "must have scale, seed, stream"),
        (damage(defaults={"kind": "zeros", "scale": 0.5}), "saved zeros defaults have scale"),
        (damage(defaults={"kind": ["zeros"]}), r"kind \['zeros'\]; known are zeros"),
        (damage(defaults="zeros"), "saved defaults are a str"),
        (damage(defaults={}), "kind None"),
        (damage(defaults={"kind": "stored", "tensor": torch.zeros(2, 2)}), "stored defaults"),
        (lambda state: state.update(partition=7), "no saved partition"),
        (lambda state: state["partition"].pop("map"), "no saved partition"),
        (lambda state: state.pop("partition"), r"partnets\.partition"),
        (lambda state: state.update(bias=[0.0] * 5), "bias: is a list; it must be a tensor"),
        (lambda state: state.update(bias=torch.zeros(5)), r"bias: has the shape \[5\], and the model's \[3, 5\]"),
        (lambda state: state.update(weight=torch.zeros(5, 3, 2, 2)), "weight: has the shape"),
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


def same(state, other):
    (values, tree), (others, other_tree) = tree_flatten(state), tree_flatten(other)
    equal = (torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(values, others, strict=True))
    return tree == other_tree and all(equal)


class Block(nn.Module):
    """A model with layers, a layer with children, a parameter, buffers and a skipped layer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.token = nn.Parameter(torch.zeros(1, 4))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 2)


def block(seed, proportions=(0.8, 0.1, 0.1)):
    model = Block()
    nn.init.normal_(model.token)
    return partnets.partition(nn.Sequential(model), proportions, seed=seed, skip=["0.last"])


def without_its_partition(state):
    del state["0.attention.out_proj.partition"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.update({"0.first.weight": torch.zeros(1)}), r"0\.first\.weight: has the shape \[1\]"),
        (lambda state: state.update({"0.first.partition": 3}), r"0\.first\.partition: this is no saved partition"),
        (without_its_partition, r"0\.attention\.out_proj\.weight: has no \S+out_proj\.partition beside it"),
        (
            lambda state: state.update({"0.token": torch.zeros(1, 4)}),
            r"0\.token: has the shape \[1, 4\]",
        ),
        (lambda state: state.update({"0.mean": torch.zeros(5)}), r"0\.mean: has the shape \[5\]"),
        (lambda state: state.update({"0.mean": 5}), r"0\.mean: is a int"),
        (lambda state: state.update({"0.last.bias": torch.zeros(4)}), r"0\.last\.bias: has the shape \[4\]"),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_a_model_with_one_damaged_entry_changes_nowhere(change, message, strict):
    loaded, state = block(seed=1), block(seed=0).state_dict()
    before = copy.deepcopy(loaded.state_dict())
    change(state)
    for holder, prefix in ((loaded, ""), (nn.ModuleDict({"inside": loaded}), "inside.")):
        with pytest.raises(RuntimeError, match=message):
            holder.load_state_dict({prefix + key: value for key, value in state.items()}, strict=strict)
        assert same(loaded.state_dict(), before)


def test_all_that_does_not_fit_is_named_at_once():
    with pytest.raises(RuntimeError) as raised:
        block(seed=1).load_state_dict(
            Block().state_dict() | {"0.first.bias": torch.zeros(2)} | block(0, (0.5, 0.5)).state_dict()
        )
    message = str(raised.value)
    assert all(f"0.{layer}.partition: the saved layer has 2" in message for layer in ("first", "attention.out_proj"))
    assert "0.attention.in_proj_weight_partition" in message and "0.token: has the shape" in message


def test_an_attention_layer_by_itself_changes_nowhere_either():
    loaded, saved = (partnets.MultiheadAttention(4, 2, proportions=(0.5, 0.5), seed=seed) for seed in (0, 1))
    before = copy.deepcopy(loaded.state_dict())
    with pytest.raises(RuntimeError, match=r"in_proj_bias: has the shape \[1\]"):
        loaded.load_state_dict(saved.state_dict() | {"in_proj_bias": torch.zeros(1)})
    assert same(loaded.state_dict(), before)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_are_as_careful(duplicate):
    model, state = duplicate(block(seed=1)), block(seed=0).state_dict()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="has changed nothing"):
        model.load_state_dict(state | {"0.last.bias": torch.zeros(4)})
    assert same(model.state_dict(), before)
    model.load_state_dict(state)
    assert same(model.state_dict(), state)


def test_modules_that_rename_what_they_are_given_are_left_alone():
    def renamed(module, state_dict, prefix, *_):
        state_dict[prefix + "scale"] = state_dict.pop(prefix + "gamma").flatten()

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(4))
            self.register_load_state_dict_pre_hook(renamed)

    model = partnets.partition(nn.Sequential(nn.Linear(4, 4), Scaled()), (0.5, 0.5), skip=["1"])
    state = model.state_dict()
    state["1.gamma"] = state.pop("1.scale").view(2, 2) + 1
    model.load_state_dict(state)
    assert torch.equal(model[1].scale, torch.ones(4))


def test_an_ordinary_model_loads_as_torch_does_again():
    merged = partnets.merge(block(seed=0))
    assert not any(module._load_state_dict_pre_hooks for module in merged.modules())


def test_what_fits_is_loaded_where_keys_may_be_missing():
    saved, loaded = layer(seed=0), layer(seed=1)
    bias, state = loaded.bias.detach().clone(), saved.state_dict()
    del state["bias"]
    assert loaded.load_state_dict(state, strict=False).missing_keys == ["bias"]
    assert torch.equal(loaded.bias, bias) and torch.equal(loaded.weight, saved.weight)
    assert torch.equal(loaded.partition.map, saved.partition.map)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("defaults", DEFAULTS)
@pytest.mark.parametrize(
    ("before", "after"), [(torch.float64, torch.bfloat16), (torch.bfloat16, torch.float64)], ids=str
)
def test_a_state_dict_loads_in_another_dtype(before, after, defaults, assign):
    saved, loaded = layer(defaults, seed=0).to(before), layer(seed=1).to(after)
    nn.init.normal_(saved.weight)
    loaded.load_state_dict(through_file(saved.state_dict()), assign=assign)
    assert loaded.weight.dtype == (before if assign else after)
    assert torch.equal(outputs(loaded), outputs(copy.deepcopy(saved).to(loaded.weight.dtype)))


@pytest.mark.parametrize("defaults", DEFAULTS)
def test_a_state_dict_of_one_backend_loads_on_another(defaults):
    with partkernels.use_backend("reference"):
        saved = layer(defaults)
        nn.init.normal_(saved.weight)
        expected, state = outputs(saved), through_file(saved.state_dict())
    loaded = layer("seed", seed=1)
    loaded.load_state_dict(state)
    torch.testing.assert_close(outputs(loaded), expected)
    with partkernels.use_backend("reference"):
        assert torch.equal(outputs(loaded), expected)


def test_a_truncated_file_raises_before_anything_is_loaded():
    file = io.BytesIO()
    torch.save(layer().state_dict(), file)
    with pytest.raises(RuntimeError, match="failed finding central directory"):
        torch.load(io.BytesIO(file.getvalue()[:-100]), weights_only=True)


def test_a_state_dict_of_another_count_raises():
    with pytest.raises(RuntimeError, match="3 partitions and this one 2"):
        layer(proportions=(0.5, 0.5)).load_state_dict(layer().state_dict())


def test_a_state_dict_of_an_ordinary_layer_raises_with_the_cure():
    with pytest.raises(RuntimeError, match=r"an ordinary model's, load it into that, and partition that"):
        layer().load_state_dict(nn.Conv2d(3, 5, 3).state_dict())


def test_loading_without_strictness_keeps_the_partition_that_is_there():
    loaded = layer(seed=1)
    expected = loaded.partition.map.clone()
    loaded.load_state_dict({}, strict=False)
    assert torch.equal(loaded.partition.map, expected)
