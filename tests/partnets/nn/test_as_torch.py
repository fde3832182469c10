"""Drop-in layers and partitioned models behave like torch's: memory formats, inference mode, initial values, seeds."""

import pytest
import torch
from layers import assert_learns, dense
from small_network import CASES, PROPORTIONS, perturbed
from torch import nn

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


@pytest.mark.parametrize("options", [{"groups": 3}, {"padding": "all"}, {"padding_mode": "mirror"}, {"unknown": 1}])
def test_wrong_constructor_arguments_raise_torchs_errors(options):
    with pytest.raises((TypeError, ValueError)) as theirs:
        nn.Conv2d(4, 8, 3, **options)
    with pytest.raises(theirs.type) as ours:
        partnets.Conv2d(4, 8, 3, proportions=PROPORTIONS, **options)
    assert str(ours.value).split(".")[-1] == str(theirs.value).split(".")[-1]


def test_a_layer_is_made_on_the_meta_device():
    for layer in (
        partnets.Linear(3, 4, device="meta", proportions=PROPORTIONS),
        partnets.GroupNorm(2, 4, device="meta", proportions=PROPORTIONS),
        partnets.BatchNorm1d(4, device="meta", proportions=PROPORTIONS),
    ):
        assert layer.weight.is_meta and layer.bias_rows.is_meta and layer.bias_rows.shape == (3, 4)
        assert layer(torch.empty(2, layer.weight.shape[-1], device="meta")).is_meta


@pytest.mark.parametrize("make", [partnets.GroupNorm, partnets.LayerNorm, partnets.BatchNorm1d])
def test_a_norm_without_parameters_is_made_and_computes_the_same(make):
    name, sizes = make.__name__, (2, 4) if make is partnets.GroupNorm else (4,)
    none = {"elementwise_affine" if make is partnets.LayerNorm else "affine": False}
    x = torch.randn(5, 4)
    ours, theirs = make(*sizes, **none, proportions=PROPORTIONS), getattr(nn, name)(*sizes, **none)
    assert torch.equal(ours(x), theirs(x)) and not list(ours.parameters())
    partnets.partition(nn.Sequential(theirs, nn.Linear(4, 2)), PROPORTIONS)


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
