"""Partitioned models survive state_dicts, files, copies and moves, and reject state that does not fit."""

import copy
import io
import pickle

import pytest
import torch
from small_network import perturbed
from torch import nn

import partkernels
import partnets
from partnets.subnetworks.state import num_partitions

DEFAULTS = ["seed", "zero", "stored"]


def layer(defaults="seed", seed=0, proportions=(0.8, 0.1, 0.1)):
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


def through_safetensors(value):
    safetensors = pytest.importorskip("safetensors.torch")
    return safetensors.load(safetensors.save(value))


def same(state, other):
    return state.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in state.items())


@pytest.mark.parametrize("through", [through_file, through_safetensors])
@pytest.mark.parametrize("defaults", DEFAULTS)
def test_a_state_dict_restores_the_partition_and_its_defaults(defaults, through):
    saved = perturbed(layer(defaults, seed=0), 1.0)
    loaded = layer("seed", seed=1)
    loaded.load_state_dict(through(saved.state_dict()), strict=True)
    assert torch.equal(loaded.weight_partition, saved.weight_partition)
    assert torch.equal(outputs(loaded), outputs(saved))


@pytest.mark.parametrize("defaults", DEFAULTS)
def test_a_state_dict_has_few_entries_besides_torchs(defaults):
    stored = ["0.weight_stored"] if defaults == "stored" else []
    expected = ["0.weight", "0.bias", "0.weight_partition", "0.weight_defaults", *stored, "0.bias_rows"]
    found = [name for name in nn.Sequential(layer(defaults)).state_dict() if not name.endswith("learned_from")]
    assert found == expected


@pytest.mark.parametrize("defaults", DEFAULTS)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_compute_the_same_and_share_nothing(defaults, duplicate):
    original = perturbed(layer(defaults), 1.0)
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
    assert cast.weight.dtype == cast.bias.dtype == cast.bias_rows.dtype == dtype
    assert cast.weight_partition.dtype == torch.uint8 and cast.weight_defaults.dtype == torch.int64
    assert defaults != "stored" or cast.weight_stored.dtype == dtype
    torch.testing.assert_close(outputs(cast).float(), outputs(original), rtol=0, atol=0.03)


def test_the_map_follows_a_move_to_another_device():
    moved = layer("stored").to("meta")
    assert moved.weight.is_meta and moved.weight_partition.is_meta and moved.weight_stored.is_meta


def test_shared_memory_holds_the_map_too():
    shared = layer("stored").share_memory()
    assert all(tensor.is_shared() for tensor in shared.state_dict().values())


@pytest.mark.parametrize("own", ["seed", "stored"])
@pytest.mark.parametrize("defaults", DEFAULTS)
def test_a_meta_layer_takes_its_partition_from_a_state_dict(defaults, own):
    saved = perturbed(layer(defaults), 1.0)
    loaded = partnets.Conv2d(3, 5, 3, proportions=(0.8, 0.1, 0.1), defaults=own, device="meta")
    loaded.load_state_dict(saved.state_dict(), assign=True)
    assert torch.equal(outputs(loaded), outputs(saved))


def test_a_model_that_is_made_on_the_meta_device_takes_everything_from_a_state_dict():
    def made(device):
        with torch.device(device):
            layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(64, 2))
            return partnets.partition(layers, (0.8, 0.1, 0.1))

    saved, loaded, x = perturbed(made("cpu"), 0.1), made("meta"), torch.randn(2, 3, 6, 6)
    assert loaded(x.to("meta")).shape == (2, 2)
    loaded.load_state_dict(through_file(saved.state_dict()), assign=True)
    for active in (1, 2, 3):
        with partnets.subnetwork(saved, active), partnets.subnetwork(loaded, active):
            assert torch.equal(loaded(x), saved(x))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(20, 6), nn.Linear(6, 20, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(self.table(ids))


@pytest.mark.parametrize("own", DEFAULTS)
@pytest.mark.parametrize("saved", DEFAULTS)
def test_a_file_of_one_place_of_a_tied_weight_gives_both_its_defaults(saved, own, tmp_path):
    models = [
        partnets.partition(Tied(), (0.5, 0.25, 0.25), seed=seed, defaults=kind)
        for seed, kind in enumerate((saved, own))
    ]
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_model(models[0], str(tmp_path / "file"))  # under the first name, which is loaded last
    safetensors.load_model(models[1], str(tmp_path / "file"))
    ids = torch.arange(7)
    for k in (1, 2, 3):
        with partnets.subnetwork(models[0], k), partnets.subnetwork(models[1], k):
            assert torch.equal(models[0](ids), models[1](ids))


def test_weights_without_their_partitions_and_other_numbers_of_partitions_are_refused():
    def made(shares):
        return partnets.partition(nn.Sequential(nn.Linear(8, 8, bias=False)), shares)

    state = made((0.5, 0.25, 0.25)).state_dict()
    with pytest.raises(RuntimeError, match=r"0\.weight_partition has 3 partitions; this model has 4"):
        made((0.25,) * 4).load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"0\.weight comes without 0\.weight_partition"):
        made((0.5, 0.25, 0.25)).load_state_dict({"0.weight": state["0.weight"]}, strict=False)


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
            "weight_partition: the map holds an id above its count",
        ),
        (changed(weight_partition=torch.zeros(5, 16)), "needs a contiguous torch.uint8 map"),
        (changed(weight_defaults=torch.tensor([9, 0, 0, 0, 3, 60])), "defaults are of kind 9; known are 0 to 3"),
        (changed(weight_defaults=torch.zeros(3, dtype=torch.int64)), "size mismatch for weight_defaults"),
        (changed(weight_defaults=torch.tensor([1, -1, 0, 0, 3, 60])), "scale"),
        (lambda state: state.pop("weight_partition"), "Missing key"),
        (changed(bias=torch.zeros(4)), "size mismatch for bias"),
        (changed(bias_rows=torch.zeros(2, 5)), "size mismatch for bias_rows"),
        (changed(weight=torch.zeros(5, 3, 2, 2)), "size mismatch for weight"),
    ],
)
def test_a_damaged_entry_raises(change, message):
    loaded = layer(seed=1)
    state = layer(seed=0).state_dict()
    change(state)
    with pytest.raises((RuntimeError, ValueError), match=message):
        loaded.load_state_dict(state)


def test_a_bias_that_does_not_fit_its_rows_is_refused_in_the_next_subnetwork():
    loaded, state = layer(seed=1), layer(seed=0).state_dict()
    loaded.load_state_dict(state | {"bias": torch.ones(5)})
    with pytest.raises(RuntimeError, match="bias of Conv2d was written into"):
        outputs(loaded)


def test_a_state_dict_of_another_number_of_partitions_raises():
    with pytest.raises(RuntimeError, match="size mismatch for bias_rows"):
        layer(proportions=(0.5, 0.5)).load_state_dict(layer().state_dict())


def test_the_state_dict_of_a_dense_layer_raises():
    with pytest.raises(RuntimeError, match=r'Missing key.* "weight_partition"'):
        layer().load_state_dict(nn.Conv2d(3, 5, 3).state_dict())


@pytest.mark.parametrize("name", ["Linear", "LayerNorm"])
def test_a_partitioned_state_dict_does_not_fit_a_dense_layer(name):
    sizes = (3, 2) if name == "Linear" else (4,)
    state = getattr(partnets, name)(*sizes, proportions=(0.5, 0.5)).state_dict()
    with pytest.raises(RuntimeError, match=r'Unexpected key.* "bias_rows"'):
        getattr(nn, name)(*sizes).load_state_dict(state)


def test_a_merged_model_loads_and_saves_as_torch_does_again():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.MultiheadAttention(4, 2), nn.PReLU(4))
    hooks = {path: (len(one._load_state_dict_post_hooks), len(one._state_dict_pre_hooks)) for path, one in names(model)}
    keys = list(model.state_dict())
    merged = partnets.merge(partnets.partition(model, (0.8, 0.1, 0.1)))
    assert list(merged.state_dict()) == keys
    for path, one in names(merged):
        assert (len(one._load_state_dict_post_hooks), len(one._state_dict_pre_hooks)) == hooks[path]
        assert all(not parameter._backward_hooks for parameter in one.parameters())


def names(model):
    return list(model.named_modules())


def test_what_fits_is_loaded_where_keys_may_be_missing():
    saved, loaded = layer(seed=0), layer(seed=1)
    bias, state = loaded.bias.detach().clone(), saved.state_dict()
    del state["bias"], state["bias_rows"]
    assert loaded.load_state_dict(state, strict=False).missing_keys == ["bias", "bias_rows"]
    assert torch.equal(loaded.bias, bias) and torch.equal(loaded.weight, saved.weight)
    assert torch.equal(loaded.weight_partition, saved.weight_partition)


def test_loading_without_strictness_keeps_the_partition_that_is_there():
    loaded = layer(seed=1)
    expected = outputs(loaded)
    loaded.load_state_dict({}, strict=False)
    assert torch.equal(outputs(loaded), expected)


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
        saved = perturbed(layer(defaults), 1.0)
        expected, state = outputs(saved), through_file(saved.state_dict())
    loaded = layer(seed=1)
    loaded.load_state_dict(state)
    torch.testing.assert_close(outputs(loaded), expected)
    with partkernels.use_backend("reference"):
        torch.testing.assert_close(outputs(loaded), expected)


def test_a_truncated_file_raises_before_anything_is_loaded():
    file = io.BytesIO()
    torch.save(layer().state_dict(), file)
    with pytest.raises(RuntimeError, match="failed finding central directory"):
        torch.load(io.BytesIO(file.getvalue()[:-100]), weights_only=True)


class Cropping(nn.Module):
    """A module that crops a longer table when it loads a state_dict."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, 4))

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        state_dict[f"{prefix}table"] = state_dict[f"{prefix}table"][:4]
        super()._load_from_state_dict(state_dict, prefix, *rest)


def test_modules_that_change_what_they_are_given_go_on_doing_so():
    model, table = partnets.partition(nn.Sequential(Cropping()), (0.5, 0.5)), torch.randn(6, 4)
    model.load_state_dict(model.state_dict() | {"0.table": table})
    assert torch.equal(model[0].table, table[:4])


def test_a_state_dict_of_tied_weights_ties_none_and_fits_both():
    def tied(seed):
        model = nn.ModuleDict({"table": nn.Embedding(5, 4), "head": nn.Linear(4, 5)})
        model["head"].weight = model["table"].weight
        return partnets.partition(model, (0.5, 0.5), seed=seed)

    saved, loaded = perturbed(tied(0), 0.1), tied(1)
    loaded.load_state_dict(through_file(saved.state_dict()))
    assert loaded["head"].weight is loaded["table"].weight
    for k in (1, 2):
        with partnets.subnetwork(saved, k), partnets.subnetwork(loaded, k):
            assert torch.equal(loaded["head"].weight, saved["head"].weight)
            assert torch.equal(loaded["head"].bias, saved["head"].bias)
    assert same(loaded.state_dict(), saved.state_dict())


def test_a_model_on_the_meta_device_names_the_cure_and_takes_a_state_dict():
    def made():
        return partnets.partition(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)).eval(), (0.5, 0.3, 0.2))

    reference = perturbed(made(), 0.1)
    with torch.device("meta"):
        model = made()
    for one in (model, copy.deepcopy(reference).to("meta")):
        with pytest.raises(RuntimeError, match=r"meta device.*call model\.to_empty"), partnets.subnetwork(one, 1):
            pass
        one.to_empty(device="cpu").load_state_dict(reference.state_dict())
        x = torch.randn(3, 4)
        for k in (1, 2, 3):
            with partnets.subnetwork(reference, k), partnets.subnetwork(one, k):
                assert torch.equal(one(x), reference(x))
