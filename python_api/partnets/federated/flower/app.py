"""client_app: a client as a Flower app that runs unchanged in LocalGrid, in simulations and over a network."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from logging import ERROR
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.logger import log
from torch import nn

from partnets.federated.assignment import assign
from partnets.federated.client import Client, taking_turns
from partnets.federated.flower.arrays import to_record, to_values
from partnets.federated.privacy import Privacy
from partnets.federated.update import Update
from partnets.subnetworks.state import num_partitions as count
from partnets.training.preflight import warn_of_proportions
from partnets.utils import random_state
from partnets.utils.seeds import derived

# The names of a message's records.
ARRAYS, METRICS, CONFIG = "arrays", "metrics", "config"
# The prefix of the names of ψ's gradient, which is sent with the weights.
GRADIENT = "gradient."
CPU = torch.device("cpu")


def client_app(
    make_model: Callable[[], nn.Module | tuple[nn.Module, Any]],
    load_data: Callable[[int, int], Any],
    *,
    proportions: Sequence[float] | None = None,
    seed: int = 0,
    client: type[Client] = Client,
    load_test: Callable[[int, int], Any] | None = None,
    mods: list | None = None,
    **options,
) -> ClientApp:
    """Return a Flower ClientApp that runs the rounds of Client.

    A node's configuration identifies its client by "partition-id" and "num-partitions", which Flower's simulations and
    `flower-supernode --node-config` set. Its chunk is the entry "chunk" if present, and follows from the proportions
    otherwise.

    Args:
        make_model: a function that returns the model, or the pair of the model and the learned hyperparameters ψ. It is
            called once in each process and must return the same model in each, such as after torch.manual_seed(0).
        load_data: load_data(number, clients) returns a client's examples, as Client takes them. It is called in each
            round, with random states that are the same in all rounds.
        proportions: the proportions of the chunks, as for assign; not needed if the nodes' configurations have chunks,
            or all clients have chunk 1.
        seed: the seed of assign and of the clients' random draws.
        client: Client or a subclass.
        load_test: the same as load_data, for evaluations; load_data if None. With privacy there are no evaluations, as
            a loss would reveal information on the examples.
        mods: Flower's mods, applied to training and evaluation.
        options: further arguments of Client.

    Raises:
        ValueError: in the app's rounds: a node's configuration does not identify its client, or the server has another
            model; and as for Client.

    Example:
        >>> import torch, partnets
        >>> from partnets.federated.flower import LocalGrid
        >>> def make_model():
        ...     return partnets.partition(nn.Linear(4, 3), (0.5, 0.5), seed=0)
        >>> def load_data(number, clients):
        ...     return torch.ones(5, 4), torch.full((5,), number % 3)
        >>> LocalGrid(client_app(make_model, load_data, proportions=(0.5, 0.5)), clients=4)
        LocalGrid(4 clients)
    """
    app = ClientApp(mods=mods)
    made: list[Client] = []  # at most one, the first client in this process

    def find(context: Context, load: Callable[[int, int], Any]) -> Client:
        number, clients, chunk = _place(context, proportions, seed)
        with random_state.preserved(CPU):
            random_state.seed(derived(seed, f"data of client {number}"))
            data = load(number, clients)
        if not made:
            with random_state.preserved(CPU):
                found = make_model()
            model, hyper = found if isinstance(found, tuple) else (found, None)
            if proportions is not None and len(proportions) != count(model):
                raise ValueError(
                    f"proportions={tuple(proportions)} are of {len(proportions)} chunks, but the model has"
                    f" C={count(model)}; pass the same proportions to partnets.partition and client_app."
                )
            if proportions is not None:
                warn_of_proportions(model, proportions)
            made.append(client(model, data, chunk, number, hyper=hyper, seed=seed, **options))
        return made[0].with_data(data, chunk, number)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        with taking_turns(), _hidden_errors(options.get("privacy")):
            found = find(context, load_data)
            values, config = _received(message, found)
            return Message(_reply(found.train(values, config["round"])), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        if options.get("privacy") is not None:
            raise ValueError(
                "evaluations report a loss, which privacy hides; evaluate on the server by start(evaluate_fn=...), with"
                " evaluate_fraction=0."
            )
        with taking_turns():
            found = find(context, load_data if load_test is None else load_test)
            values, _ = _received(message, found)
            told = found.evaluate(values)
        metrics = {"num-examples": len(found.data), "num-targets": told.pop("targets"), **told}
        return Message(RecordDict({METRICS: MetricRecord(metrics)}), reply_to=message)

    return app


@contextmanager
def _hidden_errors(privacy: Privacy | None) -> Iterator[None]:
    """Keep the reason of an error, which may quote examples, in the client's log if privacy is given."""
    try:
        yield
    except Exception as error:
        if privacy is None:
            raise
        log(ERROR, "this client failed: %s", error, exc_info=True)
        raise RuntimeError("the client failed; with privacy, the reason is only in its own log") from None


def _place(context: Context, proportions: Sequence[float] | None, seed: int) -> tuple[int, int, int]:
    """Return the number of a node's client, the number of clients, and its chunk."""
    node = context.node_config
    number, clients = node.get("partition-id"), node.get("num-partitions")
    if type(number) is not int or type(clients) is not int or not 0 <= number < clients:
        raise ValueError(
            f"a node has the configuration {dict(node)}; give each its number and the number of nodes, such as"
            " flower-supernode --node-config 'partition-id=0 num-partitions=4'."
        )
    if "chunk" in node:
        return number, clients, node["chunk"]
    return number, clients, 1 if proportions is None else assign(clients, proportions, seed)[number]


def _received(message: Message, client: Client) -> tuple[dict, ConfigRecord]:
    """Return the vectors and the configuration in a server's message."""
    config = message.content[CONFIG]
    if "fingerprint" not in config:
        raise ValueError(
            "the server's message has no fingerprint: its strategy is not PartitionedFedAvg; start PartitionedFedAvg on"
            " the server."
        )
    try:
        values = to_values(message.content[ARRAYS], client.vectors, client.vectors.lengths)
    except ValueError as error:
        raise ValueError(
            f"the server's vectors do not fit this client's model: {error} Make both by the same make_model, and pass"
            " both the same hyper."
        ) from error
    if config["fingerprint"] != client.vectors.fingerprint:
        raise ValueError(
            "the server's model has other modules, partitions, default values or frozen weights than this client's:"
            " make both by the same make_model, which sets a seed at its start, such as torch.manual_seed(0)."
        )
    return values, config


def _reply(update: Update) -> RecordDict:
    metrics = {"client": update.client, "chunk": update.chunk, "round": update.round, "num-examples": update.examples}
    if update.hyper_loss is not None:
        metrics["hyper-loss"] = update.hyper_loss
    metrics |= {f"loss-{k}": loss for k, loss in update.losses.items()}
    gradients = {GRADIENT + name: vector for name, vector in update.gradients.items()}
    return RecordDict(
        {
            ARRAYS: to_record({**update.values, **gradients}),
            METRICS: MetricRecord(metrics),
            CONFIG: ConfigRecord({"fingerprint": update.fingerprint}),
        }
    )
