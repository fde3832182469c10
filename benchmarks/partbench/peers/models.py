"""The models to be measured, by name, and models of users."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partbench import models
from partnets import hyper


@dataclass(frozen=True)
class Model:
    """An architecture with its training settings.

    Attributes:
        make: builds the model with torch's generator; its outputs are logits.
        input: the shape of one example.
        classes: the number of labels.
        optimizer: "adam" or "sgd", with momentum, as the paper has it for this model.
        is_language: whether an example is a text of tokens below `classes`, each with a label.
    """

    name: str
    make: Callable[[], nn.Module]
    input: tuple[int, ...]
    classes: int = 10
    optimizer: str = "adam"
    is_language: bool = False

    def examples(self, count: int) -> tuple[Tensor, Tensor]:
        """Draw examples and labels from torch's generator."""
        if self.is_language:
            x, y = torch.randint(self.classes, (2, count, *self.input))
            return x, y
        return torch.randn(count, *self.input), torch.randint(self.classes, (count,))


def loss(logits: Tensor, y: Tensor) -> Tensor:
    """Return the mean cross-entropy over all labels, of classes in the last dimension."""
    return F.cross_entropy(logits.flatten(0, -2), y.flatten())


def fixup_resnet(depth: int = 8, width: int = 1) -> Model:
    """Return a FixUp ResNet for CIFAR-10 with a depth of 6n + 2 and any width."""
    name = f"ResNet-{depth}" if width == 1 else f"ResNet-{depth}, width {width}"
    return Model(name, lambda: models.FixupResNet(depth, width), (3, 32, 32), optimizer="sgd")


def linear(features: int, dtype: torch.dtype = torch.float32) -> Model:
    """Return a model of one square linear layer."""
    name = f"Linear {features}×{features}"
    if dtype != torch.float32:
        name += f", {str(dtype).removeprefix('torch.')}"
    return Model(name, lambda: nn.Linear(features, features, dtype=dtype), (features,), features)


def conv2d(channels: int, size: int) -> Model:
    """Return a model of one 3×3 convolution, pooled to logits."""
    return Model(
        f"Conv2d {channels}→{channels}, 3×3",
        lambda: nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        (channels, size, size),
        channels,
    )


def language_model(vocabulary: int, context: int, width: int, depth: int) -> nn.Module:
    """Build a transformer for text, with a dropout rate after the embedding as its hyperparameter."""
    network = models.TransformerLM(vocabulary, context, width, depth, heads=4)
    network.tokens = nn.Sequential(network.tokens, hyper.ConcreteDropout(0.1))
    return network


NAMED = {
    "linear-2048": linear(2048),
    "linear-4096": linear(4096),
    "linear-8192": linear(8192),
    "linear-8192-bfloat16": linear(8192, torch.bfloat16),
    "conv2d-160": conv2d(160, 16),
    "mnist-cnn": Model("MNIST CNN", models.MnistCNN, (1, 28, 28)),
    "resnet-8": fixup_resnet(8),
    "resnet-14": fixup_resnet(14),
    "resnet-8-wide": fixup_resnet(8, 4),
    "mlp-512": Model("MLP, 2×512", lambda: nn.Sequential(nn.Flatten(), models.MLP(784, [512] * 2, 10)), (1, 28, 28)),
    "mlp": Model("MLP, 3×1024", lambda: nn.Sequential(nn.Flatten(), models.MLP(784, [1024] * 3, 10)), (1, 28, 28)),
    "wrn-20": Model("Wide ResNet-20-5", models.WideResNet, (3, 32, 32), optimizer="sgd"),
    "resnet-50": Model("thin ResNet-50", models.ThinResNet50, (3, 32, 32), optimizer="sgd"),
    "resnet-9": Model("ResNet-9", models.ResNet9, (3, 32, 32)),
    "vit-tiny": Model("ViT-tiny", models.ViT, (3, 32, 32)),
    "vit-4": Model("ViT, depth 4", lambda: models.ViT(depth=4), (3, 32, 32)),
    "gpt-256": Model("GPT, 2×256", lambda: language_model(256, 64, 256, 2), (64,), 256, is_language=True),
    # Only for memory by arithmetic: 4 GB of weights.
    "transformer-1b": Model("1-billion transformer", models.TransformerLM, (1024,), 50257, is_language=True),
}


def find(name: str, input: tuple[int, ...] | None = None, classes: int | None = None) -> Model:
    """Return one of NAMED, or the user's model that 'package.module:function' makes.

    Raises:
        ValueError: the model is unknown, or a user's model lacks input or classes.
    """
    if name in NAMED:
        return NAMED[name]
    module, separator, function = name.partition(":")
    if not separator:
        raise ValueError(f"model {name!r} is unknown; pass one of {', '.join(NAMED)}, or package.module:function.")
    if input is None or classes is None:
        raise ValueError(f"model {name} needs --input, as in 3,32,32, and --classes, as in 10.")
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"model {name} cannot be imported ({error}); pass package.module:function, with the package on PYTHONPATH."
        ) from error

    def made() -> nn.Module:
        model = make()
        if not isinstance(model, nn.Module) or not list(model.parameters()):
            what = "module that has no parameters" if isinstance(model, nn.Module) else type(model).__name__
            raise ValueError(f"{name} made a {what}; pass a function that returns a module with parameters.")
        return model

    return Model(name, made, input, classes)
