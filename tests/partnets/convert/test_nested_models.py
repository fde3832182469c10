"""scheme='nested': subnetwork k is a narrower network, the first channels of each layer."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import warnings
from collections import deque
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from layers import mask_of, spoil
from torch import nn

import partkernels
import partnets
from partbench import models
from partnets.subnetworks.channels import widths
from partnets.subnetworks.parameters import partitioned_parameters
from partnets.subnetworks.state import ROWS, partitioned_modules, state_of
from partnets.subnetworks.switch import noted

PROPORTIONS = (0.6, 0.2, 0.2)


class Residual(nn.Module):
    """Convolutions with a shortcut, groups, several norms, a concatenation and a scale parameter of the module."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.norm1 = nn.GroupNorm(4, 16)
        self.conv1 = nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(16)
        self.by_depth = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.scale = nn.Parameter(torch.full((16, 1, 1), 0.5))
        self.branch = nn.Conv2d(16, 8, 1)
        self.up = nn.ConvTranspose2d(24, 10, 2, stride=2)
        self.last = nn.Linear(10, 3)

    def forward(self, x):
        x = F.relu(self.norm1(self.stem(x)))
        x = x + self.scale * self.by_depth(F.silu(self.norm2(self.conv1(x))))
        x = torch.cat([x, torch.tanh(self.branch(x))], 1)
        return self.last(self.up(x).mean((2, 3)))


class OwnNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight, self.normalized_shape = nn.Parameter(torch.ones(width)), (width,)

    def forward(self, x):
        return F.rms_norm(x, self.normalized_shape, self.weight, 1e-5)


class Attending(nn.Module):
    """A transformer with custom position embeddings, class token and norms."""

    def __init__(self, width=24, heads=3):
        super().__init__()
        self.embed = nn.Linear(5, width)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 5, width))
        self.norm, self.heads = OwnNorm(width), heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.gates, self.hidden, self.contract = (nn.Linear(width, 40), nn.Linear(width, 40), nn.Linear(40, width))
        self.last = nn.Linear(width, 4)

    def forward(self, x):
        x = torch.cat([self.token.expand(len(x), 1, -1), self.embed(x)], 1) + self.positions
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        y = self.norm2(x)
        x = x + self.contract(F.silu(self.gates(y)) * self.hidden(y))
        return self.last(x[:, 0])


def encoder():
    layer = nn.TransformerEncoderLayer(24, 3, 40, batch_first=True, dropout=0.0)
    return nn.Sequential(
        nn.Linear(5, 24), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(24, 2)
    )


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.hidden = nn.Embedding(9, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(torch.relu(self.hidden(self.embedding(ids))))


def images(n=4):
    return torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(1))


MODELS = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(5, 20), nn.ReLU(), nn.Linear(20, 10), nn.Tanh(), nn.Linear(10, 3)),
        torch.randn(4, 5),
    ),
    "flattened": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 3)), images()),
    "residual": (Residual, images()),
    "attending": (Attending, torch.randn(4, 4, 5)),
    "encoder": (encoder, torch.randn(4, 6, 5)),
    "tied": (Tied, torch.arange(8).view(2, 4)),
    "resnet8": (lambda: models.FixupResNet(8), images()),
    "wide resnet": (lambda: models.WideResNet(8, 1), images()),
    "vit": (lambda: models.ViT(8, 4, 24, 2, 3), images()),
}  # fmt: skip


def made(name, **options):
    make, x = MODELS[name]
    torch.manual_seed(0)
    model = make().double()
    x = x.double() if x.is_floating_point() else x
    partnets.partition(model, PROPORTIONS, scheme="nested", example=x, **options)
    stir(model)
    return model, x


@torch.no_grad()
def stir(model, scale=0.3):
    """Draw all values of all partitions; some are 0 initially."""
    for one in partitioned_parameters(model):
        nn.init.normal_(one.stored, std=scale)
        one.combine()
    noted(partitioned_parameters(model))


def width(module, k, side="outputs"):
    """Return the number of a module's channels in subnetwork k; None if it has all in each."""
    owners = getattr(state_of(module).narrow, side, None)
    return None if owners is None else int((owners <= k).sum())


def channels(module, side="outputs"):
    return tuple(width(module, k, side) for k in (1, 2, 3))


def is_narrow(module):
    return state_of(module).narrow is not None


def nested_if_it_can(model, x, proportions=PROPORTIONS):
    """Partition a model, at random if it has no channels that can be divided."""
    try:
        return partnets.partition(model, proportions, scheme="nested", example=x)
    except ValueError as error:
        assert "no channels of this" in str(error)
        return partnets.partition(model, proportions, defaults="zero")


def check_merged(model, x):
    for k in (1, 2, 3):
        merged = partnets.merge(model, k)
        with torch.no_grad(), partnets.subnetwork(model, k):
            expected = model(x)
        torch.testing.assert_close(merged(x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.cases(usual=2)
@pytest.mark.parametrize("name", MODELS)
def test_later_partitions_are_not_read_and_nothing_else_learns(name):
    model, x = made(name)
    model.eval()
    for one in partitioned_parameters(model):
        masks = [mask_of(one, k).int() for k in (1, 2, 3)]
        assert torch.equal(sum(masks), torch.ones(one.stored.shape, dtype=torch.int32))
    for k in (1, 2):
        with partnets.subnetwork(model, k, update=k):
            expected = model(x)
        damaged = spoil(copy.deepcopy(model), k)
        for update in range(1, k + 1):
            damaged.zero_grad()
            with partnets.subnetwork(damaged, k, update=update):
                y = damaged(x)
                assert torch.equal(y, expected)
                y.square().sum().backward()
            for one in partitioned_parameters(damaged):
                if one.partition is not None and one.parameter.grad is not None:
                    assert not one.parameter.grad[~mask_of(one, update)].any(), one.name


@pytest.mark.cases(usual=4)
@pytest.mark.parametrize("name", MODELS)
def test_a_subnetwork_computes_and_learns_as_its_merged_network(name):
    model, x = made(name)
    assert any(map(is_narrow, partitioned_modules(model)))
    for k, dense in enumerate([partnets.merge(model, k) for k in (1, 2, 3)], 1):
        model.zero_grad()
        y = dense(x)
        y.square().sum().backward()
        with partnets.subnetwork(model, k, update=k):
            ours = model(x)
            ours.square().sum().backward()
        torch.testing.assert_close(ours, y, rtol=1e-10, atol=1e-10)
        theirs = dict(zip(model.modules(), dense.modules(), strict=True))
        for one in partitioned_parameters(model):
            expected, narrow = theirs[one.module]._parameters[one.name].grad, state_of(one.module).narrow
            if one.partition is None or expected is None:
                continue
            mask, grad = mask_of(one, k), one.parameter.grad
            if narrow is not None and one.name in narrow.owners and k < 3:
                mask, grad = (narrow.take(each, one.name, k) for each in (mask, grad))
            torch.testing.assert_close(grad, expected * mask, rtol=1e-9, atol=1e-9)


@pytest.mark.cases(usual=4)
@pytest.mark.parametrize("name", MODELS)
def test_merged_subnetworks_are_smaller_and_ordinary(name):
    model, x = made(name)
    model.eval()
    numbers = []
    for k in (1, 2, 3):
        merged = partnets.merge(model, k)
        assert not partitioned_modules(merged)
        with partnets.subnetwork(model, k):
            torch.testing.assert_close(merged(x), model(x), rtol=1e-9, atol=1e-9)
        numbers.append(sum(parameter.numel() for parameter in merged.parameters()))
    assert numbers[0] < numbers[1] < numbers[2]
    assert [p.shape for p in merged.parameters()] == [p.shape for p in MODELS[name][0]().parameters()]


def test_channels_follow_what_a_layer_computes_with():
    model, _ = made("residual")
    assert tuple(widths(16, PROPORTIONS)) == (8, 12, 16)
    assert channels(model.norm1) == channels(model.norm2) == channels(model.by_depth) == (8, 12, 16)
    assert channels(model.conv1) == channels(model.conv1, "inputs") == (8, 12, 16)
    assert channels(model.up) == (6, 8, 10)
    assert channels(model.up, "inputs") == (8 + 4, 12 + 6, 16 + 8)
    assert channels(model.last, "inputs") == (6, 8, 10) and width(model.last, 1) is None
    model, _ = made("flattened")
    assert channels(model[3], "inputs") == tuple(9 * n for n in (4, 6, 8)) and width(model[3], 1) is None
    model, _ = made("attending")
    assert channels(model.qkv, "inputs") == channels(model.out) == tuple(widths(24, PROPORTIONS))
    assert width(model.embed, 1, "inputs") is None and width(model.last, 1) is None


@pytest.mark.full
def test_parameters_of_a_modules_own_nest_if_they_are_added_to_channels():
    model, _ = made("attending")
    for name in ("token", "positions"):
        assert partnets.partitions(model)[name].sizes()[0] == model.get_parameter(name)[..., :16].numel()
    model, _ = made("residual")
    assert partnets.partitions(model)["scale"].sizes() == [8, 4, 4]


@pytest.mark.full
def test_the_model_is_as_it_was_and_random_states_too():
    model = Residual().train()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    partnets.partition(model, PROPORTIONS, scheme="nested", example=images())
    assert model.training and model.norm2.training and torch.equal(torch.get_rng_state(), state)
    for path, value in before.items():
        assert torch.equal(model.state_dict()[path], value), path


def test_layers_that_cannot_nest_are_divided_at_random():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(6, 8), nn.Bilinear(8, 8, 5)
            self.wide, self.read = nn.Linear(6, 8), nn.Linear(5, 5, bias=False)
            self.last = nn.Linear(8, 2)

        def forward(self, x):
            x, y = torch.relu(self.first(x)), torch.relu(self.wide(x))
            return F.linear(self.second(x, x), self.read.weight).mean() + self.last(y)

    model = partnets.partition(Odd(), PROPORTIONS, scheme="nested", example=torch.randn(3, 6))
    assert channels(model.wide) == (4, 6, 8)
    for layer in (model.first, model.second, model.read):
        assert not is_narrow(layer)
        assert state_of(layer).weights == {"weight": partkernels.Zeros()}
    assert width(model.last, 1) is None


def test_by_weights_the_widths_are_square_roots():
    model, _ = made("mlp", proportions_of="weights")
    assert channels(model[0]) == (16, 18, 20)
    sizes = partnets.partitions(model)["2.weight"].sizes()
    assert abs(sizes[0] / sum(sizes) - 0.6) < 0.1


@pytest.mark.parametrize(
    "change, message",
    [
        ({"example": None}, "without example"),
        ({"example": torch.randn(2, 7)}, "fails with example: RuntimeError"),
        ({"defaults": "stored"}, "defaults='stored' with scheme='nested'"),
        ({"proportions_of": "rows"}, "pass 'units' or 'weights'"),
        ({"scheme": "weight"}, "leave them out with 'weight'"),
        ({"scheme": "nest"}, "'weight', 'node' or 'nested'"),
    ],
)
def test_bad_input_is_refused_before_anything_changes(change, message):
    model = MODELS["mlp"][0]()
    options = {"scheme": "nested", "example": torch.randn(2, 5), **change}
    with pytest.raises(ValueError, match=message):
        partnets.partition(model, PROPORTIONS, **options)
    assert not partitioned_modules(model) and not model[0]._forward_hooks and not model[0]._forward_pre_hooks


@dataclasses.dataclass
class Out:
    logits: torch.Tensor


@dataclasses.dataclass(slots=True)
class Slots:
    logits: torch.Tensor


class TeacherOutput(Out):
    """A class with "ache" in its name, as in "cache"."""


OUTPUTS = {
    "detached": lambda y, training: y.detach(),
    "dataclass": lambda y, training: Out(y),
    "distribution": lambda y, training: torch.distributions.Categorical(logits=y),
    "argmax in evaluation": lambda y, training: y if training else y.argmax(-1),
    "complex": lambda y, training: torch.fft.fft(y),
    "dict of lists": lambda y, training: {"a": [y]},
    "slots": lambda y, training: Slots(y),
    "deque": lambda y, training: deque([y]),
    "values of a dict": lambda y, training: {"a": y}.values(),
    "named as what holds one": lambda y, training: {"cached": TeacherOutput(y)},
    "very deep": lambda y, training: [[[[[[y]]]]]],
    "argmax": lambda y, training: y.argmax(-1),
    "choices of argmax": lambda y, training: y.argmax(-1).add(1) > 3,
    "NumPy": lambda y, training: y.detach().numpy(),
    "numbers": lambda y, training: y.tolist(),
    "numbers in training": lambda y, training: y.tolist() if training else y,
    "indices": lambda y, training: y.topk(2).indices,
}


class Cascade(nn.Module):
    """A model with an output that is also the input of a second stage."""

    def __init__(self, returned):
        super().__init__()
        self.a, self.b, self.auxiliary = nn.Linear(5, 16), nn.Linear(16, 10), nn.Linear(16, 10)
        self.second, self.norm, self.returned = nn.Linear(10, 4), nn.BatchNorm1d(4), returned

    def forward(self, x):
        x = torch.relu(self.a(x))
        y, other = self.b(x), self.auxiliary(x)  # `other` is always computed, and returned only in training
        found = self.returned(y, self.training), self.norm(self.second(y.softmax(-1)))
        return (*found, other) if self.training else found


@pytest.mark.parametrize("examples", [1, 4])
@pytest.mark.parametrize("how", OUTPUTS)
def test_outputs_are_whole_however_they_are_returned(how, examples):
    """Include a batch of one example, for which batch norm fails in training."""
    model = partnets.partition(Cascade(OUTPUTS[how]), PROPORTIONS, scheme="nested", example=torch.randn(examples, 5))
    assert width(model.b, 1) is None and width(model.auxiliary, 1) is None
    assert channels(model.a) == (8, 12, 16)


def test_a_model_that_returns_what_computes_later_is_refused():
    with pytest.raises(
        ValueError, match=r"returns a generator, whose layers compute when somebody asks; return a list"
    ):
        made = Cascade(lambda y, training: y)
        made.forward = lambda x: (layer(x) for layer in (made.a,))
        partnets.partition(made, PROPORTIONS, scheme="nested", example=torch.randn(4, 5))


def test_the_example_stays_as_it_is():
    class Greedy(Cascade):
        def forward(self, batch):
            return super().forward(batch.pop("x").mul_(2))

    example = {"x": torch.ones(4, 5)}
    partnets.partition(Greedy(lambda y, training: y), PROPORTIONS, scheme="nested", example=(example,))
    assert torch.equal(example["x"], torch.ones(4, 5))


class Experts(nn.Module):
    """A mixture of experts; each example calls some of them."""

    def __init__(self, how, count, most):
        super().__init__()
        self.how, self.most = how, most
        self.inputs, self.norm = nn.Linear(6, 16), nn.LayerNorm(16) if most == 1 else None
        self.router, self.head = nn.Linear(16, count, bias=False), nn.Linear(16, 4)
        experts = [nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(count)]
        self.experts = nn.ModuleList(experts)

    def forward(self, x):
        h = self.inputs(x) if self.most > 1 else self.norm(self.inputs(x))
        weights, chosen = self.router(h).softmax(-1).topk(self.most, -1)
        y = torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            row, column = (chosen == number).nonzero(as_tuple=True)
            if self.how == "masked":
                weight = (weights * (chosen == number)).sum(-1, keepdim=True)
                y = y + weight * expert(h * (weight != 0))
            elif len(row) or self.how == "all":
                y = y.index_put((row,), weights[row, column, None] * expert(h[row]), accumulate=True)
        return self.head(h + y)


class Branches(nn.Module):
    """A model with code that an example may not run."""

    def __init__(self, what):
        super().__init__()
        self.what = what
        self.embed, self.body, self.long, self.head = (
            nn.Linear(12, 32),
            nn.Linear(32, 32),
            nn.Linear(32, 32),
            nn.Linear(32, 5),
        )
        if what == "mask":
            self.token = nn.Parameter(torch.randn(32))
        self.register_buffer("sigma", torch.full((32,), 0.1))

    def forward(self, x, mask=None):
        h = torch.relu(self.embed(x))
        if mask is not None:
            h = torch.where(mask[..., None], self.token, h)
        if x.shape[1] > 8:
            h = h + self.long(h)
        if self.what == "noise" and self.training:
            h = h + self.sigma * torch.randn(32)
        return self.head(torch.relu(self.body(h)).mean(1))


@pytest.mark.parametrize(("how", "count", "most"), [("few", 8, 1), ("all", 16, 4), ("few", 8, 2), ("masked", 16, 4)])
@pytest.mark.parametrize("rows", [64, 1])
def test_what_an_example_does_not_call_is_told_of(rows, how, count, most):
    torch.manual_seed(5)
    experts, example = Experts(how, count, most).double(), torch.randn(rows, 6).double()
    is_warned = (how == "few" and rows == 1) or most == 1  # rows go to some of the experts
    with pytest.warns(UserWarning, match="does not use experts") if is_warned else nullcontext():
        model = partnets.partition(copy.deepcopy(experts), (0.5, 0.25, 0.25), scheme="nested", example=example)
    stir(model)
    check_merged(model, example)
    if is_warned:
        return
    x = torch.randn(1000, 6).double()
    for k in (1, 2, 3):
        with partnets.subnetwork(model, k):
            y = model(x)
            if most > 1:  # without a norm, which would normalise only active channels
                found = torch.func.functional_call(experts, dict(masked(model, k)), (x,))
        torch.testing.assert_close(partnets.merge(model, k)(x), y)
        if most > 1:
            torch.testing.assert_close(found, y, rtol=1e-4, atol=1e-4)


def masked(model, k):
    """Yield the parameters of a dense model that computes subnetwork k, with zeros for inactive entries."""
    paths = {module: path for path, module in model.named_modules()}
    for one in partitioned_parameters(model):
        value = one.stored.detach()
        value = value[:k].sum(0) if one.partition is None else value * (one.partition.ids() <= k)
        yield f"{paths[one.module]}.{one.name}", value


@pytest.mark.parametrize("what", ["mask", "length"])
def test_code_that_an_example_does_not_run_raises(what):
    x = torch.randn(2, 7, 12)
    with pytest.warns(UserWarning, match="the example does not use .*(token|long).*example that uses all parameters"):
        model = partnets.partition(Branches(what), PROPORTIONS, scheme="nested", example=x)
    check_merged(model, x)
    with partnets.subnetwork(model, 1), pytest.raises(RuntimeError, match=r"size|shape"):
        model(x, torch.rand(2, 7) > 0.5) if what == "mask" else model(torch.randn(2, 9, 12))


def test_channels_of_code_that_runs_in_training_only_stay_whole():
    x = torch.randn(2, 9, 12)
    model = partnets.partition(Branches("noise"), PROPORTIONS, scheme="nested", example=x)
    assert not is_narrow(model.embed) and is_narrow(model.body)
    with partnets.subnetwork(model, 1, update=1):
        model.train()(x)


class Gate(nn.Module):
    """A gate by the mean over channels; a narrow network has fewer channels."""

    def __init__(self, scale=1.0, training_alone=False):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 64, bias=False), nn.Linear(64, 64, bias=False), nn.Linear(64, 10)
        self.scale, self.training_alone = nn.Parameter(torch.full((64,), scale)), training_alone
        nn.init.zeros_(self.c.weight)

    def forward(self, x):
        h = torch.relu(self.a(x))
        gate = 1 if self.training_alone and not self.training else torch.sigmoid(5 * h.mean(-1, keepdim=True))
        return self.c(h + self.scale * self.b(h * gate))


@pytest.mark.parametrize(
    "options, dtype",
    [({}, None), ({"scale": 1e-6}, None), ({}, torch.bfloat16), ({"training_alone": True}, None)],
)
def test_a_layer_stays_whole_however_little_the_example_shows(options, dtype):
    model = Gate(**options).to(dtype)
    before = model.a.weight.detach().clone()
    nested_if_it_can(model, torch.zeros(4, 16, dtype=dtype), (0.8, 0.1, 0.1))
    assert not is_narrow(model.a)
    now = model.a.weight.detach()
    assert now.dtype == before.dtype and torch.equal(now, before)


class Lazy(nn.Module):
    """A model that computes a scale from the number of channels in its first call and keeps it."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.scale = nn.Linear(8, 32), nn.Linear(32, 4), None

    def forward(self, x):
        h = self.a(x).relu()
        if self.scale is None:
            self.scale = h.shape[-1] ** -0.5
        return self.b(h * self.scale)


class ByMode(nn.Module):
    """A model that divides by a mean over channels only in training."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 32), nn.Linear(32, 4)

    def forward(self, x):
        h = self.a(x).relu()
        return self.b(h / (1 + h.mean(-1, keepdim=True)) if self.training else h)


@pytest.mark.parametrize("make", [Lazy, ByMode])
@pytest.mark.parametrize("mode", [True, False])
def test_what_a_model_keeps_and_does_in_training_shows_whatever_its_mode(make, mode):
    model, x = make().train(mode), torch.randn(4, 8)
    nested_if_it_can(model, x)
    assert not is_narrow(model.a) and model.training is mode and all(part.training is mode for part in model.modules())
    if make is Lazy:
        assert model.scale is None


class Coded(nn.Module):
    """A model with custom code between two layers."""

    def __init__(self, code, **parts):
        super().__init__()
        self.a, self.b, self.code = nn.Linear(8, 32), nn.Linear(32, 4), code
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x):
        return self.code(self, self.a(x))


# The effects are small, so that the outputs of the complete model do not reveal them.
MEANS = {
    "a saturated gate": lambda model, h: model.b(h * (1 + 0.05 * F.hardtanh(5 * h.abs().mean(-1, keepdim=True)))),
    "a one-sided gate": lambda model, h: model.b(h * (1 + torch.relu(-h.mean(-1, keepdim=True)))),
    "a largest unit": lambda model, h: model.b(h * (1 + h.amax(-1, keepdim=True).clamp(max=0))),
    "row numbers": lambda model, h: model.b(h) + 0.01 * model.rows((20 * h.mean(-1)).long().clamp(0, 49)),
}


@pytest.mark.parametrize("what", MEANS)
def test_a_mean_over_units_is_seen_whatever_becomes_of_it(what):
    model = Coded(MEANS[what], **{"rows": nn.Embedding(50, 4)} if what == "row numbers" else {})
    nested_if_it_can(model, torch.randn(4, 8), (0.25, 0.25, 0.5))
    assert not is_narrow(model.a)


@pytest.mark.parametrize("attention", ["fused", "softmax", "function"])
def test_attention_is_narrow_if_its_scale_does_not_follow_its_width(attention):
    def attend(model, h, scale=1.0):
        q = h.unflatten(-1, (-1, 8)).transpose(-2, -3)
        if attention == "fused":
            y = F.scaled_dot_product_attention(q, q, q, scale=scale)
        else:
            weights = q @ q.mT * scale
            y = (F.softmax(weights, dim=-1) if attention == "function" else weights.softmax(-1)) @ q
        return model.b(y.transpose(-2, -3).flatten(-2))

    def by_heads(model, h):
        return attend(model, h, (h.shape[-1] // 8) ** -0.5)

    x = torch.randn(4, 3, 8)
    for code, may_be_narrow in ((attend, True), (by_heads, False)):
        model = nested_if_it_can(Coded(code), x)
        assert is_narrow(model.a) is may_be_narrow


@pytest.mark.full
def test_a_compiled_model_and_inference_mode_make_the_same():
    network, x = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3)), torch.randn(4, 5)
    models = [copy.deepcopy(network), torch.compile(copy.deepcopy(network), backend="eager"), network]
    for model in models:
        with torch.inference_mode(model is network):
            partnets.partition(model, PROPORTIONS, scheme="nested", example=x)
    found = [str(partnets.explain_partition(getattr(model, "_orig_mod", model))) for model in models]
    assert "16x5   8x5 12x5 16x5" in found[0] and found == found[:1] * 3
    with partnets.subnetwork(network, 1, 1):
        network(x).sum().backward()
    assert all(parameter.grad is not None for parameter in network.parameters())


class Telling(nn.Module):
    """A model that reads its layers' sizes or weights, which differ in a merged model."""

    def __init__(self, reads):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(5, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.norm, self.layers, self.reads = nn.LayerNorm(16), nn.ModuleList([nn.Linear(5, 16)]), reads

    def forward(self, x):
        h = torch.relu(self.first(x))
        if self.reads == "inputs":
            h = h * math.sqrt(2 / self.second.in_features)
        elif self.reads == "outputs":
            h = h * self.first.out_features**0.5
        elif self.reads == "weight":
            layer = [self.first, self.second][len(h) > 10**6]
            h = h / layer.weight.abs().mean()
        elif self.reads == "tied":
            h = h + torch.relu(self.layers[0](x))
            x = F.linear(h, next(iter(self.layers)).weight.t())
        return self.last(self.norm(h + torch.relu(self.second(h)))), x


@pytest.mark.parametrize("reads", ["inputs", "outputs", "weight", "tied"])
def test_what_code_reads_of_layers_is_the_same_merged(reads):
    x = torch.randn(4, 5)
    model = nested_if_it_can(Telling(reads), x).eval()
    check_merged(model, x)


class Between(nn.Module):
    """A model in which some outputs of `between` are 0 for a given example but not with other weights."""

    def __init__(self, is_recurrent):
        super().__init__()
        self.first, self.last, self.is_recurrent = nn.Linear(5, 8), nn.Linear(16, 3), is_recurrent
        self.between = nn.RNN(8, 16, nonlinearity="relu") if is_recurrent else nn.Linear(8, 16)

    def forward(self, x):
        x = self.between(torch.relu(self.first(x)))
        return self.last(x[0] if self.is_recurrent else torch.relu(x))


@pytest.mark.parametrize("between", ["frozen", "skipped", "recurrent"])
def test_channels_of_layers_that_do_not_nest_are_whole(between):
    for rows in (1, 2, 20):
        model = nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 5), Between(between == "recurrent"))
        if between == "frozen":
            model[3].between.requires_grad_(False)
        skip = [model[3].between] if between == "skipped" else []
        partnets.partition(model, PROPORTIONS, scheme="nested", example=torch.randn(rows, 5), skip=skip)
        assert is_narrow(model[0])
        assert width(model[3].first, 1) is None and not is_narrow(model[3].last)


def test_weight_norm_is_not_looked_into():
    weight_norm = nn.utils.parametrizations.weight_norm
    network = nn.Sequential(
        nn.Conv1d(12, 32, 1),
        weight_norm(nn.Conv1d(32, 32, 15, padding=7, groups=4), dim=2),
        nn.ReLU(),
        nn.Conv1d(32, 24, 1),
        nn.ReLU(),
        nn.Conv1d(24, 5, 1),
    )
    model = partnets.partition(network, PROPORTIONS, scheme="nested", example=torch.randn(2, 12, 20))
    assert not is_narrow(model[0]) and channels(model[3]) == channels(model[5], "inputs") == (16, 20, 24)
    with partnets.subnetwork(model, 1):
        assert model(torch.randn(2, 12, 20)).isfinite().all()


def test_what_would_be_divided_by_0_is_refused():
    def network():
        directions = nn.utils.parametrizations.weight_norm(nn.Conv1d(64, 64, 3, padding=1, groups=64))
        return nn.Sequential(nn.Conv1d(3, 64, 1), directions, nn.ReLU(), nn.Conv1d(64, 8, 1), nn.Conv1d(8, 2, 1))

    model, x = network(), torch.randn(2, 3, 20)
    before = model(x)
    with pytest.raises(ValueError, match=r"1\.parametrizations\.weight makes a weight that is not finite"):
        partnets.partition(model, (0.1, 0.1, 0.8), scheme="nested", example=x)
    assert torch.equal(model(x), before)
    with pytest.raises(ValueError, match="not finite"):
        partnets.partition(model, (0.1, 0.1, 0.8), defaults="zero")
    partnets.partition(model, (0.1, 0.1, 0.8))


class OwnLinear(nn.Linear):
    pass


@pytest.mark.cases(usual=1)
@pytest.mark.parametrize("kind", [nn.Linear, OwnLinear])
def test_weights_that_have_learned_are_told_of(kind):
    torch.manual_seed(0)
    model = nn.Sequential(kind(12, 64), nn.ReLU(), kind(64, 64), nn.ReLU(), kind(64, 10))
    x, y = torch.randn(64, 12), torch.randint(10, (64,))
    with warnings.catch_warnings(action="error"):
        partnets.partition(copy.deepcopy(model), PROPORTIONS, scheme="nested", example=x)
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(100):
        adam.zero_grad()
        F.cross_entropy(model(x), y).backward()
        adam.step()
    with pytest.warns(UserWarning, match=r"keeps the weights of .*2.* look as if they had learned.*defaults='zero'"):
        partnets.partition(copy.deepcopy(model), PROPORTIONS, scheme="nested", example=x)
    with warnings.catch_warnings(action="error"):
        partnets.partition(model, PROPORTIONS, scheme="nested", example=x, defaults="zero")


def test_a_step_after_a_forgotten_context_raises_at_first_too():
    model, x = network(), torch.randn(8, 12)
    partnets.partition(model, PROPORTIONS, scheme="nested", example=x)
    partnets.audit(model, (x, torch.randint(10, (8,))), F.cross_entropy)
    optimizer = partnets.optim.AdamW(model, lr=0.01, weight_decay=0.1)
    F.cross_entropy(model(x), torch.randint(10, (8,))).backward()
    with pytest.raises(RuntimeError, match="gradient of partition 1 is 0 everywhere"):
        optimizer.step(update=1)


def network():
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 10))


@pytest.mark.full
def test_the_search_is_the_same_each_time():
    found = set()
    junk = []
    for times in range(4):
        junk.append(bytearray(97 * times))
        torch.manual_seed(0)
        model = partnets.partition(Attending(), PROPORTIONS, scheme="nested", example=torch.randn(4, 4, 5))
        junk.append(model)
        found.add(partnets.explain_partition(model))
    assert len(found) == 1


def test_tied_layers_of_other_channels_are_divided_at_random():
    class TiedSquares(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(torch.relu(self.a(x)))

    x = torch.randn(16, 8)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 32), nn.LayerNorm(32), TiedSquares())
    partnets.partition(model, PROPORTIONS, scheme="nested", example=x)
    assert is_narrow(model[0]) and not is_narrow(model[4].a) and not is_narrow(model[4].b)
    assert model[4].a.weight_partition is model[4].b.weight_partition
    with partnets.subnetwork(model, 1):
        assert not (model(x) == 0).all(0).any()


@pytest.mark.parametrize(
    "proportions, example, message",
    [((0.0, 1.0), torch.randn(2, 5), "no channels"), ((0.5, 0.5), torch.randn(0, 5), "without entries")],
)
def test_proportions_and_examples_that_show_nothing_are_refused(proportions, example, message):
    with pytest.raises(ValueError, match=message):
        partnets.partition(MODELS["mlp"][0](), proportions, scheme="nested", example=example)


def test_partitions_without_a_channel_are_told_of():
    network = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 3))
    with pytest.warns(
        UserWarning, match=r"partition 3 of proportions \(0.98, 0.01, 0.01\) has no channel of any layer"
    ):
        partnets.partition(network, (0.98, 0.01, 0.01), scheme="nested", example=torch.randn(2, 5))


def test_code_that_standardises_each_channel_is_narrow():
    model = Coded(lambda model, h: model.b((h - h.mean(0)) / h.std(0)))
    x = torch.randn(4, 8)
    partnets.partition(model, PROPORTIONS, scheme="nested", example=x)
    assert is_narrow(model.a)
    check_merged(model, x)


def test_one_partition_is_all_of_the_network():
    network = MODELS["mlp"][0]()
    before = copy.deepcopy(network.state_dict())
    model = partnets.partition(network, (1.0,), scheme="nested", example=torch.randn(2, 5))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.full
@pytest.mark.parametrize("name", ["residual", "attending", "encoder"])
def test_copies_and_files(name):
    model, x = made(name)
    model.eval()
    again, _ = made(name)
    again.load_state_dict(model.state_dict())
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), again.eval()):
        for k in (1, 3):
            with partnets.subnetwork(model, k), partnets.subnetwork(each, k):
                assert torch.equal(each(x), model(x))
        assert [is_narrow(one) for one in partitioned_modules(each)] == [
            is_narrow(one) for one in partitioned_modules(model)
        ]


def test_a_checkpoint_of_another_scheme_is_refused_both_ways():
    def model(**options):
        return partnets.partition(MODELS["mlp"][0](), options.pop("proportions", PROPORTIONS), **options)

    nested = {"scheme": "nested", "example": torch.randn(2, 5)}
    ours, random = model(**nested), model(scheme="weight")
    before = copy.deepcopy(ours.state_dict())
    with pytest.raises(RuntimeError, match=r"weight_partition has other partitions than those of this model's nested"):
        ours.load_state_dict(random.state_dict())
    with pytest.raises(RuntimeError, match=r"Unexpected key.*2.bias_partition"):
        random.load_state_dict(ours.state_dict())
    with pytest.raises(RuntimeError, match=r"0.weight_partition has other partitions than those of this model's"):
        ours.load_state_dict(model(proportions=(0.8, 0.1, 0.1), **nested).state_dict())
    for key, value in before.items():
        assert not key.endswith("_partition") or torch.equal(value, ours.state_dict()[key])


@pytest.mark.parametrize("size", [1, 2, 3, 10, 16, 20, 64, 100, 192, 500, 768])
@pytest.mark.parametrize("proportions", [(0.8, 0.1, 0.1), (0.5, 0.5), (0.34, 0.33, 0.33), (0.9, 0.05, 0.05)])
def test_widths(size, proportions):
    ends = widths(size, proportions)
    assert list(ends) == sorted(ends) and ends[0] >= 1 and ends[-1] == size
    exact = [size * sum(proportions[: k + 1]) for k in range(len(proportions))]
    assert max(abs(a - b) for a, b in zip(ends, exact, strict=True)) <= max(size * min(proportions) / 2, 1) + 1e-9
    if size >= 160:
        assert all(end % 8 == 0 for end in ends[:-1])


def test_a_layer_does_not_nest_without_a_model():
    with pytest.raises(ValueError, match=r"scheme='nested' without example"):
        partnets.Conv2d(3, 16, 3, proportions=(0.5, 0.5), scheme="nested")


@pytest.mark.cases(usual=1)
@pytest.mark.parametrize("mode", [True, False])
def test_heads_that_compute_in_training_alone_nest_too(mode):
    class WithAuxiliary(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.norm = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16)
            self.hidden, self.auxiliary = nn.Linear(16, 8), nn.Linear(8, 3)
            self.head, self.dropout = nn.Linear(16, 3), nn.Dropout(0.9)

        def forward(self, x):
            x = self.norm(self.stem(x)).relu().mean((2, 3))
            if not self.training:
                return self.head(x)
            return self.head(x), self.auxiliary(self.hidden(self.dropout(x)).relu())

    model, x = WithAuxiliary().train(mode), images()
    partnets.partition(model, PROPORTIONS, scheme="nested", example=x)
    assert channels(model.auxiliary, "inputs") == (4, 6, 8) and is_narrow(model.stem)
    assert not model.norm.running_mean.any()
    model.train().dropout.p = 0.0
    model.norm.eval()
    with partnets.subnetwork(model, 1):
        expected = model(x)
    for y, merged in zip(expected, partnets.merge(model, 1)(x), strict=True):
        assert y.shape == (4, 3)
        torch.testing.assert_close(merged, y)


def test_a_layer_stays_whole_where_the_models_code_counts_units():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.last = nn.Linear(5, 16), nn.Linear(16, 16), nn.Linear(16, 3)

        def forward(self, x):
            x = self.first(x).relu()
            return self.last(self.second(x * x.shape[-1]).relu())

    model = partnets.partition(Counting(), PROPORTIONS, scheme="nested", example=torch.randn(4, 5))
    assert not is_narrow(model.first) and channels(model.second) == (8, 12, 16)


def test_timms_grouped_convolutions_merge_to_fewer_groups():
    from timm.layers import Conv2dSame

    network = nn.Sequential(nn.Conv2d(3, 20, 1), Conv2dSame(20, 20, 3, stride=2, groups=20), nn.Conv2d(20, 4, 1))
    x = torch.randn(2, 3, 8, 8)
    model = partnets.partition(network, PROPORTIONS, scheme="nested", example=x)
    with partnets.subnetwork(model, 1):
        expected = model(x)
    merged = partnets.merge(model, 1)
    torch.testing.assert_close(merged(x), expected)
    assert merged[1].groups == len(merged[1].weight) < 20


def test_volumes():
    network = nn.Sequential(nn.Conv3d(1, 16, 3), nn.ReLU(), nn.ConvTranspose3d(16, 8, 2), nn.GELU(), nn.Conv3d(8, 2, 1))
    x = torch.randn(2, 1, 5, 5, 5)
    model = partnets.partition(network, PROPORTIONS, scheme="nested", example=x)
    assert is_narrow(model[0]) and is_narrow(model[2])
    for k in (1, 2, 3):
        model.zero_grad()
        with partnets.subnetwork(model, k, update=k):
            y = model(x)
            assert len(model[:2](x)[0]) == width(model[0], k)
            y.square().sum().backward()
        torch.testing.assert_close(partnets.merge(model, k)(x), y)
        for one in partitioned_parameters(model):
            if one.partition is not None and one.parameter.grad is not None:
                assert not one.parameter.grad[~mask_of(one, k)].any()


WIDTHS = {
    "vectors": (
        lambda: nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8, elementwise_affine=False), nn.Linear(8, 2)),
        (4, 9),
    ),
    "volumes": (lambda: nn.Sequential(nn.Conv3d(1, 8, 1), nn.Conv3d(8, 2, 1)), (2, 9, 2, 2, 2)),
}


@pytest.mark.parametrize("case", WIDTHS)
def test_inputs_of_another_width_are_refused(case):
    make, shape = WIDTHS[case]
    x = torch.randn(2, 5) if case == "vectors" else torch.randn(2, 1, 2, 2, 2)
    model = partnets.partition(make(), (0.5, 0.5), scheme="nested", example=x)
    assert is_narrow(model[1])
    for k in (1, 2):
        with partnets.subnetwork(model, k, update=k), pytest.raises((RuntimeError, ValueError)):
            model[1](torch.randn(shape))


class Concatenated(nn.Module):
    """A model with a norm in which the active channels are not the first ones."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(3, 16, 1)
        self.norm, self.last = nn.BatchNorm2d(32), nn.Linear(32, 5)

    def forward(self, x):
        return self.last(F.relu(self.norm(torch.cat([self.wide(x), self.narrow(x)], 1))).mean((2, 3)))


@pytest.mark.cases(usual=1)
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.filterwarnings("ignore:the running statistics")  # of subnetworks 2 and 3
def test_running_statistics_are_those_of_the_channel(trained):
    """Check both the norm's given statistics and those that it updates, each by its subnetwork."""
    model = Concatenated()
    with torch.no_grad():
        model.norm.running_mean.copy_(torch.linspace(-1, 1, 32))
        model.norm.running_var.copy_(torch.linspace(1, 3, 32))
    before, x = copy.deepcopy(model.norm), images()
    partnets.partition(model, PROPORTIONS, scheme="nested", example=x)
    live = state_of(model.norm).narrow.outputs == 1
    assert live.tolist() == ([True] * 8 + [False] * 8) * 2
    with partnets.subnetwork(model, 1, update=1):
        h = torch.cat([model.wide(x), model.narrow(x)], 1)
        y = model.norm.train(trained)(h)
    whole = torch.randn(4, 32, 8, 8)
    whole[:, live] = h.detach()
    torch.testing.assert_close(y, before.train(trained)(whole)[:, live])
    for name in ("running_mean", "running_var"):
        rows, whole = model.norm.get_buffer(name + ROWS), getattr(before, name)
        torch.testing.assert_close(rows[0][live], whole[live])
    assert torch.equal(model.norm.running_mean_rows[0, ~live], torch.linspace(-1, 1, 32)[~live])
    assert torch.equal(model.norm.running_mean, torch.linspace(-1, 1, 32))  # of subnetwork 3
    with partnets.subnetwork(model.eval(), 1):
        y = model(x)
    torch.testing.assert_close(partnets.merge(model, active=1)(x), y)


def after_others(last):
    """Return a model whose last module may stay whole."""
    return nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 5), last)


def test_channels_that_a_sort_moves_stay_whole():
    class Sorted(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(5, 32), nn.LayerNorm(32), nn.Linear(32, 3)

        def forward(self, x):
            return self.last(self.norm(self.first(x).sort(-1).values))

    model = partnets.partition(after_others(Sorted()), (0.5, 0.5), scheme="nested", example=torch.randn(4, 5))
    assert is_narrow(model[0]) and width(model[3].first, 1) is None
    assert not is_narrow(model[3].norm) and not is_narrow(model[3].last)


def test_every_subnetwork_can_be_merged():
    """Check code that drops channels only in the first subnetwork."""

    class Strided(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(5, 16), nn.Linear(6, 3)

        def forward(self, x):
            return self.last(F.pad(self.first(x), (2, 5))[..., ::4])

    x = torch.randn(4, 5)
    model = partnets.partition(after_others(Strided()), (0.8, 0.1, 0.1), scheme="nested", example=x)
    assert width(model[3].first, 1) is None
    check_merged(model, x)


class OfGraph(nn.Module):
    def __init__(self, adjacency=None):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 32), nn.BatchNorm1d(32), nn.Linear(32, 3)
        self.register_buffer("adjacency", adjacency)

    def forward(self, x, adjacency=None):
        adjacency = self.adjacency if adjacency is None else adjacency
        return self.last(torch.sparse.mm(adjacency, self.norm(self.first(x)).relu()))


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_tensors_are_given_and_kept(kept, layout):
    x, adjacency = torch.randn(6, 5), (torch.rand(6, 6) < 0.5).float().to_sparse(layout=layout)
    given = (x,) if kept else (x, adjacency)
    model = OfGraph(adjacency if kept else None)
    partnets.partition(model, PROPORTIONS, scheme="nested", example=given)
    assert not model.norm.running_mean.any()
    with partnets.subnetwork(model, 1, update=1):
        assert model(*given).shape == (6, 3)


def test_vmap_takes_convolutions():
    model, x = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3)), torch.randn(4, 2, 3, 6, 6)
    partnets.partition(model, PROPORTIONS, scheme="nested", example=x[0])
    with partnets.subnetwork(model, 1):
        torch.testing.assert_close(torch.vmap(model)(x), torch.stack([model(each) for each in x]))


def test_a_model_without_memory_is_refused():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3))
    with pytest.raises(ValueError, match="the model is on the meta device"):
        partnets.partition(model, PROPORTIONS, scheme="nested", example=torch.randn(4, 5))


@pytest.mark.cases(usual=1)
@pytest.mark.parametrize("scheme", ["nested", "weight"])
def test_merged_layers_know_nothing_of_partitions(scheme):
    """Check that merged layers have no attributes of partitions, which would persist when partitioned again."""
    model, x = MODELS["residual"][0](), images()
    before = {path: {*vars(module)} for path, module in model.named_modules()}
    partnets.partition(model, PROPORTIONS, scheme=scheme, **({"example": x} if scheme == "nested" else {}))
    for merged in (partnets.merge(model), partnets.finalize(model, "finetune")):
        assert {path: {*vars(module)} for path, module in merged.named_modules()} == before
        again = partnets.partition(merged, PROPORTIONS, defaults="stored")
        with partnets.subnetwork(again, 3):
            assert again(x).isfinite().all()


@pytest.mark.full
@pytest.mark.parametrize("code", [lambda y: y - y.mean(-1, keepdim=True), lambda y: y.flip(-1)])
def test_hooks_on_layers_are_a_part_of_the_model(code):
    class Of(nn.Module):
        def forward(self, x):
            return code(x)

    def network(hook):
        torch.manual_seed(0)
        layers = [
            nn.Linear(7, 32),
            nn.Identity() if hook else Of(),
            nn.Tanh(),
            nn.Linear(32, 24),
            nn.Tanh(),
            nn.Linear(24, 3),
        ]
        if hook:
            layers[0].register_forward_hook(lambda layer, inputs, y: code(y))
        return partnets.partition(nn.Sequential(*layers), (0.5, 0.25, 0.25), scheme="nested", example=torch.randn(6, 7))

    hooked, written = network(True), network(False)
    x = torch.randn(6, 7)
    for k in (1, 2, 3):
        with partnets.subnetwork(hooked, k), partnets.subnetwork(written, k):
            torch.testing.assert_close(hooked(x), written(x))
    assert [is_narrow(hooked[i]) for i in (0, 3)] == [is_narrow(written[i]) for i in (0, 3)] == [False, True]


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # tracing warns about sizes that become constants
def test_a_merged_norm_of_an_uneven_group_is_traced():
    model, x = nn.Sequential(nn.Conv2d(3, 24, 3), nn.GroupNorm(4, 24), nn.ReLU(), nn.Conv2d(24, 3, 3)), images()
    partnets.partition(model, (0.5, 0.25, 0.25), scheme="nested", example=x)
    merged = partnets.merge(model, active=2)
    torch.testing.assert_close(torch.jit.trace(merged, x)(x[:2]), merged(x[:2]))


def test_hooks_on_merged_norms_see_all_units():
    norm = nn.LayerNorm(32)
    norm.register_forward_hook(lambda module, inputs, y: y.roll(3, -1))
    model, x = nn.Sequential(nn.Linear(8, 32), norm, nn.ReLU(), nn.Linear(32, 3)), torch.randn(5, 8)
    nested_if_it_can(model, x, (0.5, 0.25, 0.25))
    check_merged(model, x)


class Reading(nn.Module):
    """A model that reads a norm's settings and weights besides calling it."""

    def __init__(self, norm, read):
        super().__init__()
        self.a, self.norm, self.b, self.read = nn.Linear(6, 32), norm, nn.Linear(32, 3), read

    def forward(self, x):
        h = self.norm(self.a(x))
        return self.b(h * self.read(self.norm, h))


READ = {
    "eps": (nn.LayerNorm(32), lambda norm, h: 1 / (h.std() + norm.eps)),
    "normalized_shape": (nn.LayerNorm(32), lambda norm, h: norm.normalized_shape[0] ** -0.5),
    "weight": (nn.LayerNorm(32), lambda norm, h: 1 / norm.weight.abs().mean()),
    "num_groups": (nn.GroupNorm(4, 32), lambda norm, h: 1 / norm.num_groups),
    "num_channels": (nn.GroupNorm(4, 32), lambda norm, h: 1 / norm.num_channels),
    "num_features": (nn.BatchNorm1d(32), lambda norm, h: 1 / norm.num_features),
    "running_mean": (nn.BatchNorm1d(32), lambda norm, h: 1 / (1 + (h - norm.running_mean).square().mean())),
}


@pytest.mark.cases(usual=6)
@pytest.mark.parametrize("what", READ)
def test_who_reads_a_norm_reads_the_same_merged(what):
    norm, read = READ[what]
    model = nested_if_it_can(Reading(copy.deepcopy(norm), read), torch.randn(8, 6)).eval()
    for name, buffer in model.norm.named_buffers():
        if name == "running_mean":
            buffer.copy_(torch.randn(buffer.shape))
    x = torch.randn(5, 6)
    check_merged(model, x)


class WarmNorm(nn.Module):
    """A norm that counts its calls, keeps a bound method, and has numbers equal to its size."""

    def __init__(self, size):
        super().__init__()
        self.weight, self.dim, self.calls, self.temperature = nn.Parameter(torch.ones(size)), size, 0, size
        self.computed = self.root

    def root(self, x):
        return x * self.dim**0.5 / x.norm(dim=-1, keepdim=True)

    def forward(self, x):
        self.calls += 1
        return self.computed(x) * self.weight / self.temperature


def test_a_norm_of_ones_own_keeps_what_it_writes_and_its_numbers():
    network = nn.Sequential(nn.Linear(6, 32), WarmNorm(32), nn.Linear(32, 3))
    model = partnets.partition(network, PROPORTIONS, scheme="nested", example=torch.randn(4, 6))
    assert model[1].calls == 0
    x = torch.randn(5, 6)
    for k in (1, 2, 3):
        with torch.no_grad(), partnets.subnetwork(model, k):
            h = model[0](x)
            h = h * 32**0.5 / h.norm(dim=-1, keepdim=True) / 32
            torch.testing.assert_close(model(x), model[2](h))
    check_merged(model, x)
    assert model[1].calls == 6


class DividedGradient(torch.autograd.Function):
    """The identity with a gradient divided by the root of the number of channels, as in learned step sizes."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad / grad.shape[-1] ** 0.5


def test_gradients_that_know_the_number_of_channels_are_those_of_the_merged_network():
    model, x = Coded(lambda model, h: model.b(DividedGradient.apply(torch.relu(h)))), torch.randn(4, 8)
    partnets.partition(model, PROPORTIONS, scheme="nested", example=x)
    with partnets.subnetwork(model, 1, update=1):
        model(x).sum().backward()
    merged = partnets.merge(model, 1)
    merged(x).sum().backward()
    torch.testing.assert_close(model.a.weight.grad[: width(model.a, 1)], merged.a.weight.grad)


class OwnMethods(nn.Module):
    """A model with methods that read a parameter and are kept as a hook, in a list, a partial and another object."""

    def __init__(self):
        super().__init__()
        self.gain, self.a, self.b = nn.Parameter(torch.tensor(0.5)), nn.Linear(4, 16), nn.Linear(16, 3)
        self.a.register_forward_hook(self.hook)
        self.steps, self.last, self.helper = [self.scaled], partial(self.scaled), Helper(self)

    def hook(self, module, given, output):
        return output * self.gain

    def scaled(self, x):
        return x * self.gain

    def forward(self, x):
        x = self.steps[0](torch.relu(self.a(x)))
        return self.b(self.helper.scaled(self.last(x)))


class Helper:
    def __init__(self, model):
        self.model = model

    def scaled(self, x):
        return self.model.scaled(x)


@pytest.mark.parametrize("scheme", ["nested", "weight"])
@pytest.mark.parametrize("is_inner", [False, True])
def test_methods_that_a_module_keeps_are_those_of_the_merged_one(scheme, is_inner):
    torch.manual_seed(0)
    x = torch.randn(6, 4)
    model = nn.Sequential(OwnMethods(), nn.Linear(3, 3)) if is_inner else OwnMethods()
    example = {"example": x} if scheme == "nested" else {}
    partnets.partition(model, PROPORTIONS, scheme=scheme, **example)
    stir(model)
    check_merged(model, x)
    for mode in ("finetune", "deploy"):
        ordinary = partnets.finalize(model, mode)
        ordinary(x).sum().backward()
        own = next(one for one in ordinary.modules() if hasattr(one, "gain"))
        assert own.gain.grad is not None and own.helper.model is own and own.steps[0].__self__ is own


@pytest.mark.full
def test_a_compiled_forward_which_copies_share_is_refused():
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    model.forward = torch.compile(model.forward, backend="eager")
    with pytest.raises(ValueError, match="no channels of this Sequential can be divided"):
        partnets.partition(model, PROPORTIONS, scheme="nested", example=torch.randn(6, 4))


class Kinds(nn.Module):
    """A model that checks the types of its layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Linear(4, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 16), nn.LayerNorm(16)]
        )
        self.last = nn.Linear(17, 3)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x) if isinstance(layer, nn.LayerNorm) else layer(x)
        return self.last(torch.cat([x, x.mean(-1, keepdim=True)], -1))


@pytest.mark.full
def test_merged_norms_are_norms_to_who_asks():
    model, x = Kinds(), torch.randn(6, 4)
    partnets.partition(model, PROPORTIONS, scheme="nested", example=x)
    for k in (1, 2, 3):
        merged = partnets.merge(model, active=k)
        with torch.no_grad(), partnets.subnetwork(model, k):
            for one in (merged, copy.deepcopy(merged), pickle.loads(pickle.dumps(merged))):
                torch.testing.assert_close(one(x), model(x))
        assert type(merged.layers[1]) is nn.LayerNorm


@pytest.mark.cases(usual=1)
@pytest.mark.parametrize(("norm_first", "padded"), [(True, True), (False, False)])
def test_merged_transformers_are_their_subnetworks_on_torchs_fast_path_too(norm_first, padded):
    """Disable gradients, so that torch reads the parameters of a layer's norms instead of calling the norms."""
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, norm_first=norm_first)
    layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model = nn.ModuleDict({"before": nn.Linear(5, 16), "layers": layers, "after": nn.Linear(16, 3)})

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = model

        def forward(self, x):
            mask = torch.arange(6) >= torch.tensor([[6], [4]]) if padded else None
            return self.parts["after"](self.parts["layers"](self.parts["before"](x), src_key_padding_mask=mask))

    x = torch.randn(2, 6, 5)
    network = partnets.partition(Encoder(), (0.5, 0.25, 0.25), scheme="nested", example=x).eval()
    for k in (1, 2, 3):
        merged = partnets.merge(network, active=k).eval()
        deployed = partnets.finalize(partnets.merge(network, active=k), "deploy")
        with torch.no_grad(), partnets.subnetwork(network, k):
            expected = network(x)
            torch.testing.assert_close(merged(x), expected)
            torch.testing.assert_close(deployed(x), expected)
