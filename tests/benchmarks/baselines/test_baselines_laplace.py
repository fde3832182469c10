"""The post-hoc Laplace evidence equals a manual computation with the diagonal GGN at the best prior precision."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from partbench.baselines import laplace
from partnets import hyper

# Warnings of laplace-torch about predictions, which these tests do not make, and of the modules that it imports.
pytestmark = pytest.mark.filterwarnings("ignore:By default `link_approx`:UserWarning", "ignore::DeprecationWarning")


def examples(n=60):
    x = torch.randn(n, 2)
    return x, (x[:, 0] + 0.5 * torch.randn(n) > 0).long()


@pytest.mark.parametrize(
    ("model", "y"),
    [
        (nn.Linear(2, 1), torch.randn(6, 1)),
        (nn.Linear(2, 2), torch.tensor([0, 1, -100, 1, 0, 2])),
        (nn.Sequential(nn.Linear(2, 1), nn.Flatten(0)), torch.ones(6)),
    ],
)
def test_other_targets_than_classes_are_refused(model, y):
    with pytest.raises(ValueError, match=r"needs logits \[batch, classes\]"):
        laplace(model, (torch.randn(6, 2), y))


def trained(x, y):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


@torch.no_grad()
def evidence(model, x, y):
    """Return log p(y | w) - 1/2 sum_i log(1 + h_i / λ) - λ/2 ||w||² at the best λ of a grid.

    h is the diagonal of the generalised Gauss-Newton matrix: for class c, the sum over examples of p_c (1 - p_c), times
    the squared feature for a weight.
    """
    p = model(x).softmax(1)
    variance = p * (1 - p)
    h = torch.cat([(variance.T @ x.square()).flatten(), variance.sum(0)])
    squares = model.weight.square().sum() + model.bias.square().sum()
    precisions = torch.logspace(-4, 4, 1001)
    log_det = (1 + h / precisions[:, None]).log().sum(1)
    return (p[range(len(y)), y].log().sum() - log_det / 2 - precisions * squares / 2).max().item()


@pytest.fixture
def library():
    pytest.importorskip("laplace", reason="baselines.laplace needs laplace-torch")


@pytest.mark.cases(usual=1)
@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("batch_size", [7, 256])
def test_the_evidence_agrees_with_a_direct_computation(batch_size):
    x, y = examples()
    model = trained(x, y)
    for data in ((x, y), TensorDataset(x, y)):
        assert laplace(model, data, batch_size=batch_size) == pytest.approx(evidence(model, x, y), rel=1e-3)


@pytest.mark.usefixtures("library")
def test_the_evidence_excludes_psi_and_the_model_stays_unchanged():
    x, y = examples()
    mask, linear = hyper.InputMask(2, probability=0.25), trained(x / 4, y)
    model = nn.Sequential(mask, linear).train()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    assert laplace(model, (x, y)) == pytest.approx(evidence(linear, x / 4, y), rel=1e-3)
    assert all(map(torch.equal, model.parameters(), before))
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all(module.training for module in model.modules())


def test_a_missing_library_is_named_with_the_cure(monkeypatch):
    monkeypatch.setitem(sys.modules, "laplace", None)
    with pytest.raises(ImportError, match="pip install laplace-torch, or, where"):
        laplace(nn.Linear(2, 2), examples())
