"""OneByOne: a Grid that pulls each reply separately, so that a malformed reply does not discard the others."""

from __future__ import annotations

import time
from collections.abc import Iterable
from logging import WARNING

import httpx
from flwr.app import Message
from flwr.common.logger import log
from flwr.serverapp import Grid

from partnets.federated.flower.local_grid import sent_by
from partnets.federated.round import shown

# The polling interval for replies, that of Flower.
SECONDS = 3.0


class OneByOne(Grid):
    """A wrapper of a Grid that pulls replies one at a time.

    Flower parses replies while it pulls them: a malformed one raises before any strategy sees it, and the other replies
    of this pull are lost. This Grid treats a malformed reply as missing. It takes a reply's sender from the message
    that the reply answers, as the sender stated in the reply may be forged. LocalGrid's replies are passed on directly,
    as they are not parsed from bytes.

    Args:
        grid: the Grid to send messages through.

    Example:
        >>> OneByOne.__abstractmethods__
        frozenset()
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def set_run(self, run) -> None:
        self.grid.set_run(run)

    @property
    def run(self):
        return self.grid.run

    def create_message(self, *arguments, **options) -> Message:
        return self.grid.create_message(*arguments, **options)

    def get_node_ids(self) -> Iterable[int]:
        return self.grid.get_node_ids()

    def get_nodes(self):
        return self.grid.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return self.grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self.grid.pull_messages(message_ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        if not hasattr(self.grid, "node"):  # a Grid in this process
            return self.grid.send_and_receive(messages, timeout=timeout)
        messages = list(messages)
        asked = [one.metadata.dst_node_id for one in messages]
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
                    sent_by(replies[0], node)
                    found.append(replies[0])
                    del waiting[one]
            if end is not None and time.monotonic() >= end:
                break
            if waiting:
                time.sleep(SECONDS)
        return found
