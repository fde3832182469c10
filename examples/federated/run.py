"""Run the federated app in this process: clients learn a rotation augmentation without sharing their images.

Runs the Flower app in rotated_digits with LocalGrid: 20 clients, each with digits of a few rotations only. With
partitioned networks, they learn the half-widths of random affine transformations. Federated averaging learns only
weights, from the same images. docs/federated.md describes Flower's simulation and runs over a network.

usage: python examples/federated/run.py [--rounds 200] [--clients 20] [--out out/federated.png]
"""

from __future__ import annotations

import argparse
import logging
import time
from functools import partial
from pathlib import Path

import torch
from matplotlib.figure import Figure
from rotated_digits import client_app, server_app, task
from torch import nn

import partnets
from partnets import federated, hyper, optim
from partnets.federated import flower
from partnets.federated.flower import LocalGrid, PartitionedFedAvg

EVERY = 10


def make_plain() -> nn.Module:
    """Return the same network without partitions and augmentation."""
    return partnets.Ensemble([task.make_network()])


def run(name: str, app, server: federated.Server, arguments: argparse.Namespace) -> dict[str, list]:
    """Run all rounds; return the metrics measured after every EVERY rounds, by name."""
    grid, strategy = LocalGrid(app, arguments.clients), PartitionedFedAvg(server)
    seen: dict[str, list] = {"round": [], "accuracy": [], "megabytes": []}
    start = time.perf_counter()

    def evaluate(number: int, arrays) -> None:
        if number % EVERY and number != arguments.rounds:
            return
        found = {"round": number, "accuracy": 100 * partnets.accuracy(server.model, task.data().test)}
        found |= {"megabytes": grid.received / 1e6, **server.hyper_values()}
        if strategy.history and strategy.history[-1].lml is not None:
            found["lml"] = strategy.history[-1].lml / strategy.history[-1].examples
        for key, value in found.items():
            seen.setdefault(key.rpartition(".")[2], []).append(value)
        angle = f", rotation ±{seen['rotation'][-1]:.0f}°" if "rotation" in seen else ""
        print(f"{name}, round {number}: {found['accuracy']:.1f} %{angle}", flush=True)

    strategy.start(grid, num_rounds=arguments.rounds, evaluate_fn=evaluate)
    print(f"{name}: {time.perf_counter() - start:.0f} s, {grid.received / 1e6:.0f} MB uploaded\n", flush=True)
    return seen


def draw(found: dict[str, dict[str, list]], augmentation: hyper.Hyperparameter, path: Path) -> None:
    figure = Figure(figsize=(13, 6.5), layout="constrained")
    plots, images = figure.subfigures(2, 1, squeeze=False, height_ratios=(2.6, 1)).flat
    accuracy, rotation, lml = plots.subplots(1, 3)
    for name, seen in found.items():
        accuracy.plot(seen["megabytes"], seen["accuracy"], label=name)
    accuracy.set(title="test accuracy [%]", xlabel="uploaded by all clients [MB]", ylim=(0, 100))
    accuracy.legend()
    seen = found["partitioned"]
    rotation.plot(seen["round"], seen["rotation"], color="C1")
    rotation.set(title="rotation, half-width [degrees]", xlabel="round", ylim=(0, None))
    lml.plot(seen["round"][-len(seen["lml"]) :], seen["lml"], color="C1")
    lml.set(title="L_ML of an example [nats]", xlabel="round")
    image = task.data().train[0][:1]
    with torch.no_grad():
        samples = torch.cat([image, augmentation(image.expand(11, -1, -1, -1))])
    for i, (axes, sample) in enumerate(zip(images.subplots(1, 12), samples, strict=True)):
        axes.imshow(sample[0].numpy(), cmap="gray", vmin=0, vmax=1)
        axes.set(xticks=[], yticks=[], title="image" if i == 0 else "learned" if i == 1 else "")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("out/federated.png"), help="the picture")
    arguments = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.WARNING)
    torch.set_num_threads(1)  # steps with so few images are slower with two threads
    plain = make_plain()
    optimizer = partial(optim.SGD, lr=task.LR)
    app = flower.client_app(make_plain, task.load_data, optimizer=optimizer, batch_size=task.BATCH)
    averaged = federated.Server(plain, optimizer=optim.Adam(plain, lr=task.SERVER_LR))
    server = server_app.make_server()
    found = {
        "FedAvg": run("FedAvg", app, averaged, arguments),
        "partitioned": run("partitioned", client_app.app, server, arguments),
    }
    (augmentation,) = server.hyper.values()
    draw(found, augmentation, arguments.out)
    print(f"The picture is in {arguments.out}.")


if __name__ == "__main__":
    main()
