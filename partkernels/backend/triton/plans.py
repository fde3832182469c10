"""Choose how `linear` is computed: by one fused kernel, or by cuBLAS from a rebuilt weight.

`fused` reads the weight once and stores nothing of the rebuilt one. `rebuild` writes slices of the subnetwork's weight
that stay in the second-level cache, and calls cuBLAS on each. Which is faster depends on the number of rows of x.
Gradients and convolutions are always rebuilt: their fused kernels were slower on an H200, except for input gradients of
a few rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from partkernels.backend import dispatch, plan, rebuilt
from partkernels.backend.plan import Config
from partkernels.backend.triton import measured
from partkernels.backend.triton.launch import Gpu

# Terms of a sum that a fused kernel adds in one step.
TERMS = 64


@dataclass(frozen=True)
class Product:
    """The properties of a product on which the choice depends.

    Attributes:
        down, across: the rows of the weight and of x, in the order of the fused kernel's tile.
        depth: the number of terms of each sum.
        kind: the kind of defaults.
        tf32: whether float32 may be multiplied as TF32.
    """

    down: int
    across: int
    depth: int
    dtype: torch.dtype
    bits: int
    kind: str
    tf32: bool
    gpu: Gpu


@dataclass(frozen=True)
class Plan:
    """The chosen plan: config is the fused kernel's; None means 'rebuild'."""

    config: Config | None
    reason: str

    def __str__(self) -> str:
        if self.config is None:
            return f"rebuild, then the vendor's kernel ({self.reason})"
        return f"fused, tiles of {self.config.down}x{self.config.across} ({self.reason})"


# The fused kernel's overhead over the vendor's, as a fraction, by kind of defaults. 'zeros' and 'uniform' are measured
# on an H200 at 4096 and 8192 rows of x (benchmarks/results/h200.md). The others are predicted by the instructions of
# compiled loops, scaled by the error of these two.
_FUSED_OVERHEAD = {"zeros": 0.4, "uniform": 0.67, "normal": 3.0, "stored": 1.1}
# The minimum for float32 as TF32, where masks and defaults pass between threads through shared memory.
_TF32_OVERHEAD = 2.3
# Up to so many rows of x, the time is that of reading the weight: once if fused, three times if rebuilt.
_FEW_ROWS = 64


def _power_of_two(n: int, low: int, high: int) -> int:
    return max(low, min(high, 1 << max(0, n - 1).bit_length()))


def stages_that_fit(product: Product, down: int, across: int, wanted: int) -> int:
    """Return the number of stages of a fused kernel's load pipeline that fit in shared memory: 1 to `wanted`.

    A stage holds the operands of one step of the sum: TERMS entries of each row in the tile.

    Args:
        down, across: the tile's rows of the weight and of x. Stored defaults are loaded too, `down` more rows.
        wanted: the number of stages if all fit.
    """
    tiles = down + across + (down if product.kind == "stored" else 0)
    # The map's words and the compiler's reserve take a tenth at most.
    room = int(0.9 * product.gpu.shared_memory) // (TERMS * tiles * product.dtype.itemsize)
    return max(1, min(wanted, room))


def default_config(product: Product) -> Config:
    """Return a tile for any GPU, from the product's sizes: not measured, but no such tile spills registers."""
    is_hopper = product.gpu.is_hopper
    widest = 256 if is_hopper and product.dtype.itemsize == 2 else 128  # wider float32 tiles spill
    # Before Hopper, each warp holds its entire share of x.
    across = _power_of_two(product.across, 16, widest if is_hopper else 64)
    # With 16 rows per warp, the threads that need the map's words load them (see packed_map).
    down = 64 if across <= 64 and is_hopper else _power_of_two(product.down, 64, 128)
    warps = down // 16
    return Config(down, across, warps, stages_that_fit(product, down, across, 4 if across <= 64 else 3))


# With fewer steps of a sum, the pipeline of loads does not fill.
_LEAST_STEPS = 4


def schedule(product: Product, config: Config) -> tuple[tuple[int, int], dict[str, Any]]:
    """Return a fused kernel's grid (tiles, programs that share each sum), and its tile arguments."""
    tiles = -(-product.down // config.down) * -(-product.across // config.across)
    total = -(-product.depth // TERMS)
    # Enough programs for eight warps per multiprocessor; fewer do not hide latency.
    programs = product.gpu.multiprocessors * max(1, 8 // config.warps)
    wanted = max(1, min(programs // max(1, tiles), total // _LEAST_STEPS))
    steps = -(-total // wanted)
    precision = "tf32" if product.tf32 and product.dtype == torch.float32 else "ieee"
    tile = {"DOWN": config.down, "ACROSS": config.across, "num_warps": config.warps, "num_stages": config.stages}
    return (tiles, -(-total // steps)), {"steps": steps, "PRECISION": precision, **tile}


_tuning = False


def choose(product: Product) -> Plan:
    """Return the forced plan, otherwise the measured one, otherwise the one estimated to be faster."""
    if product.dtype == torch.float64:
        return Plan(None, "the fused kernels have no float64")
    forced = plan.forced()
    if forced is not None:
        configs = {"fused": default_config(product), "rebuild": None}
        return Plan(configs[forced] if isinstance(forced, str) else forced, "asked for")
    if found := measured.nearest(product):
        return Plan(Config(*found.config) if found.config else None, found.reason)
    without_cores = product.dtype == torch.float32 and not product.tf32
    if product.across <= _FEW_ROWS:
        return Plan(default_config(product), f"{product.across} rows of x: reading the weight takes longest")
    if without_cores:
        return Plan(None, "float32 without TF32 has no tensor cores")
    fused, rebuild = _FUSED_OVERHEAD[product.kind], rebuilt.USES[product.kind] / product.across
    if product.dtype == torch.float32:
        fused = max(fused, _TF32_OVERHEAD)
    reason = f"estimated, not measured: {fused:.0%} beyond the dense product against {rebuild:.0%} for rebuilding"
    return Plan(default_config(product) if fused <= rebuild else None, reason)


def candidates(product: Product) -> list[Config]:
    """Return up to 8 tiles of the fused kernel that are worth measuring, the default first."""
    default = default_config(product)
    downs = sorted({default.down, max(64, default.down // 2)}, reverse=True)
    acrosses = sorted({default.across, max(default.across // 2, 64 if default.across >= 64 else 16)}, reverse=True)
    configs = [default]
    for down in downs:
        for across in acrosses:
            for stages in (3, 4):
                warps = max(4, default.warps * down // default.down)
                config = Config(down, across, warps, stages_that_fit(product, down, across, stages))
                if config not in configs:
                    configs.append(config)
    return configs[:8]


def _tune(product: Product, fused: Callable[[Config], Tensor], rebuild: Callable[[], Tensor]) -> None:
    times = {}
    for config in candidates(product):
        with suppress(OutOfResources):  # an unknown GPU may have less than estimated
            times[config] = clock(lambda config=config: fused(config))
    microseconds = {"rebuild": round(clock(rebuild), 1)}
    fastest = min(times, key=times.get, default=None)
    if fastest is not None:
        microseconds["fused"] = round(times[fastest], 1)
    is_fused = fastest is not None and microseconds["fused"] <= microseconds["rebuild"]
    measured.remember(product, astuple(fastest) if is_fused else None, microseconds)


def clock(function: Callable[[], Tensor]) -> float:
    """Return the median time of a call in microseconds, with a cold second-level cache."""
    from triton.testing import do_bench

    return 1000 * do_bench(function, warmup=5, rep=20, return_mode="median")


@contextmanager
def tuning() -> Iterator[None]:
    """Measure each product of new sizes once inside the context: both plans, and up to 8 tiles; about 10 seconds.

    The fastest plan is saved in `measured.folder()`, for this and later processes. Outside of this context nothing is
    measured, so that no call stalls, and code captured by torch.compile or a CUDA graph does not change.
    """
    global _tuning
    previous, _tuning = _tuning, True
    try:
        yield
    finally:
        _tuning = previous


def run(product: Product, fused: Callable[[Config], Tensor], rebuild: Callable[[], Tensor]) -> Tensor:
    """Compute a product by the plan chosen for it."""
    may_tune = _tuning and plan.forced() is None and product.dtype != torch.float64
    if may_tune and not is_capturing() and not measured.is_known(product):
        _tune(product, fused, rebuild)
    chosen = choose(product)
    dispatch.note_plan(str(chosen))
    return rebuild() if chosen.config is None else fused(chosen.config)


def is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
