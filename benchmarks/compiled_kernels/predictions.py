"""How long products should take on an H200, by how their kernels are compiled; and which plan `auto` takes today.

A model, no measurement: it is there to compare plans, and to be proved wrong by times. What it leaves out is in ABOUT.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod

from benchmarks.compiled_kernels import cuda
from benchmarks.compiled_kernels.kernels import Kernel
from benchmarks.compiled_kernels.pipes import LANES, QUARTERS, WGMMA
from benchmarks.compiled_kernels.triton import CONVOLUTION, FLOAT32, LARGE, LARGE_FLOAT, MIDDLE, Case
from benchmarks.figures import markdown
from partkernels.backend.cuda.operators import is_estimated_faster
from partkernels.backend.rebuilt import SLICE
from partkernels.backend.triton import plans
from partkernels.backend.triton.launch import Gpu
from partkernels.backend.triton.plans import Config, Product

H200 = Gpu("NVIDIA H200", multiprocessors=132, shared_memory=227 << 10, is_hopper=True)
# What cuBLAS reaches on random bfloat16 numbers, and copies of gigabytes, by PyTorch on an H200; its clock under load.
RATE, BANDWIDTH, CLOCK = 790e12, 4.3e12, 1.75e9
# What cuBLAS reaches of the tensor cores' peak at that clock. Other loops are taken to come as near to what their
# busiest pipe allows.
ATTAINED = RATE / (2 * WGMMA * H200.multiprocessors * CLOCK)
# Multiply-adds of float32 without tensor cores: 128 a clock and multiprocessor.
FLOAT_RATE = 2 * 128 * H200.multiprocessors * CLOCK
# From one kernel's end to the next one's first instruction, and until a tile's first operands are there: assumed.
LAUNCH, FILL = 2e-6, 1e-6
REGISTERS = 65536

KINDS = ("zeros", "uniform", "normal", "stored")
# Each with whether float32 is multiplied as TF32.
JOBS = (
    *((Case("linear", LARGE, kind), True) for kind in KINDS),
    *((case, True) for case in MIDDLE),
    *((Case("linear_grad_input", LARGE, kind), True) for kind in KINDS),
    (Case("linear_grad_weight", LARGE), True),
    (Case("conv2d", CONVOLUTION), True),
    *((Case("linear", LARGE_FLOAT), tf32) for tf32 in (True, False)),
)


@dataclass(frozen=True)
class Sizes:
    """A job's product as plans see it, and the entries of its operands."""

    product: Product
    weight: int
    others: int

    @classmethod
    def of(cls, case: Case, tf32: bool) -> Sizes:
        layer, work = case.layer, case.operator.partition("_")[2]
        out, terms = layer.weight[0], prod(layer.weight[1:])
        rows = prod(layer.y) // out
        sizes = {"": (out, rows, terms), "grad_input": (rows, terms, out), "grad_weight": (out, terms, rows)}[work]
        kind = "none" if work == "grad_weight" else case.defaults
        product = Product(case.operator, *sizes, rows, layer.dtype, case.bits, kind, tf32, H200)
        return cls(product, out * terms, prod(layer.x) + prod(layer.y))

    @property
    def flop(self) -> float:
        return 2.0 * self.product.down * self.product.across * self.product.depth

    @property
    def map_bytes(self) -> float:
        return self.weight * self.product.bits / 8

    @property
    def stored_bytes(self) -> float:
        return self.weight * self.product.dtype.itemsize if self.product.kind == "stored" else 0

    @property
    def dense_bytes(self) -> float:
        return (self.weight + self.others) * self.product.dtype.itemsize


def floor(sizes: Sizes) -> float:
    """Seconds of the dense product: at cuBLAS's best rate, or at the speed of memory."""
    rate = RATE
    if sizes.product.dtype == FLOAT32:
        rate = RATE / 2 if sizes.product.tf32 else FLOAT_RATE
    return max(sizes.flop / rate, sizes.dense_bytes / BANDWIDTH)


def dense(sizes: Sizes) -> float:
    """Seconds that cuBLAS is taken to need."""
    return LAUNCH + floor(sizes)


def rebuilt(sizes: Sizes, pass_of: Kernel) -> float:
    """Seconds of rebuilding the weight slice by slice, and of cuBLAS; of a weight's gradient, of masking it."""
    size = sizes.product.dtype.itemsize
    moved = sizes.weight * 2 * size + sizes.map_bytes + sizes.stored_bytes
    arithmetic = sizes.weight * pass_of.slots / (QUARTERS * LANES * H200.multiprocessors * CLOCK)
    slices = 1 if sizes.product.kind == "none" else ceil(sizes.weight * size / SLICE)
    return floor(sizes) + max(moved / BANDWIDTH, arithmetic) + 2 * slices * LAUNCH


def fused(sizes: Sizes, kernel: Kernel, tile: tuple[int, int], blocks: int, resident: int, splits: int = 1) -> float:
    """Seconds of a fused kernel of so many blocks, each of which makes a tile.

    Args:
        resident: blocks that a multiprocessor has at once.
        splits: blocks that share each tile's sums.
    """
    product = sizes.product
    moved = sizes.dense_bytes + sizes.map_bytes + sizes.stored_bytes
    rounds = ceil(blocks / (H200.multiprocessors * resident))
    most = ceil(blocks / H200.multiprocessors)
    terms = ceil(product.depth / splits / plans.TERMS) * plans.TERMS
    loop = terms * tile[0] * tile[1] / kernel.multiply_adds * kernel.cycles / (CLOCK * ATTAINED)
    store = resident * tile[0] * tile[1] * (4 if splits > 1 else product.dtype.itemsize) / BANDWIDTH
    working = most * loop + rounds * (FILL + store * H200.multiprocessors)
    memory = FILL + moved / (BANDWIDTH * min(1, blocks / H200.multiprocessors))
    seconds = LAUNCH + max(floor(sizes), working, memory)
    if splits > 1:
        seconds += LAUNCH + 2 * 4 * splits * product.down * product.across / BANDWIDTH
    return seconds


def by_triton(sizes: Sizes, kernel: Kernel) -> tuple[float, float]:
    """Seconds, and the share of the multiprocessors that have work."""
    (tiles, splits), _ = plans.schedule(sizes.product, Config(*kernel.tile, kernel.warps, kernel.stages))
    by_registers = REGISTERS // (kernel.registers * kernel.warps * LANES)
    resident = max(1, min(by_registers, H200.shared_memory // (kernel.shared + 1024)))
    seconds = fused(sizes, kernel, kernel.tile, tiles * splits, resident, splits)
    return seconds, min(1.0, tiles * splits / H200.multiprocessors)


def by_cuda(sizes: Sizes, kernels: Sequence[Kernel]) -> tuple[float, float] | None:
    """The same of the fastest kernel; None if none serves the product."""
    product = sizes.product
    if product.dtype == FLOAT32:
        return None
    arguments = ["bfloat16"] if product.kind == "none" else ["bfloat16", product.kind]
    timed = []
    for kernel in kernels:
        if kernel.target != "sm_90" or kernel.case.split(", ")[: len(arguments)] != arguments:
            continue
        splits = 1
        if kernel.name == "hopper_" + product.operator.removeprefix("linear_"):
            tile = cuda.tile(kernel.name, tuple(kernel.case.split(", ")))
            tiles = ceil(product.down / tile[0]) * ceil(product.across / tile[1])
            # As csrc/cuda/matmul_kernels.h shares sums.
            splits = max(1, min(H200.multiprocessors // tiles, product.depth // plans.TERMS // 4))
        elif kernel.name == "few_rows" and product.operator == "linear":
            # Each warp has all of a block's rows, and columns of its own.
            tile = int(kernel.entries / kernel.warps / plans.TERMS), int(kernel.multiply_adds / kernel.entries)
            if product.across > tile[1]:
                continue
        else:
            continue
        blocks = ceil(product.down / tile[0]) * ceil(product.across / tile[1]) * splits
        timed.append((fused(sizes, kernel, tile, blocks, 1, splits), min(1.0, blocks / H200.multiprocessors)))
    return min(timed, default=None)


ABOUT = """\
# Predictions for an H200

Made by `python -m benchmarks.compiled_kernels`, beside [what it reads in compiled code](compiled-kernels.md). No GPU
was involved: this is a model, to be proved wrong by times.

The floor is that of the dense product: {rate:.0f} TFLOP/s, which cuBLAS reaches on random bfloat16 numbers (half of it
in TF32; without, 128 multiply-adds a clock and multiprocessor), or {bandwidth:g} TB/s, which copies reach. cuBLAS and
cuDNN are taken to need that and {launch:g} µs to start. The fused kernels take the cycles of their compiled main loops,
for as many tiles as the busiest of 132 multiprocessors has, at {attained:.2f} of {clock:g} GHz, because that is what
cuBLAS reaches of the tensor cores' peak; and {fill:g} µs and the storing of the results for each round of tiles. They
take no less than the floor, or than reading weight, map and x once. Rebuilding takes reading weight and map and writing
the slice at the speed of memory, or its instructions, and then cuBLAS, which reads the slice. Left out: latencies,
conflicts of banks, misses of the second-level cache, and that cuBLAS and cuDNN are slower than their best on small
products. The passes over a weight are bfloat16's.

Ratios are to cuBLAS, 1 being as fast as the dense layer; behind the fused kernels, the share of the multiprocessors
that have work. A case is an operator with M×N×K of a linear layer, or images and weight of a convolution. The plans are
those that a backend takes by itself; `auto` takes Triton. Bold: it is predicted to be more than 5 % slower than the
other one.
"""
HEAD = ("case", "floor", "Triton, fused", "CUDA C++, fused", "rebuild, cuBLAS", "plan in Triton", "plan in CUDA C++")


def page(triton: Sequence[Kernel], library: Sequence[Kernel]) -> str:
    """Markdown, from the kernels of both backends; of the CUDA backend perhaps none."""
    # Of two tiles for a case, the first is the default.
    compiled = {(k.case, k.name.partition(".")[2]): k for k in reversed(triton) if k.target == "sm_90"}
    rows = [_row(case, tf32, compiled, library) for case, tf32 in JOBS]
    seconds = {"launch": LAUNCH * 1e6, "fill": FILL * 1e6, "clock": CLOCK / 1e9}
    about = ABOUT.format(rate=RATE / 1e12, bandwidth=BANDWIDTH / 1e12, attained=ATTAINED, **seconds)
    return f"{about}\n{markdown(HEAD, rows)}\n"


def _row(case: Case, tf32: bool, triton: dict[tuple[str, str], Kernel], library: Sequence[Kernel]) -> list[str]:
    sizes = Sizes.of(case, tf32)
    if sizes.product.kind == "none":
        pass_of = triton[str(Case("subnetwork_weight_grad", LARGE)), "keep_kernel"]
    else:
        pass_of = triton[str(Case("subnetwork_weight", LARGE, case.defaults)), "rebuild_kernel"]
    best, rebuilding, plan = dense(sizes), rebuilt(sizes, pass_of), plans.choose(sizes.product)
    ours = None
    if sizes.product.dtype != FLOAT32 or tf32:  # else Triton's kernel is without tensor cores, and not modelled
        work = case.operator.removeprefix("linear").removeprefix("conv2d").removeprefix("_") or "forward"
        ours = by_triton(sizes, triton[str(case), f"{work}_kernel"])
    theirs = by_cuda(sizes, library)
    uses = sizes.product.uses
    by_estimate = theirs is not None and is_estimated_faster(case.operator, case.defaults, uses, is_hopper=True)
    precision = "" if sizes.product.dtype != FLOAT32 else ", TF32" if tf32 else ", no TF32"
    return [
        str(case) + precision,
        f"{floor(sizes) * 1e6:.1f} µs",
        _cell(best, ours),
        _cell(best, theirs),
        f"{best / rebuilding:.2f}",
        _plan(plan.config is not None, ours, rebuilding),
        _plan(by_estimate, theirs, rebuilding),
    ]


def _cell(best: float, found: tuple[float, float] | None) -> str:
    return f"{best / found[0]:.2f}, {found[1]:.0%}" if found else ""


def _plan(is_fused: bool, found: tuple[float, float] | None, rebuilding: float) -> str:
    name = "fused" if is_fused else "rebuild"
    if found is None:
        return name
    taken, other = (found[0], rebuilding) if is_fused else (rebuilding, found[0])
    return f"**{name}**" if taken > 1.05 * other else name
