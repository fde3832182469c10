"""Models of other libraries are partitioned, trained, saved, resumed and merged without leaks."""

import copy

import pytest
import torch
import torch.nn.functional as F
from ownership import same
from torch import nn

import partnets

PROPORTIONS = (0.8, 0.1, 0.1)
COUNT, STEPS, EXAMPLES = 3, 50, 24


def timm(name, **options):
    import timm

    return timm.create_model(name, num_classes=3, **options)


def resnet18():
    return timm("resnet18", in_chans=1, channels=(16, 32, 64, 128))  # a quarter of its width


def bert_tiny():
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return BertForSequenceClassification(BertConfig(vocab_size=50, num_labels=3, **sizes))


class LanguageModel(nn.Module):
    """A model with two LSTM layers and tied weights of embedding and decoder."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 24)
        self.lstm = nn.LSTM(24, 24, num_layers=2, batch_first=True)
        self.decoder = nn.Linear(24, 50)
        self.decoder.weight = self.embedding.weight

    def forward(self, ids):
        return self.decoder(self.lstm(self.embedding(ids))[0])


IMAGES = torch.randn(EXAMPLES, 1, 16, 16, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(EXAMPLES) % 3
IMAGES += LABELS.view(-1, 1, 1, 1) - 1  # makes the labels learnable
TOKENS = torch.randint(50, (EXAMPLES, 12), generator=torch.Generator().manual_seed(0))
ZOO = {
    "ResNet-18": (resnet18, IMAGES, LABELS),
    "BERT-tiny": (bert_tiny, TOKENS, LABELS),
    "LSTM": (LanguageModel, TOKENS, TOKENS),
}
every_model = pytest.mark.parametrize("name", ZOO)


def logits(output):
    return getattr(output, "logits", output)


def loss(output, y):
    scores = logits(output)
    if y.dim() == 1:
        return F.cross_entropy(scores, y)
    return F.cross_entropy(scores[:, :-1].flatten(0, 1), y[:, 1:].flatten())


def trainer(name, changed=None):
    """Return a reproducible trainer, with different examples in chunk `changed` if given."""
    make, x, y = ZOO[name]
    torch.manual_seed(0)
    model = partnets.partition(make(), PROPORTIONS, defaults="seed")
    chunks = partnets.chunk((x, y), (0.6, 0.2, 0.2))
    if changed is not None:
        x = x.clone()
        x[chunks.indices(changed)] = x[chunks.indices(changed)].flip(-1)
        y = x if y is TOKENS else y
        chunks = partnets.chunk((x, y), (0.6, 0.2, 0.2))
    optimizer = partnets.optim.Adam(model, lr=1e-3)
    return partnets.Trainer(model, chunks, optimizer=optimizer, loss=loss, batch_size=4)


@pytest.mark.full
@every_model
def test_nothing_of_a_later_chunk_reaches_earlier_partitions(name):
    pair = [trainer(name, changed) for changed in (None, COUNT)]
    for one in pair:
        torch.manual_seed(1)  # seed of dropout
        one.fit(8)
    assert COUNT in pair[0].history.steps["k"] and COUNT - 1 in pair[0].history.steps["k"]
    earlier, last = [*range(1, COUNT)], [COUNT]
    learned = [(one.model, one.optimizer.state) for one in pair]
    assert same(learned, earlier)
    assert not same(learned, last)


def evaluated(name, model):
    _, x, y = ZOO[name]
    with torch.no_grad():
        output = model.eval()(x)
    return logits(output), float(loss(output, y))


@pytest.mark.full
@every_model
def test_a_model_is_trained_saved_resumed_and_merged(name, tmp_path):
    first = trainer(name)
    before = evaluated(name, first.model)[1]
    torch.manual_seed(1)
    first.model.train()
    first.fit(STEPS - 5)
    first.save(tmp_path / "model.pt")
    first.fit(5)
    outputs, after = evaluated(name, first.model)
    assert after < before

    second = trainer(name)
    second.load(tmp_path / "model.pt")
    second.fit(5)
    assert all(torch.equal(a, b) for a, b in zip(*(one.model.parameters() for one in (first, second)), strict=True))

    merged, dense = partnets.merge(first.model), ZOO[name][0]()
    assert {type(module) for module in merged.modules()} == {type(module) for module in dense.modules()}
    torch.testing.assert_close(evaluated(name, merged)[0], outputs, rtol=1e-4, atol=1e-5)
    dense.load_state_dict(merged.state_dict())


def test_tied_layers_keep_one_parameter_and_one_partition():
    model = partnets.partition(LanguageModel(), PROPORTIONS)
    assert model.decoder.weight is model.embedding.weight
    assert model.decoder.weight_partition is model.embedding.weight_partition
    again = copy.deepcopy(model)
    assert again.decoder.weight is again.embedding.weight
    again.load_state_dict(model.state_dict())
    with partnets.subnetwork(model, 1):
        seen = model.decoder(torch.eye(24)) - model.decoder(torch.zeros(24))
        torch.testing.assert_close(seen.t(), model.embedding(torch.arange(50)), rtol=1e-5, atol=1e-6)
    merged = partnets.merge(model)
    assert merged.decoder.weight is merged.embedding.weight
