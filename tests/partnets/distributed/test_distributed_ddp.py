"""DDP sends only the gradients that are needed, and leaves subnetworks and buffers as they are."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from training import PROPORTIONS, loss, network

import partnets
from partnets import distributed, hyper, optim
from partnets.subnetworks.parameters import partitioned_parameters
from partnets.utils.modules import frozen


def bytes_sent(scheme):
    """Return the bytes sent for update=1..C and for ψ, the bytes of all parameters, and those of ψ's parameters."""
    model = network(scheme)
    call = distributed.DDP(model)
    sent = []
    for update in (1, 2, 3, None):
        before = call.packing.bytes
        psi = hyper.hyperparameters(model)
        with partnets.subnetwork(model, active=update or 1, update=update), frozen(psi if update else ()):
            loss(call, 0).backward()
        sent.append(call.packing.bytes - before)
    return sent, sum(parameter.nbytes for parameter in model.parameters()), [p.nbytes for p in psi]


@pytest.mark.cases(usual=1)
@pytest.mark.parametrize("scheme", ["weight", "nested"])
def test_the_bytes_sent_are_those_of_the_partition_that_learns(scheme, two_ranks):
    (sent, whole, psi), other = two_ranks(bytes_sent, scheme)
    assert other == (sent, whole, psi)
    owned = partitioned_parameters(network(scheme))
    assert sent == [8 * sum(one.numel(k) for one in owned) for k in (1, 2, 3)] + psi
    if scheme == "nested":
        return

    *of_partition, _ = sent
    for probabilities, limit in (((1 / 3, 1 / 3, 1 / 3), 0.36), ((0.8, 0.1, 0.1), 0.68)):
        mean = sum(p * count for p, count in zip(probabilities, of_partition, strict=True))
        exact = sum(p * share for p, share in zip(probabilities, PROPORTIONS, strict=True))  # 0.333 and 0.66
        # For biases and norms, one of three rows is sent, whatever the proportions; nothing of ψ is sent.
        assert mean / whole <= min(limit, 1.02 * exact)


def evaluation_between():
    model = network()
    call = distributed.DDP(model)
    optimizer, found = optim.SGD(model), []
    for k, evaluated in itertools.product((1, 2, None), (False, True)):
        optimizer.zero_grad()
        model.zero_grad()
        with partnets.subnetwork(model, active=2, update=k):
            value = loss(call, 0)
            if evaluated:
                with torch.no_grad(), partnets.subnetwork(model, active=2, update=1):
                    loss(call, 1)
            value.backward()
        found.append([parameter.grad for parameter in model.parameters()])
    return found


def test_an_evaluation_before_the_backward_pass_changes_no_gradient(two_ranks):
    for found in two_ranks(evaluation_between):
        for without, with_evaluation in zip(found[::2], found[1::2], strict=True):
            torch.testing.assert_close(with_evaluation, without, rtol=0, atol=0)
        assert found[4][0] is not None and all(grad is None for grad in found[4][1:])


def statistics_of_rank_0():
    """Return running statistics after an evaluation, and whether it has written into other buffers than those."""
    torch.manual_seed(0)
    model = partnets.partition(nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)), (0.5, 0.3, 0.2))
    call = distributed.DDP(model)
    others = [buffer for name, buffer in model.named_buffers() if "running" not in name and "tracked" not in name]
    with partnets.subnetwork(model, active=2, update=2):
        call(torch.randn(8, 6) + dist.get_rank()).sum().backward()
        before = [buffer._version for buffer in others]
        with torch.no_grad():
            call.eval()(torch.randn(8, 6))
        found = model[1].running_mean.clone(), model[1].num_batches_tracked.clone()
        return found, before == [buffer._version for buffer in others]


def test_a_forward_pass_sends_the_statistics_of_rank_0_and_no_maps_or_vectors(two_ranks):
    (first, unwritten), (second, also) = two_ranks(statistics_of_rank_0)
    assert unwritten and also and all(map(torch.equal, first, second)) and first[0].any()


def nested_subnetworks():
    """Return the outputs of subnetwork 3 of the wrapper inside of subnetwork 1 of the model, and of both apart."""
    model, x = network().eval(), torch.randn(8, 192, dtype=torch.float64)
    nn.init.normal_(model[6].weight)
    call, outputs = distributed.DDP(model), []
    with torch.no_grad():
        for k in (3, 1):
            with partnets.subnetwork(call, active=k):
                outputs.append(call(x))
        with partnets.subnetwork(model, active=1):
            with partnets.subnetwork(call, active=3):
                outputs.append(call(x))
            outputs.append(model(x))
    return outputs


def test_a_model_and_its_wrapper_are_one_subnetwork_at_a_time(two_ranks):
    for last, first, inner, outer in two_ranks(nested_subnetworks):
        assert torch.equal(last, inner) and torch.equal(first, outer) and not torch.equal(first, last)
