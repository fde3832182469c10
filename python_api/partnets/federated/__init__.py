"""Federated partitioned networks: hyperparameters learned across clients that keep their data (Appendix J).

A client of chunk k trains the partitions k..C on its examples and computes the gradient of ψ through subnetwork k-1.

    server = federated.Server(make_model(), hyper=...)
    clients = [federated.Client(make_model(), data, chunk, number, hyper=...) for ...]
    for _ in range(rounds):
        values, number = server.values(), server.rounds + 1
        print(server.step(client.train(values, number) for client in clients))

partnets.federated.flower runs these rounds with Flower: in one process, in its simulation, or over a network.
"""

from partnets.federated.assignment import assign
from partnets.federated.client import Client
from partnets.federated.privacy import Privacy
from partnets.federated.round import Round, Update
from partnets.federated.server import Server

__all__ = ["Client", "Privacy", "Round", "Server", "Update", "assign"]
