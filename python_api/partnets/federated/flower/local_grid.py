"""LocalGrid: all clients of a Flower app in this process, one after another: no Ray, no network, no file."""

from __future__ import annotations

import copy
import time
from asyncio import CancelledError
from collections.abc import Callable, Iterable

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from partnets.utils.checks import check_at_least

RUN_ID = 1


class LocalGrid(Grid):
    """A Grid whose nodes are calls of a ClientApp, as in a simulation, without Ray.

    A client that raises gives an error reply, as Flower's do. Time is each client's own, since in a network they would
    compute side by side: who takes longer than a timeout has replied too late, and is not heard.

    Args:
        app: what partnets.federated.flower.client_app made, or any other.
        clients: how many nodes; they have the numbers 1, 2, ..., and the configuration "partition-id" and
            "num-partitions", as Flower's simulations give it.
        node_config: of a client's number, from 0, what else its node is configured with, as {"chunk": 2}.
        run_config: of all.

    Attributes:
        sent, received: bytes of arrays that went to the clients, and that came from them.

    Raises:
        ValueError: clients is not positive.
    """

    def __init__(
        self,
        app: ClientApp,
        clients: int,
        *,
        node_config: Callable[[int], dict] = lambda number: {},
        run_config: dict | None = None,
    ) -> None:
        check_at_least(1, clients=clients)
        self.app, self.clients = app, clients
        self.sent = self.received = 0
        self._replies: dict[str, Message] = {}
        self._contexts = {
            number + 1: Context(
                run_id=RUN_ID,
                node_id=number + 1,
                node_config={"partition-id": number, "num-partitions": clients, **node_config(number)},
                state=RecordDict(),
                run_config=dict(run_config or {}),
            )
            for number in range(clients)
        }
        _identify()

    def __repr__(self) -> str:
        return f"LocalGrid({self.clients} clients)"

    def set_run(self, run: Run) -> None:
        raise NotImplementedError("LocalGrid is its own run.")

    @property
    def run(self) -> Run:
        return Run.create_empty(RUN_ID)

    def create_message(self, content, message_type, dst_node_id, group_id, ttl=None) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return [self._push(message, None) for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._replies.pop(one) for one in list(message_ids) if one in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages([self._push(message, timeout) for message in messages])

    def _push(self, message: Message, timeout: float | None) -> str:
        """Lets a client answer a message; returns what the reply, unless it is late, can be pulled by."""
        name, node = f"{len(self._replies)}.{time.monotonic_ns()}", message.metadata.dst_node_id
        self.sent += _nbytes(message)
        # Of its own, as if it had come over a network: clients may change what they get.
        about, content = message.metadata, copy.deepcopy(message.content)
        given = Message(content, node, about.message_type, ttl=about.ttl, group_id=about.group_id)
        given.metadata.__dict__["_message_id"] = name
        start = time.monotonic()
        try:
            reply = self.app(given, self._contexts[node])
            if not isinstance(reply, Message):
                raise TypeError(f"the app returned a {type(reply).__name__}; it must return a Message.")
        except (Exception, SystemExit, GeneratorExit, CancelledError) as error:  # its own failure, whatever it is
            reason = f"{type(error).__name__}: {error}"
            reply = Message(Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=reason), reply_to=given)
        sent_by(reply, node)
        if timeout is None or time.monotonic() - start <= timeout:
            self.received += _nbytes(reply)
            self._replies[name] = reply
        return name


def sent_by(reply: Message, node: int) -> None:
    """Has a reply say which node it is from: that which was asked, whatever it says itself."""
    reply.metadata.__dict__["_src_node_id"] = node


def _identify() -> None:
    """What Message asks of the process that it is made in, unless Flower has said it."""
    for name, value in (("task_id", 0), ("run_id", RUN_ID), ("node_id", SUPERLINK_NODE_ID)):
        try:
            getattr(TaskIdentity, name)
        except RuntimeError:
            setattr(TaskIdentity, name, value)


def _nbytes(message: Message) -> int:
    if not message.has_content():
        return 0
    return sum(len(array.data) for record in message.content.array_records.values() for array in record.values())
