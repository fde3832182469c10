"""Hugging Face's Trainer, as in examples/hugging_face.py: what it trains, saves, resumes and lets through."""

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from ownership import same

import partnets

pytestmark = pytest.mark.filterwarnings("ignore:Failed to load image Python extension")
QUIET = {"disable_tqdm": True, "dataloader_pin_memory": False, "use_cpu": True}
STEPS = 12


@pytest.fixture(scope="module")
def example():
    """The example as a module; imported here, as transformers' trainer takes seconds."""
    path = Path(__file__).parents[1] / "examples" / "hugging_face.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sentences(example):
    return example.Sentences(60, wrong=0.1, seed=0)


def train(example, folder, sentences, resume=None, **options):
    return example.train(sentences, STEPS, folder, resume, **QUIET, **options)


@pytest.fixture(scope="module")
def trained(example, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    return train(example, folder, sentences(example), eval_steps=4, save_steps=5), folder


def equal(first, second):
    return all(map(torch.equal, first.parameters(), second.parameters()))


def test_weights_and_psi_learn(example, trained):
    model = trained[0].model
    transformers.set_seed(0)
    start = example.partitioned()
    assert not equal(model, start) and model.dropout.values() != start.dropout.values()


def test_the_logged_lml_is_that_of_the_model(example, trained):
    trainer, _ = trained
    words, labels = zip(*(each.values() for each in sentences(example)), strict=True)
    chunks = partnets.chunk((torch.stack(words), torch.stack(labels)), example.PROPORTIONS)
    expected = partnets.lml(trainer.model, chunks, lambda output, y: F.cross_entropy(output.logits, y))
    logged = {record["step"]: record["eval_lml"] for record in trainer.state.log_history if "eval_lml" in record}
    assert list(logged) == [4, 8, 12] and logged[12] == pytest.approx(expected, rel=1e-5)


def test_every_checkpoint_is_an_ordinary_model_with_the_rate_in_its_configuration(example, trained):
    trainer, folder = trained
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    ordinary = transformers.BertForSequenceClassification(model.config)
    assert [*map(type, model.modules())] == [*map(type, ordinary.modules())]
    assert model.dropout.p == trainer.model.dropout.values()["rate"]
    words = sentences(example).words
    with torch.no_grad():
        logits = [each.eval()(words).logits for each in (model, trainer.model)]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-5)
    earlier = transformers.AutoModelForSequenceClassification.from_pretrained(folder / "checkpoint-5")
    assert not equal(earlier, model)


def test_a_training_resumes_to_the_same_bits(example, trained, tmp_path):
    first, folder = trained
    second = train(example, tmp_path, sentences(example), folder / "checkpoint-5")
    assert second.state.global_step == STEPS and equal(first.model, second.model)
    for name in ("optimizer", "hyper_optimizer"):
        states = [getattr(trainer, name).state_dict() for trainer in (first, second)]
        torch.testing.assert_close(*states, rtol=0, atol=0)


def test_nothing_of_a_later_chunk_reaches_earlier_partitions(example, tmp_path, monkeypatch):
    monkeypatch.setattr(example, "HYPER_LR", 0.0)
    pair = []
    for changed in (False, True):
        data = sentences(example)
        if changed:
            last = partnets.chunk(data, example.PROPORTIONS).indices(3)
            data.words[last] = data.words[last].flip(1)
            data.labels[last] = 1 - data.labels[last]
        pair.append(train(example, tmp_path / str(changed), data, eval_strategy="no", save_strategy="no"))
    learned = [(one.model, one.optimizer.optimizer.state) for one in pair]
    assert same(learned, (1, 2))
    assert not same(learned, (3,))
