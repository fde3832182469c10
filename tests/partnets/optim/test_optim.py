"""Each partition is optimised like a separate tensor that is stepped only when the partition is drawn."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import partnets
from partbench import models
from partnets import hyper, optim

PROPORTIONS = (0.8, 0.1, 0.1)
DECAYS = (0.1, 0.02, 0.003)
SCHEDULE = (1, 1, 2, 1, 3, 3, 2, 1, 1, 2, 3, 1)
CASES = [
    (optim.SGD, torch.optim.SGD, {"lr": 0.1}),
    (optim.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (optim.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (optim.Adam, torch.optim.Adam, {"lr": 0.01}),
    (optim.Adam, torch.optim.Adam, {"lr": 0.01, "betas": (0.5, 0.8), "eps": 1e-3}),
    (optim.AdamW, torch.optim.AdamW, {"lr": 0.01}),
]
OURS = [(ours, arguments) for ours, _, arguments in CASES]


def network(proportions=PROPORTIONS):
    model = nn.Sequential(nn.Conv2d(2, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 9, 3)).double()
    return partnets.partition(model, proportions, seed=1)


def gradients(model, step):
    """Set dense random gradients, because an optimiser must not rely on zeros in other partitions."""
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator)


def stored(model):
    """Return the tensors that have what all partitions own: weights, and the rows of biases."""
    return [tensor for layer in (model[0], model[3]) for tensor in (layer.weight, layer.bias_rows)]


def entries(model, tensors, k):
    """Return what partition k owns of tensors like `stored`."""
    maps = partnets.partitions(model)
    masks = [mask for path in ("0", "3") for mask in (maps[f"{path}.weight"].ids() == k, k - 1)]
    return [tensor.detach()[mask] for tensor, mask in zip(tensors, masks, strict=True)]


def grads(model, k):
    """Return the gradients of what partition k owns; those of biases are set for the partition that is stepped."""
    expanded = [p.grad if p.dim() > 1 else p.grad.expand(3, -1) for p in model.parameters()]
    return entries(model, expanded, k)


@pytest.mark.parametrize(("ours", "theirs", "arguments"), CASES)
@pytest.mark.parametrize("decays", [(0.0,) * 3, DECAYS], ids=["no decay", "decay"])
def test_each_partition_moves_as_torchs_optimiser_would_move_it_alone(ours, theirs, arguments, decays):
    model = network()
    alone = [[p.clone().requires_grad_() for p in entries(model, stored(model), k)] for k in (1, 2, 3)]
    references = [theirs(part, weight_decay=decay, **arguments) for part, decay in zip(alone, decays, strict=True)]
    optimizer = ours(model, weight_decay=decays, **arguments)
    for step, k in enumerate(SCHEDULE):
        gradients(model, step)
        for parameter, grad in zip(alone[k - 1], grads(model, k), strict=True):
            parameter.grad = grad
        optimizer.step(update=k)
        references[k - 1].step()
    for k in (1, 2, 3):
        for a, b in zip(entries(model, stored(model), k), alone[k - 1], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-14)
    for layer in (model[0], model[3]):
        torch.testing.assert_close(layer.bias, layer.bias_rows.sum(0), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize(("ours", "theirs", "arguments"), CASES)
def test_with_one_partition_it_is_torchs_optimiser(ours, theirs, arguments):
    model = network((1.0,))
    twin = copy.deepcopy(model)
    optimizer, reference = (
        ours(model, weight_decay=0.1, **arguments),
        theirs(twin.parameters(), weight_decay=0.1, **arguments),
    )
    for step in range(5):
        gradients(model, step)
        gradients(twin, step)
        optimizer.step(update=1)
        reference.step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize(("ours", "arguments"), OURS)
def test_a_step_leaves_every_bit_of_the_other_partitions(ours, arguments):
    model = network()
    optimizer = ours(model, weight_decay=DECAYS, **arguments)
    for step, k in enumerate((1, 2, 3)):
        gradients(model, step)
        optimizer.step(k)

    def tensors(k):
        lists = [stored(model)]
        if "step" in optimizer.state[model[0].weight]:
            assert all(state["step"].tolist() == [1, 1, 1 + stepped] for state in optimizer.state.values())
        names = [name for name in optimizer.state[model[0].weight] if name != "step"]
        lists += [[optimizer.state[p][name] for p in model.parameters()] for name in names]
        return [part.clone() for tensors in lists for part in entries(model, tensors, k)]

    stepped = 0
    before = [tensors(k) for k in (1, 2, 3)]
    gradients(model, 9)
    optimizer.step(3)
    stepped = 1
    after = [tensors(k) for k in (1, 2, 3)]
    assert all(map(torch.equal, before[0] + before[1], after[0] + after[1]))
    assert not any(map(torch.equal, before[2], after[2]))


@pytest.mark.parametrize(("ours", "arguments"), OURS)
def test_parameters_without_a_gradient_stay(ours, arguments):
    model = network()
    before = copy.deepcopy(model.state_dict())
    optimizer = ours(model, **arguments)
    model[3].bias.grad = torch.ones_like(model[3].bias)
    optimizer.step(2)
    assert not torch.equal(model[3].bias, before["3.bias"])
    assert torch.equal(model[0].weight, before["0.weight"]) and len(optimizer.state[model[0].weight]) == 0


@pytest.mark.parametrize(("ours", "arguments"), OURS)
def test_it_resumes_from_its_state_dict_with_the_same_bits(ours, arguments):
    def run(model, optimizer, steps):
        for step in steps:
            gradients(model, step)
            optimizer.step(SCHEDULE[step])

    model = network()
    optimizer = ours(model, weight_decay=DECAYS, **arguments)
    run(model, optimizer, range(6))
    twin = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed = ours(twin, lr=1.0)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    run(model, optimizer, range(6, 12))
    run(twin, resumed, range(6, 12))
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        (lambda optimizer: lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5), [1.0, 0.5, 0.25, 0.125]),
        # (1 + cos(pi t / 4)) / 2
        (lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=4), [1.0, 0.8535534, 0.5, 0.1464466]),
    ],
    ids=["step", "cosine"],
)
def test_torchs_schedulers_work(schedule, rates):
    model = network()
    optimizer = optim.SGD(model, lr=1.0, groups=[{"params": model[0].parameters(), "lr": 0.1}])
    scheduler = schedule(optimizer)
    for step, (k, rate) in enumerate(zip((1, 2, 2, 3), rates, strict=True)):
        gradients(model, step)
        before = [layer.bias_rows.clone() for layer in (model[0], model[3])]
        optimizer.step(update=k)
        for layer, old, scale in zip((model[0], model[3]), before, (0.1, 1.0), strict=True):
            torch.testing.assert_close(old[k - 1] - layer.bias_rows[k - 1], scale * rate * layer.bias.grad)
        scheduler.step()


@pytest.mark.parametrize(("ours", "theirs", "arguments"), CASES)
def test_groups_have_settings_of_their_own_as_torchs_have(ours, theirs, arguments):
    model = network((1.0,))
    twin = copy.deepcopy(model)
    own = {"lr": 0.003, "weight_decay": 0.2}
    optimizer = ours(model, weight_decay=0.1, **arguments, groups=[{"params": model[3].parameters(), **own}])
    groups = [{"params": twin[3].parameters(), **own}, {"params": twin[0].parameters()}]
    reference = theirs(groups, weight_decay=0.1, **arguments)
    for step in range(5):
        gradients(model, step)
        gradients(twin, step)
        optimizer.step(update=1)
        reference.step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-14)


def test_fixups_scalars_learn_at_a_tenth_of_the_rate():
    model = partnets.partition(models.FixupResNet(8), PROPORTIONS)
    scalars = [
        p for m in model.modules() if isinstance(m, partnets.nn.Bias | partnets.nn.Scale) for p in m.parameters()
    ]
    optimizer = optim.SGD(model, lr=0.1, groups=[{"params": scalars, "lr": 0.01}])
    assert len(scalars) == 5 * 3 + 2 and set(optimizer.parameters()) == set(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = copy.deepcopy(model)
    optimizer.step(update=2)
    for start, moved in (
        (before.bias1.bias_rows, model.bias1.bias_rows),
        (before.stage1[0].scale.scale_rows, model.stage1[0].scale.scale_rows),
    ):
        torch.testing.assert_close((start - moved).flatten(), torch.tensor([0.0, 0.01, 0.0]))
    moved = before.classifier.bias_rows - model.classifier.bias_rows
    torch.testing.assert_close(moved, torch.tensor([0.0, 0.1, 0.0])[:, None].expand(3, 10))


def test_a_state_dict_keeps_groups_and_their_decays():
    model = network()
    groups = [{"params": [model[3].bias], "lr": 0.5, "weight_decay": DECAYS}]
    optimizer = optim.Adam(model, groups=groups)
    loaded = optim.Adam(model, groups=[{"params": [model[3].bias]}])
    loaded.load_state_dict(optimizer.state_dict())
    settings = [(group["lr"], group["weight_decay"], len(group["params"])) for group in loaded.param_groups]
    assert settings == [(0.5, DECAYS, 1), (1e-3, (0.0,) * 3, 3)]
    with pytest.raises(ValueError, match="parameter group"):
        optim.Adam(model).load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"learning_rate": 0.1}, "a group has learning_rate; its settings can be lr, weight_decay, momentum, nesterov"),
        ({"lr": -1.0}, "lr=-1.0"),
        ({"weight_decay": (0.1, 0.1)}, "3 of them"),
        ({"nesterov": True}, "nesterov=True with momentum=0"),
        ({"params": [nn.Parameter(torch.zeros(2))]}, "not a trainable, partitioned one of this model"),
    ],
)
def test_wrong_groups_raise(group, message):
    model = network()
    with pytest.raises(ValueError, match=message):
        optim.SGD(model, groups=[{"params": [model[0].weight]} | group])


def test_a_parameter_in_two_groups_raises():
    model = network()
    with pytest.raises(ValueError, match="more than one parameter group"):
        optim.SGD(model, groups=[{"params": [model[0].weight]}, {"params": model[0].parameters()}])


def test_decays_are_the_priors_precision_over_the_examples_seen():
    assert optim.decays(2.0, [5, 3, 2]) == (2 / 5, 2 / 8, 2 / 10)
    assert optim.decays(6.0, [4, 5, 16, 11], rule="square root") == (6 / 2, 6 / 3, 6 / 5, 6 / 6)
    chunks = partnets.chunk(torch.utils.data.TensorDataset(torch.arange(10)), (0.5, 0.3, 0.2))
    model = network()
    assert optim.SGD(model, weight_decay=optim.decays(2.0, chunks.sizes)).defaults["weight_decay"] == (0.4, 0.25, 0.2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1.0, [5]), "precision=-1.0"),
        ((float("nan"), [5]), "precision=nan"),
        ((1.0, [5, 0]), "at least 1"),
        ((1.0, []), "at least 1"),
        ((1.0, [5], "root"), "'reciprocal' or 'square root'"),
    ],
)
def test_decays_of_wrong_arguments_raise(arguments, message):
    with pytest.raises(ValueError, match=message):
        optim.decays(*arguments)


@pytest.mark.parametrize("update", [0, 4, None, True, 1.0])
def test_a_partition_that_is_not_there_raises(update):
    with pytest.raises(ValueError, match=r"1\.\.3"):
        optim.Adam(network()).step(update)


@pytest.mark.parametrize(
    ("ours", "arguments", "message"),
    [
        (optim.SGD, {"lr": -1.0}, "lr"),
        (optim.SGD, {"lr": float("nan")}, "lr"),
        (optim.SGD, {"momentum": -0.1}, "momentum"),
        (optim.SGD, {"nesterov": True}, "nesterov"),
        (optim.SGD, {"weight_decay": (0.1, 0.1)}, "3 of them"),
        (optim.Adam, {"weight_decay": -0.1}, "weight_decay"),
        (optim.Adam, {"betas": (0.9, 1.0)}, "betas"),
        (optim.Adam, {"eps": -1.0}, "eps"),
    ],
)
def test_wrong_arguments_raise(ours, arguments, message):
    with pytest.raises(ValueError, match=message):
        ours(network(), **arguments)


def test_parameters_that_would_learn_from_every_chunk_raise():
    model = nn.ModuleDict({"norm": nn.LayerNorm(3), "layer": partnets.Linear(3, 2, proportions=PROPORTIONS)})
    with pytest.raises(ValueError, match=r"norm\.weight, norm\.bias would learn"):
        optim.Adam(model)
    model["norm"].requires_grad_(False)
    assert len(optim.Adam(model).parameters()) == 2


def test_hyperparameters_and_frozen_parameters_are_left_out():
    model = nn.Sequential(hyper.InputMask(3), partnets.Linear(3, 2, proportions=PROPORTIONS))
    model[1].bias.requires_grad_(False)
    assert optim.SGD(model).parameters() == [model[1].weight]


def test_the_state_of_another_optimiser_raises():
    model = network(PROPORTIONS)
    momentum = optim.SGD(model, momentum=0.9)
    with pytest.raises(ValueError, match="has no momentum, nesterov, and this one is a SGD"):
        momentum.load_state_dict(optim.Adam(model).state_dict())
    with pytest.raises(ValueError, match=r"has weight_decay=\(0\.0, 0\.0\), and this one is a SGD of 3 partitions"):
        momentum.load_state_dict(optim.SGD(network((0.5, 0.5))).state_dict())


def test_a_copy_steps_a_copied_model():
    model = network(PROPORTIONS)
    other, optimizer = copy.deepcopy((model, optim.Adam(model)))
    gradients(other, 0)
    before = copy.deepcopy(list(model.parameters()))
    optimizer.step(2)
    assert all(map(torch.equal, before, model.parameters()))
    assert not all(map(torch.equal, before, other.parameters()))


def test_a_closure_comes_before_the_step_with_gradients_as_in_torch():
    model, other = network(PROPORTIONS), network(PROPORTIONS)
    other.load_state_dict(model.state_dict())
    x = torch.randn(4, 2, 5, 5, dtype=torch.float64)

    def closure():
        with partnets.subnetwork(model, active=2, update=2):
            loss = model(x).square().sum()
            loss.backward()
        return loss

    returned = optim.SGD(model).step(2, closure)
    with partnets.subnetwork(other, active=2, update=2):
        loss = other(x).square().sum()
        loss.backward()
    optim.SGD(other).step(2)
    assert returned == loss and all(map(torch.equal, model.parameters(), other.parameters()))


def test_decays_that_are_an_array_are_one_for_each_partition():
    model = network(PROPORTIONS)
    optimizer = optim.SGD(model, weight_decay=torch.tensor([0.3, 0.2, 0.1]))
    assert optimizer.param_groups[0]["weight_decay"] == pytest.approx((0.3, 0.2, 0.1))


@pytest.mark.parametrize(("ours", "arguments"), OURS)
def test_a_state_can_be_loaded_more_than_once_and_into_a_copy(ours, arguments):
    model = network()
    optimizer = ours(model, **arguments)
    gradients(model, 0)
    optimizer.step(1)
    state = copy.deepcopy(optimizer.state_dict())
    for other in (optimizer, optimizer, copy.deepcopy(optimizer)):
        other.load_state_dict(state)
        torch.testing.assert_close(other.state_dict(), state, rtol=0, atol=0)


def test_the_state_of_another_model_raises_and_changes_nothing():
    def stepped(proportions):
        model = network(proportions)
        optimizer = optim.Adam(model)
        gradients(model, 0)
        optimizer.step(1)
        return optimizer

    optimizer = stepped(PROPORTIONS)
    before = copy.deepcopy(optimizer.state_dict())
    small = optim.Adam(partnets.Linear(3, 2, proportions=PROPORTIONS))
    for other in (stepped((0.5, 0.5)), small):
        with pytest.raises(ValueError, match="same model"):
            optimizer.load_state_dict(other.state_dict())
    assert all(
        torch.equal(value["exp_avg"], before["state"][i]["exp_avg"])
        for i, value in optimizer.state_dict()["state"].items()
    )


@pytest.mark.parametrize("scheme", ["weight", "nested"])
def test_a_step_compares_the_memory_of_no_two_tensors(scheme, monkeypatch):
    """Check that separate tensors are not compared pairwise for shared memory, which would be slower than the step."""
    monkeypatch.setattr("partkernels.operators.memory.share_memory", lambda *_: pytest.fail("compared"))
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(5, 4)
    partnets.partition(model, (0.5, 0.5), scheme=scheme, **({"example": x} if scheme == "nested" else {}))
    optimizer = partnets.optim.Adam(model)
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
    new = type(optimizer)(model, **{name: optimizer.defaults[name] for name in ("lr",)})
    new.load_state_dict(optimizer.state_dict())
    return new


def loaded_state(model, optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return optimizer


def cleared_state(model, optimizer):
    optimizer.state.clear()
    return optimizer


@pytest.mark.parametrize("change", [moved_tensors, replaced_buffers, loaded_state, cleared_state])
@pytest.mark.parametrize("ours", [optim.SGD, optim.Adam])
def test_a_step_finds_what_has_moved_since_the_last_one(ours, change):
    stepped = []
    for is_remade in (False, True):
        model = network()
        optimizer = ours(model, lr=0.1)
        for step, k in enumerate((1, 2, 1, 3, 2, 1)):
            if step == 3:
                optimizer = change(model, optimizer)
            if is_remade:  # nothing is known of earlier steps
                optimizer.__dict__.pop("_entries", None)
            gradients(model, step)
            optimizer.step(update=k)
        moments = [one for state in optimizer.state.values() for one in state.values()]
        stepped.append([tensor.clone() for tensor in (*stored(model), *moments)])
    assert len(stepped[0]) == len(stepped[1]) and all(map(torch.equal, *stepped))


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
    for others in results[1:]:
        assert all(map(torch.equal, results[0], others))
    model[3].weight.grad = model[3].weight.detach()
    with pytest.raises(ValueError, match="share memory, and a step writes to it"):
        optimizer.step(update=2)
