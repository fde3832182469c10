"""Made the files of saved/, by the version before the packages had rooms; test_saved_before.py loads them.

usage, in this folder: python -c "import saved_network; saved_network.main()"
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import partkernels
import partnets
from partnets import distributed, hyper, models

PROPORTIONS = (0.5, 0.3, 0.2)
FOLDER = Path(__file__).parent / "saved"


class Head(nn.Module):
    """With a token of its own, which partnets.partition takes for a shift."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.linspace(-1, 1, 8).view(1, 1, 8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.recurrent = nn.LSTM(8, 6, batch_first=True)

    def forward(self, x):
        x = x + self.token
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.recurrent(x)[0].mean(1)


def network():
    return nn.Sequential(
        hyper.ConcreteDropout(0.2), nn.Embedding(20, 8), nn.LayerNorm(8), Head(), models.Scale(), models.Bias(),
        nn.Linear(6, 12), nn.BatchNorm1d(12), nn.PReLU(), nn.Unflatten(1, (3, 4)), nn.Conv1d(3, 4, 3), nn.Flatten(),
        nn.Linear(8, 3),
    )  # fmt: skip


def inputs():
    return torch.arange(40).view(8, 5) % 20


class Ids(nn.Module):
    """Whole numbers, from the floats that a loss is given."""

    def forward(self, x):
        return x.long()


def partitioned(defaults="seed"):
    torch.manual_seed(0)
    layers = network()
    model = nn.Sequential(Ids(), *layers[1:4], layers[0], *layers[4:])
    return partnets.partition(model, PROPORTIONS, defaults=defaults, seed=3)


def chunks():
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(20, (60, 5), generator=generator).float()
    return partnets.chunk((x, (x.sum(1) % 3).long()), PROPORTIONS, seed=2)


def trainer():
    model = partitioned()
    optimizer = partnets.optim.Adam(model, lr=1e-2, weight_decay=partnets.optim.decays(1.0, chunks().sizes))
    return partnets.Trainer(
        model, chunks(), hyper=model[4], optimizer=optimizer, batch_size=8, clip=1.0, lml_every=5, keep_best=True,
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40), seed=4,
    )  # fmt: skip


def lightning_module():
    """A PartitionedModule and its Loader."""
    from partnets.lightning import PartitionedModule

    class Classifier(PartitionedModule):
        def __init__(self):
            super().__init__()
            self.model = partitioned()

        def training_loss(self, batch):
            x, y = batch
            return nn.functional.cross_entropy(self.model(x), y)

        def configure_optimizers(self):
            return partnets.optim.Adam(self), torch.optim.Adam(hyper.hyperparameters(self))

    return Classifier(), partnets.Loader(chunks(), batch_size=8, steps=6, hyper_batch_size=8)


def lightning_trainer(**options):
    import lightning

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return lightning.Trainer(**quiet | {"enable_checkpointing": False} | options)


def main(folder=FOLDER):
    torch.set_num_threads(1)
    one = trainer()
    one.fit(10)
    one.save(folder / "trainer.pt")
    one.fit(5)
    after = {"lml": one.history.lml, "loss": one.history.steps["loss"], "values": one.values()}

    model = partitioned("stored")
    model.eval()
    outputs = []
    for k in (1, 2, 3):
        with partnets.subnetwork(model, active=k), torch.no_grad():
            outputs.append(model(inputs()))
    torch.save(model, folder / "model.pt")
    torch.save(model.state_dict(), folder / "state_dict.pt")
    partition = partkernels.Partition.random((4, 6), PROPORTIONS, seed=0, defaults=partkernels.Uniform(0.1, seed=1))
    torch.save(partition, folder / "partition.pt")

    for name, make in (
        ("sgd", lambda m: partnets.optim.SGD(m, lr=0.1, momentum=0.9)),
        ("rmsprop", lambda m: partnets.optim.PerPartition(torch.optim.RMSprop, m, lr=0.1)),
    ):
        layer = partnets.Linear(6, 4, proportions=PROPORTIONS, seed=0)
        optimizer = make(layer)
        for k in (1, 2, 3):
            with partnets.subnetwork(layer, active=k, update=k):
                layer(torch.ones(2, 6)).square().sum().backward()
            optimizer.step(update=k)
            optimizer.zero_grad()
        torch.save({"layer": layer.state_dict(), "optimizer": optimizer.state_dict()}, folder / f"{name}.pt")

    module, loader = lightning_module()
    fitted = lightning_trainer(max_epochs=1)
    fitted.fit(module, loader)
    fitted.save_checkpoint(folder / "lightning.ckpt")
    fitted = lightning_trainer(max_epochs=2)
    fitted.fit(module, loader, ckpt_path=folder / "lightning.ckpt")
    resumed = {name: value for name, value in module.state_dict().items() if torch.is_tensor(value)}

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    two = trainer()
    two.fit(10)
    distributed.save(two, folder / "distributed")
    dist.destroy_process_group()
    torch.save(
        {"outputs": outputs, "after": after, "history": vars(two.history), "resumed": resumed}, folder / "expected.pt"
    )
