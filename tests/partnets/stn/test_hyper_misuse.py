"""Misuse of self-tuning networks, and cases that were once silently wrong."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import partnets
from partnets import hyper, optim, stn
from partnets.hyper import hyperparameters
from partnets.stn.converting import vector_of

X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] * X[:, 1] > 0).long()


def trainer(network, hypers, *, hyper_lr=0.05, lml=False, **options):
    torch.manual_seed(0)
    converting = {name: options.pop(name) for name in ("centred", "skip", "per_example") if name in options}
    stn.convert(network, hypers, **converting)
    if lml:
        model = partnets.partition(network, (0.5, 0.3, 0.2), defaults="stored")
        chunks = partnets.chunk((X, Y), (0.5, 0.3, 0.2))
    else:
        model, chunks = partnets.held_out(network, (X, Y), validation=0.25)
    learned = torch.optim.Adam(hyperparameters(model), lr=hyper_lr)
    return stn.Trainer(model, chunks, batch_size=8, hyper_optimizer=learned, **options)


def spread(network):
    """Set all responses to nonzero values."""
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name.endswith("_scale") and parameter.dim() == 2:
                parameter.normal_(0, 0.5)
    return network


def test_a_network_in_evaluation_mode_trains():
    dropout = hyper.Dropout(0.5)
    network = nn.Sequential(nn.Linear(4, 32), dropout, nn.Linear(32, 2)).eval()
    made, zeros = trainer(network, dropout), []
    dropout.register_forward_hook(lambda module, x, y: zeros.append((y == 0).any().item()) if module.training else None)
    made.fit(3)
    assert zeros and all(zeros)
    model, chunks = partnets.held_out(
        nn.Sequential(hyper.InputMask(4), nn.Linear(4, 2)).eval(), (X, Y), validation=0.25
    )
    partnets.Trainer(model, chunks, hyper=model.networks[0][0], sampling=(1, 0), batch_size=8).fit(1)
    assert all(module.training for module in model.modules())


class NeverCalled(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 2))
        self.dropout = hyper.Dropout(0.5)

    def forward(self, x):
        return self[0](x)


def dropped(layer):
    layer.drop_connect = hyper.DropConnect(0.5)
    return layer


def unread():
    smoothing, dropout = hyper.LabelSmoothing(0.3), hyper.Dropout(0.3)
    never = NeverCalled()
    frozen = dropped(nn.Linear(4, 4))
    frozen.bias.requires_grad_(False)
    cell, norm = dropped(nn.GRUCell(4, 4)), dropped(nn.LayerNorm(4))
    backbone = nn.Sequential(nn.Linear(4, 4), dropout).eval()
    return {
        "label smoothing without loss=": (nn.Sequential(nn.Linear(4, 2), smoothing), smoothing),
        "dropout that is never called": (never, never.dropout),
        "drop connect of a layer that stays": (nn.Sequential(frozen, nn.Linear(4, 2)), frozen.drop_connect),
        "drop connect of a cell": (nn.Sequential(cell, nn.Linear(4, 2)), cell.drop_connect),
        "drop connect of a norm": (nn.Sequential(norm, nn.Linear(4, 2)), norm.drop_connect),
        "dropout of a backbone that is still": (nn.Sequential(backbone, nn.Linear(4, 2)), dropout),
    }


@pytest.mark.parametrize("lml", [False, True])
@pytest.mark.parametrize("case", unread())
def test_a_hyperparameter_that_nothing_reads_is_refused(case, lml):
    network, hypers = unread()[case]
    made = trainer(network, hypers, lml=lml)
    before = {name: value.detach().clone() for name, value in network.named_parameters()}
    with pytest.raises(ValueError, match=r"nothing reads .*rate|nothing reads .*smoothing"):
        made.fit(1)
    assert all(torch.equal(value, before[name]) for name, value in network.named_parameters())


def test_what_is_read_now_and_then_or_in_evaluation_alone_may_learn():
    class Sometimes(nn.Sequential):
        def forward(self, x):
            x = self[0](x)
            return self[1](x) if torch.rand(()) < 0.5 else x

    class Temperature(hyper.Hyperparameter):
        def __init__(self):
            super().__init__()
            self.value = hyper.Learned(1.0, hyper.positive)

        def forward(self, x):
            return x if self.training else x / self.value()

    network = Sometimes(nn.Linear(4, 2), hyper.Dropout(0.3))
    trainer(network, network[1]).fit(2)
    network = nn.Sequential(nn.Linear(4, 2), Temperature())
    trainer(network, network[1]).fit(2)


def test_weights_that_are_not_in_the_model_are_not_decayed():
    body, head = nn.Linear(4, 4), nn.Linear(4, 2)
    decay = hyper.WeightDecay([body, head], 0.1)
    network = nn.Sequential(body, nn.ReLU(), nn.Linear(4, 2), decay)  # the head was replaced
    with pytest.raises(ValueError, match=r"3 \(hyper.WeightDecay\) is of a Linear that is not in the model"):
        trainer(network, decay).fit(1)


@pytest.mark.cases(usual=1)
@pytest.mark.parametrize("lml", [False, True])
def test_smoothed_labels_judge_nothing_whoever_calls_them(lml):
    smoothing = hyper.LabelSmoothing(0.3)
    logits = torch.randn(5, 3)
    labels = torch.tensor([0, 2, 1, -100, 1])
    judge = copy.deepcopy(smoothing).eval()
    losses = F.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(judge(logits, labels), losses[labels != -100])
    found = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        smoothing = hyper.LabelSmoothing(0.3)
        network = nn.Sequential(nn.Linear(4, 2), smoothing)
        loss = (lambda output, y, smoothing=smoothing: smoothing(output, y)) if wrapped else smoothing
        found.append(trainer(network, smoothing, lml=lml, loss=loss).fit(4).values)
    assert found[0] == found[1]


class OneRow(nn.Module):
    """A model with a layer that receives one row for all examples."""

    def __init__(self, use):
        super().__init__()
        self.of_all, self.head, self.dropout, self.use = nn.Linear(4, 4), nn.Linear(4, 2), hyper.Dropout(0.3), use
        self.query = nn.Parameter(torch.ones(1, 4))

    def forward(self, x):
        return self.head(self.dropout(self.use(self.of_all(self.query)) + x))


@pytest.mark.cases(usual=2)
@pytest.mark.parametrize("lml", [False, True])
@pytest.mark.parametrize(
    "use", [lambda rows: rows.sum(0), lambda rows: rows[0], lambda rows: rows.reshape(-1, 4)[[0] * 4].mean(0)]
)
def test_a_layer_whose_one_row_is_no_longer_one_is_refused(use, lml):
    network = OneRow(use)
    with pytest.raises(ValueError, match=r"of_all.*skip="):
        trainer(network, network.dropout, lml=lml).fit(1)
    network = OneRow(use)
    trainer(network, network.dropout, lml=lml, skip=["of_all"]).fit(1)


@pytest.mark.cases(usual=1)
@pytest.mark.parametrize("lml", [False, True])
def test_one_row_that_is_added_to_all_examples_is_one_for_each(lml):
    network = OneRow(lambda rows: rows)
    trainer(network, network.dropout, lml=lml).fit(1)


def test_examples_that_depend_on_one_another_need_one_perturbation_a_batch():
    class Mixing(nn.Sequential):
        def forward(self, x):
            y = super().forward(x)
            return y - y.mean(0)

    def made(**options):
        dropout = hyper.Dropout(0.3)
        return trainer(Mixing(nn.Linear(4, 8), dropout, nn.Linear(8, 2)), dropout, **options)

    with pytest.raises(ValueError, match="per_example=False"):
        made().fit(1)
    made(per_example=False).fit(1)


class ReadsByAnotherName(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.dropout, self.head = nn.Linear(4, 4), hyper.Dropout(0.3), nn.Linear(4, 2)

    def forward(self, x):
        layer = self.table
        assert layer.weight.dtype == x.dtype and layer.weight.shape == (4, 4) and len(layer.weight) == 4
        assert layer.weight.device == x.device and layer.weight.size(0) == 4 and layer.weight.is_floating_point()
        return self.head(self.dropout(F.linear(x, layer.weight)))


@pytest.mark.cases(usual=3)
@pytest.mark.parametrize("options", [{"centred": False}, {"per_example": False}, {"lml": True}, {}])
def test_a_weight_that_is_read_from_outside_where_it_responds_raises(options):
    network = ReadsByAnotherName()
    with pytest.raises(RuntimeError, match=r"HyperLinear.*skip="):
        trainer(network, network.dropout, **options).fit(1)
    network = ReadsByAnotherName()
    trainer(network, network.dropout, skip=["table"], **options).fit(2)


def two_dropouts():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), hyper.Dropout(0.3), nn.Linear(8, 2), hyper.Dropout(0.1))


@pytest.mark.parametrize("is_partitioned", [False, True])
@pytest.mark.parametrize("wrong", [{"centred": False}, {"order": (3, 1)}, {"order": (1,)}])
def test_a_state_of_other_responses_is_not_loaded(wrong, is_partitioned):
    def made(order=(1, 3), **options):
        network = two_dropouts()
        stn.convert(network, [network[i] for i in order], **options)
        return partnets.partition(network, (0.5, 0.5), defaults="stored") if is_partitioned else network

    saved = spread(made()).state_dict()
    made().load_state_dict(saved)
    with pytest.raises(RuntimeError, match=r"hyperparameters|centred|shape"):
        made(**wrong).load_state_dict(saved)
    # In a larger model, names have a prefix, but the responses are the same.
    network = two_dropouts()
    larger = nn.Sequential(network)
    stn.convert(larger, [network[1], network[3]])
    if not is_partitioned:
        network.load_state_dict(saved)


def test_a_trainer_goes_on_only_as_it_was(tmp_path):
    def made(**options):
        network = two_dropouts()
        trained = {"entropy": options.pop("entropy", 1e-3)}
        stn.convert(network, [network[1], network[3]], **options)
        model, chunks = partnets.held_out(network, (X, Y), validation=0.25)
        return stn.Trainer(model, chunks, batch_size=8, **trained)

    first = made()
    first.fit(2)
    first.save(tmp_path / "file")
    made().load(tmp_path / "file")
    for options in ({"centred": False}, {"linearised": True}, {"entropy": 0.5}):
        with pytest.raises(ValueError, match=next(iter(options))):
            made(**options).load(tmp_path / "file")


@pytest.mark.parametrize("lml", [False, True])
@pytest.mark.parametrize("plain", [False, True])
def test_a_batch_counts_once_in_running_statistics_at_the_present_hyperparameters(plain, lml):
    noise = hyper.InputNoise(1.0)
    network = nn.Sequential(noise, nn.BatchNorm1d(4), nn.Linear(4, 2))
    model = stn.convert(network, noise, scale=3.0, learn_scale=False, skip=["1"] if plain or lml else [])
    expected = copy.deepcopy(model[1])
    if lml:
        model = partnets.partition(model, (0.5, 0.5), defaults="stored")
        model.train()
        optimizer = optim.SGD(model, lr=0.1)
    else:
        model = partnets.Ensemble([model], count=2)
        optimizer = optim.SGD(model, lr=0.1)
    torch.manual_seed(3)
    before = copy.deepcopy(network[1])
    stn.step_weights(model, optimizer, 1, (X[:8], Y[:8]), lambda batch: F.cross_entropy(model(batch[0]), batch[1]))
    torch.manual_seed(3)
    with torch.no_grad(), vector_of(network).at_present():
        expected(noise(X[:8]))
    with partnets.subnetwork(model, 1):
        assert network[1].num_batches_tracked == 1
        torch.testing.assert_close(network[1].running_mean, expected.running_mean)
        torch.testing.assert_close(network[1].running_var, expected.running_var)
    if lml:
        assert torch.equal(network[1].running_mean, before.running_mean)  # that of subnetwork 2
        assert not torch.equal(network[1].bias_rows[0], before.bias_rows[0])  # which learned


@pytest.mark.full
def test_hyperparameters_of_a_model_of_low_precision_move():
    network = nn.Sequential(nn.Linear(4, 16), hyper.Dropout(0.3), hyper.InputNoise(0.1), nn.Linear(16, 2))
    network.to(torch.bfloat16)
    made = trainer(network, [network[1], network[2]], hyper_lr=1e-3, forward=_in_bfloat16)
    history = made.fit(30)
    assert len(set(history.values["networks.0.1.rate"])) > 20
    assert {p.dtype for p in network[0].parameters()} == {torch.bfloat16}


def _in_bfloat16(model, batch):
    return model(batch[0].to(torch.bfloat16)).float(), batch[1]


@pytest.mark.parametrize("dim", [2, 3])
def test_a_model_in_channels_last_responds(dim):
    kind, layout = (nn.Conv2d, torch.channels_last) if dim == 2 else (nn.Conv3d, torch.channels_last_3d)
    outputs = []
    for last in (False, True):
        torch.manual_seed(0)
        dropout = hyper.Dropout(0.3)
        network = nn.Sequential(kind(3, 4, 3), dropout, kind(4, 4, 3))
        if last:
            network.to(memory_format=layout)
        stn.convert(network, dropout)
        torch.manual_seed(1)
        spread(network)
        x = torch.randn(2, 3, *[12] * dim).requires_grad_()
        value = torch.randn(2, 1, requires_grad=True)
        given = x.to(memory_format=layout) if last else x
        with vector_of(network).at(value):
            network.eval()(given).square().sum().backward()
        parameters = [p.grad for p in network.parameters() if p.grad is not None]
        outputs.append([x.grad, value.grad, *parameters])
    for ours, theirs in zip(*outputs, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_wide_perturbation_is_as_wide_as_it_was_said():
    dropout = hyper.Dropout(0.3)
    stn.convert(nn.Sequential(nn.Linear(4, 2), dropout), dropout, scale=200.0)
    assert re.fullmatch(r"200\.0\d*|199\.9\d*|200", str(F.softplus(dropout.rate.scale_raw).item()))


@pytest.mark.full
def test_text_without_a_validation_set():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.words, self.head = nn.Embedding(9, 4), hyper.EmbeddingDropout(0.3), nn.Linear(4, 2)

        def forward(self, ids):
            return self.head(self.words(self.table(ids), ids).mean(1))

    network = Model()
    model = partnets.partition(stn.convert(network, network.words), (0.5, 0.3, 0.2), defaults="stored")
    chunks = partnets.chunk((torch.randint(9, (60, 5)), Y), (0.5, 0.3, 0.2))
    stn.Trainer(model, chunks, batch_size=8).fit(2)  # includes the audit


def test_names_of_a_history_are_those_of_its_network_too():
    dropout, noise = hyper.Dropout(0.3), hyper.InTraining(hyper.InputNoise(0.1))
    network = nn.Sequential(noise, nn.Linear(4, 8), dropout, nn.Linear(8, 2))
    made = trainer(network, [dropout, noise])
    names = [name for name in made.fit(2).values if not name.endswith("scale")]
    assert names == ["networks.0.2.rate", "networks.0.0.module.std"]
    assert {f"{name}, scale" for name in names} <= set(made.history.values)
    values = dict(zip(names, (0.2, 0.05), strict=True))
    for model in (network, made.model):
        for given in (values, {name.removeprefix("networks.0."): value for name, value in values.items()}):
            hyper.assign(model, dict.fromkeys(values, 0.11))
            hyper.assign(model, given)
            assert [dropout.values()["rate"], noise.values()["module.std"]] == pytest.approx([0.2, 0.05])
    stn.freeze(network, values)
    two = nn.Sequential(hyper.Dropout(0.3), nn.Sequential(hyper.Dropout(0.3)))
    for unknown in ("rate", "1.rate", "2.0.rate", "ate"):
        with pytest.raises(ValueError, match=unknown):
            hyper.assign(two, {unknown: 0.2})


def test_norms_and_biases_are_not_decayed():
    attention = nn.MultiheadAttention(4, 2, add_bias_kv=True)
    layers = [nn.LayerNorm((3, 4)), nn.RMSNorm((3, 4)), nn.GroupNorm(2, 4), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3)]
    expected = {"conv": layers[-1].weight, "in": attention.in_proj_weight, "out": attention.out_proj.weight}
    model = nn.ModuleList([*layers, attention])
    decay = hyper.WeightDecay(model, 0.1)

    def decayed():
        return {id(weight) for weight in decay.decayed()}

    assert decayed() == {id(weight) for weight in expected.values()}
    whole = nn.Sequential(nn.Linear(4, 3), decay2 := hyper.WeightDecay(nn.Linear(4, 3), 0.1))
    decay2.of = [whole[0]]
    partnets.partition(whole, (0.5, 0.5), defaults="stored")
    decay2.of = [whole[0]]
    assert [weight.shape for weight in decay2.decayed()] == [(3, 4)]


@pytest.mark.parametrize("same_along", [(2, 3), (3, 2), (-2, -1), (2,), (1,), ()])
def test_whatever_is_frozen_takes_what_it_took(same_along):
    x = torch.randn(2, 3, 4, 5)
    assert torch.equal(hyper.Dropout(0.3, same_along=same_along).to_ordinary().eval()(x), x)


@pytest.mark.parametrize("is_partitioned", [False, True])
def test_deploying_says_what_makes_an_ordinary_model(is_partitioned):
    network = two_dropouts()
    model = stn.convert(network, [network[1], network[3]])
    if is_partitioned:
        model = partnets.partition(model, (0.5, 0.5), defaults="stored")
    with pytest.raises(ValueError, match=r"stn\.freeze"):
        partnets.finalize(model, "deploy")
    assert not any(isinstance(module, stn.HyperLayer) for module in stn.freeze(model).modules())


def test_a_technique_of_the_other_trainer_is_refused():
    dropout = hyper.Dropout(0.3)
    with pytest.raises(ValueError, match=r"here all of ψ learns through the response.*partnets\.Trainer"):
        trainer(nn.Sequential(nn.Linear(4, 4), dropout, nn.Linear(4, 2)), dropout, hyper_gradient="lookahead")


@pytest.mark.parametrize("learn_scale", [True, False])
def test_partnets_trainer_refuses_layers_that_respond(learn_scale):
    dropout = hyper.Dropout(0.2)
    network = stn.convert(nn.Sequential(nn.Linear(4, 8), dropout, nn.Linear(8, 2)), dropout, learn_scale=learn_scale)
    for model, chunks in (
        partnets.held_out(copy.deepcopy(network), (X, Y), validation=0.25),
        (partnets.partition(network, (0.8, 0.2), defaults="stored"), partnets.chunk((X, Y), (0.8, 0.2))),
    ):
        with pytest.raises(ValueError, match=r"responds to hyperparameters; train it by partnets\.stn\.Trainer"):
            partnets.Trainer(model, chunks)
