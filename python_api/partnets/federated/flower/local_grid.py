"""LocalGrid: runs all clients of a Flower app in this process, one after another, without Ray, network or files."""

from __future__ import annotations

import copy
import time
from asyncio import CancelledError
from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from partnets.utils.checks import check_at_least

RUN_ID = 1


class LocalGrid(Grid):
    """A Grid that runs nodes as calls of a ClientApp, like a simulation without Ray.

    A client that raises gives an error reply, as in Flower. The timeout applies to each client's time separately, since
    clients in a network compute in parallel; a client that takes longer is treated as missing.

    Args:
        app: a ClientApp, such as partnets.federated.flower.client_app returns.
        clients: the number of nodes. Their node numbers are 1, 2, ...; their configuration has "partition-id" and
            "num-partitions", as in Flower's simulations.
        node_config: a function of a client's number, from 0, that returns further entries of its configuration, such as
            {"chunk": 2}.
        run_config: the run configuration of all nodes.

    Attributes:
        sent, received: bytes of arrays sent to the clients and received from them.

    Raises:
        ValueError: clients is not positive.
    """

    def __init__(
        self,
        app: ClientApp,
        clients: int,
        *,
        node_config: Callable[[int], dict[str, Any]] = lambda number: {},
        run_config: dict[str, Any] | None = None,
    ) -> None:
        check_at_least(1, clients=clients)
        self.app, self.clients = app, clients
        self.sent = self.received = 0
        self._pushed = 0
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

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
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
        """Let a client answer a message; return the id by which its reply, unless late, can be pulled."""
        self._pushed += 1
        name, about, start = str(self._pushed), message.metadata, time.monotonic()
        # A copy, as over a network: clients may modify their message.
        content, node = copy.deepcopy(message.content), about.dst_node_id
        given = Message(content, node, about.message_type, ttl=about.ttl, group_id=about.group_id)
        given.metadata.__dict__["_message_id"] = name
        self.sent += _nbytes(given)
        try:
            reply = self.app(given, self._contexts[node])
            if not isinstance(reply, Message):
                raise TypeError(f"the app returned a {type(reply).__name__}; it must return a Message.")
        except (Exception, SystemExit, GeneratorExit, CancelledError) as error:  # any failure of the client
            reason = f"{type(error).__name__}: {error}"
            reply = Message(Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=reason), reply_to=given)
        reply.metadata.__dict__["_src_node_id"] = node
        if timeout is None or time.monotonic() - start <= timeout:
            self.received += _nbytes(reply)
            self._replies[name] = reply
        return name


def _identify() -> None:
    """Set the identity of this process that Message requires, unless Flower has set it."""
    for name, value in (("task_id", 0), ("run_id", RUN_ID), ("node_id", SUPERLINK_NODE_ID)):
        try:
            getattr(TaskIdentity, name)
        except RuntimeError:
            setattr(TaskIdentity, name, value)


def _nbytes(message: Message) -> int:
    if not message.has_content():
        return 0
    return sum(len(array.data) for record in message.content.array_records.values() for array in record.values())
