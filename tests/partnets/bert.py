"""A small BERT with ψ and its Hugging Face trainer, on each rank of a group or, without a group, in one process."""

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


def masked(noise=0.0, decays=False):
    """Return a partitioned model with a mask of its pooled output or a weight decay as ψ."""
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES, hidden_dropout_prob=noise, attention_probs_dropout_prob=0.0)
    model = transformers.BertForSequenceClassification(config)
    model.dropout = MeanMask(8)
    if decays:
        model.decay = hyper.WeightDecay(model.classifier, 0.1)
        model.dropout = nn.Sequential(model.decay)
    return partnets.partition(model, PROPORTIONS, defaults="seed", seed=0)


def trainer_of(
    folder,
    model=None,
    size=8,
    parts=1,
    data=None,
    hyper_optimizer=None,
    optimizers=(None, None),
    callbacks=(),
    **options,
):
    """Return a trainer of batches of this size, accumulated in parts; on ranks, each has its share."""
    size //= dist.get_world_size() if dist.is_initialized() else 1
    settings = {
        "report_to": "none", "use_cpu": True, "disable_tqdm": True, "num_train_epochs": 2, "learning_rate": 1e-2,
        "max_grad_norm": 0.5, "save_strategy": "steps" if "save_steps" in options else "no",
        "per_device_train_batch_size": size // parts, "gradient_accumulation_steps": parts,
    }  # fmt: skip
    arguments = transformers.TrainingArguments(folder, **settings | options)
    source = {"model_init": lambda: masked()} if model is None else {"model": model}
    chunks = partnets.chunk(Parity() if data is None else data, PROPORTIONS)
    source |= {"hyper_optimizer": hyper_optimizer, "optimizers": optimizers, "callbacks": list(callbacks)}
    return PartitionedTrainer(args=arguments, train_dataset=chunks, **source)
