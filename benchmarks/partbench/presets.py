"""Presets: the measurements of each suite, unless the command line changes them, and their duration."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from partbench.measuring.timing import Plan
from partbench.peers.operators import WORKS as OPERATOR_WORKS

WORKS = (*OPERATOR_WORKS, "training")
# Works for which torch.compile may be among the peers.
COMPILED = tuple(f"{operator} {work}" for operator in ("linear", "conv2d") for work in WORKS)
Linear = tuple[int, int, int]  # M, N, K
# Input, weight, and any geometry that is not torch's default.
Conv2d = tuple[tuple[int, ...], tuple[int, ...], dict[str, int]]


def same(batch: int, channels: int, size: int, kernel: int = 3, out: int = 0) -> Conv2d:
    """Return a convolution that keeps the image's size."""
    weight = (out or channels, channels, kernel, kernel)
    return (batch, channels, size, size), weight, {"padding": kernel // 2}


MNIST_CNN = (same(200, 1, 28, 5, 20), same(200, 20, 14, 5, 50))
RESNET_8 = (same(250, 16, 32), same(250, 32, 16), same(250, 64, 8))
# The layers of ResNet-14 and of any other depth.
RESNET = (
    same(250, 3, 32, out=16),
    *RESNET_8,
    ((250, 16, 32, 32), (32, 16, 3, 3), {"padding": 1, "stride": 2}),
    ((250, 32, 16, 16), (64, 32, 3, 3), {"padding": 1, "stride": 2}),
)
CONV2D = (*MNIST_CNN, *RESNET_8, same(32, 160, 16))
LINEAR = ((1, 4096, 4096), (8, 4096, 4096), (32, 1024, 1024), (256, 1024, 1024), (256, 4096, 1024), (1024, 1024, 1024))


@dataclass(frozen=True)
class Preset:
    """The measurements of each suite and their duration.

    Attributes:
        about: one line for --help.
        device: "cpu" or "cuda"; the default of the suites.
        plan: for speed and optim; step takes fewer rounds, because its calls are long.
        linear, conv2d, dtypes, actives, works, compiled: of speed; forward_only, forward_defaults: further dtypes and
            kinds of defaults, for which only the forward pass of linear layers is measured.
        memory: names in partbench.peers.models and batches; arithmetic: names of models too large to build.
        step: models, batches, and samples of the augmentation.
        paper: whether step also measures the paper's scheme.
        optim: models.
    """

    about: str
    plan: Plan
    linear: tuple[Linear, ...]
    conv2d: tuple[Conv2d, ...]
    memory: tuple[tuple[str, int], ...]
    step: tuple[tuple[str, int, int], ...]
    optim: tuple[str, ...]
    device: str = "cpu"
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    forward_only: tuple[torch.dtype, ...] = ()
    forward_defaults: tuple[str, ...] = ()
    works: tuple[str, ...] = WORKS
    actives: tuple[int, ...] = (1, 2, 3)
    compiled: tuple[str, ...] = COMPILED
    arithmetic: tuple[str, ...] = ("transformer-1b",)
    processes: bool = True
    paper: bool = True
    scale: float = 1.0
    step_plan: Plan = field(default_factory=lambda: Plan(rounds=5, sample=0.05, seconds=0.5))


PRESETS = {
    "quick": Preset(
        about="two minutes on two cores: a few shapes, the first subnetwork, without torch.compile",
        plan=Plan(rounds=5, sample=2e-3, seconds=0.05, minutes=1),
        step_plan=Plan(rounds=3, seconds=0.1, minutes=1),
        linear=((32, 1024, 1024), (256, 1024, 1024)),
        conv2d=(same(64, 20, 14, 5, 50), same(64, 16, 32)),
        actives=(1,),
        compiled=(),
        memory=(("mnist-cnn", 64), ("resnet-14", 64)),
        processes=False,
        step=(("mnist-cnn", 64, 1), ("resnet-8", 32, 1)),
        paper=False,
        optim=("mnist-cnn",),
    ),
    "full": Preset(
        about="forty minutes on two cores: all shapes, every subnetwork, every peer",
        plan=Plan(rounds=7, sample=3e-3, seconds=0.15),
        linear=LINEAR,
        conv2d=CONV2D,
        memory=(
            ("linear-4096", 64),
            ("conv2d-160", 32),
            ("mnist-cnn", 200),
            ("resnet-8", 250),
            ("resnet-14", 250),
            ("wrn-20", 32),
            ("resnet-50", 64),
            ("resnet-9", 32),
            ("vit-tiny", 32),
        ),
        step=(("mnist-cnn", 200, 1), ("resnet-8", 250, 1), ("resnet-14", 250, 1), ("vit-tiny", 32, 1)),
        optim=("linear-2048", "mnist-cnn", "resnet-14"),
    ),
    "cpu": Preset(
        about="fifteen minutes on two cores: what partbench.bars.cpu holds the kernels and steps for CPUs to",
        plan=Plan(rounds=7, sample=3e-3, seconds=0.1),
        linear=LINEAR,
        conv2d=CONV2D,
        forward_only=(torch.bfloat16,),
        works=OPERATOR_WORKS,
        compiled=("linear forward",),
        memory=(),
        arithmetic=(),
        step=(
            ("mlp-512", 64, 1),
            ("mnist-cnn", 64, 1),
            ("resnet-8", 32, 1),
            ("resnet-9", 32, 1),
            ("gpt-256", 8, 1),
            ("vit-4", 16, 1),
        ),
        paper=False,
        optim=("linear-2048",),
    ),
    "gpu": Preset(
        about="what partbench.bars.gpu holds the kernels for GPUs to; five minutes on an H200",
        device="cuda",
        # The optimisers' steps are timed with the host's work, which many calls in a row hide, as in training.
        plan=Plan(rounds=10, sample=3e-3, seconds=0.1, minutes=2.5),
        step_plan=Plan(rounds=3, seconds=0.2, minutes=0.75),
        dtypes=(torch.bfloat16,),
        linear=((16, 8192, 8192), (2048, 4096, 4096), (4096, 4096, 4096), (8192, 4096, 4096)),
        conv2d=(same(256, 128, 28), same(256, 512, 7), *RESNET),
        forward_defaults=("zeros",),
        actives=(1, 3),
        # Autotuning takes some ten seconds a case.
        compiled=("linear forward", "conv2d forward"),
        memory=(
            ("linear-8192-bfloat16", 4096),
            ("mnist-cnn", 4000),
            ("resnet-14", 5000),
            ("wrn-20", 256),
            ("vit-tiny", 512),
        ),
        step=(
            ("mnist-cnn", 200, 1),
            ("mnist-cnn", 200, 20),
            ("resnet-8", 250, 1),
            ("resnet-8", 250, 20),
            ("resnet-14", 250, 20),
            ("vit-tiny", 128, 1),
        ),
        optim=("linear-4096", "resnet-14"),
    ),
    "tiny": Preset(
        about="ten seconds: whether everything runs; its figures mean nothing",
        plan=Plan(passes=2, rounds=2, sample=0, seconds=0),
        step_plan=Plan(passes=2, rounds=2, sample=0, seconds=0),
        linear=((4, 32, 48),),
        conv2d=(same(2, 4, 8),),
        actives=(1, 3),
        compiled=(),
        memory=(("mnist-cnn", 2),),
        processes=False,
        step=(("mnist-cnn", 20, 2),),
        optim=("resnet-8",),
        scale=0.01,
    ),
}
