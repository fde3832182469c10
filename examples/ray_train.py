"""Train one network in two processes of Ray Train, then compare learning rates of ψ by L_ML with Ray Tune.

Ray starts the processes and their gloo group; partnets.distributed.Trainer does the rest, as under torchrun.

usage: pip install 'ray[train,tune]' && python examples/ray_train.py
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ray
import torch
from ray import train, tune
from ray.train.torch import TorchTrainer
from torch import nn

import partnets
import partnets.distributed
from partnets import hyper

PROPORTIONS = (0.8, 0.1, 0.1)


def parts(rate: float) -> tuple[nn.Module, partnets.Chunks, dict[str, Any]]:
    """Return a model, its chunks and options of a trainer. Only the first 15 of 30 features depend on the class."""
    y = torch.arange(1000) % 2
    x = torch.randn(1000, 30, generator=torch.Generator().manual_seed(0))
    x[:, :15] += y[:, None]
    torch.manual_seed(0)
    mask = hyper.InputMask(30)
    model = partnets.partition(nn.Sequential(mask, nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 2)), PROPORTIONS)
    options = {"hyper": mask, "hyper_optimizer": torch.optim.Adam(mask.parameters(), lr=rate), "audit": False}
    return model, partnets.chunk((x, y), PROPORTIONS), options


def on_each_rank(config: dict[str, Any]) -> None:
    model, chunks, options = parts(config["rate"])
    trainer = partnets.distributed.Trainer(model, chunks, **options)
    if (saved := train.get_checkpoint()) is not None:  # Ray has started these processes again
        with saved.as_directory() as folder:
            trainer.load(Path(folder, "trainer.pt"))
    while trainer.steps < 100:
        trainer.fit(50)
        with TemporaryDirectory() as folder:
            trainer.save(Path(folder, "trainer.pt"))  # on all ranks; rank 0 writes it
            is_first = train.get_context().get_world_rank() == 0
            checkpoint = train.Checkpoint.from_directory(folder) if is_first else None
            train.report({"lml": partnets.lml(model, chunks)}, checkpoint=checkpoint)


def trial(config: dict[str, Any]) -> dict[str, float]:
    model, chunks, options = parts(config["rate"])
    partnets.Trainer(model, chunks, **options).fit(100)
    return {"lml": partnets.lml(model, chunks)}


def main() -> None:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    scaling = train.ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1})
    result = TorchTrainer(on_each_rank, train_loop_config={"rate": 0.1}, scaling_config=scaling).fit()
    print(f"two ranks: L_ML {result.metrics['lml']:.1f} nats")
    settings = tune.TuneConfig(metric="lml", mode="max")
    rates = {"rate": tune.grid_search([0.01, 0.1])}
    best = tune.Tuner(trial, param_space=rates, tune_config=settings).fit().get_best_result()
    print(f"best rate of ψ: {best.config['rate']}, L_ML {best.metrics['lml']:.1f} nats")


if __name__ == "__main__":
    main()
