"""Lightning trains like a manual loop, resumes with the same bits, and leaks nothing of later chunks."""

import csv
import sys
from functools import partial

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


def adams(one, rate=0.02):
    return partnets.optim.Adam(one, lr=0.01), torch.optim.Adam(hyper.hyperparameters(one), lr=rate)


def of_torch(one):
    return partnets.optim.PerPartition(torch.optim.NAdam, one), adams(one)[1]


def without_psi(one):
    return partnets.optim.PerPartition(torch.optim.RMSprop, one)


def of_all_partitions(one):
    return torch.optim.Adam(one.parameters())


def plain(one):
    return partnets.optim.SGD(one, lr=0.1), torch.optim.SGD(hyper.hyperparameters(one), lr=0.1)


class Classifier(PartitionedModule):
    """A classifier with learned and fixed dropout, and with partitioned and unpartitioned batch norm."""

    def __init__(self, chunks, optimizers=None):
        super().__init__()
        self.chunks, self.optimizers_of = chunks, optimizers or adams
        network = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), hyper.ConcreteDropout(0.3), nn.BatchNorm1d(8, affine=False),
            nn.Dropout(0.1), nn.Linear(8, 3),
        )  # fmt: skip
        self.network = partnets.partition(network, PROPORTIONS, skip="3")

    def training_loss(self, batch):
        x, y = batch
        return F.cross_entropy(self.network(x), y)

    def configure_optimizers(self):
        return self.optimizers_of(self)

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


def loader(chunks, steps_ahead=0):
    return partnets.Loader(chunks, 8, steps=STEPS, hyper_batch_size=8, steps_ahead=steps_ahead)


def module(chunks, kind=Classifier, optimizers=None, **attributes):
    torch.manual_seed(1)
    one = kind(chunks, optimizers)
    for name, value in attributes.items():
        setattr(one, name, value)
    return one


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


class Regularised(Classifier):
    """A classifier with ψ that acts only in training, and a dropout rate that learns directly."""

    clip = 0.1

    def __init__(self, chunks, optimizers=None):
        super().__init__(chunks, optimizers)
        self.decay, self.smoothing = hyper.WeightDecay(self.network, 0.01), hyper.LabelSmoothing(0.2)
        self.rate = hyper.LearningRate(self.network, 0.02)
        self.hyper_gradient = {self.decay: partnets.Lookahead(steps=2)}

    def training_loss(self, batch):
        x, y = batch
        return self.smoothing(self.decay(self.rate(self.network(x))), y).mean()


def step_directly(one, optimizer, hyper_optimizer, k, batch, hyper_k, hyper_batch):
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
    return loss, hyper_loss


def step_ahead(one, optimizer, hyper_optimizer, k, batch, hyper_k, hyper_batch):
    loss, how = one.training_loss, {"by": one.hyper_gradient, "clip": 0.1}
    batches = {hyper_k: hyper_batch}
    return (
        partnets.step_weights(one, optimizer, k, batch, loss, clip=0.1),
        partnets.step_lookahead(one, optimizer, hyper_optimizer, batches, loss, loss, **how),
    )


def by_hand(one, draws):
    """Run the same training as a manual loop and return its records."""
    optimizers, records = one.configure_optimizers(), []
    step = step_ahead if isinstance(one, Regularised) else step_directly
    one.train()
    one.network[3].eval()
    for _ in range(EPOCHS):
        for draw in draws:
            loss, hyper_loss = step(one, *optimizers, *draw)
            records.append({"loss": loss.item(), "hyper_loss": hyper_loss.item()})
        records.append({"lml": partnets.lml(one.network, one.chunks)})
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
@pytest.mark.parametrize(("kind", "optimizers"), [(Classifier, adams), (Regularised, adams), (Regularised, of_torch)])
def test_twenty_steps_are_those_of_a_loop_by_hand(kind, optimizers, tmp_path):
    chunks, steps_ahead = data(), 2 if kind is Regularised else 0
    by_lightning, expected, before = (module(chunks, kind, optimizers) for _ in range(3))
    torch.manual_seed(2)
    trainer = fit(by_lightning, loader(chunks, steps_ahead), tmp_path)
    torch.manual_seed(2)
    records = by_hand(expected, loader(chunks, steps_ahead))
    assert trainer.global_step == 2 * EPOCHS * STEPS
    assert equal(by_lightning, expected) and not equal(by_lightning, before)
    assert kind is Classifier or expected.decay.values()["decay"] != 0.01
    assert logged(tmp_path) == [pytest.approx(record, rel=1e-6) for record in records]


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


@pytest.mark.full
@pytest.mark.parametrize("k", [2, 3])
def test_nothing_of_a_later_chunk_reaches_earlier_partitions(k, tmp_path):
    pair = [module(data(changed), optimizers=partial(adams, rate=0.0)) for changed in (None, k)]
    for i, one in enumerate(pair):
        torch.manual_seed(2)
        fit(one, loader(one.chunks), tmp_path / str(i))
    earlier, later = range(1, k), range(k, len(PROPORTIONS) + 1)
    learned = [(one, one.trainer.optimizers[0].state) for one in pair]
    assert same(learned, earlier)
    assert not same(learned, later)


def test_without_psi_only_weights_are_stepped(tmp_path):
    one = module(data(), optimizers=without_psi)
    trainer = fit(one, partnets.Loader(one.chunks, 8, steps=STEPS), tmp_path)
    assert trainer.global_step == EPOCHS * STEPS and one.network[2].values()["rate"] == pytest.approx(0.3)


def scaled(scale=1024.0):
    """Return the plugin that precision="16-mixed" creates on a GPU."""
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=scale))]}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*fork")
@pytest.mark.parametrize(
    ("made", "make", "options", "message"),
    [
        ({"optimizers": without_psi}, loader, {}, "gave 1 optimisers for hyper_batch_size=8"),
        ({}, lambda chunks: partnets.Loader(chunks, 8, steps=2), {}, "gave 2 optimisers for .*size=None"),
        ({"optimizers": of_all_partitions}, loader, {}, "gave Adam first, which steps all partitions at once"),
        ({}, lambda chunks: torch.utils.data.DataLoader(chunks.dataset), {}, "a DataLoader; pass a partnets"),
        ({}, lambda chunks: loader(partnets.chunk(chunks.dataset, (0.8, 0.2))), {},
         "3 partitions and the data 2"),
        ({"kind": StartsAlone}, loader, {}, r"StartsAlone\.on_train_start .* call super\(\)\.on_train_start\(\)"),
        ({"kind": Regularised}, loader, {}, r"ψ looks 2 steps ahead.* for 0; pass partnets\.Loader\(steps_ahead=2\)"),
        ({}, loader, {"overfit_batches": 2}, r"overfit_batches=2 replaces .* leave it 0, and pass a partnets"),
        ({}, loader, {"devices": 2, "strategy": "ddp_fork"}, "2 processes train by DDPStrategy; pass"),
        ({"clip": 0.1}, loader, scaled(),
         r"clip=0\.1 .* GradScaler .*; pass precision='bf16-mixed', or set clip = None"),
        ({"kind": Regularised, "clip": None}, lambda chunks: loader(chunks, 2), scaled(),
         "2 steps ahead .* GradScaler"),
    ],
)  # fmt: skip
def test_trainings_that_would_be_wrong_are_refused_with_the_cure(made, make, options, message, tmp_path):
    one, before = module(data(), **made), module(data(), **made)
    with pytest.raises(Exception, match=message):  # from a process, in another type
        fit(one, make(one.chunks), tmp_path, **options)
    assert equal(one, before)


@pytest.mark.full
def test_a_gradient_scaler_changes_no_step(tmp_path):
    pair = [module(data(), optimizers=plain) for _ in range(2)]
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
    one = Metered()
    fit(one, partnets.Loader(data(), 8, steps=3), tmp_path)
    assert len(one.outputs) == 3 * EPOCHS  # the audit's are gone
