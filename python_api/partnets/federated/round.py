"""Round: what became of the updates of a round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# Of what others give as a reason, in characters.
LONGEST = 300


@dataclass(frozen=True)
class Round:
    """What became of the updates of a round.

    Attributes:
        number: of the round, from 1.
        contributors: of each partition, how many updates its step is the mean of; 0 where it took none.
        judges: how many updates the step of ψ is the mean of.
        refused: why, for each sender whose update was refused: by Flower's number of the node, or the client's own.
        failed: why, for each who was asked and gave none.
        doubled: of each client that several senders say they are, how many; each counts, though it may be a mistake.
        norms: of each contributor the Euclidean norm of its change of the weights, which max_norm is a bound for.
        lml: L_ML of the contributors' examples through the subnetworks that have not seen them, in nats (Eq. 2): minus
            the sum of their losses, as they say; None if there are none.
        examples: how many that is of.
        losses: of each partition that learned, the mean training loss of its contributors.
    """

    number: int
    contributors: Mapping[int, int]
    judges: int = 0
    refused: Mapping[int, str] = field(default_factory=dict)
    failed: Mapping[int, str] = field(default_factory=dict)
    doubled: Mapping[int, int] = field(default_factory=dict)
    norms: Mapping[int, float] = field(default_factory=dict)
    lml: float | None = None
    examples: int = 0
    losses: Mapping[int, float] = field(default_factory=dict)


def shown(reason: str) -> str:
    """A reason as it is kept and logged: of one line, with no control characters, and not too long.

    Of a long one the end is kept too, where a traceback has its cause.

    Example:
        >>> shown("disk full\\nINFO: all is well \\x1b[2J")
        'disk full INFO: all is well [2J'
    """
    if len(reason) > 4 * LONGEST:
        reason = f"{reason[: 2 * LONGEST]} {reason[-2 * LONGEST :]}"
    text = " ".join(reason.split())
    text = "".join(letter for letter in text if letter.isprintable())
    half = LONGEST // 2
    return text if len(text) <= LONGEST else f"{text[:half]} ... {text[-half:]}"
