"""partition: which modules it partitions, and which models it rejects unchanged. merge: the reverse conversion."""

import copy
import gc
import warnings
import weakref

import pytest
import torch
from layers import CASES, dense
from small_network import perturbed
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import partkernels
import partnets
from partnets import hyper
from partnets.subnetworks.state import num_partitions, partitioned_modules, state_of

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
    """Check that change() raises and leaves every module, parameter and buffer of the model unchanged."""
    modules, state = dict(model.named_modules()), copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=message):
        change()
    assert dict(model.named_modules()) == modules and model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def paths(model):
    """Return the paths of partitioned modules."""
    return {path for path, module in model.named_modules() if state_of(module) is not None}


def test_every_module_with_parameters_is_partitioned_and_keeps_its_class():
    model = nested()
    kinds = {path: type(module) for path, module in model.named_modules()}
    assert partnets.partition(model, PROPORTIONS) is model
    assert {path: type(module) for path, module in model.named_modules()} == kinds
    assert paths(model) == {"1.body.0", "1.shortcut.projection", "4", "5"} and num_partitions(model) == 3
    assert partnets.partitions(model)["1.body.0.weight"].sizes() == [65, 8, 8]
    assert model(torch.zeros(2, 3, 5, 5)).shape == (2, 2)


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
        return [layer.weight_partition for layer in model] + [layer.weight for layer in model]

    first, again, other = maps(0), maps(0), maps(1)
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0], first[1]) and not torch.equal(first[2], first[3])
    assert not any(map(torch.equal, first, other))


def test_a_second_model_with_a_partitioned_layer_is_refused_unchanged():
    shared = nn.Linear(4, 4)
    one, two = nn.Sequential(shared, nn.Linear(4, 2)), nn.Sequential(shared, nn.Linear(4, 3))
    partnets.partition(one, (0.5, 0.5))
    with pytest.raises(ValueError, match=r"1 Linear \(0\) that is partitioned already"):
        partnets.partition(two, (0.5, 0.5))
    assert one[0] is two[0] is shared and partitioned_modules(two) == [shared]
    partnets.partition(two, (0.5, 0.5), skip=[shared])
    x, before = torch.randn(5, 4), partnets.merge(one, 2)
    optimizer, data = partnets.optim.SGD(two, lr=0.1), (x, torch.arange(5) % 3)
    partnets.step_weights(two, optimizer, 1, data, lambda batch: nn.functional.cross_entropy(two(batch[0]), batch[1]))
    with partnets.subnetwork(one, 2):
        assert not torch.equal(one[0](x), before[0](x))


@pytest.mark.parametrize("skip", [["1"], ["1.body", "1.shortcut"], "1", lambda model: [model[1]]])
def test_skipped_subtrees_are_not_partitioned(skip):
    model = nested()
    partnets.partition(model, torch.tensor(PROPORTIONS), skip=skip(model) if callable(skip) else skip)
    assert paths(model) == {"4", "5"}


class Centred(nn.Module):
    """A module with running statistics and no rule."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))
        self.register_buffer("running_mean", torch.zeros(4))


def test_each_type_that_cannot_be_partitioned_is_named_once_with_its_count_and_cure():
    model = nn.Sequential(
        nn.Linear(4, 4),
        nn.ModuleDict({"norm": Centred()}),
        nn.InstanceNorm1d(4),
        nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
        Centred(),
    )
    unchanged(
        model,
        lambda: partnets.partition(model, PROPORTIONS),
        r"as it is:\n  2 Centred \(1\.norm, \.\.\.\) whose running statistics .*; .*partnets\.register .*\.\n"
        r"  1 _SpectralNorm \(3\.parametrizations\.weight\.0\) whose power iteration .*; remove .*\.\n"
        r"Or leave them out, with skip=partnets\.without_rule\(model\)",
    )


class Kept(nn.Module):
    def __init__(self, **parameters):
        super().__init__()
        for name, value in parameters.items():
            setattr(self, name, nn.Parameter(value, requires_grad=value.is_floating_point()))

    def forward(self, x):
        return x * self.weight.sum() + self.bias


class Twice(Kept):
    """A module with one parameter under two names."""

    def __init__(self):
        super().__init__(weight=torch.randn(3, 3), bias=torch.ones(3))
        self.again = self.weight

    def forward(self, x):
        return x @ self.weight @ self.again + self.bias


class Shared(nn.Sequential):
    """Two layers with one weight."""

    def __init__(self):
        super().__init__(nn.Linear(3, 3), nn.Linear(3, 3))
        self[1].weight = self[0].weight


class Positioned(nn.Module):
    def __init__(self):
        super().__init__()
        self.position, self.layer = nn.Parameter(torch.randn(1, 3)), nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(x + self.position)


@pytest.mark.parametrize(
    "make",
    [
        Twice, lambda: nn.SyncBatchNorm(3),
        lambda: Kept(weight=torch.randn(2, 2), bias=torch.ones(3), active=torch.ones(3), update=torch.ones(3)),
        lambda: Kept(weight=torch.randn(2, 2), bias=torch.ones(3), codes=torch.ones(9, 1, dtype=torch.uint8)),
    ],
)  # fmt: skip
def test_modules_of_any_kind_are_partitioned(make):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), make()).double().eval()
    perturbed(partnets.partition(model, PROPORTIONS, defaults="seed"), 0.1)
    x = torch.randn(5, 3, dtype=torch.float64)
    for k in (1, 2, 3):
        with partnets.subnetwork(model, k, k):
            y = model(x)
            y.sum().backward()
        for one in (partnets.merge(model, k), dense(model, k)):
            torch.testing.assert_close(one(x), y, rtol=1e-12, atol=1e-12)
    partnets.optim.SGD(model, lr=0.1)


def test_skipping_modules_without_a_rule_partitions_the_rest():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), Centred(), nn.Flatten(), nn.Linear(16, 3))
    obstacles = partnets.without_rule(model)
    assert list(obstacles) == ["1"] and "a Centred whose running statistics" in obstacles["1"]
    partnets.partition(model, (0.5, 0.5), skip=obstacles)
    assert paths(model) == {"0", "3"}
    assert partnets.without_rule(model, skip=obstacles).keys() == {"0", "3"}, "layers 0 and 3 are already partitioned"


def tied(change):
    """Return a function that makes a table and a head, changed."""

    def make():
        model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False))
        change(model)
        return model

    return make


def taken(name):
    def make():
        model = nn.Sequential(nn.Linear(3, 3), Kept(shift=torch.zeros(3)))
        model[1].register_buffer(name, torch.zeros(()))
        return model

    return make


def shares_memory(model):
    model[1].weight.data = model[0].weight.data


def overlaps(model):
    model[1].weight = nn.Parameter(model[0].weight.t()[:, :4].t())


def tables(**options):
    """Return rows of the table below, for options by which torch changes whole rows."""
    message = f"with {next(iter(options))}, which change the table or its gradient"
    return [(lambda make=make: make(3, 4, **options), {}, message) for make in (nn.Embedding, nn.EmbeddingBag)]


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (nested, {"proportions": (0.5, 0.6)}, "pass"),
        (nested, {"proportions": [1 / 300] * 300}, "pass"),
        (nested, {"seed": -1}, "seed=-1"),
        (nested, {"defaults": "none"}, "defaults='none'; pass"),
        (nested, {"defaults": partkernels.Stored(torch.zeros(1, 2))}, "defaults"),
        (nested, {"scheme": "layer"}, "scheme='layer'; pass"),
        *[(nested, {"skip": skip}, "not in this model") for skip in (["6"], ["1.bod"], [nn.Linear(2, 2)], [3])],
        (nn.ReLU, {}, "this ReLU has no parameter to partition"),
        (lambda: nn.Linear(3, 3).requires_grad_(False), {}, "pass frozen=True"),
        (lambda: nn.Linear(4, 4, dtype=torch.complex64), {}, "Linear .* with a weight that is not of real numbers"),
        (lambda: torch.fx.symbolic_trace(Positioned()), {}, r"torch\.fx has made, .* take the model that it was made"),
        (lambda: nn.Linear(8, 0), {"scheme": "node"}, r"a weight of shape \(0, 8\), without entries; leave it out"),
        (tied(shares_memory), {}, r"0\.weight and 1\.weight are two parameters that share memory"),
        (tied(overlaps), {}, "share memory"),
        (lambda: Shared(), {"skip": "0"}, "0.weight is a parameter of a skipped module too"),
        (taken("shift_rows"), {}, "1 Kept .* with an attribute shift_rows, which partnets needs; rename it"),
        (taken("shift_partition"), {}, "with an attribute shift_partition"),
        (taken("learned_from"), {}, "with an attribute learned_from"),
        (lambda: weight_norm(nn.Linear(4, 5)), {"scheme": "node", "defaults": "zero"}, "a weight that is not finite"),
        (lambda: nn.utils.spectral_norm(nn.Linear(4, 4)), {}, "whose power iteration would carry data between chunks"),
        *tables(max_norm=1.0), *tables(scale_grad_by_freq=True), *tables(sparse=True),
    ],
)  # fmt: skip
def test_models_that_cannot_be_partitioned_raise_and_stay_unchanged(make, options, message):
    model = make()
    unchanged(model, lambda: partnets.partition(model, **{"proportions": PROPORTIONS} | options), message)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: partnets.partition(nn.Linear, PROPORTIONS),
            TypeError,
            r"the model is <class .*Linear'>; pass a module",
        ),
        (
            lambda: partnets.register(nn.Linear(2, 2), partnets.Rule()),
            TypeError,
            r"pass a subclass of torch\.nn\.Module",
        ),
        (lambda: partnets.register(nn.Linear, print), TypeError, r"pass a partnets\.Rule"),
        (lambda: partnets.merge(nn.Linear(3, 2)), ValueError, "no partitions"),
        (lambda: partnets.merge(partnets.partition(nested(), PROPORTIONS), 0), ValueError, "pass an int from 1"),
        (lambda: partnets.merge(partnets.partition(nested(), PROPORTIONS), 4), ValueError, "pass an int from 1"),
    ],
)
def test_wrong_calls_raise(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.fixture
def rules(monkeypatch):
    monkeypatch.setattr("partnets.subnetworks.rules.RULES", dict(partnets.subnetworks.rules.RULES))


class Gain(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.full((3,), 2.0))
        self.register_buffer("running_mean", torch.zeros(3))

    def forward(self, x):
        if self.training:
            self.running_mean.lerp_(x.detach().mean(0), 0.5)
        return (x - self.running_mean) * self.gain


@pytest.mark.parametrize("make", [Gain, type("Subclass", (Gain,), {})])
def test_a_registered_rule_is_that_of_the_type_and_its_subclasses(make, rules):
    rule = partnets.Rule(scales=("gain",), statistics=("running_mean",))
    assert partnets.without_rule(nn.Sequential(make()))
    partnets.register(Gain, rule)
    model = partnets.partition(nn.Sequential(make()), PROPORTIONS)
    with torch.no_grad():
        model[0].gain_rows[1:] = torch.tensor([[3.0], [5.0]])
    for k, gain in ((1, 2.0), (2, 6.0), (3, 30.0)):
        with partnets.subnetwork(model, k, k):
            assert model[0].gain.tolist() == [gain] * 3
            model(torch.full((2, 3), float(k)))
    means = [*model[0].running_mean_rows[:2, 0], model[0].running_mean[0]]
    assert [mean.item() for mean in means] == [0.5, 1.0, 1.5]


def test_a_constant_weight_of_a_registered_rule_stays(rules):
    """A single number as a weight belongs to partition 1, the largest."""
    partnets.register(Gain, partnets.Rule(weights=("gain",), statistics=("running_mean",)))
    model = Gain()
    model.gain = nn.Parameter(torch.ones(1))
    partnets.partition(model, PROPORTIONS)
    assert model.gain.tolist() == [1.0] and partnets.partitions(model)["gain"].sizes() == [1, 0, 0]


def changed(layer):
    """Change a weight to values that torch's initialisation would not draw, as training does."""
    nn.init.normal_(layer.weight, std=0.3)
    return layer


def test_redrawing_possibly_pretrained_weights_warns():
    model = nn.Sequential(nn.Linear(40, 30), nn.ReLU(), changed(nn.Linear(30, 20)), nn.LSTM(20, 10))
    before = copy.deepcopy(model.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=r"the weights of 2 again, .* pass defaults='stored', which keeps them"):
            partnets.partition(model, (0.5, 0.5))
    assert not partitioned_modules(model) and all(map(torch.equal, model.state_dict().values(), before.values()))
    with pytest.warns(UserWarning, match="the weights of the model itself again"):
        partnets.partition(nn.Linear(30, 20).requires_grad_(False), (0.5, 0.5), frozen=True)
    partnets.partition(model, (0.5, 0.5), defaults="seed")  # without a warning, as it was asked for


@pytest.mark.parametrize("name", CASES)
def test_fresh_layers_are_redrawn_without_a_warning(name):
    torch.manual_seed(0)
    for _ in range(3):
        partnets.partition(nn.Sequential(CASES[name].make()), (0.5, 0.5))


def test_tied_weights_and_padding_rows_do_not_count_as_trained():
    table, head = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False)
    head.weight = table.weight
    partnets.partition(nn.Sequential(table, head), (0.5, 0.5))
    for make in (nn.Embedding, nn.EmbeddingBag):
        padded = partnets.partition(make(3, 768, padding_idx=0), (0.5, 0.5))
        assert partnets.partitions(padded)["weight"].defaults.std == 1.0


class LowRank(nn.Module):
    """A frozen layer with a trainable low-rank branch."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("defaults", [None, "seed", "stored"])
def test_frozen_parameters_stay_unchanged_in_every_subnetwork(defaults):
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 9)).requires_grad_(
        False
    )
    tuned = nn.Linear(7, 5)
    tuned.weight.requires_grad_(False)
    model = nn.Sequential(backbone.eval(), LowRank(changed(nn.Linear(9, 7))), tuned, nn.Linear(5, 3))
    x = torch.randn(2, 1, 6, 6)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    features = backbone(x)
    partnets.partition(model, PROPORTIONS, defaults=defaults)
    assert paths(model) == {"1.down", "1.up", "2", "3"} and list(partnets.partitions(model[2])) == []
    for k in (1, 2, 3):
        with partnets.subnetwork(model, k):
            assert torch.equal(model[0](x), features)
            assert torch.equal(model[1].base.weight, before["1.base.weight"])
            assert torch.equal(model[2].weight, before["2.weight"])
    assert tuned.weight is model[2].weight
    optimizer = partnets.optim.Adam(model)
    for k in (1, 2, 3):
        partnets.step_weights(model, optimizer, k, x, lambda x: model(x).square().mean())
    dense = partnets.merge(model).state_dict()
    assert all(torch.equal(dense[name], before[name]) for name in before if name.startswith(("0.", "1.base")))
    assert torch.equal(dense["2.weight"], before["2.weight"])
    assert not torch.equal(dense["2.bias"], before["2.bias"])


def test_a_frozen_layer_without_a_rule_is_no_obstacle():
    model = nn.Sequential(Centred().requires_grad_(False), nn.BatchNorm1d(4).requires_grad_(False), nn.Linear(4, 3))
    assert partnets.without_rule(model) == {}
    assert list(partnets.without_rule(model, frozen=True)) == ["0"]
    partnets.partition(model, (0.5, 0.5))
    assert paths(model) == {"2"}


def constrains(layer):
    layer.weight.data = torch.renorm(layer.weight.data, 2, 0, 1.0)  # the norms of filters, such as in EEGNet


@pytest.mark.parametrize(
    ("write", "written"),
    [
        (constrains, "weight of Linear"),
        (lambda layer: layer.weight.clamp_(0), "weight of Linear"),
        (lambda layer: layer.bias.sub_(1), "bias of Linear"),
        (lambda layer: layer.gain.sub_(1), "gain of Linear"),
    ],
    ids=["constrained", "clamped", "updated", "updated in another parameter"],
)
def test_a_forward_that_writes_its_parameters_in_place_is_refused(write, written):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].gain = nn.Parameter(torch.ones(4))
    partnets.partition(model, PROPORTIONS, defaults="zero")

    @torch.no_grad()
    def before_forward(layer, _):
        write(layer)

    model[0].register_forward_pre_hook(before_forward)
    before = copy.deepcopy(model.state_dict())
    with (
        pytest.raises(RuntimeError, match=f"{written} was written into inside of partnets.subnetwork"),
        partnets.subnetwork(model, 2),
    ):
        model(torch.randn(2, 4))
    mask = partnets.partitions(model)["0.weight"].mask(3)  # entries of inactive partitions are unchanged
    assert torch.equal(model[0].weight[mask], before["0.weight"][mask])


@pytest.mark.parametrize("step", ["partition", "merge", "deploy", "retrain", "train"])
@pytest.mark.parametrize("scheme", ["weight", "nested"])
def test_models_are_freed_without_a_garbage_collection(step, scheme):
    def dropped():
        network = nn.Sequential(hyper.Dropout(0.1), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
        gone = [weakref.ref(parameter) for parameter in network.parameters()]
        example = {"example": torch.zeros(2, 6)} if scheme == "nested" else {}
        model = partnets.partition(network, (0.6, 0.2, 0.2), scheme=scheme, defaults="zero", **example)
        if step == "merge":
            partnets.merge(model)
        elif step in ("deploy", "retrain"):
            partnets.finalize(model, step)
        elif step == "train":
            data = torch.randn(30, 6), torch.randint(2, (30,))
            trainer = partnets.Trainer(model, partnets.chunk(data, (0.6, 0.2, 0.2)), hyper=[], batch_size=4)
            trainer.fit(2)
        return gone + [weakref.ref(parameter) for parameter in model.parameters()]

    dropped()  # the first call fills caches of partnets and torch
    gc.collect()
    gc.disable()
    try:
        assert [one() for one in dropped() if one() is not None] == []
    finally:
        gc.enable()
