"""The draws of a Loader: the right chunks and shares, independent of interruptions of a training."""

import itertools
from collections import Counter

import pytest
import torch

import partnets

PROPORTIONS = (0.5, 0.3, 0.2)
EXAMPLES = 50


def chunks():
    return partnets.chunk((torch.arange(EXAMPLES), torch.arange(EXAMPLES)), PROPORTIONS)


def loader(steps=10, **options):
    return partnets.Loader(chunks(), 4, steps=steps, **{"hyper_batch_size": 3, "seed": 5} | options)


def listed(draws):
    return [(k, x.tolist(), hyper_k, hyper_x.tolist()) for k, (x, _), hyper_k, (hyper_x, _) in draws]


def epochs(loader, count):
    return [draw for _ in range(count) for draw in listed(loader)]


def test_batches_come_from_the_chunks_up_to_k_and_from_the_one_that_is_unseen():
    parts, before = chunks(), torch.get_rng_state()
    for k, (x, y), hyper_k, (hyper_x, _) in loader(steps=100):
        assert torch.equal(x, y) and len(x) == 4 and len(hyper_x) == 3
        assert set(x.tolist()) <= {example.item() for example, _ in parts.upto(k)}
        assert set(hyper_x.tolist()) <= set(parts.indices(hyper_k).tolist())
    assert {draw[2:] for draw in loader(hyper_batch_size=None)} == {(None, None)}
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.full
def test_the_chunks_are_drawn_by_their_sizes():
    steps = 2000
    draws = list(loader(steps=steps))
    shares = [Counter(draw[i] for draw in draws) for i in (0, 2)]
    for found, expected in zip(shares, ({1: 0.5, 2: 0.3, 3: 0.2}, {2: 0.6, 3: 0.4}), strict=True):
        assert {k: count / steps for k, count in found.items()} == pytest.approx(expected, abs=0.05)


def test_lookahead_draws_use_seen_chunks_and_change_no_other_draw():
    parts, plain = chunks(), listed(loader())
    for (k, (x, _), hyper_k, ((hyper_x, _), seen)), expected in zip(loader(steps_ahead=2), plain, strict=True):
        assert (k, x.tolist(), hyper_k, hyper_x.tolist()) == expected and len(seen) == 2
        for seen_x, _ in seen:
            assert len(seen_x) == 4 and set(seen_x.tolist()) <= {one.item() for one, _ in parts.upto(hyper_k - 1)}


def test_epochs_differ_and_their_length_does_not_matter():
    draws = epochs(loader(steps=10), 3)
    assert draws == listed(loader(steps=30)) == epochs(loader(steps=15), 2)
    assert len({str(draw) for draw in draws}) == 30 and draws != listed(loader(steps=30, seed=6))


@pytest.mark.full
def test_worker_processes_do_not_matter():
    assert epochs(loader(steps=6, num_workers=2), 2) == listed(loader(steps=12))


@pytest.mark.parametrize("done", [3, 10, 14])
def test_a_loader_goes_on_where_another_stopped(done):
    expected = listed(loader(steps=20))
    first, second = loader(), loader()
    given = listed(itertools.islice(itertools.chain.from_iterable(itertools.repeat(first)), done))
    second.load_state_dict(first.state_dict())
    assert given + epochs(second, 2)[: 20 - done] == expected


def test_a_loop_that_sets_the_epoch_gets_its_draws():
    one = loader()
    one.sampler.set_epoch(1)
    assert listed(one) == listed(loader(steps=20))[10:]
    one.load_state_dict(one.state_dict() | {"done": 14})
    one.sampler.set_epoch(1)  # as Lightning does after resuming
    assert listed(one) == listed(loader(steps=20))[14:]


def test_accelerates_copy_of_a_loader_gives_the_same_draws_and_skips_some():
    from accelerate import Accelerator, skip_first_batches

    accelerator, expected = Accelerator(cpu=True), listed(loader(steps=20))
    prepared = accelerator.prepare(loader())
    assert epochs(prepared, 2) == expected
    resumed = skip_first_batches(accelerator.prepare(loader()), 4)
    resumed.set_epoch(1)
    assert listed(resumed) == expected[14:]


@pytest.mark.parametrize("data", [(torch.arange(EXAMPLES),), [(i,) for i in range(EXAMPLES)]], ids=["tensors", "list"])
def test_the_collate_function_of_loader_or_chunks_is_used(data):
    def collate(examples):
        return {"numbers": [int(number) for (number,) in examples]}

    given = partnets.Loader(partnets.chunk(data, PROPORTIONS), 4, steps=3, hyper_batch_size=3, collate_fn=collate)
    told = partnets.Loader(partnets.chunk(data, PROPORTIONS, collate=collate), 4, steps=3, hyper_batch_size=3)
    for draw, other in zip(given, told, strict=True):
        assert draw == other and len(draw.batch["numbers"]) == 4 and len(draw.hyper_batch["numbers"]) == 3
    assert given.chunks.sizes == told.chunks.sizes


class Random(torch.utils.data.Dataset):
    def __len__(self):
        return EXAMPLES

    def __getitem__(self, i):
        return torch.rand(())


@pytest.mark.full
def test_random_examples_do_not_depend_on_the_number_of_workers():
    parts = partnets.chunk(Random(), PROPORTIONS)
    found = [[batch.tolist() for _, batch, *_ in partnets.Loader(parts, 2, steps=6, num_workers=n)] for n in (1, 2)]
    resumed = partnets.Loader(parts, 2, steps=6, num_workers=2)
    resumed.load_state_dict(resumed.state_dict() | {"done": 4})
    assert found[0] == found[1] and [batch.tolist() for _, batch, *_ in resumed] == found[0][4:]


OTHERS = {
    "chunks": lambda: partnets.Loader(partnets.chunk((torch.ones(EXAMPLES),), PROPORTIONS), 4, steps=10, seed=5),
    "seed": lambda: loader(seed=6, hyper_batch_size=None),
    "batch_size": lambda: partnets.Loader(chunks(), 5, steps=10, seed=5),
    "hyper_batch_size": lambda: loader(hyper_batch_size=2),
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_state_of_other_draws_raises(name):
    state, other = loader(hyper_batch_size=None).state_dict(), OTHERS[name]()
    with pytest.raises(ValueError, match=f"these draws were of {name} .*Make chunks and Loader as they were"):
        other.load_state_dict(state | {"done": 3})
    assert other.state_dict()["done"] == 0
    loader(steps=3, hyper_batch_size=None, num_workers=1).load_state_dict(state)


WRONG = [
    *(
        ({name: True}, TypeError, f"Loader takes no {name}: ")
        for name in ("sampler", "shuffle", "generator", "dataset")
    ),
    ({"lr": 0.1}, TypeError, "Loader takes no lr: pass optimizer="),
    ({"workers": 2}, TypeError, r"Loader has no option 'workers'; .* num_workers, .*persistent_workers"),
    *(({name: -1}, ValueError, f"{name}=-1") for name in ("steps", "hyper_batch_size", "seed", "steps_ahead")),
    ({"num_workers": -1}, ValueError, "num_workers=-1"),
    ({"hyper_batch_size": None, "steps_ahead": 1}, ValueError, "steps_ahead=1 needs steps of ψ; pass hyper_batch_size"),
]


@pytest.mark.parametrize(("options", "error", "message"), WRONG)
def test_wrong_options_are_named(options, error, message):
    with pytest.raises(error, match=message):
        loader(**options)


def test_one_chunk_has_nothing_for_psi():
    with pytest.raises(ValueError, match="at least 2"):
        partnets.Loader(partnets.chunk((torch.zeros(4),), (1.0,)), 2, steps=1, hyper_batch_size=2)
