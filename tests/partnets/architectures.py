"""Architectures of timm, torchvision and transformers, with random weights, and the checks that each must pass."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator

import cpu_torchvision  # noqa: F401 - before torchvision
import timm
import torch
import torchvision.models as vision
import transformers
from layers import spoil
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import partnets
from partnets.subnetworks.parameters import partitioned_parameters
from partnets.subnetworks.state import ESTIMATED, LEARNED, ROWS, partitioned_modules, state_of

PROPORTIONS = (0.5, 0.3, 0.2)
LAST = len(PROPORTIONS)
# The merged model's output may differ by this much, relative to the largest number in it, or by twice the merged
# model's rounding error (float32 against float64) if that is larger.
TOLERANCE = 1e-5

SMALL = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 99,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
IMAGES = {"image_size": 32, "patch_size": 8}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 99, "bos_token_id": 1}
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "vocab_size": 99}
LEVIT = {
    "hidden_sizes": [16, 16, 16], "num_attention_heads": [2, 2, 2], "depths": [1, 1, 1], "key_dim": [8, 8, 8],
    "image_size": 64, "down_ops": [["Subsample", 8, 2, 4, 2, 2], ["Subsample", 8, 2, 4, 2, 2]],
}  # fmt: skip
MAMBA = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 99, "state_size": 8}
IDS = {"input_ids": torch.arange(1, 15).view(2, 7)}
PAIR = IDS | {"decoder_input_ids": IDS["input_ids"]}


def image(size: int, name: str = "x") -> dict[str, Tensor]:
    return {name: torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))}


def of_timm(name: str) -> Callable[[], nn.Module]:
    return lambda: timm.create_model(name)


def of_transformers(kind: str, auto: str, **settings) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        config = transformers.AutoConfig.for_model(kind, **copy.deepcopy(settings))
        return getattr(transformers, auto).from_config(config)

    return make


def swin() -> nn.Module:
    return vision.SwinTransformer([4, 4], 32, [2, 2], [2, 4], [4, 4], num_classes=10)


CAUSAL, MASKED, CLASSES = "AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForImageClassification"
# How to make each architecture, its arguments, and the minimal share of its weights that nested channels narrow. These
# are the twelve that people use most; T5 and CLIP return hidden states of all channels.
ARCHITECTURES = {
    "ResNet": (vision.resnet18, image(64), 1.0),
    "MobileNetV3": (vision.mobilenet_v3_small, image(64), 1.0),
    "EfficientNet": (of_timm("test_efficientnet"), image(64), 1.0),
    "ConvNeXt": (of_timm("test_convnext"), image(64), 1.0),
    "DenseNet": (lambda: vision.DenseNet(8, (2, 2), 16), image(64), 1.0),
    "ViT": (of_timm("test_vit"), image(160), 1.0),
    "Swin": (swin, image(32), 0.3),
    "GPT-2": (of_transformers("gpt2", CAUSAL, **GPT2), IDS, 1.0),
    "BERT": (of_transformers("bert", MASKED, **SMALL), IDS, 1.0),
    "Llama": (of_transformers("llama", CAUSAL, num_key_value_heads=2, **SMALL), IDS, 1.0),
    "T5": (of_transformers("t5", "AutoModelForSeq2SeqLM", decoder_start_token_id=0, **T5), PAIR, 0.2),
    "CLIP": (of_transformers("clip_vision_model", "AutoModel", **SMALL, **IMAGES), image(32, "pixel_values"), 0.8),
}
# These once needed a special case, and are partitioned at random only.
OTHERS = {
    "NFNet": (of_timm("test_nfnet"), image(64)),  # weights are standardised in forward
    "EfficientViM": (of_timm("efficientvim_m1"), image(64)),  # a parameter is called A
    "SqueezeNet": (vision.squeezenet1_1, image(64)),  # convolutions with concatenated outputs
    "ALBERT": (of_transformers("albert", MASKED, embedding_size=16, **SMALL), IDS),  # a layer is called several times
    "BEiT": (  # a parent reads its child's table of biases
        of_transformers("beit", CLASSES, use_relative_position_bias=True, **SMALL, **IMAGES),
        image(32, "pixel_values"),
    ),
    "LeViT": (of_transformers("levit", "AutoModel", **LEVIT), image(64, "pixel_values")),  # keeps biases between passes
    "Mamba": (of_transformers("mamba", CAUSAL, **MAMBA), IDS),  # modules have direct parameters
}


class Failed(Exception):
    """A failed check of an architecture."""


def attempt(model: nn.Module, given: dict, **options) -> None:
    """Partition, train one step of w_C and one of w_1, merge, poison later partitions; raise Failed if a check fails.

    - A step of w_3 and a step of w_1 change no parameter or buffer of other partitions.
    - Subnetworks 3 and 1 and their merged models have the same outputs.
    - NaN in partitions 2 and 3 does not change a bit of the output of subnetwork 1.
    """
    partnets.partition(model, PROPORTIONS, **options)
    optimizer = partnets.optim.SGD(model, lr=1e-3)
    output(model, given)  # some models create tables for the size of their first input
    for k in (LAST, 1):
        before = {name: values.clone() for name, values, _ in divided(model, k)}
        model.train()
        loss = partnets.step_weights(model, optimizer, k, given, lambda given: size(model(**given)))
        if not loss.isfinite():
            raise Failed(f"the loss of a step of w_{k} is {loss.item()}")
        for name, values, owned in divided(model, k):
            changed = values != before[name]
            if (changed if owned is None else changed & ~owned).any():
                raise Failed(f"a step of w_{k} changes {name.strip('.')}, which partition {k} does not own")
    optimizer.zero_grad()
    outputs = {k: output(model, given, k) for k in (LAST, 1)}
    for k, expected in outputs.items():
        if not all(part.isfinite().all() for part in expected):
            raise Failed(f"after two steps the output of subnetwork {k} is not finite")
        merged = partnets.merge(model, k)
        computed = output(merged, given)
        if not (error := difference(computed, expected)) <= TOLERANCE and not error <= 2 * rounding(merged, given):
            raise Failed(f"merged subnetwork {k} differs by {error:.0e}")
    if not all(map(torch.equal, output(spoil(model, 1), given, 1), outputs[1])):
        raise Failed("subnetwork 1 reads weights of later partitions")


def size(output: object) -> Tensor:
    """Return a loss for any output."""
    return sum(leaf.float().square().mean() for leaf in numbers(output))


def numbers(output: object) -> list[Tensor]:
    output = dict(output) if isinstance(output, dict) else output  # of transformers
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


@torch.no_grad()
def output(model: nn.Module, given: dict, active: int | None = None) -> list[Tensor]:
    torch.manual_seed(0)  # some models draw masks
    model.eval()
    with partnets.subnetwork(model, active) if active else contextlib.nullcontext():
        return numbers(model(**given))


def rounding(model: nn.Module, given: dict) -> float:
    """Return the relative difference between a model's outputs in float32 and in float64."""
    double = tree_map(lambda leaf: leaf.double() if torch.is_floating_point(leaf) else leaf, given)
    return difference(output(model, given), output(copy.deepcopy(model).double(), double))


def difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Return the largest difference of an output, relative to the largest number in it."""
    pairs = zip(ours, theirs, strict=True)
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) for a, b in pairs)


def divided(model: nn.Module, k: int) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """Yield name, values and mask of partition k for each parameter and buffer; the mask is None if k owns nothing."""
    paths = {module: path for path, module in model.named_modules()}
    rows = torch.arange(1, LAST + 1) == k
    seen = set()
    for one in partitioned_parameters(model):
        values = one.stored.detach()
        owned = rows.view(-1, *[1] * (values.dim() - 1)) if one.partition is None else one.partition.mask(k)
        seen |= {id(one.stored), id(one.parameter)}
        yield f"{paths[one.module]}.{one.name}", values, owned
    for module in partitioned_modules(model):
        for name in state_of(module).statistics:
            # Outside of subnetworks the buffer itself has the statistics of the last one.
            *earlier, _ = buffers = module.get_buffer(name + ROWS)
            for j, values in enumerate((*earlier, module.get_buffer(name)), 1):
                yield f"{paths[module]}.{name} of {j}", values, torch.tensor(j == k)
            seen |= {id(module.get_buffer(name)), id(buffers)}
    for path, buffer in model.named_buffers():
        if id(buffer) not in seen and not path.endswith((ESTIMATED, LEARNED)):
            yield path, buffer, None
