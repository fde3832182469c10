"""Hugging Face's Trainer learns a dropout rate together with BERT's weights, in one run and without a validation set.

A tiny BERT, from random weights, tells whether a sentence has more low words than high ones; some labels are wrong.
What comes out is an ordinary model with the rate in its configuration, for from_pretrained. A run that was interrupted
goes on from its checkpoint with the same bits.

usage: python examples/hugging_face.py [--steps 400] [--out out/bert] [--resume out/bert/checkpoint-200]
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

import torch
import transformers
from torch.utils.data import Dataset

import partnets
from partnets import hyper

PROPORTIONS = (0.8, 0.1, 0.1)
WORDS, LENGTH = 40, 12
HYPER_LR = 0.05
PARTITIONED = "partitioned.pt"


class Sentences(Dataset):
    def __init__(self, count: int, wrong: float, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.words = torch.randint(1, WORDS, (count, LENGTH), generator=generator)
        low = (self.words < WORDS / 2).sum(1) > LENGTH / 2
        self.labels = (low ^ (torch.rand(count, generator=generator) < wrong)).long()

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.words[i], "labels": self.labels[i]}


def partitioned() -> transformers.PreTrainedModel:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=WORDS, **sizes, **still))
    model.dropout = hyper.ConcreteDropout(0.5)
    return partnets.partition(model, PROPORTIONS)


def ordinary(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """The whole network with torch's layers and the rate that was learned."""
    merged = partnets.merge(model)
    merged.config.classifier_dropout = model.dropout.values()["rate"]
    merged.dropout = torch.nn.Dropout(merged.config.classifier_dropout)
    return merged


class AdamW(partnets.optim.AdamW):
    """For a loop that calls step() without a partition: steps `update`."""

    update: int

    def step(self, closure=None):
        return super().step(self.update, closure)


class Trainer(transformers.Trainer):
    """train_dataset and eval_dataset are the chunks. A step is one of ψ and one of w_k (Appendix I.1)."""

    @functools.cached_property
    def hyper_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(hyper.hyperparameters(self.model), lr=HYPER_LR)

    def create_optimizer(self, model=None):
        self.optimizer = AdamW(self.model, lr=self.args.learning_rate, weight_decay=self.args.weight_decay)
        return self.optimizer

    def get_train_dataloader(self):
        size, steps = self.args.train_batch_size, self.args.max_steps
        loader = partnets.Loader(self.train_dataset, size, steps=steps, hyper_batch_size=size, seed=self.args.seed)
        return self.accelerator.prepare(loader)

    def training_step(self, model, inputs, num_items_in_batch=None):
        k, batch, hyper_k, hyper_batch = inputs
        with partnets.subnetwork(self.model, active=hyper_k - 1):
            super().training_step(model, hyper_batch)
        self.hyper_optimizer.step()
        with partnets.subnetwork(self.model, active=k, update=k):
            loss = super().training_step(model, batch)
        self.hyper_optimizer.zero_grad()  # that loss also gave ψ a gradient, which is not its own
        self.optimizer.optimizer.update = k
        return loss

    def evaluate(self, *args, **options):
        """L_ML (Eq. 2) instead of a loss on validation data."""
        chunks, lml = self.eval_dataset, 0.0
        for k in range(2, chunks.count + 1):
            with partnets.subnetwork(self.model, active=k - 1):
                lml -= chunks.sizes[k - 1] * self.predict(chunks[k]).metrics["test_loss"]
        metrics = {"eval_lml": lml, "eval_dropout": self.model.dropout.values()["rate"]}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def save_model(self, output_dir=None, _internal_call=False):
        """An ordinary model for from_pretrained, and the partitioned one: safetensors cannot hold its partitions."""
        folder = Path(output_dir or self.args.output_dir)
        ordinary(self.model).save_pretrained(folder)
        states = {"model": self.model.state_dict(), "hyper_optimizer": self.hyper_optimizer.state_dict()}
        torch.save(states, folder / PARTITIONED)

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        states = torch.load(Path(resume_from_checkpoint) / PARTITIONED, map_location="cpu", weights_only=True)
        self.model.load_state_dict(states["model"])
        self.hyper_optimizer.load_state_dict(states["hyper_optimizer"])


def train(sentences: Dataset, steps: int, out: Path, resume: Path | None = None, **options) -> Trainer:
    transformers.set_seed(0)
    chunks = partnets.chunk(sentences, PROPORTIONS)
    arguments = {
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
    arguments = transformers.TrainingArguments(**arguments | options)
    trainer = Trainer(partitioned(), arguments, train_dataset=chunks, eval_dataset=chunks)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    return trainer


def accuracy(model: torch.nn.Module, sentences: Sentences) -> float:
    with torch.no_grad():
        return float((model.eval()(sentences.words).logits.argmax(1) == sentences.labels).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out", type=Path, default=Path("out/bert"), help="the folder of checkpoints and the model")
    parser.add_argument("--resume", type=Path, help="a checkpoint from which to go on")
    arguments = parser.parse_args()
    train(Sentences(2000, wrong=0.1, seed=0), arguments.steps, arguments.out, arguments.resume)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(arguments.out)
    right = 100 * accuracy(model, Sentences(2000, wrong=0.0, seed=1))
    print(f"{type(model).__name__} with a dropout rate of {model.dropout.p:.2f}: {right:.1f} % of new sentences right")


if __name__ == "__main__":
    main()
