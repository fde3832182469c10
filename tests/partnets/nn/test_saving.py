"""Partitioned models survive state_dicts, files, copies and moves, and reject state that does not fit."""

import copy
import io

import pytest
import torch
from layers import Tied
from small_network import perturbed
from torch import nn

import partnets
from partnets.subnetworks.state import num_partitions

DEFAULTS = ["seed", "zero", "stored"]
SHARES = (0.8, 0.1, 0.1)


def layer(defaults="seed", seed=0, proportions=SHARES):
    return partnets.Conv2d(3, 5, 3, proportions=proportions, seed=seed, defaults=defaults)


def outputs(layer):
    x = torch.linspace(-1, 1, 3 * 36).view(1, 3, 6, 6).to(layer.weight.dtype)
    results = []
    for active in range(1, num_partitions(layer) + 1):
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
    safetensors = pytest.importorskip("safetensors.torch")
    saved, loaded = perturbed(layer(defaults, seed=0), 1.0), layer(defaults, seed=1)
    stored = ["0.weight_stored"] if defaults == "stored" else []
    names = [name for name in nn.Sequential(saved).state_dict() if not name.endswith("learned_from")]
    assert names == ["0.weight", "0.bias", "0.weight_partition", "0.weight_defaults", *stored, "0.bias_rows"]
    loaded.load_state_dict(safetensors.load(safetensors.save(saved.state_dict())), strict=True)
    assert torch.equal(loaded.weight_partition, saved.weight_partition)
    assert torch.equal(outputs(loaded), outputs(saved))


@pytest.mark.parametrize("defaults", DEFAULTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_cast_takes_weight_bias_and_defaults_along(defaults, dtype):
    original = layer(defaults)
    cast = copy.deepcopy(original).to(dtype)
    assert cast.weight.dtype == cast.bias.dtype == cast.bias_rows.dtype == dtype
    assert cast.weight_partition.dtype == torch.uint8 and cast.weight_defaults.dtype == torch.int64
    assert defaults != "stored" or cast.weight_stored.dtype == dtype
    torch.testing.assert_close(outputs(cast).float(), outputs(original), rtol=0, atol=0.03)


def test_moves_and_shared_memory_take_the_map_along():
    assert all(tensor.is_shared() for tensor in layer("stored").share_memory().state_dict().values())
    moved = layer("stored").to("meta")
    assert moved.weight.is_meta and moved.weight_partition.is_meta and moved.weight_stored.is_meta


@pytest.mark.parametrize("defaults", DEFAULTS)
def test_a_model_that_is_made_on_the_meta_device_takes_everything_from_a_state_dict(defaults):
    def made(device):
        with torch.device(device):
            layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 2)).eval()
            return partnets.partition(layers, SHARES, defaults=defaults)

    saved, x = perturbed(made("cpu"), 0.1), torch.randn(2, 3, 6, 6)
    for assign in (True, False):
        for loaded in (made("meta"), copy.deepcopy(saved).to("meta")):
            with pytest.raises(RuntimeError, match=r"meta device.*call model\.to_empty"):
                partnets.subnetwork(loaded, 1).__enter__()
            loaded = loaded if assign else loaded.to_empty(device="cpu")
            loaded.load_state_dict(through_file(saved.state_dict()), assign=assign)
            for active in (1, 2, 3):
                with partnets.subnetwork(saved, active), partnets.subnetwork(loaded, active):
                    assert torch.equal(loaded(x), saved(x))


@pytest.mark.parametrize("defaults", DEFAULTS)
def test_files_of_one_or_both_places_of_a_tied_weight_fit_both(defaults, tmp_path):
    saved, *others = (partnets.partition(Tied(), (0.5, 0.25, 0.25), seed=k, defaults=defaults) for k in range(3))
    perturbed(saved, 0.1)
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_model(saved, str(tmp_path / "file"))  # under the first name, which is loaded last
    safetensors.load_model(others[0], str(tmp_path / "file"))
    others[1].load_state_dict(through_file(saved.state_dict()))
    for other in others:
        assert other.head.weight is other.table.weight
        for k in (1, 2, 3):
            with partnets.subnetwork(saved, k), partnets.subnetwork(other, k):
                assert torch.equal(saved(torch.arange(7)), other(torch.arange(7)))


def test_rows_that_were_written_into_and_files_of_half_precision_load():
    model, loaded = layer(seed=0), layer(seed=1)
    with torch.no_grad():
        model.bias_rows.normal_()
    outputs(model)
    loaded.load_state_dict(copy.deepcopy(model).half().state_dict())
    outputs(loaded)
    with torch.no_grad():
        model.bias_rows.normal_()
    loaded.load_state_dict(model.state_dict())
    assert all(map(torch.equal, outputs(loaded), outputs(model)))


def without(*names):
    return lambda state: [state.pop(name) for name in names]


def changed(**entries):
    def change(state):
        state.update({name: value(state[name]) if callable(value) else value for name, value in entries.items()})

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed(weight_partition=torch.zeros(5, 8, dtype=torch.uint8)), "size mismatch for weight_partition"),
        (
            changed(weight_partition=lambda map: torch.full_like(map, 255)),
            "weight_partition: the map holds an id above",
        ),
        (changed(weight_partition=torch.zeros(5, 16)), "needs a contiguous torch.uint8 map"),
        (changed(weight_defaults=torch.tensor([9, 0, 0, 0, 3, 60])), "defaults are of kind 9; known are 0 to 3"),
        (changed(weight_defaults=torch.zeros(3, dtype=torch.int64)), "size mismatch for weight_defaults"),
        (changed(weight_defaults=torch.tensor([1, -1, 0, 0, 3, 60])), "scale"),
        (changed(weight_defaults=torch.tensor([0, 0, 0, 0, 4, 60])), "weight_partition has 4 partitions; this .* 3"),
        (without("weight_partition"), "Missing key.*(.|\n)*weight comes without weight_partition"),
        (changed(bias_rows=torch.zeros(2, 5)), "size mismatch for bias_rows"),
        (changed(weight=torch.zeros(5, 3, 2, 2)), "size mismatch for weight"),
        (lambda state: state.update(layer("stored").state_dict()), "weight has stored defaults, and this model has"),
        (lambda state: [state.clear(), state.update(nn.Conv2d(3, 5, 3).state_dict())], "Missing key.*partition"),
    ],
)
def test_a_damaged_entry_raises(change, message):
    loaded = layer(seed=1)
    state = layer(seed=0).state_dict()
    change(state)
    with pytest.raises((RuntimeError, ValueError), match=message):
        loaded.load_state_dict(state)


def test_weights_without_their_partitions_are_refused_with_strict_false():
    loaded, stored = layer(seed=1), layer("stored")
    with pytest.raises(RuntimeError, match="weight comes without"):
        loaded.load_state_dict({"weight": loaded.weight}, strict=False)
    state = stored.state_dict()
    del state["weight_stored"]
    with pytest.raises(RuntimeError, match="weight_stored is missing"):
        stored.load_state_dict(state, strict=False)
    with pytest.raises(RuntimeError, match="bias of Conv2d was written into"):
        loaded.load_state_dict(layer(seed=0).state_dict() | {"bias": torch.ones(5)})
        outputs(loaded)


def test_loading_with_strict_false_loads_the_given_keys():
    saved, loaded = layer(seed=0), layer(seed=1)
    expected = outputs(loaded)
    loaded.load_state_dict({}, strict=False)
    assert torch.equal(outputs(loaded), expected)
    bias, state = loaded.bias.detach().clone(), saved.state_dict()
    del state["bias"], state["bias_rows"]
    assert loaded.load_state_dict(state, strict=False).missing_keys == ["bias", "bias_rows"]
    assert torch.equal(loaded.bias, bias) and torch.equal(loaded.weight, saved.weight)
    assert torch.equal(loaded.weight_partition, saved.weight_partition)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("defaults", DEFAULTS)
@pytest.mark.parametrize(
    ("before", "after"), [(torch.float64, torch.bfloat16), (torch.bfloat16, torch.float64)], ids=str
)
def test_a_state_dict_loads_in_another_dtype(before, after, defaults, assign):
    saved, loaded = layer(defaults, seed=0).to(before), layer(defaults, seed=1).to(after)
    nn.init.normal_(saved.weight)
    loaded.load_state_dict(through_file(saved.state_dict()), assign=assign)
    assert loaded.weight.dtype == (before if assign else after)
    assert torch.equal(outputs(loaded), outputs(copy.deepcopy(saved).to(loaded.weight.dtype)))


class Cropping(nn.Module):
    """A module that crops a longer table when it loads a state_dict."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, 4))

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        state_dict[f"{prefix}table"] = state_dict[f"{prefix}table"][:4]
        super()._load_from_state_dict(state_dict, prefix, *rest)


def test_modules_that_crop_loaded_tensors_do_so_when_partitioned():
    model, table = partnets.partition(nn.Sequential(Cropping()), (0.5, 0.5)), torch.randn(6, 4)
    model.load_state_dict(model.state_dict() | {"0.table": table})
    assert torch.equal(model[0].table, table[:4])
