"""Modules of any class: their code reads the parameters of the active subnetwork, however it reads them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from layers import assert_learns, dense, owned
from small_network import CASES, PROPORTIONS, perturbed
from torch import nn

import partnets


class Embedded(nn.Module):
    """A module with token and position parameters besides layers, as in a vision transformer."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.position = nn.Parameter(torch.randn(1, 6, 4))
        self.gain = nn.Parameter(torch.ones(()))
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
        return self.layer(x) * self.gain


class Biased(nn.Module):
    """A module with a table that is cached in evaluation, as in attention with relative positions."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, 4))
        self.layer = nn.Linear(4, 4)
        self.bias_cache = {}

    def reset_parameters(self):
        nn.init.constant_(self.table, 2.0)

    def forward(self, x):
        return self.layer(x) + self.table * 2


class Reader(nn.Module):
    """A module that reads weights of its children, and only the dtype of another, as some attention does."""

    def __init__(self):
        super().__init__()
        self.read, self.asked, self.nested = nn.Linear(4, 4), nn.Linear(4, 4), nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x):
        x = self.asked(x.to(self.asked.weight.dtype))
        return F.linear(x, self.read.weight @ self.nested[0].weight, self.read.bias)


class ReadTable(nn.Module):
    """A model with tied head and embedding that also reads the embedding's table."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x):
        ids = x.sum(-1).long() % 6
        return self.head(self.table(ids)) + F.linear(self.table(ids), self.table.weight)


class Low(nn.Module):
    """A module with several weights, one of them frozen."""

    def __init__(self):
        super().__init__()
        self.base = nn.Parameter(torch.randn(4, 4), requires_grad=False)
        self.down, self.up = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(2, 4))

    def forward(self, x):
        return x @ self.base + x @ self.down @ self.up


MODULES = [Embedded, Biased, Reader, ReadTable, Low]
each = pytest.mark.parametrize("make", MODULES, ids=lambda make: make.__name__)


def partitioned(make, **options):
    torch.manual_seed(0)
    return perturbed(partnets.partition(make().double(), PROPORTIONS, **{"defaults": "seed"} | options), 1.0)


def inputs(make):
    rows = 5 if make is Embedded else 6
    return torch.randn(2, rows, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.cases(usual=20)
@each
@pytest.mark.parametrize(("active", "update"), CASES)
def test_a_subnetwork_is_the_module_with_its_parameters(make, active, update):
    model, x = partitioned(make), inputs(make)
    twin = dense(model, active)
    with partnets.subnetwork(model, active, update):
        output = model(x)
        if output.requires_grad:
            output.square().sum().backward()
    expected = twin(x)
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)
    expected.square().sum().backward()
    assert_learns(model, twin, active, update)


@each
def test_a_step_changes_only_entries_of_its_partition(make):
    model, x = partitioned(make), inputs(make)
    before = {k: owned(model, k) for k in (1, 2, 3)}
    optimizer = partnets.optim.SGD(model, lr=0.1)
    with partnets.subnetwork(model, 2, 2):
        model(x).square().sum().backward()
    optimizer.step(update=2)
    unused = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    for k, values in before.items():
        same = {name for name, value in owned(model, k).items() if torch.equal(value, values[name])}
        assert same == (unused & values.keys() if k == 2 else values.keys())


def test_weights_of_any_module_start_as_they_are_and_so_do_their_defaults():
    torch.manual_seed(0)
    before = Biased().double().table.detach()
    model = partitioned(Biased)
    mask = partnets.partitions(model)["table"].mask(1)
    with partnets.subnetwork(model, 1):
        assert torch.equal(model.table[~mask], before[~mask]) and not torch.equal(model.table, before)


@pytest.mark.filterwarnings("ignore:the running statistics of 1 BatchNorm")  # which are not estimated
@pytest.mark.parametrize("stateful", [False, True])
def test_layers_without_a_rule_and_with_broadcast_parameters_are_partitioned(stateful):
    torch.manual_seed(0)
    norm = nn.InstanceNorm2d(4, affine=True, track_running_stats=stateful)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.PReLU(4), norm).double()
    model = perturbed(partnets.partition(model, PROPORTIONS), 0.5)
    x = torch.randn(2, 1, 6, 6, dtype=torch.float64)
    for active in (1, 2, 3):
        with partnets.subnetwork(model, active, active):
            model(x + active)
    for active in (1, 2, 3):
        expected = dense(model.eval(), active)(x)
        with partnets.subnetwork(model, active):
            torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)


def test_a_parameter_that_was_replaced_is_taken_over_if_it_fits():
    model = partnets.partition(nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)), PROPORTIONS).double()
    model[0].weight = nn.Parameter(torch.randn(3, 4, dtype=torch.float64))
    x = torch.randn(2, 4, dtype=torch.float64)
    for k in (1, 2, 3):
        expected = dense(model, k)(x)
        with partnets.subnetwork(model, k, k):
            torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)
            model(x).sum().backward()
        mask = partnets.partitions(model)["0.weight"].mask(k)
        assert not model[0].weight.grad[~mask].any()
        model.zero_grad()
    model[0].bias = nn.Parameter(torch.ones(3, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="bias of Linear was written into"), partnets.subnetwork(model, 1):
        pass


def test_in_place_writes_to_summed_parameters_are_refused():
    """Check `with torch.no_grad(): model.logit_scale.clamp_(0, 4.6)`, as in CLIP's training."""
    model = partnets.partition(Embedded(), PROPORTIONS)
    before = copy.deepcopy(model.state_dict())
    for write in (lambda: model.gain.clamp_(max=0.5), lambda: nn.init.zeros_(model.position)):
        with torch.no_grad():
            write()
        told = pytest.raises(RuntimeError, match=r"the (gain|position) of Embedded was written into, but is the sum")
        with told, partnets.subnetwork(model, active=1):
            pass
        model.load_state_dict(before)
    model = partnets.partition(Embedded(), PROPORTIONS)
    with torch.no_grad():
        model.gain_rows[2] = 0.5
    for k, gain in ((1, 1.0), (2, 1.0), (3, 1.5)):
        with partnets.subnetwork(model, k):
            assert model.gain.item() == gain
    assert model.gain.item() == 1.5
