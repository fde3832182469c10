"""Batches: dicts and nested inputs, the logits in an output, and the weight of a batch's mean loss."""

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
from partnets.utils.likelihood import IGNORED
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


class Packed(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *inputs, **named):
        return self.inner(*inputs, **named)


Point = collections.namedtuple("Point", "a b")
A, B = torch.randn(20, 3, generator=torch.Generator().manual_seed(0)), torch.ones(20, 3)
Y = (A[:, 0] > 0).long()
EXAMPLES = {
    "dict": (Two, lambda i: {"a": A[i], "b": B[i], "labels": Y[i]}),
    "label": (Two, lambda i: {"a": A[i], "b": B[i], "label": int(Y[i])}),
    "a dict of inputs": (Two, lambda i: ({"a": A[i], "b": B[i]}, Y[i])),
    "wrapped": (lambda: Packed(Two()), lambda i: {"a": A[i], "b": B[i], "target": Y[i]}),
    "a tuple": (Pair, lambda i: ((A[i], B[i]), Y[i])),
    "a namedtuple": (Pair, lambda i: (Point(A[i], B[i]), Y[i])),
    "a dict as one argument": (Pair, lambda i: ({"a": A[i], "b": B[i]}, Y[i])),
}


@pytest.mark.cases(usual=5)
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_of_every_form_train_and_evaluate_as_tensors_do(name):
    make, example = EXAMPLES[name]
    results = []
    plain = (lambda: Packed(Pair())) if name == "wrapped" else Pair
    examples, tensors = [example(i) for i in range(20)], (torch.stack([A, B], 1), Y)
    by_hand = lambda model, batch: (model(batch[0].unbind(1)), batch[1])  # noqa: E731
    for kind, data, forward in ((make, examples, call), (plain, tensors, by_hand)):
        torch.manual_seed(1)
        model = partnets.partition(kind(), PROPORTIONS)
        chunks = partnets.chunk(data, PROPORTIONS)
        partnets.Trainer(model, chunks, batch_size=6, forward=forward, lml_every=2).fit(3)
        matrix = partnets.loss_matrix(model, chunks, forward=forward)
        results.append([partnets.lml(model, chunks, forward=forward), *matrix.flatten().tolist()])
        results[-1].append(partnets.accuracy(model, chunks[2], forward=forward))
    assert results[0] == pytest.approx(results[1], rel=1e-6)


def test_a_single_input_needs_no_name_of_the_models():
    model = partnets.partition(nn.Sequential(hyper.InputMask(3), nn.Linear(3, 2)), PROPORTIONS)
    chunks = partnets.chunk([{"image": A[i], "label": int(Y[i])} for i in range(20)], PROPORTIONS)
    partnets.Trainer(model, chunks, hyper=model[0], batch_size=4).fit(2)
    assert partnets.lml(model, chunks) == pytest.approx(partnets.lml(model, partnets.chunk((A, Y), PROPORTIONS)))


def test_baselines_take_dicts():
    data = [{"a": A[i], "b": B[i], "labels": Y[i]} for i in range(20)]
    model, chunks = partnets.single_chunk(Two(), data)
    assert len(partnets.Trainer(model, chunks, batch_size=4).fit(2).steps["k"]) == 2


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
    """Collate like transformers' DataCollatorWithPadding: a BatchEncoding with a mask and `labels`."""
    ids = [torch.tensor(each["input_ids"]) for each in examples]
    found = {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(each) for each in ids], batch_first=True),
        "labels": torch.tensor([each["label"] for each in examples]),
    }
    return transformers.BatchEncoding(found)


LOSSES = {
    "torch's": F.cross_entropy,
    "module": nn.CrossEntropyLoss(),
    "partial": functools.partial(F.cross_entropy, reduction="none"),
    "own": lambda output, y: F.cross_entropy(output.logits, y),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_model_of_transformers_learns_from_padded_dicts(loss):
    model, data = bert(transformers.BertForSequenceClassification), Sentences()
    chunks = partnets.chunk(data, PROPORTIONS, collate=padded)
    partnets.Trainer(model, chunks, loss=loss, batch_size=4, audit=False).fit(2)
    assert data.asked == 2
    expected = 0.0
    with partnets.subnetwork(model, active=1), torch.no_grad():
        for i in chunks.indices(2).tolist():
            example = data[i]
            logits = model.eval()(torch.tensor([example["input_ids"]])).logits
            expected += logits.log_softmax(1)[0, example["label"]].item()
    assert partnets.lml(model, chunks, loss, batch_size=3) == pytest.approx(expected, rel=1e-4)


def tagged(examples):
    """Collate batches with different amounts of padding and a class for each token."""
    rows = [torch.tensor(each["input_ids"]) for each in examples]
    labels = [row % 4 for row in rows]
    return {
        "input_ids": pad_sequence(rows, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in rows], batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORED),
    }


def of_tokens(output, y):
    return F.cross_entropy(output.logits.transpose(1, 2), y)


def each_token(output, y):
    return F.cross_entropy(output.logits.transpose(1, 2), y, reduction="none")[y != IGNORED]


def transposed(model, batch):
    labels = batch.pop("labels")
    return model(**batch).logits.transpose(1, 2), labels


@pytest.mark.cases(usual=0, full=4)
@pytest.mark.parametrize("batch_size", [1, 3, 16])
@pytest.mark.parametrize("how", [{"loss": of_tokens}, {"loss": each_token}, {"forward": transposed}])
def test_lml_is_the_sum_over_real_tokens_whatever_the_batches(how, batch_size):
    model = bert(transformers.BertForTokenClassification, num_labels=4)
    chunks = partnets.chunk(Sentences(), PROPORTIONS, collate=tagged)
    expected, right, count = 0.0, 0, 0
    with partnets.subnetwork(model, active=1), torch.no_grad():
        for i in chunks.indices(2).tolist():
            ids = torch.tensor([Sentences()[i]["input_ids"]])
            found = model.eval()(ids).logits[0].log_softmax(1)
            expected += found[range(ids.shape[1]), ids[0] % 4].sum().item()
            right, count = right + int((found.argmax(1) == ids[0] % 4).sum()), count + ids.shape[1]
    assert partnets.lml(model, chunks, **how, batch_size=batch_size) == pytest.approx(expected, rel=1e-4)
    matrix = partnets.loss_matrix(model, chunks, **how, batch_size=batch_size)
    assert matrix[0, 1].item() == pytest.approx(-expected / count, rel=1e-4)
    if "forward" in how:
        with partnets.subnetwork(model, active=1):
            found = partnets.accuracy(model, chunks[2], collate=tagged, batch_size=batch_size, forward=transposed)
        assert found == pytest.approx(right / count)
    partnets.Trainer(model, chunks, **how, batch_size=batch_size).fit(1)


def next_token(model, batch):
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:]


@pytest.mark.full
def test_a_language_model_sums_over_the_tokens_that_it_predicts():
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
    torch.manual_seed(3)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=30, resid_pdrop=0.0, **sizes))
    partnets.partition(model, PROPORTIONS, defaults="seed")
    chunks = partnets.chunk(Sentences(), PROPORTIONS, collate=tagged)
    expected = 0.0
    with partnets.subnetwork(model, active=1), torch.no_grad():
        for i in chunks.indices(2).tolist():
            ids = torch.tensor([Sentences()[i]["input_ids"]])
            labels = ids % 4
            expected -= (ids.shape[1] - 1) * model.eval()(ids, labels=labels).loss.item()  # transformers shifts too
    assert partnets.lml(model, chunks, batch_size=3, forward=next_token) == pytest.approx(expected, rel=1e-4)
    partnets.Trainer(model, chunks, batch_size=4, forward=next_token).fit(1)


def test_targets_that_do_not_count_are_left_out():
    logits = torch.tensor([[0.0, 0.0], [0.0, 0.0], [5.0, -5.0]])
    y = torch.tensor([IGNORED, 1, IGNORED])
    for batch_size in (1, 2, 3):
        assert partnets.mean_loss(nn.Identity(), (logits, y), batch_size=batch_size) == pytest.approx(math.log(2))
    assert partnets.accuracy(nn.Identity(), (logits, y)) == 0.0
    with pytest.raises(ValueError, match="no target of these 3 examples counts: all are -100"):
        partnets.mean_loss(nn.Identity(), (logits, torch.full((3,), IGNORED)))


def test_numbers_that_are_no_classes_count_an_example_each():
    x, y = torch.zeros(3, 2), torch.tensor([[0, -100], [1, 2], [3, 4]])
    found = [
        partnets.mean_loss(nn.Identity(), (x, y), lambda output, y: y.float().mean(), batch_size=n) for n in (1, 3)
    ]
    assert found == pytest.approx([-15.0, -15.0])


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize(
    ("loss", "likelihood"),
    [
        (nn.BCEWithLogitsLoss(), lambda x: torch.distributions.Bernoulli(logits=x)),
        (F.binary_cross_entropy, lambda x: torch.distributions.Bernoulli(x)),
        (functools.partial(F.binary_cross_entropy_with_logits, pos_weight=torch.tensor([1.0, 3.0])),
         lambda x: torch.distributions.Bernoulli(logits=x)),
    ],
)  # fmt: skip
def test_several_labels_of_yes_or_no_count_each(loss, likelihood, batch_size):
    torch.manual_seed(0)
    model = partnets.partition(nn.Sequential(nn.Linear(3, 2), nn.Sigmoid()), (0.5, 0.5))
    x, y = torch.randn(10, 3), torch.randint(2, (10, 2)).float()
    chunks = partnets.chunk((x, y), (0.5, 0.5))
    unseen = chunks.indices(2)
    with torch.no_grad(), partnets.subnetwork(model, active=1):
        expected = likelihood(model(x[unseen])).log_prob(y[unseen]).sum().item()
    assert partnets.lml(model, chunks, loss, batch_size=batch_size) == pytest.approx(expected, rel=1e-5)


class Vectors(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return A[i]


WRONG = {
    "a tensor": (Vectors(), {}, "a batch is a Tensor; pass chunks of pairs"),
    "three parts": ([(A[i], B[i], Y[i]) for i in range(8)], {}, "an example has 3 parts; .*forward="),
    "no labels": ([{"a": A[i], "b": B[i]} for i in range(8)], {}, "'a', 'b', none of labels, label, targets, target"),
    "two labels": ([{"a": A[i], "label": 1, "labels": 1} for i in range(8)], {}, "several of labels"),
    "a name": ([{"a": A[i], "idx": i, "labels": 1} for i in range(8)], {}, "has 'idx', which forward of Two .* a, b"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_batch_is_named(name):
    data, options, message = WRONG[name]
    model = partnets.partition(Two(), PROPORTIONS)
    chunks = partnets.chunk(data, PROPORTIONS)
    for use in (partnets.Trainer(model, chunks, batch_size=2, **options).step, lambda: partnets.lml(model, chunks)):
        with pytest.raises(ValueError, match=message):
            use()


def test_accuracy_names_labels_of_another_shape():
    with pytest.raises(ValueError, match=r"logits are \[4, 4\] and the labels \[4, 1\]"):
        partnets.accuracy(nn.Identity(), (torch.eye(4), torch.zeros(4, 1)))


class Named(nn.Linear):
    """A layer that returns its logits in a dict."""

    def forward(self, x):
        return {"logits": super().forward(x), "features": x}


def test_logits_may_be_in_a_dict_and_what_is_neither_is_named():
    data = torch.randn(8, 3), torch.randint(2, (8,))
    model = Named(3, 2)
    plain = nn.Linear(3, 2)
    plain.load_state_dict(model.state_dict())
    assert partnets.accuracy(model, data) == partnets.accuracy(plain, data)
    assert partnets.mean_loss(model, data, F.cross_entropy) == partnets.mean_loss(plain, data, F.cross_entropy)
    several = nn.Sequential(plain, nn.LSTM(2, 2))
    with pytest.raises(ValueError, match="the output is a tuple without logits"):
        partnets.accuracy(several, data)
    with pytest.raises(TypeError, match="gave a tuple; it must give a tensor"):
        partnets.mean_loss(plain, data, lambda output, y: (F.cross_entropy(output, y), 0))


def test_labels_of_groups_that_are_no_keys_are_named():
    with pytest.raises(TypeError, match="groups has labels that can be no dict's keys"):
        partnets.chunk((torch.randn(4, 3), torch.arange(4) % 2), PROPORTIONS, groups=[[1], [2], [1], [2]])


def test_tensors_go_to_a_device_from_wherever_they_are():
    meta = torch.device("meta")
    batch = (Point(A, [B]), transformers.BatchEncoding({"x": Y}), collections.UserDict(z=A), "text", None)
    point, encoding, user, *rest = to_device(batch, meta)
    moved = [point.a, point.b[0], encoding["x"], user["z"]]
    assert all(each.device == meta for each in moved) and rest == ["text", None]
    packed = to_device(pack_sequence([A[0], B[0]]), meta)
    assert packed.data.device == meta and packed.batch_sizes.device.type == "cpu"


@pytest.mark.parametrize("ignored", [IGNORED, 0])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_targets_that_a_loss_ignores_count_nowhere(ignored, reduction, batch_size):
    torch.manual_seed(0)
    x = torch.randn(8, 4, 6)  # [examples, features, tokens]
    y = torch.randint(1, 3, (8, 6))
    y[torch.rand(8, 6) < 0.4] = ignored
    loss = nn.CrossEntropyLoss(ignore_index=ignored, reduction=reduction)
    model = nn.Conv1d(4, 3, 1)
    expected = F.cross_entropy(model(x), y, ignore_index=ignored)
    found = partnets.mean_loss(model, (x, y), loss, batch_size=batch_size)
    assert found == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(partnets.data.batch.mean(loss, model(x), y), expected)


def ignoring(ignored):
    return lambda output, y: F.cross_entropy(output, y, ignore_index=ignored)


@pytest.mark.parametrize("ignored", [255, -1, IGNORED])
@pytest.mark.parametrize("shape", [(), (6,), (2, 3)])
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_labels_that_ones_own_loss_ignores_count_nowhere(ignored, shape, batch_size):
    torch.manual_seed(0)
    x, y = torch.randn(8, 3, *shape), torch.randint(3, (8, *shape))
    y[torch.rand(8, *shape) < 0.4] = ignored
    y[0] = ignored  # a batch of ignored labels only
    expected = F.cross_entropy(x, y, ignore_index=ignored).item()
    own = [ignoring(ignored), lambda *each: F.cross_entropy(*each, ignore_index=ignored, reduction="none")]
    for loss in own:
        assert partnets.mean_loss(nn.Identity(), (x, y), loss, batch_size=batch_size) == pytest.approx(expected)
        assert partnets.data.batch.mean(loss, x, y).item() == pytest.approx(expected)
        assert partnets.data.batch.mean(loss, x[:1], y[:1]) == 0
    counted = y != ignored
    accuracy = (x.argmax(1) == y)[counted].float().mean().item()
    assert partnets.accuracy(nn.Identity(), (x, y), batch_size=batch_size) == pytest.approx(accuracy)


def test_tokens_with_their_classes_last_are_counted():
    x, y = torch.randn(8, 6, 3), torch.randint(3, (8, 6))
    y[:, 4:] = 255
    flat = x.flatten(0, 1), y.flatten()
    loss = lambda output, y: ignoring(255)(output.flatten(0, 1), y.flatten())  # noqa: E731
    expected = F.cross_entropy(*flat, ignore_index=255).item()
    assert partnets.mean_loss(nn.Identity(), (x, y), loss, batch_size=3) == pytest.approx(expected)
    assert partnets.data.batch.total(loss, x, y, 8)[1] == 8 * 4


@pytest.mark.parametrize("reduced", [False, True])
def test_whole_numbers_of_a_regression_all_count(reduced):
    """Check that out-of-range or negative integer targets count if the loss depends on the outputs for them."""
    x, y = torch.randn(9, 2), torch.tensor([0, 1, 2, 5, 255, -1, -3, 0, 1])

    def loss(output, y):
        found = F.gaussian_nll_loss(output[:, 0], y.float(), output[:, 1].exp(), reduction="none")
        return found.mean() if reduced else found

    expected = loss(x, y).mean().item()
    assert partnets.mean_loss(nn.Identity(), (x, y), loss, batch_size=4) == pytest.approx(expected, rel=1e-5)


def test_labels_that_are_no_classes_are_no_wrong_predictions():
    x = torch.eye(3)[torch.tensor([0, 1, 2, 0])]
    for y in ([1, 2, 3, 1], [0, 1, 2, 254]):
        with pytest.raises(ValueError, match=r"the network has 3 classes; pass labels from 0, or ignore_index="):
            partnets.accuracy(nn.Identity(), (x, torch.tensor(y)))
    assert partnets.accuracy(nn.Identity(), (x, torch.tensor([0, 1, 0, 254])), ignore_index=254) == pytest.approx(2 / 3)
    assert partnets.accuracy(nn.Identity(), (x, torch.tensor([0, 1, 1, 1])), ignore_index=0) == pytest.approx(1 / 3)
    wide = torch.eye(300)
    assert partnets.accuracy(nn.Identity(), (wide, torch.arange(300).where(torch.arange(300) != 255, 0))) == 299 / 300


class Tokens(nn.Module):
    def __init__(self, last):
        super().__init__()
        self.words, self.head, self.last = nn.Embedding(20, 8), nn.Linear(8, 20), last

    def forward(self, x):
        return self.last(self.head(self.words(x)).transpose(1, 2))


@pytest.mark.parametrize("batch_size", [4, 60])
def test_weighed_losses_are_judged_by_the_sum_over_targets(batch_size):
    torch.manual_seed(0)
    ids, loss = torch.randint(20, (60, 7)), hyper.SourceWeights(2)
    targets = ids.roll(-1, 1)
    for row in targets:
        row[torch.randint(2, 7, ()) :] = IGNORED
    y = list(zip(targets, [i % 2 for i in range(60)], strict=True))
    model, chunks = (
        partnets.partition(Tokens(loss), (0.8, 0.2)),
        partnets.chunk(list(zip(ids, y, strict=True)), (0.8, 0.2)),
    )
    judged = partnets.Trainer(model, chunks, loss=loss, hyper=loss, batch_size=16).hyper_loss
    unseen = chunks.indices(2)
    with torch.no_grad(), partnets.subnetwork(model.eval(), active=1):
        expected = -F.cross_entropy(model(ids[unseen]), targets[unseen], reduction="sum").item()
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


def test_a_mean_of_few_bits_is_not_rounded_before_it_is_summed():
    torch.manual_seed(0)
    logits, y = 8 * torch.randn(300, 5), torch.randint(5, (300,))
    low = logits.bfloat16()
    expected = F.cross_entropy(low.double(), y).item()
    assert partnets.mean_loss(nn.Identity(), (low, y), batch_size=64) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("batch_size", [1, 3, 20])
def test_a_mean_that_keeps_its_dimension_is_a_mean(batch_size):
    x, y = torch.randn(20, 4), torch.randint(3, (20,))
    network = nn.Linear(4, 3)
    kept = partnets.mean_loss(
        network, (x, y), lambda output, y: F.cross_entropy(output, y)[None], batch_size=batch_size
    )
    assert kept == pytest.approx(F.cross_entropy(network(x), y).item(), rel=1e-5)
