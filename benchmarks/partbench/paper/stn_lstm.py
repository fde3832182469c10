"""Self-tuning networks on text: an LSTM on Python's documentation; WikiText-2 and Penn Treebank need local files."""

from __future__ import annotations

import re
from collections import Counter
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from partbench.datasets import local_text
from partbench.paper.experiment import registered
from partbench.paper.tuning import Task, Tuning
from partnets import hyper

# Tokens of an example; each starts with an empty state.
LENGTH = 35
# Words that are rarer than this in the training text become UNKNOWN.
RAREST, UNKNOWN = 3, "<unk>"
RATES = hyper.interval(0.0, 0.9)
STRENGTHS = hyper.logarithmic(1e-3, 10.0)


class LanguageModel(nn.Module):
    """The model of Merity et al. (2017): four dropout rates and two penalties; between layers there is a fifth rate."""

    def __init__(self, words: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.table = nn.Embedding(words, hidden)
        nn.init.uniform_(self.table.weight, -0.1, 0.1)
        self.drop_words, self.drop_input, self.drop_output = (
            hyper.EmbeddingDropout(0.05, range=RATES),
            hyper.Dropout(0.05, same_along=(1,), range=RATES),
            hyper.Dropout(0.05, same_along=(1,), range=RATES),
        )
        self.drop_weights = hyper.DropConnect(0.05, range=RATES)
        self.layers = nn.ModuleList(nn.LSTM(hidden, hidden, batch_first=True) for _ in range(layers))
        for layer in self.layers:
            layer.drop_connect = self.drop_weights
        self.drop_hidden = hyper.Dropout(0.05, same_along=(1,), range=RATES) if layers > 1 else nn.Identity()
        self.activation = hyper.ActivationPenalty(0.01, range=STRENGTHS)
        self.temporal = hyper.ActivationPenalty(0.01, time_dim=1, range=STRENGTHS)
        self.decoder = nn.Linear(hidden, words)
        self.decoder.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits [batch, words, length] of the next words."""
        x = self.drop_input(self.drop_words(self.table(ids), ids))
        for i, layer in enumerate(self.layers):
            x = layer(x if i == 0 else self.drop_hidden(x))[0]
        x = self.activation(self.drop_output(self.temporal(x)))
        return self.decoder(x).transpose(1, 2)


def documentation() -> list[str]:
    """Return the paragraphs of the documentation that comes with Python, each once."""
    paragraphs = (part.strip() for topic in sorted(topics) for part in re.split(r"\n\s*\n", topics[topic]))
    return list(dict.fromkeys(paragraph for paragraph in paragraphs if paragraph))


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]+", text.lower())


def encoded(parts: list[list[str]], rarest: int = RAREST) -> tuple[list[Tensor], int]:
    """Return the texts as ids in the vocabulary of the first text, and the size of this vocabulary."""
    counts = Counter(parts[0])
    frequent = sorted(word for word in counts if counts[word] >= rarest and word != UNKNOWN)
    known = {word: i for i, word in enumerate([UNKNOWN, *frequent])}
    return [torch.tensor([known.get(word, 0) for word in part]) for part in parts], len(known)


def windows(tokens: Tensor, length: int = LENGTH) -> TensorDataset:
    """Return examples of this many tokens, and the tokens that follow each of these."""
    count = (len(tokens) - 1) // length
    return TensorDataset(tokens[: count * length].view(-1, length), tokens[1 : count * length + 1].view(-1, length))


def documentation_parts(seed: int, tokens: int = 30_000) -> tuple[list[Tensor], int]:
    """Return `tokens` words for training, a quarter as many each for validation and test, and the vocabulary's size."""
    found = documentation()
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(seed)).tolist()
    text = [word for i in order for word in words_of(found[i])]
    ends = [tokens, tokens * 5 // 4, tokens * 3 // 2]
    return encoded([text[: ends[0]], text[ends[0] : ends[1]], text[ends[1] : ends[2]]])


def documentation_task(seed: int, steps: int = 2000, tokens: int = 30_000) -> Task:
    parts, words = documentation_parts(seed, tokens)
    return _task(parts, words, 128, 1, steps=steps, batch_size=20, lr=5e-3)


def wikitext_task(seed: int, steps: int = 2000) -> Task:
    """Return a task with WikiText-2's validation text for training, and halves of its test text for the rest.

    The files wikitext2-valid.txt and wikitext2-test.txt are the official wiki.valid.tokens and wiki.test.tokens.
    """
    train, held = (
        local_text(f"wikitext2-{part}.txt", f"WikiText-2's wiki.{part}.tokens") for part in ("valid", "test")
    )
    train, held = (text.replace("\n", " <eos> ").split() for text in (train, held))
    parts, words = encoded([train, held[: len(held) // 2], held[len(held) // 2 :]])
    return _task(parts, words, 128, 1, steps=steps, batch_size=20, lr=5e-3)


def treebank_task(seed: int, steps: int = 100_000) -> Task:
    """Return a task on Mikolov's Penn Treebank: ptb.train.txt, ptb.valid.txt and ptb.test.txt in the folder ptb."""
    names = [f"ptb/ptb.{part}.txt" for part in ("train", "valid", "test")]
    texts = [local_text(name, "Mikolov's Penn Treebank") for name in names]
    parts, words = encoded([text.replace("\n", " <eos> ").split() for text in texts], rarest=1)
    return _task(parts, words, 650, 2, steps=steps, batch_size=40, lr=1e-3)


def _task(parts: list[Tensor], words: int, hidden: int, layers: int, **options) -> Task:
    train, validation, test = map(windows, parts)
    rates = ["drop_words", "drop_input", "drop_output", "drop_weights", *(["drop_hidden"] if layers > 1 else [])]
    strengths = {f"{name}.strength": (1e-3, 9.0, True) for name in ("activation", "temporal")}
    return Task(
        network=lambda: LanguageModel(words, hidden, layers),
        train=train,
        validation=validation,
        test=test,
        space={**{f"{name}.rate": (0.0, 0.8, False) for name in rates}, **strengths},
        hyper_lr=1e-2,
        hyper_after=options["steps"] // 10,
        clip=0.25,
        **options,
    )


@registered
class StnLstm(Tuning):
    """Language models, with dropout of words, inputs, outputs and weights, and penalties of activations."""

    name = "stn-lstm"
    paper = "the talk's LSTM experiment"
    datasets = ("documentation", "wikitext", "treebank")
    steps = {"documentation": 2000, "wikitext": 2000, "treebank": 100_000}  # noqa: RUF012
    is_language = True

    def task(self, dataset, seed, steps):
        return {"documentation": documentation_task, "wikitext": wikitext_task, "treebank": treebank_task}[dataset](
            seed, steps
        )
