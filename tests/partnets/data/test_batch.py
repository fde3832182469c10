"""Batches: dicts and nested inputs, the logits in an output, and the targets over which losses are summed."""

import collections
import functools
import math

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.nn.utils.rnn import pack_sequence, pad_sequence

import partnets
from partnets import hyper
from partnets.data.batch import call
from partnets.utils.losses import IGNORED, mean, summed
from partnets.utils.modules import to_device

PROPORTIONS = (0.6, 0.4)


class Two(nn.Module):
    """A model with two named inputs."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, a, b=None):
        return self.first(a) + (0 if b is None else self.second(b))


class Pair(Two):
    """A model with both inputs in one argument."""

    def forward(self, both):
        a, b = both.values() if isinstance(both, dict) else both
        return super().forward(a, b)


class Packed(Two):
    def forward(self, *inputs, **named):
        return super().forward(*inputs, **named)


class Named(nn.Linear):
    """A layer that returns its logits in a dict."""

    def forward(self, x):
        return {"logits": super().forward(x), "features": x}


Point = collections.namedtuple("Point", "a b")
A, B = torch.randn(20, 3, generator=torch.Generator().manual_seed(0)), torch.ones(20, 3)
Y = (A[:, 0] > 0).long()
EXAMPLES = {
    "a dict": (Two, lambda i: {"a": A[i], "b": B[i], "labels": Y[i]}),
    "a number as label": (Two, lambda i: {"a": A[i], "b": B[i], "label": int(Y[i])}),
    "a dict of inputs": (Two, lambda i: ({"a": A[i], "b": B[i]}, Y[i])),
    "any arguments": (Packed, lambda i: {"a": A[i], "b": B[i], "target": Y[i]}),
    "a tuple": (Pair, lambda i: ((A[i], B[i]), Y[i])),
    "a namedtuple": (Pair, lambda i: (Point(A[i], B[i]), Y[i])),
    "a dict as one argument": (Pair, lambda i: ({"a": A[i], "b": B[i]}, Y[i])),
}


@pytest.mark.cases(usual=4)
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_of_every_form_train_and_evaluate_as_tensors_do(name):
    kind, example = EXAMPLES[name]
    results = []

    def by_hand(model, batch):
        return Two.forward(model, *batch[0].unbind(1)), batch[1]

    examples, tensors = [example(i) for i in range(20)], (torch.stack([A, B], 1), Y)
    for data, forward in ((examples, call), (tensors, by_hand)):
        torch.manual_seed(1)
        model = partnets.partition(kind(), PROPORTIONS)
        chunks = partnets.chunk(data, PROPORTIONS)
        partnets.Trainer(model, chunks, batch_size=6, forward=forward).fit(2)
        matrix = partnets.loss_matrix(model, chunks, forward=forward)
        results.append([partnets.lml(model, chunks, forward=forward), *matrix.flatten().tolist()])
        results[-1].append(partnets.accuracy(model, chunks[2], forward=forward))
    assert results[0] == pytest.approx(results[1], rel=1e-6)


def test_a_single_input_needs_no_name_of_the_models_and_logits_may_be_in_a_dict():
    layer, data = Named(3, 2), (A, Y)
    plain = nn.Linear(3, 2)
    plain.load_state_dict(layer.state_dict())
    examples = [{"image": A[i], "label": int(Y[i])} for i in range(20)]
    for found in (partnets.accuracy(layer, data), partnets.accuracy(layer, examples)):
        assert found == partnets.accuracy(plain, data)
    assert partnets.mean_loss(layer, examples) == pytest.approx(partnets.mean_loss(plain, data))


class Vectors(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return A[i]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (Vectors(), "a batch is a Tensor; pass chunks of pairs"),
        ([(A[i], B[i], Y[i]) for i in range(8)], "an example has 3 parts; .*forward="),
        ([{"a": A[i], "b": B[i]} for i in range(8)], "'a', 'b', none of labels, label, targets, target"),
        ([{"a": A[i], "label": 1, "labels": 1} for i in range(8)], "several of labels"),
        ([{"a": A[i], "idx": i, "labels": 1} for i in range(8)], "has 'idx', which forward of Two .* a, b"),
    ],
)
def test_examples_that_make_no_batch_are_named(data, message):
    model = partnets.partition(Two(), PROPORTIONS)
    chunks = partnets.chunk(data, PROPORTIONS)
    for use in (partnets.Trainer(model, chunks, batch_size=2).step, lambda: partnets.lml(model, chunks)):
        with pytest.raises(ValueError, match=message):
            use()


def test_tensors_go_to_a_device_from_any_container():
    meta = torch.device("meta")
    batch = (Point(A, [B]), transformers.BatchEncoding({"x": Y}), collections.UserDict(z=A), "text", None)
    point, encoding, user, *rest = to_device(batch, meta)
    moved = [point.a, point.b[0], encoding["x"], user["z"]]
    assert all(each.device == meta for each in moved) and rest == ["text", None]
    packed = to_device(pack_sequence([A[0], B[0]]), meta)
    assert packed.data.device == meta and packed.batch_sizes.device.type == "cpu"


def bert(head, **options):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(2)
    model = head(transformers.BertConfig(vocab_size=30, **sizes, **still, **options))
    return partnets.partition(model, PROPORTIONS, defaults="seed")


class Sentences(torch.utils.data.Dataset):
    """A data set like Hugging Face's `datasets`: dicts of lists of different lengths, fetched in batches."""

    asked = 0

    def __len__(self):
        return 16

    def __getitem__(self, i):
        return {"input_ids": [1 + (i + j) % 29 for j in range(2 + i % 5)], "label": i % 2}

    def __getitems__(self, indices):
        self.asked += 1
        return [self[i] for i in indices]


def padded(examples):
    """Collate like transformers' collators: a BatchEncoding with a mask, and a label for each token or sentence."""
    ids = [torch.tensor(each["input_ids"]) for each in examples]
    found = {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(each) for each in ids], batch_first=True),
        "labels": torch.tensor([each["label"] for each in examples]),
    }
    return transformers.BatchEncoding(found)


def tagged(examples):
    labels = [torch.tensor(each["input_ids"]) % 4 for each in examples]
    return padded(examples) | {"labels": pad_sequence(labels, batch_first=True, padding_value=IGNORED)}


def test_a_model_of_transformers_learns_from_padded_dicts():
    model, data = bert(transformers.BertForSequenceClassification), Sentences()
    chunks = partnets.chunk(data, PROPORTIONS, collate=padded)
    partnets.Trainer(model, chunks, batch_size=4, audit=False).fit(2)
    assert data.asked == 2
    expected = 0.0
    with partnets.subnetwork(model, active=1), torch.no_grad():
        for i in chunks.indices(2).tolist():
            example = data[i]
            logits = model.eval()(torch.tensor([example["input_ids"]])).logits
            expected += logits.log_softmax(1)[0, example["label"]].item()
    for loss in (F.cross_entropy, nn.CrossEntropyLoss(), lambda output, y: F.cross_entropy(output.logits, y)):
        assert partnets.lml(model, chunks, loss, batch_size=3) == pytest.approx(expected, rel=1e-4)


def of_tokens(output, y):
    return F.cross_entropy(output.logits.transpose(1, 2), y)


def each_token(output, y):
    return F.cross_entropy(output.logits.transpose(1, 2), y, reduction="none")[y != IGNORED]


def transposed(model, batch):
    labels = batch.pop("labels")
    return model(**batch).logits.transpose(1, 2), labels


@pytest.mark.full
@pytest.mark.parametrize("how", [{"loss": of_tokens}, {"loss": each_token}, {"forward": transposed}])
def test_lml_is_the_sum_over_real_tokens_whatever_the_batches(how):
    model = bert(transformers.BertForTokenClassification, num_labels=4)
    chunks = partnets.chunk(Sentences(), PROPORTIONS, collate=tagged)
    expected, count = 0.0, 0
    with partnets.subnetwork(model, active=1), torch.no_grad():
        for i in chunks.indices(2).tolist():
            ids = torch.tensor([Sentences()[i]["input_ids"]])
            found = model.eval()(ids).logits[0].log_softmax(1)
            expected, count = expected + found[range(ids.shape[1]), ids[0] % 4].sum().item(), count + ids.shape[1]
    for batch_size in (1, 3, 16):
        assert partnets.lml(model, chunks, **how, batch_size=batch_size) == pytest.approx(expected, rel=1e-4)
        matrix = partnets.loss_matrix(model, chunks, **how, batch_size=batch_size)
        assert matrix[0, 1].item() == pytest.approx(-expected / count, rel=1e-4)
    partnets.Trainer(model, chunks, **how, batch_size=4).fit(1)


# Which targets count. Each loss is a function of (output, y), next to the expected mean.


def own(ignored, **options):
    return lambda output, y: F.cross_entropy(output, y, ignore_index=ignored, **options)


@pytest.mark.parametrize(("ignored", "shape"), [(255, ()), (-1, (6,)), (0, (6,)), (IGNORED, (2, 3))])
def test_labels_that_a_loss_ignores_count_nowhere(ignored, shape):
    x, y = torch.randn(8, 3, *shape), torch.randint(1, 3, (8, *shape))
    y[torch.rand(8, *shape) < 0.4] = ignored
    y[0] = ignored  # a batch of ignored labels only
    expected = F.cross_entropy(x, y, ignore_index=ignored).item()
    losses = [nn.CrossEntropyLoss(ignore_index=ignored, reduction=reduction) for reduction in ("mean", "none")]
    if ignored:
        losses += [own(ignored, reduction="none")]
    else:  # a class, which a user's vector of losses must leave out itself
        losses += [lambda output, y: F.cross_entropy(output, y, reduction="none")[y != 0]]
    for loss in (*losses, own(ignored)):
        for batch_size in (1, 3, 8):
            assert partnets.mean_loss(nn.Identity(), (x, y), loss, batch_size=batch_size) == pytest.approx(expected)
    for loss in losses:
        assert mean(loss, x, y).item() == pytest.approx(expected) and mean(loss, x[:1], y[:1]) == 0
    accuracy = (x.argmax(1) == y)[y != ignored].float().mean().item()
    options = {} if ignored else {"ignore_index": 0}
    assert partnets.accuracy(nn.Identity(), (x, y), batch_size=3, **options) == pytest.approx(accuracy)


def test_tokens_with_their_classes_last_are_counted():
    x, y = torch.randn(8, 6, 3), torch.randint(3, (8, 6))
    y[:, 4:] = 255
    loss = lambda output, y: own(255)(output.flatten(0, 1), y.flatten())  # noqa: E731
    expected = F.cross_entropy(x.flatten(0, 1), y.flatten(), ignore_index=255).item()
    assert partnets.mean_loss(nn.Identity(), (x, y), loss, batch_size=3) == pytest.approx(expected)
    assert summed(loss, x, y, 8)[1] == 8 * 4


def nll(output, y):
    return F.gaussian_nll_loss(output[:, 0], y.float(), output[:, 1].exp(), reduction="none")


@pytest.mark.parametrize(
    ("x", "y", "loss", "expected"),
    [
        # Out-of-range or negative integers count if the loss depends on the outputs for them.
        (torch.randn(9, 2), torch.tensor([0, 1, 2, 5, 255, -1, -3, 0, 1]), nll, lambda x, y: nll(x, y).mean()),
        (torch.randn(9, 2), torch.tensor([0, 1, 2, 5, 255, -1, -3, 0, 1]), lambda x, y: nll(x, y).mean(),
         lambda x, y: nll(x, y).mean()),
        (torch.zeros(3, 2), torch.tensor([[0, -100], [1, 2], [3, 4]]), lambda x, y: y.float().mean(),
         lambda x, y: y.float().mean()),
        # Means of one value that keep their dimension, and means in low precision.
        (torch.randn(20, 3), torch.randint(3, (20,)), lambda x, y: F.cross_entropy(x, y)[None], F.cross_entropy),
        (8 * torch.randn(300, 5).bfloat16(), torch.randint(5, (300,)), F.cross_entropy,
         lambda x, y: F.cross_entropy(x.double(), y)),
    ],
)  # fmt: skip
def test_all_other_targets_count(x, y, loss, expected):
    for batch_size in (1, 4, 64):
        found = partnets.mean_loss(nn.Identity(), (x, y), loss, batch_size=batch_size)
        assert found == pytest.approx(expected(x, y).item(), rel=1e-5)


@pytest.mark.parametrize(
    ("loss", "likelihood"),
    [
        (nn.BCEWithLogitsLoss(), lambda x: torch.distributions.Bernoulli(logits=x)),
        (F.binary_cross_entropy, lambda x: torch.distributions.Bernoulli(x)),
        (functools.partial(F.binary_cross_entropy_with_logits, pos_weight=torch.tensor([1.0, 3.0])),
         lambda x: torch.distributions.Bernoulli(logits=x)),
    ],
)  # fmt: skip
def test_several_labels_of_yes_or_no_count_each(loss, likelihood):
    model = partnets.partition(nn.Sequential(nn.Linear(3, 2), nn.Sigmoid()), (0.5, 0.5))
    x, y = torch.randn(10, 3), torch.randint(2, (10, 2)).float()
    chunks = partnets.chunk((x, y), (0.5, 0.5))
    unseen = chunks.indices(2)
    with torch.no_grad(), partnets.subnetwork(model, active=1):
        expected = likelihood(model(x[unseen])).log_prob(y[unseen]).sum().item()
    for batch_size in (1, 3):
        assert partnets.lml(model, chunks, loss, batch_size=batch_size) == pytest.approx(expected, rel=1e-5)


def test_accuracy_ignores_labels_that_are_no_classes():
    x = torch.eye(3)[torch.tensor([0, 1, 2, 0])]
    assert partnets.accuracy(nn.Identity(), (x, torch.tensor([0, 1, 0, 254])), ignore_index=254) == pytest.approx(2 / 3)
    wide = torch.eye(300)
    assert partnets.accuracy(nn.Identity(), (wide, torch.arange(300).where(torch.arange(300) != 255, 0))) == 299 / 300
    logits, y = torch.eye(4), torch.arange(4)
    logits[2, 0] = torch.nan
    assert math.isnan(partnets.accuracy(nn.Identity(), (logits, y)))
    assert partnets.accuracy(nn.Identity(), (logits, y.where(y != 2, -100))) == 1.0


class Tokens(nn.Module):
    def __init__(self, last):
        super().__init__()
        self.words, self.head, self.last = nn.Embedding(20, 8), nn.Linear(8, 20), last

    def forward(self, x):
        return self.last(self.head(self.words(x)).transpose(1, 2))


def test_weighed_losses_are_judged_by_the_sum_over_targets():
    torch.manual_seed(0)
    ids, loss = torch.randint(20, (60, 7)), hyper.SourceWeights(2)
    targets = ids.roll(-1, 1)
    for row in targets:
        row[torch.randint(2, 7, ()) :] = IGNORED
    y = list(zip(targets, [i % 2 for i in range(60)], strict=True))
    model = partnets.partition(Tokens(loss), (0.8, 0.2))
    chunks = partnets.chunk(list(zip(ids, y, strict=True)), (0.8, 0.2))
    judged = partnets.Trainer(model, chunks, loss=loss, hyper=loss, batch_size=16).hyper_loss
    unseen = chunks.indices(2)
    with torch.no_grad(), partnets.subnetwork(model.eval(), active=1):
        expected = -F.cross_entropy(model(ids[unseen]), targets[unseen], reduction="sum").item()
    for batch_size in (4, 60):
        assert partnets.lml(model, chunks, judged, batch_size=batch_size) == pytest.approx(expected, rel=1e-5)


def test_mixup_of_several_labels_is_judged_by_the_sum_over_labels():
    torch.manual_seed(0)
    x, y = torch.randn(60, 5), torch.rand(60, 6).round()
    bce = F.binary_cross_entropy_with_logits
    mixup = hyper.Mixup(0.5, bce)
    model = partnets.partition(nn.Sequential(mixup, nn.Linear(5, 6)), (0.8, 0.2))
    chunks = partnets.chunk((x, y), (0.8, 0.2))
    judged = partnets.Trainer(model, chunks, loss=mixup.loss, hyper=mixup, batch_size=16).hyper_loss
    unseen = chunks.indices(2)
    with torch.no_grad(), partnets.subnetwork(model.eval(), active=1):
        expected = -bce(model(x[unseen]), y[unseen], reduction="sum").item()
    assert partnets.lml(model, chunks, judged, batch_size=7) == pytest.approx(expected, rel=1e-5)
