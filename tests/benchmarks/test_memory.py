"""Tests of memory: counts equal arithmetic, measurements equal known values, and the README's promises hold."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from pairwise import pairwise

import partkernels as pk
import partnets
from partbench.measuring import peak
from partbench.measuring.peak import Job
from partbench.peers.layer import THREE, Partitioning
from partbench.peers.models import NAMED
from partbench.presets import PRESETS
from partbench.suites import memory
from partbench.suites.memory import computed, counted, entropy, mapped
from partbench.summary import memory as rows
from partkernels.arguments import row_bytes
from partkernels.backend.dispatch import READY, backends

BACKEND = "cpu" if backends()["cpu"] == READY else "reference"


@pytest.mark.cases(usual=1)
@pairwise(
    scheme=["dense", "paper", "partkernels"],
    model=["mnist-cnn", "resnet-8", "resnet-9", "vit-tiny"],
    partitioning=[THREE, Partitioning((0.5, 0.5), "zeros"), Partitioning((0.2,) * 5, "stored")],
)
def test_computed_bytes_equal_counted_bytes(scheme, model, partitioning):
    job = Job(model, scheme, BACKEND, batch=1, partitioning=partitioning)
    with torch.device("meta"):
        expected = computed(scheme, NAMED[model].make(), partitioning, NAMED[model].optimizer)
    with pk.use_backend(BACKEND):
        assert counted(job.make()) == expected


def test_the_billion_parameter_transformer_takes_a_sixteenth_of_its_weights_for_the_map():
    records = memory.measure([], [BACKEND], arithmetic=[Job("transformer-1b")])
    by_peer = rows(records).set_index("peer")
    ours, paper = by_peer.loc[f"partkernels {BACKEND}"], by_peer.loc["paper"]
    assert (ours.map_bits, paper.map_bits) == (2, 8)
    exchanged = 0.2 * (4 + 4 + 4)  # places, defaults and learned values of partitions 2 and 3
    assert (ours.defaults, paper.defaults) == (pytest.approx(exchanged * ours.partitioned), 4 * paper.partitioned)
    assert ours.by_arithmetic


@pytest.mark.parametrize("model", [name for name in NAMED if name != "transformer-1b"])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_maps_take_at_most_two_bits_a_weight_and_their_row_padding(model, count):
    partitioning = Partitioning((1 / count,) * count)
    with torch.device("meta"):
        made = NAMED[model].make()
        ours, floor = (computed(scheme, made, partitioning, "adam") for scheme in ("partkernels", "floor"))
    weights = sum(p.numel() for p in made.parameters())
    rows = sum(weight.shape[0] for weight in mapped(made.modules()))
    assert floor["map"] <= ours["map"] <= weights / 4 + 16 * rows
    size = next(made.parameters()).element_size()
    entry = 4 + 2 * size  # a place, a default and a learned value
    assert ours["defaults"] <= entry * ((1 - 1 / count) * weights + len(list(made.parameters())))


def test_entropy_is_the_logarithm_of_the_number_of_assignments():
    n, sizes = 6000, (4800, 600, 600)
    logarithm = torch.lgamma(torch.tensor([n + 1.0, *(size + 1.0 for size in sizes)], dtype=torch.float64))
    bits = (logarithm[0] - logarithm[1:].sum()).item() / torch.tensor(2.0).log().item()
    assert bits / n == pytest.approx(entropy(THREE), rel=0.01)


@pytest.mark.full
@pytest.mark.parametrize("model", ["resnet-14"])
def test_training_peaks_within_2_percent_of_dense_plus_map_and_defaults(model):
    dense = Job(model, "dense", batch=dict(PRESETS["full"].memory)[model])
    ours = dataclasses.replace(dense, scheme="partkernels", backend=BACKEND)
    with torch.device("meta"):
        kept = computed("partkernels", NAMED[model].make(), THREE, "adam")
    assert peak.by_allocator(ours) <= 1.02 * peak.by_allocator(dense) + kept["map"] + kept["defaults"]


@pytest.mark.full
def test_nested_partitions_exchange_nothing_and_need_no_more_than_the_dense_model():
    dense = Job("mnist-cnn", "dense", batch=32)
    nested = dataclasses.replace(dense, scheme="nested")
    assert peak.by_allocator(nested) <= peak.by_allocator(dense)
    step = nested.make()
    kept, shapes = memory.counted(step), [one.shape for one in partnets.partitions(step.model).values()]
    assert kept["defaults"] == 0
    assert kept["map"] == sum(shape[0] * row_bytes(math.prod(shape[1:]), bits=2) for shape in shapes)
