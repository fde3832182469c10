"""Partitioned models behave like torch's: memory formats, inference mode, torch.func, vmap and parametrizations."""

import copy

import pytest
import torch
from layers import assert_learns, dense
from small_network import CASES, PROPORTIONS, images, partitioned, perturbed
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn.utils import parametrizations, prune

import partnets


def convolutional():
    torch.manual_seed(0)
    layers = nn.Conv2d(4, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.ConvTranspose2d(8, 6, 3), nn.BatchNorm2d(6)
    return nn.Sequential(*layers).double()


@pytest.mark.cases(usual=6)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("active", "update"), CASES)
def test_channels_last_models_keep_their_strides_and_compute_the_same(active, update, when):
    model, x = convolutional(), torch.randn(2, 4, 9, 8, dtype=torch.float64)
    if when == "before":
        model = partnets.partition(model.to(memory_format=torch.channels_last), PROPORTIONS)
    else:
        model = partnets.partition(model, PROPORTIONS).to(memory_format=torch.channels_last)
    twin, x = dense(perturbed(model, 0.1), active), x.to(memory_format=torch.channels_last)
    with partnets.subnetwork(model, active, update):
        y = model(a := x.clone().requires_grad_())
        y.square().sum().backward()
    expected = twin(b := x.clone().requires_grad_())
    expected.square().sum().backward()
    torch.testing.assert_close((y, a.grad), (expected, b.grad), rtol=1e-10, atol=1e-12, check_stride=True)
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert_learns(model, twin, active, update)


@pytest.mark.parametrize("transpose", [True, False])
def test_a_weight_may_be_transposed_but_not_have_gaps(transpose):
    layer = nn.Linear(6, 4).double()
    layer.weight.data = layer.weight.data.t().contiguous().t() if transpose else torch.randn(8, 12).double()[::2, ::2]
    model = partnets.partition(nn.Sequential(layer), PROPORTIONS, defaults="zero")
    x = torch.randn(3, 6, dtype=torch.float64)
    if not transpose:
        with pytest.raises(ValueError, match="weight of Linear has gaps in memory"), partnets.subnetwork(model, 1):
            pass
        return
    for k in (1, 2, 3):
        expected = dense(model, k)(x)
        with partnets.subnetwork(model, k):
            torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)


def test_a_model_is_partitioned_and_used_in_inference_mode():
    model = convolutional().eval()
    with torch.inference_mode():
        perturbed(partnets.partition(model, PROPORTIONS), 0.1)
        x = torch.randn(2, 4, 9, 8, dtype=torch.float64)
        for k in (1, 2, 3):
            expected = dense(model, k)(x)
            with partnets.subnetwork(model, k):
                torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)
    with partnets.subnetwork(model, 1, 1):
        model(torch.randn(2, 4, 9, 8, dtype=torch.float64)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


NESTED = {
    "jagged": lambda rows: torch.nested.nested_tensor(rows, layout=torch.jagged),
    "strided": torch.nested.nested_tensor,
    "COO": lambda rows: torch.cat(rows).to_sparse(),
    "CSR": lambda rows: torch.cat(rows).to_sparse_csr(),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("form", NESTED)
def test_nested_and_sparse_inputs_are_those_of_torch(form):
    model = perturbed(partnets.partition(nn.Linear(4, 3).double(), PROPORTIONS), 0.1)
    rows = [torch.randn(n, 4, dtype=torch.float64).relu() for n in (2, 3)]
    for k in (1, 2, 3):
        twin, grads = dense(model, k), []
        for one, x in ((model, NESTED[form](rows)), (twin, torch.cat(rows))):
            with partnets.subnetwork(model, k, k):
                y = one(x)
                y = torch.cat(y.unbind()) if y.is_nested else y
                y.square().sum().backward()
            grads.append(y)
        torch.testing.assert_close(grads[0].to_dense(), grads[1])
        assert_learns(model, twin, k, k)
        model.zero_grad()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("form", NESTED)
def test_a_trainer_takes_nested_and_sparse_inputs(form):
    class Sums(nn.Module):
        def forward(self, z):
            return z.to_padded_tensor(0.0).sum(1) if z.is_nested else z.to_dense()

    def collate(pairs):
        return NESTED[form]([x for x, _ in pairs]), torch.stack([y for _, y in pairs])

    model = partnets.partition(nn.Sequential(nn.Linear(4, 3), Sums()), (0.5, 0.5))
    data = [(torch.randn(1, 4).relu(), torch.tensor(i % 2)) for i in range(20)]
    chunks = partnets.chunk(data, (0.5, 0.5), collate=collate)
    partnets.Trainer(model, chunks, batch_size=4).fit(2)


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
