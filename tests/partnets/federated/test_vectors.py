"""The vectors that are sent: every trainable entry once, and a fingerprint that both sides must share."""

import pytest
import torch
from clients import Count, client, make_model, make_undivided
from torch import nn

import partnets
from partnets import hyper
from partnets.federated.vectors import Vectors
from partnets.subnetworks.parameters import names_of, partitioned_parameters
from partnets.subnetworks.rules import RULES


def learned(model, psi):
    """Return the tensors that partitions and ψ learn, by path: a bias by its rows."""
    owned = partitioned_parameters(model)
    found = {name: one.stored.detach() for one, name in names_of(model, owned).items()}
    return found | {name: parameter.detach() for name, parameter in psi.named_parameters(prefix="0")}


def test_each_entry_that_learns_is_in_one_vector():
    model, psi = make_model()
    vectors = Vectors(model, psi)
    assert list(vectors.lengths) == ["w1.float32", "w2.float32", "w3.float32", "hyper.float32"]
    assert sum(vectors.lengths.values()) == sum(tensor.numel() for tensor in learned(model, psi).values())
    numbered = {name: torch.arange(length) + 1000.0 * i for i, (name, length) in enumerate(vectors.lengths.items())}
    vectors.write(numbered)
    entries = torch.cat([tensor.flatten() for tensor in learned(model, psi).values()])
    assert torch.equal(entries.sort().values, torch.cat([*numbered.values()]).sort().values)
    assert all(torch.equal(vector, numbered[name]) for name, vector in vectors.read().items())
    assert vectors.read([]) == {}


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_partitions_vector_changes_only_that_partition(k):
    model, psi = make_model()
    vectors, before = Vectors(model, psi), {name: one.clone() for name, one in learned(model, psi).items()}
    vectors.write({name: torch.full((vectors.lengths[name],), 7.0) for name in vectors.of_partition(k)})
    for name, tensor in learned(model, psi).items():
        changed = tensor != before[name]
        if name in ("1.weight", "5.weight"):
            assert torch.equal(changed, partnets.partitions(model)[name].mask(k))
        elif not name.startswith("0."):
            rows = torch.zeros_like(changed)
            rows[k - 1] = True
            assert torch.equal(changed, rows)
        else:
            assert not changed.any()


def test_subnetworks_compute_with_the_written_vectors():
    """Check that biases and gains are made of the vectors that were written, outside and in each subnetwork."""
    model, psi = make_model()
    vectors = Vectors(model, psi)
    vectors.write({name: torch.randn(length) for name, length in vectors.lengths.items()})
    with partnets.subnetwork(model, 2):
        torch.testing.assert_close(model[1].bias.detach(), model[1].bias_rows[:2].sum(0))
        torch.testing.assert_close(model[2].weight.detach(), model[2].weight_rows[:2].prod(0))
    torch.testing.assert_close(model[1].bias.detach(), model[1].bias_rows.sum(0))
    torch.testing.assert_close(model[2].weight.detach(), model[2].weight_rows.prod(0))


def test_inside_of_a_subnetwork_nothing_is_read_or_written():
    model, psi = make_model()
    vectors = Vectors(model, psi)
    before = vectors.read()
    with partnets.subnetwork(model, 1):
        for act in (vectors.read, lambda: vectors.write(before)):
            with pytest.raises(RuntimeError, match=r"read and write its vectors outside"):
                act()
    assert all(torch.equal(vector, before[name]) for name, vector in vectors.read().items())


def test_written_gradients_are_those_of_a_step():
    """Compare with a step by the gradients of a backward pass."""
    (first, psi), (second, other) = make_model(), make_model()
    optimizers = [partnets.optim.SGD(model, lr=0.1) for model in (first, second)]
    one, two = Vectors(first, psi), Vectors(second, other)
    for vectors in (one, two):
        vectors.write({name: vector + 0.1 for name, vector in vectors.read().items()})
    before = one.read()
    with partnets.subnetwork(first, 3, 2):
        first(torch.ones(2, 6)).square().sum().backward()
    given = {name: torch.randn(length) for name, length in two.lengths.items()}
    two.write_gradients(given)
    assert all(torch.equal(vector, given[name]) for name, vector in two.read_gradients(two.lengths).items())
    two.write_gradients(one.read_gradients(one.lengths))
    two.write_gradients(one.read_gradients(one.of_partition(3)))  # of which nothing is left in a step of partition 2
    two.write_gradients(one.read_gradients(one.of_partition(2)))
    for optimizer in optimizers:
        optimizer.step(update=2)
    after = one.read()
    assert all(torch.equal(vector, after[name]) for name, vector in two.read().items())
    assert [name for name in before if not torch.equal(before[name], after[name])] == ["w2.float32"]


def test_a_dense_model_has_one_vector_and_one_of_two_dtypes_two_for_each_partition():
    model, _ = make_undivided()
    assert Vectors(model).lengths == {"w1.float32": sum(parameter.numel() for parameter in model.parameters())}
    model, psi = make_model()
    model[1].to(torch.bfloat16)
    vectors = Vectors(model, psi)
    assert vectors.of_partition(2) == ["w2.bfloat16", "w2.float32"]
    assert vectors.read(["w2.bfloat16"])["w2.bfloat16"].dtype == torch.bfloat16


CHANGES = {
    "another map": {"seed": 1},
    "other proportions": {"proportions": (0.6, 0.2, 0.2)},
    "fewer partitions": {"proportions": (0.5, 0.5)},
    "other default values": {"defaults": "zero"},
    "stored default values": {"defaults": "stored"},
    "another buffer": {"scale": 2.0},
    "another buffer that is not saved": {"scale": 2.0, "persistent": False},
    "another frozen weight": {"frozen": 2.0},
    "another activation": {"activation": nn.Tanh},
    "another eps": {"eps": 0.1},
    "other groups": {"groups": 2},
    "another stride": {"stride": 2},
    "another padding mode": {"padding_mode": "circular"},
    "other heads": {"heads": 4},
    "another extra state": {"state": [1, 2]},
}


class Told(nn.Module):
    """A module with extra state, besides an object with an address in its text."""

    def __init__(self, state):
        super().__init__()
        self.state = state, object()

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        self.state = state


def changed(
    proportions=(0.5, 0.3, 0.2), seed=0, scale=1.0, persistent=True, frozen=1.0, activation=nn.GELU, eps=1e-5,
    groups=1, stride=1, padding_mode="zeros", heads=2, state=None, learned=0.0, **options,
):  # fmt: skip
    torch.manual_seed(0)
    network = nn.Sequential(hyper.InputMask(6), nn.Linear(6, 8), nn.LayerNorm(8, eps), activation(), nn.Linear(8, 3))
    network.extend([nn.GroupNorm(groups, 4), nn.Conv1d(4, 4, 3, stride, 1, padding_mode=padding_mode)])
    network.extend([nn.MultiheadAttention(8, heads), Told(state), nn.Linear(2, 2).requires_grad_(False)])
    network.register_buffer("scale", torch.tensor(scale), persistent=persistent)
    nn.init.constant_(network[9].weight, frozen)
    vectors = Vectors(partnets.partition(network, proportions, seed=seed, **options), network[0])
    if not learned:
        return vectors
    vectors.write({name: vector + learned for name, vector in vectors.read().items()})
    return Vectors(network, network[0])


@pytest.mark.parametrize("change", CHANGES)
def test_another_model_has_another_fingerprint(change):
    assert changed().fingerprint == changed().fingerprint != changed(**CHANGES[change]).fingerprint


def test_a_model_that_has_learned_keeps_its_fingerprint():
    assert changed(learned=1.0).fingerprint == changed().fingerprint
    one = client(1)
    one.train(one.vectors.read(), 1)
    assert Vectors(one.model, one.model[0]).fingerprint == one.vectors.fingerprint


def test_parameters_that_are_multiplied_differ_from_those_that_are_added():
    class Gain(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(4))

    class Bias(Gain):
        pass

    partnets.register(Gain, partnets.Rule(scales=("gain",)))
    partnets.register(Bias, partnets.Rule())
    Bias.__qualname__ = Gain.__qualname__
    try:
        found = [Vectors(partnets.partition(kind(), (0.5, 0.5))).fingerprint for kind in (Gain, Bias, Gain)]
    finally:
        del RULES[Gain], RULES[Bias]
    assert found[0] == found[2] != found[1]


def test_the_vectors_of_a_bias_that_two_layers_share_do_not_count():
    """Check that learned tensors are in no fingerprint, under any name."""
    found = []
    for number in (0.0, 1.0):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        model[1].weight, model[1].bias = model[0].weight, model[0].bias
        vectors = Vectors(partnets.partition(model, (0.5, 0.5), defaults="zero"))
        vectors.write({name: torch.full_like(vector, number) for name, vector in vectors.read().items()})
        found.append(Vectors(model))
    assert found[0].fingerprint == found[1].fingerprint
    assert sum(found[0].lengths.values()) == 16 + 2 * 4


def test_a_frozen_skipped_norm_is_accepted():
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(18, 2))
    network[1].requires_grad_(False)
    assert Vectors(partnets.partition(network, (0.5, 0.5), skip="1")).num_partitions == 2


def test_a_model_that_was_moved_or_loaded_keeps_its_vectors():
    """Check moving and loading, which replace the layers' partitions by equal ones."""
    model = partnets.partition(nn.Linear(4, 3), (0.5, 0.5), seed=0)
    vectors = Vectors(model)
    model.load_state_dict(model.state_dict())
    model.to("cpu")
    values = {name: torch.full_like(vector, 2.0) for name, vector in vectors.read().items()}
    vectors.write(values)
    assert all((vector == 2).all() for vector in vectors.read().values())


def with_a_norm():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(18, 2))


def with_a_stranger():
    model, _ = make_model()
    model.register_parameter("stranger", nn.Parameter(torch.ones(2)))
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Vectors(partnets.partition(with_a_norm(), (0.5, 0.5))), r"BatchNorm2d\).*Normalise by GroupNorm"),
        (lambda: Vectors(partnets.Ensemble([with_a_norm()])), r"BatchNorm2d\).*Normalise by GroupNorm"),
        (
            lambda: Vectors(partnets.partition(nn.Sequential(nn.Linear(4, 3), Count()), (0.5, 0.5), stateful=["1"])),
            r"1 has per-subnetwork buffers.* leave it out of the model",
        ),
        (lambda: Vectors(with_a_stranger()), "stranger would learn from every chunk"),
        (lambda: Vectors(make_model()[0], hyper.InputMask(6)), "not inside the model"),
    ],
)
def test_models_with_state_that_is_not_sent_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
