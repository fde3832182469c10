"""Update and Round: a client's reply in a federated round, and the server's record of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

# The length, in characters, to which reasons from other processes are shortened.
LONGEST = 300


@dataclass(frozen=True)
class Update:
    """The result of one client's training in one round.

    Attributes:
        client: the client's number, from 0.
        chunk: k, the chunk of its examples.
        round: the server's round, from 1.
        examples: the number of its examples.
        fingerprint: that of its Vectors.
        values: the vectors of w_k..w_C after its steps.
        gradients: the gradient with respect to ψ of its mean loss through subnetwork k-1, as vectors; empty if k is 1.
        hyper_loss: the sum of this loss over all examples, in nats, or over all tokens if these have classes; None if k
            is 1 or with privacy.
        losses: for each partition k..C, the mean training loss of its steps; empty with privacy.
    """

    client: int
    chunk: int
    round: int
    examples: int
    fingerprint: str
    values: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor] = field(default_factory=dict)
    hyper_loss: float | None = None
    losses: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Round:
    """The record of one federated round.

    Attributes:
        number: the round's number, from 1.
        contributors: for each partition, the number of updates in the mean of its step; 0 if it took no step.
        judges: the number of updates in the mean of ψ's step.
        refused: the reason for each sender with a refused update, by Flower's node number or the client's number.
        failed: the reason for each sender that was asked and returned no update.
        norms: for each contributor, the Euclidean norm of its change of the weights, which max_norm bounds.
        lml: L_ML in nats of the contributors' examples through subnetworks that have not seen them (Eq. 2): minus the
            sum of the losses that they report; None if none is reported.
        examples: the number of examples in lml.
        losses: for each partition that learned, the mean training loss of its contributors.
    """

    number: int
    contributors: Mapping[int, int]
    judges: int = 0
    refused: Mapping[int, str] = field(default_factory=dict)
    failed: Mapping[int, str] = field(default_factory=dict)
    norms: Mapping[int, float] = field(default_factory=dict)
    lml: float | None = None
    examples: int = 0
    losses: Mapping[int, float] = field(default_factory=dict)


def shown(reason: str) -> str:
    r"""Return a reason as it is stored and logged: one line of printable characters, at most about LONGEST of them.

    Long reasons keep their beginning and their end, which states the cause in a traceback.

    Example:
        >>> shown("disk full\nINFO: all is well \x1b[2J")
        'disk full INFO: all is well [2J'
    """
    if len(reason) > 4 * LONGEST:
        reason = f"{reason[: 2 * LONGEST]} {reason[-2 * LONGEST :]}"
    text = "".join(letter for letter in " ".join(reason.split()) if letter.isprintable())
    half = LONGEST // 2
    return text if len(text) <= LONGEST else f"{text[:half]} ... {text[-half:]}"
