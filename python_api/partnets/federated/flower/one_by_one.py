"""OneByOne: pulls each reply separately, so that a malformed reply does not discard the others."""

from __future__ import annotations

import time
from collections.abc import Iterable
from logging import WARNING
from typing import Any

import httpx
from flwr.app import Message
from flwr.common.logger import log
from flwr.serverapp import Grid

from partnets.federated.round import shown

# The polling interval for replies, that of Flower.
SECONDS = 3.0


class OneByOne:
    """A Grid whose replies are pulled one at a time.

    Flower parses replies while it pulls them: a malformed one raises before any strategy sees it, and the other replies
    of this pull are lost. Here a malformed reply is treated as missing. A reply's sender is taken from the message that
    it answers, as the sender stated in the reply may be forged. Replies in a LocalGrid are not parsed from bytes.

    Args:
        grid: the Grid to send messages through, which has all other methods.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def __getattr__(self, name: str) -> Any:
        return getattr(self.grid, name)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        if not hasattr(self.grid, "node"):  # a Grid in this process
            return self.grid.send_and_receive(messages, timeout=timeout)
        messages = list(messages)
        asked = [message.metadata.dst_node_id for message in messages]
        waiting = dict(zip(self.grid.push_messages(messages), asked, strict=True))
        end = None if timeout is None else time.monotonic() + timeout
        found: list[Message] = []
        while waiting:
            for one, node in list(waiting.items()):
                try:
                    replies = list(self.grid.pull_messages([one]))
                except (httpx.HTTPError, ConnectionError):
                    raise
                except Exception as error:  # a malformed reply may fail in any way
                    log(WARNING, "a reply of node %d could not be read: %s", node, shown(repr(error)))
                    del waiting[one]
                    continue
                if replies:
                    replies[0].metadata.__dict__["_src_node_id"] = node
                    found.append(replies[0])
                    del waiting[one]
            if end is not None and time.monotonic() >= end:
                break
            if waiting:
                time.sleep(SECONDS)
        return found
