"""scheme='nested' with the architectures that people use most, and with what their layers do to channels."""

from __future__ import annotations

import copy
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from layers import spoil
from torch import nn
from torch.utils._pytree import tree_leaves

if torch.version.cuda is None:  # see the tests' conftest.py
    sys.modules.setdefault("torchvision._meta_registrations", types.ModuleType("torchvision._meta_registrations"))

import timm
import torchvision.models as vision
import transformers

import partnets
from partnets.subnetworks.parameters import partitioned_parameters
from partnets.subnetworks.state import ROWS, partitioned_modules, state_of
from partnets.subnetworks.switch import noted

PROPORTIONS = (0.6, 0.2, 0.2)
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def vgg():
    model = vision.VGG(vision.vgg.make_layers([16, "M", 32, "M", 32, 32, "M"], batch_norm=True), init_weights=False)
    model.classifier = nn.Sequential(nn.Linear(32 * 49, 64), nn.ReLU(), nn.Dropout(), nn.Linear(64, 10))
    return model


def whisper():
    layers = {f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in (("layers", 1), ("ffn_dim", 96))}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    sizes = {"num_mel_bins": 8, "d_model": 64, "max_source_positions": 20, "max_target_positions": 20}
    return transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(vocab_size=64, decoder_start_token_id=1, **layers, **heads, **sizes, **ENDS)
    )


def t5():
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=64, **sizes))


def gpt2():
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=64, **sizes, **ENDS))


def distilbert():
    sizes = {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 96}
    return transformers.DistilBertForMaskedLM(transformers.DistilBertConfig(vocab_size=64, **sizes))


def image(size=64):
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))


def ids():
    return torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(1))


# How to make each architecture, what it takes, and how many of its partitioned weights are narrow at least.
ARCHITECTURES = {
    "ResNet-18": (vision.resnet18, lambda: {"x": image()}, 1.0),
    "MobileNetV3": (vision.mobilenet_v3_small, lambda: {"x": image()}, 1.0),
    "EfficientNet": (lambda: timm.create_model("test_efficientnet"), lambda: {"x": image()}, 1.0),
    "ConvNeXt": (lambda: timm.create_model("test_convnext"), lambda: {"x": image()}, 1.0),
    "VGG": (vgg, lambda: {"x": image(32)}, 1.0),
    "DenseNet": (lambda: vision.DenseNet(8, (2, 2), 16), lambda: {"x": image()}, 1.0),
    "ViT": (lambda: timm.create_model("test_vit"), lambda: {"x": image(160)}, 1.0),
    "GPT-2": (gpt2, lambda: {"input_ids": ids()}, 1.0),
    "BERT": (
        lambda: transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=64, **SIZES)),
        lambda: {"input_ids": ids(), "attention_mask": (torch.arange(9) < torch.tensor([[9], [6]])).long()},
        1.0,
    ),
    "DistilBERT": (distilbert, lambda: {"input_ids": ids()}, 0.8),
    "Llama": (
        lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(vocab_size=64, num_key_value_heads=4, **SIZES, **ENDS)
        ),
        lambda: {"input_ids": ids()},
        1.0,
    ),
    # These return hidden states of all channels.
    "T5": (t5, lambda: {"input_ids": ids(), "decoder_input_ids": ids()}, 0.2),
    "Whisper": (whisper, lambda: {"input_features": torch.randn(2, 8, 40), "decoder_input_ids": ids()}, 0.2),
    "CLIP": (
        lambda: transformers.CLIPVisionModel(transformers.CLIPVisionConfig(image_size=32, patch_size=8, **SIZES)),
        lambda: {"pixel_values": image(32)},
        0.8,
    ),
}  # fmt: skip


@torch.no_grad()
def outputs(model, given):
    found = model(**given) if isinstance(given, dict) else model(given)
    return [leaf for leaf in tree_leaves(dict(found) if isinstance(found, dict) else found) if torch.is_tensor(leaf)]


@torch.no_grad()
def stir(model):
    """Change all values of all partitions; some are 0 initially."""
    for one in partitioned_parameters(model):
        one.stored.add_(0.02 * torch.randn_like(one.stored))
        one.combine()
    noted(partitioned_parameters(model))
    for module in partitioned_modules(model):
        for name in state_of(module).statistics:
            if name == "running_mean":
                module.get_buffer(name).normal_(std=0.1)
                module.get_buffer(name + ROWS).normal_(std=0.1)


def check(model, given):
    """Check that subnetworks read nothing of later partitions, and are what their merged, narrow networks are."""
    model.eval()
    stir(model)
    sizes = []
    for k in (1, 2, 3):
        merged = partnets.merge(model, k)
        with partnets.subnetwork(model, k):
            expected = outputs(model, given)
        for ours, theirs in zip(outputs(merged, given), expected, strict=True):
            assert ours.isfinite().all()
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))
        if k < 3:
            with partnets.subnetwork(spoiled := spoil(copy.deepcopy(model), k), k):
                assert all(map(torch.equal, outputs(spoiled, given), expected))
        sizes.append(sum(parameter.numel() for parameter in merged.parameters()))
    assert sizes[0] < sizes[1] < sizes[2]


def narrow_weights(model):
    weights = [one for one in partitioned_parameters(model) if one.partition is not None and one.parameter.dim() > 1]
    return [
        state_of(one.module).narrow is not None and one.name in state_of(one.module).narrow.owners for one in weights
    ]


@pytest.mark.cases(usual=4)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_subnetworks_of_an_architecture_are_narrow_networks(name):
    make, given, share = ARCHITECTURES[name]
    torch.manual_seed(0)
    model, given = make(), given()
    partnets.partition(model, PROPORTIONS, scheme="nested", example=given)
    narrow = narrow_weights(model)
    assert sum(narrow) >= share * len(narrow)
    check(model, given)


def test_gpt2_keeps_its_transposed_weights_and_tied_embeddings():
    model = gpt2()
    partnets.partition(model, PROPORTIONS, scheme="nested", example={"input_ids": ids()}, defaults="zero")
    merged = partnets.merge(model, 1)
    assert merged.lm_head.weight is merged.transformer.wte.weight and merged.lm_head.weight.shape == (64, 32)
    block = merged.transformer.h[0]
    assert block.mlp.c_fc.weight.shape == (32, 160) == (block.mlp.c_fc.nx, block.mlp.c_fc.nf)
    assert block.mlp.c_proj.weight.shape == (160, 32)


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


def heads(model, h, fixed):
    q, k, v = (layer(h).unflatten(-1, (fixed, -1) if fixed else (-1, 8)).transpose(1, 2) for layer in model.layers)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


VECTORS, TOKENS = (4, 3), (2, 5, 3)
# Code, its layers, the shape of its input, and the channels of `first` in subnetworks 1..3; None if they are whole.
CODES = {
    "gated by halves": (lambda m, h: F.glu(h, -1), [], {"outputs": 16}, VECTORS, None),
    "chunks": (lambda m, h: torch.mul(*h.chunk(2, -1)), [], {"outputs": 16}, VECTORS, (16, 24, 32)),
    "split": (lambda m, h: torch.mul(*h.split(16, -1)), [], {"outputs": 16}, VECTORS, None),
    "chunks of images": (
        lambda m, h: torch.mul(*h.chunk(2, 1)), [], {"outputs": 16, "conv": True}, (2, 3, 4, 4), (16, 24, 32)
    ),
    "reversed": (lambda m, h: h.flip(-1), [], {}, VECTORS, None),
    "softmax": (lambda m, h: h.softmax(-1), [], {}, VECTORS, None),
    "pixel shuffle": (lambda m, h: F.pixel_shuffle(h, 2), [], {"outputs": 8, "conv": True}, (2, 3, 4, 4), None),
    "channel shuffle": (lambda m, h: F.channel_shuffle(h, 4), [], {"conv": True}, (2, 3, 4, 4), None),
    "channels last": (
        lambda m, h: m.layers[0](h.permute(0, 2, 3, 1)).permute(0, 3, 1, 2),
        [nn.LayerNorm(32)], {"conv": True}, (2, 3, 4, 4), (16, 24, 32),
    ),
    "channels last, flattened": (
        lambda m, h: h.permute(0, 2, 3, 1).flatten(1).unflatten(1, (32, 4, 4)), [], {"conv": True}, (2, 3, 4, 4), None
    ),
    "excitation": (lambda m, h: m.layers[0](h), [Excitation(32)], {"conv": True}, (2, 3, 4, 4), (16, 24, 32)),
    "depthwise": (
        lambda m, h: m.layers[0](h), [nn.Conv2d(32, 32, 3, padding=1, groups=32)], {"conv": True}, (2, 3, 4, 4),
        (16, 24, 32),
    ),
    "depthwise, twice as many": (
        lambda m, h: m.layers[0](h), [nn.Conv2d(32, 64, 3, padding=1, groups=32)], {"conv": True, "outputs": 64},
        (2, 3, 4, 4), None,
    ),
    "grouped": (lambda m, h: m.layers[0](h), [nn.Conv2d(32, 32, 1, groups=4)], {"conv": True}, (2, 3, 4, 4), None),
    "GroupNorm of 5": (
        lambda m, h: m.layers[0](h), [nn.GroupNorm(5, 40)], {"conv": True, "size": 40}, (2, 3, 4, 4), (24, 32, 40)
    ),
    "GroupNorm of 1": (lambda m, h: m.layers[0](h), [nn.GroupNorm(1, 32)], {"conv": True}, (2, 3, 4, 4), None),
    "InstanceNorm": (
        lambda m, h: m.layers[0](h), [nn.InstanceNorm2d(32, affine=True)], {"conv": True}, (2, 3, 4, 4), (16, 24, 32)
    ),
    "PReLU": (lambda m, h: m.layers[0](h), [nn.PReLU(32)], {"conv": True}, (2, 3, 4, 4), (16, 24, 32)),
    "MultiheadAttention": (
        lambda m, h: m.layers[0](h, h, h)[0], [nn.MultiheadAttention(32, 4, batch_first=True)], {}, TOKENS, None
    ),
    "heads of 8": (lambda m, h: heads(m, h, 0), [nn.Linear(32, 32) for _ in range(3)], {}, TOKENS, (16, 24, 32)),
    "4 heads": (lambda m, h: heads(m, h, 4), [nn.Linear(32, 32) for _ in range(3)], {}, TOKENS, (16, 24, 32)),
}  # fmt: skip


@pytest.mark.cases(usual=8)
@pytest.mark.parametrize("name", CODES)
def test_code_between_layers_leaves_channels_narrow_or_whole(name):
    code, layers, options, shape, expected = CODES[name]
    torch.manual_seed(0)
    model, x = Code(code, *map(copy.deepcopy, layers), **options), torch.randn(shape)
    partnets.partition(model, PROPORTIONS, scheme="nested", example=x)
    narrow = state_of(model.first).narrow
    owners = None if narrow is None or narrow.outputs is None else narrow.outputs
    assert expected == (owners if owners is None else tuple(int((owners <= k).sum()) for k in (1, 2, 3)))
    check(model, x)
    if name in ("heads of 8", "4 heads"):
        owners = [state_of(layer).narrow and state_of(layer).narrow.outputs for layer in model.layers]
        assert (owners[0] is None) == (name == "4 heads")
        assert owners[0] is None or all(torch.equal(one, owners[0]) for one in owners)


@pytest.mark.full
def test_a_model_whose_channels_cannot_be_followed_is_refused_in_seconds():
    model = vision.swin_t(weights=None)
    with pytest.raises(ValueError, match=r"cannot follow this SwinTransformer.*scheme='weight'"):
        partnets.partition(model, PROPORTIONS, scheme="nested", example=torch.randn(1, 3, 64, 64))
