"""Evaluation: a node's report on the global model on its examples, and the means of several reports."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

from flwr.app import RecordDict

from partnets.federated.server import GREATEST_LOSS


class Evaluation(NamedTuple):
    """A node's evaluation of the global model.

    Attributes:
        examples: the number of the node's examples.
        targets: the number of examples, or tokens, in the means.
        loss: the mean loss in nats.
        accuracy: the mean accuracy; None for a regression.
    """

    examples: int
    targets: int
    loss: float
    accuracy: float | None

    @classmethod
    def of(cls, content: RecordDict) -> Evaluation:
        """Parse a reply.

        Raises:
            Exception: the reply is malformed.

        Example:
            >>> from flwr.app import MetricRecord
            >>> told = {"num-examples": 3, "num-targets": 6, "loss": 0.5, "accuracy": 2.0}
            >>> Evaluation.of(RecordDict({"metrics": MetricRecord(told)}))
            Traceback (most recent call last):
            ValueError: it reports {'num-examples': 3, 'num-targets': 6, 'loss': 0.5, 'accuracy': 2.0}.
        """
        (metrics,) = content.metric_records.values()
        found = cls(metrics["num-examples"], metrics["num-targets"], metrics["loss"], metrics.get("accuracy"))
        counts = all(type(number) is int and 0 < number < 1 << 53 for number in (found.examples, found.targets))
        share = found.accuracy is None or 0 <= found.accuracy <= 1
        if not (counts and type(found.loss) is float and abs(found.loss) < GREATEST_LOSS and share):
            raise ValueError(f"it reports {dict(metrics)}.")
        return found

    @staticmethod
    def together(several: Collection[Evaluation], uniform: bool = False) -> dict[str, int | float]:
        """Compute metrics: the means over all targets, or over nodes if uniform; accuracy if all nodes report one.

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
