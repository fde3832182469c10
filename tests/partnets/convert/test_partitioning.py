"""partition: which layers change, and what refuses before anything changes. merge: the way back."""

import copy
import warnings

import pytest
import torch
from layers import CASES
from torch import nn
from torch.nn.utils import parametrizations, prune

import partkernels
import partnets
from partnets import hyper

PROPORTIONS = (0.8, 0.1, 0.1)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.ReLU())
        self.shortcut = nn.ModuleDict({"projection": nn.Conv2d(width, width, 1)})

    def forward(self, x):
        return self.body(x) + self.shortcut["projection"](x)


def nested():
    torch.manual_seed(0)
    return nn.Sequential(hyper.Affine(), Block(3), nn.Dropout(0.0), nn.Flatten(), nn.Linear(3 * 25, 7), nn.Linear(7, 2))


def unchanged(model, change, message, error=ValueError):
    """change() raises, and leaves every module, parameter and mode of the model as it was."""
    modules, state = dict(model.named_modules()), copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=message):
        change()
    assert dict(model.named_modules()) == modules
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_every_layer_with_a_rule_changes_and_nothing_else_does():
    model = nested()
    kinds = {path: type(module) for path, module in model.named_modules()}
    assert partnets.partition(model, PROPORTIONS) is model
    changed = {path for path, module in model.named_modules() if type(module) is not kinds[path]}
    assert changed == {"1.body.0", "1.shortcut.projection", "4", "5"}
    assert model[1].body[0].partition.sizes() == [65, 8, 8]
    assert model(torch.zeros(2, 3, 5, 5)).shape == (2, 2)


def test_a_layer_itself_can_be_partitioned():
    assert isinstance(partnets.partition(nn.Linear(3, 2), (0.5, 0.5)), partnets.Linear)


@pytest.mark.parametrize("defaults", ["zero", "stored"])
def test_present_weights_stay(defaults):
    model = nested()
    before = copy.deepcopy(model)
    partnets.partition(model, PROPORTIONS, defaults=defaults)
    x = torch.randn(2, 3, 5, 5)
    torch.testing.assert_close(model[1:](x), before[1:](x))
    with partnets.subnetwork(model, 1):
        assert torch.allclose(model[1:](x), before[1:](x), atol=1e-5) == (defaults == "stored")


def test_seeds_give_each_layer_a_partition_of_its_own_and_the_same_everywhere():
    def maps(seed):
        model = partnets.partition(nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9)), (0.5, 0.5), seed=seed)
        return [layer.partition.map for layer in model] + [layer.weight for layer in model]

    first, again, other = maps(0), maps(0), maps(1)
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0], first[1]) and not torch.equal(first[2], first[3])
    assert not any(map(torch.equal, first, other))


def test_dtype_mode_hooks_and_frozen_parameters_stay():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).double().eval()
    model[0].weight.requires_grad_(False)
    calls = []
    handle = model[1].register_forward_hook(lambda *_: calls.append(1))
    partnets.partition(model, PROPORTIONS)
    model(torch.zeros(1, 4, dtype=torch.float64))
    handle.remove()
    model(torch.zeros(1, 4, dtype=torch.float64))
    assert calls == [1]
    assert not model[0].weight.requires_grad and model[0].bias.requires_grad and not model[0].training


def test_a_layer_under_two_paths_changes_once():
    shared = nn.Linear(4, 4)
    model = partnets.partition(nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)}), (0.5, 0.5))
    assert isinstance(model["a"], partnets.Linear) and model["a"] is model["b"][0]


@pytest.mark.parametrize("skip", [["1"], ["1.body", "1.shortcut"], "1"])
def test_skip_leaves_subtrees_alone(skip):
    model = partnets.partition(nested(), PROPORTIONS, skip=skip)
    assert type(model[1].body[0]) is type(model[1].shortcut["projection"]) is nn.Conv2d
    assert isinstance(model[4], partnets.Linear)


def test_skip_takes_modules():
    model = nested()
    partnets.partition(model, PROPORTIONS, skip=[model[4]])
    assert type(model[4]) is nn.Linear and isinstance(model[5], partnets.Linear)


@pytest.mark.parametrize("skip", [["6"], ["1.bod"], [nn.Linear(2, 2)], [3]])
def test_a_skip_that_is_not_in_the_model_raises(skip):
    model = nested()
    unchanged(model, lambda: partnets.partition(model, PROPORTIONS, skip=skip), "not in this model")


class Matrix(nn.Module):
    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.eye(4))


def test_all_modules_without_a_rule_are_named_at_once():
    model = nn.Sequential(
        nn.Linear(4, 4),
        nn.ModuleDict({"norm": nn.InstanceNorm1d(4, affine=True, track_running_stats=True)}),
        nn.InstanceNorm1d(4),
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        Matrix(),
    )
    unchanged(
        model,
        lambda: partnets.partition(model, PROPORTIONS),
        r"(?s)1\.norm: .*statistics.*3\.parametrizations\.weight: .*original1 \[4, 4\].*4: .*matrix \[4, 4\]"
        r".*skip=\['1\.norm', '3\.parametrizations\.weight', '4'\].*register",
    )


def test_a_lazy_layer_has_to_be_called_first():
    with pytest.raises(ValueError, match=r"0: .*call it first"):
        partnets.partition(nn.Sequential(nn.LazyLinear(4)), PROPORTIONS)


def test_skipping_what_has_no_rule_leaves_the_rest_to_be_partitioned():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), Matrix(), nn.Flatten(), nn.Linear(16, 3))
    obstacles = partnets.without_rule(model)
    assert list(obstacles) == ["1"] and "matrix [4, 4]" in obstacles["1"]
    partnets.partition(model, (0.5, 0.5), skip=obstacles)
    assert [type(layer) for layer in model[::3]] == [partnets.Conv2d, partnets.Linear]
    assert partnets.without_rule(model, skip=obstacles).keys() == {"0", "3"}, "they are partitioned already"


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_weight_normalised_layers_raise():
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)))
    unchanged(model, lambda: partnets.partition(model, PROPORTIONS), "weight_g")


def test_a_skipped_attention_stays():
    model = nn.ModuleList([nn.MultiheadAttention(4, 1), nn.Linear(4, 4)])
    partnets.partition(model, PROPORTIONS, skip=["0"])
    assert not isinstance(model[0].out_proj, partnets.Linear) and isinstance(model[1], partnets.Linear)


@pytest.mark.parametrize("skip", [["0.out_proj"], ["1.self_attn"]])
def test_a_part_of_an_attention_cannot_be_skipped(skip):
    model = nn.ModuleList([nn.MultiheadAttention(4, 1), nn.TransformerEncoderLayer(4, 1)])
    unchanged(model, lambda: partnets.partition(model, PROPORTIONS, skip=skip), "skip all of it")


def test_a_second_partition_raises():
    model = partnets.partition(nested(), PROPORTIONS)
    with pytest.raises(ValueError, match=r"1\.body\.0: .*already"):
        partnets.partition(model, PROPORTIONS)


def test_a_model_without_layers_raises():
    with pytest.raises(ValueError, match="no layer"):
        partnets.partition(nn.ReLU(), PROPORTIONS)


@pytest.mark.parametrize(
    "arguments", [{"proportions": (0.5, 0.6)}, {"seed": -1}, {"defaults": "none"}, {"proportions": [1 / 300] * 300}]
)
def test_wrong_arguments_raise_and_change_nothing(arguments):
    model = nested()
    unchanged(model, lambda: partnets.partition(model, **{"proportions": PROPORTIONS} | arguments), "pass")


def test_a_registered_rule_is_used():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

    seen = []

    def rule(layer, proportions, *, seed, defaults, scheme):
        seen.append((proportions, defaults, scheme))
        return layer

    partnets.register(Scale, rule)
    model = partnets.partition(nn.Sequential(Scale(), nn.Linear(2, 2)), (0.5, 0.5), defaults="zero")
    assert seen == [((0.5, 0.5), "zero", "weight")] and isinstance(model[0], Scale)


def test_register_takes_types_only():
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        partnets.register(nn.Linear(2, 2), print)


@pytest.mark.parametrize("active", [1, 2, 3, None])
def test_a_merged_model_is_ordinary_and_computes_the_same(active):
    model = partnets.partition(nested().double(), PROPORTIONS)[1:]
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    before = copy.deepcopy(model.state_dict())
    merged = partnets.merge(model, active)
    assert not any(isinstance(module, partnets.Linear | partnets.Conv2d) for module in merged.modules())
    x = torch.randn(4, 3, 5, 5, dtype=torch.float64)
    with partnets.subnetwork(model, active or 3):
        torch.testing.assert_close(merged(x), model(x), rtol=1e-12, atol=1e-12)
    merged(x).sum().backward()
    assert merged[3].weight.grad is not None
    assert torch.equal(before["4.weight"], model[3].weight) and model[3].weight.grad is None
    nested()[1:].load_state_dict(merged.state_dict())


@pytest.mark.parametrize("active", [0, 4])
def test_merging_a_subnetwork_that_is_not_there_raises(active):
    with pytest.raises(ValueError, match="pass an int in 1"):
        partnets.merge(partnets.Linear(3, 2, proportions=PROPORTIONS), active)


def test_merging_an_ordinary_model_raises():
    with pytest.raises(ValueError, match="no partitioned layer"):
        partnets.merge(nn.Linear(3, 2))


@pytest.mark.parametrize(
    "change", [parametrizations.weight_norm, lambda layer: prune.l1_unstructured(layer, "weight", 0.5)]
)
def test_a_weight_that_is_computed_from_others_raises(change):
    layer = change(partnets.Linear(4, 3, proportions=(0.5, 0.5), seed=0))
    with pytest.raises(RuntimeError, match=r"the weight of this \w*Linear is computed from other parameters"):
        layer(torch.ones(1, 4))
    with pytest.raises(RuntimeError, match="no partition owns"):
        layer.to_ordinary(1)
    norm = partnets.LayerNorm(4, proportions=(0.5, 0.5))
    prune.l1_unstructured(norm, "bias", 0.5)
    with pytest.raises(RuntimeError, match="the bias of this LayerNorm is computed from other parameters"):
        norm(torch.ones(1, 4))
    with pytest.raises(RuntimeError, match="no partition owns"):
        norm.to_ordinary(1)


def changed(layer):
    """As training changes a weight: beyond what torch draws."""
    nn.init.normal_(layer.weight, std=0.3)
    return layer


def test_weights_that_may_be_pretrained_are_not_redrawn_without_a_word():
    model = nn.Sequential(nn.Linear(40, 30), nn.ReLU(), changed(nn.Linear(30, 20)), nn.LSTM(20, 10))
    with pytest.warns(UserWarning, match=r"the weights of 2 anew, .* pass defaults='stored', which keeps them"):
        partnets.partition(model, (0.5, 0.5))


@pytest.mark.parametrize("defaults", ["seed", "zero", "stored", partkernels.Zeros()])
def test_who_says_what_becomes_of_them_is_not_warned(defaults):
    partnets.partition(nn.Sequential(changed(nn.Linear(30, 20))), (0.5, 0.5), defaults=defaults)


@pytest.mark.parametrize("name", CASES)
def test_fresh_layers_are_redrawn_without_a_warning(name):
    torch.manual_seed(0)
    for _ in range(3):
        partnets.partition(nn.Sequential(CASES[name].make()), (0.5, 0.5))


def test_a_warning_that_is_an_error_leaves_the_model_as_it_was():
    model = nn.Sequential(changed(nn.Linear(30, 20)), nn.PReLU())
    before = copy.deepcopy(model.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="the weights of 0 anew"):
            partnets.partition(model, (0.5, 0.5))
    assert type(model[0]) is nn.Linear and type(model[1]) is nn.PReLU
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_tied_weight_is_as_fresh_as_the_layer_that_drew_it():
    table, head = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False)
    head.weight = table.weight
    partnets.partition(nn.Sequential(table, head), (0.5, 0.5))
