"""Parameters that a module of any class keeps for itself: b_1 + ... + b_k for whoever reads them."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import partnets
from partnets.nn.broadcast import Broadcast

PROPORTIONS = (0.5, 0.3, 0.2)


class Embedded(nn.Module):
    """As a vision transformer: a token and positions of its own, around layers."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.position = nn.Parameter(torch.randn(1, 6, 4))
        self.gain = nn.Parameter(torch.ones(()))
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
        return self.layer(x) * self.gain


def partitioned():
    torch.manual_seed(0)
    return partnets.partition(Embedded().double(), PROPORTIONS)


def trained(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    return model


def test_the_model_itself_changes_in_place_and_stays_what_it_was():
    model = Embedded()
    before = copy.deepcopy(model)
    assert partnets.partition(model, PROPORTIONS, defaults="zero") is model
    assert isinstance(model, Embedded) and type(model).__name__ == "Embedded" and isinstance(model, Broadcast)
    assert {name: tuple(p.shape) for name, p in model.named_parameters(recurse=False)} == {
        "token": (3, 1, 1, 4), "position": (3, 1, 6, 4), "gain": (3,),
    }  # fmt: skip
    assert torch.equal(model.token, before.token) and model.position.shape == (1, 6, 4)
    x = torch.randn(2, 5, 4)
    torch.testing.assert_close(model(x), before(x))


@pytest.mark.parametrize(("active", "update"), [(1, 1), (2, 1), (2, 2), (3, 3), (3, None)])
def test_a_subnetwork_adds_its_rows_up_and_one_learns(active, update):
    model = trained(partitioned())
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    with partnets.subnetwork(model, active, update):
        output = model(x)
    merged = partnets.merge(model, active)
    assert type(merged) is Embedded
    torch.testing.assert_close(merged(x), output, rtol=1e-12, atol=1e-12)
    merged(x).sum().backward()
    if update is None:
        assert not output.requires_grad
        return
    output.sum().backward()
    for name, rows in model.named_parameters(recurse=False):
        expected = torch.zeros_like(rows)
        expected[update - 1] = merged.get_parameter(name).grad
        torch.testing.assert_close(rows.grad, expected, rtol=1e-10, atol=1e-12)


def test_a_step_changes_one_row():
    model = trained(partitioned())
    before = copy.deepcopy(dict(model.named_parameters(recurse=False)))
    with partnets.subnetwork(model, 2, 2):
        model(torch.randn(2, 5, 4, dtype=torch.float64)).sum().backward()
    partnets.optim.SGD(model, lr=0.1).step(update=2)
    for name, rows in model.named_parameters(recurse=False):
        assert torch.equal(rows[[0, 2]], before[name][[0, 2]]) and not torch.equal(rows[1], before[name][1])


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_compute_the_same_and_share_nothing(duplicate):
    model = trained(partitioned())
    again = duplicate(model)
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    for active in (1, 3):
        with partnets.subnetwork(model, active), partnets.subnetwork(again, active):
            assert torch.equal(model(x), again(x))
    assert not {p.data_ptr() for p in model.parameters()} & {p.data_ptr() for p in again.parameters()}


def test_a_state_dict_restores_every_row():
    model, file = trained(partitioned()), io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    fresh = partitioned()
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))


def test_layers_without_a_rule_whose_parameters_are_broadcast_are_divided():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.PReLU(4), nn.InstanceNorm2d(4, affine=True)).double()
    model = trained(partnets.partition(model, PROPORTIONS))
    x = torch.randn(2, 1, 6, 6, dtype=torch.float64)
    for active in (1, 2, 3):
        with partnets.subnetwork(model, active):
            torch.testing.assert_close(partnets.merge(model, active)(x), model(x), rtol=1e-12, atol=1e-12)


def test_functional_call_replaces_rows():
    model = trained(partitioned())
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    zeros = {name: torch.zeros_like(rows) for name, rows in model.named_parameters(recurse=False)}
    assert not torch.func.functional_call(model, zeros, x).any()


def test_it_compiles_without_a_break():
    model = trained(partitioned())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    with partnets.subnetwork(model, 2, 2):
        torch.testing.assert_close(compiled(x), model(x))
