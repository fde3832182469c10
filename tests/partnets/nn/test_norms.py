"""Norms and FixUp's scalars: s_1 * ... * s_k and b_1 + ... + b_k, compared with a torch layer with these values."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import partnets
from partnets import models

PROPORTIONS = (0.8, 0.1, 0.1)
CASES = [(active, update) for active in (1, 2, 3) for update in (None, *range(1, active + 1))]
ORDINARY = {
    "GroupNorm": lambda: nn.GroupNorm(2, 4),
    "LayerNorm": lambda: nn.LayerNorm((4, 3)),
    "LayerNorm without bias": lambda: nn.LayerNorm((4, 3), bias=False),
    "Bias": models.Bias,
    "Scale": models.Scale,
}
every_layer = pytest.mark.parametrize("name", ORDINARY)


def partitioned(name, trained=True):
    """Return a partitioned layer in float64; if trained, one of its scales is exactly 0."""
    torch.manual_seed(0)
    layer = partnets.partition(ORDINARY[name]().double(), PROPORTIONS)
    if trained:
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(torch.randn_like(parameter))
                parameter.view(3, -1)[1, 0] = 0
    return layer


def data():
    return torch.randn(5, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def by_hand(layer, active):
    """Return the torch layer's parameters in subnetwork `active`, differentiable in all rows."""
    return {
        key: rows[:active].cumsum(0)[-1] if key == "bias" else torch.stack([*rows[:active]]).prod(0)
        for key, rows in layer.named_parameters()
    }


@every_layer
@pytest.mark.parametrize(("active", "update"), CASES)
def test_a_subnetwork_is_the_ordinary_layer_with_products_and_sums_of_rows(name, active, update):
    layer, x = partitioned(name), data()
    expected = torch.func.functional_call(ORDINARY[name]().double(), by_hand(layer, active), x)
    expected.pow(3).sum().backward()
    gradients = {key: parameter.grad.clone() for key, parameter in layer.named_parameters()}
    layer.zero_grad()
    with partnets.subnetwork(layer, active, update):
        output = layer(x)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    if update is None:
        assert not output.requires_grad
        return
    output.pow(3).sum().backward()
    for key, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad[update - 1], gradients[key][update - 1], rtol=1e-10, atol=1e-12)
        assert not parameter.grad[[i for i in range(3) if i != update - 1]].any()


@every_layer
def test_the_output_does_not_depend_on_what_is_updated(name):
    layer, outputs = partitioned(name), []
    for update in (None, 1, 2, 3):
        with partnets.subnetwork(layer, 3, update):
            outputs.append(layer(data()).detach())
    assert all(torch.equal(output, outputs[0]) for output in outputs)


@every_layer
@pytest.mark.parametrize("defaults", ["seed", "zero", "stored"])
def test_every_subnetwork_starts_as_the_ordinary_layer_whatever_the_defaults(name, defaults):
    ordinary = ORDINARY[name]()
    with torch.no_grad():
        for parameter in ordinary.parameters():
            parameter.copy_(torch.randn_like(parameter))
    before = copy.deepcopy(ordinary.state_dict())
    layer = partnets.partition(copy.deepcopy(ordinary), PROPORTIONS, defaults=defaults)
    for key, rows in layer.named_parameters():
        assert torch.equal(rows[0], before[key]) and (rows[1:] == (0 if key == "bias" else 1)).all()
    for active in (1, 2, 3):
        with partnets.subnetwork(layer, active):
            assert torch.equal(layer(data().float()), ordinary(data().float()))


def test_layers_are_made_on_the_meta_device():
    for layer in (
        partnets.GroupNorm(2, 4, device="meta", proportions=PROPORTIONS),
        partnets.LayerNorm(4, device="meta", proportions=PROPORTIONS),
    ):
        assert layer.weight.is_meta and layer.weight.shape == layer.bias.shape == (3, 4)
        assert not layer.to_empty(device="cpu").weight.is_meta


@every_layer
def test_the_ordinary_state_of_another_shape_raises(name):
    with pytest.raises(RuntimeError, match="has the shape"):
        partitioned(name).load_state_dict(ORDINARY[name]().state_dict())


@pytest.mark.parametrize("ordinary", [nn.GroupNorm(2, 4, affine=False), nn.LayerNorm(3, elementwise_affine=False)])
def test_a_norm_without_parameters_computes_the_same(ordinary):
    layer = partnets.partition(copy.deepcopy(ordinary), PROPORTIONS)
    assert torch.equal(layer(data()), ordinary(data())) and not list(layer.parameters())
    assert type(partnets.merge(layer)) is type(ordinary)


def test_reset_parameters_returns_to_the_start():
    layer = partitioned("GroupNorm")
    layer.reset_parameters()
    assert (layer.weight == 1).all() and (layer.bias == 0).all()


def test_the_representation_says_how_many_partitions_there_are():
    assert repr(partitioned("LayerNorm")).endswith("partitions=3)")
    assert repr(partitioned("Scale")) == "Scale(partitions=3)"


@pytest.mark.parametrize("proportions", [(), (0.5, 0.6), (1.5, -0.5)])
@pytest.mark.parametrize("make", [lambda **k: partnets.GroupNorm(2, 4, **k), lambda **k: partnets.LayerNorm(4, **k)])
def test_wrong_proportions_raise(make, proportions):
    with pytest.raises(ValueError, match="pass"):
        make(proportions=proportions)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_weight_normalised_norm_raises_and_stays():
    model = nn.Sequential(nn.utils.weight_norm(nn.LayerNorm((4, 3))))
    layer = model[0]
    with pytest.raises(ValueError, match=r"a LayerNorm .*weight_g.* undo what has renamed them"):
        partnets.partition(model, PROPORTIONS)
    assert model[0] is layer and set(layer._parameters) == {"bias", "weight_g", "weight_v"}


@pytest.mark.full
def test_a_compiled_norm_equals_the_eager_one():
    torch.compiler.reset()  # graphs of other tests would count towards the recompilation limit
    layer = partnets.partition(nn.Sequential(nn.GroupNorm(2, 4), models.Scale(), models.Bias()), PROPORTIONS).double()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for active, update in ((2, 2), (1, None), (3, 1)):
        results = []
        for network in (layer, compiled):
            layer.zero_grad()
            x = data().requires_grad_()
            with partnets.subnetwork(layer, active, update):
                output = network(x)
                output.pow(3).sum().backward()
            results.append([output.detach(), x.grad, layer[0].weight.grad, layer[1].scale.grad])
        for eager, other in zip(*results, strict=True):
            assert (eager is None) == (other is None)
            assert eager is None or torch.equal(eager, other)


def test_norms_and_layers_of_one_network_learn_together():
    """Compare a step of one partition with the gradient of torch layers."""
    torch.manual_seed(0)
    model = partnets.partition(nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2)).double(), PROPORTIONS)
    x = torch.randn(5, 4, dtype=torch.float64)
    before = copy.deepcopy(model)
    with partnets.subnetwork(model, active=3, update=2):
        model(x).pow(2).sum().backward()
    partnets.optim.SGD(model, lr=0.1).step(update=2)

    first, norm, last = before
    hidden = F.linear(x, first.weight, first.bias.sum(0))
    hidden = F.layer_norm(hidden, (6,), norm.weight[0] * norm.weight[1] * norm.weight[2], norm.bias.sum(0))
    F.linear(hidden, last.weight, last.bias.sum(0)).pow(2).sum().backward()
    for layer, old in zip(model, before, strict=True):
        for name, parameter in layer.named_parameters():
            own = torch.zeros_like(parameter, dtype=torch.bool)
            own[1] = True
            if hasattr(layer, "partition") and name == "weight":
                own = layer.partition.ids() == 2
            expected = old.get_parameter(name) - 0.1 * old.get_parameter(name).grad * own
            torch.testing.assert_close(parameter.data, expected.data, rtol=1e-10, atol=1e-12)
            assert torch.equal(parameter[~own], old.get_parameter(name)[~own])
