"""The bit-level formats, compared with independent short implementations in NumPy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from against_dense import BACKENDS, BY_ONE_PLAN
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import pairwise

import partkernels as pk
from partkernels.arguments import bits_for, matrix_shape, row_bytes, sizes
from partkernels.backend import dispatch
from partkernels.formats import packed_map
from partkernels.formats.philox import philox4x32

SEEDS = st.integers(0, 2**63 - 1)


def philox_in_numpy(counter: list[int], seed: int) -> list[int]:
    """Compute Philox4x32-7 with Python integers."""
    c, k = list(counter), [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(7):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def bfloat16_bits(value: np.float32) -> int:
    """Return the bits of the nearest bfloat16, ties to even."""
    bits = int(np.float32(value).view(np.uint32))
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16) & 0xFFFF


def default_in_numpy(defaults: pk.Uniform | pk.Normal, r: int, c: int) -> int:
    """Return the bfloat16 bits of one default, following only the format's specification."""
    stream = [defaults.stream & 0xFFFFFFFF, defaults.stream >> 32]
    if isinstance(defaults, pk.Normal):
        word = philox_in_numpy([c // 4, r, *stream], defaults.seed)[c % 4]
        total = sum(word.to_bytes(4, "little")) - 510
        return bfloat16_bits(np.float32(total) * np.float32(defaults.std / np.sqrt(21845)))
    words = philox_in_numpy([4 * (c // 64) + (c // 2) % 4, r, *stream], defaults.seed)
    byte = 4 * ((c // 16) % 4) + 2 * ((c // 8) % 2) + c % 2
    draw = words[byte // 4].to_bytes(4, "little")[byte % 4]
    unit = np.uint32(bfloat16_bits(np.float32(defaults.scale / 127.5)) << 16).view(np.float32)
    value = np.float32((draw & 127) + 0.5) * unit
    return bfloat16_bits(-value if draw & 128 else value)


def read_map(packed: np.ndarray, r: int, c: int, bits: int) -> int:
    return int(packed[r, c * bits // 8]) >> (c * bits % 8) & ((1 << bits) - 1)


def bits_of(values: torch.Tensor) -> torch.Tensor:
    return values.bfloat16().view(torch.int16).int() & 0xFFFF


@pytest.mark.parametrize(
    ("counter", "seed", "answer"),
    [
        ([0, 0, 0, 0], 0, [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            0x299F31D0A4093822,
            [0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A],
        ),
    ],
)
def test_philox_gives_the_known_answers(counter, seed, answer):
    assert philox_in_numpy(counter, seed) == answer
    assert [int(word) for word in philox4x32(tuple(torch.tensor(w) for w in counter), seed)] == answer


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
@pytest.mark.parametrize("kind", [pk.Uniform, pk.Normal])
@given(seed=SEEDS, stream=SEEDS, scale=st.floats(1e-30, 1e30), rows=st.integers(1, 5), cols=st.integers(1, 150))
@settings(max_examples=15, deadline=None)
def test_defaults_have_the_bits_of_the_format(backend, kind, seed, stream, scale, rows, cols):
    defaults = kind(scale, seed, stream)
    expected = [[default_in_numpy(defaults, r, c) for c in range(cols)] for r in range(rows)]
    with pk.use_backend(backend):
        assert bits_of(defaults.values((rows, cols))).tolist() == expected


@pairwise(
    backend=["reference", *BACKENDS],
    shape=[(3,), (2, 3, 5), (2, 3, 2, 4), (2, 3, 2, 2, 2)],
    dtype=[torch.float16, torch.float32, torch.float64, torch.bfloat16],
)
def test_defaults_of_any_shape_and_dtype_are_those_of_its_matrix(backend, shape, dtype):
    defaults = pk.Uniform(0.3, seed=6, stream=7)
    with pk.use_backend(backend):
        values = defaults.values(shape, dtype)
    assert values.dtype == dtype and values.is_contiguous()
    with pk.use_backend("reference"):
        expected = defaults.values(matrix_shape(shape), torch.float64)
    assert torch.equal(packed_map.to_matrix(values).double(), expected)


@pairwise(
    kind={"uniform": pk.Uniform, "normal": pk.Normal},
    shape=[(5,), (3, 700), (4, 3, 5, 2)],
    dtype=[torch.float32, torch.float64, torch.bfloat16],
    target=BY_ONE_PLAN,
)
def test_every_backend_regenerates_the_same_bits(target, dtype, shape, kind):
    defaults = kind(0.37, seed=2**62 + 3, stream=2**40 + 1)
    partition = pk.Partition.from_ids(torch.full(shape, 2, dtype=torch.uint8), defaults=defaults)
    weight = torch.full(shape, torch.nan, dtype=dtype, device=target.device)
    with target.use():
        dead = pk.subnetwork_weight(weight, partition.to(target.device), active=1).cpu()
    with pk.use_backend("reference"):
        assert torch.equal(dead, defaults.values(shape, dtype))
    assert torch.equal(dead.bfloat16().to(dtype), dead), "defaults should be bfloat16 numbers"


def test_the_known_answers_of_the_cpp_test_are_the_formats():
    columns = [0, 1, 2, 8, 16, 63, 64, 199]
    uniform = pk.Uniform(0.1, seed=(7 << 32) | 5, stream=(3 << 32) | 2)
    normal = pk.Normal(0.1, seed=(7 << 32) | 5, stream=(3 << 32) | 2)
    answers = {
        uniform: [0xBCEB, 0x3D2F, 0x3CC4, 0x3D8E, 0x3D80, 0x3BDB, 0x3D12, 0xBDA3],
        normal: [0xBBC8, 0x3DB7, 0x3E13, 0xBD37, 0xBE21, 0x3E05, 0xBDCE, 0x0000],
    }
    for defaults, answer in answers.items():
        assert [default_in_numpy(defaults, 8, c) for c in columns] == answer
        assert bits_of(defaults.values((9, 200)))[8, columns].tolist() == answer


def test_uniform_and_normal_have_the_moments_they_promise():
    uniform = pk.Uniform(2.0, seed=1).values((500, 500), torch.float64)
    assert uniform.abs().max() <= 2.01
    assert uniform.mean().abs() < 0.01
    assert uniform.std() == pytest.approx(2 / 3**0.5, rel=0.01)
    normal = pk.Normal(2.0, seed=1).values((500, 500), torch.float64)
    assert normal.mean().abs() < 0.02
    assert normal.std() == pytest.approx(2, rel=0.01)


@pytest.mark.full
@given(count=st.integers(1, 256), rows=st.integers(1, 4), cols=st.integers(1, 70), data=st.data())
@settings(max_examples=60, deadline=None)
def test_packed_maps_unpack_to_the_same_ids(count, rows, cols, data):
    bits = bits_for(count)
    assert count <= 2**bits
    assert bits == 1 or count > 2 ** (bits // 2)
    ids = torch.tensor(
        data.draw(st.lists(st.integers(0, count - 1), min_size=rows * cols, max_size=rows * cols)), dtype=torch.uint8
    ).view(rows, cols)
    packed = packed_map.pack(ids, bits)
    assert packed.shape == (rows, row_bytes(cols, bits))
    assert packed.shape[1] % 16 == 0 and packed.shape[1] - 16 < -(-cols * bits // 8) <= packed.shape[1]
    assert [[read_map(packed.numpy(), r, c, bits) for c in range(cols)] for r in range(rows)] == ids.tolist()
    assert torch.equal(packed_map.unpack(packed, cols, bits), ids)
    used = torch.arange(packed.shape[1] * 8) < cols * bits
    as_bits = (packed[:, :, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    assert not as_bits.view(rows, -1)[:, ~used].any(), "padding should be 0"


def test_columns_of_a_convolution_run_with_input_channels_innermost():
    out, channels, height, width = 2, 3, 2, 5
    ids = torch.randint(1, 5, (out, channels, height, width), dtype=torch.uint8)
    packed = pk.Partition.from_ids(ids, num_partitions=4).map.numpy()
    for o, i, y, x in np.ndindex(*ids.shape):
        assert read_map(packed, o, (y * width + x) * channels + i, 2) == ids[o, i, y, x] - 1


@pytest.mark.parametrize("module", ["reference", *BACKENDS])
@given(seed=SEEDS, rows=st.integers(1, 20), cols=st.integers(1, 40), cuts=st.lists(st.floats(0, 1), max_size=5))
@settings(max_examples=20, deadline=None)
def test_random_maps_rank_entries_by_their_philox_word(module, seed, rows, cols, cuts):
    cuts = [0.0, *sorted(cuts), 1.0]
    counts = sizes(rows * cols, [b - a for a, b in itertools.pairwise(cuts)])
    words = [philox_in_numpy([i, 0, 0, 0x70617274], seed)[0] for i in range(rows * cols)]
    order = sorted(range(rows * cols), key=lambda i: (words[i], i))
    owners = np.repeat(np.arange(len(counts)), counts)
    bits = bits_for(len(counts))
    packed = dispatch.choose(module, torch.device("cpu")).random_map(rows, cols, counts, seed).numpy()
    assert [read_map(packed, i // cols, i % cols, bits) for i in order] == owners.tolist()


def test_ties_of_the_largest_remainder_go_to_the_lower_partition():
    assert sizes(5, (0.8, 0.1, 0.1)) == [4, 1, 0]
    assert sizes(3, (0.25, 0.25, 0.25, 0.25)) == [1, 1, 1, 0]
