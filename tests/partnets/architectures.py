"""Architectures of timm, torchvision and transformers, each partitioned, trained for two steps and merged.

    python tests/partnets/architectures.py > docs/models.md

generates the page in half an hour. All weights are random; nothing is downloaded. Pass names of families to try only
these. tests/partnets/nn/test_architectures.py checks the page.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import math
import sys
import time
import types
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

if torch.version.cuda is None:  # see the tests' conftest.py
    sys.modules.setdefault("torchvision._meta_registrations", types.ModuleType("torchvision._meta_registrations"))

import timm
import torchvision
import transformers
from timm.models import _registry

import partnets
from partnets.subnetworks.parameters import partitioned_parameters
from partnets.subnetworks.state import ESTIMATED, LEARNED, ROWS, partitioned_modules, state_of
from partnets.subnetworks.switch import noted

PROPORTIONS = (0.5, 0.3, 0.2)
LAST = len(PROPORTIONS)
# The merged model's output may differ by this much, relative to the largest number in it, or by twice the merged
# model's rounding error (float32 against float64) if that is larger.
TOLERANCE = 1e-5
# Image sizes to try before a model's default size.
SIZES = (64, 128)


@dataclass(frozen=True)
class Architecture:
    """An architecture to try.

    Attributes:
        library, family, name: the library and the names of the family and the model in it.
        make: a function that returns the dense model with random weights.
        given: candidates for keyword arguments of its forward; the first that it accepts is used.
    """

    library: str
    family: str
    name: str
    make: Callable[[], nn.Module]
    given: list[dict] = field(repr=False)

    def accepted(self) -> tuple[nn.Module, dict]:
        """Return the model with reproducible weights, and arguments that it accepts."""
        torch.manual_seed(0)
        for given in self.given[:-1]:
            model = self.make()
            with contextlib.suppress(Exception), torch.no_grad():
                model.train()(**given)
                return self.make(), given
        return self.make(), self.given[-1]


class Failed(Exception):
    """A failed check of a trial."""


def trial(architecture: Architecture) -> str | None:
    """Partition, train one step of w_C and one of w_1, and merge; return the failure, or None."""
    return outcome(lambda: attempt(*architecture.accepted()))


def skipped(model: nn.Module, given: dict) -> float:
    """Return subnetwork 1's skipped multiply-adds, divided by those skipped if all layers had only active channels."""
    return (1 - multiply_adds(model, given, 1) / multiply_adds(model, given)) / (1 - PROPORTIONS[0] ** 2)


def multiply_adds(model: nn.Module, given: dict, active: int | None = None) -> int:
    """Return the multiply-adds of the products in a forward pass."""
    with FlopCounterMode(display=False) as counter:
        output(model, given, active)
    return counter.get_total_flops()


def outcome(trial: Callable[[], None]) -> str | None:
    """Return the failure of a trial as text, or None."""
    try:
        trial()
    except Failed as failure:
        return str(failure)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None


def attempt(model: nn.Module, given: dict, scheme: str = "weight") -> None:
    """Run a trial of this model; raise Failed if a check fails."""
    options = {"scheme": scheme, "example": given} if scheme == "nested" else {"defaults": "seed"}
    try:
        partnets.partition(model, PROPORTIONS, **options)
    except ValueError as error:
        lines = str(error).splitlines()
        raise Failed("refused: " + "; ".join(line.strip() for line in lines[1:-1] or lines)) from error
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
    del before
    outputs = {k: output(model, given, k) for k in (LAST, 1)}
    for k, expected in outputs.items():
        if not all(part.isfinite().all() for part in expected):
            raise Failed(f"after two steps the output of subnetwork {k} is not finite")
        merged = partnets.merge(model, k)
        computed = output(merged, given)
        if not (error := difference(computed, expected)) <= TOLERANCE and not error <= 2 * rounding(merged, given):
            raise Failed(f"merged subnetwork {k} differs by {error:.0e}")
    with torch.no_grad():
        for _, values, owned in divided(model, 1):
            if owned is not None and values.is_floating_point():
                values.masked_fill_(~owned, math.nan)
        for one in partitioned_parameters(model):
            one.combine()
        noted(partitioned_parameters(model))
    if not all(map(torch.equal, output(model, given, 1), outputs[1])):
        raise Failed("subnetwork 1 reads weights of later partitions")


def size(output: object) -> Tensor:
    """Return a loss for any output."""
    return sum(leaf.float().square().mean() for leaf in numbers(output))


def numbers(output: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(plain(output)) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def plain(output: object) -> object:
    """Convert transformers' outputs and caches to dicts."""
    return dict(output) if isinstance(output, dict) else output


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


# Architectures to try -------------------------------------------------------------------------------------------------


def images(size: int, name: str, channels: int = 3) -> dict:
    return {name: torch.randn(2, channels, size, size, generator=torch.Generator().manual_seed(0))}


def of_timm(only: Collection[str] = ()) -> Iterator[Architecture]:
    """Yield the model with the fewest parameters of each family (file of models) of timm, or of the given families."""
    for family, names in sorted(_registry._module_to_models.items()):
        if only and family not in only:
            continue
        names = names - _registry._deprecated_models.keys()  # some no longer exist
        yield in_timm(family, min(sorted(names), key=lambda name: parameters(lambda: timm.create_model(name))))


# Families with only large variants: use two blocks.
LARGE = {"deepseek_vit": {"depth": 2}, "gemma4_vit": {"depth": 2}}


def in_timm(family: str, name: str) -> Architecture:
    channels, *_, own = timm.get_pretrained_cfg(name).input_size if timm.get_pretrained_cfg(name) else (3, 224)
    given = [images(size, "x", channels) for size in (*(size for size in SIZES if size < own), own)]
    return Architecture("timm", family, name, lambda: timm.create_model(name, **LARGE.get(family, {})), given)


def of_torchvision(only: Collection[str] = ()) -> Iterator[Architecture]:
    """Yield the model with the fewest parameters of each family of torchvision, or of the given families."""
    families = {}
    for module in (torchvision.models, torchvision.models.segmentation):
        for name in torchvision.models.list_models(module=module):
            family = torchvision.models.get_model_builder(name).__module__.removeprefix("torchvision.models.")
            if not only or family in only:
                families.setdefault(family, []).append(name)
    for family, names in sorted(families.items()):
        yield in_torchvision(family, min(names, key=lambda name: parameters(lambda: bare(name))))


def in_torchvision(family: str, name: str) -> Architecture:
    if family.startswith("segmentation"):
        given = [images(SIZES[0], name) for name in ("x", "input")]
    else:
        given = [images(size, "x") for size in (*SIZES, 224, 299)]
    return Architecture("torchvision", family, name, lambda: bare(name), given)


def bare(name: str) -> nn.Module:
    """Return torchvision's model without downloaded weights."""
    options = {"weights": None}
    if "segmentation" in torchvision.models.get_model_builder(name).__module__:
        options["weights_backbone"] = None
    return torchvision.models.get_model(name, **options)


def parameters(make: Callable[[], nn.Module]) -> int:
    """Return a model's number of parameters, creating it on the meta device if it supports that."""
    try:
        with torch.device("meta"):
            model = make()
    except (NotImplementedError, RuntimeError, TypeError):
        model = make()
    return sum(parameter.numel() for parameter in model.parameters())


SMALL = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 99,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 8}
BART = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": 99, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 99}
T5 |= {"decoder_start_token_id": 0, "pad_token_id": 0}
VIT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
VIT |= {"image_size": 32, "patch_size": 8}
STAGES = {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4, "image_size": 32, "patch_size": 4}
SOUND = {**SMALL, "conv_dim": (16, 16), "conv_kernel": (3, 3), "conv_stride": (2, 2), "num_feat_extract_layers": 2}
SOUND |= {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}

IDS = torch.arange(1, 15).view(2, 7)
TEXT, PAIR = [{"input_ids": IDS}], [{"input_ids": IDS, "decoder_input_ids": IDS}]
WAVE = [{"input_values": torch.randn(2, 400, generator=torch.Generator().manual_seed(0))}]
CAUSAL, MASKED, SEQUENCES = "AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM"
CLASSES, WHOLE = "AutoModelForImageClassification", "AutoModel"
PIXELS = [images(32, "pixel_values")]
# The settings of a small model of each type, its auto class, and its arguments.
TRANSFORMERS = {
    "albert": (SMALL | {"embedding_size": 16}, MASKED, TEXT),
    "bart": (BART, SEQUENCES, PAIR),
    "beit": (VIT | {"use_relative_position_bias": True}, CLASSES, PIXELS),
    "bert": (SMALL, MASKED, TEXT),
    "big_bird": (SMALL | {"attention_type": "original_full"}, MASKED, TEXT),
    "blip": ({"text_config": SMALL, "vision_config": VIT, "projection_dim": 16}, WHOLE, [TEXT[0] | PIXELS[0]]),
    "bloom": ({"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99}, CAUSAL, TEXT),
    "clip": ({"text_config": SMALL, "vision_config": VIT, "projection_dim": 16}, WHOLE, [TEXT[0] | PIXELS[0]]),
    "cohere": (GROUPED, CAUSAL, TEXT),
    "convnext": ({"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}, CLASSES, PIXELS),
    "convnextv2": ({"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}, CLASSES, PIXELS),
    "cvt": ({}, CLASSES, [images(64, "pixel_values")]),
    "data2vec-vision": (VIT, CLASSES, PIXELS),
    "deberta": (SMALL, MASKED, TEXT),
    "deberta-v2": (SMALL, MASKED, TEXT),
    "deit": (VIT, WHOLE, PIXELS),
    "dinov2": (VIT, CLASSES, PIXELS),
    "distilbert": ({"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "vocab_size": 99}, MASKED, TEXT),
    "electra": (SMALL | {"embedding_size": 16}, MASKED, TEXT),
    "ernie": (SMALL, MASKED, TEXT),
    "falcon": (SMALL, CAUSAL, TEXT),
    "focalnet": ({"embed_dim": 16, "depths": [1, 1], "focal_levels": [2, 2], "focal_windows": [3, 3], "image_size":
     32, "hidden_sizes": [16, 32]}, CLASSES, PIXELS),
    "gemma": (GROUPED, CAUSAL, TEXT),
    "gemma2": (GROUPED, CAUSAL, TEXT),
    "gemma3_text": (GROUPED, CAUSAL, TEXT),
    "gpt2": ({"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99, "n_positions": 64}, CAUSAL, TEXT),
    "gpt_neo": ({**SMALL, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}, CAUSAL,
     TEXT),
    "gpt_neox": (SMALL, CAUSAL, TEXT),
    "gptj": ({"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99, "rotary_dim": 4}, CAUSAL, TEXT),
    "granite": (GROUPED, CAUSAL, TEXT),
    "hubert": (SOUND, WHOLE, WAVE),
    "levit": ({"hidden_sizes": [16, 16, 16], "num_attention_heads": [2, 2, 2], "depths": [1, 1, 1], "key_dim": [8,
     8, 8], "image_size": 64, "down_ops": [["Subsample", 8, 2, 4, 2, 2], ["Subsample", 8, 2, 4, 2, 2]]}, WHOLE,
     [images(64, "pixel_values")]),
    "llama": (GROUPED, CAUSAL, TEXT),
    "mamba": ({"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 99, "state_size": 8}, CAUSAL, TEXT),
    "mamba2": ({"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 99, "state_size": 8, "num_heads": 8,
     "head_dim": 8, "n_groups": 1, "chunk_size": 4}, CAUSAL, TEXT),
    "marian": (BART | {"decoder_start_token_id": 0}, SEQUENCES, PAIR),
    "mbart": (BART, SEQUENCES, PAIR),
    "mistral": (GROUPED, CAUSAL, TEXT),
    "mixtral": (GROUPED | {"num_local_experts": 4}, CAUSAL, TEXT),
    "mobilebert": (SMALL | {"embedding_size": 16, "intra_bottleneck_size": 16, "hidden_size": 32,
     "true_hidden_size": 16}, MASKED, TEXT),
    "mobilenet_v2": ({"depth_multiplier": 0.35}, CLASSES, PIXELS),
    "mobilevit": ({"hidden_sizes": [16, 16, 16], "neck_hidden_sizes": [8, 8, 8, 16, 16, 16, 16], "image_size": 64},
     CLASSES, [images(64, "pixel_values")]),
    "modernbert": (SMALL | {"cls_token_id": 1, "sep_token_id": 2}, MASKED, TEXT),
    "mpnet": (SMALL, MASKED, TEXT),
    "mpt": ({"d_model": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 99, "max_seq_len": 64}, CAUSAL, TEXT),
    "olmo": (GROUPED, CAUSAL, TEXT),
    "olmo2": (GROUPED, CAUSAL, TEXT),
    "opt": (SMALL | {"ffn_dim": 48, "word_embed_proj_dim": 32}, CAUSAL, TEXT),
    "pegasus": (BART, SEQUENCES, PAIR),
    "phi": (SMALL, CAUSAL, TEXT),
    "phi3": (GROUPED, CAUSAL, TEXT),
    "pvt": ({"hidden_sizes": [16, 16, 16, 16], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 4],
     "image_size": 32}, CLASSES, PIXELS),
    "qwen2": (GROUPED, CAUSAL, TEXT),
    "qwen2_moe": (GROUPED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
     "shared_expert_intermediate_size": 16}, CAUSAL, TEXT),
    "qwen3": (GROUPED, CAUSAL, TEXT),
    "regnet": ({"hidden_sizes": [16, 16], "depths": [1, 1], "embedding_size": 16, "groups_width": 8}, CLASSES, PIXELS),
    "rembert": (SMALL | {"input_embedding_size": 16, "output_embedding_size": 24}, MASKED, TEXT),
    "resnet": ({"hidden_sizes": [16, 16], "depths": [1, 1], "embedding_size": 16}, CLASSES, PIXELS),
    "roberta": (SMALL | {"pad_token_id": 0}, MASKED, TEXT),
    "roformer": (SMALL, MASKED, TEXT),
    "rwkv": ({"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 99, "context_length": 64}, CAUSAL, TEXT),
    "segformer": ({"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}, CLASSES, [images(64, "pixel_values")]),
    "siglip": ({"text_config": SMALL, "vision_config": VIT}, WHOLE, [TEXT[0] | PIXELS[0]]),
    "squeezebert": (SMALL | {"embedding_size": 32}, MASKED, TEXT),
    "stablelm": (GROUPED, CAUSAL, TEXT),
    "starcoder2": (GROUPED, CAUSAL, TEXT),
    "swin": (STAGES, CLASSES, PIXELS),
    "swinv2": (STAGES, CLASSES, PIXELS),
    "t5": (T5, SEQUENCES, PAIR),
    "vit": (VIT, CLASSES, PIXELS),
    "vit_mae": (VIT | {"decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2,
     "decoder_intermediate_size": 16}, WHOLE, PIXELS),
    "wav2vec2": (SOUND, WHOLE, WAVE),
    "whisper": (BART | {"max_source_positions": 20, "max_target_positions": 20, "num_mel_bins": 16,
     "decoder_start_token_id": 1}, WHOLE, [{"input_features": torch.randn(2, 16, 40,
     generator=torch.Generator().manual_seed(0)), "decoder_input_ids": IDS}]),
    "xlm-roberta": (SMALL, MASKED, TEXT),
    "yolos": (VIT | {"image_size": [32, 32]}, WHOLE, PIXELS),
}  # fmt: skip


def of_transformers(only: Collection[str] = ()) -> Iterator[Architecture]:
    """Yield a small model of each type, or of the given types."""
    yield from (in_transformers(kind) for kind in TRANSFORMERS if not only or kind in only)


def in_transformers(kind: str, _: str | None = None) -> Architecture:
    settings, auto, given = TRANSFORMERS[kind]

    def make():
        config = transformers.AutoConfig.for_model(kind, **copy.deepcopy(settings))
        return getattr(transformers, auto).from_config(config)

    return Architecture("transformers", kind, auto, make, given)


LIBRARIES = {"timm": of_timm, "torchvision": of_torchvision, "transformers": of_transformers}
ONE = {"timm": in_timm, "torchvision": in_torchvision, "transformers": in_transformers}
TRIED = {
    "timm": "The smallest variant of each of its files of models, as `timm.list_models()` has them; with two blocks"
    f" where all are large ({', '.join(LARGE)})",
    "torchvision": "The smallest variant of each of its files of models for classes and segmentation; those for"
    " detection need operators that not every build of torchvision has",
    "transformers": "A small configuration of each of these types",
}
HEAD = """# Models

Architectures of other libraries, with random weights, in three partitions. **yes** means that all of these hold:

- `partnets.partition` accepts the model unchanged.
- A step of w_3 and a step of w_1 change no parameter or buffer of other partitions.
- Subnetworks 3 and 1 and their merged models have the same outputs in evaluation mode and float32. They may differ by {tolerance:g} of the
  largest number in the output, or by twice the merged model's rounding error (its difference from float64) if that is larger.
- NaN in partitions 2 and 3 does not change a bit of the output of subnetwork 1.

[Nested partitions](nested.md#how-channels-are-found) divide channels only where a trial with fewer channels succeeds.

Made by `python tests/partnets/architectures.py > docs/models.md` on {date}, with PyTorch {torch}, timm {timm}, torchvision
{torchvision} and transformers {transformers}, on a CPU. Nothing is downloaded. `make test FULL=1` tests twelve rows again.
See also [what `partition` refuses](layers.md#what-partition-refuses)."""  # noqa: E501


def rows(library: str, architectures: Iterable[Architecture]) -> tuple[list[str], int]:
    """Return the lines of a library's table, and the number of successes."""
    lines, well = [], 0
    for architecture in architectures:
        start = time.process_time()
        failure = trial(architecture)
        cells = [architecture.family, f"`{architecture.name}`", failure or "yes"]
        seconds = f"{time.process_time() - start:.1f} s"
        print(library, *cells, seconds, file=sys.stderr, flush=True)
        lines.append(f"| {' | '.join(cells)} |")
        well += failure is None
    return lines, well


def page() -> Iterator[str]:
    """Yield the lines of docs/models.md."""
    versions = {
        module.__name__: module.__version__.split("+")[0] for module in (torch, timm, torchvision, transformers)
    }
    yield HEAD.format(tolerance=TOLERANCE, date=datetime.date.today(), **versions)
    for library, architectures in LIBRARIES.items():
        lines, well = rows(library, architectures())
        yield f"\n## {library}: {well} of {len(lines)}\n"
        yield f"{TRIED[library]}.\n"
        yield "| family | model | partitions, trains, merges |\n|---|---|---|"
        yield from lines


def quietly() -> None:
    """Use one thread, and suppress the libraries' warnings."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()


if __name__ == "__main__":
    quietly()
    if sys.argv[1:]:
        for library, architectures in LIBRARIES.items():
            rows(library, architectures(sys.argv[1:]))
    else:
        print("\n".join(page()))
