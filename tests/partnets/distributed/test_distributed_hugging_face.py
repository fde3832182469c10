"""Hugging Face's trainer on two ranks trains as one process does."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from small_network import MeanMask
from torch import nn

import partnets
from partnets import hyper
from partnets.integrations.hugging_face import PartitionedTrainer

PROPORTIONS = (0.6, 0.2, 0.2)
SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 10}


class Parity(torch.utils.data.Dataset):
    def __init__(self, changed=()):
        self.changed = set(changed)

    def __len__(self):
        return 40

    def __getitem__(self, i):
        ids = torch.randint(10, (4,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": (int(ids.sum()) + (i in self.changed)) % 2}


def trainer_of(folder, size, parts=1, decays=False, noise=0.0, changed=None, learns=True, **options):
    """Return a trainer; on ranks, each has its share of the batch size."""
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES, hidden_dropout_prob=noise, attention_probs_dropout_prob=0.0)
    model = transformers.BertForSequenceClassification(config)
    model.dropout = MeanMask(8) if learns and not decays else nn.Identity()
    if decays:
        model.decay = hyper.WeightDecay(model.classifier, 0.1)
        model.dropout = nn.Sequential(model.decay)
    partnets.partition(model, PROPORTIONS, defaults="seed", seed=0)
    if dist.is_initialized():
        rank, ranks = str(dist.get_rank()), dist.get_world_size()
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
        size //= ranks
    settings = {"report_to": "none", "use_cpu": True, "num_train_epochs": 2, "learning_rate": 1e-2}
    settings |= {"disable_tqdm": True, "save_strategy": "steps" if "save_steps" in options else "no"}
    sizes = {"per_device_train_batch_size": size // parts, "gradient_accumulation_steps": parts}
    arguments = transformers.TrainingArguments(folder, max_grad_norm=0.5, **settings | sizes | options)
    chunks = partnets.chunk(Parity(), PROPORTIONS)
    if changed is not None:
        chunks = partnets.chunk(Parity(chunks.indices(changed).tolist()), PROPORTIONS)
    return PartitionedTrainer(model, arguments, train_dataset=chunks)


def train(folder, options, resume=None):
    """Return the weights and ψ after training, and the number of steps."""
    trainer = trainer_of(Path(folder), 8, **options)
    if dist.is_initialized():
        torch.manual_seed(dist.get_rank())
    trainer.train(resume_from_checkpoint=resume)
    tensors = [tensor.detach() for tensor in trainer.model.state_dict().values() if tensor.is_floating_point()]
    return trainer.state.global_step, tensors


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"parts": 2}, id="accumulated"),
        pytest.param({}, id="direct", marks=pytest.mark.full),
        pytest.param({"decays": True}, id="lookahead", marks=pytest.mark.full),
    ],
)
def test_two_ranks_train_as_one_process_does(two_ranks, tmp_path, options):
    steps, expected = train(tmp_path / "one", options | {"parts": 1})
    for done, found in two_ranks(train, str(tmp_path / "two"), options):
        assert done == steps == 10
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.full
def test_two_ranks_resume_to_the_same_bits(two_ranks, tmp_path):
    options = {"noise": 0.3, "save_steps": 3}
    whole = two_ranks(train, str(tmp_path), options)
    resumed = two_ranks(train, str(tmp_path / "resumed"), options, str(tmp_path / "checkpoint-3"))
    for (_, one), (_, other) in zip(whole, resumed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.full
def test_later_chunks_do_not_reach_earlier_partitions_on_two_ranks(two_ranks, tmp_path):
    first, second = (two_ranks(weights_of_partition_1, str(tmp_path), changed)[0] for changed in (None, 3))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def weights_of_partition_1(folder, changed):
    trainer = trainer_of(folder, 8, changed=changed, learns=False)
    trainer.args.max_grad_norm = 0  # the norm is that of w_k
    trainer.train()
    found = partnets.partitions(trainer.model)
    named = trainer.model.named_parameters()
    return [weight.detach()[found[name].mask(1)] for name, weight in named if name in found]
