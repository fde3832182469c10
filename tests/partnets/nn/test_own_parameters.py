"""Parameters of generic modules: reading them returns the active subnetwork's values."""

import contextlib
import copy
import functools
import io
import pickle
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import partkernels
import partnets
from partnets.convert.reads import read_by
from partnets.nn.own_parameters import OwnParameters
from partnets.nn.partitioned import partitioned_layers

PROPORTIONS = (0.5, 0.3, 0.2)


class Embedded(nn.Module):
    """A module with token and position parameters besides layers, as in a vision transformer."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.position = nn.Parameter(torch.randn(1, 6, 4))
        self.gain = nn.Parameter(torch.ones(()))
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
        return self.layer(x) * self.gain


def partitioned():
    torch.manual_seed(0)
    return partnets.partition(Embedded().double(), PROPORTIONS)


def trained(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    return model


def test_the_model_itself_changes_in_place_and_stays_what_it_was():
    model = Embedded()
    before = copy.deepcopy(model)
    assert partnets.partition(model, PROPORTIONS, defaults="zero") is model
    assert isinstance(model, Embedded) and type(model).__name__ == "Embedded" and isinstance(model, OwnParameters)
    assert {name: tuple(p.shape) for name, p in model.named_parameters(recurse=False)} == {
        "token": (3, 1, 1, 4), "position": (3, 1, 6, 4), "gain": (3,),
    }  # fmt: skip
    assert torch.equal(model.token, before.token) and model.position.shape == (1, 6, 4)
    x = torch.randn(2, 5, 4)
    torch.testing.assert_close(model(x), before(x))


@pytest.mark.parametrize(("active", "update"), [(1, 1), (2, 1), (2, 2), (3, 3), (3, None)])
def test_a_subnetwork_adds_its_rows_up_and_one_learns(active, update):
    model = trained(partitioned())
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    with partnets.subnetwork(model, active, update):
        output = model(x)
    merged = partnets.merge(model, active)
    assert type(merged) is Embedded
    torch.testing.assert_close(merged(x), output, rtol=1e-12, atol=1e-12)
    merged(x).sum().backward()
    if update is None:
        assert not output.requires_grad
        return
    output.sum().backward()
    for name, rows in model.named_parameters(recurse=False):
        expected = torch.zeros_like(rows)
        expected[update - 1] = merged.get_parameter(name).grad
        torch.testing.assert_close(rows.grad, expected, rtol=1e-10, atol=1e-12)


def test_a_step_changes_one_row():
    model = trained(partitioned())
    before = copy.deepcopy(dict(model.named_parameters(recurse=False)))
    with partnets.subnetwork(model, 2, 2):
        model(torch.randn(2, 5, 4, dtype=torch.float64)).sum().backward()
    partnets.optim.SGD(model, lr=0.1).step(update=2)
    for name, rows in model.named_parameters(recurse=False):
        assert torch.equal(rows[[0, 2]], before[name][[0, 2]]) and not torch.equal(rows[1], before[name][1])


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_compute_the_same_and_share_nothing(duplicate):
    model = trained(partitioned())
    again = duplicate(model)
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    for active in (1, 3):
        with partnets.subnetwork(model, active), partnets.subnetwork(again, active):
            assert torch.equal(model(x), again(x))
    assert not {p.data_ptr() for p in model.parameters()} & {p.data_ptr() for p in again.parameters()}


def test_a_state_dict_restores_every_row():
    model, file = trained(partitioned()), io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    fresh = partitioned()
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))


def test_layers_without_a_rule_whose_parameters_are_broadcast_are_divided():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.PReLU(4), nn.InstanceNorm2d(4, affine=True)).double()
    model = trained(partnets.partition(model, PROPORTIONS))
    x = torch.randn(2, 1, 6, 6, dtype=torch.float64)
    for active in (1, 2, 3):
        with partnets.subnetwork(model, active):
            torch.testing.assert_close(partnets.merge(model, active)(x), model(x), rtol=1e-12, atol=1e-12)


def test_functional_call_replaces_rows():
    model = trained(partitioned())
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    zeros = {name: torch.zeros_like(rows) for name, rows in model.named_parameters(recurse=False)}
    assert not torch.func.functional_call(model, zeros, x).any()


@pytest.mark.full
def test_it_compiles_without_a_break():
    model = trained(partitioned())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    with partnets.subnetwork(model, 2, 2):
        torch.testing.assert_close(compiled(x), model(x))


class Biased(nn.Module):
    """A module with a table that is cached in evaluation, as in attention with relative positions."""

    def __init__(self, **options):
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, 4))
        self.layer = nn.Linear(4, 4)
        self.bias_cache = {}

    def reset_parameters(self):
        nn.init.constant_(self.table, 2.0)

    def train(self, mode=True):
        if mode and self.bias_cache:
            self.bias_cache = {}
        return super().train(mode)

    def biases(self):
        if self.training:
            return self.table * 2
        if "cpu" not in self.bias_cache:
            self.bias_cache["cpu"] = self.table * 2
        return self.bias_cache["cpu"]

    def forward(self, x):
        return self.layer(x) + self.biases()


def biased(**options):
    torch.manual_seed(0)
    return partnets.partition(Biased().double(), PROPORTIONS, **{"defaults": "seed"} | options)


def test_weights_of_any_module_have_a_partition():
    model = trained(biased())
    assert model.table.shape == (6, 4) and model.partitions["table"].sizes() == [12, 7, 5]
    before, mask = dict(model.named_parameters())["table"].detach().clone(), model.partitions["table"].mask(2)
    with partnets.subnetwork(model, 2, 2):
        model(torch.randn(6, 4, dtype=torch.float64)).square().sum().backward()
    partnets.optim.SGD(model, lr=0.1).step(update=2)
    assert torch.equal(model._parameters["table"] != before, mask)


def test_they_start_as_they_are_and_so_do_their_defaults():
    torch.manual_seed(0)
    before = Biased().double().table.detach()
    model = biased()
    trained(model)
    with partnets.subnetwork(model, 1):
        later = ~model.partitions["table"].mask(1)
        assert torch.equal(model.table[later], before[later]) and not torch.equal(model.table, before)


def test_seed_defaults_draw_them_without_a_copy():
    module = Biased()
    module.seed_defaults = functools.partial(partkernels.Normal, 0.02)
    model = partnets.partition(module, PROPORTIONS, defaults="seed")
    assert model.partitions["table"].defaults.std == 0.02 and model.table.abs().max() < 0.1


def test_each_subnetwork_has_a_cache_of_its_own():
    model, x = trained(biased()).eval(), torch.randn(6, 4, dtype=torch.float64)
    for active in (3, 1, 2, 1):
        with partnets.subnetwork(model, active):
            torch.testing.assert_close(partnets.merge(model, active)(x), model(x), rtol=1e-12, atol=1e-12)
    merged = partnets.merge(model, 1)
    assert type(merged.bias_cache) is dict and not merged.bias_cache
    trained(model.train())
    with partnets.subnetwork(model.eval(), 2):
        torch.testing.assert_close(partnets.merge(model, 2)(x), model(x), rtol=1e-12, atol=1e-12)


def test_retraining_and_resetting_call_the_class_itself():
    model = trained(biased())
    assert bool((partnets.finalize(model, "retrain").table == 2).all())
    stored = model.partitions["table"].defaults.values(model.table.shape, torch.float64, "cpu")
    model.reset_parameters()
    assert torch.equal(model._parameters["table"], stored)
    prelu = trained(partnets.partition(nn.Sequential(nn.PReLU(4)), PROPORTIONS))[0]
    prelu.reset_parameters()
    assert prelu._parameters["weight"].tolist() == [[0.25] * 4, [0.0] * 4, [0.0] * 4]


class Reader(nn.Module):
    """A module that reads weights of some children, and only the dtype of another, as some attention does."""

    def __init__(self):
        super().__init__()
        self.read, self.asked, self.nested = nn.Linear(4, 4), nn.Linear(4, 4), nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x):
        return self.projected(self.asked(x.to(self.asked.weight.dtype)))

    def projected(self, x):
        return F.linear(
            x, self.read.weight @ self.nested[0].weight, self.read.bias if self.read.bias is not None else None
        )

    def unused(self):
        return self.asked.weight


def test_layers_whose_parameters_their_parent_reads_give_those_of_the_live_subnetwork():
    module = Reader().double()
    assert read_by(module) == {module.read, module.nested[0]}
    model = trained(partnets.partition(nn.Sequential(module), PROPORTIONS))
    assert [layer.is_read for layer in (model[0].read, model[0].nested[0], model[0].asked)] == [True, True, False]
    x = torch.randn(2, 4, dtype=torch.float64)
    for active in (1, 2, 3):
        with partnets.subnetwork(model, active):
            torch.testing.assert_close(partnets.merge(model, active)(x), model(x), rtol=1e-12, atol=1e-12)


class Unseen(nn.Module):
    """A module that reads its children's weights through getattr, and computes with them."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x):
        for name in ("first", "second"):
            layer = getattr(self, name)
            x = F.linear(x, layer.weight / layer.weight.norm(dim=1, keepdim=True), layer.bias)
        return x * self.norm.weight + self.norm.bias + self.first(x)


class Folded(nn.Module):
    """A module that computes with its norm's parameters without calling the norm."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        return x * self.norm.weight + self.norm.bias


@pytest.mark.parametrize("make", [Unseen, Folded])
@pytest.mark.parametrize(("active", "update"), [(1, 1), (2, 1), (2, None), (3, 3)])
def test_whoever_reads_a_parameter_gets_that_of_the_live_subnetwork(make, active, update):
    model = trained(partnets.partition(make().double(), PROPORTIONS))
    x = torch.randn(2, 4 - (make is Folded), dtype=torch.float64)
    merged = partnets.merge(model, active)
    with partnets.subnetwork(model, active, update):
        output = model(x)
    torch.testing.assert_close(merged(x), output, rtol=1e-12, atol=1e-12)
    if update is None:
        assert not output.requires_grad
        return
    output.square().sum().backward()
    merged(x).square().sum().backward()
    for path, layer in partitioned_layers(model):
        for name, parameter in layer.named_parameters(recurse=False):
            theirs = merged.get_submodule(path).get_parameter(name).grad
            if name in layer.partitions:
                torch.testing.assert_close(parameter.grad, theirs * layer.partitions[name].mask(update))
            elif name in layer.shifts:
                torch.testing.assert_close(parameter.grad[update - 1], theirs)
                assert parameter.grad.count_nonzero() == theirs.count_nonzero()


def test_outside_of_a_subnetwork_attributes_are_the_parameters():
    layer = partnets.Linear(4, 3, proportions=PROPORTIONS)
    parameters = dict(layer.named_parameters())
    assert layer.weight is parameters["weight"] and layer.bias is parameters["bias"]
    with partnets.subnetwork(layer, 2):
        assert layer.weight is not parameters["weight"] and layer.bias.shape == (3,)
        with pytest.raises(RuntimeError, match="call it outside of"):
            layer.reset_parameters()
    layer.active, layer.update = 1, 1
    assert torch.equal(layer.weight, partnets.merge(layer, 1).weight)


class Padded(nn.Conv2d):
    def forward(self, x):
        return self._conv_forward(F.pad(x, (1, 0, 1, 0)), self.weight, self.bias)


class PartitionedPadded(partnets.Conv2d):
    ordinary = Padded
    forward = Padded.forward


@pytest.mark.parametrize("active", [None, 1, 3])
def test_a_subclass_calls_the_convolution_as_torchs_does(active):
    layer = trained(PartitionedPadded(2, 3, 2, proportions=PROPORTIONS))
    x = torch.randn(1, 2, 5, 5)
    with partnets.subnetwork(layer, active) if active else contextlib.nullcontext():
        torch.testing.assert_close(layer(x), partnets.merge(layer, active or 3)(x))


class ReadTable(nn.Module):
    """A model with tied head and embedding that also reads the embedding's table."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(self.table(ids)) + F.linear(self.table(ids), self.table.weight)


def test_tied_weights_stay_tied_where_one_layer_is_read():
    model = trained(partnets.partition(ReadTable().double(), PROPORTIONS, defaults="stored"))
    assert model.head._parameters["weight"] is model.table._parameters["weight"]
    ids = torch.arange(5)
    for active in (1, 2, 3):
        with partnets.subnetwork(model, active):
            torch.testing.assert_close(partnets.merge(model, active)(ids), model(ids), rtol=1e-12, atol=1e-12)


def test_weight_normalised_layers_are_divided():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))).double()
    model = trained(partnets.partition(model, PROPORTIONS))
    x = torch.randn(2, 4, dtype=torch.float64)
    for active in (1, 2, 3):
        with partnets.subnetwork(model, active):
            torch.testing.assert_close(partnets.merge(model, active)(x), model(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scheme", ["weight", "node"])
def test_no_subnetwork_gets_a_weight_that_torch_has_cached_of_another(scheme):
    layers = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 2)).double()
    model, x = trained(partnets.partition(layers, PROPORTIONS, scheme=scheme)), torch.randn(3, 4, dtype=torch.float64)

    def output(active):
        with partnets.subnetwork(model, active):
            return model(x)

    expected = [output(active) for active in (3, 1, 2)]
    with nn.utils.parametrize.cached():
        assert all(map(torch.equal, [output(active) for active in (3, 1, 2)], expected))


class Cropping(nn.Module):
    """A module that crops a longer table when it loads a state_dict."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, 4))

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        state_dict[f"{prefix}table"] = state_dict[f"{prefix}table"][:4]
        super()._load_from_state_dict(state_dict, prefix, *rest)


def test_what_a_class_makes_fit_loads_and_what_does_not_fit_raises():
    model = trained(partnets.partition(nn.Sequential(Cropping()), PROPORTIONS))
    table = torch.randn(6, 4)
    model.load_state_dict(model.state_dict() | {"0.table": table})
    assert torch.equal(model[0]._parameters["table"], table[:4])
    model = biased()
    with pytest.raises(RuntimeError, match=r"table: has the shape \[5, 4\]"):
        model.load_state_dict(model.state_dict() | {"table": torch.zeros(5, 4)})


def test_a_tied_weight_is_loaded_with_its_one_partition_or_not_at_all():
    models = [partnets.partition(ReadTable(), PROPORTIONS, defaults="stored", seed=seed) for seed in (0, 1)]
    state = {key: value for key, value in models[0].state_dict().items() if not key.startswith("head.")}
    before = models[1].table.partition
    with pytest.raises(RuntimeError, match=r"head\.partition: is missing, and table\.partition is there; the weight"):
        models[1].load_state_dict(state, strict=False)
    assert models[1].table.partition is before
    models[1].load_state_dict(models[0].state_dict())


class WithDicts(nn.Module):
    """A module with dicts named as caches that contain settings, a table and state."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))
        self.cache_options, self.index_cache, self.cache = {"scale": 3.0}, {4: torch.arange(3, -1, -1)}, {}

    def forward(self, x):
        if self.training:
            self.cache["mean"] = x.mean(0)
        return (x * self.gain * self.cache_options["scale"])[:, self.index_cache[4]] - self.cache.get("mean", 0)


def test_dicts_that_are_called_caches_stay_unless_their_class_empties_them():
    model, x = nn.Sequential(WithDicts()), torch.randn(3, 4)
    plain = copy.deepcopy(model)
    partnets.partition(model, (0.5, 0.5))
    for one in (model, plain):
        one.train()
        one(x)
        one.eval()
    torch.testing.assert_close(model(x), plain(x))
    torch.testing.assert_close(partnets.merge(model)(x), plain(x))


@pytest.mark.parametrize("layer", [nn.Linear(4, 3), nn.Conv2d(4, 3, 1), nn.LayerNorm(4), nn.BatchNorm1d(4)])
def test_a_bias_that_is_assigned_without_rows_is_refused(layer):
    x = torch.randn(2, 4, 1, 1) if isinstance(layer, nn.Conv2d) else torch.randn(2, 4)
    model = partnets.partition(nn.Sequential(layer), (0.5, 0.5))
    model[0].bias = nn.Parameter(torch.zeros(model[0].bias.shape[1:]))
    with pytest.raises(ValueError, match=r"of shape \[\d\] is in a layer of 2 partitions, which has a row for each"):
        model(x)


def test_what_is_written_into_a_computed_value_is_told():
    """Check in-place writes as in CLIP's training: `with torch.no_grad(): model.logit_scale.clamp_(0, 4.6)`."""
    model = partnets.partition(Embedded(), PROPORTIONS)
    for write in (lambda: model.gain.clamp_(max=0.5), lambda: nn.init.zeros_(model.position)):
        with torch.no_grad():
            write()
        told = pytest.raises(RuntimeError, match=r"(gain|position) of Embedded was written into, which is lost")
        with told, partnets.subnetwork(model, active=1):
            pass
    assert model.gain.item() == 1.0
    with torch.no_grad():
        dict(model.named_parameters())["gain"].fill_(0.5)
    assert model.gain.item() == 1.5
    copy.deepcopy(model)


class Gated(nn.Module):
    def __init__(self, kept):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.gates = kept([layer.bias for layer in self.layers])

    def forward(self, x):
        return self.layers[1](self.layers[0](x).relu())


KEPT = [
    list,
    tuple,
    lambda biases: dict(enumerate(biases)),
    lambda biases: {"gates": [tuple(biases)]},
    lambda biases: lambda x: x + biases[0],
    lambda biases: functools.partial(torch.add, biases[1]),
    lambda biases: types.SimpleNamespace(first=biases[0]),
]


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("scheme", ["weight", "nested"])
def test_parameters_of_children_that_are_kept_elsewhere_are_refused(scheme, kept):
    model = Gated(kept)
    before, x = list(model.parameters()), torch.ones(2, 4)
    with pytest.raises(ValueError, match=r"the model keeps layers\.\d\.bias in gates too"):
        partnets.partition(model, PROPORTIONS, **{"scheme": scheme} | ({"example": x} if scheme == "nested" else {}))
    assert all(one is other for one, other in zip(before, model.parameters(), strict=True))


def test_a_parameter_that_a_hook_on_its_layer_keeps_is_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4))
    weight = model[0].weight
    model[0].register_forward_hook(lambda layer, x, y: y + weight.mean())
    with pytest.raises(ValueError, match=r"0 keeps 0\.weight in _forward_hooks too"):
        partnets.partition(model, PROPORTIONS)
