"""The server app; Flower finds it through pyproject.toml."""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

import partnets
from partnets import federated, optim
from partnets.federated.flower import PartitionedFedAvg
from rotated_digits.task import HYPER_LR, SERVER_LR, data, make_model

app = ServerApp()


def make_server() -> federated.Server:
    model, augmentation = make_model()
    return federated.Server(
        model,
        hyper=augmentation,
        optimizer=optim.Adam(model, lr=SERVER_LR),
        hyper_optimizer=torch.optim.Adam(augmentation.parameters(), lr=HYPER_LR),
    )


@app.main()
def main(grid: Grid, context: Context) -> None:
    config, server = context.run_config, make_server()

    def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"accuracy": partnets.accuracy(server.model, data().test), **server.hyper_values()})

    checkpoint = str(config["checkpoint"]) or None
    strategy = PartitionedFedAvg(server, fraction=float(config["fraction"]), checkpoint=checkpoint)
    strategy.start(grid, num_rounds=int(config["rounds"]), evaluate_fn=evaluate)
