"""The active subnetwork is specific to a thread, and is not copied with a model."""

import asyncio
import contextlib
import copy
import io
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from small_network import PROPORTIONS
from torch import nn
from torch.utils.checkpoint import checkpoint

import partnets
from partnets import baselines


def network():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(9, 7), nn.PReLU(), nn.LayerNorm(7), nn.Linear(7, 3))
    model = partnets.partition(layers, PROPORTIONS)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def outputs(model, x):
    expected = {}
    for k in (1, 2, 3):
        with partnets.subnetwork(model, k):
            expected[k] = model(x)
    return expected


@pytest.mark.cases(usual=1)
@pytest.mark.parametrize("compiled", [False, True])
def test_threads_compute_each_its_own_subnetwork(compiled):
    model, x = network(), torch.randn(4, 9)
    expected = outputs(model, x)
    computes = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    if compiled:
        torch.compiler.reset()
        outputs(computes, x)
    start = threading.Barrier(3)
    # Concurrent calls of a compiled function would recompile it, up to the compiler's limit.
    alone = threading.Lock() if compiled else contextlib.nullcontext()

    def compute(k):
        start.wait()
        right = 0
        for _ in range(100):
            with partnets.subnetwork(model, k, update=None), alone:
                right += torch.equal(computes(x), expected[k])
        return right

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(compute, (1, 2, 3))) == [100] * 3


@pytest.mark.full
@pytest.mark.parametrize("first", [None, 1])
def test_what_was_compiled_outside_or_inside_of_a_subnetwork_is_not_run_for_the_other(first):
    model, x = network(), torch.randn(4, 9)
    expected = outputs(copy.deepcopy(model), x) | {None: model(x)}  # a copy: no context has used the model
    torch.compiler.reset()
    computes = torch.compile(model, backend="eager", fullgraph=True)

    def compute(k):
        with partnets.subnetwork(model, k) if k else contextlib.nullcontext():
            return torch.equal(computes(x), expected[k])

    for k in (first, None, 1, 2, None, 1):
        assert compute(k)
    with ThreadPoolExecutor(1) as threads:
        assert all(threads.map(compute, (None, 2, 1)))


def test_a_thread_starts_outside_of_any_subnetwork():
    model = network()
    with partnets.subnetwork(model, 1, 1), ThreadPoolExecutor(1) as threads:
        assert threads.submit(lambda: (model[0].active, model[0].update)).result() == (3, 3)
        assert (model[0].active, model[0].update) == (1, 1)


def test_subnetworks_that_interleave_in_one_thread_raise():
    model = network()

    async def request(k, seconds):
        with partnets.subnetwork(model, k):
            await asyncio.sleep(seconds)

    async def both():
        return await asyncio.gather(request(1, 0.01), request(2, 0.1), return_exceptions=True)

    first, _ = asyncio.run(both())  # exits while the second is active
    assert isinstance(first, RuntimeError) and "await" in str(first)
    assert (model[0].active, model[0].update) == (3, 3)


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda m: pickle.loads(pickle.dumps(m)), saved])
def test_copies_start_outside(copied):
    model, x = network(), torch.randn(4, 9)
    whole = model(x)
    with partnets.subnetwork(model, 1):
        layer, new = copied(model[0]), copied(model) if copied is not copy.copy else copy.copy(model[0])
        assert (layer.active, layer.update) == (3, 3)
        if copied is not copy.copy:
            assert torch.equal(new(x), whole)
        with partnets.subnetwork(layer, 2):
            assert model[0].active == 1


def test_a_module_of_another_base_starts_outside():
    ensemble = baselines.Ensemble([nn.Linear(4, 2) for _ in range(3)])
    with partnets.subnetwork(ensemble, 2, 1):
        assert copy.deepcopy(ensemble).active == 3
        assert ensemble.active == 2
    assert (ensemble.active, ensemble.update) == (3, 3)


def test_replicas_compute_the_subnetwork_that_was_live_when_they_were_made():
    """Check replicas in other threads, as in torch.nn.DataParallel."""
    layer = partnets.Linear(4, 3, proportions=PROPORTIONS)
    with partnets.subnetwork(layer, 1, 1):
        replica = layer._replicate_for_data_parallel()
        with ThreadPoolExecutor(1) as threads:
            assert threads.submit(lambda: (replica.active, replica.update)).result() == (1, 1)


def test_a_backward_pass_in_a_thread_of_autograd_recomputes_the_live_subnetwork():
    """Nest more than 60 backward passes, so that they run in separate threads as on a GPU."""
    layer = partnets.Linear(3, 3, bias=False, proportions=PROPORTIONS).double()
    with torch.no_grad():
        layer.weight.copy_(torch.randn(3, 3))
    threads = set()

    def nested(depth):
        def compute(x):
            threads.add(threading.get_ident())
            return layer(x) if depth == 0 else checkpoint(nested(depth - 1), x, use_reentrant=True)

        return compute

    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    (weight,) = layer.parameters()
    with partnets.subnetwork(layer, 1, 1):
        (expected,) = torch.autograd.grad(layer(x).sum(), weight)
        nested(70)(x).sum().backward()
    assert len(threads) > 1
    assert torch.equal(weight.grad, expected)
