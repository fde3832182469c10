"""Federated partitioned networks: hyperparameters learned across clients whose data stay with them (Appendix J).

Each client has a chunk: its examples train the partitions from that on, and judge ψ through the subnetwork before it.

    server = federated.Server(make_model(), hyper=...)
    clients = [federated.Client(make_model(), data, chunk, number, hyper=...) for ...]
    for _ in range(rounds):
        values, number = server.values(), server.rounds + 1
        print(server.step(client.train(values, number) for client in clients))

partnets.federated.flower runs the same by Flower: in one process, in its simulation, or over a network.
"""

from partnets.federated.assignment import assign
from partnets.federated.augerino import AugerinoClient
from partnets.federated.client import Client
from partnets.federated.privacy import Privacy
from partnets.federated.round import Round
from partnets.federated.server import Server
from partnets.federated.splitting import dirichlet
from partnets.federated.update import Update
from partnets.federated.vectors import Vectors

__all__ = ["AugerinoClient", "Client", "Privacy", "Round", "Server", "Update", "Vectors", "assign", "dirichlet"]
