"""Groups stay together, classes keep their shares, and user-defined splits are checked."""

import warnings

import numpy as np
import pandas
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import partnets

PROPORTIONS = (0.6, 0.3, 0.1)


def split(n, proportions=PROPORTIONS, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return partnets.chunk((torch.arange(n),), proportions, **options)


def labels_of(chunks, labels):
    return [[labels[i] for i in chunks.indices(k)] for k in range(1, len(chunks) + 1)]


@pytest.mark.full
@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=20, max_size=80), st.integers(0, 3))
def test_a_group_is_in_one_chunk_and_every_example_in_one(groups, seed):
    if len(set(groups)) < 3:
        return
    chunks = split(len(groups), groups=groups, seed=seed)
    found = labels_of(chunks, groups)
    assert sum(len(set(part)) for part in found) == len(set(groups))
    assert sorted(chunks.order.tolist()) == list(range(len(groups))) and 0 not in chunks.sizes


@pytest.mark.parametrize("stratified", [False, True])
def test_sizes_are_near_the_proportions_and_every_chunk_has_large_groups_and_small_ones(stratified):
    groups = [g for g in range(1, 101) for _ in range(g)]  # groups of 1 to 100 examples, 5050 in total
    options = {"stratify": [g % 2 for g in groups]} if stratified else {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chunks = partnets.chunk((torch.arange(5050),), PROPORTIONS, groups=groups, **options)
    assert chunks.sizes == pytest.approx([3030, 1515, 505], abs=10)
    for part in labels_of(chunks, groups):
        assert min(part) < 20 and max(part) > 75
        if stratified:
            assert np.mean([g % 2 for g in part]) == pytest.approx(2500 / 5050, abs=0.03)


@pytest.mark.full
@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=30, max_size=120), st.integers(0, 3))
@example([label for label, count in enumerate([1, 5, 5, 7, 5, 7, 7, 3]) for _ in range(count)], 9)
def test_each_chunk_has_of_each_class_its_share_up_to_one_example(classes, seed):
    if len(set(classes)) == len(classes):
        return
    chunks = split(len(classes), stratify=classes, seed=seed)
    for label in set(classes):
        for share, part in zip(PROPORTIONS, labels_of(chunks, classes), strict=True):
            assert abs(part.count(label) - share * classes.count(label)) < 1
    assert all(abs(n - share * len(classes)) < 2 for n, share in zip(chunks.sizes, PROPORTIONS, strict=True))
    assert sorted(chunks.order.tolist()) == list(range(len(classes)))


def test_classes_of_few_examples_leave_no_chunk_empty():
    assert split(300, stratify=[i // 2 for i in range(300)]).sizes == pytest.approx([180, 90, 30], abs=1)


def test_a_split_follows_the_seed_and_not_the_kind_of_the_labels():
    numbers = [7, 3, 3, 7, 1, 1, 2, 2, 9, 9] * 3
    kinds = [
        numbers,
        tuple(numbers),
        np.array(numbers),
        torch.tensor(numbers),
        pandas.Series(numbers),
        [np.int64(n) for n in numbers],
        [torch.tensor(n) for n in numbers],
        [str(n) for n in numbers],
    ]
    for name in ("groups", "stratify"):
        orders = [split(30, **{name: labels}).order for labels in kinds]
        assert all(torch.equal(order, orders[0]) for order in orders)
        assert not torch.equal(split(30, **{name: numbers}, seed=1).order, orders[0])


def test_a_group_that_is_too_large_warns():
    with pytest.warns(UserWarning, match=r"\[90, 5, 5\] examples where .* \[60, 30, 10\].* largest has 90"):
        partnets.chunk((torch.arange(100),), PROPORTIONS, groups=[0] * 90 + [1] * 5 + [2] * 5)


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_indices_are_the_split(kind):
    parts = [[5, 0, 3], [9, 1]]
    chunks = partnets.chunk((torch.arange(10),), indices=[kind(part) for part in parts])
    assert [chunks.indices(k).tolist() for k in (1, 2)] == parts and chunks.proportions == (0.6, 0.4)
    assert set(chunks.sample_upto(2, 100)[0].tolist()) == {0, 1, 3, 5, 9}
    assert partnets.chunk((torch.arange(10),), indices=[range(8), range(8, 10)]).sizes == [8, 2]


WRONG = {
    "few groups": ({"groups": [0] * 5 + [1] * 5}, ValueError, "2 groups for 3 chunks; pass at least one for each"),
    "short": ({"groups": [1, 2, 3]}, ValueError, "groups has 3 labels; pass one label for each of the 10 examples"),
    "None": ({"groups": [*range(9), None]}, ValueError, "groups has no label but None for example 9"),
    "NaN": ({"groups": np.array([1.0, np.nan] * 5)}, ValueError, "groups has no label but nan for example 1"),
    "text": ({"groups": "patient"}, TypeError, "groups is a str; pass one label for each"),
    "all different": ({"stratify": range(10)}, ValueError, "stratify has 10 labels that all differ"),
    "overlap": ({"indices": [[1, 2], [3, 2]]}, ValueError, "example 2 is in chunk 1 and in chunk 2"),
    "twice": ({"indices": [[1, 1], [3]]}, ValueError, "example 1 is in chunk 1 more than once"),
    "outside": ({"indices": [[1], [10]]}, ValueError, r"chunk 2 have 10; there are examples 0\.\.9"),
    "empty": ({"indices": [[1], []]}, ValueError, "chunk 2 are empty"),
    "mask": ({"indices": [torch.ones(10, dtype=torch.bool)]}, TypeError, r"are bool \[10\]; .*mask.nonzero"),
    "floats": ({"indices": [[0.5]]}, TypeError, "are float32"),
    "ints": ({"indices": [1, 2]}, TypeError, "indices of chunk 1 are a int; pass a sequence for each chunk"),
    "flat": ({"indices": 7}, TypeError, "indices is a int"),
    "no keys": ({"groups": [[1]] * 10}, TypeError, "groups has labels that can be no dict's keys"),
    "both": ({"indices": [[1], [2]], "proportions": (0.5, 0.5)}, ValueError, "leave proportions, groups and strat"),
    "neither": ({"proportions": None}, ValueError, "neither proportions nor indices"),
}


@pytest.mark.parametrize("name", WRONG)
def test_invalid_splits_raise(name):
    options, error, message = WRONG[name]
    if "indices" not in options:
        options = {"proportions": PROPORTIONS} | options
    with pytest.raises(error, match=message):
        partnets.chunk((torch.arange(10),), **options)
