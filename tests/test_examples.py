"""The Hugging Face trainer of examples/hugging_face.py trains, saves and resumes, and checks its arguments."""

import functools
import importlib.util
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from ownership import same

import partnets
from partnets.integrations.hugging_face import PartitionedTrainer
from partnets.subnetworks import statistics

pytestmark = pytest.mark.filterwarnings("ignore:Failed to load image Python extension")
QUIET = {"disable_tqdm": True, "dataloader_pin_memory": False, "use_cpu": True}
STEPS = 12


@pytest.fixture(scope="module")
def example():
    """Return the example as a module; imported lazily because transformers' trainer takes seconds to import."""
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


@pytest.mark.full
def test_the_logged_lml_is_that_of_the_model(example, trained):
    trainer, _ = trained
    words, labels = zip(*(each.values() for each in sentences(example)), strict=True)
    chunks = partnets.chunk((torch.stack(words), torch.stack(labels)), example.PROPORTIONS)
    expected = partnets.lml(trainer.model, chunks, lambda output, y: F.cross_entropy(output.logits, y))
    logged = {record["step"]: record["eval_lml"] for record in trainer.state.log_history if "eval_lml" in record}
    assert list(logged) == [4, 8, 12] and logged[12] == pytest.approx(expected, rel=1e-5)


def test_every_checkpoint_is_a_dense_model_with_the_rate_in_its_configuration(example, trained):
    trainer, folder = trained
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    dense = transformers.BertForSequenceClassification(model.config)
    assert [*map(type, model.modules())] == [*map(type, dense.modules())]
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


@pytest.mark.full
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


class Normalised(torch.nn.Module):
    """A model with a normalisation layer that partnets.partition does not replace."""

    def __init__(self):
        super().__init__()
        self.still, self.own = torch.nn.BatchNorm1d(6).requires_grad_(False), torch.nn.BatchNorm1d(6)
        self.mask, self.head = partnets.hyper.InputMask(6), torch.nn.Linear(6, 2)

    def forward(self, x, labels=None):
        logits = self.head(self.own(self.still(self.mask(x))))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Rows(torch.utils.data.Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def normalised(folder, given=None, **options):
    torch.manual_seed(0)
    model = partnets.partition(Normalised(), (0.8, 0.1, 0.1), skip=["still"])
    data = Rows([{"x": torch.randn(6), "labels": i % 2, "unused": "text"} for i in range(60)])
    settings = {"max_steps": 6, "per_device_train_batch_size": 8, "save_strategy": "no", "report_to": "none"}
    arguments = transformers.TrainingArguments(str(folder), **QUIET, **settings | options)
    given = {"model": model, "train_dataset": partnets.chunk(data, (0.8, 0.1, 0.1))} | (given or {})
    return PartitionedTrainer(args=arguments, **given)


def test_skipped_modules_keep_their_statistics(tmp_path):
    trainer = normalised(tmp_path)
    trainer.train()
    assert not trainer.model.still.running_mean.any() and trainer.model.own.running_mean.any()
    assert statistics.batches_of(trainer.model.own) == 6  # a step of ψ updates no statistics


def test_biases_do_not_decay(tmp_path):
    trainer = normalised(tmp_path, weight_decay=0.5)
    groups = trainer.create_optimizer().param_groups
    decays = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    names = {name: decays.get(id(p)) for name, p in trainer.model.named_parameters()}
    assert names["head.weight"] == (0.5,) * 3 and names["head.bias"] == (0.0,) * 3


SGD = torch.optim.SGD, {"lr": 1.0}


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ({}, {"optim": "sgd"}, "pass one of partnets.optim"),
        ({}, {"optim": "galore_adamw"}, "galore_adamw; pass one of partnets.optim"),
        ({}, {"optim_args": "amsgrad=True"}, r"optim_args='amsgrad=True' .* pass one of partnets.optim"),
        ({}, {"train_sampling_strategy": "sequential"}, "train_sampling_strategy is sequential, .* leave it 'random'"),
        ({"optimizer_cls_and_kwargs": SGD}, {}, r"optimizer_cls_and_kwargs has SGD, .* pass one of partnets\.optim as"),
        (
            {"compute_loss_func": partnets.hyper.LabelSmoothing(0.1)},
            {},
            r"the loss has smoothing\.raw, which would never learn; put trainable modules into",
        ),
    ],
)
def test_unsupported_training_arguments_raise(tmp_path, given, options, message):
    with pytest.raises(ValueError, match=message):
        normalised(tmp_path, given, **options).evaluate()


def test_data_seed_determines_the_draws(tmp_path):
    def draws(**seeds):
        return [(k, batch["x"]) for k, batch, *_ in normalised(tmp_path, **seeds).get_train_dataloader()]

    one, other, same = draws(seed=1), draws(seed=1, data_seed=7), draws(seed=7)
    equal = [[a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in zip(other, of, strict=True)] for of in (one, same)]
    assert not all(equal[0]) and all(equal[1])


@pytest.mark.parametrize("name", ["classes", "tokens"])
def test_label_smoothing_does_not_change_eval_lml(name, tmp_path):
    torch.manual_seed(0)
    config = {"vocab_size": 12, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 1, "pad_token_id": 0}
    config = transformers.GPT2Config(**config, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, num_labels=3)
    of_tokens = name == "tokens"
    model = (transformers.GPT2LMHeadModel if of_tokens else transformers.GPT2ForSequenceClassification)(config)
    partnets.partition(model, (0.8, 0.2), defaults="seed")
    ids = torch.randint(1, 12, (40, 5))
    data = Rows([{"input_ids": row, "labels": row if of_tokens else row[0] % 3} for row in ids])
    arguments = transformers.TrainingArguments(str(tmp_path), **QUIET, label_smoothing_factor=0.3, report_to="none")
    chunks = partnets.chunk(data, (0.8, 0.2))
    trainer = PartitionedTrainer(model, arguments, train_dataset=chunks)

    def forward(model, batch):
        logits, labels = model(batch["input_ids"]).logits, batch["labels"]
        return (logits[:, :-1].transpose(1, 2), labels[:, 1:]) if of_tokens else (logits, labels)

    assert trainer.evaluate()["eval_lml"] == pytest.approx(partnets.lml(model, chunks, forward=forward), rel=1e-5)


class OfPairs(PartitionedTrainer, transformers.Seq2SeqTrainer):
    pass


@pytest.mark.parametrize("options", [{}, {"dataloader_drop_last": True}, {"predict_with_generate": True}])
@pytest.mark.parametrize("batch_size", [4, 16])
def test_every_example_of_a_chunk_counts_once_whatever_the_batches(batch_size, options, tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": 12, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "dropout_rate": 0}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))
    partnets.partition(model, (0.8, 0.2), defaults="seed")
    ids = torch.randint(1, 12, (30, 5))
    chunks = partnets.chunk(Rows([{"input_ids": row, "labels": row[:3]} for row in ids]), (0.8, 0.2))
    settings = QUIET | {"per_device_eval_batch_size": batch_size, "report_to": "none"} | options
    arguments = transformers.Seq2SeqTrainingArguments(str(tmp_path), **settings)
    trainer = OfPairs(model, arguments, train_dataset=chunks, compute_metrics=lambda predicted: {})

    def forward(model, batch):
        return model(**batch).logits.transpose(1, 2), batch["labels"]

    assert trainer.evaluate()["eval_lml"] == pytest.approx(partnets.lml(model, chunks, forward=forward), rel=1e-5)


class Regularised(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        self.decay = partnets.hyper.WeightDecay(self.head, 0.01)
        self.smoothing = partnets.hyper.LabelSmoothing(0.2)

    def forward(self, x, labels=None):
        return {"logits": self.smoothing(self.decay(self.head(x)))}


def regularised():
    torch.manual_seed(0)
    return partnets.partition(Regularised(), (0.8, 0.1, 0.1))


@pytest.mark.full
def test_psi_that_acts_only_in_training_learns_by_lookahead(tmp_path):
    """Compare with a manual loop of partnets' steps on the batches of the same Loader."""
    chunks = partnets.chunk(Rows([{"x": torch.randn(6), "labels": i % 2} for i in range(60)]), (0.8, 0.1, 0.1))
    rates, ahead, clip = {"lr": 0.05}, partnets.Lookahead(steps=2), 0.1
    settings = {"lr_scheduler_type": "constant", "learning_rate": 0.03, "weight_decay": 0.0, "max_grad_norm": clip}
    settings |= {"max_steps": 6, "per_device_train_batch_size": 8, "save_strategy": "no", "report_to": "none"}
    model = regularised()
    trainer = PartitionedTrainer(
        model,
        transformers.TrainingArguments(str(tmp_path), **QUIET, **settings),
        train_dataset=chunks,
        hyper_optimizer=functools.partial(torch.optim.Adam, **rates),
        hyper_gradient=ahead,
        compute_loss_func=lambda outputs, labels, num_items_in_batch=None: model.smoothing(
            outputs["logits"], labels
        ).mean(),
    )
    trainer.train()

    own = regularised()

    def loss(batch):
        return own.smoothing(own(batch["x"])["logits"], batch["labels"]).mean()

    optimizer = partnets.optim.AdamW(own, lr=0.03, weight_decay=0.0)
    hyper_optimizer = torch.optim.Adam(partnets.hyper.hyperparameters(own), **rates)
    loader = partnets.Loader(chunks, 8, steps=8, hyper_batch_size=8, steps_ahead=2, seed=42)
    for _, (k, batch, hyper_k, unseen_and_seen) in zip(range(6), loader, strict=False):
        batches = {hyper_k: unseen_and_seen}
        partnets.step_lookahead(own, optimizer, hyper_optimizer, batches, loss, loss, by=ahead, clip=clip)
        partnets.step_weights(own, optimizer, k, batch, loss, clip=clip)
    for found, expected in zip(model.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(found, expected)
    assert own.decay.values()["decay"] != 0.01 and own.smoothing.values()["smoothing"] != pytest.approx(0.2)


@pytest.mark.full
def test_a_leak_is_refused_at_the_start(tmp_path):
    trainer = normalised(tmp_path)
    trainer.model.register_buffer("mean", torch.zeros(6))

    def center(model, args, kwargs):
        model.mean.lerp_(kwargs["x"].mean(0), 0.1)
        return args, kwargs | {"x": kwargs["x"] - model.mean}

    trainer.model.register_forward_pre_hook(center, with_kwargs=True)
    with pytest.raises(ValueError, match=r"mean follows the data"):
        trainer.train()
    assert not trainer.model.mean.any()


def test_a_checkpoint_of_other_chunks_is_refused(example, trained):
    trainer, folder = trained
    path = folder / "checkpoint-5"
    kept, trainer.train_dataset = trainer.train_dataset, partnets.chunk(sentences(example), (0.5, 0.3, 0.2))
    try:
        with pytest.raises(ValueError, match="was saved with other chunks"):
            trainer._load_from_checkpoint(path)
    finally:
        trainer.train_dataset = kept


def test_evaluation_estimates_stale_statistics(tmp_path):
    trainer = normalised(tmp_path)
    trainer.train()
    assert statistics.is_stale(trainer.model.own)
    trainer.evaluate(Rows([{"x": torch.randn(6), "labels": 0} for _ in range(4)]))
    assert not statistics.is_stale(trainer.model.own) and not trainer.model.still.running_mean.any()
