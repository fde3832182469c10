"""Chunks are disjoint, complete and of the right sizes, and are sampled as described in Appendix I.1."""

import copy
import tracemalloc

import numpy
import pandas
import pytest
import torch
import torch.nn.functional as F
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


def data(n=23):
    return torch.arange(n).float()[:, None], torch.arange(n) ** 2


@pytest.mark.parametrize(
    "dataset", [data(), list(data()), TensorDataset(*data()), Squares()], ids=lambda d: type(d).__name__
)
def test_chunks_are_disjoint_and_complete(dataset):
    chunks = partnets.chunk(dataset, (0.5, 0.3, 0.2), seed=1)
    assert chunks.count == len(chunks) == 3 and chunks.sizes == [11, 7, 5]
    assert sorted(i for k in (1, 2, 3) for i in chunks.indices(k).tolist()) == list(range(23))
    assert chunks.proportions == (11 / 23, 7 / 23, 5 / 23)
    assert [[y for _, y in part] for part in chunks] == [[i * i for i in chunks.indices(k).tolist()] for k in (1, 2, 3)]
    assert [len(chunks.upto(k)) for k in (1, 2, 3)] == [11, 18, 23]
    assert [int(y) for _, y in chunks.upto(2)] == [int(y) for k in (1, 2) for _, y in chunks[k]]


def test_the_split_follows_the_seed():
    first, again, other = (partnets.chunk(data(), (0.5, 0.5), seed=seed).order for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_a_fingerprint_knows_the_split_and_the_examples():
    def found(dataset, proportions=(0.5, 0.5), seed=0):
        return partnets.chunk(dataset, proportions, seed=seed).fingerprint

    flipped = tuple(part.flip(0) for part in data())
    others = [found(data(), seed=1), found(data(), (0.6, 0.4)), found(flipped), found(data(24)), found(Squares())]
    assert found(data()) == found(TensorDataset(*data())) and found(Squares()) == found(Squares())
    assert len({found(data()), *others}) == 6


@pytest.mark.full
def test_a_list_is_known_by_its_examples_as_tensors_are():
    def found(examples):
        return partnets.chunk(examples, (0.5, 0.5)).fingerprint

    x, y = data()
    examples = [(part, int(label)) for part, label in zip(x, y, strict=True)]
    assert found(examples) == found((x, y)) != found(examples[::-1])
    kinds = [{"words": f"{i}", "image": numpy.full((2, 2), i), "none": None} for i in range(20)]
    assert found(kinds) == found(copy.deepcopy(kinds)) != found(kinds[::-1])
    itself = []
    itself.append(itself)
    record = numpy.zeros((), dtype=[("part", "O")])
    for unknown in (object(), numpy.array([{}]), record, 1 << 70, itself):
        assert found([(unknown,)] * 9).endswith("-")
    for known in ("caf\udce9.png", torch.ones(2, dtype=torch.complex64).conj(), [0] * 100_000):
        assert not found([(known,)] * 9).endswith("-")
    assert found([("ab", "c")] * 9) != found([("a", "bc")] * 9) and found([(1.0,)] * 9) != found([(1 + 1e-12,)] * 9)


@pytest.mark.parametrize("dataset", [data(), Squares()], ids=["tensors", "dataset"])
def test_batches_come_from_the_right_chunks_and_match_their_targets(dataset):
    chunks = partnets.chunk(dataset, (0.5, 0.3, 0.2))
    for k in (1, 2, 3):
        x, y = chunks.sample(k, 50)
        assert set(x[:, 0].int().tolist()) <= set(chunks.indices(k).tolist())
        assert torch.equal(x[:, 0].long() ** 2, y)
        x, y = chunks.sample_upto(k, 50)
        assert set(x[:, 0].int().tolist()) <= {i for j in range(1, k + 1) for i in chunks.indices(j).tolist()}
        batches = list(chunks.batches(k, 3))
        assert torch.cat([x[:, 0].long() for x, _ in batches]).tolist() == chunks.indices(k).tolist()


def test_sampling_is_uniform_with_replacement():
    chunks = partnets.chunk(data(10), (0.6, 0.4))
    generator = torch.Generator().manual_seed(0)
    for sample, n in ((chunks.sample, 4), (chunks.sample_upto, 10)):
        x, _ = sample(2, 20000, generator)
        counts = torch.bincount(x[:, 0].int(), minlength=10)
        counts = counts[counts > 0]
        assert len(counts) == n and (counts / 20000 * n - 1).abs().max() < 0.1


def test_sampling_follows_its_generator():
    chunks = partnets.chunk(data(), (0.5, 0.5))
    draws = [chunks.sample(1, 9, torch.Generator().manual_seed(3))[1] for _ in range(2)]
    assert torch.equal(*draws)


@pytest.mark.parametrize("k", [0, 4, -1, True, "1"])
def test_chunks_that_are_not_there_raise(k):
    chunks = partnets.chunk(data(), (0.5, 0.3, 0.2))
    for use in (chunks.indices, chunks.upto, chunks.__getitem__, lambda k: chunks.sample_upto(k, 2)):
        with pytest.raises(IndexError, match=r"1\.\.3"):
            use(k)


@pytest.mark.parametrize("batch_size", [0, -1, 1.5, True])
def test_empty_batches_raise(batch_size):
    chunks = partnets.chunk(data(), (0.5, 0.5))
    for use in (chunks.sample, chunks.sample_upto, chunks.batches):
        with pytest.raises(ValueError, match="batch_size"):
            use(1, batch_size)


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
        ((), {}, TypeError, "tensors"),
        (torch.zeros(9), {}, TypeError, "Dataset"),
        (numpy.zeros((9, 2)), {}, TypeError, "Dataset"),
        ({"x": torch.zeros(9)}, {}, TypeError, "Dataset"),
        (Endless(), {}, TypeError, "data are a Endless; .*IterableDataset yields them in sequence.* Dataset"),
        (7, {}, TypeError, "Dataset"),
        (iter([1]), {}, TypeError, r"data are a list_iterator; .*list\(data\)"),
        ("train.csv", {}, TypeError, "data are a str; a path"),
        (DataLoader(Squares()), {}, TypeError, "data are a DataLoader; pass its data set"),
        (pandas.DataFrame({"x": [1.0]}), {}, TypeError, "data are a DataFrame; take its columns"),
        (partnets.chunk(data(), (0.5, 0.5)), {}, TypeError, "data are a Chunks; they are chunks already"),
        ((numpy.zeros((9, 2)), numpy.zeros(9)), {}, TypeError, r"tuple of ndarray, .*torch\.as_tensor"),
        ([[1.0], [2.0]], {}, TypeError, "list of list, .*A list of examples, each a tuple or a dict"),
    ],
)
def test_what_cannot_be_split_raises(dataset, arguments, error, message):
    with pytest.raises(error, match=message):
        partnets.chunk(dataset, **{"proportions": (0.5, 0.5)} | arguments)


RAGGED = [(torch.zeros(1 + i % 2), 0) for i in range(8)]
NO_BATCH = {
    "lengths": (
        RAGGED,
        ValueError,
        r"\(Tensor \[\d\], int\) make no batch: .*equal size.*pass collate=, .*pad_sequence",
    ),
    "lists": ([{"ids": [0] * (1 + i % 2)} for i in range(8)], ValueError, "make no batch: each element in list"),
    "images": ([(Image.new("L", (2, 2)), 0)] * 8, TypeError, "Image, int.*make no batch: .*transform images"),
    "None": ([(torch.zeros(2), None)] * 8, TypeError, "NoneType.*make no batch"),
    "names": ([{"a": 1}, {"b": 1}] * 4, ValueError, "make no batch"),
}


@pytest.mark.parametrize("name", NO_BATCH)
def test_examples_that_make_no_batch_are_named(name):
    examples, error, message = NO_BATCH[name]
    chunks = partnets.chunk(examples, (0.5, 0.5))
    with pytest.raises(error, match=f"(?i){message}"):
        chunks.sample_upto(2, 40)


def test_a_collate_function_of_ones_own_is_asked_for_tensors_too():
    chunks = partnets.chunk(data(), (0.5, 0.5), collate=len)
    assert chunks.sample(1, 5) == 5 and list(chunks.batches(2, 4)) == [4, 4, 3]


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
@pytest.mark.parametrize("n", [10**6])
def test_a_data_set_takes_eight_bytes_an_example_and_is_read_as_it_is_needed(n):
    huge, few = Huge(n), 500
    model = partnets.partition(nn.Linear(4, 2), (0.8, 0.2))
    partnets.Trainer(model, partnets.chunk(Huge(50), (0.8, 0.2))).fit(1)  # so that torch's late imports are not counted
    tracemalloc.start()  # traces Python objects, such as lists of ints
    chunks = partnets.chunk(huge, (1 - few / n, few / n))
    assert len(chunks[1]) == len(chunks.upto(1)) == n - few and chunks.order.nbytes == 8 * n
    chunks[1][5], chunks.fingerprint, next(chunks.batches(1, 10))
    assert huge.asked == 11
    partnets.Trainer(model, chunks, batch_size=10, lml_every=2, other_chunks=True, audit=False).fit(2)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert huge.asked == 41 + few and peak < 2e6


def test_the_last_of_many_examples_is_found():
    n = 2**24 + 4  # n - 1 is not representable in float32
    assert len(partnets.Chunks(Huge(n), torch.arange(n), [n]).fingerprint) == 33


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


def classifier(proportions=(0.5, 0.3, 0.2)):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 7), nn.Dropout(0.5), nn.Linear(7, 4))
    return perturbed(partnets.partition(layers, proportions), std=1.0)


def examples(n=31):
    return torch.randn(n, 3), torch.randint(4, (n,))


@pytest.mark.parametrize("batch_size", [1, 4, 256])
def test_lml_is_the_log_likelihood_of_each_chunk_under_the_subnetwork_before_it(batch_size):
    x, y = examples()
    model, chunks = classifier(), partnets.chunk((x, y), (0.5, 0.3, 0.2))
    expected = 0.0
    for k in (2, 3):
        network = partnets.merge(model, k - 1).eval()
        chunk = chunks.indices(k)
        expected += network(x[chunk]).log_softmax(1)[range(len(chunk)), y[chunk]].sum().item()
    assert partnets.lml(model, chunks, batch_size=batch_size) == pytest.approx(expected, rel=1e-5)


def test_lml_takes_any_mean_negative_log_likelihood():
    x = torch.randn(20, 2)
    model = partnets.partition(nn.Sequential(nn.Linear(2, 1)), (0.5, 0.5))
    chunks = partnets.chunk((x, x[:, :1]), (0.5, 0.5))
    assert partnets.lml(model, chunks, lambda output, y: output.mean() * 0 + 2.0) == -20.0


def test_lml_leaves_modes_gradients_and_random_state_alone():
    model, chunks = classifier(), partnets.chunk(examples(), (0.5, 0.3, 0.2))
    model[1].eval()
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    partnets.lml(model, chunks)
    partnets.lml(model, chunks, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())


def test_lml_of_a_noisy_model_follows_its_seed():
    class Noise(nn.Module):
        def forward(self, x):
            return x + torch.randn_like(x)

    model, chunks = nn.Sequential(Noise(), classifier()), partnets.chunk(examples(), (0.5, 0.3, 0.2))
    values = [partnets.lml(model, chunks, seed=seed) for seed in (0, 0, 1)]
    assert values[0] == values[1] != values[2]


def test_lml_needs_as_many_chunks_as_partitions_and_two_of_them():
    with pytest.raises(ValueError, match="3 partitions and the data 2 chunks"):
        partnets.lml(classifier(), partnets.chunk(examples(), (0.5, 0.5)), F.cross_entropy)
    with pytest.raises(ValueError, match="at least 2"):
        partnets.lml(classifier((1.0,)), partnets.chunk(examples(), (1.0,)))
