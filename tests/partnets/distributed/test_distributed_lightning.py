"""Lightning on two ranks trains as one process does."""

import lightning
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy
from small_network import MeanMask
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from training import whole

import partnets
from partnets import hyper
from partnets.integrations.lightning import PartitionedModule
from partnets.subnetworks.parameters import partitioned_parameters

PROPORTIONS, STEPS = (0.5, 0.3, 0.2), 6
DDP = "ddp_find_unused_parameters_true"
pytestmark = [
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Failed to load image Python extension"),
]


class Classifier(PartitionedModule):
    def __init__(self, decays, noise, clip, sharded=None):
        super().__init__()
        self.sharded = sharded
        torch.manual_seed(0)
        layer = nn.Linear(4, 8)
        psi = hyper.WeightDecay(layer, 0.1) if decays else MeanMask(4)
        network = nn.Sequential(psi, layer, nn.LayerNorm(8), nn.Dropout(noise), nn.Linear(8, 3)).double()
        self.network = partnets.partition(network, PROPORTIONS, seed=0)
        self.clip = clip

    def configure_model(self):
        if self.sharded and dist.is_initialized():
            if self.sharded == "tensor":
                plan = {"1": ColwiseParallel(output_layouts=Replicate())}
                parallelize_module(self.network, self.device_mesh["tensor_parallel"], plan)
            partnets.distributed.fully_shard(self.network, mesh=self.device_mesh["data_parallel"])

    def training_loss(self, batch):
        x, y = batch
        return F.cross_entropy(self.network(x), y)

    def configure_optimizers(self):
        return partnets.optim.Adam(self, lr=0.05), torch.optim.Adam(hyper.hyperparameters(self), lr=0.1)


def chunks(changed=None):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 4, generator=generator).double(), torch.randint(3, (60,), generator=generator)
    found = partnets.chunk((x, y), PROPORTIONS)
    if changed is not None:
        x[found.indices(changed)] *= -1
        y[found.indices(changed)] = (y[found.indices(changed)] + 1) % 3
    return found


def fit(folder, options=None, decays=False, noise=0.0, clip=None, resume=None, save=False, strategy=DDP, sharded=None):
    """Train on the ranks of the group, or in this process alone; return the weights and ψ."""
    module = Classifier(decays, noise, clip, sharded)
    draws = {"steps": STEPS, "hyper_batch_size": 8, "steps_ahead": int(decays)} | (options or {})
    loader = partnets.Loader(chunks(), 12, **draws)
    ranks = {"devices": 1}
    if sharded:
        sizes = (1, 2) if sharded == "tensor" else (2, 1)
        strategy = ModelParallelStrategy(*sizes)
    if dist.is_initialized():
        ranks = {"devices": 2, "strategy": strategy, "plugins": [TorchElasticEnvironment()]}
    keep = ModelCheckpoint(folder, "{step}", every_n_train_steps=2 * STEPS - 4, save_top_k=-1)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=2, callbacks=[keep] if save else [], enable_checkpointing=save, **quiet, **ranks
    )
    if dist.is_initialized():
        torch.manual_seed(dist.get_rank())
    trainer.fit(module, loader, ckpt_path=resume)
    return [whole(tensor) for tensor in module.network.state_dict().values() if tensor.is_floating_point()]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"decays": True, "clip": 0.3},
        pytest.param({"options": {"accumulate": 2}}, marks=pytest.mark.full),
        {"sharded": "data"},
        pytest.param({"sharded": "tensor", "clip": 0.3}, marks=pytest.mark.full),
    ],
    ids=["direct", "lookahead", "accumulated", "sharded", "tensor"],
)
def test_two_ranks_train_as_one_process_does(two_ranks, tmp_path, options):
    expected = fit(tmp_path, **options)
    for found in two_ranks(fit_with, tmp_path, options):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def fit_with(folder, options):
    return fit(folder, **options)


@pytest.mark.full
@pytest.mark.parametrize("sharded", [None, "data"])
def test_two_ranks_resume_to_the_same_bits_with_their_own_noise(two_ranks, tmp_path, sharded):
    options = {"noise": 0.3, "sharded": sharded}
    complete = two_ranks(fit_with, tmp_path, {**options, "save": True})
    resumed = two_ranks(fit_with, tmp_path, {**options, "resume": str(next(tmp_path.glob("step=8*.ckpt")))})
    for one, other in zip(complete, resumed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(*complete, strict=True))


@pytest.mark.full
def test_later_chunks_do_not_reach_earlier_partitions_on_two_ranks(two_ranks, tmp_path):
    (first, _), (second, _) = (two_ranks(weights_of_partition_1, tmp_path, changed) for changed in (None, 3))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def weights_of_partition_1(folder, changed):
    """Train without ψ, which learns from all chunks; return the entries of partition 1."""
    module = Classifier(False, 0.0, None)
    module.configure_optimizers = lambda: partnets.optim.Adam(module, lr=0.05)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=DDP, plugins=[TorchElasticEnvironment()], max_epochs=2, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(module, partnets.Loader(chunks(changed), 12, steps=STEPS))
    found = partnets.partitions(module.network)
    return [weight.detach()[found[name].mask(1)] for name, weight in module.network.named_parameters() if name in found]


class Counting(Classifier):
    def on_train_end(self):
        self.sent = self.trainer.strategy.model.packing.bytes
        super().on_train_end()


def bytes_sent():
    """Return the bytes of gradients that a rank has sent, and those of the entries that learned."""
    draws = {"steps": STEPS, "hyper_batch_size": 8}
    module, loader = Counting(False, 0.0, None), partnets.Loader(chunks(), 12, **draws)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    ranks = {"devices": 2, "strategy": DDP, "plugins": [TorchElasticEnvironment()], "enable_checkpointing": False}
    lightning.Trainer(accelerator="cpu", max_epochs=1, **quiet, **ranks).fit(module, loader)
    owned, psi = partitioned_parameters(module), sum(one.numel() for one in hyper.hyperparameters(module))
    ks = [draw.k for draw in partnets.Loader(chunks(), 12, **draws)]
    learned = [sum(one.numel(k) for one in owned) + psi for k in ks]
    return module.sent, 8 * sum(learned)


def test_ranks_send_only_the_gradients_of_the_partition_that_learns(two_ranks):
    assert all(sent == learned for sent, learned in two_ranks(bytes_sent))


def refused(folder, options, draws):
    with pytest.raises(ValueError) as error:
        fit(folder, draws, **options)
    return str(error.value)


@pytest.mark.parametrize(
    ("options", "draws", "message"),
    [
        ({"strategy": "ddp"}, {}, "pass strategy='ddp_find_unused_parameters_true'"),
        ({}, {"hyper_batch_size": 7}, "hyper_batch_size=7 cannot be shared by 2 ranks"),
    ],
)
def test_ranks_refuse_settings_that_do_not_fit(two_ranks, tmp_path, options, draws, message):
    assert all(message in found for found in two_ranks(refused, tmp_path, options, draws))


class Leaky(Classifier):
    """A model that keeps something of its batches on rank 1."""

    def training_loss(self, batch):
        before, self.seen = getattr(self, "seen", 0.0), float(batch[0].mean()) * dist.get_rank()
        return super().training_loss(batch) * (1 + before)


def leak_on_one_rank():
    ranks = {"devices": 2, "strategy": DDP, "plugins": [TorchElasticEnvironment()]}
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, **ranks)
    with pytest.raises((ValueError, RuntimeError)) as error:
        trainer.fit(Leaky(False, 0.0, None), partnets.Loader(chunks(), 12, steps=STEPS, hyper_batch_size=8))
    return str(error.value)


def test_a_leak_found_by_only_one_rank_raises_on_all(two_ranks):
    first, last = two_ranks(leak_on_one_rank)
    assert "seen" in last and first.startswith("rank 1 raised ValueError"), (first, last)
