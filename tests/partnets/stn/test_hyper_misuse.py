"""Misuse of self-tuning networks is refused before anything changes."""

import pytest
import torch
import torch.nn.functional as F
from self_tuning import DATA, PROPORTIONS, X, converted, held_out, hypers, network, partitioned, trainer
from torch import nn

import partnets
from partnets import hyper, stn
from partnets.stn.converting import vector_of


def two_dropouts():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), hyper.Dropout(0.3), nn.Linear(8, 2), hyper.Dropout(0.1))


class Body(nn.Module):
    """A network with one dropout and a function of (body, dropout, x) as its forward."""

    def __init__(self, forward):
        super().__init__()
        self.body, self.dropout, self.head, self.use = nn.Linear(4, 4), hyper.Dropout(0.3), nn.Linear(4, 2), forward

    def forward(self, x):
        return self.head(self.use(self.body, self.dropout, x))


def weight_elsewhere():
    return nn.Sequential(nn.Linear(4, 2), hyper.WeightDecay([nn.Linear(4, 2)], 0.1))


def batch_norms_of_all_chunks():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), dropout := hyper.Dropout())
    partnets.partition(stn.convert(model, dropout), (0.5, 0.5))


def of(model, data=DATA, **options):
    """Return a trainer of a model that is converted with its hyperparameters."""
    stn.convert(model, hypers(model), **options)
    return trainer(*partnets.held_out(model, data, validation=0.25))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: stn.convert(nn.Sequential(nn.ReLU(), d := hyper.Dropout()), d), ValueError, "no layer of this"),
        (lambda: stn.convert(nn.Linear(2, 2), hyper.Dropout()), ValueError, "not inside the model"),
        (lambda: stn.convert(m := nn.Sequential(nn.Linear(2, 2), nn.ReLU()), m[1]), TypeError, "has a ReLU; derive it"),
        (lambda: stn.convert(m := converted(), hypers(m)), ValueError, "respond to hyperparameters already"),
        (lambda: stn.convert(partitioned()[0], []), ValueError, "is partitioned already"),
        (batch_norms_of_all_chunks, ValueError, r"running statistics of all chunks \(name it in stn\.convert skip="),
        (lambda: converted(scale=0.0), ValueError, "scale=0.0; pass a positive number"),
        (lambda: converted(skip=["7"]), ValueError, "skip names '7'"),
        (lambda: converted(linearised=True, centred=False), ValueError, "centred=True"),
        (lambda: stn.freeze(network()), ValueError, "read no hyperparameters; call stn.convert"),
        (lambda: stn.freeze(converted(), {"5.rate": 0.95}), ValueError, r"value=0.95; pass a number between 0 and 0.9"),
        (lambda: stn.freeze(converted(), {"rate": 0.5}), ValueError, r"has rate; .* are 0.std, 4.strength, 5.rate"),
        (lambda: partnets.finalize(converted(), "deploy"), ValueError, r"stn\.freeze"),
        (lambda: partnets.finalize(partitioned()[0], "deploy"), ValueError, r"stn\.freeze"),
        (lambda: trainer(*held_out(), hyper_steps=0), ValueError, "hyper_steps=0; pass an int, at least 1"),
        (lambda: trainer(*held_out(), entropy=-1.0), ValueError, "entropy=-1.0; pass the weight"),
        (lambda: trainer(*held_out(), hyper_gradient="lookahead"), TypeError, "hyper_gradient"),
        (lambda: trainer(*partnets.held_out(network(), DATA)), ValueError, "call stn.convert"),
        (lambda: trainer(*held_out(), hyper=hyper.Dropout()), ValueError, "not inside the model"),
        (lambda: partnets.Trainer(*held_out()), ValueError, r"train it by partnets\.stn\.Trainer"),
        (lambda: partnets.Trainer(*partitioned(learn_scale=False)), ValueError, r"train it by partnets\.stn\.Trainer"),
        (lambda: stn.HyperVector([]), ValueError, "no numbers to tune"),
        (lambda: stn.HyperVector(hyper.Submodule(nn.Linear(2, 2))), ValueError, "no numbers to tune"),
        (lambda: of(weight_elsewhere()).fit(1), ValueError, "is of a Linear that is not in the model"),
    ],
)
def test_invalid_uses_raise(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_refused_conversion_changes_nothing():
    dropout = hyper.Dropout()
    frozen = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), dropout)
    with pytest.raises(ValueError, match="that learn"):
        stn.convert(frozen, dropout)
    assert dropout.rate.scale_raw is None and type(frozen[0]) is nn.Linear


def dropped(layer):
    layer.drop_connect = hyper.DropConnect(0.5)
    return layer


UNREAD = {
    "label smoothing without loss=": lambda: nn.Sequential(nn.Linear(4, 2), hyper.LabelSmoothing(0.3)),
    "dropout that is never called": lambda: Body(lambda body, dropout, x: body(x)),
    "drop connect of a norm": lambda: nn.Sequential(dropped(nn.LayerNorm(4)), nn.Linear(4, 2)),
    "dropout of a backbone in evaluation mode": lambda: nn.Sequential(
        nn.Sequential(nn.Linear(4, 4), hyper.Dropout(0.3)).eval(), nn.Linear(4, 2)
    ),
}


@pytest.mark.parametrize("case", UNREAD)
def test_a_hyperparameter_that_nothing_reads_is_refused(case):
    model = UNREAD[case]()
    made = of(model)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    with pytest.raises(ValueError, match=r"nothing reads .*rate|nothing reads .*smoothing"):
        made.fit(1)
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())


class Temperature(hyper.Hyperparameter):
    def __init__(self):
        super().__init__()
        self.value = hyper.Learned(1.0, hyper.positive)

    def forward(self, x):
        return x if self.training else x / self.value()


def test_hyperparameters_that_few_batches_or_only_evaluations_read_may_learn():
    of(Body(lambda body, dropout, x: dropout(body(x)) if torch.rand(()) < 0.5 else body(x))).fit(2)
    of(nn.Sequential(nn.Linear(4, 2), Temperature())).fit(2)


class Distances(nn.Module):
    """A model with a table of distances [length, length, ...]."""

    def __init__(self):
        super().__init__()
        self.bias, self.head, self.dropout = nn.Embedding(9, 4), nn.Linear(4, 2), hyper.Dropout(0.2)

    def forward(self, x):
        places = torch.arange(x.shape[1])
        return self.head(self.dropout(x + self.bias((places[:, None] - places).abs()).mean(0)).mean(1))


def test_an_embedding_without_a_batch_dimension_raises_before_training():
    data = torch.randn(40, 8, 4), torch.randint(2, (40,))
    made = [of(Distances(), data, skip=skip) for skip in ((), ("bias",))]  # with batches of 8
    with pytest.raises(ValueError, match=r"HyperEmbedding\(9, 4, hyper=1\) is \[8, 8\], but each of 2 examples"):
        made[0].fit(2)
    assert made[0].steps == 0 and len(made[1].fit(2).steps["k"]) == 2


def read_weight(layer, dropout, x):
    assert layer.weight.dtype == x.dtype and layer.weight.shape == (4, 4) and len(layer.weight) == 4
    assert layer.weight.device == x.device and layer.weight.size(0) == 4 and layer.weight.is_floating_point()
    return dropout(F.linear(x, layer.weight))


@pytest.mark.cases(usual=2)
@pytest.mark.parametrize("options", [{"centred": False}, {"per_example": False}, {}])
def test_a_weight_that_is_read_outside_of_its_layer_raises(options):
    with pytest.raises(RuntimeError, match=r"weight of this HyperLinear.*skip="):
        of(Body(read_weight), **options).fit(1)
    of(Body(read_weight), skip=["body"], **options).fit(2)


@pytest.mark.parametrize("is_partitioned", [False, True])
@pytest.mark.parametrize("wrong", [{"centred": False}, {"order": (3, 1)}, {"order": (1,)}])
def test_a_state_of_other_responses_is_not_loaded(wrong, is_partitioned):
    def made(order=(1, 3), **options):
        model = two_dropouts()
        stn.convert(model, [model[i] for i in order], **options)
        return partnets.partition(model, (0.5, 0.5), defaults="stored") if is_partitioned else model

    saved = made().state_dict()
    made().load_state_dict(saved)
    with pytest.raises(RuntimeError, match=r"hyperparameters|centred|shape"):
        made(**wrong).load_state_dict(saved)


def test_a_trainer_resumes_only_with_the_same_settings(tmp_path):
    def made(entropy=1e-3, **options):
        return trainer(*held_out(**options), entropy=entropy)

    made().save(tmp_path / "file")
    made().load(tmp_path / "file")
    for options in ({"centred": False}, {"linearised": True}, {"entropy": 0.5}):
        with pytest.raises(ValueError, match=next(iter(options))):
            made(**options).load(tmp_path / "file")


class WithoutForwardMode(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class Twice(nn.Module):
    def forward(self, x):
        return WithoutForwardMode.apply(x)


def test_a_loss_that_a_linearised_response_cannot_see_is_refused():
    def step(model, called):
        def loss(batch):
            return F.cross_entropy(called(batch[0]), batch[1])

        stn.step_weights(model, partnets.optim.SGD(model, lr=0.5), 1, DATA, loss)

    model = converted(linearised=True)
    with pytest.raises(RuntimeError, match="not computed from the output"):
        step(partnets.Ensemble([model], num_partitions=2), called=model)
    model = partnets.partition(converted(linearised=True).append(Twice()), PROPORTIONS, defaults="stored")
    with pytest.raises(RuntimeError, match="forward mode"):
        step(model, called=model)


def test_layers_that_share_a_parameter_with_an_earlier_one_stay():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.layer, self.head = nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5)
            self.head.weight = self.table.weight
            self.dropout = hyper.Dropout()

        def forward(self, ids):
            return self.head(self.dropout(self.layer(self.table(ids))))

    model = Tied()
    stn.convert(model, model.dropout)
    kinds = [type(child).__name__ for child in model.children()]
    assert kinds == ["HyperEmbedding", "HyperLinear", "Linear", "Dropout"]
    assert model.head.weight is model.table.weight
    with vector_of(model).perturbed(2), pytest.raises(RuntimeError, match=r"weight of this HyperEmbedding.*skip="):
        F.linear(X[:2], model.table.weight)
    with vector_of(model).perturbed(2):
        assert model(torch.tensor([[1, 2], [3, 4]])).shape == (2, 2, 5)
