from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from partkernels.backend.reference.subnetwork_weight import subnetwork_weight


def check_ids(ids: Tensor, rows: int) -> None:
    """Raise IndexError if ids on a CPU are not in 0..rows - 1; checking a GPU's would synchronise."""
    if ids.device.type != "cpu" or ids.numel() == 0:
        return
    low, high = (int(id) for id in ids.aminmax())
    if low < 0 or high >= rows:
        raise IndexError(f"ids run from {low} to {high}, but the weight has {rows} rows; pass ids in 0..{rows - 1}.")


def empty_embedding(weight: Tensor, ids: Tensor, *_: object) -> Tensor:
    return weight.new_empty(*ids.shape, weight.shape[1])


def embedding(
    weight: Tensor, ids: Tensor, padding_idx: int, active: int, update: int | None, *partition: Any
) -> Tensor:
    """Return the rows of w_s^(k) given by ids."""
    check_ids(ids, weight.shape[0])
    return F.embedding(ids, subnetwork_weight(weight, active, *partition))
