"""Any elementwise optimiser of torch.optim can step one partition at a time, like a separate tensor."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import partkernels
import partnets
from partnets import distributed, hyper, optim

PROPORTIONS = (0.6, 0.3, 0.1)
DECAYS = (0.1, 0.02, 0.003)
SCHEDULE = (1, 1, 2, 1, 3, 3, 2, 1, 1, 1, 2, 3, 1, 1)
CASES = {
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.5}),
    "Adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    "Adam, amsgrad": (torch.optim.Adam, {"amsgrad": True}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "ASGD": (torch.optim.ASGD, {"t0": 3}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.01}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "Rprop": (torch.optim.Rprop, {}),
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD, momentum and dampening": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    "SGD, maximize": (torch.optim.SGD, {"lr": 0.1, "maximize": True}),
}
every_case = pytest.mark.parametrize(("theirs", "settings"), CASES.values(), ids=CASES)


def decayed(theirs, settings, decay):
    """Return the settings with a weight decay if the optimiser supports it."""
    return settings if theirs is torch.optim.Rprop else settings | {"weight_decay": decay}


def network(proportions=PROPORTIONS):
    """Return a model with partitioned weights, rows of norms, and a weight in which partition 3 is empty."""
    layers = nn.Conv2d(2, 5, 3), nn.GroupNorm(1, 5), nn.ReLU(), nn.Flatten(), nn.Linear(45, 2), nn.Linear(2, 2)
    return partnets.partition(nn.Sequential(*layers), proportions, seed=1)


def gradients(model, step):
    """Set dense random gradients, because an optimiser must not rely on zeros in other partitions."""
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator)


def stored(model):
    """Return the tensors that have what all partitions own: weights, and the rows of vectors."""
    buffers = dict(model.named_buffers())
    return [buffers.get(f"{name}_rows", parameter) for name, parameter in model.named_parameters()]


def entries(model, tensors, k):
    """Return what partition k owns of tensors like `stored`."""
    maps = partnets.partitions(model)
    masks = [maps[name].ids() == k if name in maps else k - 1 for name, _ in model.named_parameters()]
    return [tensor.detach()[mask] for tensor, mask in zip(tensors, masks, strict=True)]


def run(model, optimizer, steps):
    for step in steps:
        gradients(model, step)
        optimizer.step(SCHEDULE[step])


def state_of(optimizer, k):
    """Return all values in the state of partition k."""
    states = [state.get(k, {}) for state in optimizer.state.values()]
    return [torch.as_tensor(value).clone() for state in states for value in state.values()]


def same(first, second):
    return len(first) == len(second) and all(map(torch.equal, first, second))


@pytest.mark.cases(usual=7)
@every_case
def test_each_partition_moves_as_torchs_optimiser_would_move_it_alone(theirs, settings):
    model = network()
    alone = [[part.clone() for part in entries(model, stored(model), k)] for k in (1, 2, 3)]
    references = [theirs(part, **decayed(theirs, settings, decay)) for part, decay in zip(alone, DECAYS, strict=True)]
    optimizer = optim.PerPartition(theirs, model, **decayed(theirs, settings, DECAYS))
    for step, k in enumerate(SCHEDULE):
        gradients(model, step)
        grads = entries(model, [p.grad if p.dim() > 1 else p.grad.expand(3, -1) for p in model.parameters()], k)
        for part, grad in zip(alone[k - 1], grads, strict=True):
            part.grad = grad
        optimizer.step(update=k)
        references[k - 1].step()
    for k in (1, 2, 3):
        assert same(entries(model, stored(model), k), alone[k - 1])


@pytest.mark.cases(usual=4)
@every_case
def test_with_one_partition_it_is_torchs_optimiser_to_the_bit(theirs, settings):
    model = network((1.0,)).to(memory_format=torch.channels_last)
    twin = copy.deepcopy(model)
    settings = decayed(theirs, settings, 0.1)
    optimizer, reference = optim.PerPartition(theirs, model, **settings), theirs(twin.parameters(), **settings)
    for step in range(8):
        gradients(model, step)
        gradients(twin, step)
        optimizer.step(update=1)
        reference.step()
    assert same(list(model.parameters()), list(twin.parameters()))


@pytest.mark.cases(usual=4)
@every_case
def test_a_step_leaves_every_bit_of_the_other_partitions(theirs, settings):
    model = network()
    optimizer = optim.PerPartition(theirs, model, **decayed(theirs, settings, DECAYS))
    run(model, optimizer, range(8))

    def everything(k):
        return [t.clone() for t in entries(model, stored(model), k)] + state_of(optimizer, k)

    before = [everything(k) for k in (1, 2, 3)]
    gradients(model, 9)
    optimizer.step(2)
    after = [everything(k) for k in (1, 2, 3)]
    assert same(before[0] + before[2], after[0] + after[2]) and not same(before[1], after[1])


@pytest.mark.cases(usual=4)
@every_case
def test_its_state_has_as_many_numbers_as_torchs_and_a_step_count_for_each_partition(theirs, settings):
    model = network()
    optimizer = optim.PerPartition(theirs, model, **settings)
    run(model, optimizer, range(len(SCHEDULE)))
    torchs = theirs([torch.zeros(1)], **settings)
    torchs.param_groups[0]["params"][0].grad = torch.ones(1)
    torchs.step()
    (names,) = torchs.state.values() or [{}]
    moments = [name for name, value in names.items() if value.dim() > 0]
    for parameter, owned in zip(model.parameters(), stored(model), strict=True):
        states = [optimizer.state[parameter][k] for k in (1, 2, 3)]
        assert all(state.keys() == names.keys() for state in states)
        assert all(sum(state[name].numel() for state in states) == owned.numel() for name in moments)
        if "step" in names:
            assert [int(state["step"]) for state in states] == [SCHEDULE.count(k) for k in (1, 2, 3)]


def resumed_through_a_file(theirs, model, optimizer, **settings):
    """Save the state to a file, and load it into a new optimiser of a copy of the model."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    twin = copy.deepcopy(model)
    resumed = optim.PerPartition(theirs, twin, **settings)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    return twin, resumed


@pytest.mark.cases(usual=3, full=15)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@every_case
def test_it_resumes_from_its_state_dict_with_the_same_bits(theirs, settings, dtype):
    model = network().to(dtype)
    optimizer = optim.PerPartition(theirs, model, **decayed(theirs, settings, DECAYS))
    run(model, optimizer, range(7))
    twin, resumed = resumed_through_a_file(theirs, model, optimizer, lr=1.0)
    for one, other in ((model, optimizer), (twin, resumed)):
        run(one, other, range(7, len(SCHEDULE)))
    assert same(list(model.parameters()), list(twin.parameters()))


@pytest.mark.full
def test_its_state_goes_from_one_backend_to_another():
    model = network()
    optimizer = optim.PerPartition(torch.optim.NAdam, model)
    run(model, optimizer, range(7))
    twin, resumed = resumed_through_a_file(torch.optim.NAdam, model, optimizer)
    with partkernels.use_backend("reference"):
        run(twin, resumed, range(7, len(SCHEDULE)))
    run(model, optimizer, range(7, len(SCHEDULE)))
    assert same(list(model.parameters()), list(twin.parameters()))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_steps_a_copied_model(duplicate):
    model = network()
    optimizer = optim.PerPartition(torch.optim.RMSprop, model, weight_decay=DECAYS)
    run(model, optimizer, range(4))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    twin, other = duplicate((model, optimizer))
    run(twin, other, range(4, 8))
    assert same(before, list(model.parameters()))
    run(model, optimizer, range(4, 8))
    assert same(list(twin.parameters()), list(model.parameters()))


def refused(change):
    """Return the error of loading a changed state, after checking that the optimiser is unchanged."""
    model = network()
    one = optim.PerPartition(torch.optim.RMSprop, model)
    run(model, one, range(7))
    saved = copy.deepcopy(one.state_dict())
    other = optim.PerPartition(torch.optim.RMSprop, copy.deepcopy(model))
    before = copy.deepcopy(other.state_dict())
    change(saved)
    with pytest.raises(ValueError, match="load the state of such an optimiser of the same model") as raised:
        other.load_state_dict(saved)
    assert str(other.state_dict()) == str(before)
    return str(raised.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda saved: saved.pop("state"), "has ['param_groups'] instead of state and param_groups"),
        (lambda saved: saved["param_groups"][0]["params"].pop(), "has 7 parameters and this one 8"),
        (lambda saved: saved["param_groups"][0].pop("alpha"), "has no alpha, and this one is a PerPartition(RMSprop)"),
        (lambda saved: saved["param_groups"][0].update(weight_decay=0.0), "weight_decay=0.0"),
        (lambda saved: saved["state"].update({8: {}}), "states of [0, 1, 2, 3, 4, 5, 6, 7, 8], but the parameters"),
        (lambda saved: saved["state"][0][1].pop("step"), "instead of {1: {'step': (), 'square_avg': (54,)}, 2:"),
        (lambda saved: saved["state"][0][1].update(square_avg=torch.zeros(53)), "'square_avg': (53,)"),
        (lambda saved: saved["state"][1][2].update(square_avg=torch.zeros(())), "'square_avg': ()"),
        (lambda saved: saved["state"][0].update({4: saved["state"][0][1]}), "4: {'step': (), 'square_avg': (54,)}"),
        (lambda saved: saved["state"][0].update({2: torch.zeros(54)}), "2: (54,)"),
        (lambda saved: saved["param_groups"][0].update(centered=True), "instead of {1: {'step': (), 'square_avg': (54"),
    ],
    ids=range(11),
)
def test_a_truncated_or_changed_state_raises_and_changes_nothing(change, message):
    assert message in refused(change)


def test_the_state_of_another_optimiser_raises_and_changes_nothing():
    model = network()
    optimizer = optim.PerPartition(torch.optim.RMSprop, model)
    others = [
        optim.Adam(model),
        optim.PerPartition(torch.optim.Adagrad, model),
        optim.PerPartition(torch.optim.RMSprop, network((0.5, 0.5))),
        torch.optim.RMSprop(model.parameters()),
    ]
    for other in others:
        with pytest.raises(ValueError, match="such an optimiser of the same model"):
            optimizer.load_state_dict(other.state_dict())
    assert not optimizer.state


class OfTheWholeTensor(torch.optim.Optimizer):
    """An optimiser with steps scaled by the parameter's norm, as in LARS."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * parameter.norm() / parameter.grad.norm() * parameter.grad


class ClipsTheNorm(OfTheWholeTensor):
    """An optimiser that clips the norm: entries interact only if the gradient is large."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * parameter.grad * (30 / parameter.grad.norm()).clamp(max=1)


class CountsInItsGroup(OfTheWholeTensor):
    """An optimiser with a step count in its group, which the partitions would share."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for parameter in group["params"]:
                parameter -= group["lr"] / group["steps"] * parameter.grad


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
    ],
)
@pytest.mark.parametrize("lr", [1e-3, 1e-30])
def test_an_optimiser_in_which_entries_act_on_one_another_is_refused(theirs, reason, lr):
    with pytest.raises(ValueError, match=f"^{theirs.__name__} {reason}.*; pass one that steps each entry by itself"):
        optim.PerPartition(theirs, network(), lr=lr)


class Signs(torch.optim.Optimizer):
    """Lion (Chen et al. 2023) with a step count that is a Python int."""

    def __init__(self, params, lr=0.1, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["steps"] = state.get("steps", 0) + 1
                average = state.setdefault("average", torch.zeros_like(parameter))
                average.lerp_(parameter.grad, 1 - group["beta"])
                parameter -= group["lr"] * average.sign()


def test_an_optimiser_that_torch_does_not_have_is_taken_if_it_steps_each_entry_by_itself():
    model = network()
    optimizer = optim.PerPartition(Signs, model, beta=0.5)
    run(model, optimizer, range(7))
    twin, resumed = resumed_through_a_file(Signs, model, optimizer)
    for one, other in ((model, optimizer), (twin, resumed)):
        run(one, other, range(7, len(SCHEDULE)))
    assert same(list(model.parameters()), list(twin.parameters()))
    assert {k: state["steps"] for k, state in resumed.state[twin[0].weight].items()} == {1: 8, 2: 3, 3: 3}


@pytest.mark.parametrize("given", ["RMSprop", torch.optim.lr_scheduler.StepLR, optim.Adam])
def test_what_is_no_optimiser_of_torch_raises(given):
    with pytest.raises(TypeError, match=r"^PerPartition got .*; pass a class of torch\.optim"):
        optim.PerPartition(given, network())


@pytest.mark.parametrize(
    ("theirs", "settings", "error", "message"),
    [
        (torch.optim.RMSprop, {"lr": -1.0}, ValueError, "Invalid learning rate"),
        (torch.optim.RMSprop, {"momentum": -1.0}, ValueError, "Invalid momentum"),
        (torch.optim.RMSprop, {"weight_decay": (0.1, 0.1)}, ValueError, "3 of them"),
        (torch.optim.Rprop, {"weight_decay": 0.1}, TypeError, "weight_decay"),
        (torch.optim.RMSprop, {"learning_rate": 0.1}, TypeError, "learning_rate"),
        (torch.optim.RMSprop, {"groups": [{"params": [], "beta": 0.1}]}, ValueError, "a group has beta"),
    ],
)
def test_wrong_settings_raise(theirs, settings, error, message):
    with pytest.raises(error, match=message):
        optim.PerPartition(theirs, network(), **settings)


def test_wrong_settings_of_a_group_raise():
    model = network()
    for wrong, message in (({"lr": -1.0}, "lr=-1.0"), ({"momentum": -1.0}, "Invalid momentum")):
        with pytest.raises(ValueError, match=message):
            optim.PerPartition(torch.optim.RMSprop, model, groups=[{"params": [model[0].weight]} | wrong])


@pytest.mark.cases(usual=4)
@every_case
def test_groups_have_settings_of_their_own_as_torchs_have(theirs, settings):
    model = network((1.0,))
    twin = copy.deepcopy(model)
    own = decayed(theirs, {"lr": 0.003}, 0.2)
    optimizer = optim.PerPartition(theirs, model, **settings, groups=[{"params": model[4].parameters(), **own}])
    rest = [parameter for i in (0, 1, 5) for parameter in twin[i].parameters()]
    reference = theirs([{"params": twin[4].parameters(), **own}, {"params": rest}], **settings)
    for step in range(5):
        gradients(model, step)
        gradients(twin, step)
        optimizer.step(update=1)
        reference.step()
    assert same(list(model.parameters()), list(twin.parameters()))


def test_trying_an_optimiser_out_draws_nothing_from_torchs_generator():
    model = network()
    before = torch.get_rng_state()
    optim.PerPartition(torch.optim.RMSprop, model)
    assert torch.equal(before, torch.get_rng_state())


def test_whole_networks_are_partitions_too():
    torch.manual_seed(0)
    model = partnets.Ensemble([nn.Linear(3, 2), nn.Linear(3, 2)])
    before = copy.deepcopy(model.state_dict())
    optimizer = optim.PerPartition(torch.optim.RMSprop, model)
    gradients(model, 0)
    optimizer.step(2)
    moved = [not torch.equal(value, before[name]) for name, value in model.state_dict().items()]
    assert moved == [False, False, True, True]


def parts():
    """Return a trainer of a model with ψ, with an optimiser that has a schedule."""
    torch.manual_seed(0)
    x = torch.randn(50, 4)
    mask = hyper.InputMask(4, temperature=0.5)
    model = partnets.partition(nn.Sequential(mask, nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)), PROPORTIONS)
    optimizer = optim.PerPartition(torch.optim.RMSprop, model, lr=0.01, momentum=0.9)
    chunks = partnets.chunk((x, (x[:, 0] > 0).long()), PROPORTIONS)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 30)
    return partnets.Trainer(model, chunks, hyper=mask, optimizer=optimizer, scheduler=scheduler, batch_size=16)


@pytest.mark.full
def test_a_trainer_resumes_with_its_bits(tmp_path):
    whole, first, second = parts(), parts(), parts()
    torch.manual_seed(5)
    whole.fit(20)
    torch.manual_seed(5)
    first.fit(8)
    first.save(tmp_path / "checkpoint.pt")
    second.load(tmp_path / "checkpoint.pt")
    second.fit(12)
    assert same(list(whole.model.parameters()), list(second.model.parameters()))
    assert all(same(state_of(whole.optimizer, k), state_of(second.optimizer, k)) for k in (1, 2, 3))


def test_a_checkpoint_of_another_optimiser_raises(tmp_path):
    one, other = parts(), parts()
    one.save(tmp_path / "checkpoint.pt")
    other.optimizer = optim.PerPartition(torch.optim.Adagrad, other.model)
    with pytest.raises(ValueError, match=r"optimizer 'PerPartition\(RMSprop\)'.*'PerPartition\(Adagrad\)'"):
        other.load(tmp_path / "checkpoint.pt")


class Late(torch.optim.SGD):
    """An optimiser that adds to its state in the second step."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["steps"] = state.get("steps", 0) + 1
                if state["steps"] > 1:
                    state["slow"] = parameter.clone()


def test_a_state_that_grows_is_refused_by_distributed_checkpoints():
    model = partnets.Linear(4, 3, proportions=(0.5, 0.5))
    optimizer = optim.PerPartition(Late, model, lr=0.1)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step(update=1)
    with pytest.raises(ValueError, match=r"Late keeps steps, slow of partition 1.* Save it by Trainer\.save"):
        distributed.OptimizerState(model, optimizer).state_dict()
