"""Ranks with sharded weights learn the same as one process, and each steps its shards."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard
from training import OPTIMIZERS, learn, network, whole

import partnets
from partnets import distributed


def learn_sharded(name, units, scheme):
    model = network(scheme)
    units = None if units is None else [model[i] for i in units]
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    distributed.fully_shard(model, units, mesh=mesh)
    optimizer = OPTIMIZERS[name](model)
    weights = learn(model, model, optimizer)
    steps = [state["step"].tolist() for state in optimizer.state.values() if "step" in state]
    return weights, [parameter.to_local().shape for parameter in optimizer.parameters()], steps


@pytest.mark.cases(usual=2)
@pytest.mark.parametrize(
    ("name", "units", "scheme"), [("SGD", (2, 6), "weight"), ("Adam", None, "weight"), ("Adam", (2, 6), "nested")]
)
def test_two_ranks_learn_the_weights_of_one_process_with_the_joint_batch(name, units, scheme, two_ranks):
    model = network(scheme)
    optimizer = OPTIMIZERS[name](model)
    expected = learn(model, model, optimizer)
    steps = [state["step"].tolist() for state in optimizer.state.values() if "step" in state]
    found = two_ranks(learn_sharded, name, units, scheme)
    for weights, _, counted in found:
        torch.testing.assert_close(weights, expected, rtol=1e-10, atol=1e-12)
        assert counted == steps
    for parameter, *parts in zip(optimizer.parameters(), *(shapes for _, shapes, _ in found), strict=True):
        assert sum(part[0] for part in parts) == len(parameter)
        assert all(part[0] < len(parameter) for part in parts)


def transposed(scheme, inputs):
    """Return a model of transformers' Conv1D layers, which keep their weights transposed."""
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    torch.manual_seed(0)
    layers, options = nn.Sequential(conv1d(9, inputs), nn.Tanh(), conv1d(3, 9)), {"defaults": "seed"}
    if scheme == "nested":
        options = {"scheme": "nested", "example": torch.randn(2, inputs)}
    return partnets.partition(layers, (0.5, 0.3, 0.2), **options).double()


def learn_transposed(scheme, inputs, sharded=True):
    model, generator = transposed(scheme, inputs), torch.Generator().manual_seed(1)
    if sharded:
        distributed.fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = partnets.optim.AdamW(model, lr=0.01, weight_decay=0.1)
    for k in (1, 2, 3, 2, 1):
        x = torch.randn(4, inputs, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        with partnets.subnetwork(model, k, k):
            model(x).square().mean().backward()
        optimizer.step(update=k)
    return [whole(parameter) for parameter in model.parameters()]


@pytest.mark.parametrize(("scheme", "inputs"), [("weight", 11), ("weight", 16), ("weight", 128), ("nested", 11)])
def test_weights_that_are_kept_transposed_step_the_entries_of_their_partition(scheme, inputs, two_ranks):
    expected = learn_transposed(scheme, inputs, sharded=False)
    for weights in two_ranks(learn_transposed, scheme, inputs):
        torch.testing.assert_close(weights, expected, rtol=1e-10, atol=1e-12)


class Token(nn.Module):
    """A model with a parameter besides its layers, which is gathered with the model."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.token = nn.Linear(4, 6), nn.Linear(6, 3), nn.Parameter(torch.ones(1, 6))

    def forward(self, x):
        return self.last(torch.tanh(self.first(x) + self.token))


def clipped(sharded=True):
    torch.manual_seed(0)
    model = partnets.partition(Token(), (0.6, 0.4), defaults="seed").double()
    if sharded:
        distributed.fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer, x = partnets.optim.SGD(model, lr=1.0), torch.ones(5, 4, dtype=torch.float64)
    partnets.step_weights(model, optimizer, 2, x, lambda x: model(x).square().sum(), clip=0.01)
    return [whole(parameter) for parameter in model.parameters()]


def test_gradients_are_clipped_to_one_norm_of_what_is_sharded_and_what_is_not(two_ranks):
    expected = clipped(sharded=False)
    for weights in two_ranks(clipped):
        torch.testing.assert_close(weights, expected, rtol=1e-10, atol=1e-12)


def convolution(sharded=True):
    torch.manual_seed(0)
    model = partnets.partition(nn.Sequential(nn.Conv2d(1, 2, 4)), (0.5, 0.5)).double()
    if sharded:
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        distributed.fully_shard(model, mesh=mesh, shard_placement_fn=lambda weight: Shard(weight.dim() - 1))
    optimizer = partnets.optim.Adam(model, lr=0.1)
    for k in (1, 2):
        partnets.step_weights(model, optimizer, k, torch.ones(3, 1, 4, 4).double(), lambda x: model(x).square().sum())
    return [whole(parameter) for parameter in model.parameters()]


def test_a_weight_sharded_along_its_kernel_learns_as_on_one_rank(two_ranks):
    expected = convolution(sharded=False)
    for weights in two_ranks(convolution):
        torch.testing.assert_close(weights, expected, rtol=1e-10, atol=1e-12)


def shard_what_differs():
    torch.manual_seed(dist.get_rank())
    model = partnets.partition(nn.Sequential(nn.Linear(4, 2)), (0.5, 0.5), defaults="zero")
    distributed.fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))


def test_ranks_whose_parameters_differ_are_refused(two_ranks):
    with pytest.raises(
        AssertionError, match=r"ValueError: the ranks differ in 0.weight, 0.bias, 0.bias_rows; construct"
    ):
        two_ranks(shard_what_differs)


def shard_twice_and_merge():
    torch.manual_seed(0)
    model = partnets.partition(nn.Sequential(nn.Linear(4, 2)), (0.5, 0.5), defaults="zero")
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    distributed.fully_shard(model, mesh=mesh)
    found = []
    for call in (partnets.merge, lambda model: distributed.fully_shard(model, mesh=mesh)):
        try:
            call(model)
        except ValueError as error:
            found.append(str(error))
    return found


def test_a_sharded_model_is_neither_merged_nor_sharded_again(two_ranks):
    for merged, sharded in two_ranks(shard_twice_and_merge):
        assert "load it into a model of one process" in merged and "is sharded already" in sharded
