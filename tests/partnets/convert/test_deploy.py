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


class Scale(hyper.Hyperparameter):
    """A user-defined hyperparameter without to_ordinary."""

    def __init__(self):
        super().__init__()
        self.factor = hyper.Learned(2.0, hyper.positive)
        self.offset = nn.Parameter(torch.ones(()))
        self.register_buffer("sign", torch.tensor(-1.0))
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x) * self.factor() + self.offset * self.sign


@pytest.mark.parametrize("name", ["images", "masked", "features"])
def test_it_is_of_torch_alone_and_gives_the_same_bits_each_time(name):
    network, (x, _) = deployed(name)
    modules = {type(module).__module__.split(".")[0] for module in network.modules()}
    assert modules == {"torch"} and not any(module.training for module in network.modules())
    pickled = pickle.dumps(network)
    assert b"partnets" not in pickled and b"partkernels" not in pickled
    assert torch.equal(network(x), network(x))
    torch.testing.assert_close(pickle.loads(pickled)(x), network(x))


def test_dropout_has_its_rate_a_mask_its_mean_and_an_extractor_is_itself():
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


def test_a_hyperparameter_of_ones_own_is_traced_with_its_numbers_as_constants():
    model = partnets.partition(nn.Sequential(Scale(), nn.Linear(4, 3)), PROPORTIONS)
    network, x = partnets.finalize(model, "deploy"), torch.randn(5, 4)
    torch.testing.assert_close(network(x), model.eval()(x))
    assert set(dict(network[0].named_buffers())) == {"factor", "offset", "sign"}
    assert torch.export.export(network, (x,)).module()(x).shape == (5, 3)


class Switched(hyper.Hyperparameter):
    def __init__(self):
        super().__init__()
        self.factor = hyper.Learned(3.0, hyper.positive)

    def forward(self, x, off=None):
        return x if off is not None else x * self.factor()


@pytest.mark.parametrize(
    "make",
    [
        hyper.LabelSmoothing, Switched, lambda: hyper.ClassWeights(3), lambda: hyper.SourceWeights(2),
        lambda: hyper.ExampleWeights(5), hyper.ExampleWeights,
        lambda: hyper.LossWeights(lambda output, y: (output.sum(), output.mean()), ("sum", "mean")),
    ],
)  # fmt: skip
def test_what_takes_targets_as_well_is_deployed_as_what_it_does_without(make):
    model = partnets.partition(nn.Sequential(nn.Linear(4, 3), make()), (0.5, 0.5))
    network, x = partnets.finalize(model, "deploy"), torch.randn(2, 4)
    torch.testing.assert_close(network(x), model.eval()(x))
    pickle.loads(pickle.dumps(network))


def test_a_hyperparameter_that_others_read_keeps_its_numbers_for_them():
    class Smoothed(nn.Module):
        def __init__(self):
            super().__init__()
            self.smoothing = hyper.Hyperparameter()
            self.smoothing.amount = hyper.Learned(0.25, hyper.probability)
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            return self.layer(x) * self.smoothing.amount()

    network = partnets.finalize(model := partnets.partition(Smoothed(), PROPORTIONS), "deploy")
    assert type(network.smoothing) is nn.Module and network.smoothing.amount() == 0.25
    torch.testing.assert_close(network(torch.ones(2, 4)), model(torch.ones(2, 4)))


@pytest.mark.parametrize("average", ["logits", "log_probabilities", "probabilities"])
def test_without_draws_the_network_sees_each_example_as_it_is(average):
    augmentation = nn.Sequential(partnets.data.ToFloat(), hyper.Affine(), hyper.ColourJitter())
    network = nn.Sequential(nn.Flatten(), nn.Linear(192, 3))
    model = partnets.partition(hyper.Averaged(augmentation, network, average=average), PROPORTIONS)
    deployed = partnets.finalize(model, "deploy")
    x = torch.randint(256, (4, 3, 8, 8), dtype=torch.uint8)
    expected = network(x / 255)
    torch.testing.assert_close(deployed(x), expected if average == "logits" else expected.log_softmax(1))
    torch.testing.assert_close(deployed(x / 255), deployed(x))
    with pytest.raises(AssertionError, match="uint8"):
        deployed(x.int())
    with pytest.raises(RuntimeError):
        partnets.data.Normalise((0.5,) * 3, (0.2,) * 3).to_ordinary()(torch.rand(2, 1, 4, 4))


def averaged(augmentation):
    return hyper.Averaged(
        augmentation, nn.Sequential(nn.Flatten(), nn.Linear(192, 3)), samples=2, average="probabilities"
    )


AUGMENTATIONS = [hyper.Affine, hyper.ImmerAffine, hyper.SchwobelAffine, hyper.ColourJitter]


@pytest.mark.parametrize("make", AUGMENTATIONS)
def test_draws_are_the_same_for_each_call_and_each_example(make):
    model = partnets.partition(averaged(make()), PROPORTIONS)
    network = partnets.finalize(model, "deploy", draws=3, seed=1)
    x = torch.rand(5, 3, 8, 8)
    assert torch.equal(network(x), network(x))
    torch.testing.assert_close(network(x)[[3, 1]], network(x[[3, 1]]))
    points = 2 * torch.quasirandom.SobolEngine(len(model.augmentation.names), scramble=True, seed=0).draw(3) - 1
    network.augmentation = model.augmentation.fixed(points)
    each = [model.network(model.augmentation.transform(x, point.expand(5, -1))).log_softmax(1) for point in points]
    torch.testing.assert_close(network(x), torch.stack(each).logsumexp(0) - torch.tensor(3.0).log())


class Noise(Scale):
    def forward(self, x):
        return x + self.factor() * torch.randn_like(x)


class Constant(Scale):
    def forward(self, x):
        return x + self.factor() * torch.randn(4)


class Branch(Scale):
    def forward(self, x):
        return x * self.factor() if x.sum() > 0 else x


class Doubled(hyper.InputMask):
    """A subclass for which the inherited to_ordinary would be wrong."""

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
    def to_ordinary(self):
        return nn.Identity()


@pytest.mark.parametrize(
    ("model", "draws", "messages"),
    [
        (
            lambda: nn.ModuleList([Noise(), Constant(), Branch()]),
            0,
            [
                "  0: this Noise draws random numbers in evaluation; give its class a to_ordinary()",
                "  1: this Constant draws random",
                "  2: torch.fx cannot trace this Branch",
            ],
        ),
        (
            lambda: averaged(nn.Sequential(Crop(), hyper.Affine(), Noise())),
            0,
            ["augmentation.0: this Crop may draw", "augmentation.2: this Noise draws"],
        ),
        (lambda: nn.Sequential(hyper.Affine(), averaged(hyper.Affine())), 2, ["  0: this Affine is outside of"]),
        (lambda: averaged(Flip()), 2, ["augmentation: this Flip has a forward() of its own"]),
        (lambda: averaged(Flip()), 0, ["augmentation: torch.fx cannot trace this Flip"]),
        (lambda: nn.Sequential(hooked(hyper.InputMask(4))), 0, ["  0: this InputMask has forward hooks"]),
        (lambda: hooked(averaged(hyper.Affine())), 0, ["the model itself: this Averaged has forward hooks"]),
        (lambda: averaged(hooked(hyper.Affine())), 2, ["augmentation: this Affine has forward hooks"]),
        (lambda: nn.Linear(4, 3), 2, ["draws=2, but this Linear has no hyper.Averaged"]),
        (lambda: nn.Linear(4, 3), -1, ["draws=-1"]),
        (lambda: partnets.finalize(averaged(hyper.Affine()), "deploy", draws=2), 2, ["is deployed already"]),
    ],
)
def test_what_cannot_be_deployed_is_named(model, draws, messages):
    model = model()
    before = copy.deepcopy(model)
    with pytest.raises(ValueError) as raised:
        partnets.finalize(model, "deploy", draws=draws)
    assert all(message in str(raised.value) for message in messages)
    assert repr(model) == repr(before)


def test_a_subclass_that_computes_something_else_is_not_taken_for_its_base():
    model, x = nn.Sequential(Doubled(4), nn.Linear(4, 3)), torch.randn(5, 4)
    torch.testing.assert_close(partnets.finalize(model, "deploy")(x), model(x))


def test_the_users_own_to_ordinary_decides():
    network = partnets.finalize(nn.Sequential(Silenced(), nn.Linear(4, 3)), "deploy")
    assert named(network) == ["Identity", "Linear"]
