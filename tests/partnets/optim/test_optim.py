"""Each partition is optimised like a separate tensor that is stepped only when the partition is drawn."""

import copy
import io
import pickle
from functools import partial

import pytest
import torch
from torch import nn

import partnets
from partnets import hyper, optim

PROPORTIONS = (0.6, 0.3, 0.1)
DECAYS = (0.1, 0.02, 0.003)
SCHEDULE = (1, 1, 2, 1, 3, 3, 2, 1, 1, 1, 2, 3, 1, 1)


class Signs(torch.optim.Optimizer):
    """Lion (Chen et al. 2023) with a step count that is a Python int."""

    def __init__(self, params, lr=0.1, beta=0.9, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "beta": beta, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["steps"] = state.get("steps", 0) + 1
                average = state.setdefault("average", torch.zeros_like(parameter))
                average.lerp_(parameter.grad, 1 - group["beta"])
                parameter -= group["lr"] * (average.sign() + group["weight_decay"] * parameter)


def wrapped(theirs, **settings):
    return partial(optim.PerPartition, theirs), theirs, settings


# Our optimiser, torch's, and settings. PerPartition equals torch's optimiser to the bit, the others up to rounding.
CASES = {
    "SGD": (optim.SGD, torch.optim.SGD, {"lr": 0.1}),
    "momentum": (optim.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "nesterov": (optim.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adam": (optim.Adam, torch.optim.Adam, {"lr": 0.01, "betas": (0.5, 0.8), "eps": 1e-3}),
    "AdamW": (optim.AdamW, torch.optim.AdamW, {"lr": 0.01}),
    "Adadelta, wrapped": wrapped(torch.optim.Adadelta, lr=0.5),
    "Adagrad, wrapped": wrapped(torch.optim.Adagrad, lr_decay=0.1, initial_accumulator_value=0.5),
    "Adam, wrapped": wrapped(torch.optim.Adam, amsgrad=True),
    "Adamax, wrapped": wrapped(torch.optim.Adamax, lr=0.01),
    "AdamW, wrapped": wrapped(torch.optim.AdamW, lr=0.01, amsgrad=True),
    "ASGD, wrapped": wrapped(torch.optim.ASGD, t0=3),
    "NAdam, wrapped": wrapped(torch.optim.NAdam, lr=0.01),
    "RAdam, wrapped": wrapped(torch.optim.RAdam, lr=0.01),
    "RMSprop, wrapped": wrapped(torch.optim.RMSprop, momentum=0.9, centered=True),
    "Rprop, wrapped": wrapped(torch.optim.Rprop),
    "SGD, wrapped": wrapped(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5, maximize=True),
    "Lion, wrapped": wrapped(Signs, beta=0.5),
}
every_case = pytest.mark.parametrize("case", CASES)


def decayed(theirs, settings, decay):
    """Return the settings with a weight decay if the optimiser supports it."""
    return settings if theirs is torch.optim.Rprop else settings | {"weight_decay": decay}


def network(proportions=PROPORTIONS):
    """Return a model with partitioned weights, rows of norms, and a weight in which partition 3 is empty."""
    layers = nn.Conv2d(2, 5, 3), nn.GroupNorm(1, 5), nn.ReLU(), nn.Flatten(), nn.Linear(45, 2), nn.Linear(2, 2)
    return partnets.partition(nn.Sequential(*layers), proportions, seed=1).double()


def gradients(model, step):
    """Set dense random gradients, because an optimiser must not rely on zeros in other partitions."""
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator)


def stored(model):
    """Return the tensors with all partitions' entries: weights, and the rows of vectors."""
    buffers = dict(model.named_buffers())
    return [buffers.get(f"{name}_rows", parameter) for name, parameter in model.named_parameters()]


def entries(model, tensors, k):
    """Return what partition k owns of tensors like `stored`."""
    maps = partnets.partitions(model)
    masks = [maps[name].ids() == k if name in maps else k - 1 for name, _ in model.named_parameters()]
    return [tensor.detach()[mask].clone() for tensor, mask in zip(tensors, masks, strict=True)]


def states(model, optimizer, k):
    """Return the state of partition k: its entries of moments, and its numbers."""
    found = [optimizer.state[parameter] for parameter in model.parameters()]
    names = [name for name in found[0] if name != "step"]
    numbers = [state["step"][k - 1].clone() for state in found if "step" in state]
    return [part for name in names for part in entries(model, [state[name] for state in found], k)] + numbers


def run(model, optimizer, steps):
    for step in steps:
        gradients(model, step)
        optimizer.step(SCHEDULE[step])


def same(first, second):
    return len(first) == len(second) and all(map(torch.equal, first, second))


def check_close(case, found, expected):
    if "wrapped" in case:
        assert same(found, expected)
    else:
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-14)


@pytest.mark.cases(usual=12)
@every_case
def test_each_partition_moves_as_if_torchs_optimiser_had_only_its_entries(case):
    (ours, theirs, settings), model = CASES[case], network()
    alone = [entries(model, stored(model), k) for k in (1, 2, 3)]
    references = [theirs(part, **decayed(theirs, settings, decay)) for part, decay in zip(alone, DECAYS, strict=True)]
    optimizer = ours(model, **decayed(theirs, settings, DECAYS))
    for step, k in enumerate(SCHEDULE):
        gradients(model, step)
        grads = entries(model, [p.grad if p.dim() > 1 else p.grad.expand(3, -1) for p in model.parameters()], k)
        for part, grad in zip(alone[k - 1], grads, strict=True):
            part.grad = grad
        optimizer.step(update=k)
        references[k - 1].step()
    for k in (1, 2, 3):
        check_close(case, entries(model, stored(model), k), alone[k - 1])
    for layer in (model[0], model[4]):
        torch.testing.assert_close(layer.bias, layer.bias_rows.sum(0), rtol=1e-13, atol=1e-14)


@pytest.mark.cases(usual=8)
@every_case
def test_one_partition_moves_as_torchs_optimiser_with_groups(case):
    (ours, theirs, settings), model = CASES[case], network((1.0,)).to(memory_format=torch.channels_last)
    twin, own = copy.deepcopy(model), decayed(theirs, {"lr": 0.003}, 0.2)
    settings = decayed(theirs, settings, 0.1)
    optimizer = ours(model, **settings, groups=[{"params": model[4].parameters(), **own}])
    rest = [parameter for i in (0, 1, 5) for parameter in twin[i].parameters()]
    reference = theirs([{"params": twin[4].parameters(), **own}, {"params": rest}], **settings)
    for step in range(8):
        gradients(model, step)
        gradients(twin, step)
        optimizer.step(update=1)
        reference.step()
    check_close(case, [*model.parameters()], [*twin.parameters()])


@pytest.mark.cases(usual=8)
@every_case
def test_a_step_leaves_every_bit_of_the_other_partitions(case):
    (ours, theirs, settings), model = CASES[case], network()
    optimizer = ours(model, **decayed(theirs, settings, DECAYS))
    run(model, optimizer, range(8))

    def everything(k):
        return entries(model, stored(model), k) + states(model, optimizer, k)

    before = [everything(k) for k in (1, 2, 3)]
    gradients(model, 9)
    optimizer.step(2)
    after = [everything(k) for k in (1, 2, 3)]
    assert same(before[0] + before[2], after[0] + after[2]) and not same(before[1], after[1])


@pytest.mark.cases(usual=6, full=20)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@every_case
def test_an_optimiser_resumes_from_its_state_dict_or_a_copy_bit_for_bit(case, dtype):
    ours, theirs, settings = CASES[case]
    model = network().to(dtype)
    optimizer = ours(model, **decayed(theirs, settings, DECAYS))
    run(model, optimizer, range(7))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    twin = copy.deepcopy(model)
    resumed = ours(twin, lr=1.0)
    for _ in range(2):  # a state can be loaded more than once
        resumed.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    before = [parameter.clone() for parameter in model.parameters()]
    copies = [(twin, resumed), copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))]
    for one in copies:
        run(*one, range(7, len(SCHEDULE)))
    assert same(before, [*model.parameters()])
    run(model, optimizer, range(7, len(SCHEDULE)))
    for one, _ in copies:
        assert same([*model.parameters()], [*one.parameters()])


@pytest.mark.parametrize("case", ["momentum", "Adam", "RMSprop, wrapped"])
def test_parameters_without_a_gradient_and_frozen_ones_stay(case):
    (ours, _, settings), model = CASES[case], network()
    model[5].bias.requires_grad_(False)
    before, optimizer = copy.deepcopy(model.state_dict()), ours(model, **settings)
    assert set(optimizer.parameters()) == set(model.parameters()) - {model[5].bias}
    model[4].bias.grad = torch.ones_like(model[4].bias)
    optimizer.step(2)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    changed = {name for name in changed if "learned_from" not in name}
    assert changed == {"4.bias", "4.bias_rows"} and not optimizer.state[model[0].weight]


def test_decays_are_the_priors_precision_over_the_examples_seen():
    assert optim.decays(2.0, [5, 3, 2]) == (2 / 5, 2 / 8, 2 / 10)
    assert optim.decays(6.0, [4, 5, 16, 11], rule="square root") == (6 / 2, 6 / 3, 6 / 5, 6 / 6)
    assert optim.SGD(network(), weight_decay=optim.decays(2.0, [5, 3, 2])).defaults["weight_decay"] == (0.4, 0.25, 0.2)


def test_a_closure_comes_before_the_step_with_gradients_as_in_torch():
    model, other = network(), network()
    other.load_state_dict(model.state_dict())
    x = torch.randn(4, 2, 5, 5, dtype=torch.float64)

    def closure(model):
        with partnets.subnetwork(model, active=2, update=2):
            loss = model(x).square().sum()
            loss.backward()
        return loss

    returned, loss = optim.SGD(model).step(2, lambda: closure(model)), closure(other)
    optim.SGD(other).step(2)
    assert returned == loss and same([*model.parameters()], [*other.parameters()])


@pytest.mark.parametrize("scheme", ["weight", "nested"])
def test_a_step_compares_the_memory_of_no_two_tensors(scheme, monkeypatch):
    """Check that separate tensors are not compared pairwise for shared memory, which would be slower than the step."""
    monkeypatch.setattr("partkernels.operators.memory.share_memory", lambda *_: pytest.fail("compared"))
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(5, 4)
    partnets.partition(model, (0.5, 0.5), scheme=scheme, **({"example": x} if scheme == "nested" else {}))
    optimizer = optim.Adam(model)
    for k in (1, 2):
        with partnets.subnetwork(model, k, k):
            model(x).sum().backward()
        optimizer.step(update=k)


def moved_tensors(model, optimizer):
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.detach().clone()
    return optimizer


def replaced_buffers(model, optimizer):
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    new = type(optimizer)(model, lr=optimizer.defaults["lr"])
    new.load_state_dict(optimizer.state_dict())
    return new


def loaded_state(model, optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return optimizer


def cleared_state(model, optimizer):
    optimizer.state.clear()
    return optimizer


@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("change", [moved_tensors, replaced_buffers, loaded_state, cleared_state])
def test_a_step_uses_tensors_moved_or_replaced_since_the_last_step(change, at):
    stepped = []
    for is_remade in (False, True):
        model = network()
        optimizer = optim.Adam(model, lr=0.1)
        for step, k in enumerate((1, 1, 2, 3, 2, 1)):
            if step == at:
                optimizer = change(model, optimizer)
            if is_remade:  # nothing is known of earlier steps
                optimizer.__dict__.pop("_entries", None)
            gradients(model, step)
            optimizer.step(update=k)
        moments = [one for state in optimizer.state.values() for one in state.values()]
        stepped.append([tensor.clone() for tensor in (*stored(model), *moments)])
    assert same(*stepped)


def test_gradients_of_any_layout_are_read_and_those_in_a_parameters_memory_are_refused():
    results = []
    for layout in (
        lambda g: g,
        lambda g: g.mT.contiguous().mT if g.dim() == 2 else g.repeat_interleave(2, 0)[::2],
        lambda g: torch.complex(g, -g).conj().imag,
    ):
        model = network()
        optimizer = optim.Adam(model, lr=0.1)
        for step in range(2):
            gradients(model, step)
            for parameter in model.parameters():
                parameter.grad = layout(parameter.grad)
            optimizer.step(update=2)
        results.append([tensor.clone() for tensor in stored(model)])
    assert all(same(results[0], others) for others in results[1:])
    model[4].weight.grad = model[4].weight.detach()
    with pytest.raises(ValueError, match="share memory, and a step writes to it"):
        optimizer.step(update=2)


def test_trying_an_optimiser_out_draws_nothing_from_torchs_generator():
    model, before = network(), torch.get_rng_state()
    optim.PerPartition(torch.optim.RMSprop, model)
    assert torch.equal(before, torch.get_rng_state())


def without_partitions():
    return nn.ModuleDict({"norm": nn.LayerNorm(3), "layer": partnets.Linear(3, 2, proportions=PROPORTIONS)})


def grouped(make, *groups, **settings):
    model = network()
    return make(model, groups=[{"params": [model[0].weight]} | group for group in groups], **settings)


rmsprop = partial(optim.PerPartition, torch.optim.RMSprop)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: optim.SGD(network(), lr=-1.0), ValueError, "lr"),
        (lambda: optim.SGD(network(), lr=float("nan")), ValueError, "lr"),
        (lambda: optim.SGD(network(), momentum=-0.1), ValueError, "momentum"),
        (lambda: optim.SGD(network(), nesterov=True), ValueError, "nesterov"),
        (lambda: optim.SGD(network(), weight_decay=(0.1, 0.1)), ValueError, "3 of them"),
        (lambda: optim.Adam(network(), weight_decay=-0.1), ValueError, "weight_decay"),
        (lambda: optim.Adam(network(), betas=(0.9, 1.0)), ValueError, "betas"),
        (lambda: optim.Adam(network(), eps=-1.0), ValueError, "eps"),
        (lambda: rmsprop(network(), lr=-1.0), ValueError, "Invalid learning rate"),
        (lambda: rmsprop(network(), learning_rate=0.1), TypeError, "learning_rate"),
        (lambda: optim.PerPartition("RMSprop", network()), TypeError, r"pass a class of torch\.optim"),
        (lambda: optim.PerPartition(optim.Adam, network()), TypeError, r"pass a class of torch\.optim"),
        (lambda: optim.SGD(network().parameters(), lr=0.1), TypeError, "SGD got a generator; pass the model itself"),
        (lambda: grouped(optim.SGD, {"learning_rate": 0.1}), ValueError, "a group has learning_rate; its settings can"),
        (lambda: grouped(optim.SGD, {"lr": -1.0}), ValueError, "lr=-1.0"),
        (lambda: grouped(optim.SGD, {"weight_decay": (0.1, 0.1)}), ValueError, "3 of them"),
        (lambda: grouped(optim.SGD, {"nesterov": True}), ValueError, "nesterov=True with momentum=0"),
        (lambda: grouped(optim.SGD, {"params": [nn.Parameter(torch.zeros(2))]}), ValueError, "not a trainable"),
        (lambda: grouped(optim.SGD, {}, {}), ValueError, "more than one parameter group"),
        (lambda: grouped(rmsprop, {"momentum": -1.0}), ValueError, "Invalid momentum"),
        (lambda: optim.Adam(without_partitions()), ValueError, r"norm\.weight, norm\.bias would learn"),
        (lambda: optim.decays(-1.0, [5]), ValueError, "precision=-1.0"),
        (lambda: optim.decays(float("nan"), [5]), ValueError, "precision=nan"),
        (lambda: optim.decays(1.0, [5, 0]), ValueError, "at least 1"),
        (lambda: optim.decays(1.0, []), ValueError, "at least 1"),
        (lambda: optim.decays(1.0, [5], "root"), ValueError, "'reciprocal' or 'square root'"),
        *((lambda update=update: optim.Adam(network()).step(update), ValueError, r"1\.\.3") for update in (0, 4, True)),
    ],
)
def test_wrong_arguments_raise(call, error, message):
    with pytest.raises(error, match=message):
        call()


class OfTheWholeTensor(torch.optim.Optimizer):
    """An optimiser with steps scaled by the parameter's norm, as in LARS."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.move(parameter, group)

    def move(self, parameter, group):
        parameter -= group["lr"] * parameter.norm() / parameter.grad.norm() * parameter.grad


class ClipsTheNorm(OfTheWholeTensor):
    """An optimiser that clips the norm: entries interact only if the gradient is large."""

    def move(self, parameter, group):
        parameter -= group["lr"] * parameter.grad * (30 / parameter.grad.norm()).clamp(max=1)


class CountsInItsGroup(OfTheWholeTensor):
    """An optimiser with a step count in its group, which the partitions would share."""

    def move(self, parameter, group):
        group["steps"] = group.get("steps", 0) + 1
        parameter -= group["lr"] / group["steps"] * parameter.grad


class AddsToItsState(OfTheWholeTensor):
    """An optimiser with a part of the state from the second step on."""

    def move(self, parameter, group):
        state = self.state[parameter]
        state["steps"] = state.get("steps", 0) + 1
        if state["steps"] > 1:
            state["slow"] = parameter.clone()
        parameter -= group["lr"] * parameter.grad


class KeepsFloat32(OfTheWholeTensor):
    """An optimiser with float32 moments of parameters of any dtype."""

    def move(self, parameter, group):
        state = self.state[parameter]
        state["mean"] = state.get("mean", 0.0) + parameter.grad.float()
        parameter -= group["lr"] * state["mean"]


@pytest.mark.parametrize(
    ("theirs", "reason"),
    [
        (torch.optim.LBFGS, "cannot step parts of a tensor: .*closure"),
        (torch.optim.Muon, "cannot step parts of a tensor: Muon only supports 2D"),
        (torch.optim.SparseAdam, "cannot step parts of a tensor: SparseAdam does not support dense"),
        (torch.optim.Adafactor, "moves parts of a tensor differently"),
        (OfTheWholeTensor, "moves parts of a tensor differently"),
        (ClipsTheNorm, "moves parts of a tensor differently"),
        (CountsInItsGroup, "moves parts of a tensor differently"),
        (AddsToItsState, "has slow not from its first step on"),
        (KeepsFloat32, "has mean in torch.float32, not in the parameter's dtype"),
    ],
)
@pytest.mark.parametrize("lr", [1e-3, 1e-30])
def test_an_optimiser_that_does_not_step_each_entry_by_itself_is_refused(theirs, reason, lr):
    with pytest.raises(ValueError, match=f"^{theirs.__name__} {reason}.*; pass one that steps each entry by itself"):
        optim.PerPartition(theirs, network(), lr=lr)


def stepped(make, proportions=PROPORTIONS, **settings):
    model = network(proportions)
    optimizer = make(model, **settings)
    gradients(model, 0)
    optimizer.step(1)
    return optimizer


@pytest.mark.parametrize(
    ("own", "other", "message"),
    [
        (optim.Adam, partial(stepped, optim.SGD), "has no betas, eps, and this one is a Adam"),
        (optim.SGD, partial(stepped, optim.SGD, (0.5, 0.5)), r"weight_decay=\(0\.0, 0\.0\), .* SGD of 3 partitions"),
        (optim.Adam, lambda: optim.Adam(partnets.Linear(3, 2, proportions=PROPORTIONS)), r"groups of \[2\]"),
        (optim.Adam, lambda: grouped(optim.Adam, {}), r"groups of \[1, 7\]"),
        (rmsprop, partial(stepped, partial(optim.PerPartition, torch.optim.Adagrad)), "has no alpha"),
        (rmsprop, partial(stepped, rmsprop, centered=True), r"'grad_avg'"),
        (rmsprop, lambda: torch.optim.RMSprop(network().parameters()), "weight_decay=0"),
    ],
)
def test_the_state_of_another_optimiser_or_model_raises_and_changes_nothing(own, other, message):
    optimizer = stepped(own)
    before, saved = copy.deepcopy(optimizer.state_dict()), other().state_dict()
    if "grad_avg" in message:
        for group in saved["param_groups"]:
            group["centered"] = False
    with pytest.raises(ValueError, match=f"{message}.*such an optimiser of the same model"):
        optimizer.load_state_dict(saved)
    torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)


def test_a_step_of_an_ensemble_changes_only_one_network():
    model = partnets.Ensemble([nn.Linear(3, 2), nn.Linear(3, 2)])
    before, optimizer = copy.deepcopy(model.state_dict()), rmsprop(model)
    gradients(model, 0)
    optimizer.step(2)
    assert [not torch.equal(value, before[name]) for name, value in model.state_dict().items()] == [False] * 2 + [
        True
    ] * 2


def test_hyperparameters_are_left_out():
    model = nn.Sequential(hyper.InputMask(3), partnets.Linear(3, 2, proportions=PROPORTIONS))
    assert optim.SGD(model).parameters() == [*model[1].parameters()]
