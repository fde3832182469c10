"""Ranks that share a batch learn the same as one process, and send only the gradients that are needed."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from training import OPTIMIZERS, PROPORTIONS, batch, gradients, learn, loss, mine, network

import partnets
from partnets import distributed, hyper, optim
from partnets.subnetworks.parameters import partitioned_parameters
from partnets.utils.modules import frozen


def learn_on_ranks(name, scheme):
    model = network(scheme)
    with torch.no_grad():
        for one in partitioned_parameters(model):
            one.stored.add_(dist.get_rank())  # DDP broadcasts rank 0's weights
            one.combine()
        for parameter in hyper.hyperparameters(model):
            parameter += dist.get_rank()
    model = model.to(memory_format=torch.channels_last)  # gives the kernel's gradient other strides
    return learn(model, distributed.DDP(model, bucket_cap_mb=0.01), OPTIMIZERS[name](model))


@pytest.mark.cases(usual=1)
@pytest.mark.parametrize(("name", "scheme"), [*((name, "weight") for name in OPTIMIZERS), ("Adam", "nested")])
def test_two_ranks_learn_the_weights_of_one_process_with_the_joint_batch(name, scheme, two_ranks):
    model = network(scheme)
    expected = learn(model, model, OPTIMIZERS[name](model))
    first, second = two_ranks(learn_on_ranks, name, scheme)
    torch.testing.assert_close(first, expected, rtol=1e-10, atol=1e-12)
    assert all(map(torch.equal, first, second))


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


def gradients_of_several(scheme, is_given_wrapped=False):
    """Return the gradients of a batch with a different subnetwork for each example and rank."""
    model = network(scheme)
    call = distributed.DDP(model) if dist.is_initialized() else model
    active, update = torch.tensor([1, 3, 3, 1, 2, 2, 2, 1]), torch.tensor([1, 0, 3, 1, 2, 1, 0, 0])
    given = call if is_given_wrapped else model
    with partnets.subnetwork(given, active=mine(active), update=mine(update)):
        loss(call, 0).backward()
    return gradients(model)


@pytest.mark.cases(usual=1)
@pytest.mark.parametrize("is_given_wrapped", [False, True])
@pytest.mark.parametrize("scheme", ["weight", "nested"])
def test_ranks_may_have_other_subnetworks_of_a_batch(scheme, is_given_wrapped, two_ranks):
    expected = gradients_of_several(scheme)
    for found in two_ranks(gradients_of_several, scheme, is_given_wrapped):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def gradients_without_synchronising(updates):
    """Return the gradients of several subnetworks, accumulated under no_sync and synchronised by the last step."""
    model = network()
    call = distributed.DDP(model)
    for step, k in enumerate(updates):
        last = step == len(updates) - 1
        with partnets.subnetwork(model, active=3, update=k):
            if last:
                loss(call, step).backward()
            else:
                with call.no_sync():
                    loss(call, step).backward()
    return gradients(model)


@pytest.mark.parametrize("updates", [(2, 2), (1, 3, 1)])
def test_gradients_gathered_without_synchronising_travel_with_the_next_that_do(updates, two_ranks):
    model = network()
    for step, k in enumerate(updates):
        with partnets.subnetwork(model, active=3, update=k):
            loss(model, step).backward()
    expected = gradients(model)
    for found in two_ranks(gradients_without_synchronising, updates):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def other_partitions(dtype):
    """Check that a step raises if ranks update different partitions of one size; return whether nothing changed."""
    model = partnets.partition(nn.Sequential(nn.Linear(8, 10), nn.Linear(10, 3)), (0.6, 0.2, 0.2)).to(dtype)
    call, optimizer, k = distributed.DDP(model, bucket_cap_mb=1e-4), optim.SGD(model, lr=1.0), 2 + dist.get_rank()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    message = "w_2, w_3 learned in this backward pass on some ranks and not on others.*; choose the same subnetwork"
    with pytest.raises(ValueError, match=message), partnets.subnetwork(model, active=k, update=k):
        call(torch.ones(4, 8, dtype=dtype)).sum().backward()
        optimizer.step(update=k)
    return all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_that_learn_other_partitions_of_one_size_are_refused_before_the_step(dtype, two_ranks):
    assert two_ranks(other_partitions, dtype) == [True, True]


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
    model, (x, _) = network().eval(), batch(0)
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


def distribute_inside(distribute):
    model = network()
    with partnets.subnetwork(model, active=1), pytest.raises(RuntimeError, match="before a subnetwork is entered"):
        distribute(model)


@pytest.mark.parametrize("distribute", [distributed.DDP, distributed.fully_shard])
def test_a_model_that_is_one_subnetwork_is_not_distributed(distribute, two_ranks):
    two_ranks(distribute_inside, distribute)


def wrap_with_other_seed():
    model = partnets.partition(nn.Sequential(nn.Linear(4, 3), nn.GRU(3, 3)), (0.5, 0.5), seed=dist.get_rank())
    distributed.DDP(model)


def test_ranks_whose_partitions_differ_are_refused(two_ranks):
    of_the_gru = ", ".join(f"the {what} of 1.weight_{to}_l0" for to in ("ih", "hh") for what in ("map", "defaults"))
    message = rf"the ranks differ in the map of 0\.weight, the defaults of 0\.weight, {of_the_gru}; construct"
    with pytest.raises(AssertionError, match=message):
        two_ranks(wrap_with_other_seed)


@pytest.mark.parametrize(
    ("option", "cure"),
    [
        ({"find_unused_parameters": True}, r"find_unused_parameters=True .*: DDP sets it itself; leave it out\."),
        ({"gradient_as_bucket_view": False}, "gradient_as_bucket_view=False .*: DDP sets it itself"),
        ({"static_graph": False}, "static_graph=False .*: DDP sets it itself"),
        ({"mixed_precision": object()}, r"mixed_precision=.* communication hook.*; leave it out, and use torch\.auto"),
    ],
)
def test_options_that_ddp_sets_itself_are_named_with_the_cure(option, cure):
    with pytest.raises(ValueError, match=cure):
        distributed.DDP(network(), **option)


@pytest.mark.full
def test_draws_follow_their_probabilities_and_differ_by_step_and_seed():
    draws = [distributed.draw((4, 0, 1), seed=5, step=step) for step in range(4000)]
    assert 2 not in draws and draws.count(1) / len(draws) == pytest.approx(0.8, abs=0.02)
    assert draws != [distributed.draw((4, 0, 1), seed=6, step=step) for step in range(4000)]


@pytest.mark.parametrize("probabilities", [(), (0.0, 0.0), (1.0, -0.1), (float("nan"),)])
def test_draw_refuses_what_are_no_probabilities(probabilities):
    with pytest.raises(ValueError, match="pass numbers that are not negative, one above 0"):
        distributed.draw(probabilities, seed=0, step=0)
