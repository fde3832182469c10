"""Snapshot: a model's state of any type is compared and restored."""

from __future__ import annotations

import dataclasses
from array import array

import pytest
import torch
from torch import nn

from partnets.evaluation.snapshot import Snapshot, same

DENSE = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
KINDS = {
    "COO": lambda: DENSE.to_sparse(),
    "CSR": lambda: DENSE.to_sparse_csr(),
    "CSC": lambda: DENSE.to_sparse_csc(),
    "BSR": lambda: DENSE.to_sparse_bsr((1, 1)),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged),
    "MKLDNN": lambda: DENSE.to_mkldnn() if torch.backends.mkldnn.is_available() else DENSE,
    "quantised": lambda: torch.quantize_per_tensor(DENSE, 0.1, 0, torch.qint8),
    "complex32": lambda: DENSE.to(torch.complex32),
    "float8": lambda: DENSE.to(torch.float8_e4m3fn),
    "bits": lambda: torch.empty(4, dtype=torch.bits8),
    "uint16": lambda: DENSE.to(torch.uint16),
}


@pytest.mark.filterwarnings("ignore:(Sparse|ComplexHalf|torch.quantize)")
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_kind_of_tensor_is_restored_beside_others(kind):
    model = nn.BatchNorm1d(2)
    model.register_buffer("kind", kind())
    before = Snapshot(model)
    model(torch.randn(3, 2))
    assert before.changed(Snapshot(model)) == ["running_mean", "running_var", "num_batches_tracked"]
    before.put_back()
    assert before.changed(Snapshot(model)) == [] and not model.running_mean.any()


def test_sparse_tensors_that_differ_are_told_apart():
    one, other = DENSE.to_sparse(), (2 * DENSE).to_sparse()
    assert same(one, one.clone()) and not same(one, other) and not same(one, DENSE)


def test_what_cannot_be_put_back_keeps_nothing_else_from_it():
    model = nn.Sequential(nn.BatchNorm1d(2))
    model.frozen = torch.zeros(3)
    before = Snapshot(model)
    before._put_back.insert(0, lambda: 1 / 0)
    model(torch.randn(3, 2))
    with pytest.raises(ZeroDivisionError):
        before.put_back()
    assert not model[0].running_mean.any()


@dataclasses.dataclass(slots=True)
class Slots:
    mean: float = 0.0


class Everywhere(nn.Module):
    """A module with state in slots, in its class, in bytes and in an array."""

    calls, seen = 0, {}

    def __init__(self):
        super().__init__()
        self.slots, self.bytes, self.array = Slots(), bytearray(2), array("d", [0.0])

    def forward(self, x):
        type(self).calls += 1
        self.seen["last"] = x
        self.slots.mean, self.bytes[0], self.array[0] = x.mean(), 1, 1.0
        return x


def test_slots_and_what_classes_have_are_put_back():
    model = Everywhere()
    before = Snapshot(model)
    model(torch.ones(2))
    assert before.changed(Snapshot(model)) == [
        "slots.mean", "bytes", "array", "Everywhere.calls", "Everywhere.seen.last"
    ]  # fmt: skip
    before.put_back()
    assert not before.changed(Snapshot(model)) and Everywhere.calls == 0 and not Everywhere.seen


def test_what_has_not_changed_is_copied_once():
    model = nn.BatchNorm1d(2)
    before = Snapshot(model)
    model(torch.randn(3, 2))
    after = Snapshot(model, known=before)
    assert after.values["weight"] is before.values["weight"]
    assert before.changed(after) == ["running_mean", "running_var", "num_batches_tracked"]


def test_tensors_and_numbers_are_spoiled_in_place_and_put_back():
    model, count = nn.BatchNorm1d(2), 0.5

    def hook(*_):
        return count

    model.list, model.scale = [1.0, 2], 3.0
    model.register_forward_hook(hook)
    model.num_batches_tracked.fill_(3)
    mean, before = model.running_mean, Snapshot(model)
    for path in before.values:
        before.spoil(path, torch.nan)
    assert model.list[1] == 2000 and model.num_batches_tracked == 3000
    assert all(number != number for number in (model.list[0], model.scale, hook()))
    assert mean.isnan().all() and model.running_mean is mean
    before.put_back()
    assert before.changed(Snapshot(model)) == [] and hook() == 0.5
