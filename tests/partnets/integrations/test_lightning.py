"""Lightning trains like a manual loop, resumes with the same bits, and leaks nothing of later chunks."""

import csv
import sys

import lightning
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from ownership import same
from torch import nn

import partkernels
import partnets
from partnets import hyper
from partnets.integrations.lightning import PartitionedModule

PROPORTIONS = (0.5, 0.3, 0.2)
EPOCHS, STEPS = 2, 10
# Lightning counts two steps per draw: one of w and one of ψ.
SAVED = 2 * 14
pytestmark = [
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Failed to load image Python extension"),
]


class Classifier(PartitionedModule):
    """A classifier with learned and fixed dropout, and with partitioned and unpartitioned batch norm."""

    def __init__(self, chunks):
        super().__init__()
        self.chunks = chunks
        network = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), hyper.ConcreteDropout(0.3), nn.BatchNorm1d(8, affine=False),
            nn.Dropout(0.1), nn.Linear(8, 3),
        )  # fmt: skip
        self.network = partnets.partition(network, PROPORTIONS, skip="3")

    def training_loss(self, batch):
        x, y = batch
        return F.cross_entropy(self.network(x), y)

    def configure_optimizers(self):
        return partnets.optim.Adam(self, lr=0.01), torch.optim.Adam(hyper.hyperparameters(self), lr=0.02)

    def on_train_epoch_end(self):
        self.log("lml", partnets.lml(self.network, self.chunks))


def data(changed=None):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 4, generator=generator), torch.randint(3, (60,), generator=generator)
    chunks = partnets.chunk((x, y), PROPORTIONS)
    if changed is not None:
        x[chunks.indices(changed)] = -x[chunks.indices(changed)]
        y[chunks.indices(changed)] = (y[chunks.indices(changed)] + 1) % 3
    return chunks


def loader(chunks):
    return partnets.Loader(chunks, 8, steps=STEPS, hyper_batch_size=8)


def module(chunks, kind=Classifier):
    torch.manual_seed(1)
    return kind(chunks)


def fit(one, draws, folder, checkpoint=None, save=False, **options):
    keep = ModelCheckpoint(folder / "kept", "{step}", every_n_train_steps=SAVED, save_top_k=-1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=EPOCHS,
        logger=CSVLogger(folder, name="", version="log"),
        log_every_n_steps=1,
        callbacks=[keep] if save else [],
        enable_checkpointing=save,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(one, draws, ckpt_path=checkpoint, weights_only=True)
    return trainer


def by_hand(one, draws):
    """Run the same training as a manual loop and return its records."""
    optimizer, hyper_optimizer = one.configure_optimizers()
    one.train()
    one.network[3].eval()
    records = []
    for epoch in range(EPOCHS):
        for k, batch, hyper_k, hyper_batch in draws:
            optimizer.zero_grad()
            with partnets.subnetwork(one, active=k, update=k):
                loss = one.training_loss(batch)
                loss.backward()
            optimizer.step(update=k)
            hyper_optimizer.zero_grad()
            with partnets.subnetwork(one, active=hyper_k - 1):
                hyper_loss = one.training_loss(hyper_batch)
                hyper_loss.backward()
            hyper_optimizer.step()
            records.append({"loss": loss.item(), "hyper_loss": hyper_loss.item()})
        records.append({"lml": partnets.lml(one.network, one.chunks), "epoch": epoch})
    partnets.estimate_statistics(one, one.chunks, forward=lambda model, batch: (model.training_loss(batch), None))
    return records


def equal(first, second):
    tensors = [[*one.parameters(), *one.buffers()] for one in (first, second)]
    return all(torch.equal(a, b) for a, b in zip(*tensors, strict=True))


def logged(folder):
    """Return the numbers in the file of Lightning's CSVLogger, in order."""
    rows = csv.DictReader((folder / "log" / "metrics.csv").read_text().splitlines())
    named = [{name: float(value) for name, value in row.items() if value} for row in rows]
    return [{name: row[name] for name in ("loss", "hyper_loss", "lml") if name in row} for row in named]


@pytest.mark.full
def test_twenty_steps_are_those_of_a_loop_by_hand(tmp_path):
    chunks = data()
    by_lightning, expected = module(chunks), module(chunks)
    before = module(chunks)
    torch.manual_seed(2)
    trainer = fit(by_lightning, loader(chunks), tmp_path)
    torch.manual_seed(2)
    records = by_hand(expected, loader(chunks))
    assert trainer.global_step == 2 * EPOCHS * STEPS
    assert equal(by_lightning, expected) and not equal(by_lightning, before)
    values = [{name: record[name] for name in record if name != "epoch"} for record in records]
    assert logged(tmp_path) == [pytest.approx(record, rel=1e-6) for record in values]


class Scheduled(Classifier):
    def configure_optimizers(self):
        optimizers = super().configure_optimizers()
        return [*optimizers], [torch.optim.lr_scheduler.StepLR(one, 3, gamma=0.7) for one in optimizers]

    def training_step(self, draw, batch_idx):
        super().training_step(draw, batch_idx)
        for scheduler in self.lr_schedulers():
            scheduler.step()


# Lightning warns that checkpoints have the weights after a step, which is intended.
of_checkpoints = pytest.mark.filterwarnings(
    "ignore:Using ModelCheckpoint with manual optimization", "ignore:The dirpath has changed"
)


def saved(one, folder):
    """Train and return the path of a checkpoint from within the second epoch."""
    torch.manual_seed(2)
    fit(one, loader(one.chunks), folder, save=True)
    return folder / "kept" / f"step={SAVED}.ckpt"


@pytest.mark.cases(usual=1)
@of_checkpoints
@pytest.mark.parametrize("kind", [Classifier, Scheduled])
def test_a_training_resumes_from_within_an_epoch_to_the_same_bits(kind, tmp_path):
    first, second = module(data(), kind), module(data(), kind)
    checkpoint = saved(first, tmp_path / "first")
    torch.manual_seed(3)
    fit(second, loader(second.chunks), tmp_path / "second", checkpoint, save=True)
    assert equal(first, second)
    for a, b in zip(first.trainer.optimizers, second.trainer.optimizers, strict=True):
        torch.testing.assert_close(a.state_dict(), b.state_dict(), rtol=0, atol=0)
    assert logged(tmp_path / "second") == logged(tmp_path / "first")[-len(logged(tmp_path / "second")) :]


class StartsAlone(Classifier):
    def on_train_start(self):
        pass


@pytest.mark.full
def test_loaded_modules_train_with_the_noise_of_the_current_seed(tmp_path):
    chunks = data()
    fit(module(chunks), loader(chunks), tmp_path).save_checkpoint(tmp_path / "trained.ckpt")
    loaded = [Classifier.load_from_checkpoint(tmp_path / "trained.ckpt", chunks=chunks) for _ in range(2)]
    assert equal(*loaded)
    for seed, one in enumerate(loaded):
        torch.manual_seed(seed)
        fit(one, loader(chunks), tmp_path / str(seed))
    assert not equal(*loaded)


class Frozen(Classifier):
    """A classifier with fixed ψ: learned ψ depends on every chunk, so the invariant holds for w given ψ."""

    def configure_optimizers(self):
        return partnets.optim.Adam(self, lr=0.01), torch.optim.SGD(hyper.hyperparameters(self), lr=0.0)


@pytest.mark.full
@pytest.mark.parametrize("k", [2, 3])
def test_nothing_of_a_later_chunk_reaches_earlier_partitions(k, tmp_path):
    pair = [module(data(changed), Frozen) for changed in (None, k)]
    for i, one in enumerate(pair):
        torch.manual_seed(2)
        fit(one, loader(one.chunks), tmp_path / str(i))
    earlier, later = range(1, k), range(k, len(PROPORTIONS) + 1)
    learned = [(one, one.trainer.optimizers[0].state) for one in pair]
    assert same(learned, earlier)
    assert not same(learned, later)


class Regularised(Classifier):
    """A classifier with ψ that acts only in training, and a dropout rate that learns directly."""

    clip = 0.1

    def __init__(self, chunks):
        super().__init__(chunks)
        self.decay, self.smoothing = hyper.WeightDecay(self.network, 0.01), hyper.LabelSmoothing(0.2)
        self.rate = hyper.LearningRate(self.network, 0.02)
        self.hyper_gradient = {self.decay: partnets.Lookahead(steps=2)}

    def training_loss(self, batch):
        x, y = batch
        return self.smoothing(self.decay(self.rate(self.network(x))), y).mean()


class OfTorchs(Regularised):
    def configure_optimizers(self):
        _, hyper_optimizer = super().configure_optimizers()
        return partnets.optim.PerPartition(torch.optim.NAdam, self), hyper_optimizer


@pytest.mark.full
@pytest.mark.parametrize("kind", [Regularised, OfTorchs])
def test_psi_that_acts_only_in_training_learns_by_lookahead(kind, tmp_path):
    chunks, draws = data(), {"steps": STEPS, "hyper_batch_size": 8}
    one, expected = module(chunks, kind), module(chunks, kind)
    torch.manual_seed(2)
    fit(one, partnets.Loader(chunks, 8, steps_ahead=2, **draws), tmp_path)
    torch.manual_seed(2)
    (optimizer, hyper_optimizer), loss = expected.configure_optimizers(), expected.training_loss
    how, mine = {"by": expected.hyper_gradient, "clip": 0.1}, partnets.Loader(chunks, 8, steps_ahead=2, **draws)
    for _ in range(EPOCHS):
        for k, batch, hyper_k, hyper_batch in mine:
            partnets.step_weights(expected, optimizer, k, batch, loss, clip=0.1)
            partnets.step_lookahead(expected, optimizer, hyper_optimizer, {hyper_k: hyper_batch}, loss, loss, **how)
        partnets.lml(expected.network, chunks)
    partnets.estimate_statistics(expected, chunks, forward=lambda model, batch: (model.training_loss(batch), None))
    assert expected.decay.values()["decay"] != 0.01 and equal(one, expected)


class WithoutPsi(Classifier):
    def configure_optimizers(self):
        return partnets.optim.PerPartition(torch.optim.RMSprop, self)


def test_without_psi_only_weights_are_stepped(tmp_path):
    one = module(data(), WithoutPsi)
    trainer = fit(one, partnets.Loader(one.chunks, 8, steps=STEPS), tmp_path)
    assert trainer.global_step == EPOCHS * STEPS and one.network[2].values()["rate"] == pytest.approx(0.3)


class Ordinary(Classifier):
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


class Clipped(Classifier):
    clip = 0.1


class Ahead(Regularised):
    clip = None


def scaled(scale=1024.0):
    """Return the plugin that precision="16-mixed" creates on a GPU."""
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=scale))]}


TWO_STEPS_AHEAD = {"steps": STEPS, "hyper_batch_size": 8, "steps_ahead": 2}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*fork")
@pytest.mark.parametrize(
    ("kind", "make", "options", "message"),
    [
        (WithoutPsi, loader, {}, "gave 1 optimisers for hyper_batch_size=8"),
        (Classifier, lambda chunks: partnets.Loader(chunks, 8, steps=2), {}, "gave 2 optimisers for .*size=None"),
        (Ordinary, loader, {}, "gave Adam first, which steps all partitions at once"),
        (Classifier, lambda chunks: torch.utils.data.DataLoader(chunks.dataset), {}, "a DataLoader; pass a partnets"),
        (
            Classifier,
            lambda chunks: loader(partnets.chunk(chunks.dataset, (0.8, 0.2))),
            {},
            "3 partitions and the data 2",
        ),
        (StartsAlone, loader, {}, r"StartsAlone\.on_train_start .* call super\(\)\.on_train_start\(\)"),
        (Regularised, loader, {}, r"ψ looks 2 steps ahead.* for 0; pass partnets\.Loader\(steps_ahead=2\)"),
        (Classifier, loader, {"overfit_batches": 2}, r"overfit_batches=2 replaces .* leave it 0, and pass a partnets"),
        (
            Classifier,
            loader,
            {"devices": 2, "strategy": "ddp_fork"},
            "2 processes train by DDPStrategy; pass",
        ),
        (Clipped, loader, scaled(), r"clip=0\.1 .* GradScaler .*; pass precision='bf16-mixed', or set clip = None"),
        (Ahead, lambda chunks: partnets.Loader(chunks, 8, **TWO_STEPS_AHEAD), scaled(), "2 steps ahead .* GradScaler"),
    ],
)
def test_trainings_that_would_be_wrong_are_refused_with_the_cure(kind, make, options, message, tmp_path):
    one, before = module(data(), kind), module(data(), kind)
    with pytest.raises(Exception, match=message):  # from a process, in another type
        fit(one, make(one.chunks), tmp_path, **options)
    assert equal(one, before)


class Plain(Classifier):
    def configure_optimizers(self):
        return partnets.optim.SGD(self, lr=0.1), torch.optim.SGD(hyper.hyperparameters(self), lr=0.1)


@pytest.mark.full
def test_a_gradient_scaler_changes_no_step(tmp_path):
    pair = [module(data(), Plain) for _ in range(2)]
    for one, scale in zip(pair, (1.0, 1024.0), strict=True):
        torch.manual_seed(2)
        with partkernels.use_backend("reference"):  # the only backend with float16 on a CPU
            fit(one, loader(one.chunks), tmp_path / str(scale), **scaled(scale))
    for a, b in zip(*[one.parameters() for one in pair], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)  # float16 represents small gradients only if scaled


def test_a_module_without_training_loss_raises():
    with pytest.raises(NotImplementedError, match="PartitionedModule has no training_loss"):
        PartitionedModule().training_loss(None)


def test_a_missing_lightning_is_named_with_the_cure(monkeypatch):
    ours = "partnets.integrations.lightning"
    for name in [name for name in sys.modules if name.split(".")[0] == "lightning" or name == ours]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lightning", None)
    with pytest.raises(ImportError, match="pip install lightning, or partkernels' extra 'lightning'"):
        import partnets.integrations.lightning  # noqa: F401


class Metered(PartitionedModule):
    """A module with a metric, a list of outputs and sums, which it does not read in training."""

    def __init__(self):
        super().__init__()
        self.network = partnets.partition(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), PROPORTIONS)
        self.metric, self.outputs, self.total = torchmetrics.Accuracy("multiclass", num_classes=3), [], 0.0

    def training_loss(self, batch):
        x, y = batch
        output = self.network(x)
        self.metric(output, y)
        self.outputs.append(output.detach())
        self.total += output.sum().item()
        self.log("accuracy", self.metric)
        return F.cross_entropy(output, y)

    def configure_optimizers(self):
        return partnets.optim.Adam(self)


def test_metrics_and_lists_of_outputs_are_no_leaks(tmp_path):
    loader = partnets.Loader(partnets.chunk((torch.randn(60, 4), torch.arange(60) % 3), PROPORTIONS), 8, steps=3)
    module, quiet = Metered(), {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    options = {"max_epochs": 1, "accelerator": "cpu", "enable_model_summary": False, **quiet}
    lightning.Trainer(default_root_dir=tmp_path, **options).fit(module, loader)
    assert len(module.outputs) == 3  # the audit's are gone
