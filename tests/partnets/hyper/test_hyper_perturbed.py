"""Hyperparameters with different values for each example, and those that act only in training."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from partnets import hyper, stn

BATCH = 4

# A module and the shape of one example of its input.
EACH = {
    "ConcreteDropout": (lambda: hyper.ConcreteDropout(0.3), (6,)),
    "Dropout": (lambda: hyper.Dropout(0.3), (6, 2)),
    "InputMask": (lambda: hyper.InputMask(3), (2, 3)),
    "InputNoise": (lambda: hyper.InputNoise(0.3), (6,)),
    "Affine": (lambda: hyper.Affine(shear=None), (1, 5, 5)),
    "ImmerAffine": (lambda: hyper.ImmerAffine(rotation=20.0), (1, 5, 5)),
    "SchwobelAffine": (lambda: hyper.SchwobelAffine(), (1, 5, 5)),
    "ColourJitter": (lambda: hyper.ColourJitter(), (3, 4, 4)),
    "Cutout": (lambda: hyper.Cutout(1.5, 2.5), (1, 8, 8)),
    "InTraining": (lambda: hyper.InTraining(hyper.ColourJitter()), (3, 4, 4)),
}


@pytest.mark.parametrize("name", EACH)
def test_each_example_has_the_values_of_its_own(name):
    """Fix all noise to 0.3 of its range, so that only the values differ."""
    make, shape = EACH[name]
    module = make().train()
    vector = stn.HyperVector(module, centred=False)
    x = torch.randn(BATCH, *shape)
    values = vector.present().detach() + torch.randn(BATCH, vector.size)

    def compute(x, value):
        with vector.at(value), pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "rand", lambda *s, **_: torch.full(s[0] if isinstance(s[0], tuple | list) else s, 0.3))
            patch.setattr(torch, "randn_like", lambda x: torch.full_like(x, 0.3))
            patch.setattr(torch, "randint", lambda high, shape, **_: torch.full(shape, high // 2))
            return module(x)

    expected = torch.cat([compute(x[i : i + 1], values[i]) for i in range(BATCH)])
    torch.testing.assert_close(compute(x, values), expected)
    assert not torch.equal(compute(x, values), compute(x, values.roll(1, 0)))


def test_those_that_a_batch_shares_have_one_value():
    words = torch.randint(5, (BATCH, 3))
    for module, given in (
        (hyper.EmbeddingDropout(0.3), (torch.ones(BATCH, 3, 8), words)),
        (hyper.DropConnect(0.3), (torch.ones(3, 8),)),
    ):
        vector = stn.HyperVector(module)
        with vector.perturbed(BATCH):
            y = module(*given)
        assert len(y.unique()) <= 2
    embedded = hyper.EmbeddingDropout(0.5)(torch.ones(50, 3, 8), torch.randint(5, (50, 3)))
    assert embedded.flatten().unique().tolist() == [0.0, 2.0]


def test_a_word_is_dropped_in_all_its_places_and_the_draws_tell_nothing_of_the_words():
    dropout, left = hyper.EmbeddingDropout(0.5), []
    for words in (torch.randint(5, (50, 3)), torch.randint(900, (50, 3)), torch.zeros(50, 3, dtype=torch.long)):
        torch.manual_seed(0)
        kept = dropout(torch.ones(50, 3, 8), words)
        assert all(len(kept[words == word].unique()) == 1 for word in words.unique())
        left.append(torch.rand(1))
    assert left[0] == left[1] == left[2]
    dropped = [dropout(torch.ones(1, 200, 1), torch.arange(200)[None]).eq(0).double().mean() for _ in range(50)]
    assert abs(sum(dropped) / 50 - 0.5) < 0.03


def test_a_module_that_asks_for_one_value_gets_one_or_an_error():
    class Shared(hyper.Hyperparameter):
        def __init__(self):
            super().__init__()
            self.strength = hyper.Learned(0.5, hyper.positive)

        def forward(self, x):
            return x * self.strength()

    class Each(Shared):
        per_example = True

    x = torch.ones(BATCH, 2)
    shared = Shared()
    with stn.HyperVector(shared).perturbed(BATCH):
        assert len(shared(x).unique()) == 1
    each = Each()
    with stn.HyperVector(each).perturbed(BATCH), pytest.raises(RuntimeError, match=r"self\.rate\(x\)"):
        each(x)
    with stn.HyperVector(each, per_example=False).perturbed(BATCH):
        assert len(each(x).unique()) == 1


def test_nothing_is_perturbed_outside_in_copies_and_in_other_threads():
    import threading

    dropout = hyper.Dropout(0.25)
    vector = stn.HyperVector(dropout)
    seen = {}

    def look(name, module=dropout):
        seen[name] = module.rate(torch.ones(BATCH, 1)).shape

    with vector.perturbed(BATCH):
        look("inside")
        look("copy", copy.deepcopy(dropout))
        thread = threading.Thread(target=look, args=("thread",))
        thread.start()
        thread.join()
    look("outside")
    assert seen == {"inside": (BATCH, 1), "copy": (), "thread": (), "outside": ()}
    assert dropout.values() == {"rate": 0.25}


def test_dropout_rates_and_masks():
    x = torch.ones(2000, 4, 3)
    for rate in (0.1, 0.6):
        y = hyper.Dropout(rate)(x)
        assert y.unique().tolist() == pytest.approx([0.0, 1 / (1 - rate)])
        assert (y == 0).float().mean() == pytest.approx(rate, abs=0.02)
        locked = hyper.Dropout(rate, same_along=(1,))(x)
        assert torch.equal(locked, locked[:, :1].expand_as(locked)) and len(locked.unique()) == 2
    module = hyper.Dropout(0.5)
    (module(x).sum() + 0 * module.rate.raw).backward()
    assert not module.rate.raw.grad.any()
    assert hyper.Dropout(0.5, same_along=(2, 3)).to_ordinary().__class__ is nn.Dropout2d
    with pytest.raises(ValueError, match="same_along"):
        hyper.Dropout(0.5, same_along=(3,))(x)


def test_cutout_blanks_whole_squares():
    x = torch.ones(500, 2, 16, 16)
    blank = hyper.Cutout(1.9, 3.2)(x) == 0
    assert torch.equal(blank[:, 0], blank[:, 1])
    counts = blank[:, 0].sum((1, 2))
    assert counts.max() == 9 and counts.min() >= 4  # one 3 x 3 square, smaller at a border
    rows, cols = blank[:, 0].any(2).sum(1), blank[:, 0].any(1).sum(1)
    assert torch.equal(rows * cols, counts)
    assert not (hyper.Cutout(0.9, 3.2)(x) == 0).any() and not (hyper.Cutout(2.2, 0.9)(x) == 0).any()
    two = (hyper.Cutout(2.2, 3.2)(x) == 0)[:, 0].sum((1, 2))
    assert two.max() > 9 and two.max() <= 18
    y = hyper.Cutout(1.5, 2.5)(x.requires_grad_())
    assert y.grad_fn is not None and not (hyper.Cutout().eval()(x) == 0).any()
    with pytest.raises(ValueError, match="images"):
        hyper.Cutout()(torch.ones(3, 4))
    with pytest.raises(ValueError, match="holes=5"):
        hyper.Cutout(holes=5.0)


def test_penalties():
    x = torch.randn(BATCH, 5, 3)
    decay, activation = hyper.ActivationPenalty(0.5), hyper.TemporalActivationPenalty(2.0)
    with hyper.penalties() as found:
        assert activation(decay(x)) is x
    torch.testing.assert_close(found[0].mean(), 0.5 * x.square().mean())
    torch.testing.assert_close(found[1].mean(), 2 * (x[:, 1:] - x[:, :-1]).square().mean())
    vector = stn.HyperVector([decay, activation], centred=False)
    values = vector.present().detach() + torch.randn(BATCH, 2)
    with hyper.penalties() as found, vector.at(values):
        activation(decay(x))
    alphas, betas = F.softplus(values).unbind(1)
    torch.testing.assert_close(found[0].mean((1, 2)), alphas * x.square().mean((1, 2)))
    torch.testing.assert_close(found[1].mean((1, 2)), betas * x.diff(dim=1).square().mean((1, 2)))
    with hyper.penalties() as found, torch.no_grad():
        decay(x)
    assert found == []
    with hyper.penalties() as found:
        decay.eval()(x)
    assert found == []
    with pytest.raises(RuntimeError, match="would be lost"):
        activation(x)
    with hyper.penalties() as found:
        activation(x[:, :1])
    assert found[0].mean() == 0


def test_weight_decay_is_of_each_examples_weights():
    network = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2, bias=False))
    decay = hyper.WeightDecay(network, 0.01)
    model = nn.Sequential(network, decay).double()
    stn.convert(model, decay, centred=False)
    value = (decay.decay.raw.detach() + torch.randn(BATCH, 1).double()).requires_grad_()
    vector = network[0].vector
    with hyper.penalties() as found, vector.at(value):
        model(torch.randn(BATCH, 4).double())
    expected = []
    for each in value:
        weights = [p.weight + (p.weight_scale @ each)[:, None] * p.hyper_weight for p in (network[0], network[2])]
        strength = decay.decay.range.transform(each[0])
        expected.append(strength * sum(weight.square().sum() for weight in weights) / 2)
    torch.testing.assert_close(found[0], torch.stack(expected))
    with pytest.raises(ValueError, match="no weights"):
        hyper.WeightDecay(nn.LayerNorm(3))


def test_label_smoothing_is_torchs():
    logits, y = torch.randn(BATCH, 5, 3), torch.randint(5, (BATCH, 3))
    y[0, 1] = -100
    smoothing, counts = hyper.LabelSmoothing(0.3), y != -100
    losses = smoothing(logits, y)
    expected = F.cross_entropy(logits, y, label_smoothing=0.3, reduction="none")
    torch.testing.assert_close(losses, expected[counts])
    assert smoothing(logits) is logits
    vector = stn.HyperVector(smoothing, centred=False)
    values = torch.randn(BATCH, 1)
    with vector.at(values):
        losses = smoothing(logits, y)
    rates, expected = smoothing.smoothing.range.transform(values[:, 0]).tolist(), []
    for i in range(BATCH):
        expected.append(F.cross_entropy(logits[i].T, y[i], label_smoothing=rates[i], reduction="none"))
    torch.testing.assert_close(losses, torch.stack(expected)[counts])


@pytest.mark.parametrize(
    "kind", [hyper.Dropout, hyper.EmbeddingDropout, hyper.DropConnect, hyper.LabelSmoothing, hyper.ConcreteDropout]
)
def test_rates_are_inside_their_range(kind):
    with pytest.raises(ValueError, match=r"=0.95; pass a number between 0 and 0.9"):
        kind(0.95, range=hyper.interval(0, 0.9))
    with pytest.raises(ValueError, match="pass one inside"):
        kind(0.5, range=hyper.interval(-1, 1))


def test_values_can_be_assigned():
    jitter = hyper.ColourJitter()
    jitter.widths.assign([0.2, 0.3, 0.4, 20.0])
    assert jitter.values() == pytest.approx({"brightness": 0.2, "contrast": 0.3, "saturation": 0.4, "hue": 20.0})
    before = jitter.values()
    for wrong in ([0.2], [0.2, 0.3, 0.4, -1.0], 0.5):
        with pytest.raises(ValueError, match="pass"):
            jitter.widths.assign(wrong)
    assert jitter.values() == before


def test_logarithmic_range():
    decay = hyper.Learned(1e-4, hyper.logarithmic(1e-6, 1e-2))
    assert decay().item() == pytest.approx(1e-4) and decay.raw.item() == pytest.approx(0, abs=1e-5)
    with pytest.raises(ValueError, match="positive"):
        hyper.logarithmic(0.0, 1.0)


@pytest.mark.parametrize("name", EACH)
def test_each_can_be_frozen(name):
    make, shape = EACH[name]
    module = make()
    model = nn.Sequential(module, nn.Flatten(), nn.LazyLinear(3))
    x = torch.randn(BATCH, *shape)
    model.eval()(x)
    stn.convert(model, module, per_example=False)
    frozen = stn.freeze(model)
    if name not in ("Affine", "ImmerAffine", "SchwobelAffine", "ColourJitter"):  # these also draw in evaluation
        torch.testing.assert_close(frozen(x), model(x))
    assert not list(frozen[0].parameters())
