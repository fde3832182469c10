"""Hugging Face's trainer evaluates by L_ML."""

import functools
import random

import pytest
import torch
import torch.nn.functional as F
import transformers
from bert import masked, trainer_of
from small_network import MeanMask

import partnets
from partnets.utils.modules import evaluating


class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, i):
        return {"input_ids": torch.tensor([random.randrange(10)] * 4), "labels": i % 2}


@pytest.mark.full
def test_each_evaluation_has_the_same_noise(tmp_path):
    trainer = trainer_of(tmp_path, masked(), data=Noisy())
    first = trainer.evaluate()
    Noisy()[0]
    assert trainer.evaluate() == first


def test_accumulated_gradients_train_as_whole_batches_do(tmp_path):
    found = []
    for parts in (1, 4):
        trainer = trainer_of(tmp_path / str(parts), masked(), parts=parts)
        loss = trainer.train().training_loss
        found.append([torch.tensor(loss), *trainer.model.state_dict().values()])
        assert trainer.state.global_step == 10
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert not torch.equal(found[0][-1], list(masked().state_dict().values())[-1])


def test_two_trainers_may_have_the_same_optimizer(tmp_path):
    optimizer = partnets.optim.AdamW(model := masked(), lr=1e-2)
    for name in ("first", "second"):
        trainer_of(tmp_path / name, model, max_steps=5, optimizers=(optimizer, None)).train()
    assert optimizer.state[model.classifier.weight]["step"].sum() == 10


@pytest.mark.full
def test_an_accumulated_training_resumes_to_the_same_bits(tmp_path):
    whole, resumed = (trainer_of(tmp_path / name, masked(), parts=4, save_steps=3) for name in ("whole", "resumed"))
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    pairs = zip(whole.model.state_dict().values(), resumed.model.state_dict().values(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_a_search_trains_a_new_model_in_each_trial(tmp_path):
    trainer = trainer_of(tmp_path, max_steps=3)
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


class Renamed(transformers.GPT2LMHeadModel):
    pass


@pytest.mark.parametrize("kind", [transformers.GPT2LMHeadModel, Renamed])
def test_accumulated_gradients_and_l_ml_weigh_parts_by_their_targets(tmp_path, kind):
    found = []
    for parts in (1, 4):
        torch.manual_seed(0)
        sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 10, "n_positions": 6}
        config = transformers.GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        model = kind(config)
        model.transformer.drop = MeanMask(8)
        partnets.partition(model, (0.6, 0.2, 0.2), defaults="seed", seed=0)
        options = {"max_steps": 4, "max_grad_norm": 1.0, "logging_steps": 1}
        options["hyper_optimizer"] = functools.partial(torch.optim.Adam, lr=1e-2)
        trainer = trainer_of(tmp_path / str(parts), model, parts=parts, data=Texts(), **options)
        trainer.train()
        logs = [log[name] for log in trainer.state.log_history[:-1] for name in ("loss", "hyper_loss", "grad_norm")]
        found.append([torch.tensor(logs), *model.state_dict().values()])
    assert torch.isfinite(found[0][0]).all()
    chunks = trainer.train_dataset
    expected = 0.0
    for k in (2, 3):
        with torch.no_grad(), evaluating(model), partnets.subnetwork(model, k - 1):
            for one in map(chunks.dataset.__getitem__, chunks.indices(k).tolist()):
                y = one["labels"][1:]
                logits = model(one["input_ids"][None]).logits[0, :-1]
                expected -= F.cross_entropy(logits, y, reduction="sum", ignore_index=-100).item()
    for size in (1, 7):
        trainer.args.per_device_eval_batch_size = size
        assert trainer.evaluate()["eval_lml"] == pytest.approx(expected, rel=1e-4)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_a_search_refuses_arguments_that_a_trainer_refuses(tmp_path):
    trainer = trainer_of(tmp_path, max_steps=1)
    with pytest.raises(ValueError, match="optim is sgd"):
        trainer.hyperparameter_search(
            lambda trial: {"optim": trial.suggest_categorical("optim", ["sgd"])}, n_trials=1, backend="optuna"
        )
