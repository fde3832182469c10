"""Ranks with sharded weights learn the same as one process, and each steps its shards."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from small_network import perturbed
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from training import OPTIMIZERS, learn, mine, network, whole

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


class Everything(nn.Module):
    """A model with parameters of its own, a scalar, a shared weight, and a layer that is read without a call."""

    def __init__(self):
        super().__init__()
        self.token, self.mixing, self.scale = (nn.Parameter(torch.randn(size)) for size in [(1, 1, 6), (6, 6), ()])
        self.embedding, self.head = nn.Embedding(9, 6), nn.Linear(6, 9)
        self.head.weight = self.embedding.weight
        self.attention, self.norm = nn.MultiheadAttention(6, 2, batch_first=True), nn.BatchNorm1d(6)

    def forward(self, ids):
        x = torch.cat([self.token.expand(len(ids), -1, -1), self.embedding(ids)], 1) @ self.mixing
        x = x + self.attention(x, x, x)[0]
        return self.head(self.norm(torch.tanh(x[:, 0] * self.scale)))


def everything(sharded, clip=None):
    """Return gradients of several steps and the weights after them, with evaluations in between."""
    torch.manual_seed(0)
    model = partnets.partition(Everything(), (0.5, 0.3, 0.2), defaults="stored").double()
    model.norm.eval()
    if sharded:
        distributed.fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer, found = partnets.optim.SGD(model, lr=0.1, momentum=0.9), []
    for step, k in enumerate((1, 2, 3, 2, 1, 3)):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randint(9, (8, 4), generator=generator), torch.randint(9, (8,), generator=generator)
        if sharded:
            batch = tuple(map(mine, batch))
        with torch.no_grad():
            model(batch[0])
            with partnets.subnetwork(model, active=3):
                model(batch[0])
        partnets.step_weights(
            model, optimizer, k, batch, lambda batch: F.cross_entropy(model(batch[0]), batch[1]), clip=clip or 1e9
        )
        found += [whole(parameter.grad) for parameter in model.parameters()]
    rows = [buffer.clone() for name, buffer in model.named_buffers() if name.endswith("_rows")]
    return [*found, *map(whole, model.parameters()), *rows]


@pytest.mark.parametrize("clip", [None, 0.1])
def test_all_kinds_of_parameters_learn_as_on_one_rank(clip, two_ranks):
    expected = everything(False, clip)
    for found in two_ranks(everything, True, clip):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


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


def in_two_dimensions(shape):
    """Return gradients and weights of a model with tensor parallelism and shards; of one rank if shape is None."""
    torch.manual_seed(0)
    layers = nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 3)
    model = partnets.partition(nn.Sequential(*layers), (0.5, 0.3, 0.2), defaults="seed", seed=1).double()
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    if shape is not None:
        mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        distributed.fully_shard(model, mesh=mesh["data"])
        x = x.chunk(shape[0])[mesh["data"].get_local_rank()]
    optimizer, found = partnets.optim.Adam(model, lr=0.02), []
    for k in (1, 3, 2, 1):
        partnets.step_weights(model, optimizer, k, x, lambda x: model(x).square().mean(), clip=0.01)
        found += [whole(parameter.grad) for parameter in model.parameters()]
    return [*found, *map(whole, model.parameters())]


@pytest.mark.parametrize("shape", [(1, 2), (2, 1)])
def test_a_model_with_tensor_parallelism_is_sharded_too(shape, two_ranks):
    expected = in_two_dimensions(None)
    for found in two_ranks(in_two_dimensions, shape):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def misused():
    """Return the errors of uses that would compute with the weights of another subnetwork, or mix gradients."""
    mesh, found = dist.init_device_mesh("cpu", (dist.get_world_size(),)), []

    def model():
        return partnets.partition(nn.Sequential(nn.Linear(4, 2)), (0.5, 0.5), defaults="zero")

    with pytest.raises(ValueError) as error:
        distributed.fully_shard(model(), mesh=mesh, reshard_after_forward=False)
    found.append(str(error.value))
    sharded = distributed.fully_shard(model(), mesh=mesh)
    x, examples = torch.ones(2, 4), torch.tensor([1, 2])
    with pytest.raises(ValueError) as error, partnets.subnetwork(sharded, active=examples):
        pass
    found.append(str(error.value))
    sharded.set_requires_gradient_sync(False)
    with partnets.subnetwork(sharded, active=1, update=1):
        sharded(x).sum().backward()
    with pytest.raises(RuntimeError) as error, partnets.subnetwork(sharded, active=2, update=2):
        sharded(x).sum().backward()
    found.append(str(error.value))
    sharded[0].unshard()
    with pytest.raises(RuntimeError) as error, partnets.subnetwork(sharded, active=1):
        pass
    found.append(str(error.value))
    return found


def test_what_would_mix_subnetworks_of_a_sharded_model_is_refused(two_ranks):
    for found in two_ranks(misused):
        expected = (
            "reshard_after_forward=False would leave the gathered weights of one subnetwork for the next; leave it out",
            "the model is sharded, and computes one subnetwork at a time",
            "the gradients of partition 1 have not been reduced, and those of 2 would be added to them",
            "the weight of a FSDPLinear is still gathered from its shards; call reshard()",
        )
        for message, part in zip(found, expected, strict=True):
            assert part in message


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


def from_meta():
    model, x = perturbed(network("weight"), 0.1).eval(), torch.rand(4, 3 * 8 * 8, dtype=torch.float64)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.device("meta"):
        made = network("weight").eval()
    distributed.fully_shard(made, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    made.to_empty(device="cpu")
    set_model_state_dict(made, saved, options=StateDictOptions(full_state_dict=True))
    found = []
    for k in (1, 2, 3):
        for one in (made, model):
            with torch.no_grad(), partnets.subnetwork(one, k):
                found.append(one(x))
    return found


@pytest.mark.full
def test_a_model_made_on_the_meta_device_is_sharded_and_loaded(two_ranks):
    for found in two_ranks(from_meta):
        torch.testing.assert_close(found[::2], found[1::2])
