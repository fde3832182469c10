"""A model is one subnetwork at a time: other threads are refused, and so are copies and files of it inside."""

import asyncio
import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from layers import dense
from small_network import images, partitioned

import partnets


@pytest.mark.parametrize("active", [1, 3])
def test_another_thread_is_refused_while_one_is_inside(active):
    model = partitioned()

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


def test_subnetworks_that_interleave_in_one_thread_raise():
    model, x = partitioned(), images()
    expected = dense(model, 3)(x)

    async def request(k, seconds):
        with partnets.subnetwork(model, k):
            await asyncio.sleep(seconds)

    async def both():
        return await asyncio.gather(request(1, 0.01), request(2, 0.1), return_exceptions=True)

    first, _ = asyncio.run(both())  # exits while the second is active
    assert isinstance(first, RuntimeError) and "await" in str(first)
    torch.testing.assert_close(model(x), expected)


COPY = r"is subnetwork 2 now; copy or save it outside of partnets\.subnetwork"
STATE = "is subnetwork 2 now, whose state_dict lacks"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model, _: copy.deepcopy(model), COPY),
        (lambda model, _: copy.deepcopy(model[0]), COPY),
        (lambda model, _: pickle.loads(pickle.dumps(model)), COPY),
        (lambda model, _: pickle.loads(pickle.dumps(model[0])), COPY),
        (lambda model, _: model.state_dict(), STATE),
        (lambda model, state: model.load_state_dict(state), STATE),
        (lambda model, _: partnets.merge(model, 1), r"outside of partnets\.subnetwork"),
        (lambda model, _: partnets.finalize(model, "retrain"), r"outside of partnets\.subnetwork"),
    ],
)
def test_models_are_copied_saved_loaded_and_merged_outside(call, message):
    model, x = partitioned(), images()
    state, whole = {name: value + 1 for name, value in model.state_dict().items()}, model(x)
    with partnets.subnetwork(model, 2), pytest.raises(RuntimeError, match=message):
        call(model, state)
    assert torch.equal(model(x), whole)
    call(partitioned(), partitioned().state_dict())
