"""Cost of federated rounds: seconds, memory and bytes, relative to federated averaging, including Flower's overhead.

python -m partbench.federated
python -m partbench.federated --clients 1000
"""

from __future__ import annotations

import argparse
import logging
import resource
import sys
import time
from collections.abc import Sequence
from multiprocessing import get_context

import pandas as pd
import torch
from torch import nn

import partnets
from partbench import needing, quiet
from partbench.figures import markdown
from partnets import federated, hyper

METHODS = {"FedAvg": (1.0,), "partitioned, .7/.2/.1": (0.7, 0.2, 0.1), "partitioned, .9/.1": (0.9, 0.1)}
EXAMPLES, BATCH, SIZE = 64, 16, 16
ROUNDS = 3


def make_model(proportions: Sequence[float]) -> tuple[nn.Module, nn.Module | None]:
    """Build the digits' network of partbench.paper (38 thousand weights), augmented if it has several partitions."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2, padding=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip
    if len(proportions) == 1:
        return partnets.Ensemble([network]), None
    augmentation = hyper.Affine(rotation=5.0)
    model = hyper.Averaged(augmentation, network, samples=4)
    return partnets.partition(model, proportions, seed=0), augmentation


def load_data(number: int, clients: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.rand(EXAMPLES, 1, SIZE, SIZE, generator=generator)
    return x, torch.randint(10, (EXAMPLES,), generator=generator)


def measured(method: str, clients: int) -> dict:
    """Run a few rounds in this process and measure their seconds, peak memory, and bytes sent and received a round."""
    with needing("federated"):
        from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

        from partnets.federated.flower import LocalGrid, PartitionedFedAvg, client_app
    torch.set_num_threads(1)
    proportions, whole = METHODS[method], 0

    def count(message, context, call):
        """Count the bytes of whole replies, as they are sent object by object (a Flower mod)."""
        nonlocal whole
        reply = call(message, context)
        whole += sum(len(one.deflate()) for one in get_all_nested_objects(reply).values())
        return reply

    def make():
        return make_model(proportions)

    model, psi = make()
    strategy = PartitionedFedAvg(federated.Server(model, hyper=psi))
    grid = LocalGrid(client_app(make, load_data, proportions=proportions, batch_size=BATCH, mods=[count]), clients)
    start = time.perf_counter()
    with quiet("flwr", logging.ERROR):
        strategy.start(grid, num_rounds=ROUNDS)
    seconds = (time.perf_counter() - start) / ROUNDS
    if lost := [one for one in strategy.history if one.failed or one.refused]:
        raise RuntimeError(f"not all clients took part: {lost}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {"method": method, "clients": clients, "seconds": seconds, "peak": peak / 2**30} | {
        "up": grid.received / ROUNDS, "down": grid.sent / ROUNDS, "whole": whole / ROUNDS
    }  # fmt: skip


def table(found: pd.DataFrame) -> str:
    rows = []
    for row in found.itertuples():
        plain = found[(found.method == "FedAvg") & (found.clients == row.clients)].iloc[0]
        added = row.whole / row.up - 1
        rows.append(
            [f"{row.clients} clients", row.method, f"{row.seconds:.2f}", f"{row.peak:.2f}", f"{row.up / 1e6:.2f}",
             f"{row.up / plain.up:.3f}", f"{row.down / plain.down:.3f}", f"{100 * added:.1f} %"]
        )  # fmt: skip
    head = ["", "", "seconds a round", "memory [GiB]", "up, a round [MB]", "over FedAvg's", "down, over FedAvg's",
            "Flower adds"]  # fmt: skip
    return markdown(head, rows)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m partbench.federated", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=lambda text: [*map(int, text.split(","))], default=[20, 100, 1000])
    given = parser.parse_args(arguments)
    jobs = [(method, clients) for clients in given.clients for method in METHODS]
    # Each job runs in a new process, so that its peak memory does not depend on other jobs.
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        found = pool.starmap(measured, jobs, chunksize=1)
    print(table(pd.DataFrame(found)))


if __name__ == "__main__":
    main()
