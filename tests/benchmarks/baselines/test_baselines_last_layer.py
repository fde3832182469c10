"""Last-layer marginal likelihood: the sparse process matches the dense one, the bound holds, and ψ learns."""

import math
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal, kl_divergence

from partbench import baselines
from partbench.baselines.sparse_process import JITTER, SparseProcess
from partnets import hyper

CLASSES = 3


def process(points=6, seed=0):
    """Return a process in float64 with a distribution of inducing values that differs from the prior."""
    torch.manual_seed(seed)
    found = SparseProcess(torch.randn(points, 4, dtype=torch.float64), CLASSES)
    with torch.no_grad():
        found.mean.normal_()
        found.root.add_(0.3 * torch.randn_like(found.root))
    return found


def dense(found, features):
    """Return mean [classes, n] and covariance [classes, n, n] of g at all n = batch * copies inputs."""
    z, x = found.inducing, features.flatten(0, 1)

    def k(a, b):
        return found.log_variance.exp() * torch.exp(-(torch.cdist(a, b) ** 2) / (2 * found.log_length.exp() ** 2))

    prior = k(z, z) + JITTER * found.log_variance.exp() * torch.eye(len(z), dtype=z.dtype)
    root, weight = torch.linalg.cholesky(prior), torch.linalg.solve(prior, k(z, x)).mT
    values = root @ found.root.tril()
    return found.mean @ root.mT @ weight.mT, k(x, x) + weight @ (values @ values.mT - prior) @ weight.mT


@pytest.mark.parametrize(("batch", "copies", "points"), [(3, 4, 6), (1, 1, 1), (5, 2, 9), (0, 3, 2)])
def test_values_are_those_of_the_dense_process_averaged(batch, copies, points):
    found, features = process(points), torch.randn(batch, copies, 4, dtype=torch.float64)
    mean, covariance = dense(found, features)
    averaging = torch.kron(torch.eye(batch), torch.full((1, copies), 1 / copies)).double()
    expected = averaging @ covariance @ averaging.mT
    ours = found(features)
    torch.testing.assert_close(ours[0], (mean @ averaging.mT).mT)
    torch.testing.assert_close(ours[1], expected.diagonal(dim1=1, dim2=2).mT)


def test_the_divergence_is_that_of_normal_distributions():
    found = process()
    with torch.no_grad():  # the same distribution with torch's convention for the root
        found.root.copy_(torch.linalg.cholesky(found.root.tril() @ found.root.tril().mT))
    prior = MultivariateNormal(torch.zeros(6).double(), torch.eye(6).double())
    expected = kl_divergence(MultivariateNormal(found.mean, scale_tril=found.root.tril()), prior).sum()
    torch.testing.assert_close(found.divergence(), expected)


@pytest.mark.full
def test_the_bound_is_below_the_marginal_likelihood():
    torch.manual_seed(1)
    x, y = torch.randn(4, 4).double(), torch.tensor([0, 2, 1, 1])
    found = process()
    model = baselines.LastLayer(nn.Identity(), nn.Identity(), found, samples=1)
    with torch.no_grad():
        bound = len(x) * torch.stack([model.bound(x, y, len(x)) for _ in range(200)]).mean()
        prior = SparseProcess(found.inducing, CLASSES).double()
        prior.load_state_dict(
            {**prior.state_dict(), "log_length": found.log_length, "log_variance": found.log_variance}
        )
        mean, covariance = dense(prior, x[:, None])
        values = MultivariateNormal(mean, covariance).sample((200_000,)).mT  # [draws, examples, classes]
        likelihoods = values.log_softmax(2).gather(2, y.expand(len(values), -1)[..., None]).sum((1, 2))
        exact = likelihoods.logsumexp(0) - math.log(len(values))
    assert bound < exact < 0


class Turn(hyper.Hyperparameter):
    """A rotation of each point in the plane by an angle from U[-width, width]."""

    def __init__(self, width):
        super().__init__()
        self.width = hyper.Learned(width, hyper.positive)

    def forward(self, x):
        angle = self.width() * (2 * torch.rand(len(x)) - 1)
        return torch.stack(
            (x[:, 0] * angle.cos() - x[:, 1] * angle.sin(), x[:, 0] * angle.sin() + x[:, 1] * angle.cos()), 1
        )


def test_phases_alternate_and_parameters_of_the_other_phase_stay():
    torch.manual_seed(0)
    turn, network = Turn(0.5), nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))
    seen = []

    def look(step, model):
        seen.append((step, turn.width.raw.item(), model.process.mean.clone(), model.features[0].weight.clone()))

    data = torch.randn(20, 2), torch.randint(2, (20,))
    baselines.last_layer(turn, network, data, steps=6, phase=2, inducing=5, pretraining=0, callback=look)
    assert [step for step, *_ in seen] == [1, 2, 3, 4, 5, 6]
    moved = [
        [not torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(one[1:], other[1:], strict=True)]
        for one, other in pairwise(seen)
    ]
    assert moved == [[True, True, False], *[[False, False, True]] * 2, *[[True, True, False]] * 2]
    assert all(parameter.requires_grad for parameter in (*turn.parameters(), *network.parameters()))
    assert isinstance(network[2], nn.Identity)


def test_a_nan_loss_and_equal_features_raise():
    data = torch.full((20, 2), float("nan")), torch.randint(2, (20,))
    with pytest.raises(FloatingPointError, match="step 1 of pretraining is nan"):
        baselines.last_layer(nn.Identity(), nn.Sequential(nn.Linear(2, 2)), data, steps=1, inducing=5)
    data = torch.zeros(20, 2), torch.randint(2, (20,))
    with pytest.raises(ValueError, match="have the same features"):
        baselines.last_layer(nn.Identity(), nn.Sequential(nn.Linear(2, 2)), data, steps=1, inducing=5)
