"""Ranks that share chunks together see the same examples as one process, in the same order."""

import pytest
import torch
from torch import Generator
from torch.utils.data import Dataset

import partnets
from partnets import distributed


class Squares(Dataset):
    """A data set that counts its fetches."""

    fetched = 0

    def __len__(self):
        return 100

    def __getitem__(self, i):
        self.fetched += 1
        return i, i * i


def sample():
    squares = Squares()
    chunks = distributed.share(partnets.chunk(squares, (0.5, 0.3, 0.2), seed=1))
    generator = Generator().manual_seed(7)
    drawn = [*chunks.sample_upto(2, 10, generator), *chunks.sample(3, 6, generator)]
    return drawn, squares.fetched, generator.get_state(), chunks.sizes


def test_the_ranks_batches_make_the_batch_of_one_process(two_ranks):
    chunks = partnets.chunk(Squares(), (0.5, 0.3, 0.2), seed=1)
    generator = Generator().manual_seed(7)
    whole = [*chunks.sample_upto(2, 10, generator), *chunks.sample(3, 6, generator)]
    (first, fetched, state, sizes), (second, *others) = two_ranks(sample)
    for pair, both in zip(zip(first, second, strict=True), whole, strict=True):
        assert torch.equal(torch.cat(pair), both)
    assert fetched == others[0] == 8  # each rank fetches only its part
    assert torch.equal(state, generator.get_state()) and torch.equal(others[1], state)
    assert sizes == chunks.sizes


def sample_unevenly():
    distributed.share(partnets.chunk(Squares(), (0.5, 0.5))).sample(1, 5)


def test_a_batch_that_the_ranks_cannot_share_is_refused(two_ranks):
    with pytest.raises(AssertionError, match="batch_size=5 cannot be shared by 2 ranks; pass a multiple of 2"):
        two_ranks(sample_unevenly)
