"""Learn a dropout rate together with BERT's weights in Hugging Face's Trainer, in one run without a validation set.

A tiny BERT with random weights learns whether a sentence has more low words than high ones; some labels are wrong.
The result is a dense model for from_pretrained, with the rate in its configuration. An interrupted run resumes from its
checkpoint with the same bits.

usage: python examples/hugging_face.py [--steps 400] [--out out/bert] [--resume out/bert/checkpoint-200]
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch.utils.data import Dataset

import partnets
from partnets import hyper
from partnets.integrations.hugging_face import PartitionedTrainer

PROPORTIONS = (0.8, 0.1, 0.1)
WORDS, LENGTH = 40, 12
HYPER_LR = 0.05


class Sentences(Dataset):
    def __init__(self, count: int, wrong: float, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.words = torch.randint(1, WORDS, (count, LENGTH), generator=generator)
        low = (self.words < WORDS / 2).sum(1) > LENGTH / 2
        self.labels = (low ^ (torch.rand(count, generator=generator) < wrong)).long()

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.words[index], "labels": self.labels[index]}


def partitioned() -> transformers.PreTrainedModel:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=WORDS, **sizes, **still))
    model.set_submodule("dropout", hyper.ConcreteDropout(0.5))
    return partnets.partition(model, PROPORTIONS, defaults="seed")  # new random weights


class Trainer(PartitionedTrainer):
    """A trainer that saves a dense BERT with the learned rate in its configuration."""

    def dense_model(self) -> transformers.PreTrainedModel:
        deployed = cast(transformers.BertForSequenceClassification, partnets.finalize(self.model, "deploy"))
        deployed.config.classifier_dropout = deployed.dropout.p
        return deployed


def train(sentences: Dataset, steps: int, out: Path, resume: Path | None = None, **options) -> Trainer:
    transformers.set_seed(0)
    chunks = partnets.chunk(sentences, PROPORTIONS)
    settings: dict[str, Any] = {
        "output_dir": out,
        "max_steps": steps,
        "per_device_train_batch_size": 32,
        "per_device_eval_batch_size": 100,
        "learning_rate": 3e-3,
        "eval_strategy": "steps",
        "eval_steps": 100,
        "save_steps": 200,
        "logging_steps": 100,
        "report_to": "none",
    }
    arguments = transformers.TrainingArguments(**settings | options)
    hyper_optimizer = functools.partial(torch.optim.Adam, lr=HYPER_LR)
    trainer = Trainer(partitioned(), arguments, train_dataset=chunks, hyper_optimizer=hyper_optimizer)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    trainer.save_model()
    return trainer


def accuracy(model: torch.nn.Module, sentences: Sentences) -> float:
    with torch.no_grad():
        return float((model.eval()(sentences.words).logits.argmax(1) == sentences.labels).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out", type=Path, default=Path("out/bert"), help="the folder of checkpoints and the model")
    parser.add_argument("--resume", type=Path, help="a checkpoint from which to resume")
    arguments = parser.parse_args()
    train(Sentences(2000, wrong=0.1, seed=0), arguments.steps, arguments.out, arguments.resume)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(arguments.out)
    right = 100 * accuracy(model, Sentences(2000, wrong=0.0, seed=1))
    print(f"{type(model).__name__} with a dropout rate of {model.dropout.p:.2f}: {right:.1f} % of new sentences right")


if __name__ == "__main__":
    main()
