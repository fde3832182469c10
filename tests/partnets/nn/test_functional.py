"""torch.func and torch's utilities on complete models: per-example gradients, ensembles by vmap, parametrizations."""

import copy

import pytest
import torch
from layers import dense
from small_network import CASES, images, partitioned, perturbed
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn.utils import parametrizations, prune

import partnets
from partnets.subnetworks.parameters import partitioned_parameters


@pytest.fixture
def model():
    return partitioned().double()


def inputs():
    return images().double()


def detached(model):
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("active", "update"), [case for case in CASES if case[1]])
def test_gradients_of_a_function_are_those_of_the_subnetworks_parameters(model, active, update):
    """Check functions of parameters, which take no notice of partitions: they give the whole gradient."""
    x, twin = inputs(), dense(model, active)

    def loss(parameters, x):
        return functional_call(model, parameters, x).square().sum()

    with partnets.subnetwork(model, active, update):
        parameters = detached(model)
        ours = grad(loss)(parameters, x)
        each = vmap(grad(lambda parameters, x: loss(parameters, x[None])), (None, 0))(parameters, x)
    twin(x).square().sum().backward()
    for name, parameter in twin.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-10, atol=1e-12)
        assert each[name].shape == (4, *parameter.shape)
        torch.testing.assert_close(each[name].sum(0), parameter.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("active", [1, 2, 3])
def test_models_are_stacked_and_called_by_vmap(active):
    models = [perturbed(partitioned().double(), 0.1) for _ in range(3)]
    base, x = copy.deepcopy(models[0]).to("meta"), inputs()
    subnetworks = [partnets.merge(model, active) for model in models]
    expected = torch.stack([one(x) for one in subnetworks])
    parameters, buffers = stack_module_state(subnetworks)
    merged = copy.deepcopy(subnetworks[0]).to("meta")
    found = vmap(lambda *state: functional_call(merged, state, (x,)))(parameters, buffers)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    if active == 3:
        parameters, buffers = stack_module_state(models)
        found = vmap(lambda *state: functional_call(base, state, (x,)))(parameters, buffers)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scheme", ["weight", "node"])
@pytest.mark.parametrize("change", [parametrizations.weight_norm, parametrizations.orthogonal])
def test_parametrized_layers_are_partitioned_and_no_subnetwork_gets_a_cached_weight_of_another(scheme, change):
    layers = nn.Sequential(change(nn.Linear(4, 4)), nn.Linear(4, 2)).double()
    model, x = partnets.partition(layers, (0.5, 0.3, 0.2), scheme=scheme), torch.randn(3, 4, dtype=torch.float64)
    perturbed(model, 0.1)

    def output(active):
        with partnets.subnetwork(model, active):
            return model(x)

    expected = [dense(model, active)(x) for active in (3, 1, 2)]
    for active, one in zip((3, 1, 2), expected, strict=True):
        torch.testing.assert_close(output(active), one, rtol=1e-12, atol=1e-12)
    with nn.utils.parametrize.cached():
        for active, one in zip((3, 1, 2), expected, strict=True):
            torch.testing.assert_close(output(active), one, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "change", [parametrizations.weight_norm, lambda layer: prune.l1_unstructured(layer, "weight", 0.5)]
)
def test_a_weight_that_became_computed_from_others_raises(change):
    model = nn.Sequential(change(partnets.Linear(4, 3, proportions=(0.5, 0.5), seed=0)))
    computed = r"the weight of this \w*Linear is computed from other parameters now, .* before partnets\.partition"
    with pytest.raises(RuntimeError, match=computed), partnets.subnetwork(model, 1):
        pass


def average(averaged, current, count):
    """Average floating-point tensors; maps are those of the model."""
    return averaged + (current - averaged) / (count + 1) if averaged.is_floating_point() else current


def test_averaged_models_average_the_parameters_of_each_partition():
    models = [partitioned()]
    averaged = torch.optim.swa_utils.AveragedModel(models[0], avg_fn=average, use_buffers=True)
    averaged.update_parameters(models[0])
    for _ in range(2):
        models.append(perturbed(copy.deepcopy(models[-1]), 0.1))
        averaged.update_parameters(models[-1])
    owned = [partitioned_parameters(model) for model in models]
    for one, *each in zip(partitioned_parameters(averaged), *owned, strict=True):
        one.combine()  # a product of averages is no average of products
        torch.testing.assert_close(one.stored, torch.stack([other.stored for other in each]).mean(0))
    x = images()
    for k in (1, 2, 3):
        expected = dense(averaged, k)(x)
        with partnets.subnetwork(averaged, k):
            torch.testing.assert_close(averaged(x), expected)
