"""Mutation tests: each mutant is a fault in a copy of the tree, and at least one test must fail with it.

usage: python tests/mutants.py [--list] [--only NAME ...] [--jobs N]

The program prints a table in Markdown: each mutant, the test that killed it, and the kind of run that has this test.
SURVIVED means that a test is missing; the exit status is then 1. For each mutant, the usual run of the mutant's test
files comes first. If they pass, their FULL run follows, and then the FULL run of all tests.

Requires the environment that `make test` sets up; PARTKERNELS_BUILD=cpu must work. Mutants of C++ code are compiled for
one instruction set, `portable`, with little optimisation, and the tests use that instruction set.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from processes import CONTEXT, run_python

ROOT = Path(__file__).parents[1]
# Timeout in seconds, longer than a usual run takes on a busy machine. A fault may make a test wait forever.
LONG = 3600
LIBRARY = Path("partkernels") / "_cpu.so"
# partkernels_numpy is ignored because it is not imported from the mutated tree.
IN_WORKERS = ("-n", "2", "--dist", "worksteal")
ALL_TESTS = (*IN_WORKERS, "benchmarks", "partkernels", "python_api", "tests", "--ignore=tests/partkernels_numpy")
# Processes are forked from one that has imported these, because imports take most of the time of a few tests.
# torch._dynamo is not among them: it would import Triton, which must first read the environment of the tests.
IMPORTED = ["torch", "pandas", "sklearn.datasets"]


@dataclass(frozen=True)
class Mutant:
    """A fault.

    Attributes:
        name: a unique name.
        file: the path of the source file in the tree.
        line: the text to replace, which occurs in the source exactly once.
        by: the replacement.
        breaks: a description of the resulting error.
        tests: test files that should detect the fault; they run first.
    """

    name: str
    file: str
    line: str
    by: str
    breaks: str
    tests: tuple[str, ...]

    @property
    def is_compiled(self) -> bool:
        return self.file.startswith("csrc/")

    def apply(self, folder: Path) -> None:
        """Apply the fault to a tree; raise ValueError if the text to replace does not occur exactly once."""
        path = folder / self.file
        source = path.read_text() if path.exists() else ""
        if source.count(self.line) != 1:
            raise ValueError(
                f"mutant {self.name!r}: {self.file} has {self.line!r} {source.count(self.line)} times instead of once;"
                " adapt the mutant to the current source."
            )
        path.write_text(source.replace(self.line, self.by))


KERNELS, NETS = "tests/partkernels", "tests/partnets"


def _of(file: str, tests: str, *faults: tuple[str, str, str, str]) -> Iterator[Mutant]:
    for name, line, by, breaks in faults:
        yield Mutant(name, file, line, by, breaks, tuple(tests.split()))


MUTANTS = [
    # --- formats ---
    *_of(
        "partkernels/formats/philox.py",
        f"{KERNELS}/test_formats.py",
        ("philox rounds", "ROUNDS = 7", "ROUNDS = 6", "all draws, in every Python backend"),
        ("philox key", "(k1 + 0xBB67AE85) & WORD", "(k1 + 0x9E3779B9) & WORD", "the second half of the key's schedule"),
    ),
    *_of(
        "partkernels/formats/packed_map.py",
        f"{KERNELS}/test_formats.py {KERNELS}/test_partition.py {KERNELS}/test_shards.py",
        (
            "map of columns keeps padding",
            "        part[:, cut.shape[1] - 1] &= (1 << beyond) - 1\n",
            "        pass\n",
            "padding of a cut map is not 0",
        ),
    ),
    *_of(
        "partkernels/backend/reference/defaults.py",
        f"{KERNELS}/test_formats.py",
        ("uniform sign", "torch.where(draw >= 128,", "torch.where(draw > 128,", "the sign of one draw in 256"),
        (
            "normal mean",
            "for shift in (0, 8, 16, 24)) - 510",
            "for shift in (0, 8, 16, 24)) - 511",
            "the mean of normal defaults",
        ),
        ("uniform order", "2 * ((column // 8) % 2)", "2 * ((column // 4) % 2)", "the byte that a column draws"),
    ),
    *_of(
        "partkernels/backend/reference/random_map.py",
        f"{KERNELS}/test_formats.py",
        ("map domain", "DOMAIN = (0, 0x70617274)", "DOMAIN = (0, 0x70617275)", "maps use another stream of draws"),
    ),
    *_of(
        "partkernels/arguments.py",
        f"{KERNELS}/test_formats.py {KERNELS}/test_partition.py",
        (
            "rounded proportions",
            "- 1) > AS_WRITTEN or",
            "- 1) > 1 or",
            "rounded proportions give one partition too many entries",
        ),
        (
            "ties of remainders",
            "key=lambda j: parts[j] - exact[j])",
            "key=lambda j: (parts[j] - exact[j], -j))",
            "ties of the largest remainder go to the higher partition",
        ),
    ),
    *_of(
        "partkernels/partition.py",
        f"{KERNELS}/test_formats.py {KERNELS}/test_partition.py {KERNELS}/test_shards.py",
        (
            "row of a shard",
            "self.map[start:stop], defaults, self.row + start, self.col)",
            "self.map[start:stop], defaults, self.row, self.col)",
            "a shard of rows draws the defaults of other rows",
        ),
        (
            "damaged pickle",
            "        self.__post_init__()  # a damaged file must not load as a partition\n",
            "",
            "a damaged file becomes a partition",
        ),
    ),
    *_of(
        "python_api/partnets/nn/partition_format.py",
        f"{NETS}/nn/test_saving.py",
        ("saved row", '"row": partition.row,', '"row": 0,', "a shard's partition is saved with another position"),
        (
            "saved count",
            'if plain["count"] != own.count:',
            "if False:",
            "a file with another number of partitions loads",
        ),
    ),
    *_of(
        "python_api/partnets/nn/partition_format.py",
        f"{NETS}/convert/test_nested_models.py",
        ("saved units", "if plain != to_plain(own):", "if False:", "a file with other widths loads"),
        (
            "saved scheme",
            'if is_nested != (plain["format"] == NESTED):',
            "if False:",
            "a file with another scheme loads",
        ),
    ),
    *_of(
        "python_api/partnets/nn/nesting.py",
        f"{NETS}/convert/test_nested_models.py",
        ("live norm", "else units.take(x, dim, active)", "else x", "norms include inactive channels"),
    ),
    *_of(
        "python_api/partnets/convert/units.py",
        f"{NETS}/convert/test_nested_models.py",
        (
            "dead inputs",
            "owners[dead.cpu() & (owners == 1)] = k",
            "pass",
            "layers compute with inputs that are always 0",
        ),
        (
            "own units",
            "if _alike(with_units, without) and",
            "if False and",
            "position embeddings make all channels active",
        ),
    ),
    *_of(
        "python_api/partnets/convert/narrowing.py",
        f"{NETS}/convert/test_nested_models.py",
        (
            "narrow trial",
            "works = all(map(_is_same, runs(set().union(*narrow, *sets)), expected))",
            "works = True",
            "narrow layers change the result",
        ),
        (
            "narrow negative",
            "(min(2, last), NEGATIVE)",
            "(min(2, last), POSITIVE)",
            "one-sided code makes layers narrow",
        ),
        ("narrow small", "(last, SMALL)", "(last, POSITIVE)", "saturated code makes layers narrow"),
        (
            "narrow softmax",
            "WithoutDropout(), of_one",
            "WithoutDropout()",
            "attention that scales by its heads is narrow after an example of one token",
        ),
    ),
    *_of(
        "python_api/partnets/convert/marks.py",
        f"{NETS}/convert/test_nested_models.py",
        (
            "narrow ids",
            "for ids in tensors((args, kwargs), caches=False) if is_whole(ids)",
            "for ids in []",
            "integers computed from channels make layers narrow",
        ),
    ),
    *_of(
        "partkernels/operators/nested.py",
        f"{KERNELS}/test_nested.py",
        (
            "nested elsewhere",
            "out[: rows.stop, cols.stop :] = 0",
            "pass",
            "gradients of inactive entries are uninitialised memory",
        ),
        (
            "nested gradient",
            "ctx.product.grad_weight(grad, x, weight, *among, out=out[strip])",
            "ctx.product.grad_weight(grad, x, weight, *among, out=out[strip]); break",
            "w_k learns from only a part of its gradient",
        ),
        (
            "nested read",
            "partition.row_units.take(weight, 0, active)",
            "partition.row_units.take(weight, 0, partition.count)",
            "products read inactive entries",
        ),
        ("nested rest", "torch.where(dead, bias, 0)", "0 * bias", "inactive outputs lose their bias"),
    ),
    *_of(
        "csrc/cpu/entries.h",
        f"{KERNELS}/test_entries.py",
        (
            "entries' order",
            "if (taps_ == 1) return",
            "if (true) return",
            "a convolution's entries are gathered in the map's order",
        ),
        (
            "entries' rows",
            "T* const to = out + start;",
            "T* const to = out;",
            "rows overwrite each other",
        ),
        (
            "entries' end",
            "columns_[words_ - 1] &= ~uint64_t{0} >> (words_ * 64 - cols);",
            "",
            "padding counts as entries of the partition",
        ),
    ),
    # --- kernels: reference ---
    *_of(
        "partkernels/backend/reference/subnetwork_weight.py",
        f"{KERNELS}/test_operators.py",
        (
            "reference live",
            "bits_for(count)) < active",
            "bits_for(count)) <= active",
            "one partition too many is active",
        ),
        (
            "reference gradient",
            "(ids >= first - 1) & (ids < last)",
            "(ids >= first - 1) & (ids <= last)",
            "the next partition's entries have a gradient too",
        ),
    ),
    *_of(
        "partkernels/backend/reference/optimizers.py",
        f"{KERNELS}/test_optimizers.py",
        ("reference decay", "p = p * (1 - lr * weight_decay)", "p = p * (1 - weight_decay)", "AdamW's decay"),
        (
            "reference nesterov",
            "g = g + momentum * buffer if nesterov else buffer",
            "g = buffer",
            "Nesterov's momentum",
        ),
    ),
    *_of(
        "partkernels/backend/bias.py",
        f"{KERNELS}/test_biases.py",
        ("live bias", "[:active]", "[: active + 1]", "a later partition's bias is in earlier subnetworks"),
    ),
    # --- kernels: Triton ---
    *_of(
        "partkernels/backend/triton/packed_map.py",
        f"{KERNELS}/test_triton.py {KERNELS}/test_optimizers.py",
        (
            "triton threshold",
            "0xFFFFFFFF if active < top else 0",
            "0xFFFFFFFF if active <= top else 0",
            "which partitions are active, in the middle of a field's range",
        ),
        (
            "triton ids",
            "(column % (8 // BITS) * BITS)",
            "(column % (8 // BITS))",
            "the owners that optimiser steps read",
        ),
    ),
    *_of(
        "partkernels/backend/triton/rebuild.py",
        f"{KERNELS}/test_triton.py {KERNELS}/test_operators.py",
        (
            "triton select",
            "return (mask & default) | (~mask & weight)",
            "return (mask & default) | weight",
            "inactive entries keep bits of the weight",
        ),
    ),
    *_of(
        "partkernels/backend/triton/subnetwork_weight.py",
        f"{KERNELS}/test_operators.py",
        (
            "triton keep",
            "(owner >= first - 1) & (owner < last)",
            "(owner >= first - 1)",
            "later partitions have a gradient",
        ),
    ),
    *_of(
        "partkernels/backend/triton/optimizers.py",
        f"{KERNELS}/test_optimizers.py {KERNELS}/test_triton.py",
        (
            "triton taps",
            "column = lies % taps * (cols // taps) + lies // taps",
            "column = lies",
            "a convolution's step changes entries of other partitions",
        ),
        ("triton adam", "mean + rest1 * change", "mean + rest1 * g", "Adam's mean"),
        (
            "triton lerp",
            "rest1 < 0.5, mean",
            "rest1 < 2.0, mean",
            "with beta1 <= 0.5, the mean is computed from the wrong end",
        ),
        (
            "triton steps",
            "sharing[bits, in_order, step]",
            "sharing[bits, in_order, steps[0]]",
            "bias corrections use another tensor's step count",
        ),
    ),
    *_of(
        "partkernels/backend/triton/together.py",
        f"{KERNELS}/test_triton.py",
        (
            "triton together",
            "program_id(0) >= firsts",
            "program_id(0) > firsts",
            "a tensor's first entries are not stepped",
        ),
    ),
    *_of(
        "partkernels/backend/triton/entries.py",
        f"{KERNELS}/test_entries.py",
        (
            "triton entries' order",
            "column = place % taps * (cols // taps) + place // taps",
            "column = place",
            "a convolution's entries are gathered in the map's order",
        ),
        (
            "triton entries' pieces",
            "values + tl.load(starts + piece, row < rows, 0) + (",
            "values + (",
            "pieces overwrite each other",
        ),
    ),
    *_of(
        "partkernels/backend/triton/passes.py",
        f"{KERNELS}/test_entries.py",
        (
            "triton entries' copy",
            "        tensor.copy_(seen.view(tensor.shape))\n",
            "        pass\n",
            "entries of tensors with some strides are scattered into a copy",
        ),
    ),
    *_of(
        "partkernels/backend/triton/subnetwork_weight.py",
        f"{KERNELS}/test_convolutions.py {KERNELS}/test_operators.py",
        (
            "triton passes by taps",
            "(tap * channels + left)[:, None]",
            "(tap + left)[:, None]",
            "a contiguous convolution's taps use another column's owners",
        ),
    ),
    *_of(
        "csrc/cpu/gemm_in_output.h",
        f"{KERNELS}/test_operators.py",
        (
            "cpp sums in the output",
            "const bool is_last = k + d == depth;",
            "const bool is_last = k == 0;",
            "a gradient is masked before its sum is complete",
        ),
    ),
    *_of(
        "csrc/cpu/interleave.h",
        f"{KERNELS}/test_operators.py {KERNELS}/test_convolutions.py",
        (
            "cpp interleave",
            "to[j * taps + tap] = from[tap * in + j];\n  }",
            "to[j * taps + tap] = from[tap * in + j / 2];\n  }",
            "a contiguous convolution's entries use their neighbours' owners",
        ),
    ),
    *_of(
        "partkernels/backend/triton/embedding.py",
        f"{KERNELS}/test_embedding.py {KERNELS}/test_shards.py",
        ("triton embedding shard", "row + first_row, first_column", "row, first_column", "a shard's drawn defaults"),
    ),
    # --- kernels: C++ ---
    *_of(
        "csrc/cpu/rebuild.h",
        f"{KERNELS}/test_operators.py {KERNELS}/test_embedding.py {KERNELS}/test_shards.py",
        (
            "cpp all live",
            "all_live_(w.active == w.count),",
            "all_live_(w.active + 1 >= w.count),",
            "the last partition is active in the second-to-last subnetwork",
        ),
        (
            "cpp select",
            "out[j] = live >> j & 1 ? weight[j] : static_cast<T>(widen(dead[j]));",
            "out[j] = static_cast<T>(widen(dead[j])) + (live >> j & 1 ? weight[j] : weight[j] * 0);",
            "NaNs and infinities of inactive entries reach the result",
        ),
        (
            "cpp stored offset",
            "w_.stored.data + (row + r + q) * w_.stored.row_stride + col + c;",
            "w_.stored.data + (row + r + q) * row_stride + col + c;",
            "stored defaults are read with the weight's stride",
        ),
    ),
    *_of(
        "csrc/cpu/draw_defaults.h",
        f"{KERNELS}/test_formats.py {KERNELS}/test_shards.py",
        ("cpp draw row", "defaults_.row + tile.row_at(r)", "tile.row_at(r)", "a shard's drawn defaults"),
        (
            "cpp draw stream",
            "row_part(lanes, low_word(defaults_.stream)",
            "row_part(lanes, 0",
            "streams of uniform defaults",
        ),
    ),
    *_of(
        "csrc/cpu/random_map.h",
        f"{KERNELS}/test_formats.py",
        (
            "cpp map order",
            "Rank(word, index)) - first.begin()",
            "Rank(word, 0)) - first.begin()",
            "the order of tied draws of a map",
        ),
    ),
    *_of(
        "csrc/torch/cpu/threads.h",
        f"{KERNELS}/test_forks.py",
        (
            "cpp threads of a fork",
            "return entries < cpu::kFewEntries ? kThisThread : kTorchThreads;",
            "return kTorchThreads;",
            "small operators after a fork wait for threads that the child does not have",
        ),
    ),
    *_of(
        "csrc/torch/cpu/conv2d.cpp",
        f"{KERNELS}/test_torch_faults.py",
        (
            "cpp faults of torch",
            "return !is_usual;",
            "return false;",
            "convolutions that PyTorch computes wrongly are left to PyTorch",
        ),
    ),
    *_of(
        "csrc/torch/tensors.h",
        f"{KERNELS}/test_fuzz_wrong.py",
        (
            "cpp emptied map",
            "map.size(0) >= rows && map.size(1) * 8 >= cols * bits &&",
            "map.dim() == 2 &&",
            "a map is read out of bounds",
        ),
    ),
    *_of(
        "csrc/cpu/mask.h",
        f"{KERNELS}/test_operators.py {KERNELS}/test_optimizers.py",
        (
            "cpp span of four bits",
            "uint64_t{low_} + span_ + 1;",
            "uint64_t{low_} + span_;",
            "the entries of a partition, with more than 4 partitions",
        ),
    ),
    *_of(
        "csrc/cpu/optimizers.h",
        f"{KERNELS}/test_optimizers.py",
        (
            "cpp narrow",
            "(to_bfloat16(wide[j]).bits & mask) | (group[j].bits & ~mask)",
            "to_bfloat16(wide[j]).bits",
            "bfloat16 NaNs of other partitions change their bits",
        ),
        (
            "cpp momentum mask",
            "buffer[j] = blend(mask_of(kept, j), velocity, buffer[j]);",
            "buffer[j] = velocity;",
            "other partitions' momentum changes",
        ),
        (
            "cpp lerp",
            "blend(near_grad, grad, exp_avg[j])",
            "exp_avg[j]",
            "with beta1 <= 0.5, the mean is computed from the wrong end",
        ),
    ),
    *_of(
        "csrc/torch/cpu/bias.h",
        f"{KERNELS}/test_biases.py",
        (
            "cpp bias rows",
            "for (int64_t r = 0; r < active; ++r) total",
            "for (int64_t r = 1; r < active; ++r) total",
            "b_1",
        ),
    ),
    # --- dispatch and operators ---
    *_of(
        "partkernels/build_info.py",
        f"{KERNELS}/test_checkout.py",
        (
            "library of other sources",
            'if facts.get("sources") == own:',
            'if "sources" in facts:',
            "a checkout runs installed kernels that were built from other C++ sources",
        ),
    ),
    *_of(
        "partkernels/backend/dispatch.py",
        f"{KERNELS}/test_dispatch.py",
        (
            "silent fallback",
            "            raise RuntimeError(_cannot(name, reason))\n        return",
            "            name = 'reference'\n        return",
            "another backend runs silently if the requested one cannot",
        ),
        (
            "backend stays",
            "        _thread.requested = previous\n",
            "        pass\n",
            "use_backend has an effect after its block",
        ),
        (
            "a backend for all threads",
            "class _Thread(threading.local):",
            "class _Thread:",
            "threads share the choice of the backend",
        ),
    ),
    *_of(
        "python_api/partnets/nn/layer.py",
        f"{NETS}/nn/test_own_parameters.py",
        (
            "who else reads",
            "self.is_read or (self.count > 1 and self.is_inside())",
            "self.is_read",
            "reading a weight in a subnetwork returns that of all partitions",
        ),
    ),
    *_of(
        "python_api/partnets/nn/own_state.py",
        f"{NETS}/nn/test_own_state.py",
        (
            "one state for all",
            "str(k): copied(state, memo) for k, memo",
            "str(k): state for k, memo",
            "state of modules carries later chunks into earlier subnetworks",
        ),
        (
            "psi's steps leave state",
            "        if update is not None:\n            return states_of(self)",
            "        if True:\n            return states_of(self)",
            "state of modules depends on the chunk on which psi learns",
        ),
        (
            "retrained state",
            "super().to_ordinary(self.count), 0)",
            "super().to_ordinary(self.count), self.count)",
            "a network for retraining starts with state from all data",
        ),
    ),
    *_of(
        "python_api/partnets/evaluation/auditing.py",
        f"{NETS}/evaluation/test_auditing.py",
        (
            "no poison",
            "self._changed(clean, self._both, k, torch.nan)",
            "self._changed(clean, self._both, k)",
            "an audit misses reads of inactive weights",
        ),
        (
            "what is kept",
            "if differing or (changed and reads(*changed)):",
            "if False:",
            "an audit misses state that follows the data",
        ),
        (
            "draws of the audit",
            "if trains and first_trains and not all(map(same, drawn, drawn_later)):",
            "if False:",
            "an audit misses draws that depend on the data",
        ),
        (
            "mode of the audit",
            "if first_trains != trains:",
            "if True:",
            "an audit misses values that are kept until the mode changes",
        ),
        (
            "modes of the audit",
            "MODES = (True, True), (False, False), (True, False), (False, True)",
            "MODES = (True, True), (False, False)",
            "an audit misses values that training writes and evaluation reads",
        ),
        (
            "maxima in the audit",
            "stored.spoil(path)",
            "pass",
            "an audit misses a running maximum that subnetwork 1 exceeds",
        ),
        (
            "writes in the audit",
            " or not same(one.parameter.detach(), before[one])",
            "",
            "an audit misses passes that write into a parameter's data",
        ),
    ),
    *_of(
        "python_api/partnets/convert/finding.py",
        f"{NETS}/convert/test_partitioning.py",
        (
            "out of reach",
            "    for path in out_of_reach(model, layers):",
            "    for path in ():",
            "layers that an object references are not replaced",
        ),
    ),
    *_of(
        "python_api/partnets/convert/finding.py",
        f"{NETS}/nn/test_own_parameters.py",
        (
            "hooks that keep parameters",
            "and (path not in ruled or attribute in of_all_modules)",
            "and path not in ruled",
            "a hook keeps using a weight that belongs to no subnetwork",
        ),
    ),
    *_of(
        "python_api/partnets/nn/activation_checkpoint.py",
        f"{NETS}/nn/test_recomputation.py",
        (
            "reentrant checkpoints",
            "            _check(*state, *(layer._live.unlearned or state))",
            "            pass",
            "a reentrant checkpoint recomputes another subnetwork",
        ),
    ),
    *_of(
        "partkernels/operators/registration.py",
        f"{KERNELS}/test_optimizers.py {KERNELS}/test_operators.py",
        (
            "negated view",
            "elif args[i] is not None and args[i].is_neg():",
            "elif False:",
            "an operator reads a negated view without its negation",
        ),
        (
            "states on one memory",
            "if i in written or j in written:",
            "if False:",
            "two moments that share memory corrupt each other silently",
        ),
    ),
    *_of(
        "partkernels/operators/convolution.py",
        f"{KERNELS}/test_convolutions.py",
        (
            "output padding of a stride",
            "    if any(beyond):",
            "    if False:",
            "a transposed convolution fails although PyTorch's does not",
        ),
    ),
    *_of(
        "partkernels/operators/linear.py",
        f"{KERNELS}/test_operators.py",
        (
            "needless weight gradient",
            "needs_weight_grad = ctx.update is not None and ctx.needs_input_grad[1]",
            "needs_weight_grad = ctx.needs_input_grad[1]",
            "x is saved and a gradient computed although nothing learns",
        ),
    ),
    *_of(
        "partkernels/operators/embedding.py",
        f"{KERNELS}/test_embedding.py",
        (
            "embedding padding",
            "-1 if padding_idx is None else padding_idx % rows",
            "-1 if padding_idx is None else padding_idx",
            "a negative padding_idx has a gradient",
        ),
    ),
    # --- the invariant: subnetwork k - 1 never sees D_k ---
    *_of(
        "python_api/partnets/nn/batch_norm.py",
        f"{NETS}/nn/test_batch_norm.py",
        (
            "shared statistics",
            "buffer[self.active - 1] if self.count > 1 else buffer for _, buffer in self._statistics()\n            )",
            "buffer[0] if self.count > 1 else buffer for _, buffer in self._statistics()\n            )",
            "batch norm's statistics carry D_k into all subnetworks",
        ),
        (
            "statistics of psi",
            "learns = self.training and self.update is not None",
            "learns = self.training",
            "batches without an update change the statistics",
        ),
        (
            "outside norms",
            "[module for module in norms if module in owned], [module for module in norms if module not in owned]",
            "[module for module in norms if module in owned], []",
            "norms that are not partitioned carry D_k into earlier subnetworks",
        ),
    ),
    *_of(
        "python_api/partnets/nn/cumulative.py",
        f"{NETS}/nn/test_norms.py {NETS}/nn/test_own_parameters.py {NETS}/training/test_invariant.py",
        (
            "live rows",
            "rows.detach()[:active].unbind()",
            "rows.detach().unbind()",
            "later biases and scales are active",
        ),
        (
            "rows that learn",
            "live = list(rows.detach()[:active].unbind())",
            "live = list(rows[:active].unbind())",
            "all rows learn",
        ),
    ),
    *_of(
        "python_api/partnets/nn/embedding.py",
        f"{NETS}/nn/test_starts.py",
        ("padding's owner", "        ids[self.padding_idx] = 1\n", "", "the padding row is a default in subnetworks"),
        (
            "padding's start",
            "                started[self.padding_idx] = weight[self.padding_idx]\n",
            "                pass\n",
            "the padding row starts at its defaults",
        ),
    ),
    *_of(
        "python_api/partnets/nn/layer.py",
        f"{NETS}/nn/test_norms.py {NETS}/nn/test_subnetworks.py {NETS}/nn/test_saving.py",
        (
            "frozen where nothing learns",
            "weight, bias = weight.detach(), None if bias is None else bias.detach()",
            "pass",
            "steps of psi give biases a gradient",
        ),
        (
            "shift's start",
            "with_rows(value, count, neutral=neutral)",
            "with_rows(value, count, neutral=1.0)",
            "biases start at 1",
        ),
    ),
    *_of(
        "python_api/partnets/nn/live.py",
        f"{NETS}/nn/test_subnetworks.py {NETS}/optim/test_misuse.py",
        (
            "subnetwork stays",
            "layer._live.now = None if mixed else state",
            "pass",
            "a subnetwork stays active after its block",
        ),
        (
            "psi learns with w",
            "hyperparameters(model) if update is not None and not hyper else ()",
            "()",
            "a step of w gives psi a gradient",
        ),
    ),
    *_of(
        "python_api/partnets/nn/several.py",
        f"{NETS}/nn/test_several.py",
        (
            "examples in order",
            'torch.tensor(order, device="cpu").argsort()',
            'torch.tensor(order, device="cpu")',
            "outputs of a mixed batch are returned for other examples",
        ),
        (
            "views that follow",
            "rows == list(range(rows[0], rows[0] + len(rows))) if rows else True",
            "True",
            "a subnetwork computes other subnetworks' examples",
        ),
        (
            "penalties of psi",
            "if group.update else penalties()",
            "",
            "penalties count although no partition learns",
        ),
        ("forward for good", "if not forward.users:", "if False:", "a model groups its calls forever"),
    ),
    *_of(
        "python_api/partnets/nn/nesting.py",
        f"{NETS}/convert/test_nested_models.py",
        (
            "like another",
            "ask __eq__\n        return True",
            "ask __eq__\n        return False",
            "torch's fast path reads the norms of all channels",
        ),
    ),
    *_of(
        "partkernels/autograd_threads.py",
        f"{KERNELS}/test_autograd_threads.py",
        ("borrowed", "    if _BORROWS:", "    if False:", "PyTorch 2.11 frees objects that are passed to threads"),
    ),
    *_of(
        "python_api/partnets/convert/units.py",
        f"{NETS}/test_devices.py",
        ("on another device", "dead.cpu() & (owners == 1)", "dead & (owners == 1)", "nested partitions fail on a GPU"),
    ),
    *_of(
        "python_api/partnets/nn/shown.py",
        f"{NETS}/nn/test_own_parameters.py",
        (
            "written into",
            "if value._version != version:",
            "if False:",
            "in-place changes of a computed value are lost silently",
        ),
    ),
    *_of(
        "python_api/partnets/utils/modules.py",
        f"{NETS}/utils/test_modules.py",
        (
            "own train",
            "            if was != now and",
            "            if False and",
            "a model with a graph for each mode keeps that of evaluation in training",
        ),
    ),
    *_of(
        "python_api/partnets/training/best_model.py",
        f"{NETS}/convert/test_reassigning.py",
        (
            "best of before",
            'if self.division not in ("", division(model)):',
            "if False:",
            "weights of an earlier partition are restored",
        ),
    ),
    *_of(
        "python_api/partnets/convert/reassigning.py",
        f"{NETS}/convert/test_reassigning.py",
        (
            "moments anew",
            "own.mean() if own.numel() else 0",
            "0",
            "entries that moved take steps of many times the learning rate",
        ),
    ),
    *_of(
        "python_api/partnets/nn/partitioned.py",
        f"{NETS}/nn/test_threads.py",
        ("one for all threads", "class _Live(threading.local):", "class _Live:", "threads share a subnetwork"),
        (
            "autograd's threads",
            "return None if torch.compiler.is_compiling() else handed_on(HANDED_ON, {}).get(self)",
            "return None",
            "a backward pass on a GPU recomputes the full network",
        ),
    ),
    *_of(
        "python_api/partnets/nn/layer.py",
        f"{NETS}/convert/test_partitioning.py",
        (
            "frozen weights are divided",
            "            if not parameter.requires_grad:\n                whole",
            "            if False:\n                whole",
            "a frozen weight is redrawn",
        ),
    ),
    *_of(
        "python_api/partnets/evaluation/running_statistics.py",
        f"{NETS}/evaluation/test_running_statistics.py",
        (
            "statistics of all chunks",
            "drawn = chunks.order[: sum(chunks.sizes[:k])]",
            "drawn = chunks.order",
            "statistics carry later chunks into earlier subnetworks",
        ),
        (
            "old statistics count",
            "norm.num_batches_tracked.zero_()",
            "pass",
            "an estimate includes statistics of old weights",
        ),
    ),
    *_of(
        "python_api/partnets/evaluation/same_chunks.py",
        f"{NETS}/training/test_meaning.py",
        (
            "any chunks",
            "if not all(chunks.is_of(fingerprint) for fingerprint in remembered):",
            "if False:",
            "L_ML includes examples that were seen",
        ),
    ),
    *_of(
        "python_api/partnets/optim/base.py",
        f"{NETS}/optim/test_misuse.py",
        (
            "no gradient",
            "elif expected or any(",
            "elif True or any(",
            "a step without a gradient does nothing silently",
        ),
    ),
    # --- data ---
    *_of(
        "python_api/partnets/data/chunks.py",
        f"{NETS}/data/test_chunks.py",
        (
            "upto the next",
            "return self._drawn(0, self._ends[k], batch_size, generator)",
            "return self._drawn(0, self._ends[min(k + 1, self.count)], batch_size, generator)",
            "D_{k+1} reaches w_k",
        ),
        (
            "sample of the last",
            "return self._drawn(self._ends[k - 1], self._ends[k], batch_size, generator)",
            "return self._drawn(self._ends[k - 1] - 1, self._ends[k], batch_size, generator)",
            "psi learns from an example that subnetwork k - 1 has seen",
        ),
    ),
    *_of(
        "python_api/partnets/data/examples.py",
        f"{NETS}/data/test_chunks.py",
        (
            "subset's place",
            'dataset, indices = dataset.dataset, torch.as_tensor(above, device="cpu")[indices]',
            "dataset = dataset.dataset",
            "chunks of a Subset have examples of its complete data set",
        ),
    ),
    *_of(
        "python_api/partnets/data/splitting.py",
        f"{NETS}/data/test_splitting.py",
        (
            "large groups first to the first",
            "surplus[kind][j] -= number * proportions[j]",
            "pass",
            "chunks of groups do not have the sizes of the proportions",
        ),
        (
            "overlapping indices",
            "if len(again := part[seen[part] > 0]):",
            "if len(again := part[:0]):",
            "an example of a later chunk is in an earlier one too",
        ),
    ),
    *_of(
        "python_api/partnets/data/batch.py",
        f"{NETS}/data/test_batch.py",
        (
            "padding counts",
            "return int((y != ignored(loss)).sum())",
            "return examples",
            "L_ML weighs batches equally, whatever their padding",
        ),
    ),
    *_of(
        "python_api/partnets/data/loader.py",
        f"{NETS}/data/test_loader.py",
        (
            "loader's psi",
            "hyper_k = draw_k(u, generator, start=2)",
            "hyper_k = draw_k(u, generator, start=1)",
            "psi draws chunk k = 1",
        ),
        ("loader's place", "self.sampler.done += 1", "pass", "an interrupted training repeats its draws"),
        (
            "loader of other chunks",
            "if saved.get(name) != value]",
            "if False]",
            "a training resumes with other chunks silently",
        ),
    ),
    # --- optimisers ---
    *_of(
        "python_api/partnets/optim/fused.py",
        f"{NETS}/optim/test_optim.py",
        (
            "decay of another",
            'numbers = group["lr"], group["momentum"], decay_of(group, update),',
            'numbers = group["lr"], group["momentum"], decay_of(group, 1),',
            "all partitions have the first one's decay",
        ),
        (
            "step counts",
            "steps = [steps.tolist()[update - 1] + 1 for steps in counted]",
            "steps = [max(steps.tolist()) + 1 for steps in counted]",
            "bias corrections use another partition's step count",
        ),
    ),
    *_of(
        "python_api/partnets/optim/base.py",
        f"{NETS}/optim/test_optim.py",
        (
            "strangers learn",
            "    if strangers:\n",
            "    if False:\n",
            "parameters that no partition owns are ignored silently",
        ),
    ),
    *_of(
        "python_api/partnets/optim/weight_decay.py",
        f"{NETS}/optim/test_optim.py",
        (
            "decay by chunk",
            "for examples in itertools.accumulate(sizes))",
            "for examples in sizes)",
            "the decay depends on the size of D_k instead of D_1:k",
        ),
    ),
    # --- training ---
    *_of(
        "python_api/partnets/training/step.py",
        f"{NETS}/training/test_trainer.py {NETS}/training/test_trainer_options.py {NETS}/optim/test_clipping.py",
        (
            "psi in the same subnetwork",
            "with subnetwork(model, active=k - 1, update=None), evaluating",
            "with subnetwork(model, active=k, update=None), evaluating",
            "psi learns on data that the subnetwork has seen",
        ),
        (
            "gradients add up",
            "    optimizer.zero_grad()\n    with weights_learning",
            "    with weights_learning",
            "a step includes the gradients of earlier steps",
        ),
        (
            "clip after",
            "    clip_gradient(optimizer, clip)\n    optimizer.step(update=k)\n",
            "    optimizer.step(update=k)\n",
            "gradients are not clipped",
        ),
        ("weights of chunks", "value = weights[k] * loss(batch)", "value = loss(batch)", "the weights of psi's losses"),
    ),
    *_of(
        "python_api/partnets/training/trainer.py",
        f"{NETS}/training/test_trainer.py {NETS}/training/test_trainer_options.py",
        (
            "still modules train",
            "            module.eval()\n        if not",
            "            pass\n        if not",
            "dropout of a frozen backbone is enabled",
        ),
        (
            "parts of a batch",
            "return self._parts or",
            "return dict.fromkeys(self._parts, self.batch_size) or",
            "one_pass uses a complete batch for each partition",
        ),
        (
            "psi's parts",
            "self._hyper_parts.get(chunk, self.hyper_batch_size)",
            "self.hyper_batch_size",
            "one_pass uses a complete batch of each unseen chunk",
        ),
    ),
    *_of(
        "python_api/partnets/training/start.py",
        f"{NETS}/training/test_meaning.py",
        (
            "psi in the loss alone",
            "parameter in of_loss and parameter not in through",
            "False",
            "psi learns to switch off the penalty",
        ),
    ),
    *_of(
        "python_api/partnets/training/checkpoint.py",
        f"{NETS}/training/test_checkpoint.py {NETS}/training/test_damaged_checkpoints.py",
        (
            "resumed generator",
            '    trainer.generator.set_state(saved["generator"])\n',
            "",
            "a resumed run draws other batches",
        ),
        (
            "unchecked parts",
            "        validation.check(trainer, saved, rank)\n",
            "",
            "a damaged checkpoint is loaded partially",
        ),
        ("other chunks", "None not in known and known[0] != known[1]", "False", "a checkpoint of other data loads"),
    ),
    *_of(
        "python_api/partnets/training/validation.py",
        f"{NETS}/training/test_damaged_checkpoints.py",
        (
            "any setting",
            "        if not 0 <= number <= LARGEST:",
            "        if False:",
            "a NaN learning rate of ψ is loaded and reaches ψ",
        ),
    ),
    *_of(
        "python_api/partnets/utils/sealed.py",
        f"{NETS}/training/test_damaged_checkpoints.py",
        (
            "any checksum",
            "if marked and end != MARK + _checksum(file, size):",
            "if False:",
            "a weight with a flipped bit is loaded",
        ),
    ),
    *_of(
        "python_api/partnets/utils/files.py",
        f"{NETS}/utils/test_files.py",
        (
            "the living",
            "            if _lock(file, wait=False):",
            "            if True:",
            "a file is deleted while another process writes it",
        ),
        (
            "through links",
            "    real = Path(os.path.realpath(path))",
            "    real = Path(path)",
            "a file replaces a link instead of the link's target",
        ),
    ),
    *_of(
        "python_api/partnets/training/ahead.py",
        f"{NETS}/training/test_workers.py",
        (
            "another's batch",
            "if self._expected and self._expected.popleft().seed == wanted.seed:",
            "if self._expected and self._expected.popleft():",
            "a step learns from a batch that was fetched for another step",
        ),
    ),
    *_of(
        "python_api/partnets/training/best_model.py",
        f"{NETS}/training/test_selection.py",
        (
            "best is a reference",
            "tensor.detach().clone()",
            "tensor.detach()",
            "the best state changes with further training",
        ),
    ),
    *_of(
        "python_api/partnets/evaluation/out_of_chunk.py",
        f"{NETS}/evaluation/test_evaluation.py",
        (
            "lml in-chunk",
            "subnetwork(model, active=k - 1)",
            "subnetwork(model, active=k)",
            "L_ML is computed on data that were seen",
        ),
    ),
    # --- merging and finalizing ---
    *_of(
        "python_api/partnets/nn/own_parameters.py",
        f"{NETS}/nn/test_own_parameters.py",
        (
            "shared cache",
            "lambda self: self.__dict__[name][self.active, self.update]",
            "lambda self: self.__dict__[name][0, None]",
            "a value cached by one subnetwork is used by another",
        ),
        (
            "stale cache",
            "            self.__dict__[name].clear()\n        return super().train(mode)",
            "            pass\n        return super().train(mode)",
            "a value cached before a step is used after it",
        ),
        (
            "own defaults",
            "return Stored(weight.detach().clone())",
            "return Zeros()",
            "weights of generic modules do not start at their defaults",
        ),
    ),
    *_of(
        "python_api/partnets/convert/reads.py",
        f"{NETS}/nn/test_own_parameters.py",
        (
            "methods that are called",
            "names += [chain[0] for chain in _chains(tree) if len(chain) == 1]",
            "names += []",
            "methods that forward calls read the weights of all partitions",
        ),
    ),
    *_of(
        "python_api/partnets/convert/partitioning.py",
        f"{NETS}/nn/test_own_parameters.py",
        (
            "weights that are read",
            "                new[layer].is_read = True\n",
            "                pass\n",
            "reading a layer's weight returns that of all partitions",
        ),
    ),
    *_of(
        "python_api/partnets/convert/merging.py",
        f"{NETS}/models/test_zoo.py",
        (
            "merged ties",
            "ordinary._parameters[name] = shared.setdefault(parameter, ordinary._parameters[name])",
            "shared.setdefault(parameter, ordinary._parameters[name])",
            "merged layers do not share the weights that were tied",
        ),
    ),
    *_of(
        "python_api/partnets/convert/units.py",
        f"{NETS}/convert/test_nested_models.py",
        (
            "inputs of nobody",
            "        if nonzero[-1].any() and not all(one.any() for one in nonzero):\n            return None",
            "        if False:\n            return None",
            "an expert that the example does not reach in subnetwork 1 has no inputs in it",
        ),
    ),
    *_of(
        "python_api/partnets/convert/narrowing.py",
        f"{NETS}/convert/test_nested_models.py",
        (
            "unseen takers",
            "return found | (unseen & set(nested)) - called",
            "return found",
            "a merged subnetwork fails in layers that the example does not reach",
        ),
    ),
    *_of(
        "python_api/partnets/convert/partitioning.py",
        f"{NETS}/convert/test_nested_models.py",
        (
            "nested pretrained",
            "    if keeps_silently and is_nested:\n",
            "    if False:\n",
            "weights that were trained on all chunks are nested silently",
        ),
        (
            "dead directions",
            "        if isinstance(module, ParametrizationList):\n",
            "        if False:\n",
            "subnetwork 1 divides by the norm of a zero row",
        ),
    ),
    *_of(
        "python_api/partnets/nn/layer.py",
        f"{NETS}/convert/test_finalize.py",
        (
            "starts of constants",
            "changed, partitions, self.starts = {}, {}, dict(self._starts())",
            "changed, partitions, self.starts = {}, {}, {}",
            "a retrained network starts with other biases than the original",
        ),
    ),
    *_of(
        "python_api/partnets/training/inner_steps.py",
        f"{NETS}/distributed/test_distributed_trainer.py",
        (
            "own slopes",
            "slopes = self._averaged([None if by is None else",
            "slopes = list([None if by is None else",
            "each rank differentiates only its part of the batch in unrolled steps",
        ),
    ),
    *_of(
        "python_api/partnets/convert/finalizing.py",
        f"{NETS}/convert/test_finalize.py",
        ("fresh seed", "        torch.manual_seed(seed)\n", "", "reinitialisation does not follow its seed"),
    ),
    *_of(
        "python_api/partnets/convert/deploying.py",
        f"{NETS}/convert/test_deploy.py",
        ("deployed ψ", "parameter.requires_grad_(False)", "pass", "an optimiser changes a deployed extractor"),
        ("draws of each", "derived(self.seed, path)", "self.seed", "augmentations of one Averaged use the same draws"),
    ),
    *_of(
        "python_api/partnets/hyper/tracing.py",
        f"{NETS}/convert/test_deploy.py",
        (
            "random constant",
            "first, second = _graph_module(module), _graph_module(module)",
            "first = second = _graph_module(module)",
            "a number drawn while tracing is deployed",
        ),
        (
            "persistence",
            "if name in module.get_submodule(owner)._non_persistent_buffers_set:",
            "if False:",
            "non-persistent constants are in the state_dict",
        ),
    ),
    # --- distributed ---
    *_of(
        "python_api/partnets/distributed/packing.py",
        f"{NETS}/distributed",
        (
            "packed mean",
            "torch.cat(pieces).div_(dist.get_world_size(packing.group))",
            "torch.cat(pieces)",
            "a sum over ranks instead of the mean",
        ),
        (
            "packed order",
            "put(view, partition, k, mean)",
            "put(view, partition, k, mean.flip(0))",
            "a gradient's entries are permuted",
        ),
        (
            "packed partitions",
            "found[0, k], found[1, k] = 1, 0",
            "pass",
            "gradients of ranks that update other partitions are mixed silently",
        ),
    ),
    *_of(
        "python_api/partnets/distributed/trainer.py",
        f"{NETS}/distributed/test_distributed_trainer.py",
        (
            "finite on all ranks",
            'check_finite(means[1], f"step {self.steps + 1}")',
            "pass",
            "a loss that is NaN on one rank makes all weights NaN",
        ),
    ),
    # --- federated ---
    *_of(
        "python_api/partnets/federated/client.py",
        f"{NETS}/federated/test_rounds.py",
        (
            "threads",
            "        with taking_turns():\n            return self._train(values, round)",
            "        return self._train(values, round)",
            "threads draw from each other's random states",
        ),
        (
            "unreached",
            "        check_reached(self.model, self.vectors.hyper)\n",
            "",
            "ψ that does not affect the loss has a gradient of 0",
        ),
        ("counters", "        self._held.put_back()\n", "", "counts in modules pass from client to client"),
        ("rows", "parameters | self.vectors.paths()", "parameters", "biases are reset to their first values"),
        (
            "no audit",
            "            refuse_leaks(self.model, draw, compute)\n",
            "            pass\n",
            "a model that carries data from one client to the next is accepted",
        ),
    ),
    *_of(
        "python_api/partnets/federated/server.py",
        f"{NETS}/federated/test_rounds.py",
        (
            "shared model",
            "all(map(same, present.values(), self._sent.values()))",
            "True",
            "clients that share the server's model are not detected",
        ),
        ("losses", "abs(number) < GREATEST_LOSS", "math.isfinite(number)", "a sum of losses overflows"),
    ),
    *_of(
        "python_api/partnets/federated/client.py",
        f"{NETS}/federated",
        (
            "one after another",
            "vectors.write({name: values[name] for name in own})",
            "pass",
            "a client's later partition starts from its updated earlier ones (Eq. 25)",
        ),
        (
            "unhidden losses",
            "examples, hyper_loss, losses = 1, None, {}",
            "pass",
            "a client with privacy reveals its losses and its number of examples",
        ),
    ),
    *_of(
        "python_api/partnets/federated/vectors.py",
        f"{NETS}/federated",
        ("not finite", "if not vector.isfinite().all():", "if False:", "NaN reaches the global model"),
        ("running", "    if norms:\n", "    if False:\n", "BatchNorm is accepted"),
        ("inside", "if inside(self.model):", "if False:", "a subnetwork's default values are read as learned ones"),
        ("sums", "            owner.combine()\n", "            pass\n", "biases are not those of the vectors written"),
    ),
    *_of(
        "python_api/partnets/federated/server.py",
        f"{NETS}/federated",
        (
            "another chunk",
            "if (pinned := self.pinned.get(sender, own)) != own:",
            "if False:",
            "a client may change its chunk",
        ),
        (
            "overflow",
            "if vector.numel() and not vector.abs().max() < most:",
            "if False:",
            "a second moment overflows permanently",
        ),
        ("idle partitions", "if contributors[k]:", "if names:", "a partition without contributors is stepped"),
        (
            "noise of a mean",
            "self.privacy.noisy(found, 1 / len(updates))",
            "self.privacy.noisy(found)",
            "the server's noise does not decrease with the number of clients",
        ),
    ),
    *_of(
        "python_api/partnets/federated/privacy.py",
        f"{NETS}/federated",
        ("counted vectors", "math.sqrt(sent * rounds)", "math.sqrt(rounds)", "only one of several vectors is counted"),
        (
            "fresh noise",
            "os.urandom(16 * half + 16)",
            "bytes(range(16)) * (half + 1)",
            "noise is predictable and can be subtracted",
        ),
        (
            "diverged",
            "if math.isfinite(length) else",
            "if True else",
            "an error reveals that a client with privacy diverged",
        ),
    ),
    *_of(
        "python_api/partnets/federated/flower/arrays.py",
        f"{NETS}/federated/test_flower_faults.py {NETS}/federated/test_flower.py",
        ("declared", "if array.dtype != kind or tuple", "if tuple", "an array's declared dtype is not checked"),
        (
            "content",
            'if dtype != np.dtype(kind).newbyteorder("<") or shape != (length,):',
            "if False:",
            "bytes of another dtype are read as numbers",
        ),
    ),
    *_of(
        "python_api/partnets/federated/flower/strategy.py",
        f"{NETS}/federated/test_flower_faults.py",
        ("strangers", "if node not in self._asked:", "if False:", "replies of nodes that were not asked count"),
        (
            "twice",
            "elif node in contents or node in failed or node in refused:",
            "elif False:",
            "the last of several replies counts",
        ),
        ("empty rounds", " and not self._empty:", ":", "rounds without contributions count as done"),
    ),
    *_of(
        "python_api/partnets/federated/flower/one_by_one.py",
        f"{NETS}/federated/test_flower_faults.py",
        ("forged", "                    sent_by(replies[0], node)\n", "", "a node replies in another's name"),
    ),
    *_of(
        "python_api/partnets/federated/flower/local_grid.py",
        f"{NETS}/federated/test_flower_faults.py",
        ("late", "if timeout is None or time.monotonic() - start <= timeout:", "if True:", "late replies count"),
    ),
    # --- self-tuning networks ---
    *_of(
        "python_api/partnets/stn/response.py",
        f"{NETS}/stn",
        (
            "merged response",
            "grads_rows.append(own.mul_(hyper_weight)",
            "grads_rows.append(own.mul_(weight)",
            "the gradient of V uses W, where each example has a separate weight",
        ),
        (
            "two responses",
            "grad_x = None if more is None else grad_x.add_(more)",
            "grad_x = None if more is None else grad_x",
            "the gradient of x lacks the part through W_hyper",
        ),
    ),
    *_of(
        "python_api/partnets/stn/vector.py",
        f"{NETS}/stn {NETS}/hyper",
        (
            "shared perturbation",
            "noise = torch.where(self.own().to(scale.device), noise, noise[:1])",
            "pass",
            "layers see different values of a batch-wide hyperparameter for each example",
        ),
        (
            "centre",
            "perturbation(value - self.present().detach()) if self.centred else value",
            "value",
            "centred layers read λ instead of its perturbation",
        ),
    ),
    *_of(
        "python_api/partnets/stn/start.py",
        f"{NETS}/stn/test_hyper_misuse.py",
        ("unread", "if read.issuperset(named):", "if True:", "a hyperparameter that nothing reads is tuned"),
        ("others' rows", "> most:", "> 1e9:", "an example's output depends on the hyperparameters of others"),
    ),
    *_of(
        "python_api/partnets/stn/step.py",
        f"{NETS}/stn/test_hyper_misuse.py",
        ("counted twice", "buffer.copy_(value)", "pass", "a batch counts twice in running statistics"),
    ),
    *_of(
        "python_api/partnets/stn/step.py",
        f"{NETS}/stn/test_hyper_training.py {NETS}/distributed/test_distributed_responses.py",
        (
            "judging",
            "with evaluating(model):",
            "if True:",
            "hyperparameters are evaluated with dropout and augmentations",
        ),
        (
            "others' gradients",
            "parameter.grad = gradient",
            "pass",
            "parameters without a response learn at perturbed hyperparameters too",
        ),
        (
            "gradients as views",
            "grad.clone() if grad is not None and grad._is_view() else grad",
            "grad",
            "gradients of the response, sent between ranks, overwrite those of the weights",
        ),
        (
            "lifted",
            "tree_map(lifted, output)",
            "output",
            "a linearised response is evaluated only at the present hyperparameters",
        ),
    ),
    *_of(
        "python_api/partnets/stn/norm.py",
        f"{NETS}/stn/test_hyper_layers.py",
        (
            "running statistics",
            "kept[0] is None, 0.0",
            "True, 0.0",
            "a norm in evaluation has the gradient of batch normalisation",
        ),
    ),
    *_of(
        "python_api/partnets/stn/layer.py",
        f"{NETS}/stn",
        (
            "reset inside",
            "new._modules = {}",
            "pass",
            "the rate of a DropConnect inside a recurrent layer is reset",
        ),
    ),
    *_of(
        "python_api/partnets/utils/in_thread.py",
        f"{NETS}/utils {NETS}/stn",
        (
            "contexts",
            "now = {**handed_on(HANDED_ON, {}), **values}",
            "now = {**values}",
            "a context that ends removes other contexts' values from threads of backward passes",
        ),
    ),
]


# --- running them ---


class Tree:
    """A copy of the tracked files and the compiled library, in which faults are applied and reverted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        extra = [*ROOT.glob("build/temp*/csrc/**/*"), ROOT / LIBRARY, ROOT / "partkernels" / "build_info.json"]
        for path in [*(ROOT / name for name in listed.split("\0") if name), *extra]:
            if path.is_file():
                to = folder / path.relative_to(ROOT)
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, to)

    def build(self) -> None:
        """Compile the C++ library without faults, reusing copied object files that are up to date."""
        environment = os.environ | {"PARTKERNELS_BUILD": "cpu"}
        done = self._run(sys.executable, "setup.py", "--quiet", "build_ext", "--inplace", env=environment)
        if done.returncode:
            raise RuntimeError(f"the C++ library cannot be built:\n{done.stderr}")

    @contextlib.contextmanager
    def mutated(self, mutant: Mutant) -> Iterator[str | None]:
        """Apply a mutant within the context; yield the compiler's output if it does not compile, otherwise None."""
        path = self.folder / mutant.file
        before = path.read_bytes()
        mutant.apply(self.folder)
        library = self.folder / LIBRARY
        kept = library.read_bytes() if mutant.is_compiled else None
        try:
            yield self._compile(mutant) if mutant.is_compiled else None
        finally:
            path.write_bytes(before)
            if kept is not None:
                library.write_bytes(kept)

    def _compile(self, mutant: Mutant) -> str | None:
        """Recompile the sources that include a mutated file, for one instruction set, and relink the library."""
        import torch

        home = Path(torch.__file__).parent
        binding = [path for folder in (".", "cpu") for path in (self.folder / "csrc" / "torch" / folder).glob("*.cpp")]
        kernels = [self.folder / "csrc" / "cpu" / "isa_portable.cpp"]
        chosen = binding if mutant.file.startswith("csrc/torch") else kernels
        sources = [path.resolve().relative_to(self.folder.resolve()).as_posix() for path in chosen]
        built = next(self.folder.glob("build/temp*"))
        objects = {path.relative_to(built).with_suffix(".cpp").as_posix(): path for path in built.glob("csrc/**/*.o")}
        objects |= {source: self.folder / "build" / f"{Path(source).stem}-mutant.o" for source in sources}
        compiler = shlex.split(os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++")
        flags = ["-std=c++20", "-O1", "-fPIC", "-w", "-fvisibility=hidden", "-DTORCH_TARGET_VERSION=0x020a000000000000"]
        flags += ["-Icsrc/include", "-Icsrc/torch/cpu", "-Icsrc/torch", "-Icsrc/cpu", f"-I{home / 'include'}"]
        commands = [[*compiler, *flags, "-c", source, "-o", objects[source]] for source in sources]
        commands += [[*compiler, "-shared", *objects.values(), "-o", LIBRARY, f"-L{home / 'lib'}", "-ltorch_cpu"]]
        done = [self._run(*command) for command in commands]
        return next((one.stderr for one in done if one.returncode), None)

    def test(self, mutant: Mutant | None, run: str, *arguments: str) -> str | None:
        """Run tests until one fails and return its id; None if all pass."""
        environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(self.folder), str(self.folder / "python_api")))}
        environment |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "PYTHONDONTWRITEBYTECODE": "1"}
        environment |= {"FULL": "1" if run == "full" else "", "WEEKLY": ""}
        # Triton's cache depends only on a kernel's source, so the mutants need a separate cache.
        environment |= {"TRITON_CACHE_DIR": str(self.folder / "build" / "triton-cache")}
        if mutant is not None and mutant.is_compiled:
            environment["PARTKERNELS_CPU_ISA"] = "portable"
        options = ["-x", "-q", "-p", "no:cacheprovider", "--no-header", "-rfE", "--tb=no"]
        try:
            done = run_python(
                "-m", "pytest", *options, *arguments, environment=environment, cwd=self.folder, timeout=LONG
            )
        except subprocess.TimeoutExpired:
            return f"not done after {LONG} s"
        if done.returncode in (0, 5):  # 5: this kind of run has none of these tests
            return None
        if done.returncode < 0:
            return f"pytest died of signal {-done.returncode}"
        # "ERROR gw1" does not match: it means that a pytest-xdist worker failed, not a test.
        found = re.findall(r"^(?:FAILED|ERROR) (\S+\.py.*?)(?: - .*)?$", done.stdout, re.MULTILINE)
        if not found:
            raise RuntimeError(f"pytest ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
        return found[0]

    def _run(self, *command, **options) -> subprocess.CompletedProcess:
        return subprocess.run([*map(str, command)], cwd=self.folder, capture_output=True, text=True, **options)


def killer(tree: Tree, mutant: Mutant) -> tuple[str, str] | None:
    """Return the test that fails with a mutant and the kind of run, usual or full; None if no test fails."""
    with tree.mutated(mutant) as problem:
        if problem is not None:
            raise ValueError(f"mutant {mutant.name!r} does not compile:\n{problem}")
        for run, tests in (("usual", mutant.tests), ("full", mutant.tests), ("full", ALL_TESTS)):
            if test := tree.test(mutant, run, *tests):
                return test, run
    return None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run only these mutants")
    parser.add_argument("--jobs", type=int, default=1, help="copies of the tree that are tested at once")
    options = parser.parse_args(arguments)
    names = [mutant.name for mutant in MUTANTS]
    if len(set(names)) < len(names):
        parser.error("two mutants have the same name")
    if unknown := set(options.only or ()) - set(names):
        parser.error(f"there is no mutant {', '.join(sorted(unknown))}; --list names all")
    chosen = [mutant for mutant in MUTANTS if options.only is None or mutant.name in options.only]
    if options.list:
        print("\n".join(f"{mutant.name}: {mutant.file}: {mutant.breaks}" for mutant in chosen))
        return 0
    if importlib.util.find_spec("partkernels") is None:
        parser.error("partkernels is not installed; `make .venv/test` does it")

    CONTEXT.set_forkserver_preload(IMPORTED)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as threads:
        trees: SimpleQueue[Tree] = SimpleQueue()
        for i in range(options.jobs):
            trees.put(Tree(Path(folder) / str(i)))
        first = trees.get()
        for mutant in MUTANTS:  # check that all apply before spending hours on any
            with contextlib.ExitStack() as stack:
                path = first.folder / mutant.file
                stack.callback(path.write_bytes, path.read_bytes())
                mutant.apply(first.folder)
        trees.put(first)
        if any(mutant.is_compiled for mutant in chosen):
            for _ in range(options.jobs):
                tree = trees.get()
                tree.build()
                trees.put(tree)

        def try_one(mutant: Mutant) -> tuple[str, str] | None:
            tree = trees.get()
            try:
                return killer(tree, mutant)
            finally:
                trees.put(tree)

        own = sorted({path for mutant in chosen for path in mutant.tests})
        if failing := first.test(None, "usual", *IN_WORKERS, *own):
            raise ValueError(f"{failing} fails without any mutant; fix it first.")

        print("| mutant | breaks | killed by | in |\n|---|---|---|---|")
        killers: dict[str, list[str]] = {"usual": [], "full": []}
        for mutant, found in zip(chosen, threads.map(try_one, chosen), strict=True):
            test, run = found or ("SURVIVED", "")
            if found:
                killers[run].append(test)
            print(f"| {mutant.name} | {mutant.breaks} | {test} | {run} |", flush=True)
        named = sorted({test for test in killers["full"] if "::" in test})  # the others crashed or timed out
        if named and (failing := first.test(None, "full", *named)):
            raise ValueError(f"{failing} fails without any mutant; fix it first.")
    usual, full = map(len, killers.values())
    print(f"\n`make test` kills {usual} of {len(chosen)} mutants and `make test FULL=1` kills {full} more.")
    return int(usual + full < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
