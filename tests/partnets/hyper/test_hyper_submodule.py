"""Submodule: any module as ψ, not partitioned and trained only on the loss of the held-out chunk."""

import pytest
import torch
from torch import nn

import partnets
from partnets import hyper
from partnets.subnetworks.state import partitioned_modules


def extractor():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten())


def test_its_parameters_are_hyperparameters_and_stay_whole():
    module = extractor()
    features = hyper.Submodule(module)
    model = partnets.partition(nn.Sequential(features, nn.Linear(36, 2)), (0.5, 0.5))
    assert list(partnets.partitions(model)) == ["1.weight"] and partitioned_modules(model) == [model[1]]
    assert set(hyper.hyperparameters(model)) == set(module.parameters())


def test_it_learns_in_the_steps_of_hyperparameters_alone():
    torch.manual_seed(0)
    features = hyper.Submodule(extractor())
    model = partnets.partition(nn.Sequential(features, nn.Linear(36, 2)), (0.5, 0.5))
    chunks = partnets.chunk((torch.randn(40, 1, 5, 5), torch.randint(2, (40,))), (0.5, 0.5))
    trainer = partnets.Trainer(model, chunks, hyper=features, batch_size=8)
    before = [parameter.detach().clone() for parameter in features.parameters()]
    trainer.step_weights()
    assert all(map(torch.equal, features.parameters(), before))
    trainer.step_hyper()
    assert not any(map(torch.equal, features.parameters(), before))
    assert list(trainer.values()) == ["0.rms"]


def test_its_value_is_the_root_mean_square_of_all_parameters():
    features = hyper.Submodule(extractor())
    everything = nn.utils.parameters_to_vector(features.parameters()).detach()
    assert features.values() == {"rms": pytest.approx(everything.square().mean().sqrt().item())}


def test_arguments_and_results_pass_through():
    query = torch.randn(2, 3, 4)
    attention = nn.MultiheadAttention(4, 1, batch_first=True)
    expected = attention(query, query, query, need_weights=False)
    result = hyper.Submodule(attention)(query, query, query, need_weights=False)
    assert torch.equal(result[0], expected[0]) and result[1] is None


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(4), nn.InstanceNorm2d(4, affine=True, track_running_stats=True)])
def test_running_statistics_raise(norm):
    with pytest.raises(ValueError, match=rf"1 \({type(norm).__name__}\); use nn\.GroupNorm"):
        hyper.Submodule(nn.Sequential(nn.Conv2d(1, 4, 3), norm))
    with pytest.raises(ValueError, match="the module itself"):
        hyper.Submodule(norm)


def test_batch_norm_without_running_statistics_is_taken():
    hyper.Submodule(nn.BatchNorm2d(4, track_running_stats=False))


def test_a_module_without_parameters_raises():
    with pytest.raises(ValueError, match="no parameters to learn"):
        hyper.Submodule(nn.ReLU())
