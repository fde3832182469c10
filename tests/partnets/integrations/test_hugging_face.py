"""Hugging Face's trainer evaluates by L_ML."""

import functools
import random

import pytest
import torch
import transformers
from small_network import MeanMask

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


class Parity(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, i):
        ids = torch.randint(10, (4,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": int(ids.sum()) % 2}


def masked():
    """Return a partitioned model without noise, with a mask of its pooled output as ψ."""
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = transformers.BertForSequenceClassification(config)
    model.dropout = partnets.hyper.InputMask(8)
    return partnets.partition(model, (0.6, 0.2, 0.2), defaults="seed", seed=0)


def trainer_of(folder, model=None, **options):
    settings = {"report_to": "none", "use_cpu": True, "num_train_epochs": 2, "learning_rate": 1e-2}
    arguments = transformers.TrainingArguments(folder, max_grad_norm=0.5, **settings | options)
    chunks = partnets.chunk(Parity(), (0.6, 0.2, 0.2))
    source = {"model_init": masked} if model is None else {"model": model}
    return PartitionedTrainer(args=arguments, train_dataset=chunks, **source)


def test_accumulated_gradients_train_as_whole_batches_do(tmp_path):
    found = []
    for size, parts in ((8, 1), (2, 4)):
        sizes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": parts}
        trainer = trainer_of(tmp_path / str(parts), masked(), **sizes)
        loss = trainer.train().training_loss
        found.append([torch.tensor(loss), *trainer.model.state_dict().values()])
        assert trainer.state.global_step == 10
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert not torch.equal(found[0][-1], list(masked().state_dict().values())[-1])


@pytest.mark.full
def test_an_accumulated_training_resumes_to_the_same_bits(tmp_path):
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "save_steps": 3}
    whole = trainer_of(tmp_path / "whole", masked(), **sizes)
    whole.train()
    resumed = trainer_of(tmp_path / "resumed", masked(), **sizes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    pairs = zip(whole.model.state_dict().values(), resumed.model.state_dict().values(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_a_search_trains_a_new_model_in_each_trial(tmp_path):
    trainer = trainer_of(tmp_path, max_steps=3, save_strategy="no")
    rates = iter((1e-2, 1e-6))

    def space(trial):
        rate = next(rates)
        return {"learning_rate": trial.suggest_float("learning_rate", rate, rate)}

    lmls = []

    def objective(metrics):
        lmls.append(metrics["eval_lml"])
        return lmls[-1]

    best = trainer.hyperparameter_search(
        space, compute_objective=objective, n_trials=2, direction="maximize", backend="optuna"
    )
    assert best.objective == max(lmls) and lmls[0] != lmls[1]
    untrained = trainer_of(tmp_path, masked()).evaluate()["eval_lml"]
    assert lmls[1] == pytest.approx(untrained, abs=1e-2)  # the second trial starts from a new model


class Texts(torch.utils.data.Dataset):
    """Texts with different numbers of labels; every fourth one has none."""

    def __len__(self):
        return 40

    def __getitem__(self, i):
        ids = torch.randint(10, (6,), generator=torch.Generator().manual_seed(i))
        labels = ids.clone()
        labels[: 6 if i % 4 == 3 else i % 4] = -100
        return {"input_ids": ids, "labels": labels}


def test_accumulated_gradients_weigh_parts_by_their_targets(tmp_path):
    found = []
    for size, parts in ((8, 1), (2, 4)):
        torch.manual_seed(0)
        sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 10, "n_positions": 6}
        config = transformers.GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        model = transformers.GPT2LMHeadModel(config)
        model.transformer.drop = MeanMask(8)
        partnets.partition(model, (0.6, 0.2, 0.2), defaults="seed", seed=0)
        arguments = transformers.TrainingArguments(
            tmp_path / str(parts), per_device_train_batch_size=size, gradient_accumulation_steps=parts, max_steps=4,
            report_to="none", use_cpu=True, save_strategy="no", learning_rate=1e-2, logging_steps=1,
        )  # fmt: skip
        chunks = partnets.chunk(Texts(), (0.6, 0.2, 0.2))
        adam = functools.partial(torch.optim.Adam, lr=1e-2)
        trainer = PartitionedTrainer(model, arguments, train_dataset=chunks, hyper_optimizer=adam)
        trainer.train()
        logs = [log[name] for log in trainer.state.log_history[:-1] for name in ("loss", "hyper_loss", "grad_norm")]
        found.append([torch.tensor(logs), *model.state_dict().values()])
    assert torch.isfinite(found[0][0]).all() and trainer.evaluate()["eval_lml"] < 0
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_a_search_refuses_arguments_that_a_trainer_refuses(tmp_path):
    trainer = trainer_of(tmp_path, max_steps=1, save_strategy="no")
    with pytest.raises(ValueError, match="optim is sgd"):
        trainer.hyperparameter_search(
            lambda trial: {"optim": trial.suggest_categorical("optim", ["sgd"])}, n_trials=1, backend="optuna"
        )
