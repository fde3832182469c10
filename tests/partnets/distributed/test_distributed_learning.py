"""Two ranks that share batches learn the same as one process with the joint batches, for each way to share a model."""

import itertools
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from small_network import perturbed
from torch import Generator, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import Dataset
from training import OPTIMIZERS, gradients, learn, learned, loss, mesh, mine, network, trainer, trainer_of, whole

import partnets
from partnets import distributed, hyper, optim, stn
from partnets.distributed.ddp import expect, pack
from partnets.subnetworks.parameters import partitioned_parameters


def replicated(name, scheme):
    """Learn with DDP, which sends rank 0's weights at first."""
    model = network(scheme)
    if not dist.is_initialized():
        return learn(model, model, OPTIMIZERS[name](model))
    with torch.no_grad():
        for one in partitioned_parameters(model):
            one.stored.add_(dist.get_rank())
            one.combine()
        for parameter in hyper.hyperparameters(model):
            parameter += dist.get_rank()
    model = model.to(memory_format=torch.channels_last)  # gives the kernel's gradient other strides
    return learn(model, distributed.DDP(model, bucket_cap_mb=0.01), OPTIMIZERS[name](model))


class Engine(nn.parallel.DistributedDataParallel):
    """torch's wrapper as Lightning's and Hugging Face's trainers use it."""

    def __init__(self, model):
        super().__init__(model, find_unused_parameters=True)
        pack(self)

    def forward(self, *inputs):
        expect(self)
        return super().forward(*inputs)


class Branch(nn.Module):
    """A model with a part that only some batches use, those with positive numbers."""

    def __init__(self):
        super().__init__()
        self.all, self.some = nn.Linear(3, 2), nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))

    def forward(self, x):
        return self.all(x) + (self.some(x) if (x[:, 0] > 0).any() else 0)


def branches(kind):
    """Learn with parts that no rank, one rank or all ranks use, and gradients that the model clears."""
    torch.manual_seed(0)
    model = partnets.partition(Branch(), (0.6, 0.4), defaults="seed").double()
    call = kind(model) if dist.is_initialized() else model
    optimizer = partnets.optim.SGD(model, lr=0.1, momentum=0.9)
    for step, (k, users) in enumerate([(1, 2), (2, 0), (1, 1), (1, 2), (2, 1), (1, 0), (2, 2)]):
        x = torch.randn(8, 3, generator=Generator().manual_seed(step), dtype=torch.float64).abs()
        x[: 4 * (2 - users), 0] *= -1
        with partnets.subnetwork(model, active=k, update=k):
            parts = mine(x).split(4)  # in one process both ranks' parts, each with its own branch
            (sum(call(part).square().mean() for part in parts) / len(parts)).backward()
        optimizer.step(update=k)
        (model if dist.is_initialized() else optimizer).zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def engine(scheme):
    model = network(scheme)
    return learn(model, Engine(model) if dist.is_initialized() else model, optim.Adam(model, lr=0.02))


def sharded(name, units, scheme):
    """Learn with shards; return the weights and each partition's number of steps."""
    model = network(scheme)
    if dist.is_initialized():
        distributed.fully_shard(model, None if units is None else [model[i] for i in units], mesh=mesh())
    optimizer = OPTIMIZERS[name](model)
    weights = learn(model, model, optimizer)
    if dist.is_initialized():
        assert all(p.to_local().shape[0] < len(p) for p in optimizer.parameters())
    return weights, [state["step"] for state in optimizer.state.values() if "step" in state]


def transposed(scheme, inputs):
    """Learn a sharded model of transformers' Conv1D layers, which keep their weights transposed."""
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    torch.manual_seed(0)
    layers, options = nn.Sequential(conv1d(9, inputs), nn.Tanh(), conv1d(3, 9)), {"defaults": "seed"}
    if scheme == "nested":
        options = {"scheme": "nested", "example": torch.randn(2, inputs)}
    model = partnets.partition(layers, (0.5, 0.3, 0.2), **options).double()
    if dist.is_initialized():
        distributed.fully_shard(model, mesh=mesh())
    x = torch.randn(4, inputs, generator=Generator().manual_seed(1), dtype=torch.float64)
    return steps_of(model, partnets.optim.AdamW(model, lr=0.01, weight_decay=0.1), x, (1, 2, 3, 2, 1))


def steps_of(model, optimizer, x, ks, **options):
    """Return the gradients of steps and the weights after them."""
    found = []
    for k in ks:
        partnets.step_weights(model, optimizer, k, x, lambda x: model(x).square().mean(), **{"clip": 1e9} | options)
        found += [whole(parameter.grad) for parameter in model.parameters()]
    return [*found, *map(whole, model.parameters())]


class Everything(nn.Module):
    """A model with direct parameters, a scalar, a shared weight, and a layer that is read without a call."""

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


def everything(clip):
    """Learn with shards and evaluations in between."""
    torch.manual_seed(0)
    model = partnets.partition(Everything(), (0.5, 0.3, 0.2), defaults="stored").double()
    model.norm.eval()
    if dist.is_initialized():
        distributed.fully_shard(model, mesh=mesh())
    optimizer, found = partnets.optim.SGD(model, lr=0.1, momentum=0.9), []
    for step, k in enumerate((1, 2, 3, 2, 1, 3)):
        generator = Generator().manual_seed(step)
        x, y = torch.randint(9, (8, 4), generator=generator), torch.randint(9, (8,), generator=generator)
        batch = mine(x), mine(y)
        with torch.no_grad():
            model(batch[0])
            with partnets.subnetwork(model, active=3):
                model(batch[0])
        partnets.step_weights(
            model, optimizer, k, batch, lambda batch: F.cross_entropy(model(batch[0]), batch[1]), clip=clip
        )
        found += [whole(parameter.grad) for parameter in model.parameters()]
    rows = [buffer.clone() for name, buffer in model.named_buffers() if name.endswith("_rows")]
    return [*found, *map(whole, model.parameters()), *rows]


def convolution():
    """Learn a weight that is sharded along its kernel."""
    torch.manual_seed(0)
    model = partnets.partition(nn.Sequential(nn.Conv2d(1, 2, 4)), (0.5, 0.5)).double()
    if dist.is_initialized():
        distributed.fully_shard(model, mesh=mesh(), shard_placement_fn=lambda weight: Shard(weight.dim() - 1))
    return steps_of(model, partnets.optim.Adam(model, lr=0.1), torch.ones(3, 1, 4, 4).double(), (1, 2))


def parallel(defaults):
    """Return outputs, gradients and learned weights of a model with tensor parallelism."""
    torch.manual_seed(0)
    layers = [hyper.InputMask(12), nn.Linear(12, 128), nn.Tanh(), nn.Linear(128, 5), nn.LayerNorm(5)]
    options = {"defaults": defaults, "seed": 0}
    if defaults == "nested":  # the second layer's outputs are partitioned too
        layers[3:] = [nn.Linear(128, 16), nn.Tanh(), nn.Linear(16, 5)]
        options = {"scheme": "nested", "example": torch.randn(2, 12)}
    model = partnets.partition(nn.Sequential(*layers), (0.8, 0.1, 0.1), **options).double().eval()
    if dist.is_initialized():
        parallelize_module(model, mesh(), {"1": ColwiseParallel(), "3": RowwiseParallel()})
        assert model[1].weight.to_local().shape == (64, 12)
    found = []
    for active, update in [(1, 1), (2, 1), (2, 2), (3, 3), (2, None)]:
        x = torch.randn(3, 12, generator=Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
        optim.SGD(model).zero_grad()
        model.zero_grad()
        with partnets.subnetwork(model, active=active, update=update):
            y = model(x)
            y.square().sum().backward()
        grads = [x.grad, *(parameter.grad for parameter in model.parameters())]
        found.append([y.detach(), *(None if grad is None else whole(grad) for grad in grads)])
    x = torch.randn(4, 12, generator=Generator().manual_seed(1), dtype=torch.float64)
    return found, steps_of(model, optim.Adam(model, lr=0.01), x, (1, 2, 3, 1, 3))


def in_two_dimensions(shape):
    """Learn with tensor parallelism and shards."""
    torch.manual_seed(0)
    layers = nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 3)
    model = partnets.partition(nn.Sequential(*layers), (0.5, 0.3, 0.2), defaults="seed", seed=1).double()
    x = torch.randn(8, 6, generator=Generator().manual_seed(1), dtype=torch.float64)
    if dist.is_initialized():
        both = mesh(*shape, names=("data", "tensor"))
        parallelize_module(model, both["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        distributed.fully_shard(model, mesh=both["data"])
        x = x.chunk(shape[0])[both["data"].get_local_rank()]
    return steps_of(model, partnets.optim.Adam(model, lr=0.02), x, (1, 3, 2, 1), clip=0.01)


def per_example(scheme, is_given_wrapped):
    """Return the gradients of a batch with a different subnetwork for each example and rank."""
    model = network(scheme)
    call = distributed.DDP(model) if dist.is_initialized() else model
    active, update = torch.tensor([1, 3, 3, 1, 2, 2, 2, 1]), torch.tensor([1, 0, 3, 1, 2, 1, 0, 0])
    given = call if is_given_wrapped else model
    with partnets.subnetwork(given, active=mine(active), update=mine(update)):
        loss(call, 0).backward()
    return gradients(model)


def accumulated(updates):
    """Return the gradients of several subnetworks, accumulated under no_sync and synchronised by the last step."""
    model = network()
    call = distributed.DDP(model) if dist.is_initialized() else model
    for step, k in enumerate(updates):
        with partnets.subnetwork(model, active=3, update=k):
            if call is not model and step < len(updates) - 1:
                with call.no_sync():
                    loss(call, step).backward()
            else:
                loss(call, step).backward()
    return gradients(model)


def accumulated_in_shards(updates):
    """Return the gradients of several partitions, each added to what was reduced before, and those of one step less."""
    model, found = network(), []
    if dist.is_initialized():
        distributed.fully_shard(model, mesh=mesh())
    for step, k in enumerate(updates):
        with partnets.subnetwork(model, active=3, update=k):
            loss(model, step).backward()
        found += [whole(one.parameter.grad) for one in partitioned_parameters(model) if not one.is_vector]
    return found


def trained(steps, options):
    one = trainer(**options)
    one.fit(steps)
    return learned(one)


def ensemble():
    torch.manual_seed(0)
    extractor = hyper.Submodule(nn.Linear(6, 5))
    networks = [nn.Sequential(extractor, nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)) for _ in range(3)]
    one = trainer_of(partnets.Ensemble(networks).double(), hyper=extractor)
    one.fit(12)
    return learned(one)


def looking_ahead(technique, options, steps=8):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3)).double()
    extractor = hyper.Submodule(nn.Linear(6, 6).double())  # learns directly, unlike the others
    rate, decay, smoothing = hyper.LearningRate(network, 0.05), hyper.WeightDecay(network), hyper.LabelSmoothing()
    psi, options = [extractor, rate, decay, smoothing], dict(options)
    model = nn.Sequential(extractor, network, *psi[1:]).double()
    model = partnets.partition(model, (0.6, 0.2, 0.2), **options.pop("partition", {})).double()
    by = {rate: partnets.Lookahead(2), decay: technique, smoothing: technique}
    hyper_optimizer = torch.optim.Adam(hyper.hyperparameters(model), lr=0.05)
    options = {"hyper": psi, "loss": smoothing, "hyper_gradient": by, "hyper_optimizer": hyper_optimizer} | options
    one = trainer_of(model, **options)
    one.fit(steps)
    return [*map(whole, model.parameters()), torch.tensor([*one.values().values()])]


DATA = Generator().manual_seed(1)
BATCH = torch.randn(8, 1, 8, 8, dtype=torch.float64, generator=DATA), torch.randint(3, (8,), generator=DATA)


def response(kind, options):
    """Learn a best-response model, without dropout and with independent noise per example."""
    skipped = [] if "linearised" in options else ["6"]  # no forward-mode AD in partitioned layers
    torch.manual_seed(0)
    dropout, noise = hyper.Dropout(0.3), hyper.InputNoise(0.1)
    layers = nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.LayerNorm(36), dropout, nn.Linear(36, 3)
    network = stn.convert(nn.Sequential(noise, *layers), [noise, dropout], skip=skipped, **options)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name.endswith("_scale"):
                parameter.normal_(std=0.1)
    if kind == "L_ML":
        model = partnets.partition(network, (0.5, 0.3, 0.2), defaults="stored").double()
    else:
        model = partnets.Ensemble([network], num_partitions=2).double()
    call, batch = model, tuple(map(mine, BATCH))
    if dist.is_initialized() and kind == "torch's":
        call = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    elif dist.is_initialized():
        call = distributed.DDP(model, bucket_cap_mb=0.001)
    vector, steps = stn.converting.vector_of(model.eval()), itertools.count(5)

    @contextmanager
    def as_of_the_whole_batch(examples, *, learns=False):
        drawn = mine(torch.randn(8, vector.size, generator=Generator().manual_seed(next(steps))).double())
        value = vector.present() + vector.scale() * drawn
        with vector.at(value if learns else value.detach()):
            yield

    vector.perturbed = as_of_the_whole_batch
    weights, psi = optim.SGD(model, lr=0.1), torch.optim.SGD(hyper.hyperparameters(model), lr=0.1)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for _ in range(2):
        stn.step_weights(model, weights, 1, batch, lambda batch: F.cross_entropy(call(batch[0]), batch[1]))
        stn.step_hyper(model, psi, {2: batch}, lambda batch: F.cross_entropy(call(batch[0]), batch[1]))
    assert not any(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    return [parameter.detach() for parameter in model.parameters()]


NESTED = {"partition": {"scheme": "nested", "example": torch.ones(2, 6).double()}}
CASES = {
    **{f"DDP {name}": (replicated, name, "weight") for name in OPTIMIZERS},
    "DDP nested": (replicated, "Adam", "nested"),
    "DDP of branches": (branches, distributed.DDP),
    "an engine's DDP of branches": (branches, Engine),
    "an engine's DDP, nested": (engine, "nested"),
    "shards of units": (sharded, "SGD", (2, 6), "weight"),
    "shards": (sharded, "Adam", None, "weight"),
    "nested shards": (sharded, "Adam", (2, 6), "nested"),
    **{f"transposed {scheme} {n}": (transposed, scheme, n) for scheme, n in (("weight", 11), ("weight", 128))},
    "transposed nested": (transposed, "nested", 11),
    "everything": (everything, 1e9),
    "everything clipped": (everything, 0.1),
    "shards of a kernel": (convolution,),
    **{f"tensor parallel {defaults}": (parallel, defaults) for defaults in ("seed", "zero", "stored", "nested")},
    **{f"in two dimensions {shape}": (in_two_dimensions, shape) for shape in ((1, 2), (2, 1))},
    "per example": (per_example, "weight", False),
    "per example, wrapped and nested": (per_example, "nested", True),
    **{f"accumulated {updates}": (accumulated, updates) for updates in ((2, 2), (1, 3, 1))},
    "accumulated in shards": (accumulated_in_shards, (1, 3, 3, 1)),
    "trainer": (trained, 20, {"hyper_every": 2}),
    "trainer, several steps of ψ": (trained, 20, {"hyper_steps": 2, "hyper_batch_size": 6}),
    "trainer, one pass": (trained, 20, {"one_pass": True, "batch_size": 20, "hyper_batch_size": 8}),
    "ensemble": (ensemble,),
    "lookahead": (looking_ahead, partnets.Lookahead(2), {"clip": 0.3, "hyper_steps": 2, "hyper_batch_size": 6}),
    "differences": (looking_ahead, partnets.Lookahead(2, exact=False), NESTED),
    "implicit": (looking_ahead, partnets.Implicit("neumann", terms=3, alpha=0.1), {"sampling": (0.5, 0.25, 0.25)}),
    "response": (response, "validation set", {"linearised": True}),
    "response, L_ML": (response, "L_ML", {}),
    "response, not centred": (response, "L_ML", {"centred": False}),
    "response, torch's DDP": (response, "torch's", {}),
}


@pytest.mark.cases(usual=16)
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_learn_the_same_as_one_process_from_joint_batches(case, two_ranks):
    function, *arguments = CASES[case]
    expected, (first, second) = function(*arguments), two_ranks(function, *arguments)
    rough = {"rtol": 1e-7, "atol": 1e-9} if function is looking_ahead else {"rtol": 1e-9, "atol": 1e-11}
    exact = {"rtol": 1e-10, "atol": 1e-12}
    close = exact if function in (replicated, sharded, transposed, convolution, per_example, response) else rough
    for found in (first, second):
        torch.testing.assert_close(found, expected, **close)
    if function in (replicated, branches, engine, response):
        torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.full
def test_three_ranks_learn_the_same_as_one_process_with_an_audit(three_ranks):
    expected = trained(4, {"batch_size": 24})
    for found in three_ranks(trained, 4, {"batch_size": 24}):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


class Squares(Dataset):
    """A data set that counts its fetches."""

    fetched = 0

    def __len__(self):
        return 100

    def __getitem__(self, i):
        self.fetched += 1
        return i, i * i


def sample():
    squares, generator = Squares(), Generator().manual_seed(7)
    chunks = partnets.chunk(squares, (0.5, 0.3, 0.2), seed=1)
    chunks = distributed.share(chunks) if dist.is_initialized() else chunks
    drawn = [*chunks.sample_upto(2, 10, generator), *chunks.sample(3, 6, generator)]
    return drawn, squares.fetched, generator.get_state(), chunks.sizes


def test_the_ranks_batches_make_the_batch_of_one_process(two_ranks):
    whole, fetched, state, sizes = sample()
    parts, *others = zip(*two_ranks(sample), strict=True)
    for pair, both in zip(zip(*parts, strict=True), whole, strict=True):
        assert torch.equal(torch.cat(pair), both)
    assert others[0] == (fetched / 2, fetched / 2)  # each rank fetches only its part
    assert all(torch.equal(one, state) for one in others[1]) and others[2] == (sizes, sizes)


def from_meta():
    model, x = perturbed(network("weight"), 0.1).eval(), torch.rand(4, 3 * 8 * 8, dtype=torch.float64)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.device("meta"):
        made = network("weight").eval()
    distributed.fully_shard(made, mesh=mesh())
    made.to_empty(device="cpu")
    set_model_state_dict(made, saved, options=StateDictOptions(full_state_dict=True))
    for k in (1, 2, 3):
        with torch.no_grad(), partnets.subnetwork(made, k), partnets.subnetwork(model, k):
            torch.testing.assert_close(made(x), model(x))


@pytest.mark.full
def test_a_model_made_on_the_meta_device_is_sharded_and_loaded(two_ranks):
    two_ranks(from_meta)


def shares_of_maps(defaults):
    model = partnets.partition(Everything(), (0.5, 0.3, 0.2), defaults=defaults)
    names = [name for name in dict(model.named_buffers()) if name.endswith(("weight_partition", "weight_stored"))]
    before = {name: model.get_buffer(name).clone() for name in names}
    distributed.fully_shard(model, mesh=mesh())
    found = {name: (model.get_buffer(name), before[name]) for name in names}
    assert all(torch.equal(shard.full_tensor(), buffer) for shard, buffer in found.values())
    assert model.head.weight_partition is model.embedding.weight_partition
    return {name: shard.to_local().untyped_storage().nbytes() / whole.nbytes for name, (shard, whole) in found.items()}


@pytest.mark.parametrize("defaults", ["seed", "stored"])
def test_each_rank_has_its_rows_of_the_maps(defaults, two_ranks):
    for first, second in zip(*(shares.values() for shares in two_ranks(shares_of_maps, defaults)), strict=True):
        assert first + second == pytest.approx(1, rel=0.15)
        assert max(first, second) < 0.7


class Started(Everything):
    """A model whose direct parameters have initial values that a call sets."""

    def __init__(self):
        super().__init__()
        self.reset_parameters()

    def reset_parameters(self):
        for one in self.parameters(recurse=False):
            nn.init.constant_(one, 0.1) if one.dim() < 2 else nn.init.eye_(one.view(-1, 6))


def started(device, **options):
    torch.manual_seed(7)
    with torch.device(device):
        model = partnets.partition(Started(), (0.5, 0.3, 0.2), defaults="seed", seed=4)
    return distributed.fully_shard(model, mesh=mesh(), **options)


def initialised(device, initialise):
    torch.manual_seed(dist.get_rank())
    model = started(device, initialise=initialise)
    state = {name: whole(tensor) for name, tensor in model.state_dict().items()}
    ids = torch.arange(9)[:, None] + torch.arange(2)
    optimizer = partnets.optim.Adam(model, lr=0.1)
    for k in (1, 3, 2):
        partnets.step_weights(model, optimizer, k, ids % 9, lambda x: model(x).logsumexp(1).mean())
    return state, [whole(parameter) for parameter in model.parameters()]


class Tied(nn.Module):
    """A container that shares its bias with a layer inside of it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 9))
        self.bias = self.layer[1].bias
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.zeros_(self.bias)

    def forward(self, x):
        return self.layer(x) + self.bias


def tied(device):
    torch.manual_seed(7)
    with torch.device(device):
        model = partnets.partition(nn.Sequential(nn.Linear(6, 6), Tied()), (0.5, 0.3, 0.2), defaults="seed", seed=4)
        model[0].requires_grad_(False)
    distributed.fully_shard(model, mesh=mesh(), initialise=device == "meta" and reset)
    partnets.step_weights(model, partnets.optim.SGD(model, lr=0.1), 2, torch.ones(2, 6), lambda x: model(x).sum())
    return {name: whole(tensor) for name, tensor in model.state_dict().items()}


def reset(module):
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


def test_ties_and_frozen_parameters_are_made_from_the_meta_device(two_ranks):
    expected = two_ranks(tied, "cpu")[0]
    for state in two_ranks(tied, "meta"):
        assert state.keys() == expected.keys()
        for name, value in state.items():
            assert torch.equal(value, expected[name]), name


def test_a_model_is_made_from_the_meta_device_as_on_others(two_ranks):
    expected, learned = two_ranks(initialised, "cpu", False)[0]
    for state, then in two_ranks(initialised, "meta", True):
        assert state.keys() == expected.keys()
        for name, value in state.items():
            assert torch.equal(value, expected[name]), name
        assert all(map(torch.equal, then, learned))
