"""A model is one subnetwork at a time: other threads are refused, and so are copies and files of it inside."""

import asyncio
import copy
import io
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from layers import dense
from small_network import PROPORTIONS, perturbed
from torch import nn

import partnets


def network():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(9, 7), nn.PReLU(), nn.LayerNorm(7), nn.Linear(7, 3))
    return perturbed(partnets.partition(layers, PROPORTIONS), 0.1)


@pytest.mark.parametrize("active", [1, 3])
def test_another_thread_is_refused_while_one_is_inside(active):
    model = network()

    def enter():
        with partnets.subnetwork(model, 2):
            pass

    with ThreadPoolExecutor(1) as threads:
        with partnets.subnetwork(model, active, 1):
            with pytest.raises(RuntimeError, match=r"another thread is inside of partnets\.subnetwork .* copy"):
                threads.submit(enter).result()
            with pytest.raises(RuntimeError, match="another thread"), partnets.subnetwork(model[3:], 2):
                threads.submit(lambda: enter()).result()
        threads.submit(enter).result()


def test_threads_that_enter_at_once_are_refused_or_right():
    model, x = network(), torch.randn(4, 9)
    expected = {k: dense(model, k)(x) for k in (1, 2, 3)}
    before = [parameter.detach().clone() for parameter in model.parameters()]
    start = threading.Barrier(3)

    def compute(k):
        start.wait()
        found = []
        for _ in range(200):
            try:
                with partnets.subnetwork(model, k):
                    found.append(model(x))
            except RuntimeError as error:
                assert "another thread is inside" in str(error)
        return all(torch.allclose(one, expected[k], atol=1e-5) for one in found), len(found)

    with ThreadPoolExecutor(3) as threads:
        results = list(threads.map(compute, (1, 2, 3)))
    assert all(right for right, _ in results) and sum(count for _, count in results)
    assert all(map(torch.equal, model.parameters(), before))


def test_subnetworks_that_interleave_in_one_thread_raise():
    model, x = network(), torch.randn(4, 9)
    expected = dense(model, 3)(x)

    async def request(k, seconds):
        with partnets.subnetwork(model, k):
            await asyncio.sleep(seconds)

    async def both():
        return await asyncio.gather(request(1, 0.01), request(2, 0.1), return_exceptions=True)

    first, _ = asyncio.run(both())  # exits while the second is active
    assert isinstance(first, RuntimeError) and "await" in str(first)
    torch.testing.assert_close(model(x), expected)


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), saved])
@pytest.mark.parametrize("part", [lambda model: model, lambda model: model[0]], ids=["model", "layer"])
def test_copies_are_made_outside(copied, part):
    model, x = network(), torch.randn(4, 9)
    whole = model(x)
    with (
        partnets.subnetwork(model, 1, 1),
        pytest.raises(RuntimeError, match=r"is subnetwork 1 now; copy or save it outside of partnets\.subnetwork"),
    ):
        copied(part(model))
    assert torch.equal(copied(model)(x), whole)


def test_a_state_dict_is_taken_and_loaded_and_a_model_merged_outside():
    model = network()
    state = {name: value + 1 for name, value in model.state_dict().items()}
    with partnets.subnetwork(model, 2):
        before = [parameter.clone() for parameter in model.parameters()]
        with pytest.raises(RuntimeError, match=r"is subnetwork 2 now, whose state_dict lacks"):
            model.load_state_dict(state)
        assert all(map(torch.equal, model.parameters(), before))
        with pytest.raises(RuntimeError, match=r"is subnetwork 2 now, whose state_dict lacks"):
            model.state_dict()
        with pytest.raises(RuntimeError, match=r"outside of partnets\.subnetwork"):
            partnets.merge(model, 1)
        with pytest.raises(RuntimeError, match=r"outside of partnets\.subnetwork"):
            partnets.finalize(model, "retrain")
    model.state_dict()
