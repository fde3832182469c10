"""Chunks are disjoint, complete and of the right sizes, and are sampled as described in Appendix I.1; and L_ML."""

import copy
import tracemalloc

import numpy
import pandas
import pytest
import torch
from PIL import Image
from small_network import perturbed
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import partnets


class Squares(Dataset):
    def __len__(self):
        return 23

    def __getitem__(self, i):
        return torch.tensor([float(i)]), i * i


class Negated(TensorDataset):
    """A subclass that transforms its examples."""

    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return -x, y


def data(n=23):
    return torch.arange(n).float()[:, None], torch.arange(n) ** 2


KINDS = [data(), list(data()), TensorDataset(*data()), Squares(), Subset(Squares(), range(23))]


@pytest.mark.parametrize("dataset", KINDS, ids=lambda d: type(d).__name__)
def test_chunks_are_disjoint_and_complete_and_sampled(dataset):
    chunks = partnets.chunk(dataset, (0.5, 0.3, 0.2), seed=1)
    assert len(chunks) == 3 and chunks.sizes == [11, 7, 5]
    assert sorted(i for k in (1, 2, 3) for i in chunks.indices(k).tolist()) == list(range(23))
    assert chunks.proportions == (11 / 23, 7 / 23, 5 / 23)
    assert [[y for _, y in part] for part in chunks] == [[i * i for i in chunks.indices(k).tolist()] for k in (1, 2, 3)]
    assert [int(y) for _, y in chunks.upto(2)] == [int(y) for k in (1, 2) for _, y in chunks[k]]
    for k in (1, 2, 3):
        for (x, y), few in (
            (chunks.sample(k, 50), chunks.indices(k)),
            (chunks.sample_upto(k, 50), torch.cat([chunks.indices(j) for j in range(1, k + 1)])),
        ):
            assert set(x[:, 0].int().tolist()) <= set(few.tolist()) and torch.equal(x[:, 0].long() ** 2, y)


def test_the_split_and_the_sampling_follow_their_seeds():
    first, again, other = (partnets.chunk(data(), (0.5, 0.5), seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.order, again.order) and not torch.equal(first.order, other.order)
    draws = [chunks.sample(1, 9, torch.Generator().manual_seed(3))[1] for chunks in (first, again)]
    assert torch.equal(*draws)


def test_sampling_is_uniform_with_replacement():
    chunks = partnets.chunk(data(10), (0.6, 0.4))
    generator = torch.Generator().manual_seed(0)
    for sample, n in ((chunks.sample, 4), (chunks.sample_upto, 10)):
        x, _ = sample(2, 20000, generator)
        counts = torch.bincount(x[:, 0].int(), minlength=10)
        counts = counts[counts > 0]
        assert len(counts) == n and (counts / 20000 * n - 1).abs().max() < 0.1


def test_batches_are_those_of_transforms_and_collate_functions():
    x = torch.arange(1.0, 21.0)[:, None]
    chunks = partnets.chunk(Negated(x, torch.arange(20)), (0.5, 0.5))
    for sample in (chunks.sample, chunks.sample_upto):
        batch, y = sample(2, 30)
        assert torch.equal(batch[:, 0], -1.0 - y)
    assert partnets.chunk(data(), (0.5, 0.5), collate=len).sample(1, 5) == 5


def fingerprint(dataset, proportions=(0.5, 0.5), seed=0):
    return partnets.chunk(dataset, proportions, seed=seed).fingerprint


def test_a_fingerprint_knows_the_split_and_the_examples():
    flipped = tuple(part.flip(0) for part in data())
    others = [fingerprint(data(), seed=1), fingerprint(data(), (0.6, 0.4)), fingerprint(flipped), fingerprint(data(24))]
    assert fingerprint(data()) == fingerprint(TensorDataset(*data())) and fingerprint(Squares()) == fingerprint(
        Squares()
    )
    assert len({fingerprint(data()), fingerprint(Squares()), *others}) == 6


def test_a_list_is_known_by_its_tensors_numbers_and_texts():
    kinds = [{"words": f"{i}", "image": numpy.full((2, 2), i), "none": None} for i in range(20)]
    assert fingerprint(kinds) == fingerprint(copy.deepcopy(kinds)) != fingerprint(kinds[::-1])
    for unknown in (object(), numpy.array([{}]), 1 << 70):
        assert fingerprint([(unknown,)] * 9).endswith("-")
    for known in ("caf\udce9.png", torch.ones(2, dtype=torch.complex64).conj(), [0] * 100_000, Image.new("L", (2, 2))):
        assert not fingerprint([(known,)] * 9).endswith("-")
    assert fingerprint([("ab", "c")] * 9) != fingerprint([("a", "bc")] * 9)
    assert fingerprint([(1.0,)] * 9) != fingerprint([(1 + 1e-12,)] * 9)


class Endless(IterableDataset):
    def __iter__(self):
        return iter(())

    def __len__(self):  # some iterable data sets define it
        return 9


@pytest.mark.parametrize(
    ("dataset", "arguments", "error", "message"),
    [
        (data(5), {"proportions": (0.95, 0.05)}, ValueError, "chunk 2 .* would be empty"),
        (data(), {"proportions": (0.5, 0.6)}, ValueError, "sum to"),
        (data(), {"seed": -1}, ValueError, "seed"),
        ((torch.zeros(3), torch.zeros(4)), {}, ValueError, "equal length"),
        ((torch.zeros(3), [1, 2, 3]), {}, TypeError, "tensors"),
        (torch.zeros(9), {}, TypeError, "Dataset"),
        (numpy.zeros((9, 2)), {}, TypeError, "Dataset"),
        ({"x": torch.zeros(9)}, {}, TypeError, r"data are a dict; pass one data set .* such as data\['train'\]"),
        (Endless(), {}, TypeError, r"data are a Endless; .*list\(dataset\); pass a Dataset"),
        (iter([1]), {}, TypeError, r"data are a list_iterator; .*list\(data\)"),
        ("train.csv", {}, TypeError, "data are a str; a path"),
        (DataLoader(Squares()), {}, TypeError, "data are a DataLoader; pass its data set"),
        (pandas.DataFrame({"x": [1.0]}), {}, TypeError, "data are a DataFrame; .*torch.as_tensor"),
        (partnets.chunk(data(), (0.5, 0.5)), {}, TypeError, "data are a Chunks; they are chunks already"),
        ((numpy.zeros((9, 2)), numpy.zeros(9)), {}, TypeError, r"tuple of ndarray, .*torch\.as_tensor"),
        ([[1.0], [2.0]], {}, TypeError, "list of list, .*A list of examples, each a tuple or a dict"),
    ],
)
def test_data_that_cannot_be_split_are_named(dataset, arguments, error, message):
    with pytest.raises(error, match=message):
        partnets.chunk(dataset, **{"proportions": (0.5, 0.5)} | arguments)


@pytest.mark.parametrize(
    ("examples", "error", "message"),
    [
        (
            [(torch.zeros(1 + i % 2), 0) for i in range(8)],
            ValueError,
            r"\(Tensor \[\d\], int\) .*equal size.*pad_sequence",
        ),
        ([{"ids": [0] * (1 + i % 2)} for i in range(8)], ValueError, "make no batch: each element in list"),
        ([(Image.new("L", (2, 2)), 0)] * 8, TypeError, "Image, int.*make no batch: .*transform images"),
        ([(torch.zeros(2), None)] * 8, TypeError, "NoneType.*make no batch"),
        ([{"a": 1}, {"b": 1}] * 4, ValueError, "make no batch"),
    ],
)
def test_examples_that_make_no_batch_are_named(examples, error, message):
    chunks = partnets.chunk(examples, (0.5, 0.5))
    with pytest.raises(error, match=f"(?i){message}"):
        chunks.sample_upto(2, 40)


@pytest.mark.parametrize("k", [0, 4, True, "1"])
def test_chunks_and_batches_out_of_range_are_named(k):
    chunks = partnets.chunk(data(), (0.5, 0.3, 0.2))
    for use in (chunks.indices, chunks.upto, chunks.__getitem__, lambda k: chunks.sample_upto(k, 2)):
        with pytest.raises(IndexError, match=r"1\.\.3"):
            use(k)
    with pytest.raises(ValueError, match="batch_size=0"):
        chunks.sample(1, 0)


class Huge(Dataset):
    """A data set that claims more examples than fit into memory and counts its fetches."""

    asked = 0

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        assert type(i) is int
        self.asked += 1
        return torch.full((4,), float(i % 7)), i % 2


@pytest.mark.filterwarnings("ignore:the partitions have")
def test_a_data_set_takes_eight_bytes_an_example_and_is_read_as_it_is_needed():
    n, few = 10**6, 500
    huge = Huge(n)
    model = partnets.partition(nn.Linear(4, 2), (0.8, 0.2))
    partnets.Trainer(model, partnets.chunk(Huge(50), (0.8, 0.2))).fit(1)  # so that torch's late imports are not counted
    tracemalloc.start()  # traces Python objects, such as lists of ints
    chunks = partnets.chunk(huge, (1 - few / n, few / n))
    assert len(chunks[1]) == len(chunks.upto(1)) == n - few and chunks.order.nbytes == 8 * n
    chunks[1][5], chunks.fingerprint
    assert huge.asked == 1
    partnets.Trainer(model, chunks, batch_size=10, lml_every=2, other_chunks=True, audit=False).fit(2)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert huge.asked == 31 + few and peak < 2e6


@pytest.mark.full
def test_subsets_of_chunks_are_those_of_torch():
    chunks = partnets.chunk(Squares(), (0.5, 0.5))
    numbers = chunks.indices(1).tolist()
    assert list(chunks[1].indices) == numbers and chunks[1].indices[2:4] == numbers[2:4]
    loaded = DataLoader(chunks[1], batch_size=4, num_workers=1, multiprocessing_context="spawn")
    assert torch.cat([y for _, y in loaded]).tolist() == [i * i for i in numbers]
    assert partnets.chunk(Subset(chunks[1], [3, 1]), (0.5, 0.5)).sample_upto(2, 50)[1].unique().tolist() == sorted(
        numbers[i] ** 2 for i in (3, 1)
    )


def classifier():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 7), nn.Dropout(0.5), nn.Linear(7, 4))
    return perturbed(partnets.partition(layers, (0.5, 0.3, 0.2)), std=1.0)


@pytest.mark.parametrize("batch_size", [1, 4, 256])
def test_lml_is_the_log_likelihood_of_each_chunk_under_the_subnetwork_before_it(batch_size):
    x, y = torch.randn(31, 3), torch.randint(4, (31,))
    model, chunks = classifier(), partnets.chunk((x, y), (0.5, 0.3, 0.2))
    expected = 0.0
    for k in (2, 3):
        network = partnets.merge(model, k - 1).eval()
        chunk = chunks.indices(k)
        expected += network(x[chunk]).log_softmax(1)[range(len(chunk)), y[chunk]].sum().item()
    model[1].eval()
    modes, state = [module.training for module in model.modules()], torch.get_rng_state()
    for seed in (None, 3):
        assert partnets.lml(model, chunks, batch_size=batch_size, seed=seed) == pytest.approx(expected, rel=1e-5)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())


class Noise(nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x)


def test_lml_of_a_noisy_model_follows_its_seed_and_takes_any_mean():
    model, data = nn.Sequential(Noise(), classifier()), (torch.randn(31, 3), torch.randint(4, (31,)))
    chunks = partnets.chunk(data, (0.5, 0.3, 0.2))
    values = [partnets.lml(model, chunks, seed=seed) for seed in (0, 0, 1)]
    assert values[0] == values[1] != values[2]
    assert partnets.lml(model, chunks, lambda output, y: output.mean() * 0 + 2.0) == -2.0 * sum(chunks.sizes[1:])
