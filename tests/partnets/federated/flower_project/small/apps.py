"""The small clients and their server as a Flower app with processes that can be made to die."""

import os
import signal

from clients import make_noisy
from clients import server as make_server
from flwr.serverapp import ServerApp
from nodes import app

from partnets.federated.flower import PartitionedFedAvg


def dying(message, context, call):
    config = context.run_config
    here = context.node_config["partition-id"] == config["dying-client"]
    if here and message.content["config"]["round"] == config["client-dies-in"]:
        os.kill(os.getpid(), signal.SIGKILL)
    return call(message, context)


client = app(make_noisy, mods=[dying])
server = ServerApp()


@server.main()
def main(grid, context):
    config = context.run_config
    strategy = PartitionedFedAvg(
        make_server(make_noisy), checkpoint=config["checkpoint"], min_nodes=config["min-nodes"]
    )
    strategy.start(grid, num_rounds=config["rounds"], timeout=config["timeout"])
