"""Shared tools of the Flower tests: an app of the clients of clients.py, and grids with one faulty node."""

import copy
import pickle

from clients import CHUNKS, load_data, make_model, server

from partnets.federated.flower import LocalGrid, PartitionedFedAvg, client_app


def app(make=make_model, load=load_data, **options):
    return client_app(make, load, batch_size=8, **options)


def grid(app, clients=4, **options):
    return LocalGrid(app, clients, node_config=lambda number: {"chunk": CHUNKS[number]}, **options)


def remembered(app):
    """Return an app that computes the reply to the same message only once."""
    replies = {}

    def call(message, context):
        asked = context.node_id, pickle.dumps(message.content)
        if asked not in replies:
            replies[asked] = app(message, context)
        return type(message)(copy.deepcopy(replies[asked].content), reply_to=message)

    return call


def hurting(spoil, node, rounds=(2,), app=remembered(app())):  # noqa: B008 - one shared app
    """Return an app in which one node's replies in these rounds are replaced by spoil(reply), unless it is None."""

    def call(message, context):
        reply = app(message, context)
        if context.node_id != node or message.content["config"]["round"] not in rounds:
            return reply
        found = spoil(reply)
        return reply if found is None else found

    return call


def start(grid, rounds, own=None, timeout=3600, **options):
    """Run `rounds` rounds of a strategy and return it."""
    strategy = PartitionedFedAvg(server() if own is None else own, **options)
    strategy.start(grid, num_rounds=rounds, timeout=timeout)
    return strategy
