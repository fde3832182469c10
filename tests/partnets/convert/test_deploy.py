"""finalize(model, "deploy") returns only torch modules and the user's classes, without randomness or trainable ψ."""

import copy
import pickle

import pytest
import torch
from test_export_alone import PROPORTIONS, deployed
from torch import nn

import partnets
from partnets import hyper


def named(model):
    return [type(module).__name__ for module in model]


@pytest.mark.parametrize("name", ["images", "masked", "features"])
def test_a_deployed_network_has_only_torch_modules_and_is_deterministic(name):
    network, (x, _) = deployed(name)
    modules = {type(module).__module__.split(".")[0] for module in network.modules()}
    assert modules == {"torch"} and not any(module.training for module in network.modules())
    pickled = pickle.dumps(network)
    assert b"partnets" not in pickled and b"partkernels" not in pickled
    assert torch.equal(network(x), network(x))
    torch.testing.assert_close(pickle.loads(pickled)(x), network(x))


def test_deployed_dropout_has_its_rate_and_masks_have_their_mean():
    mask, dropout = hyper.InputMask(4), hyper.ConcreteDropout(0.3)
    nn.init.normal_(mask.logits)
    features = hyper.Submodule(nn.Sequential(nn.Linear(4, 4), dropout))
    model = nn.Sequential(mask, features, nn.Linear(4, 3))
    partnets.partition(model, PROPORTIONS)
    before = copy.deepcopy(model.state_dict())
    network = partnets.finalize(model, "deploy")
    assert network[1][1].p == dropout.values()["rate"] and type(network[1][1]) is nn.Dropout
    x = torch.randn(5, 4)
    torch.testing.assert_close(network(x), model.eval()(x))
    expected = {"0.probability", *(f"{path}.{name}" for path in ("1.0", "2") for name in ("weight", "bias"))}
    assert set(network.state_dict()) == expected
    assert [name for name, parameter in network.named_parameters() if parameter.requires_grad] == ["2.weight", "2.bias"]
    after = model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items() if isinstance(value, torch.Tensor))
    for parameter in model.parameters():
        assert parameter.requires_grad


def test_modules_kept_in_a_python_list_are_deployed_without_randomness():
    class Kept(nn.Module):
        def __init__(self):
            super().__init__()
            self.dropout = hyper.ConcreteDropout(0.5)
            self.layer, self.steps = nn.Linear(4, 4), [self.dropout]

        def forward(self, x):
            return self.steps[0](self.layer(x))

    model = partnets.partition(Kept(), PROPORTIONS)
    x = torch.ones(9, 4)
    torch.testing.assert_close(partnets.finalize(model, "deploy")(x), model.eval()(x))


def test_a_deployed_state_dict_loads_into_the_dense_network():
    def network():
        return nn.Sequential(
            partnets.data.Normalise((0.5,), (0.2,)), nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 3)
        )

    model = partnets.partition(hyper.Averaged(hyper.Affine(), network()), PROPORTIONS)
    trained, plain = partnets.finalize(model, "deploy"), network()
    plain.load_state_dict(trained.state_dict())
    x = torch.rand(2, 1, 8, 8)
    torch.testing.assert_close(trained(x), plain(x))


@pytest.mark.parametrize(
    "make",
    [
        hyper.LabelSmoothing, lambda: hyper.SourceWeights(2), lambda: hyper.Temperature(2.0), hyper.ActivationPenalty,
        hyper.Mixup,
    ],
)  # fmt: skip
def test_modules_that_take_targets_are_deployed_as_without_targets(make):
    model = partnets.partition(nn.Sequential(nn.Linear(4, 3), make()), (0.5, 0.5))
    network, x = partnets.finalize(model, "deploy"), torch.randn(2, 4)
    torch.testing.assert_close(network(x), model.eval()(x))
    assert [name for name, one in network.named_parameters() if one.requires_grad] == ["0.weight", "0.bias"]
    pickle.loads(pickle.dumps(network))


def test_without_draws_the_network_sees_each_example_as_it_is():
    augmentation = nn.Sequential(partnets.data.ToFloat(), hyper.Affine(), hyper.ColourJitter())
    network = nn.Sequential(nn.Flatten(), nn.Linear(192, 3))
    model = partnets.partition(hyper.Averaged(augmentation, network), PROPORTIONS)
    deployed = partnets.finalize(model, "deploy")
    x = torch.randint(256, (4, 3, 8, 8), dtype=torch.uint8)
    torch.testing.assert_close(deployed(x), network(x / 255))
    torch.testing.assert_close(deployed(x / 255), deployed(x))
    with pytest.raises(AssertionError, match="uint8"):
        deployed(x.int())
    with pytest.raises(AssertionError, match="channels"):
        partnets.data.Normalise((0.5,) * 3, (0.2,) * 3).to_torch()(torch.rand(2, 1, 4, 4))


def averaged(augmentation):
    return hyper.Averaged(augmentation, nn.Sequential(nn.Flatten(), nn.Linear(192, 3)), samples=2)


@pytest.mark.parametrize("make", [hyper.Affine, hyper.ColourJitter])
def test_draws_are_the_same_for_each_call_and_each_example(make):
    model = partnets.partition(averaged(make()), PROPORTIONS)
    network = partnets.finalize(model, "deploy", draws=3, seed=1)
    x = torch.rand(5, 3, 8, 8)
    assert torch.equal(network(x), network(x))
    torch.testing.assert_close(network(x)[[3, 1]], network(x[[3, 1]]))
    points = 2 * torch.quasirandom.SobolEngine(len(model.augmentation.names), scramble=True, seed=0).draw(3) - 1
    network.augmentation = model.augmentation.fixed(points)
    each = [model.network(model.augmentation.transform(x, point.expand(5, -1))) for point in points]
    torch.testing.assert_close(network(x), torch.stack(each).mean(0))


class Noise(hyper.Hyperparameter):
    """A user-defined hyperparameter without to_torch."""

    def __init__(self):
        super().__init__()
        self.factor = hyper.Learned(2.0, hyper.positive)

    def forward(self, x):
        return x + self.factor() * torch.randn_like(x)


class Doubled(hyper.InputMask):
    """A subclass for which the inherited to_torch would be wrong."""

    def forward(self, x):
        return 2 * x * self.probability()


class Flip(hyper.Affine):
    def forward(self, x):
        return super().forward(x.flip(3))


def hooked(module):
    module.register_forward_hook(lambda module, inputs, output: -output)
    return module


class Crop(nn.Module):
    def forward(self, x):
        return x


class Silenced(Noise):
    def to_torch(self):
        return nn.Identity()


@pytest.mark.parametrize(
    ("model", "draws", "messages"),
    [
        (
            lambda: nn.ModuleList([Noise(), Doubled(4), hyper.Hyperparameter()]),
            0,
            [
                "  0: this Noise has a forward() of its own, but no to_torch(); give its class a to_torch()",
                "  1: this Doubled has a forward() of its own",
                "  2: this Hyperparameter has no to_torch()",
            ],
        ),
        (
            lambda: averaged(nn.Sequential(Crop(), hyper.Affine(), Noise())),
            0,
            ["augmentation.0: this Crop may draw", "augmentation.2: this Noise has a forward()"],
        ),
        (lambda: nn.Sequential(hyper.Affine(), averaged(hyper.Affine())), 2, ["  0: this Affine is outside of"]),
        (lambda: averaged(Flip()), 2, ["augmentation: this Flip has a forward() of its own"]),
        (lambda: averaged(Flip()), 0, ["augmentation: this Flip has a forward() of its own"]),
        (lambda: nn.Sequential(hooked(hyper.InputMask(4))), 0, ["  0: this InputMask has forward hooks"]),
        (lambda: hooked(averaged(hyper.Affine())), 0, ["the model itself: this Averaged has forward hooks"]),
        (lambda: averaged(hooked(hyper.Affine())), 2, ["augmentation: this Affine has forward hooks"]),
        (lambda: nn.ModuleList([hyper.Learned(0.5, hyper.positive)]), 0, ["  0: derive the module that has this"]),
        (lambda: nn.Linear(4, 3), 2, ["draws=2, but this Linear has no hyper.Averaged"]),
        (lambda: nn.Linear(4, 3), -1, ["draws=-1"]),
        (lambda: partnets.finalize(averaged(hyper.Affine()), "deploy", draws=2), 2, ["is deployed already"]),
    ],
)
def test_modules_that_cannot_be_deployed_are_named(model, draws, messages):
    model = model()
    before = copy.deepcopy(model)
    with pytest.raises(ValueError) as raised:
        partnets.finalize(model, "deploy", draws=draws)
    assert all(message in str(raised.value) for message in messages)
    assert repr(model) == repr(before)


def test_a_users_to_torch_method_takes_precedence():
    network = partnets.finalize(nn.Sequential(Silenced(), nn.Linear(4, 3)), "deploy")
    assert named(network) == ["Identity", "Linear"]
