"""A subnetwork's outputs and updates, compared with networks written with torch.where."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import partkernels
import partnets

PROPORTIONS = (0.8, 0.1, 0.1)
CASES = [(active, update) for active in (1, 2, 3) for update in (None, *range(1, active + 1))]


def by_hand(layer, active):
    """Return the weight and bias of a subnetwork, computed with torch.where."""
    weight = layer.weight.detach()
    defaults = layer.partition.defaults.values(weight.shape, weight.dtype)
    return torch.where(layer.partition.ids() <= active, weight, defaults), layer.bias.detach()[:active].sum(0)


def trained(model):
    """Perturb a model's parameters, so that they differ from their defaults as after training."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def network(defaults="seed"):
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Conv2d(2, 5, 3), nn.GELU(), nn.Flatten(), nn.Linear(5 * 3 * 4, 7), nn.GELU(), nn.Linear(7, 3)
    )
    return trained(partnets.partition(layers.double(), PROPORTIONS, defaults=defaults, seed=1))


@pytest.mark.parametrize("defaults", ["seed", "zero", "stored"])
@pytest.mark.parametrize(("active", "update"), CASES)
def test_a_subnetwork_is_the_network_with_the_other_weights_at_their_defaults(defaults, active, update):
    model = network(defaults)
    x = torch.randn(4, 2, 5, 6, dtype=torch.float64)
    conv, first, last = model[0], model[3], model[5]
    parts = [[part.requires_grad_() for part in by_hand(layer, active)] for layer in (conv, first, last)]
    expected = F.gelu(F.conv2d(x, *parts[0])).flatten(1)
    expected = F.linear(F.gelu(F.linear(expected, *parts[1])), *parts[2])
    expected.square().sum().backward()

    with partnets.subnetwork(model, active, update):
        output = model(x)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    if update is None:
        assert not output.requires_grad
        return
    output.square().sum().backward()
    for layer, (weight, bias) in zip((conv, first, last), parts, strict=True):
        owned = layer.partition.ids() == update
        torch.testing.assert_close(layer.weight.grad[owned], weight.grad[owned], rtol=1e-10, atol=1e-12)
        assert (layer.weight.grad[~owned] == 0).all()
        torch.testing.assert_close(layer.bias.grad[update - 1], bias.grad, rtol=1e-10, atol=1e-12)
        assert (layer.bias.grad[[i for i in range(3) if i != update - 1]] == 0).all()


def test_the_output_does_not_depend_on_what_is_updated():
    model, x = network(), torch.randn(4, 2, 5, 6, dtype=torch.float64)
    outputs = []
    for update in (None, 1, 2, 3):
        with partnets.subnetwork(model, 3, update):
            outputs.append(model(x).detach())
    assert all(torch.equal(output, outputs[0]) for output in outputs)


def test_a_new_layer_starts_at_its_defaults():
    layer = partnets.Linear(9, 5, proportions=PROPORTIONS, seed=3)
    x = torch.randn(4, 9)
    outputs = []
    for active in (1, 2, 3):
        with partnets.subnetwork(layer, active):
            outputs.append(layer(x))
    torch.testing.assert_close(outputs[0], outputs[2])
    torch.testing.assert_close(outputs[1], outputs[2])


def test_biases_add_up_over_partitions():
    layer = partnets.Linear(4, 2, proportions=PROPORTIONS, defaults="zero")
    assert (layer.bias[1:] == 0).all() and (layer.bias[0] != 0).all()
    with torch.no_grad():
        layer.bias.copy_(torch.tensor([[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]]))
    for active, expected in ((1, [1.0, 2.0]), (2, [11.0, 22.0]), (3, [111.0, 222.0])):
        with partnets.subnetwork(layer, active):
            assert layer(torch.zeros(4)).tolist() == expected


def test_outside_any_subnetwork_only_the_last_partition_learns():
    layer = partnets.Linear(9, 5, proportions=PROPORTIONS)
    layer(torch.ones(2, 9)).sum().backward()
    assert (layer.weight.grad[layer.partition.ids() < 3] == 0).all()
    assert (layer.weight.grad[layer.partition.ids() == 3] != 0).all()
    assert (layer.bias.grad[:2] == 0).all() and (layer.bias.grad[2] != 0).all()


def test_contexts_nest_and_are_undone_by_exceptions():
    model = network()
    states = []

    def look():
        states.append({(layer.active, layer.update) for layer in model if isinstance(layer, partnets.Linear)})

    with pytest.raises(KeyError), partnets.subnetwork(model, 2, 1):
        look()
        with partnets.subnetwork(model, 1):
            look()
        look()
        raise KeyError
    look()
    assert states == [{(2, 1)}, {(1, None)}, {(2, 1)}, {(3, 3)}]


@pytest.mark.parametrize(
    ("active", "update"), [(0, None), (4, None), (2, 3), (2, 0), (True, None), (1.0, None), ("2", None)]
)
def test_numbers_out_of_range_raise_and_change_nothing(active, update):
    model = network()
    with pytest.raises(ValueError, match="pass an int in 1"), partnets.subnetwork(model, active, update):
        pass
    assert model[0].active == model[0].update == 3


def test_a_model_without_partitioned_layers_raises():
    with pytest.raises(ValueError, match=r"partnets\.partition"), partnets.subnetwork(nn.Linear(2, 2), 1):
        pass


def test_layers_that_differ_in_count_raise():
    model = nn.Sequential(partnets.Linear(4, 4, proportions=(0.5, 0.5)), partnets.Linear(4, 4, proportions=PROPORTIONS))
    with pytest.raises(ValueError, match="differ"), partnets.subnetwork(model, 1):
        pass


@pytest.mark.full
def test_a_compiled_subnetwork_equals_the_eager_one():
    torch.compiler.reset()  # graphs of other tests would count towards the recompilation limit
    model = trained(partnets.partition(nn.Sequential(nn.Linear(9, 7), nn.ReLU(), nn.Linear(7, 3)), PROPORTIONS))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(4, 9)
    for active, update in ((2, 2), (1, None), (3, 1)):
        results = []
        for network in (model, compiled):
            model.zero_grad()
            input = x.clone().requires_grad_()
            with partnets.subnetwork(model, active, update):
                output = network(input)
                output.square().sum().backward()
            results.append([output.detach(), input.grad, model[0].weight.grad, model[0].bias.grad])
        for eager, other in zip(*results, strict=True):
            assert (eager is None) == (other is None)
            assert eager is None or torch.equal(eager, other)


def test_autocast_casts_as_torchs_layers_do():
    layer = partnets.Linear(8, 4, proportions=PROPORTIONS)
    with torch.autocast("cpu", torch.bfloat16), partnets.subnetwork(layer, 2):
        assert layer(torch.randn(3, 8)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("defaults", "error"),
    [("nothing", ValueError), (3, ValueError), (partkernels.Stored(torch.zeros(1, 2)), ValueError)],
)
def test_unknown_defaults_raise(defaults, error):
    with pytest.raises(error, match="defaults"):
        partnets.Linear(3, 2, defaults=defaults)


@pytest.mark.parametrize("proportions", [(), (0.5, 0.6), (1.5, -0.5), (float("nan"), 1.0)])
def test_wrong_proportions_raise(proportions):
    with pytest.raises(ValueError, match="pass"):
        partnets.Linear(3, 2, proportions=proportions)


@pytest.mark.parametrize("seed", [-1, 1 << 63])
def test_seeds_out_of_range_raise(seed):
    with pytest.raises(ValueError, match="seed"):
        partnets.Linear(3, 2, seed=seed)


@pytest.mark.parametrize("defaults", [partkernels.Normal(0.1, seed=5), partkernels.Uniform(0.1, seed=5)])
def test_a_weight_with_given_defaults_starts_there(defaults):
    layer = partnets.Linear(6, 5, proportions=PROPORTIONS, defaults=defaults)
    assert torch.equal(layer.weight, defaults.values((5, 6)))


def test_reset_parameters_returns_to_the_start():
    layer = partnets.Linear(6, 5, proportions=PROPORTIONS, seed=0)
    before = layer.weight.detach().clone()
    trained(layer).reset_parameters()
    assert torch.equal(layer.weight, before)
    assert (layer.bias[1:] == 0).all() and (layer.bias[0] != 0).all()


@pytest.mark.parametrize("scheme", ["weight", "nested"])
def test_a_parameter_that_was_added_afterwards_is_no_partitions(scheme):
    options = {"example": torch.randn(2, 4)} if scheme == "nested" else {}
    model = partnets.partition(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)), PROPORTIONS, scheme=scheme, **options)
    model[1].gain = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    model[1].register_forward_hook(lambda layer, args, y: y * layer.gain)
    x = torch.randn(5, 4)
    for k in (1, 2, 3):
        with partnets.subnetwork(model, k, k):
            assert model[1].gain is model[1]._parameters["gain"]
            expected = model(x)
        torch.testing.assert_close(partnets.merge(model, active=k)(x), expected)
    with pytest.raises(ValueError, match=r"1\.gain would learn from every chunk"):
        partnets.optim.Adam(model)
