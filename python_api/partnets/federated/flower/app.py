"""client_app: a client as a Flower app that runs unchanged in LocalGrid, in simulations and over a network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from logging import ERROR
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.common.logger import log
from torch import Tensor, nn

from partnets.federated.assignment import assign
from partnets.federated.client import TURN, Client
from partnets.federated.flower.messages import ARRAYS, CONFIG, read_values, to_reply
from partnets.federated.vectors import Vectors
from partnets.subnetworks.state import num_partitions
from partnets.training.preflight import warn_of_proportions
from partnets.utils import random_state
from partnets.utils.seeds import derived

CPU = torch.device("cpu")


def client_app(
    make_model: Callable[[], nn.Module | tuple[nn.Module, Any]],
    load_data: Callable[[int, int], Any],
    *,
    proportions: Sequence[float] | None = None,
    seed: int = 0,
    client: type[Client] = Client,
    mods: list[Any] | None = None,
    **options: Any,
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
        mods: Flower's mods.
        options: further arguments of Client. With `privacy`, the reason of an error, which may quote examples, is only
            in the client's own log.

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

    def find(context: Context) -> Client:
        number, clients, chunk = _place(context, proportions, seed)
        with random_state.preserved(CPU):
            random_state.seed(derived(seed, f"data of client {number}"))
            data = load_data(number, clients)
        if not made:
            with random_state.preserved(CPU):
                found = make_model()
            model, hyper = found if isinstance(found, tuple) else (found, None)
            if proportions is not None:
                _check_proportions(model, proportions)
            made.append(client(model, data, chunk, number, hyper=hyper, seed=seed, **options))
        return made[0].with_data(data, chunk, number)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        try:
            with TURN:
                found, config = find(context), message.content[CONFIG]
                update = found.train(_received(message, found.vectors, config), config["round"])
        except Exception as error:
            if options.get("privacy") is None:
                raise
            log(ERROR, "this client failed: %s", error, exc_info=True)
            raise RuntimeError("the client failed; with privacy, the reason is only in its own log") from None
        return Message(to_reply(update), reply_to=message)

    return app


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


def _check_proportions(model: nn.Module, proportions: Sequence[float]) -> None:
    if len(proportions) != num_partitions(model):
        raise ValueError(
            f"proportions={tuple(proportions)} are of {len(proportions)} chunks, but the model has"
            f" C={num_partitions(model)}; pass the same proportions to partnets.partition and client_app."
        )
    warn_of_proportions(model, proportions)


def _received(message: Message, vectors: Vectors, config: ConfigRecord) -> dict[str, Tensor]:
    """Return the vectors in a server's message."""
    if "fingerprint" not in config:
        raise ValueError(
            "the server's message has no fingerprint: its strategy is not PartitionedFedAvg; start PartitionedFedAvg on"
            " the server."
        )
    try:
        values = read_values(message.content[ARRAYS], vectors)
    except ValueError as error:
        raise ValueError(
            f"the server's vectors do not fit this client's model: {error} Make both by the same make_model, and pass"
            " both the same hyper."
        ) from error
    if config["fingerprint"] != vectors.fingerprint:
        raise ValueError(
            "the server's model has other modules, partitions, default values or frozen weights than this client's:"
            " make both by the same make_model, which sets a seed at its start, such as torch.manual_seed(0)."
        )
    return values
