"""finalize returns a dense model with the learned hyperparameters: trained, for further training, or reinitialised."""

import copy
import functools
import math
import random

import pytest
import torch
from small_network import perturbed
from torch import nn

import partkernels
import partnets
from partnets import hyper
from partnets.subnetworks.parameters import partitioned_parameters
from partnets.subnetworks.state import partitioned_modules

PROPORTIONS = (0.6, 0.3, 0.1)
MODES = ("finetune", "retrain")


def images():
    generator = torch.Generator().manual_seed(0)
    return torch.rand(60, 1, 6, 6, generator=generator), torch.randint(3, (60,), generator=generator)


def network():
    layers = nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 40), nn.LayerNorm(40)
    return nn.Sequential(*layers, nn.Linear(40, 3))


def trained(make=network, defaults="seed", steps=6):
    """Return a model after some steps of all parameters, including ψ."""
    torch.manual_seed(0)
    model = hyper.Averaged(hyper.Affine(rotation=20.0), make(), samples=2)
    partnets.partition(model, PROPORTIONS, defaults=defaults)
    rate = torch.optim.SGD(model.augmentation.parameters(), lr=1.0)
    chunks = partnets.chunk(images(), PROPORTIONS)
    optimizer = partnets.optim.Adam(model, lr=0.05)
    options = {"hyper": model.augmentation, "hyper_optimizer": rate, "optimizer": optimizer, "batch_size": 8}
    partnets.Trainer(model, chunks, **options).fit(steps)
    return model


def same(first, second):
    first, second = ({**dict(m.named_parameters()), **dict(m.named_buffers())} for m in (first, second))
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
def test_the_model_is_dense_has_the_found_hyperparameters_and_shares_nothing(mode):
    model = trained()
    before = copy.deepcopy(model)
    dense = partnets.finalize(model, mode)
    assert not partitioned_modules(dense)
    assert dense.augmentation.values() == model.augmentation.values() != hyper.Affine(rotation=20.0).values()
    assert not any(parameter.requires_grad for parameter in dense.augmentation.parameters())
    assert all(parameter.requires_grad for parameter in dense.network.parameters())
    for parameter in dense.parameters():
        nn.init.zeros_(parameter)
    assert same(model, before) and all(p.requires_grad for p in model.parameters())


class Language(nn.Module):
    """A model with tied head and embedding and a custom initialisation."""

    def __init__(self):
        super().__init__()
        self.embedding, self.hidden, self.norm = nn.Embedding(50, 48), nn.Linear(48, 48), nn.LayerNorm(48)
        self.head = nn.Linear(48, 50)
        self.head.weight = self.embedding.weight
        for layer in (self.embedding, self.hidden):
            nn.init.normal_(layer.weight, std=0.02)
        nn.init.zeros_(self.hidden.bias)
        nn.init.constant_(self.head.bias, -4.6)
        nn.init.zeros_(self.norm.weight)

    def forward(self, ids):
        return self.head(self.norm(torch.relu(self.hidden(self.embedding(ids)))))


@pytest.mark.parametrize(
    ("scheme", "defaults"), [("weight", "seed"), ("weight", "zero"), ("node", "seed"), ("nested", None)]
)
def test_weights_stay_tied_and_start_as_their_author_draws_them(scheme, defaults):
    ids = torch.randint(50, (4, 7))
    example = {"example": ids} if scheme == "nested" else {}
    model = partnets.partition(Language(), PROPORTIONS, scheme=scheme, defaults=defaults, **example)
    with torch.no_grad():
        for one in partitioned_parameters(model):
            one.stored.add_(0.1)
            one.combine()
    for mode in MODES:
        new = partnets.finalize(copy.deepcopy(model), mode)
        assert new.head.weight is new.embedding.weight, mode
    for layer in (new.embedding, new.hidden):
        weight = layer.weight.detach()
        assert weight.std().item() == pytest.approx(0.02, rel=0.1) and abs(weight.mean()) < 0.005
    assert not new.hidden.bias.any() and not new.norm.weight.any() and not new.norm.bias.any()
    assert torch.equal(new.head.bias, torch.full((50,), -4.6))


def forgetting():
    layer = nn.LSTM(8, 12)
    for name in ("bias_ih_l0", "bias_hh_l0"):
        nn.init.zeros_(getattr(layer, name))
    layer.bias_ih_l0.data[12:24] = 1
    return layer


def one_logit():
    layer = nn.Linear(8, 1)
    nn.init.constant_(layer.bias, -4.6)
    return layer


def identity():
    layer = nn.Linear(8, 8)
    nn.init.eye_(layer.weight)
    return layer


def small_biases():
    layer = nn.Linear(32, 400)
    nn.init.normal_(layer.bias, std=1e-6)
    return layer


@pytest.mark.parametrize("make", [forgetting, one_logit, identity, small_biases])
@pytest.mark.parametrize("defaults", ["zero", "seed"])
@pytest.mark.filterwarnings("ignore:partition draws the weights")
def test_fresh_layers_have_the_distribution_of_their_initialization(make, defaults):
    torch.manual_seed(0)
    model = nn.ModuleList([make()])
    start = copy.deepcopy(model)
    perturbed(partnets.partition(model, PROPORTIONS, defaults=defaults), 1.0)
    fresh = partnets.finalize(model, "retrain", seed=1)
    for (name, one), (_, other) in zip(fresh.named_parameters(), start.named_parameters(), strict=True):
        if len(other.unique()) <= 4:
            assert torch.equal(one, other), name
        else:
            share = (one.std() / other.std()).item()
            assert not torch.equal(one, other) and abs(share - 1) < 4 / other.numel() ** 0.5, name


def test_a_fresh_network_depends_on_the_seed_and_not_on_learned_weights():
    few, many = trained(steps=2), trained(steps=6)
    many.augmentation.load_state_dict(few.augmentation.state_dict())
    assert same(partnets.finalize(few, "retrain", seed=4), partnets.finalize(many, "retrain", seed=4))
    first, other = (partnets.finalize(few, "retrain", seed=seed).network for seed in (4, 5))
    assert not any(torch.equal(first[i].weight, other[i].weight) for i in (0, 4, 6))


@pytest.mark.full
def test_drawing_a_fresh_network_leaves_all_random_states():
    model = trained()
    before = torch.get_rng_state(), random.getstate()
    partnets.finalize(model, "retrain")
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]


@pytest.mark.full
@pytest.mark.parametrize("defaults", ["seed", "zero"])
def test_a_fresh_layer_starts_as_torchs(defaults):
    fresh = partnets.finalize(trained(defaults=defaults), "retrain", seed=1).network
    assert same(fresh[1], nn.GroupNorm(2, 8)) and same(fresh[5], nn.LayerNorm(40))
    for i, fan_in in ((0, 9), (4, 128), (6, 40)):
        check_uniform(fresh[i].weight, 1 / math.sqrt(fan_in))
        assert fresh[i].bias.abs().max() <= 1 / math.sqrt(fan_in) and len(fresh[i].bias.unique()) > 1


def check_uniform(values, bound):
    assert values.abs().max() <= 1.01 * bound  # defaults are rounded to bfloat16
    assert values.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.2)
    assert values.mean().abs() < 4 * bound / math.sqrt(3 * values.numel())


@pytest.mark.parametrize("proportions", [PROPORTIONS, (1.0,)])
@pytest.mark.parametrize("defaults", [partkernels.Normal(0.3, seed=5), partkernels.Uniform(0.5, seed=5)])
def test_a_weight_with_given_defaults_is_drawn_from_their_distribution_by_another_seed(defaults, proportions):
    layer = partnets.Linear(40, 50, proportions=proportions, defaults=defaults)
    fresh = partnets.finalize(layer, "retrain")
    given = defaults.values((50, 40))
    assert not torch.equal(fresh.weight, given)
    assert fresh.weight.std().item() == pytest.approx(given.std().item(), rel=0.1)
    found, expected = (weight.detach().abs().quantile(0.99).item() for weight in (fresh.weight, given))
    assert found == pytest.approx(expected, rel=0.1)
    assert fresh.bias.abs().max() <= 1 / math.sqrt(40) and fresh.bias.any()


def ensemble():
    mask = hyper.InputMask(4)

    def one():
        return nn.Sequential(mask, nn.Linear(4, 5), nn.BatchNorm1d(5), nn.BatchNorm1d(5, affine=False), nn.Linear(5, 2))

    torch.manual_seed(0)
    return mask, partnets.Ensemble([one(), one()])


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
def test_finalizing_an_ensemble_uses_its_last_network(mode):
    mask, model = ensemble()
    x = torch.randn(40, 4)
    chunks = partnets.chunk((x, (x[:, 0] > 0).long()), (0.5, 0.5))
    partnets.Trainer(model, chunks, hyper=mask, batch_size=8).fit(5)
    dense = partnets.finalize(model, mode)
    assert type(dense) is nn.Sequential and same(dense[0], mask)
    if mode == "retrain":
        for i in (2, 3):
            assert same(dense[i], nn.BatchNorm1d(5, affine=i == 2))
        assert not torch.equal(dense[1].weight, model.networks[1][1].weight)
    else:
        assert same(dense, model.networks[1])


class Token(nn.Module):
    """A layer without reset_parameters()."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x + self.token


def test_modules_without_initial_values_are_all_named_and_nothing_changes():
    model = nn.ModuleDict(
        {
            "networks": partnets.Ensemble([nn.Sequential(Token(), nn.Linear(4, 2), Token()) for _ in range(2)]),
            "stored": partnets.Linear(4, 2, proportions=(0.5, 0.5), defaults="stored"),
            "norm": nn.LayerNorm(2),
        }
    )
    before = copy.deepcopy(model)
    with pytest.raises(ValueError, match="cannot start again") as raised:
        partnets.finalize(model, "retrain")
    message = str(raised.value)
    assert "  norm: a LayerNorm that trains without being partitioned" in message
    for i in (0, 2):
        assert f".{i}: its token have no initial values; give Token a reset_parameters()" in message
    assert "  stored: its defaults are stored" in message
    assert same(model, before)


def test_a_layer_that_says_how_it_starts_needs_no_reset():
    class Stretch(nn.Module):
        seed_defaults = functools.partial(partkernels.Normal, 0.5)

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.full((30, 30), 7.0))

    fresh = partnets.finalize(partnets.Ensemble([Stretch()]), "retrain")
    assert fresh.weight.std().item() == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("fine-tune",), ValueError, "mode='fine-tune'; pass one of 'finetune', 'retrain', 'deploy'"),
        ((None,), ValueError, "mode=None"),
        (("retrain", -1), ValueError, "seed=-1"),
        (("retrain", 0.5), TypeError, "seed=0.5"),
        (("finetune", 0, 2), ValueError, "draws=2 with mode='finetune'"),
        (("finetune",), ValueError, "has no partitions"),
        (("retrain",), ValueError, "has no partitions"),
    ],
)
def test_wrong_arguments_raise(arguments, error, message):
    with pytest.raises(error, match=message):
        partnets.finalize(nn.Linear(4, 2), **dict(zip(("mode", "seed", "draws"), arguments, strict=False)))


class LowRank(nn.Linear):
    """A frozen layer with trainable low-rank weights in one module, which resets these weights if `resets`."""

    def __init__(self, *sizes, resets=True):
        super().__init__(*sizes)
        self.requires_grad_(False)
        self.resets = resets
        self.down, self.up = nn.Parameter(torch.randn(sizes[0], 2)), nn.Parameter(torch.randn(2, sizes[1]))

    def reset_parameters(self):
        super().reset_parameters()
        if hasattr(self, "resets") and self.resets:
            nn.init.normal_(self.down, std=0.1)
            nn.init.zeros_(self.up)

    def forward(self, x):
        return super().forward(x) + x @ self.down @ self.up


def test_a_frozen_base_in_a_custom_module_keeps_its_values():
    model = partnets.partition(nn.Sequential(LowRank(6, 5), nn.Linear(5, 3)), PROPORTIONS)
    base = model[0].weight.clone()
    fresh = partnets.finalize(model, "retrain", seed=1)
    assert torch.equal(fresh[0].weight, base) and not fresh[0].weight.requires_grad
    assert not fresh[0].up.any() and fresh[0].down.std() < 0.5
    model = partnets.partition(nn.Sequential(LowRank(6, 5, resets=False)), PROPORTIONS)
    with pytest.raises(ValueError, match=r"its reset_parameters\(\) leaves down as it is, which has learned"):
        partnets.finalize(model, "retrain")


class Tuned(nn.Module):
    """A layer in front of a frozen base, whose reset_parameters() resets all of it."""

    def __init__(self):
        super().__init__()
        self.shift, self.base = nn.Parameter(torch.zeros(1, 4)), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        nn.init.ones_(self.base[1].running_mean)
        self.base.requires_grad_(False).eval()

    def reset_parameters(self):
        for one in self.base:
            one.reset_parameters()


@pytest.mark.parametrize("mode", MODES)
def test_frozen_parameters_keep_their_values(mode):
    model = partnets.partition(nn.Sequential(Tuned(), nn.Linear(4, 3)), PROPORTIONS)
    model[1].bias.requires_grad_(False)
    dense = partnets.finalize(model, mode)
    assert same(dense[0].base, model[0].base) and not any(p.requires_grad for p in dense[0].base.parameters())
    torch.testing.assert_close(dense[1].bias, model[1].bias)
    assert not dense[1].bias.requires_grad


def test_a_norm_that_was_frozen_later_keeps_its_statistics():
    model = partnets.partition(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), PROPORTIONS)
    with partnets.subnetwork(model, 3, 3):
        model(torch.randn(8, 4))
    model[1].requires_grad_(False).eval()
    with pytest.warns(UserWarning, match="older than the weights"):
        expected = partnets.merge(model)[1]
    assert same(partnets.finalize(model, "retrain")[1], expected)


def test_layers_that_say_how_they_start_keep_scales_of_1_and_padding_of_0():
    model = nn.Sequential(nn.Embedding(5, 4, padding_idx=1), nn.LayerNorm(4))
    for layer in model:
        layer.seed_defaults = functools.partial(partkernels.Normal, 0.02)
    fresh = partnets.finalize(partnets.partition(model, PROPORTIONS), "retrain")
    assert torch.equal(fresh[1].weight, torch.ones(4)) and not fresh[1].bias.any()
    assert not fresh[0].weight[1].any() and fresh[0].weight[0].any()
