from collections import Counter

import pytest

from partnets import federated


@pytest.mark.parametrize(
    "clients, proportions, expected",
    [(100, (0.7, 0.2, 0.1), {1: 70, 2: 20, 3: 10}), (20, (0.9, 0.1), {1: 18, 2: 2}), (3, (1.0,), {1: 3})],
)
def test_chunks_have_clients_in_these_proportions(clients, proportions, expected):
    found = [federated.assign(clients, proportions, seed) for seed in range(3)]
    assert all(Counter(each) == expected for each in found)
    assert len(set(found)) == (3 if len(proportions) > 1 else 1)
    assert found[0] == federated.assign(clients, proportions, 0)


def test_a_chunk_without_clients_is_an_error():
    with pytest.raises(ValueError, match=r"chunk 3 of 4 clients in proportions \(0.7, 0.2, 0.1\) would have no client"):
        federated.assign(4, (0.7, 0.2, 0.1))
