"""Update: a client's reply to the server after a round."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from partnets.federated.vectors import Vectors


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


def names_of(vectors: Vectors, chunk: int) -> tuple[list[str], list[str]]:
    """Return the names of the weight vectors and of ψ's gradient vectors that a client with this chunk sends.

    All subnetworks have seen the first chunk, so its clients send no gradient of ψ, unless the model has one partition
    and ψ is learned on the training loss.

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
    """Return the Euclidean norm of all vectors, concatenated.

    Example:
        >>> import torch
        >>> norm({"w1.float32": torch.tensor([3.0]), "w2.float32": torch.tensor([4.0])})
        5.0
    """
    return math.sqrt(sum(float(vector.double().square().sum()) for vector in vectors.values()))
