"""Shared tools of the Flower tests: an app of the clients of clients.py, its grids, and its training."""

from clients import CHUNKS, load_data, make_model, server

from partnets.federated.flower import LocalGrid, PartitionedFedAvg, client_app


def app(make=make_model, load=load_data, **options):
    return client_app(make, load, batch_size=8, **options)


def grid(app, kind=LocalGrid, chunks=CHUNKS, **options):
    return kind(app, len(chunks), node_config=lambda number: {"chunk": chunks[number]}, **options)


def start(grid, rounds, own=None, timeout=3600, **options):
    """Run `rounds` rounds of a strategy and return it."""
    strategy = PartitionedFedAvg(server() if own is None else own, **options)
    strategy.start(grid, num_rounds=rounds, timeout=timeout)
    return strategy
