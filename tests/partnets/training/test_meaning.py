"""Trainings with a meaningless L_ML or ψ raise or warn before they begin, and others do not."""

import functools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import partnets
from partnets import hyper
from partnets.subnetworks.state import state_of

PROPORTIONS = (0.5, 0.3, 0.2)


class Rate(hyper.Hyperparameter):
    def __init__(self, rate):
        super().__init__()
        self.rate = hyper.Learned(rate, hyper.probability)


class Smoothed(nn.Module):
    """A model with a hyperparameter that only the loss uses."""

    def __init__(self):
        super().__init__()
        self.mask, self.network, self.smoothing = hyper.InputMask(6), nn.Linear(6, 3), Rate(0.2)

    def forward(self, x):
        return self.network(self.mask(x))

    def loss(self, output, y):
        smoothing = self.smoothing.rate()
        return (1 - smoothing) * F.cross_entropy(output, y) - smoothing * output.log_softmax(1).mean()


def examples(count=200, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=generator)
    return x, x[:, :3].argmax(1)


def network():
    torch.manual_seed(0)
    return partnets.partition(nn.Sequential(hyper.InputMask(6), nn.Linear(6, 3)), PROPORTIONS)


def chunks(**options):
    return partnets.chunk(examples(), PROPORTIONS, **options)


def trainer(model, **options):
    return partnets.Trainer(model, chunks(), hyper=model[0], batch_size=16, **options)


def test_psi_that_reaches_only_the_loss_raises_before_any_change():
    model = partnets.partition(Smoothed(), PROPORTIONS)
    one = partnets.Trainer(model, chunks(), hyper=[model.mask, model.smoothing], loss=model.loss, batch_size=16)
    before = [tensor.clone() for tensor in (*model.parameters(), torch.get_rng_state(), one.generator.get_state())]
    with pytest.raises(ValueError, match=r"smoothing\.rate\.raw reaches the loss, but not the model's output"):
        one.fit(1)
    after = [*model.parameters(), torch.get_rng_state(), one.generator.get_state()]
    assert all(map(torch.equal, before, after)) and one.steps == 0


@pytest.mark.full
@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss(label_smoothing=0.3), functools.partial(F.cross_entropy, label_smoothing=0.3)]
)
def test_label_smoothing_does_not_count_for_psi(loss):
    def run(loss, **options):
        one = trainer(network(), loss=loss, lml_every=3, **options)
        torch.manual_seed(1)
        return one.fit(6)

    smoothed, plain = run(loss), run(loss, hyper_loss=F.cross_entropy)
    assert smoothed.lml == plain.lml and smoothed.steps == plain.steps
    assert run(loss, hyper_loss=loss).lml != plain.lml


def test_a_sum_over_the_batch_is_refused():
    for loss in (nn.CrossEntropyLoss(reduction="sum"), functools.partial(F.cross_entropy, reduction="sum")):
        with pytest.raises(ValueError, match="reduction='sum'"):
            trainer(network(), loss=loss)
        with pytest.raises(ValueError, match="reduction='sum'"):
            partnets.lml(network(), chunks(), loss)


def test_a_custom_loss_that_sums_over_the_batch_raises_at_the_first_step():
    model = network()
    one = trainer(model, loss=lambda output, y: F.cross_entropy(output, y, reduction="sum"))
    with pytest.raises(ValueError, match="it is a sum; pass the mean"):
        one.fit(1)


def test_the_loss_of_psi_has_no_class_weights():
    weighted = nn.CrossEntropyLoss(torch.tensor([1.0, 0.01, 1.0]))
    assert trainer(network(), loss=weighted).hyper_loss.weight is None and weighted.weight is not None
    given = functools.partial(F.cross_entropy, weight=torch.ones(3), ignore_index=2)
    assert trainer(network(), loss=given).hyper_loss.keywords == {
        "weight": None, "ignore_index": 2, "label_smoothing": 0.0
    }  # fmt: skip


@pytest.mark.full
def test_buffers_that_follow_the_data_are_refused_except_in_evaluation_mode():
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(6))

        def forward(self, x):
            if self.training:
                self.mean.lerp_(x.detach().mean(0), 0.1)
            return x - self.mean

    def made():
        return partnets.partition(nn.Sequential(hyper.InputMask(6), Centred(), nn.Linear(6, 3)), PROPORTIONS)

    model = made()
    with pytest.raises(ValueError, match=r"1\.mean follows the data: .*stateful=(.|\n)*audit=False"):
        trainer(model).fit(1)
    assert not model[1].mean.any()
    trainer(model, audit=False).fit(1)
    model = made()
    model[1].eval()
    with warnings.catch_warnings(action="error"):
        trainer(model).fit(1)


def test_a_manual_loop_is_tied_to_the_chunks_of_its_first_evaluation():
    model = network()
    optimizer = partnets.optim.Adam(model)
    batch = chunks().sample_upto(1, 16)
    partnets.step_weights(model, optimizer, 1, batch, lambda batch: F.cross_entropy(model(batch[0]), batch[1]))
    partnets.lml(model, chunks())
    with pytest.raises(ValueError, match="has learned from other chunks"):
        partnets.lml(model, chunks(seed=1))


@pytest.mark.parametrize(("loss", "cure"), [(nn.MSELoss(), "gaussian_nll"), (F.l1_loss, "your own loss")])
def test_losses_that_are_not_likelihoods_warn(loss, cure):
    with pytest.warns(UserWarning, match=f"is not a negative log-likelihood.*{cure}"):
        trainer(network(), loss=loss)
    model = network()
    with warnings.catch_warnings(action="error"):  # without ψ and L_ML, any loss is valid
        partnets.Trainer(model, chunks(), hyper=[], loss=lambda output, y: output.square().mean(), batch_size=16).fit(1)


def test_a_loss_that_is_not_finite_stops_before_the_step():
    model = network()
    one = trainer(model, loss=lambda output, y: F.cross_entropy(output, y) * (torch.nan if one.steps == 2 else 1.0))
    one.fit(2)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(FloatingPointError, match="the loss of step 3 is nan"):
        one.fit(2)
    assert all(map(torch.equal, model.parameters(), before)) and one.steps == 2
    with pytest.warns(UserWarning, match="the loss of subnetwork 1 on chunk 2 is nan"):
        assert partnets.lml(model, one.chunks, lambda output, y: output.sum() * torch.nan) != 0


def trained_before(**options):
    """Return a model that was trained on all data and then partitioned."""
    torch.manual_seed(0)
    model = nn.Sequential(hyper.InputMask(6, probability=0.99), nn.Linear(6, 3))
    optimizer, (x, y) = torch.optim.Adam(model[1].parameters(), lr=0.1), examples()
    for _ in range(100):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return partnets.partition(model, PROPORTIONS, **options)


def test_weights_that_predict_labels_of_later_chunks_warn_once():
    model = trained_before(defaults="stored")
    one = partnets.Trainer(model, chunks(), hyper=model[0], batch_size=32)
    with pytest.warns(UserWarning, match="before its first step, subnetwork 1 predicts labels of chunk 2"):
        one.step()
    with warnings.catch_warnings(action="error"):  # warns only once
        one.step()


def test_proportions_far_from_those_of_the_chunks_warn():
    model = partnets.partition(nn.Sequential(hyper.InputMask(6), nn.Linear(6, 30)), (0.1, 0.1, 0.8))
    with pytest.warns(
        UserWarning, match="have 10, 10, 80 % of the weights, but the chunks 50, 30, 20 % of the examples"
    ):
        trainer(model)


def test_a_model_remembers_its_chunks_in_its_state_dict_too():
    model = network()
    trainer(model).fit(2)
    again, restored = network(), network()
    again.load_state_dict(model.state_dict())
    for one in (model, again):
        assert isinstance(partnets.lml(one, chunks()), float)
        for judge in (partnets.lml, partnets.loss_matrix):
            with pytest.raises(ValueError, match=r"has learned from other chunks.*other_chunks=True"):
                judge(one, chunks(seed=1))
            judge(one, chunks(seed=1), other_chunks=True)
        with pytest.raises(ValueError, match="has learned from other chunks"):
            partnets.Trainer(one, chunks(seed=1), hyper=[])
        partnets.Trainer(one, chunks(seed=1), hyper=[], other_chunks=True)
    with pytest.raises(ValueError, match="has learned from other chunks"):  # same split, other data
        partnets.lml(model, partnets.chunk(examples(seed=1), PROPORTIONS))
    as_examples = partnets.chunk(list(zip(*examples(), strict=True)), PROPORTIONS)
    assert partnets.lml(model, as_examples) == pytest.approx(partnets.lml(model, chunks()))
    assert partnets.lml(restored, chunks(seed=1)) < 0 and not hasattr(partnets.merge(model)[1], "learned_from")
    assert list(partnets.merge(model).state_dict()) == ["0.probability.raw", "1.weight", "1.bias"]


def test_weights_that_come_after_the_trainer_was_made_bring_their_chunks():
    learned = network()
    trainer(learned).fit(2)
    fresh = network()
    other = partnets.Trainer(fresh, chunks(seed=1), hyper=fresh[0], batch_size=16)
    fresh.load_state_dict(learned.state_dict())
    before = [parameter.clone() for parameter in fresh.parameters()]
    with pytest.raises(ValueError, match="has learned from other chunks"):
        other.fit(1)
    assert all(map(torch.equal, before, fresh.parameters()))
    with pytest.raises(ValueError, match="has learned from other chunks"):
        partnets.lml(fresh, chunks(seed=1))
    partnets.Trainer(fresh, chunks(seed=1), hyper=fresh[0], batch_size=16, other_chunks=True).fit(1)


def test_a_loss_with_trainable_parameters_is_refused():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, output, y):
            return F.cross_entropy(output * self.scale, y)

    with pytest.raises(ValueError, match="the loss has scale, which would never learn; put trainable modules into"):
        trainer(network(), loss=Scaled())


def test_a_failed_evaluation_does_not_tie_a_manual_loop_to_its_chunks():
    model = partnets.partition(nn.Linear(4, 2), (0.5, 0.5))
    x, y = torch.randn(20, 4), torch.randint(2, (20,))
    optimizer = partnets.optim.SGD(model)
    partnets.step_weights(model, optimizer, 1, (x, y), lambda batch: F.cross_entropy(model(batch[0]), batch[1]))
    right, wrong = partnets.chunk((x, y), (0.5, 0.5)), partnets.chunk((torch.randn(20, 7), y), (0.5, 0.5))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        partnets.lml(model, wrong)
    assert partnets.lml(model, right) < 0
    with pytest.raises(ValueError, match="other chunks"):
        partnets.lml(model, wrong)


def test_a_state_dict_distinguishes_untrained_from_unknown_chunks():
    def fresh():
        return partnets.partition(nn.Linear(4, 2), (0.5, 0.5))

    model, x, y = fresh(), torch.randn(20, 4), torch.randint(2, (20,))
    untrained = fresh()
    untrained.load_state_dict(model.state_dict())
    assert state_of(untrained).learned_from is None
    optimizer = partnets.optim.SGD(model)
    partnets.step_weights(model, optimizer, 1, (x, y), lambda batch: F.cross_entropy(model(batch[0]), batch[1]))
    loaded = fresh()
    loaded.load_state_dict(model.state_dict())
    assert state_of(loaded).learned_from == state_of(model).learned_from == ""
    loaded.load_state_dict({}, strict=False)
    assert state_of(loaded).learned_from == ""
    first, second = (partnets.chunk((x, y), (0.5, 0.5), seed=seed) for seed in (0, 1))
    partnets.lml(loaded, first)
    with pytest.raises(ValueError, match="other chunks"):
        partnets.lml(loaded, second)


def test_a_dropout_rate_that_learns_directly_warns():
    """Check the warning: a rate that learns directly goes to 0 for any data; an unrolled step avoids that."""
    dropout = hyper.ConcreteDropout(0.5)
    model = partnets.partition(nn.Sequential(nn.Linear(6, 8), dropout, nn.Linear(8, 3)), PROPORTIONS)
    with pytest.warns(UserWarning, match=r"1 \(ConcreteDropout\) learns directly, .* partnets\.tune\("):
        partnets.Trainer(model, chunks(), hyper=dropout)
    partnets.Trainer(model, chunks(), hyper=dropout, hyper_gradient="lookahead")
