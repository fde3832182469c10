"""Promises of all modules, wrong calls, and modules with few tests."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import partnets
from partnets import hyper, stn

BATCH = 4
AUGMENTATIONS = ("Affine", "ColourJitter")
# A module and the shape of one example of its input.
EACH = {
    "ConcreteDropout": (lambda: hyper.ConcreteDropout(0.3), (6,)),
    "Dropout": (lambda: hyper.Dropout(0.3), (6, 2)),
    "InputMask": (lambda: hyper.InputMask(3), (2, 3)),
    "InputNoise": (lambda: hyper.InputNoise(0.3), (6,)),
    "Temperature": (lambda: hyper.Temperature(2.0), (6,)),
    "Affine": (lambda: hyper.Affine(shear=None), (1, 5, 5)),
    "ColourJitter": (hyper.ColourJitter, (3, 4, 4)),
    "Cutout": (lambda: hyper.Cutout(1.5, 2.5), (1, 8, 8)),
    "InTraining": (lambda: hyper.InTraining(hyper.ColourJitter()), (3, 4, 4)),
}
every_module = pytest.mark.parametrize("name", EACH)


@every_module
def test_each_example_may_have_separate_values(name):
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


@every_module
def test_a_frozen_model_computes_the_same_and_has_no_hyperparameters(name):
    make, shape = EACH[name]
    model = nn.Sequential(make(), nn.Flatten(), nn.LazyLinear(3))
    x = torch.randn(BATCH, *shape)
    model.eval()(x)
    stn.convert(model, model[0], per_example=False)
    frozen = stn.freeze(model)
    if name not in AUGMENTATIONS:  # these also draw in evaluation
        torch.testing.assert_close(frozen(x), model(x))
    assert not list(frozen[0].parameters())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
@pytest.mark.parametrize("name", [*EACH, "Mixup"])
def test_integers_are_refused_by_modules_that_would_round_to_them(name, dtype):
    make, shape = {**EACH, "Mixup": (hyper.Mixup, (4,))}[name]
    if name in ("Cutout", "Temperature"):
        pytest.skip("rounds nothing")
    with pytest.raises(TypeError, match=rf"got {dtype}, and would round its results to whole numbers; pass x.float"):
        make()(torch.ones(BATCH, *shape, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_module
def test_parameters_stay_in_single_precision_in_a_model_of_a_lower_one(name, dtype):
    make, shape = EACH[name]
    module = make().to(dtype)
    result = module(torch.rand(BATCH, *shape, dtype=dtype, requires_grad=True))
    result.sum().backward()
    assert result.dtype == dtype and module.eval()(torch.rand(BATCH, *shape, dtype=dtype)).dtype == dtype
    for learned in (one for one in module.modules() if isinstance(one, hyper.Learned)):
        assert learned.raw.dtype == torch.float32
        assert learned.raw.grad is not None or name in ("Dropout", "Cutout")
    assert all(parameter.dtype == torch.float64 for parameter in module.double().parameters())


@every_module
def test_modules_can_be_made_without_memory(name):
    with torch.device("meta"):
        assert all(parameter.is_meta for parameter in EACH[name][0]().parameters())


@pytest.mark.parametrize("kind", [hyper.Affine, hyper.ColourJitter])
def test_no_images_become_no_images(kind):
    assert kind()(torch.zeros(0, 3, 8, 5)).shape == (0, 3, 8, 5)


def test_modules_that_a_batch_shares_have_one_value():
    given = torch.ones(BATCH, 3, 8), torch.randint(5, (BATCH, 3))
    for module, inputs in ((hyper.EmbeddingDropout(0.3), given), (hyper.DropConnect(0.3), (torch.ones(3, 8),))):
        with stn.HyperVector(module).perturbed(BATCH):
            assert len(module(*inputs).unique()) <= 2
    assert hyper.DropConnect().eval()(torch.zeros(3)).eq(1).all()


def rate(kind):
    return partial(kind, 0.95, range=hyper.interval(0, 0.9))


def outside(kind):
    return partial(kind, 0.5, range=hyper.interval(-1, 1))


RATES = (hyper.Dropout, hyper.EmbeddingDropout, hyper.DropConnect, hyper.LabelSmoothing, hyper.ConcreteDropout)
TURN, ORDER, LENGTHS = hyper.interval(0, math.pi), "the lower one first", "as many units and names as values"
X, Y = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
SOURCES = (torch.tensor([[0], [1], [0], [1]]), torch.tensor([0.0, 1.0, 0.0, 1.0]), [0, 1, 0, 1])
WRONG = [
    (lambda: hyper.Learned(200.0, TURN, unit=math.pi / 180), r"=200\.0; pass .* between 0 and 180"),
    (lambda: hyper.interval(1.0, 1.0), ORDER),
    (lambda: hyper.interval(0.0, math.inf), ORDER),
    (lambda: hyper.interval(math.nan, 1.0), ORDER),
    (lambda: hyper.logarithmic(2.0, 1.0), ORDER),
    (lambda: hyper.logarithmic(0.0, 1.0), "positive"),
    (lambda: hyper.Learned([1.0], hyper.real, names="ab"), LENGTHS),
    (lambda: hyper.Learned([1.0, 2.0], hyper.real, unit=[1.0]), LENGTHS),
    (lambda: hyper.Learned(1.0, hyper.real, names=["a"]), LENGTHS),
    *(
        (partial(hyper.InputMask(n), torch.rand(shape)), rf"pass \[\.\.\., {n}\], an entry for each feature")
        for n, shape in ((4, (5, 1)), (1, (5, 4)), (4, (5, 3)), (4, ()))
    ),
    *((partial(hyper.SourceWeights(2), X, (Y, each)), r"of 4 examples; pass int64 \[4\]") for each in SOURCES),
    *(
        (partial(hyper.SourceWeights(2), X, (Y, torch.tensor([0, 1, each, 1]))), r"pass numbers in 0\.\.1")
        for each in (-1, 2)
    ),
    *((rate(kind), r"=0.95; pass a number between 0 and 0.9") for kind in RATES),
    *((outside(kind), r"pass one inside \[0, 1\]") for kind in RATES),
    (lambda: hyper.ConcreteDropout(0.0), r"rate=0\.0; pass a number between 0 and 1"),
    (lambda: hyper.ConcreteDropout(temperature=-1.0), r"temperature=-1\.0; pass a positive number"),
    (lambda: hyper.InputMask(0), "features=0"),
    (lambda: hyper.InputMask(2, probability=1.0), r"probability=1\.0"),
    (lambda: hyper.InputMask(2, temperature=0.0), r"temperature=0\.0"),
    (lambda: hyper.Affine(rotation=0.0), r"rotation=0\.0; pass a finite number above 0"),
    (lambda: hyper.Affine(rotation=float("nan")), r"rotation=nan; pass a finite number above 0"),
    (lambda: hyper.Affine(**dict.fromkeys(hyper.Affine().names)), "at least one"),
    (lambda: hyper.ColourJitter(hue=0.0), r"hue=0\.0; pass a finite number above 0"),
    (lambda: hyper.ColourJitter()(torch.rand(2, 1, 4, 4)), "saturation=None, hue=None"),
    (lambda: hyper.ColourJitter()(torch.rand(2, 4, 4, 4)), "have 4 channels; pass 3"),
    (lambda: hyper.Cutout(holes=5.0), r"holes=5\.0"),
    (lambda: hyper.Cutout()(torch.ones(3, 4)), "pass images"),
    (lambda: hyper.Dropout(0.5, same_along=(3,))(torch.ones(2, 2)), "same_along"),
    (lambda: hyper.EmbeddingDropout()(torch.ones(2, 3, 4), torch.ones(2, 4)), r"pass \[\.\.\., features\]"),
    (lambda: hyper.ActivationPenalty(-1.0), r"strength=-1\.0"),
    (lambda: hyper.WeightDecay(nn.LayerNorm(3)), "no weights"),
    (lambda: hyper.LearningRate(nn.Linear(2, 2), 100.0), r"rate=100\.0"),
    (lambda: hyper.LearningRate(nn.ReLU()), "there are no parameters that learn"),
    (lambda: hyper.Mixup(0.0), r"alpha=0\.0"),
    (lambda: hyper.Mixup(loss=nn.CrossEntropyLoss(reduction="sum")), "reduction='sum', which grows with the batch"),
    (lambda: hyper.SourceWeights(2, nn.CrossEntropyLoss(reduction="sum")), "reduction='sum', which grows with"),
    (lambda: hyper.SourceWeights(1), "there are 1 sources"),
    (lambda: hyper.SourceWeights(2, lambda o, y: o.mean())(torch.ones(2, 2), (None, None)), "the loss gives a mean"),
    (lambda: hyper.Averaged(nn.Identity(), nn.Identity(), samples=0), "pass"),
    (lambda: hyper.Averaged(nn.Identity(), hyper.Affine()), r"pass Averaged\(augmentation, network\)"),
    (lambda: hyper.Submodule(nn.ReLU()), "no parameters to learn"),
    (lambda: hyper.Submodule(nn.Sequential(nn.ReLU(), nn.BatchNorm2d(4))), r"1 \(BatchNorm2d\); use nn\.GroupNorm"),
    (lambda: hyper.Submodule(nn.InstanceNorm2d(4, track_running_stats=True, affine=True)), "the module itself"),
    (lambda: hyper.gaussian_nll(hyper.ObservationNoise()(torch.ones(2)), torch.ones(2, 1)), "give them one shape"),
    (lambda: hyper.assign(nn.Sequential(hyper.Dropout()), {"rate": 0.2}), r"values has rate; .* are 0\.rate"),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=range(len(WRONG)))
def test_wrong_calls_raise(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_losses_that_do_not_fit_observation_noise_name_the_one_that_does():
    with pytest.raises(AttributeError, match=r"pass loss=hyper\.gaussian_nll"):
        nn.MSELoss()(hyper.ObservationNoise()(torch.ones(2)), torch.ones(2))
    with pytest.raises(TypeError, match="Tensor without mean and variance"):
        hyper.gaussian_nll(torch.ones(2), torch.ones(2))


def test_only_hyperparameters_are_wrapped_in_training():
    with pytest.raises(TypeError, match="module is a ReLU; pass a"):
        hyper.InTraining(nn.ReLU())


def test_assigning_a_wrong_value_changes_nothing():
    model = nn.Sequential(hyper.ConcreteDropout(0.5), hyper.ColourJitter())
    hyper.assign(model, {"0.rate": 0.25, "1.hue": 20.0})
    before = [module.values() for module in model]
    assert before[0] == {"rate": 0.25} and before[1]["hue"] == pytest.approx(20.0)
    for wrong in ({"0.rate": 0.1, "1.hue": -1.0}, {"0.rate": 0.1, "hue": 1.0}):
        with pytest.raises(ValueError, match=r"hue=-1|values has hue"):
            hyper.assign(model, wrong)
    for wrong in ([0.2], [0.2, 0.3, 0.4, -1.0], 0.5):
        with pytest.raises(ValueError, match="pass"):
            model[1].widths.assign(wrong)
    assert [module.values() for module in model] == before


def test_a_module_that_asks_for_one_value_gets_one_or_an_error():
    class Shared(hyper.Hyperparameter):
        def __init__(self):
            super().__init__()
            self.strength = hyper.Learned(0.5, hyper.positive)

        def forward(self, x):
            return x * self.strength()

    class Each(Shared):
        per_example = True

    x, shared, each = torch.ones(BATCH, 2), Shared(), Each()
    with stn.HyperVector(shared).perturbed(BATCH):
        assert len(shared(x).unique()) == 1
    with stn.HyperVector(each).perturbed(BATCH), pytest.raises(RuntimeError, match=r"self\.rate\(x\)"):
        each(x)
    with stn.HyperVector(each, per_example=False).perturbed(BATCH):
        assert len(each(x).unique()) == 1


class Shift(nn.Module):
    """An augmentation that adds 0, 1, 2, ... to the copies to distinguish them."""

    def forward(self, x):
        return x + torch.arange(len(x) // 2).repeat_interleave(2)[:, None]


def test_averaged_averages_over_copies_of_each_example():
    network, x = nn.Linear(3, 4), torch.randn(2, 3)
    expected = torch.stack([network(x + copy) for copy in range(5)]).mean(0)
    torch.testing.assert_close(hyper.Averaged(Shift(), network, samples=5)(x), expected)
    dense = hyper.Averaged(hyper.Affine(), nn.Conv2d(1, 3, 3), samples=2)
    assert dense(torch.rand(2, 1, 12, 12)).shape == (2, 3, 10, 10) and "samples=2" in repr(dense)


def extractor():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten())


def test_a_submodule_stays_unpartitioned_and_learns_only_in_steps_of_hyperparameters():
    torch.manual_seed(0)
    features = hyper.Submodule(extractor())
    model = partnets.partition(nn.Sequential(features, nn.Linear(36, 2)), (0.5, 0.5))
    assert list(partnets.partitions(model)) == ["1.weight"]
    assert set(hyper.hyperparameters(model)) == set(features.parameters())
    chunks = partnets.chunk((torch.randn(40, 1, 5, 5), torch.randint(2, (40,))), (0.5, 0.5))
    trainer = partnets.Trainer(model, chunks, hyper=features, batch_size=8)
    before = [parameter.detach().clone() for parameter in features.parameters()]
    trainer.step_weights()
    assert all(map(torch.equal, features.parameters(), before))
    trainer.step_hyper()
    assert not any(map(torch.equal, features.parameters(), before))
    everything = nn.utils.parameters_to_vector(features.parameters()).detach()
    assert trainer.values() == {"0.rms": pytest.approx(everything.square().mean().sqrt().item())}


def test_arguments_and_results_of_a_submodule_pass_through():
    query = torch.randn(2, 3, 4)
    attention = nn.MultiheadAttention(4, 1, batch_first=True)
    expected = attention(query, query, query, need_weights=False)
    result = hyper.Submodule(attention)(query, query, query, need_weights=False)
    assert torch.equal(result[0], expected[0]) and result[1] is None


def test_batch_norm_without_running_statistics_may_be_a_submodule():
    hyper.Submodule(nn.BatchNorm2d(4, track_running_stats=False))


def test_observation_noise_is_a_gaussian_likelihood():
    mean, y = torch.randn(5, 2), torch.randn(5, 2)
    output = hyper.ObservationNoise([0.5, 2.0])(mean)
    expected = -torch.distributions.Normal(mean, torch.tensor([0.5, 2.0])).log_prob(y).sum(1).mean()
    torch.testing.assert_close(hyper.gaussian_nll(output, y), expected)


def test_ignored_labels_do_not_change_the_expected_error():
    logits, y = torch.randn(4, 3), torch.tensor([0, -100, 2, 1])
    expected = 1 - logits[[0, 2, 3]].softmax(1)[range(3), [0, 2, 1]].mean()
    torch.testing.assert_close(hyper.expected_error(logits, y), expected)


def test_activation_penalties():
    x = torch.randn(BATCH, 5, 3)
    size, change = hyper.ActivationPenalty(0.5), hyper.ActivationPenalty(2.0, time_dim=1)
    with hyper.penalties() as found:
        assert change(size(x)) is x
    torch.testing.assert_close(found[0].mean(), 0.5 * x.square().mean())
    torch.testing.assert_close(found[1].mean(), 2 * (x[:, 1:] - x[:, :-1]).square().mean())
    vector = stn.HyperVector([size, change], centred=False)
    values = vector.present().detach() + torch.randn(BATCH, 2)
    with hyper.penalties() as found, vector.at(values):
        change(size(x))
    alphas, betas = F.softplus(values).unbind(1)
    torch.testing.assert_close(found[0].mean((1, 2)), alphas * x.square().mean((1, 2)))
    torch.testing.assert_close(found[1].mean((1, 2)), betas * x.diff(dim=1).square().mean((1, 2)))
    with hyper.penalties() as found:
        change(x[:, :1])
    assert found[0].mean() == 0
    with hyper.penalties(), pytest.raises(ValueError, match="without the time dimension time_dim=1"):
        change(torch.ones(3))


def test_penalties_act_in_training_and_are_never_lost():
    penalty, x = hyper.ActivationPenalty(0.5), torch.randn(BATCH, 3)
    with hyper.penalties() as found, torch.no_grad():
        penalty(x)
    with hyper.penalties() as found_in_evaluation:
        penalty.eval()(x)
    assert found == found_in_evaluation == []
    penalty.train()
    with pytest.raises(RuntimeError, match="would be lost"):
        penalty(x)
    for use_reentrant in (False, True):
        y = torch.randn(BATCH, 3, requires_grad=True)
        with pytest.raises(RuntimeError, match="Keep it out of activation checkpoints"):
            with hyper.penalties():
                result = torch.utils.checkpoint.checkpoint(lambda h: penalty(h.tanh()), y, use_reentrant=use_reentrant)
            result.sum().backward()


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


def test_label_smoothing_is_torchs():
    logits, y = torch.randn(BATCH, 5, 3), torch.randint(5, (BATCH, 3))
    y[0, 1] = -100
    smoothing, counts = hyper.LabelSmoothing(0.3), y != -100
    losses = smoothing(logits, y)
    expected = F.cross_entropy(logits, y, label_smoothing=0.3, reduction="none")
    torch.testing.assert_close(losses, expected[counts])
    assert smoothing(logits) is logits
    torch.testing.assert_close(smoothing.eval()(logits, y).mean(), F.cross_entropy(logits, y))
    smoothing.train()
    values = torch.randn(BATCH, 1)
    with stn.HyperVector(smoothing, centred=False).at(values):
        losses = smoothing(logits, y)
    rates, expected = smoothing.smoothing.range.transform(values[:, 0]).tolist(), []
    for i in range(BATCH):
        expected.append(F.cross_entropy(logits[i].T, y[i], label_smoothing=rates[i], reduction="none"))
    torch.testing.assert_close(losses, torch.stack(expected)[counts])
