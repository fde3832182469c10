"""step_weights and step_hyper: their changes, the order of these, and arguments that they reject unchanged."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import partnets
from partnets import hyper, optim
from partnets.subnetworks.state import partitioned_modules, state_of

PROPORTIONS = (0.6, 0.2, 0.2)


class Hybrid(nn.Module):
    """A model with a skipped stem, followed by a broadcast parameter of the model."""

    def __init__(self):
        super().__init__()
        self.mask = hyper.InputMask(6)
        self.stem = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(8))
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.norm(self.stem(self.mask(x)) * self.scale))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return partnets.partition(Hybrid(), PROPORTIONS, skip=["stem"]).train()


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(16, 6, generator=generator), torch.randint(2, (16,), generator=generator)


def loss_of(model):
    return lambda batch: F.cross_entropy(model(batch[0]), batch[1])


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items() if torch.is_tensor(value)}


def changed(before, model):
    return {name for name, value in state(model).items() if not torch.equal(value, before[name])}


def test_a_step_of_the_weights_changes_one_partition_and_its_own_statistics(model, batch):
    before = state(model)
    value = partnets.step_weights(model, partnets.optim.Adam(model), 2, batch, loss_of(model))
    names = changed(before, model)
    mask = partnets.partitions(model)["head.weight"].mask(2)
    assert not value.requires_grad and model.stem[1].training
    assert not [name for name in names if name.startswith(("stem", "mask"))]
    assert {"scale", "head.weight", "head.bias"} <= names and "norm.running_mean" not in names
    assert torch.equal(model.head.weight != before["head.weight"], mask)
    for name in ("norm.running_mean_rows", "norm.weight_rows", "head.bias_rows", "scale_rows"):
        rows = (state(model)[name] != before[name]).flatten(1).any(1)
        assert rows.tolist() == [False, True, False]


def test_a_step_of_psi_changes_only_psi(model, batch):
    before = state(model)
    optimizer = torch.optim.Adam(model.mask.parameters(), lr=0.1)
    partnets.step_hyper(model, optimizer, {2: batch, 3: batch}, loss_of(model), weights={2: 0.5, 3: 0.5})
    assert changed(before, model) == {"mask.probability.raw", "norm.statistics_estimated"}
    assert all(parameter.grad is None for name, parameter in model.named_parameters() if "mask" not in name)


def test_the_gradient_is_clipped_and_starts_from_zero(model, batch):
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan) if parameter.requires_grad else None
    optimizer = partnets.optim.SGD(model, lr=1.0)
    before = state(model)
    partnets.step_weights(model, optimizer, 1, batch, loss_of(model), clip=0.1)
    moved = torch.cat([(p.detach() - before[n]).flatten() for n, p in model.named_parameters() if "mask" not in n])
    assert moved.isfinite().all() and moved.norm() <= 0.1 + 1e-6


@pytest.mark.parametrize("own", [True, False], ids=["the scaler's step", "a backward that unscales"])
def test_gradients_that_are_unscaled_first_are_clipped_as_without_a_scaler(model, batch, own):
    expected = copy.deepcopy(model)
    torch.manual_seed(2)
    partnets.step_weights(expected, partnets.optim.SGD(expected, lr=1.0), 1, batch, loss_of(expected), clip=0.1)
    torch.manual_seed(2)
    optimizer, scaler = partnets.optim.SGD(model, lr=1.0), torch.amp.GradScaler("cpu", init_scale=1024.0)

    def backward(loss):
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)

    if own:
        optimizer.zero_grad()
        with partnets.weights_learning(model, 1):
            backward(loss_of(model)(batch))
        nn.utils.clip_grad_norm_(optimizer.parameters(), 0.1)
        scaler.step(optimizer, update=1)
    else:
        partnets.step_weights(model, optimizer, 1, batch, loss_of(model), clip=0.1, backward=backward)
    for a, b in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(a, b)


def test_an_error_in_the_loss_leaves_the_model_as_it_was(model, batch):
    def fails(batch):
        raise KeyboardInterrupt

    modes = [module.training for module in model.modules()]
    states = [state_of(module) for module in partitioned_modules(model)]
    for step in (
        lambda: partnets.step_weights(model, partnets.optim.SGD(model), 1, batch, fails),
        lambda: partnets.step_hyper(model, torch.optim.SGD(model.mask.parameters(), lr=1.0), {2: batch}, fails),
    ):
        with pytest.raises(KeyboardInterrupt):
            step()
        assert [module.training for module in model.modules()] == modes
        assert all((one.active, one.update, one.entry.thread) == (3, 3, None) for one in states)
        assert all(parameter.requires_grad for parameter in model.mask.parameters())


def psi(model):
    return torch.optim.Adam(model.mask.parameters())


weights, hypers, w = partnets.step_weights, partnets.step_hyper, partnets.optim.Adam


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda m, b: weights(m, torch.optim.Adam(m.parameters()), 1, b, None),
            "a Adam, which steps all",
        ),
        (
            lambda m, b: weights(m, w(m), 4, b, None),
            r"k=4, of a model with C=3; .* 1\.\.3",
        ),
        (lambda m, b: weights(m, w(m), b, 1, None), "k=a tuple, of a model"),
        (
            lambda m, b: hypers(m, psi(m), {1: b}, None),
            r"k=1, .* in 2\.\.3",
        ),
        (
            lambda m, b: hypers(m, psi(m), b, None),
            "batches is a tuple; pass",
        ),
        (lambda m, b: hypers(m, psi(m), {None: None}, None), "k=None"),
        (lambda m, b: hypers(m, w(m), {2: b}, None), "a Adam of partitions"),
        (
            lambda m, b: hypers(m, psi(m), {2: b}, None, weights={3: 1.0}),
            r"weights are of the chunks \[3\], but batches of \[2\]",
        ),
    ],
)
def test_a_wrong_argument_is_named_before_anything_changes(model, batch, call, message):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ValueError, match=message):
        call(model, batch)
    assert all((parameter.grad == 1).all() for parameter in model.parameters())


def test_a_wrapped_optimiser_is_refused(model, batch):
    accelerate = pytest.importorskip("accelerate")
    wrapped = accelerate.Accelerator(cpu=True).prepare(w(model))
    message = r"optimizer is a AcceleratedOptimizer around a Adam, .* pass optimizer\.optimizer"
    with pytest.raises(ValueError, match=message):
        weights(model, wrapped, 1, batch, loss_of(model))
    weights(model, wrapped.optimizer, 1, batch, loss_of(model))


def test_a_layer_that_was_replaced_since_the_optimiser_was_made_is_named():
    model = partnets.partition(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), (0.5, 0.5))
    optimizer = partnets.optim.SGD(model, lr=0.1)
    model[1] = partnets.partition(nn.Linear(4, 3), (0.5, 0.5))
    with pytest.raises(RuntimeError, match=r"1\.weight, 1\.bias would never learn: the optimiser was constructed"):
        partnets.step_weights(model, optimizer, 1, torch.ones(2, 4), lambda x: model(x).square().mean())


@pytest.mark.parametrize("ahead", [False, True])
def test_psi_that_evaluation_mode_ignores_raises(ahead):
    model = partnets.partition(nn.Sequential(hyper.ConcreteDropout(0.3), nn.Linear(4, 2)), (0.5, 0.5)).eval()
    step_of_psi = torch.optim.SGD(model[0].parameters(), lr=0.1)
    batch = torch.randn(6, 4), torch.randint(2, (6,))

    def loss(batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    with pytest.raises(RuntimeError, match=r"0\.rate\.raw no gradient, .* in evaluation mode; call model\.train\(\)"):
        if ahead:
            partnets.step_lookahead(
                model, optim.SGD(model), step_of_psi, {2: (batch, [batch])}, loss, loss, by="lookahead"
            )
        else:
            partnets.step_hyper(model, step_of_psi, {2: batch}, loss)
