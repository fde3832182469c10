"""Update: what a client sends to the server after a round, and what makes a server refuse one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from partnets.federated.vectors import Vectors


@dataclass(frozen=True)
class Update:
    """What one client has learned in one round from what the server sent.

    Attributes:
        client: its number, from 0.
        chunk: k, that its examples belong to.
        round: of the server, from 1.
        examples: how many it has.
        fingerprint: of its Vectors.
        values: the vectors of w_k..w_C after its steps.
        gradients: those of the gradient of its mean loss through subnetwork k-1 by ψ; empty if k is 1.
        hyper_loss: the sum of that loss over all examples, in nats: of each token where these are what has a class;
            None if k is 1, or where privacy has it untold.
        losses: of each partition k..C the mean training loss of its steps; likewise.
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


def names_of(vectors: Vectors, chunk: int) -> tuple[list[str], list[str]]:
    """The names of the vectors of weights, and of those of ψ's gradient, that a client with this chunk sends.

    No subnetwork has not seen the first chunk, so that it has no gradient of ψ to send; with one partition in all, ψ is
    learned by other rules, from everybody.

    Example:
        >>> import partnets
        >>> from torch import nn
        >>> from partnets import hyper
        >>> model = nn.Sequential(mask := hyper.InputMask(4), nn.Linear(4, 3))
        >>> vectors = Vectors(partnets.partition(model, (0.5, 0.5)), mask)
        >>> names_of(vectors, 1), names_of(vectors, 2)
        ((['w1.float32', 'w2.float32'], []), (['w2.float32'], ['hyper.float32']))
    """
    return vectors.from_partition(chunk), vectors.of_hyper() if chunk > 1 or vectors.count == 1 else []


def norm(vectors: Mapping[str, Tensor]) -> float:
    """The Euclidean norm of all of these vectors together.

    Example:
        >>> import torch
        >>> norm({"w1.float32": torch.tensor([3.0]), "w2.float32": torch.tensor([4.0])})
        5.0
    """
    return math.sqrt(sum(float(vector.double().square().sum()) for vector in vectors.values()))
