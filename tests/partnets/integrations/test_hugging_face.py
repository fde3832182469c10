"""Hugging Face's trainer evaluates by L_ML."""

import random

import pytest
import torch
import transformers

import partnets
from partnets.integrations.hugging_face import PartitionedTrainer

SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 10}


class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, i):
        return {"input_ids": torch.tensor([random.randrange(10)] * 4), "labels": i % 2}


@pytest.mark.full
def test_each_evaluation_has_the_same_noise(tmp_path):
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES))
    partnets.partition(model, (0.8, 0.2), defaults="seed")
    arguments = transformers.TrainingArguments(tmp_path, report_to="none", use_cpu=True)
    trainer = PartitionedTrainer(model, arguments, train_dataset=partnets.chunk(Noisy(), (0.8, 0.2)))
    first = trainer.evaluate()
    Noisy()[0]
    assert trainer.evaluate() == first
