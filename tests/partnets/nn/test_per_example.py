"""Per-example subnetworks: one call computes several subnetworks, and nothing passes between them."""

import copy
from collections import namedtuple

import numpy
import pytest
import torch
from small_network import perturbed
from torch import nn
from torch.utils.checkpoint import checkpoint

import partnets
from partnets import hyper
from partnets.subnetworks.parameters import partitioned_parameters
from partnets.subnetworks.state import num_partitions

PROPORTIONS = (0.5, 0.25, 0.25)
ACTIVE = torch.tensor([3, 1, 2, 1, 3, 2, 1, 1])
UPDATE = torch.tensor([3, 1, 2, 0, 0, 2, 1, 0])
Pair = namedtuple("Pair", "scores features")
# A tensor that a model keeps, with as many rows as a group has examples.
PROTOTYPES = torch.ones(2, 3)


class Network(nn.Module):
    """A model with convolutions, a norm and ψ that returns a named tuple."""

    def __init__(self, norm):
        super().__init__()
        self.mask = hyper.InputMask(36, temperature=0.7)
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3), norm, nn.GELU(), nn.Flatten(), nn.Linear(128, 8))
        self.scores = nn.Linear(8, 3)

    def forward(self, x, *, scale=1.0):
        x = self.mask(x.flatten(1)).view_as(x)
        features = self.features(x).relu()
        return Pair(scale * self.scores(features), features)


def network(scheme="weight", norm=None):
    torch.manual_seed(0)
    dense = Network(norm or nn.GroupNorm(4, 8)).double()
    options = {"example": images()} if scheme == "nested" else {}
    model = perturbed(partnets.partition(dense, PROPORTIONS, scheme=scheme, **options).train(), 0.1)
    model.mask.eval()  # no noise, so that passes can be compared
    return model


def images(count=8):
    return torch.randn(count, 1, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def losses(output):
    return output.scores.square().sum(1) + output.features.sin().sum(1)


def gradients(model):
    """Return the step of each partition, and the gradients of ψ."""
    found = {}
    for i, one in enumerate(partitioned_parameters(model)):
        for k in range(1, num_partitions(model) + 1):
            if (grad := one.gradient(k)) is not None:
                found[i, k] = (grad if one.is_vector else grad[one.partition.mask(k)]).clone()
    psi = enumerate(hyper.hyperparameters(model))
    return found | {("ψ", i): parameter.grad.clone() for i, parameter in psi if parameter.grad is not None}


@pytest.mark.cases(usual=3)
@pytest.mark.parametrize("norm", [nn.GroupNorm(4, 8), nn.BatchNorm2d(8)], ids=["GroupNorm", "BatchNorm"])
@pytest.mark.parametrize("scheme", ["weight", "node", "nested"])
@pytest.mark.parametrize("order", [slice(None), ACTIVE.argsort(stable=True)], ids=["mixed", "sorted"])
def test_a_mixed_batch_has_the_outputs_gradients_and_statistics_of_separate_passes(scheme, order, norm):
    model, active, update, x = network(scheme, copy.deepcopy(norm)), ACTIVE[order], UPDATE[order], images()
    mixed = copy.deepcopy(model)
    expected = [None] * len(x)
    for k in range(1, 4):
        for learns in range(k + 1):
            rows = ((active == k) & (update == learns)).nonzero()[:, 0]
            if len(rows):
                with partnets.subnetwork(model, active=k, update=learns or None):
                    output = model(x[rows], scale=2.0)
                    losses(output).sum().backward()
                output = Pair(*(part.detach() for part in output))
                for row, scores, features in zip(rows, *output, strict=True):
                    expected[row] = torch.cat([scores, features])
    with partnets.subnetwork(mixed, active=active, update=update):
        output = mixed(x, scale=2.0)
        losses(output).sum().backward()
    torch.testing.assert_close(torch.cat(output, 1), torch.stack(expected), rtol=1e-12, atol=1e-12)
    assert isinstance(output, Pair)
    torch.testing.assert_close(gradients(mixed), gradients(model), rtol=1e-12, atol=1e-12)
    assert len(gradients(model)) == 3 * 8 + 1
    torch.testing.assert_close(mixed.state_dict(), model.state_dict(), rtol=1e-12, atol=1e-12)


@pytest.mark.cases(usual=5)
@pytest.mark.parametrize(
    ("active", "update", "message"),
    [
        (torch.tensor([1, 4]), None, "active of example 1 is 4; pass 1..3"),
        (torch.tensor([0, 1]), None, "active of example 0 is 0"),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), "update of example 1 is 3; pass 1..2"),
        (torch.tensor([1, 2]), 2, "update of example 0 is 2; pass 1..1"),
        (torch.tensor([1, 2]), torch.tensor([-1, 1]), "update of example 0 is -1"),
        (torch.tensor([1, 2]), torch.tensor([1]), "active is of 2 examples and update of 1"),
        (torch.tensor([1.0, 2.0]), None, "active has the shape .2,. and torch.float32; pass a tensor .N. of whole"),
        (torch.tensor([True, True]), None, "torch.bool"),
        (torch.tensor([[1, 2]]), None, r"the shape \(1, 2\)"),
        (torch.tensor([1, 2]), "all", "update is 'all'"),
        (torch.tensor([1, 2]), True, "update is True"),
    ],
)
def test_invalid_active_and_update_raise_before_any_change(active, update, message):
    model = network()
    with pytest.raises(ValueError, match=message), partnets.subnetwork(model, active=active, update=update):
        pass
    assert "forward" not in vars(model)


class Gives(nn.Module):
    def __init__(self, give):
        super().__init__()
        self.layer, self.give = nn.Linear(2, 2), give

    def forward(self, x, *rest):
        return self.give(self.layer(x))


@pytest.mark.parametrize(
    ("give", "message"),
    [
        (lambda y: {"y": y, "loss": y.mean()}, r"a part of shape \(\)"),
        (lambda y: y.T, r"a part of shape \(2, 1\) for 1 examples"),
        (lambda y: y @ y.T, r"a part of shapes \(1, 1\), \(2, 2\) for the groups"),
        (lambda y: (y, len(y)), "a part of type int"),
        (lambda y: (y, object()), "a part of type object"),
        (lambda y: (y, PROTOTYPES), "of all groups"),
        (lambda y: [y] * len(y), "other parts"),
    ],
)
def test_outputs_that_are_not_of_examples_are_refused(give, message):
    model = partnets.partition(Gives(give), (0.5, 0.5))
    with (
        partnets.subnetwork(model, active=torch.tensor([1, 2, 2])),
        pytest.raises(ValueError, match=message),
    ):
        model(torch.ones(3, 2))


def test_inputs_without_a_row_for_each_example_are_refused_or_shared():
    model = network()
    with partnets.subnetwork(model, active=ACTIVE), pytest.raises(ValueError, match="no input has 8 rows"):
        model(images(5))
    model = partnets.partition(Gives(lambda y: y), (0.5, 0.5))
    with partnets.subnetwork(model, active=torch.tensor([1, 2, 2])), pytest.raises(ValueError, match="a list of 3, as"):
        model(torch.ones(3, 2), [0.1, 0.2, 0.3])
    of_each = [[0.1, 0.2, 0.3], {"lengths": [1, 2, 3]}, ("words", ["a", "b", "c"]), {"ids": numpy.arange(3)}, (1, 2, 3)]
    for given in of_each:
        with (
            partnets.subnetwork(model, active=torch.tensor([1, 2, 2])),
            pytest.raises(ValueError, match=r"(list|array|tuple) of 3"),
        ):
            model(torch.ones(3, 2), given)
    with partnets.subnetwork(model, active=torch.tensor([1, 2, 2])):
        assert model(torch.ones(3, 2), torch.ones(5), "a word", (1, 2), numpy.ones(())).shape == (3, 2)


def test_no_examples_and_those_of_one_subnetwork_are_one_call():
    model, x = network(), images()
    with partnets.subnetwork(model, active=ACTIVE[:0], update=UPDATE[:0]):
        assert model(x[:0]).scores.shape == (0, 3)
    with partnets.subnetwork(model, active=torch.full((8,), 2)), torch.no_grad():
        found = model(x)
    with partnets.subnetwork(model, active=2), torch.no_grad():
        assert all(map(torch.equal, found, model(x)))


@pytest.mark.full
def test_an_ensemble_computes_one_subnetwork_at_a_time():
    model = partnets.Ensemble([nn.Linear(3, 2) for _ in range(2)])
    with pytest.raises(ValueError, match="is an Ensemble"), partnets.subnetwork(model, torch.tensor([1, 2])):
        pass
    with partnets.subnetwork(model, 1):
        assert torch.equal(model(torch.ones(2, 3)), model.networks[0](torch.ones(2, 3)))


def test_a_layer_called_by_itself_raises():
    model = network()
    with partnets.subnetwork(model, active=ACTIVE), pytest.raises(RuntimeError, match="call the model that"):
        model.scores(torch.ones(8, 8, dtype=torch.float64))


@pytest.mark.full
def test_nested_contexts_and_errors_restore_the_model():
    model, x = network(), images()
    with partnets.subnetwork(model, active=1), torch.no_grad():
        expected = model(x)
    with torch.no_grad(), partnets.subnetwork(model, active=ACTIVE):
        mixed = model(x)
        with partnets.subnetwork(model, active=1):
            assert all(torch.allclose(*pair, rtol=1e-12, atol=1e-12) for pair in zip(model(x), expected, strict=True))
        with partnets.subnetwork(model, active=ACTIVE.flip(0)):
            flipped = model(x.flip(0))
        assert all(torch.equal(a, b.flip(0)) for a, b in zip(mixed, flipped, strict=True))
        assert all(map(torch.equal, model(x), mixed))
    with pytest.raises(ZeroDivisionError), partnets.subnetwork(model, active=ACTIVE):
        1 / 0  # noqa: B018
    with torch.no_grad():
        whole = model(x)
    assert "forward" not in vars(model) and not torch.allclose(whole.scores, mixed.scores)


def test_a_forward_that_is_wrapped_meanwhile_stays_and_computes_as_before():
    model, x = network(), images()
    with torch.no_grad():
        whole = model(x)
        with partnets.subnetwork(model, active=ACTIVE):
            mixed = model(x)
            forward = model.forward
            model.forward = wrapped = lambda x: Pair(*(2 * part for part in forward(x)))
            torch.testing.assert_close(model(x).scores, 2 * mixed.scores, rtol=1e-12, atol=1e-12)
        assert model.forward is wrapped
        torch.testing.assert_close(model(x).scores, 2 * whole.scores, rtol=1e-12, atol=1e-12)
        with partnets.subnetwork(model, active=ACTIVE):
            torch.testing.assert_close(model(x).scores, 2 * mixed.scores, rtol=1e-12, atol=1e-12)
        assert model.forward is wrapped


@pytest.mark.full
def test_a_compiled_model_computes_each_group_by_its_own_graph():
    model, x = network(), images()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad(), partnets.subnetwork(model, active=ACTIVE):
        expected = model(x)
        broken = torch.compile(model, backend="eager")(x)
    with torch.no_grad(), partnets.subnetwork(compiled, active=ACTIVE):
        found = compiled(x)
    for each in (found, broken):
        assert all(torch.allclose(*pair, rtol=1e-12, atol=1e-12) for pair in zip(each, expected, strict=True))


class Recomputed(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.first, self.second, self.options = nn.Linear(4, 4), nn.Linear(4, 2), options

    def forward(self, x):
        return self.second(checkpoint(self.first, x, **self.options).relu())


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_activation_checkpoints_are_refused_in_the_backward_pass(reentrant, inside):
    torch.manual_seed(0)
    model = partnets.partition(Recomputed(use_reentrant=reentrant), (0.5, 0.5)).double()
    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    message = "is in several subnetworks here" if inside else "computed by subnetwork"
    with partnets.subnetwork(model, active=torch.tensor([1, 2, 2, 1]), update=torch.tensor([1, 2, 1, 0])):
        loss = model(x).square().sum()
        if inside:
            with pytest.raises(RuntimeError, match=message):
                loss.backward()
    if not inside:
        with pytest.raises(RuntimeError, match=message):
            loss.backward()


class Penalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.penalty, self.head = nn.Linear(4, 4), hyper.ActivationPenalty(2.0), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.penalty(self.layer(x)))


def test_penalties_count_by_the_examples_that_partitions_learn_from():
    model, x = partnets.partition(Penalised(), (0.5, 0.5)).double(), torch.randn(4, 4, dtype=torch.float64)
    active, update = torch.tensor([1, 2, 2, 1]), torch.tensor([1, 2, 2, 0])
    with partnets.subnetwork(model, active=active, update=update), hyper.penalties() as found:
        model(x)
    expected = 0.0
    for k, rows in ((1, [0]), (2, [1, 2])):
        with partnets.subnetwork(model, active=k, update=k), hyper.penalties() as (apart):
            model(x[rows])
        expected += len(rows) / 4 * apart[0].mean()
    assert len(found) == 2
    torch.testing.assert_close(sum(term.mean() for term in found), expected, rtol=1e-12, atol=0)


def test_packed_sequences_are_refused():
    model = partnets.partition(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), (0.5, 0.5))
    model.forward = lambda packed: model[1](model[0](packed.data))
    packed = nn.utils.rnn.pack_sequence([torch.ones(4, 4)] * 4)
    each = torch.tensor([1, 1, 2, 2])
    message = r"PackedSequence, whose rows are words .* padded sequences"
    with partnets.subnetwork(model, each, each), pytest.raises(ValueError, match=message):
        model(packed)
