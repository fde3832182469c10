"""Snapshot: a model's state of any type is compared, spoiled and restored."""

import random
from argparse import Namespace
from collections import deque
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from partnets.evaluation.snapshot import Snapshot, same

DENSE = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
KINDS = {
    "COO": lambda: DENSE.to_sparse(),
    "CSR": lambda: DENSE.to_sparse_csr(),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged),
    "quantised": lambda: torch.quantize_per_tensor(DENSE, 0.1, 0, torch.qint8),
    "complex": lambda: DENSE.to(torch.complex64),
    "float8": lambda: DENSE.to(torch.float8_e4m3fn),
    "uint16": lambda: DENSE.to(torch.uint16),
}


@pytest.mark.filterwarnings("ignore:(Sparse|torch.quantize)")
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_kind_of_tensor_is_restored_beside_others(kind):
    model = nn.BatchNorm1d(2)
    model.register_buffer("kind", kind())
    before = Snapshot(model)
    model(torch.randn(3, 2))
    assert before.changed(Snapshot(model)) == ["running_mean", "running_var", "num_batches_tracked"]
    before.put_back()
    assert before.changed(Snapshot(model)) == [] and not model.running_mean.any()


def test_different_tensors_compare_unequal():
    one, other = DENSE.to_sparse(), (2 * DENSE).to_sparse()
    assert same(one, one.clone()) and not same(one, other) and not same(one, DENSE)
    assert same(torch.nan, torch.nan) and not same(DENSE, DENSE.double())


class Everywhere(nn.Module):
    """A module with state in every place that a snapshot searches."""

    calls, mean = 0, 0.5

    def __init__(self):
        super().__init__()
        count, self.layer = 0.5, nn.Linear(2, 2)

        def hook(*_):
            nonlocal count
            count += 1

        self.own, self.given = SimpleNamespace(mean=0.5), Namespace(mean=0.5)
        self.generator, self.python = torch.Generator(), random.Random(0)
        self.list, self.deque, self.set, self.array = [1.0, {"a": 2}], deque([3]), {4}, np.zeros(2)
        self.register_forward_hook(hook)
        self.layer.register_forward_hook(partial(lambda log, *_: log.append(1), self.list))
        self.layer.weight.most = 0.5
        self.layer.weight.register_hook(lambda grad, seen=self.deque: seen.append(grad.sum().item()))

    def forward(self, x):
        type(self).calls += 1
        self.own.mean = self.given.mean = self.layer.weight.most = x.mean().item()
        self.own.new, self.array[0] = "text", 1.0
        self.set.add(5)
        self.list[1]["a"] += 1
        return self.layer(x) * self.python.random() * torch.rand((), generator=self.generator)


def test_all_state_of_a_module_is_compared_and_restored():
    model = Everywhere()
    (hook,) = model._forward_hooks
    before = Snapshot(model)
    model(torch.ones(3, 2)).sum().backward()
    changed = {"own.mean", "own.new", "generator", "python", "list.1.a", "list.2", "deque.1", "set", "array"}
    changed |= {f"_forward_hooks.{hook}.count", "Everywhere.calls", "given.mean", "layer.weight.attributes.most"}
    assert set(before.changed(Snapshot(model))) == changed
    before.put_back()
    assert before.changed(Snapshot(model)) == [] and model.layer.weight.grad is None and Everywhere.calls == 0


@dataclass(frozen=True, slots=True)
class Config:
    width: float = 0.5


class OfClass:
    """A descriptor that computes an attribute of a class."""

    def __get__(self, _, cls):
        return 2 * cls.calls


class Unusual(nn.Module):
    """A module with attributes that cannot be set, are computed, or have no equivalent in torch."""

    calls = 0
    twice = OfClass()

    def __init__(self):
        super().__init__()
        self.config, self.reversed, self.swapped = Config(), np.zeros(2)[::-1], np.zeros(2, ">f4")

    def forward(self, x):
        type(self).calls += 1
        self.reversed[0] = self.swapped[0] = 1.0
        return x


def test_state_that_cannot_be_set_or_converted_is_restored():
    model = Unusual()
    before = Snapshot(model)
    model(torch.ones(1))
    assert set(before.changed(Snapshot(model))) == {"Unusual.calls", "reversed", "swapped"}
    before.put_back()
    assert before.changed(Snapshot(model)) == [] and not model.reversed.any() and not model.swapped.any()


def test_a_computed_attribute_of_a_class_is_still_computed():
    model = Unusual()
    Snapshot(model).put_back()
    model(torch.ones(1))
    assert model.twice == 2 * Unusual.calls > 0


def test_tensors_and_numbers_are_spoiled_in_place_and_put_back():
    model = Everywhere()
    model.register_buffer("counts", torch.tensor([3]))
    weight, before = model.layer.weight, Snapshot(model)
    for path in before.values:
        before.spoil(path, torch.nan)
    assert model.counts.item() == 3000 and model.list[1]["a"] == 2000 and model.deque[0] == 3000
    assert all(map(np.isnan, (model.own.mean, model.given.mean, weight.most, Everywhere.mean, *model.array)))
    assert weight.isnan().all() and model.layer.weight is weight
    before.put_back()
    assert before.changed(Snapshot(model)) == []


def test_tensors_that_are_left_out_are_not_restored():
    model = nn.Linear(2, 2)
    before = Snapshot(model, without={"weight"})
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(1.0)
    before.put_back()
    assert (model.weight == 1.0).all() and (model.bias != 1.0).all() and "weight" not in before.values
