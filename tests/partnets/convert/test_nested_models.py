"""scheme='nested': subnetwork k is a narrower network, the first channels of each layer."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from layers import mask_of, spoil
from torch import nn

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
    """A transformer with custom position embeddings, class token and norms; with a number of heads, or their size."""

    def __init__(self, width=24, heads=(3, -1)):
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
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, *self.heads)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        y = self.norm2(x)
        x = x + self.contract(F.silu(self.gates(y)) * self.hidden(y))
        return self.last(x[:, 0])


def encoder():
    layer = nn.TransformerEncoderLayer(24, 3, 40, batch_first=True, dropout=0.0)
    return nn.Sequential(
        nn.Linear(5, 24), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(24, 2)
    )


class TrainingHead(nn.Module):
    """A model with a head that is computed in training only."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16)
        self.head, self.hidden, self.auxiliary = nn.Linear(16, 3), nn.Linear(16, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = self.norm(self.stem(x)).relu().mean((2, 3))
        return torch.cat([self.head(x), self.auxiliary(self.hidden(x).relu())]) if self.training else self.head(x)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.hidden = nn.Embedding(9, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(torch.relu(self.hidden(self.embedding(ids))))


def volumes():
    return nn.Sequential(
        nn.Conv3d(3, 16, 3), nn.ReLU(), nn.ConvTranspose3d(16, 8, 2), nn.GELU(), nn.Conv3d(8, 2, 1), nn.Flatten()
    )


def flattened():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 3))


def images(n=4):
    return torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(1))


# Each model's constructor, its inputs, and declared groups.
MODELS = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(5, 20), nn.ReLU(), nn.Linear(20, 10), nn.Tanh(), nn.Linear(10, 3)),
        torch.randn(4, 5), None,
    ),
    "flattened": (flattened, images(), None),
    "volumes": (volumes, torch.randn(2, 3, 5, 5, 5), None),
    "residual": (Residual, images(), None),
    "attending": (Attending, torch.randn(4, 4, 5), None),
    "encoder": (encoder, torch.randn(4, 6, 5), None),
    "resnet8": (lambda: models.FixupResNet(8), images(), None),
    "vit": (lambda: models.ViT(8, 4, 24, 2, 3), images(), None),
    "head in training only": (TrainingHead, images(), None),
    "declared flattened": (flattened, images(), [{"outputs": ["0"], "inputs": ["3"]}]),
    "declared tied": (
        Tied, torch.arange(8).view(2, 4), [{"outputs": ["embedding", "hidden"], "inputs": ["hidden", "head"]}]
    ),
    "declared attending": (
        lambda: Attending(heads=(-1, 8)), torch.randn(4, 4, 5),
        [
            {
                "outputs": ["embed", "token", "positions", "norm", "norm2", "out", "contract"],
                "inputs": ["qkv", "gates", "hidden", "last"],
            },
            {"outputs": ["qkv"], "inputs": ["out"], "block": 8},
        ],
    ),
}  # fmt: skip


def made(name, **options):
    make, x, groups = MODELS[name]
    torch.manual_seed(0)
    model = make().double()
    x = x.double() if x.is_floating_point() else x
    partnets.partition(model, PROPORTIONS, scheme="nested", example=x, channels=groups, **options)
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
    found = tuple(width(module, k, side) for k in (1, 2, 3))
    return None if None in found else found


def is_narrow(module):
    return state_of(module).narrow is not None


def check_alone(model, x):
    """Check that merged subnetworks compute as in the model, and that NaN in later partitions changes no bit."""
    model.eval()
    for k in (1, 2, 3):
        with torch.no_grad(), partnets.subnetwork(model, k):
            expected = model(x)
        merged = partnets.merge(model, k).eval()
        torch.testing.assert_close(merged(x), expected, rtol=1e-5, atol=1e-6)
        with torch.no_grad():
            torch.testing.assert_close(merged(x), expected, rtol=1e-5, atol=1e-6)
            with partnets.subnetwork(poisoned := spoil(copy.deepcopy(model), k), k):
                assert torch.equal(poisoned(x), expected)


@pytest.mark.cases(usual=3)
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
def test_a_subnetwork_computes_and_learns_as_its_smaller_merged_network(name):
    model, x = made(name)
    assert any(map(is_narrow, partitioned_modules(model)))
    numbers = []
    for k, dense in enumerate([partnets.merge(model, k) for k in (1, 2, 3)], 1):
        assert not partitioned_modules(dense)
        numbers.append(sum(parameter.numel() for parameter in dense.parameters()))
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
    assert numbers[0] < numbers[1] < numbers[2]
    assert [p.shape for p in dense.parameters()] == [p.shape for p in MODELS[name][0]().parameters()]


def test_channels_follow_the_activations_between_layers():
    model, _ = made("residual")
    assert tuple(widths(16, PROPORTIONS)) == (8, 12, 16)
    assert channels(model.norm1) == channels(model.norm2) == channels(model.by_depth) == (8, 12, 16)
    assert channels(model.conv1) == channels(model.conv1, "inputs") == (8, 12, 16)
    assert channels(model.up) == (6, 8, 10)
    assert channels(model.up, "inputs") == (8 + 4, 12 + 6, 16 + 8)
    assert channels(model.last, "inputs") == (6, 8, 10) and width(model.last, 1) is None
    assert partnets.partitions(model)["scale"].sizes() == [8, 4, 4]
    for name in ("flattened", "declared flattened"):
        model, _ = made(name)
        assert channels(model[3], "inputs") == tuple(9 * n for n in (4, 6, 8)) and width(model[3], 1) is None
    model, _ = made("head in training only")
    assert channels(model.auxiliary, "inputs") == (4, 6, 8) and is_narrow(model.stem)
    for name, of_heads in (("attending", None), ("declared attending", (48, 48, 72))):
        model, _ = made(name)
        assert channels(model.qkv, "inputs") == channels(model.out) == tuple(widths(24, PROPORTIONS))
        assert channels(model.qkv) == of_heads
        assert width(model.embed, 1, "inputs") is None and width(model.last, 1) is None
        for parameter in ("token", "positions"):
            assert partnets.partitions(model)[parameter].sizes()[0] == model.get_parameter(parameter)[..., :16].numel()
    model, _ = made("mlp", proportions_of="weights")
    assert channels(model[0]) == (16, 18, 20)


class Code(nn.Module):
    """Code between two layers of a network with another, which has channels to divide."""

    def __init__(self, code, *layers, size=32, outputs=None, conv=False):
        super().__init__()
        layer = (lambda *sizes: nn.Conv2d(*sizes, 3, padding=1)) if conv else nn.Linear
        self.before, self.first = layer(3, 12), layer(12, size)
        self.layers, self.last, self.code = nn.ModuleList(layers), layer(outputs or size, 4), code

    def forward(self, x):
        return self.last(self.code(self, self.first(self.before(x).relu())))


class Excitation(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.down, self.up = nn.Conv2d(size, size // 4, 1), nn.Conv2d(size // 4, size, 1)

    def forward(self, x):
        return x * self.up(self.down(x.mean((2, 3), keepdim=True)).relu()).sigmoid()


class TiedSquares(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.a, self.b = nn.Linear(size, size, bias=False), nn.Linear(size, size, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(x).relu())


def heads(model, h, fixed):
    q, k, v = (layer(h).unflatten(-1, (fixed, -1) if fixed else (-1, 8)).transpose(1, 2) for layer in model.layers)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def kept(model, h):
    """Return h times a number that is computed in the first call and kept."""
    vars(model).setdefault("scale", h.shape[-1] ** -0.5)
    return h * model.scale


VECTORS, TOKENS, IMAGES = (4, 3), (2, 5, 3), (2, 3, 4, 4)
NARROW, WHOLE = (16, 24, 32), None
# Code, its layers, options, the shape of its input, and the channels of `first` in subnetworks 1..3.
CODES = {
    "gated by halves": (lambda m, h: F.glu(h, -1), [], {"outputs": 16}, VECTORS, WHOLE),
    "chunks": (lambda m, h: torch.mul(*h.chunk(2, -1)), [], {"outputs": 16}, VECTORS, NARROW),
    "split": (lambda m, h: torch.mul(*h.split(16, -1)), [], {"outputs": 16}, VECTORS, WHOLE),
    "chunks of images": (
        lambda m, h: torch.mul(*h.chunk(2, 1)), [], {"outputs": 16, "conv": True}, IMAGES, NARROW
    ),
    "each channel standardised": (lambda m, h: (h - h.mean(0)) / h.std(0), [], {}, VECTORS, NARROW),
    "reversed": (lambda m, h: h.flip(-1), [], {}, VECTORS, WHOLE),
    "softmax": (lambda m, h: h.softmax(-1), [], {}, VECTORS, WHOLE),
    "mean": (lambda m, h: h * torch.sigmoid(5 * h.mean(-1, keepdim=True)), [], {}, VECTORS, WHOLE),
    "small mean": (lambda m, h: h * (1 + 1e-6 * h.mean(-1, keepdim=True)), [], {}, VECTORS, WHOLE),
    "mean in training": (
        lambda m, h: h / (1 + h.mean(-1, keepdim=True)) if m.training else h, [], {}, VECTORS, WHOLE
    ),
    "largest": (lambda m, h: h * (1 + h.amax(-1, keepdim=True).clamp(max=0)), [], {}, VECTORS, WHOLE),
    "noise in training": (
        lambda m, h: h + 0.1 * torch.randn_like(h) if m.training else h, [], {}, VECTORS, NARROW
    ),
    "number of channels": (lambda m, h: h * h.shape[-1], [], {}, VECTORS, WHOLE),
    "kept number of channels": (kept, [], {}, VECTORS, WHOLE),
    "out_features": (lambda m, h: h * m.first.out_features**0.5, [], {}, VECTORS, WHOLE),
    "num_groups": (
        lambda m, h: m.layers[0](h) / m.layers[0].num_groups, [nn.GroupNorm(4, 32)], {}, VECTORS, WHOLE
    ),
    "eps": (lambda m, h: m.layers[0](h) / (h.std(0) + m.layers[0].eps), [nn.LayerNorm(32)], {}, VECTORS, NARROW),
    "pixel shuffle": (lambda m, h: F.pixel_shuffle(h, 2), [], {"outputs": 8, "conv": True}, IMAGES, WHOLE),
    "channel shuffle": (lambda m, h: F.channel_shuffle(h, 4), [], {"conv": True}, IMAGES, WHOLE),
    "channels last": (
        lambda m, h: m.layers[0](h.permute(0, 2, 3, 1)).permute(0, 3, 1, 2),
        [nn.LayerNorm(32)], {"conv": True}, IMAGES, NARROW,
    ),
    "channels last, flattened": (
        lambda m, h: h.permute(0, 2, 3, 1).flatten(1).unflatten(1, (32, 4, 4)), [], {"conv": True}, IMAGES, WHOLE
    ),
    "excitation": (lambda m, h: m.layers[0](h), [Excitation(32)], {"conv": True}, IMAGES, NARROW),
    "depthwise": (
        lambda m, h: m.layers[0](h), [nn.Conv2d(32, 32, 3, padding=1, groups=32)], {"conv": True}, IMAGES, NARROW
    ),
    "depthwise, twice as many": (
        lambda m, h: m.layers[0](h), [nn.Conv2d(32, 64, 3, padding=1, groups=32)], {"conv": True, "outputs": 64},
        IMAGES, WHOLE,
    ),
    "grouped": (lambda m, h: m.layers[0](h), [nn.Conv2d(32, 32, 1, groups=4)], {"conv": True}, IMAGES, WHOLE),
    "recurrent": (lambda m, h: m.layers[0](h)[0], [nn.RNN(32, 32, batch_first=True)], {}, TOKENS, WHOLE),
    "bilinear": (lambda m, h: m.layers[0](h, h), [nn.Bilinear(32, 32, 32)], {}, VECTORS, WHOLE),
    "frozen": (lambda m, h: m.layers[0](h), [nn.Linear(32, 32).requires_grad_(False)], {}, VECTORS, WHOLE),
    "GroupNorm of 5": (
        lambda m, h: m.layers[0](h), [nn.GroupNorm(5, 40)], {"conv": True, "size": 40}, IMAGES, (24, 32, 40)
    ),
    "GroupNorm of 1": (lambda m, h: m.layers[0](h), [nn.GroupNorm(1, 32)], {"conv": True}, IMAGES, WHOLE),
    "InstanceNorm": (
        lambda m, h: m.layers[0](h), [nn.InstanceNorm2d(32, affine=True)], {"conv": True}, IMAGES, NARROW
    ),
    "LayerNorm without parameters": (
        lambda m, h: m.layers[0](h), [nn.LayerNorm(32, elementwise_affine=False)], {}, VECTORS, NARROW
    ),
    "weight norm": (
        lambda m, h: m.layers[0](h), [nn.utils.parametrizations.weight_norm(nn.Conv2d(32, 32, 1), dim=1)],
        {"conv": True}, IMAGES, WHOLE,
    ),
    "PReLU": (lambda m, h: m.layers[0](h), [nn.PReLU(32)], {"conv": True}, IMAGES, NARROW),
    "MultiheadAttention": (
        lambda m, h: m.layers[0](h, h, h)[0], [nn.MultiheadAttention(32, 4, batch_first=True)], {}, TOKENS, WHOLE
    ),
    "tied, with other channels": (lambda m, h: m.layers[0](h).flip(-1), [TiedSquares(32)], {}, VECTORS, WHOLE),
    "heads of 8": (lambda m, h: heads(m, h, 0), [nn.Linear(32, 32) for _ in range(3)], {}, TOKENS, NARROW),
    "4 heads": (lambda m, h: heads(m, h, 4), [nn.Linear(32, 32) for _ in range(3)], {}, TOKENS, NARROW),
}  # fmt: skip


@pytest.mark.cases(usual=10)
@pytest.mark.parametrize("name", CODES)
def test_code_between_layers_keeps_channels_sliced_or_full(name):
    code, layers, options, shape, expected = CODES[name]
    torch.manual_seed(0)
    model, x = Code(code, *map(copy.deepcopy, layers), **options), torch.randn(shape)
    partnets.partition(model, PROPORTIONS, scheme="nested", example=x)
    assert channels(model.first) == expected and is_narrow(model.before)
    stir(model, 0.1)
    check_alone(model, x)
    if name in ("heads of 8", "4 heads"):
        owners = [state_of(layer).narrow and state_of(layer).narrow.outputs for layer in model.layers]
        assert (owners[0] is None) == (name == "4 heads")
        assert owners[0] is None or all(torch.equal(one, owners[0]) for one in owners)


@pytest.mark.full
@pytest.mark.parametrize("mode", [True, False])
def test_partitioning_keeps_model_example_and_random_state(mode):
    model, x = Residual().train(mode), images()
    before, given, state = copy.deepcopy(model.state_dict()), x.clone(), torch.get_rng_state()
    model.register_forward_pre_hook(lambda module, arguments: arguments[0].mul_(2))
    partnets.partition(model, PROPORTIONS, scheme="nested", example=x)
    assert model.training == model.norm2.training == mode and torch.equal(torch.get_rng_state(), state)
    assert torch.equal(x, given)
    for path, value in before.items():
        assert torch.equal(model.state_dict()[path], value), path


MLP = MODELS["mlp"][0]
LINEARS = [{"outputs": ["0"], "inputs": ["2"]}]


class Reversed(nn.Module):
    def forward(self, x):
        return x.flip(-1)


def on_meta():
    with torch.device("meta"):
        return MLP()


def compiled():
    model = MLP()
    model.forward = torch.compile(model.forward, backend="eager")
    return model


def reversing():
    return nn.Sequential(nn.Linear(5, 8), Reversed(), nn.Linear(8, 2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": lambda: nn.Sequential(MLP(), Reversed()), "channels": [{"outputs": ["0.4"]}]}, "other shapes"),
        ({"model": reversing, "channels": LINEARS}, "code of the model mixes or moves channels"),
        ({"model": lambda: nn.Linear(5, 3)}, "no channels of this Linear can be partitioned"),
        ({"model": on_meta}, "the model is on the meta device"),
        pytest.param({"model": compiled}, "no channels of this Sequential can be partitioned", marks=pytest.mark.full),
        ({"example": None}, "without example"),
        ({"example": torch.randn(2, 7)}, "fails with example: RuntimeError"),
        ({"example": torch.randn(0, 5)}, "without entries"),
        ({"proportions": (0.0, 1.0)}, "subnetwork 1 would have no channels"),
        ({"defaults": "stored"}, "defaults='stored' with scheme='nested'"),
        ({"proportions_of": "rows"}, "pass 'channels' or 'weights'"),
        ({"scheme": "weight"}, "leave them out with 'weight'"),
        ({"scheme": "weight", "example": None, "channels": LINEARS}, "leave them out with 'weight'"),
        ({"scheme": "nest"}, "'weight', 'node' or 'nested'"),
        ({"channels": []}, "no channels of this Sequential can be partitioned"),
        (
            {"channels": [{"outputs": ["0"]}]},
            r"channels\[0\] cannot be partitioned: RuntimeError: mat1 and mat2 shapes",
        ),
        ({"channels": [{"outputs": ["4"]}]}, r"channels\[0\] cannot be partitioned: .* tensors of other shapes"),
        (
            {"channels": [*LINEARS, {"outputs": ["9"]}]},
            r"channels\[1\] cannot be partitioned: '9' is no partitioned layer",
        ),
        ({"channels": [{"outputs": ["1"]}]}, "'1' is no partitioned layer, norm or parameter with outputs"),
        ({"channels": [{"outputs": ["0"], "inputs": ["4"]}]}, ".*mat1"),
        ({"channels": [{"outputs": ["4"], "inputs": ["2"]}]}, "are no multiples of one"),
        ({"channels": [LINEARS[0] | {"block": 3}]}, "20 channels are not several blocks of 3"),
        ({"channels": [LINEARS[0] | {"heads": 3}]}, r"\['heads'\] is unknown; pass 'outputs', 'inputs' and 'block'"),
        ({"channels": LINEARS, "skip": ["0"]}, "'0' is no partitioned layer"),
        ({"channels": LINEARS, "proportions": (0.98, 0.02)}, "partition 1 would have all of them"),
    ],
)
def test_bad_input_is_refused_before_anything_changes(change, message):
    options = {"model": MLP, "proportions": PROPORTIONS, "scheme": "nested", "example": torch.randn(2, 5)} | change
    options["model"] = model = options["model"]()
    with pytest.raises(ValueError, match=message):
        partnets.partition(**options)
    assert not partitioned_modules(model)
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())


def test_weights_that_would_be_divided_by_0_are_refused():
    directions = nn.utils.parametrizations.weight_norm(nn.Conv1d(64, 64, 3, padding=1, groups=64))
    model = nn.Sequential(nn.Conv1d(3, 64, 1), directions, nn.ReLU(), nn.Conv1d(64, 8, 1), nn.Conv1d(8, 2, 1))
    x = torch.randn(2, 3, 20)
    before = model(x)
    for options in ({"scheme": "nested", "example": x}, {"defaults": "zero"}):
        with pytest.raises(ValueError, match=r"1\.parametrizations\.weight makes a weight that is not finite"):
            partnets.partition(model, (0.1, 0.1, 0.8), **options)
    assert torch.equal(model(x), before)
    partnets.partition(model, (0.1, 0.1, 0.8))


@dataclasses.dataclass(slots=True)
class Out:
    logits: torch.Tensor


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


OUTPUTS = {
    "detached": lambda y, training: y.detach(),
    "dataclass": lambda y, training: Out(y),
    "distribution": lambda y, training: torch.distributions.Categorical(logits=y),
    "argmax in evaluation": lambda y, training: y if training else y.argmax(-1),
    "complex": lambda y, training: torch.fft.fft(y),
    "dict of lists": lambda y, training: {"a": [y]},
    "argmax": lambda y, training: y.argmax(-1),
    "NumPy": lambda y, training: y.detach().numpy(),
    "numbers": lambda y, training: y.tolist(),
}


@pytest.mark.cases(usual=4)
@pytest.mark.parametrize("examples", [1, 4])
@pytest.mark.parametrize("how", OUTPUTS)
def test_output_layers_keep_all_channels_in_any_output_structure(how, examples):
    """Include a batch of one example, for which batch norm fails in training."""
    model = partnets.partition(Cascade(OUTPUTS[how]), PROPORTIONS, scheme="nested", example=torch.randn(examples, 5))
    assert width(model.b, 1) is None and width(model.auxiliary, 1) is None
    assert channels(model.a) == (8, 12, 16)


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.long, self.last = nn.Linear(5, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x, is_long=False):
        h = torch.relu(self.first(x))
        return self.last(h + self.long(h) if is_long else h)


def test_layers_that_the_example_does_not_use_warn_and_raise_if_called():
    x = torch.randn(4, 5)
    with warnings.catch_warnings(action="error"):
        model = partnets.partition(Branching(), PROPORTIONS, scheme="nested", example=(x, True))
    check_alone(model, x)
    with pytest.warns(UserWarning, match=r"does not use long, .*example that uses all"):
        model = partnets.partition(Branching(), PROPORTIONS, scheme="nested", example=x)
    check_alone(model, x)
    with partnets.subnetwork(model, 1), pytest.raises(RuntimeError, match=r"size|shape"):
        model(x, True)


def test_partitions_without_a_channel_warn():
    network = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 3))
    with pytest.warns(UserWarning, match=r"partition 3 of proportions \(0.98, 0.01, 0.01\) has no channel"):
        partnets.partition(network, (0.98, 0.01, 0.01), scheme="nested", example=torch.randn(2, 5))


@pytest.mark.cases(usual=1)
@pytest.mark.parametrize("kind", [nn.Linear, type("OwnLinear", (nn.Linear,), {})])
def test_keeping_trained_weights_warns(kind):
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


def test_one_partition_is_all_of_the_network():
    network = MLP()
    before = copy.deepcopy(network.state_dict())
    model = partnets.partition(network, (1.0,), scheme="nested", example=torch.randn(2, 5))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_checkpoint_of_another_scheme_is_refused_both_ways():
    def model(**options):
        return partnets.partition(MLP(), options.pop("proportions", PROPORTIONS), **options)

    nested = {"scheme": "nested", "example": torch.randn(2, 5)}
    ours, random = model(**nested), model(scheme="weight")
    ours.load_state_dict(pickle.loads(pickle.dumps(model(**nested))).state_dict())
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


class OfGraph(nn.Module):
    def __init__(self, adjacency=None):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 32), nn.BatchNorm1d(32), nn.Linear(32, 3)
        self.register_buffer("adjacency", adjacency)

    def forward(self, x, adjacency=None):
        adjacency = self.adjacency if adjacency is None else adjacency
        return self.last(torch.sparse.mm(adjacency, self.norm(self.first(x)).relu()))


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_tensors_are_given_and_kept(kept):
    x, adjacency = torch.randn(6, 5), (torch.rand(6, 6) < 0.5).float().to_sparse(layout=torch.sparse_csr)
    given = (x,) if kept else (x, adjacency)
    model = OfGraph(adjacency if kept else None)
    partnets.partition(model, PROPORTIONS, scheme="nested", example=given)
    assert not model.norm.running_mean.any() and is_narrow(model.first)
    with partnets.subnetwork(model, 1, update=1):
        assert model(*given).shape == (6, 3)


@pytest.mark.cases(usual=1)
@pytest.mark.parametrize("scheme", ["nested", "weight"])
def test_merged_layers_know_nothing_of_partitions(scheme):
    """Check that merged layers have no attributes of partitions, which would persist when partitioned again."""
    model, x = Residual(), images()
    before = {path: {*vars(module)} for path, module in model.named_modules()}
    partnets.partition(model, PROPORTIONS, scheme=scheme, **({"example": x} if scheme == "nested" else {}))
    for merged in (partnets.merge(model), partnets.finalize(model, "finetune")):
        assert {path: {*vars(module)} for path, module in merged.named_modules()} == before
        again = partnets.partition(merged, PROPORTIONS, defaults="stored")
        with partnets.subnetwork(again, 3):
            assert again(x).isfinite().all()


@pytest.mark.full
def test_compiled_models_and_inference_mode_make_the_same():
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
