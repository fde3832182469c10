"""A server's checkpoint: all state that determines its further rounds, written and loaded atomically."""

from __future__ import annotations

from dataclasses import asdict
from os import PathLike
from typing import Any

from partnets.federated.round import Round
from partnets.training.checkpoint import settings_of, warn_of_others
from partnets.utils import sealed
from partnets.utils.checks import check_at_least

FORMAT = 1
_EXPECTED = f"file of a federated server, of format {FORMAT}; pass a file that Server.save wrote."
# The entries besides the format and the configuration.
_NAMES = ("rounds", "pinned", "history", "values", "optimizer", "hyper_optimizer")


def save(server: Any, path: str | PathLike) -> None:
    """Write the state of a federated.Server to a file."""
    state = {
        "rounds": server.rounds,
        "pinned": server.pinned,
        "history": [asdict(each) for each in server.history],
        "values": server.vectors.read(),
        "optimizer": server.optimizer.state_dict(),
        "hyper_optimizer": None if server.hyper_optimizer is None else server.hyper_optimizer.state_dict(),
    }
    sealed.save({"format": FORMAT, "configuration": _configuration(server), **state}, path)


def load(server: Any, path: str | PathLike) -> None:
    """Load a server's state from a file, after checking all of it."""
    saved = sealed.load(path, _EXPECTED)
    if saved.get("format") != FORMAT or {*_NAMES} - saved.keys() or not isinstance(saved.get("configuration"), dict):
        raise ValueError(f"{path} is not a {_EXPECTED}")
    own = _configuration(server)
    if different := [name for name, value in own.items() if saved["configuration"].get(name) != value]:
        raise ValueError(
            f"{path} was saved by a server with another {', '.join(different)}; construct this server with the same."
        )
    try:
        history = _checked(server, saved)
    except Exception as error:  # a damaged file may fail anywhere
        raise ValueError(f"{path} is damaged or not of this program, and nothing has changed. {error}") from error
    for client, chunk in saved["pinned"].values():
        if server.other_chunk(client, chunk):
            raise ValueError(
                f"{path} has client {client} with chunk {chunk}, but chunks has another; pass the chunks of before."
            )
    optimizers = {"optimizer": server.optimizer, "hyper_optimizer": server.hyper_optimizer}
    before = settings_of(optimizers)
    server.load_values(saved["values"])
    server.optimizer.load_state_dict(saved["optimizer"])
    if server.hyper_optimizer is not None:
        server.hyper_optimizer.load_state_dict(saved["hyper_optimizer"])
    server.rounds, server.pinned, server.history = saved["rounds"], saved["pinned"], history
    warn_of_others(before, settings_of(optimizers), path, stacklevel=3)


def _checked(server: Any, saved: dict) -> list[Round]:
    """Raise if a part does not fit; return the rounds."""
    check_at_least(0, rounds=saved["rounds"])
    for sender, (client, chunk) in saved["pinned"].items():
        check_at_least(0, sender=sender, client=client)
        check_at_least(1, chunk=chunk)
    server.vectors.check(saved["values"], server.vectors.lengths)
    server.optimizer.check_state_dict(saved["optimizer"])
    return [Round(**each) for each in saved["history"]]


def _configuration(server: Any) -> dict[str, Any]:
    return {
        "fingerprint": server.vectors.fingerprint,
        "hyper": list(server.hyper),
        "optimizer": server.optimizer.kind,
        "hyper_optimizer": type(server.hyper_optimizer).__name__,
        "weighting": server.weighting,
        "privacy": None if server.privacy is None else asdict(server.privacy),
    }
