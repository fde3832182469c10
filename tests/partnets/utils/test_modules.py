"""Temporary changes of the training mode, also for modules with a custom `train`."""

import pytest
import torch
from torch import nn

import partnets
from partnets.utils.modules import evaluating, training


class Switched(nn.Module):
    """A module with a different graph for each mode, like torchvision's feature extractors."""

    def __init__(self):
        super().__init__()
        self.layer, self.frozen, self.rate = nn.Linear(4, 4), nn.BatchNorm1d(4), 0.5

    def train(self, mode=True):
        super().train(mode)
        self.rate = 0.5 if mode else 0.0
        self.frozen.eval()
        return self

    def forward(self, x):
        return nn.functional.dropout(self.frozen(self.layer(x)), self.rate, True)


@pytest.mark.parametrize("mode", [True, False])
def test_training_and_evaluating_restore_the_mode(mode):
    model = nn.Sequential(Switched(), nn.Dropout()).train(not mode)
    model[1].train(mode)  # already in this mode
    with training(model) if mode else evaluating(model):
        assert (model[0].training, model[0].rate) == (mode, 0.5 if mode else 0.0)
        assert not model[0].frozen.training
    assert (model.training, model[0].training, model[1].training) == (not mode, not mode, mode)
    assert model[0].rate == (0.0 if mode else 0.5) and not model[0].frozen.training


@pytest.mark.parametrize("scheme", ["weight", "nested"])
def test_evaluations_and_explain_partition_restore_the_mode(scheme):
    model, x = nn.Sequential(Switched(), nn.ReLU(), nn.Linear(4, 2)).train(), torch.randn(20, 4)
    how = {"example": x} if scheme == "nested" else {}
    partnets.partition(model, (0.5, 0.5), scheme=scheme, **how)
    chunks = partnets.chunk((x, torch.randint(2, (20,))), (0.5, 0.5))
    for look in (partnets.lml, partnets.loss_matrix):
        look(model, chunks)
        assert model[0].rate == 0.5 and model.training and not model[0].frozen.training
    partnets.explain_partition(model)
    assert model[0].rate == 0.5


class Following(nn.Module):
    """A module that averages its inputs in a frozen parameter."""

    def __init__(self):
        super().__init__()
        self.average = nn.Parameter(torch.zeros(4), requires_grad=False)

    def forward(self, x):
        if self.training:
            self.average.data.lerp_(x.detach().mean(0), 0.1)
        return x - self.average


@pytest.mark.parametrize("mode", [True, False])
def test_nested_partitioning_restores_parameters_written_in_forward(mode):
    following = Following()
    model = nn.Sequential(following, nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).train(mode)
    partnets.partition(model, (0.5, 0.5), scheme="nested", example=torch.randn(6, 4), stateful=[following])
    averages = [tensor for name, tensor in model.state_dict().items() if "average" in name]
    assert len(averages) == 2 and not any(map(torch.any, averages))
