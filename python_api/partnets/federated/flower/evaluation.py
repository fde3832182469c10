"""Evaluation: what a node says of the global model on its own examples, and the mean of what several say."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

from flwr.app import RecordDict

from partnets.federated.server import GREATEST_LOSS


class Evaluation(NamedTuple):
    """Attributes:
    examples: how many a node has.
    targets: how many its means are of: examples, or tokens.
    loss: in nats.
    accuracy: None of a regression.
    """

    examples: int
    targets: int
    loss: float
    accuracy: float | None

    @classmethod
    def of(cls, content: RecordDict) -> Evaluation:
        """What is in a reply.

        Raises:
            Exception: it has not the form of one.

        Example:
            >>> from flwr.app import MetricRecord
            >>> told = {"num-examples": 3, "num-targets": 6, "loss": 0.5, "accuracy": 2.0}
            >>> Evaluation.of(RecordDict({"metrics": MetricRecord(told)}))
            Traceback (most recent call last):
            ValueError: it says {'num-examples': 3, 'num-targets': 6, 'loss': 0.5, 'accuracy': 2.0}.
        """
        (metrics,) = content.metric_records.values()
        found = cls(metrics["num-examples"], metrics["num-targets"], metrics["loss"], metrics.get("accuracy"))
        counts = all(type(number) is int and 0 < number < 1 << 53 for number in (found.examples, found.targets))
        share = found.accuracy is None or 0 <= found.accuracy <= 1
        if not (counts and type(found.loss) is float and abs(found.loss) < GREATEST_LOSS and share):
            raise ValueError(f"it says {dict(metrics)}.")
        return found

    @staticmethod
    def together(several: Collection[Evaluation], uniform: bool = False) -> dict[str, int | float]:
        """The means over all targets, or if uniform over nodes, as metrics; accuracy where all tell one.

        Example:
            >>> Evaluation.together([Evaluation(1, 1, 2.0, None), Evaluation(3, 3, 1.0, 0.5)])
            {'num-examples': 4, 'loss': 1.25}
        """
        if not several:
            return {}
        weights = [1 if uniform else each.targets for each in several]

        def mean(name: str) -> float:
            numbers = zip(weights, several, strict=True)
            return math.fsum(weight * getattr(each, name) for weight, each in numbers) / sum(weights)

        found = {"num-examples": sum(each.examples for each in several), "loss": mean("loss")}
        return found if any(each.accuracy is None for each in several) else found | {"accuracy": mean("accuracy")}
