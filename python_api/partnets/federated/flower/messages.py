"""Conversion of vectors and updates to Flower's records and back, with all checks that untrusted records need."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from partnets.federated.round import Update
from partnets.federated.vectors import Vectors, kind

# The names of a message's records.
ARRAYS, METRICS, CONFIG = "arrays", "metrics", "config"
# The prefix of the names of ψ's gradient, which is sent with the weights.
GRADIENT = "gradient."
# Arrays are sent as their bytes, so that nothing has to be parsed, and bfloat16, which NumPy lacks, is sent too.
BYTES = f"{sys.byteorder}-endian bytes"


def to_record(values: Mapping[str, Tensor]) -> ArrayRecord:
    """Convert named vectors to a record.

    Example:
        >>> array = to_record({"w1.bfloat16": torch.ones(3, dtype=torch.bfloat16)})["w1.bfloat16"]
        >>> array.dtype, array.shape, len(array.data)
        ('bfloat16', (3,), 6)
    """
    return ArrayRecord({name: _to_array(vector) for name, vector in values.items()})


def read_values(record: ArrayRecord, vectors: Vectors, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Convert a record of the vectors with these names, or of all vectors of a model, and of nothing else.

    Raises:
        ValueError: the record has other names, or an array is not a vector of the right dtype and length.
    """
    names = list(vectors.lengths if names is None else names)
    if record.keys() != {*names}:
        raise ValueError(f"it has the vectors {sorted(record.keys())}, but must have {names}.")
    return {name: _to_vector(record[name], name.removeprefix(GRADIENT), vectors) for name in names}


def to_reply(update: Update) -> RecordDict:
    """Convert an update to the content of a reply."""
    metrics = {"client": update.client, "chunk": update.chunk, "round": update.round, "num-examples": update.examples}
    if update.hyper_loss is not None:
        metrics["hyper-loss"] = update.hyper_loss
    metrics |= {f"loss-{k}": loss for k, loss in update.losses.items()}
    gradients = {GRADIENT + name: vector for name, vector in update.gradients.items()}
    return RecordDict(
        {
            ARRAYS: to_record({**update.values, **gradients}),
            METRICS: MetricRecord(metrics),
            CONFIG: ConfigRecord({"fingerprint": update.fingerprint}),
        }
    )


def read_update(content: RecordDict, vectors: Vectors) -> Update:
    """Convert the content of a reply to an update, which Server.step checks further.

    Raises:
        Exception: the content is malformed.
    """
    arrays, metrics, config = content[ARRAYS], content[METRICS], content[CONFIG]
    if len(content) != 3:
        raise ValueError(f"it has the records {sorted(content)}.")
    chunk = metrics["chunk"]
    if type(chunk) is not int or not 1 <= chunk <= vectors.num_partitions:
        raise ValueError(f"it has chunk {chunk!r}, but there are {vectors.num_partitions} chunks.")
    weights, gradients = vectors.sent_by(chunk)
    found = read_values(arrays, vectors, [*weights, *(GRADIENT + name for name in gradients)])
    return Update(
        client=metrics["client"],
        chunk=chunk,
        round=metrics["round"],
        examples=metrics["num-examples"],
        fingerprint=config["fingerprint"],
        values={name: found[name] for name in weights},
        gradients={name: found[GRADIENT + name] for name in gradients},
        hyper_loss=metrics.get("hyper-loss"),
        losses={int(name.removeprefix("loss-")): metrics[name] for name in metrics if name.startswith("loss-")},
    )


def _to_array(vector: Tensor) -> Array:
    data = vector.contiguous().view(torch.uint8).numpy().tobytes()
    return Array(kind(vector.dtype), tuple(vector.shape), BYTES, data)


def _to_vector(array: Array, name: str, vectors: Vectors) -> Tensor:
    dtype, length = vectors.dtypes[name], vectors.lengths[name]
    declared, expected = (array.dtype, tuple(array.shape), array.stype), (kind(dtype), (length,), BYTES)
    if declared != expected:
        raise ValueError(f"{name} is declared as {declared}, but must be {expected}.")
    if len(array.data) != length * dtype.itemsize:
        raise ValueError(f"{name} has {len(array.data)} bytes, but must have {length * dtype.itemsize}.")
    return torch.frombuffer(bytearray(array.data), dtype=dtype) if length else torch.empty(0, dtype=dtype, device="cpu")
