"""Worker processes change no bit of a training, also after interruptions, and all of them end."""

import multiprocessing
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import partnets
from partnets import hyper

PROPORTIONS = (0.6, 0.2, 0.2)
TWO = {"num_workers": 2}


class Rows(Dataset):
    """A map-style data set; with `noise`, it draws from each generator that workers seed."""

    noise = False

    def __init__(self):
        self.x = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return 50

    def __getitem__(self, i):
        drawn = torch.rand(()) + random.random() + float(np.random.rand()) if self.noise else 0.0
        return self.x[i] + drawn, int(self.x[i, 0] > 0)


class Noisy(Rows):
    noise = True


class Failing(Rows):
    def __getitem__(self, i):
        if i == 7:
            raise OSError("the file of example 7 is damaged")
        return super().__getitem__(i)


def trainer(dataset=Rows, **options):
    mask = hyper.InputMask(4, temperature=0.5)
    network = nn.Sequential(mask, nn.Linear(4, 5), nn.Dropout(0.1), nn.ReLU(), nn.Linear(5, 2))
    torch.manual_seed(5)
    model = partnets.partition(network, PROPORTIONS)
    chunks = partnets.chunk(dataset(), PROPORTIONS)
    torch.manual_seed(6)
    return partnets.Trainer(model, chunks, hyper=mask, **{"batch_size": 8, "hyper_every": 2, "lml_every": 3} | options)


def same(one, other):
    bits = [[*each.model.parameters(), each.generator.get_state()] for each in (one, other)]
    return one.history == other.history and all(map(torch.equal, *bits))


@pytest.fixture(autouse=True)
def workers():
    """Return a function that lists this test's running processes; check that none remain at the end."""
    before = multiprocessing.active_children()

    def running():
        return [process for process in multiprocessing.active_children() if process not in before]

    yield running
    assert running() == []


def evaluate(one):
    return {"mean loss": partnets.mean_loss(one.model, one.chunks[1])}


MANY = {
    "hyper_steps": 2,
    "hyper_after": 2,
    "callbacks": [evaluate],
}


@pytest.mark.full
@pytest.mark.parametrize("options", [{}, {"one_pass": True}, pytest.param(MANY, marks=pytest.mark.full)])
def test_worker_processes_change_no_bit(options):
    alone, helped = trainer(**options), trainer(**options, **TWO)
    torch.manual_seed(1)
    alone.fit(6)
    state = torch.get_rng_state()
    torch.manual_seed(1)
    helped.fit(6)
    assert same(alone, helped) and torch.equal(torch.get_rng_state(), state)


@pytest.mark.full
def test_random_data_are_the_same_with_workers_and_after_resuming(tmp_path):
    whole = trainer(Noisy, num_workers=1, prefetch_factor=3)
    torch.manual_seed(1)
    whole.fit(6)
    first, resumed = trainer(Noisy, **TWO), trainer(Noisy, **TWO)
    torch.manual_seed(1)
    first.fit(2)
    first.step()  # without workers
    first.save(tmp_path / "checkpoint.pt")
    resumed.load(tmp_path / "checkpoint.pt")
    resumed.fit(3)
    assert same(resumed, whole)


def test_draws_from_the_generator_in_a_callback_warn_and_change_no_bit(recwarn):
    def draw(one):
        torch.rand(3, generator=one.generator)

    alone, helped = trainer(callbacks=[draw]), trainer(callbacks=[draw], **TWO)
    for one in (alone, helped):
        torch.manual_seed(1)
        one.fit(3)
    assert same(alone, helped)
    assert sum("something else has drawn" in str(each.message) for each in recwarn) == 1


def test_an_error_in_a_worker_is_raised():
    one = trainer(Failing, num_workers=1)
    with pytest.raises(OSError, match="example 7 is damaged"):
        one.fit(20)


@pytest.mark.full
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interruption_leaves_no_process_and_training_goes_on(error, workers):
    def interrupt(one):
        if one.steps == 2:
            assert workers()
            raise error

    alone, helped = trainer(callbacks=[interrupt]), trainer(callbacks=[interrupt], **TWO)
    for one in (alone, helped):
        torch.manual_seed(1)
        if one is alone:
            one.callbacks = []
            one.fit(2)
        else:
            with pytest.raises(error):
                one.fit(4)
            assert workers() == []
        one.fit(2)
    assert same(alone, helped)


WRONG = [
    ({"shuffle": True}, TypeError, "Trainer takes no shuffle: batches are drawn from the chunks"),
    ({"collate_fn": list}, TypeError, "pass collate= to partnets.chunk"),
    (
        {"nun_workers": 2},
        TypeError,
        "Trainer has no option 'nun_workers'; of a DataLoader's options it takes num_workers",
    ),
    ({"num_workers": -1}, ValueError, "num_workers=-1; pass an int, at least 0"),
    ({"prefetch_factor": 2}, ValueError, "prefetch_factor option could only be"),
]


@pytest.mark.parametrize(("options", "error", "message"), WRONG)
def test_options_that_cannot_be_taken_are_named(options, error, message):
    with pytest.raises(error, match=message):
        trainer(**options)


def test_chunks_that_make_batches_of_their_own_are_not_fetched_ahead():
    class Own(partnets.Chunks):
        def sample(self, k, batch_size, generator=None):
            return torch.zeros(batch_size, 4), torch.zeros(batch_size, dtype=torch.long)

    one = trainer()
    own = Own(one.chunks.dataset, one.chunks.order, one.chunks.sizes)
    partnets.Trainer(one.model, own, hyper=[], batch_size=4).fit(1)
    with pytest.raises(ValueError, match="Own overrides sample or sample_upto"):
        partnets.Trainer(one.model, own, hyper=[], batch_size=4, num_workers=1)
