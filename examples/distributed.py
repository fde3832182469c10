r"""Train one network in several processes, select its relevant inputs, and resume after a process has died.

The processes share every batch, and exchange only the gradient of the partition that is trained. When one dies,
torchrun stops the others and restarts all of them. They resume from the last checkpoint, with the same bits.

usage: TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 python -m torch.distributed.run --standalone --nproc-per-node 2 \
           --max-restarts 1 examples/distributed.py [--steps 300] [--save-every 50] [--kill-at 120]
           [--checkpoint out/distributed.pt]

Without the variable, torchrun (PyTorch 2.13) keeps its store when it restarts processes, and gloo waits for dead ones.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import partnets
from partnets import distributed, hyper
from partnets.training import callbacks

PROPORTIONS = (0.8, 0.1, 0.1)


def examples() -> tuple[torch.Tensor, torch.Tensor]:
    """Return 1000 examples, the same in every process. Only the first 15 of 30 features depend on the class."""
    y = torch.arange(1000) % 2
    x = torch.randn(1000, 30, generator=torch.Generator().manual_seed(0))
    x[:, :15] += y[:, None]
    return x, y


def trainer(checkpoint: Path, save_every: int, kill_at: int | None) -> distributed.Trainer:
    mask = hyper.InputMask(30)
    model = partnets.partition(nn.Sequential(mask, nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 2)), PROPORTIONS)

    def die(_: partnets.Trainer) -> None:
        if dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)

    each = [callbacks.every(save_every, lambda one: one.save(checkpoint))]
    if kill_at is not None:
        each.append(lambda one: die(one) if one.steps == kill_at else None)
    return distributed.Trainer(model, partnets.chunk(examples(), PROPORTIONS), hyper=mask, callbacks=each)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--kill-at", type=int, help="the step after which the second process dies, once")
    parser.add_argument("--checkpoint", type=Path, default=Path("out/distributed.pt"))
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())  # each process draws different noise for the mask
    one = trainer(arguments.checkpoint, arguments.save_every, arguments.kill_at)
    if arguments.checkpoint.exists():
        one.load(arguments.checkpoint)
    first = one.steps
    one.fit(arguments.steps - first)
    one.save(arguments.checkpoint)
    if dist.get_rank() == 0:
        kept = [index for index, p in one.values().items() if p > 0.5]
        print(f"steps {first} to {one.steps}: keeps {len(kept)} of 30 inputs, of which 15 matter")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
