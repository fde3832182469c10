"""cases: small calls of every operator, each held against the reference on the CPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
from torch import Tensor

import partkernels as pk
from partbench.peers.layer import CPU, Layer, Partitioning, Tensors
from partbench.peers.operators import WORKS, ours, under_plan
from partkernels.testing import Yardstick, poisoned_memory

BFLOAT16, FLOAT16, FLOAT32, FLOAT64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
# These copy entries and draw defaults, so their results are bitwise equal on all backends.
EXACT = ("subnetwork_weight", "subnetwork_weight_grad", "embedding", "entries")


@dataclass(frozen=True)
class Case:
    """A call of an operator.

    Attributes:
        work: one of operators.WORKS or of EXACT; an optimiser's step, "sgd" or "adam", or one for 20 such weights in a
            call, "sgd of 20" or "adam of 20"; or "nested": forward and both gradients with nested partitions, which the
            reference computes with an explicit map.
        layer: the operands' shapes; work without x uses only its weight.
        defaults: the default values of inactive weights.
        num_partitions: C, the number of partitions.
        gradient: "expanded", with strides of 0 as a sum's gradient has; or "dense".
    """

    work: str
    layer: Layer
    defaults: str = "uniform"
    num_partitions: int = 3
    gradient: str = "dense"

    def __str__(self) -> str:
        has_x = self.work in (*WORKS, "nested")
        name = f"{self.layer.operator} {self.work}" if has_x else self.work
        shape = self.layer.shape if has_x else "×".join(map(str, self.layer.weight))
        parts = [
            f"{name} {shape}",
            str(self.layer.dtype).removeprefix("torch."),
            self.defaults,
            f"C = {self.num_partitions}",
        ]
        return ", ".join(parts if self.gradient == "dense" else [*parts, "stride 0"])

    def error(self, backend: str, device: torch.device) -> float:
        """Return the largest error of a backend; "triton fused" forces that plan.

        Raises:
            AssertionError: the result is wrong.
        """
        backend, _, plan = backend.partition(" ")
        with under_plan(plan), poisoned_memory():
            got = self._result(backend, device, self.layer.dtype).to(CPU)
        yardstick = Yardstick(lambda dtype: self._result("reference", CPU, dtype), self.layer.dtype)
        yardstick.check(got)
        if self.work in EXACT:
            expected = self._result("reference", CPU, self.layer.dtype)
            assert torch.equal(got, expected), f"{(got != expected).sum()} entries differ from the reference"
        return (got.double() - yardstick.truth).abs().max().item()

    def _result(self, backend: str, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Compute the result in a dtype, from operands rounded to the layer's dtype, the same ones each time."""
        partitioning = Partitioning((1 / self.num_partitions,) * self.num_partitions, self.defaults)
        made = Tensors(replace(self.layer, device=CPU), partitioning, seed=0)
        x, grad, weight = (tensor.to(device, dtype) for tensor in (made.x, made.grad, made.weight))
        if self.gradient == "expanded":
            grad = grad[:1].expand_as(grad)
        partition = made.partition.to(device, dtype)
        with pk.use_backend(backend):
            if self.work == "nested":
                return self._nested(x, grad, weight, backend)
            if self.work in WORKS:
                tensors = SimpleNamespace(layer=self.layer, x=x, grad=grad, weight=weight, partition=partition)
                return ours(tensors, self.work, self.num_partitions - 1, backend)()
            return self._of_weight(x, weight, partition)

    def _nested(self, x: Tensor, grad: Tensor, weight: Tensor, backend: str) -> Tensor:
        """Return the output and both gradients, flattened and concatenated."""
        ends = (
            [size * k // self.num_partitions for k in range(1, self.num_partitions + 1)] for size in weight.shape[:2]
        )
        nested = pk.Partition.nested(weight.shape, *ends)
        partition = nested.explicit(weight.device) if backend == "reference" else nested
        leaves, active = [x.clone().requires_grad_(), weight.clone().requires_grad_()], self.num_partitions - 1
        if self.layer.operator == "linear":
            y = pk.linear(*leaves, partition, active, update=active)
        else:
            y = pk.conv2d(*leaves, partition, active, update=active, padding=self.layer.padding)
        return torch.cat([one.flatten() for one in (y, *torch.autograd.grad(y, leaves, grad))])

    def _of_weight(self, x: Tensor, weight: Tensor, partition: pk.Partition) -> Tensor:
        active = self.num_partitions - 1
        if self.work == "embedding":
            ids = torch.arange(x.shape[0], device=x.device) * 7 % weight.shape[0]
            return pk.embedding(ids, weight, partition, active)
        if self.work == "subnetwork_weight":
            return pk.subnetwork_weight(weight, partition, active)
        if self.work == "subnetwork_weight_grad":
            leaf = weight.clone().requires_grad_()
            return torch.autograd.grad(pk.subnetwork_weight(leaf, partition, active, update=active), leaf, weight)[0]
        if self.work == "entries":  # gather, then scatter into other values
            among = weight.flip(0)
            pk.scatter_entries(among, partition, active, pk.gather_entries(weight, partition, active))
            return among
        # The results are weights and moments, concatenated.
        optimizer, _, several = self.work.partition(" of ")
        grads = [weight.roll(i, 0) for i in range(int(several or 1))]
        parameters, firsts = [grad.clone() for grad in grads], [grad.flip(0) for grad in grads]
        seconds, partitions = [grad.square() + 0.1 for grad in grads], [partition] * len(grads)
        if optimizer == "sgd":
            pk.sgd_steps(parameters, grads, firsts, partitions, active, lr=0.1, momentum=0.9, weight_decay=0.1)
        else:
            pk.adam_steps(parameters, grads, firsts, seconds, partitions, active, steps=[3] * len(grads), lr=0.1)
        return torch.cat([*parameters, *firsts, *seconds])


def _linear(rows: int, outputs: int, inputs: int, dtype: torch.dtype = BFLOAT16) -> Layer:
    return Layer((rows, inputs), (outputs, inputs), dtype=dtype)


ALIGNED = _linear(300, 520, 704)  # several tiles in each dimension, none of them full
ODD = _linear(37, 61, 53)  # rows that are not aligned to 16 bytes
ONE_ROW, ONE_OUTPUT = _linear(1, 256, 512), _linear(64, 1, 256)
CONVOLUTION = Layer((2, 64, 9, 9), (64, 64, 3, 3), padding=1, dtype=BFLOAT16)
CASES = (
    *(Case("forward", ALIGNED, kind) for kind in ("zeros", "uniform", "normal", "stored")),
    *(Case("forward", _linear(130, 256, 320), num_partitions=num_partitions) for num_partitions in (2, 16, 40)),
    *(Case("forward", layer) for layer in (ONE_ROW, _linear(16, 520, 1032), ONE_OUTPUT, ODD)),
    *(Case("forward", _linear(128, 256, 256, dtype), "normal") for dtype in (FLOAT16, FLOAT32, FLOAT64)),
    *(Case("grad_input", layer) for layer in (ALIGNED, ONE_ROW, ODD, _linear(128, 256, 256, FLOAT16))),
    Case("grad_input", ALIGNED, gradient="expanded"),
    *(Case("grad_weight", layer) for layer in (ALIGNED, ONE_OUTPUT, ODD, _linear(128, 256, 256, FLOAT32))),
    Case("grad_weight", ALIGNED, gradient="expanded"),
    *(Case(work, CONVOLUTION) for work in WORKS),
    *(Case("nested", layer, "zeros") for layer in (ALIGNED, CONVOLUTION)),
    *(Case(work, ALIGNED, "normal") for work in EXACT),
    Case("entries", CONVOLUTION),
    *(Case(work, _linear(1, 300, 257, dtype)) for work in ("sgd", "adam") for dtype in (BFLOAT16, FLOAT32)),
    *(Case(f"{work} of 20", _linear(1, 70, 57)) for work in ("sgd", "adam")),
)
