"""Argument checks shared by the operators; checks of a single operator are beside its registration."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from partkernels.arguments import InputError, meets_itself
from partkernels.operators.memory import share_memory
from partkernels.partition import NestedPartition, Partition


def check_weight(weight: Tensor, partition: Partition, with_defaults: bool = True) -> None:
    """Raise unless the weight is floating point and has the shape and the device of its partition.

    Stored defaults must not share memory with a trainable weight. If `with_defaults`, they must have its dtype.
    """
    if weight.shape != partition.shape:
        raise ValueError(
            f"the weight has shape {tuple(weight.shape)} and its partition {partition.shape}; make the partition with"
            f" Partition.random({tuple(weight.shape)}, ...)."
        )
    if not weight.is_floating_point():
        raise TypeError(f"the weight is {weight.dtype}; pass a floating-point weight.")
    if partition.device is not None and weight.device != partition.device:
        raise ValueError(
            f"the weight is on {weight.device} and its partition on {partition.device}; move it with"
            f" partition.to('{weight.device}')."
        )
    stored = partition.defaults.stored
    if stored is None:
        return
    if weight.requires_grad:
        check_apart(weight, stored)
    if with_defaults and stored.dtype != weight.dtype:
        raise TypeError(
            f"the stored defaults are {stored.dtype} and the weight is {weight.dtype}; cast them with"
            f" partition.to(dtype={weight.dtype})."
        )


def check_apart(weight: Tensor, stored: Tensor) -> None:
    """Raise ValueError if a trainable weight shares memory with its stored defaults.

    Otherwise training a later partition would change the defaults that earlier subnetworks use in its place.
    """
    if torch.compiler.is_compiling() or isinstance(weight, FakeTensor) or isinstance(stored, FakeTensor):
        return
    try:
        are_together = share_memory(weight, stored)
    except (NotImplementedError, RuntimeError):  # some wrapper tensors have no memory
        return
    if are_together:
        raise ValueError(
            "the weight and its stored defaults share memory, so training would change both; pass"
            " Stored(weight.clone())."
        )


def check_entries_apart(name: str, tensor: Tensor) -> None:
    """Raise ValueError if entries of a tensor that is to be written share memory."""
    if not tensor.is_contiguous() and meets_itself(tensor.shape, tensor.stride()):
        raise ValueError(
            f"{name} has entries that share memory, like an expanded tensor, and cannot be written in place; pass"
            f" {name}.clone(memory_format=torch.contiguous_format) and keep it."
        )


def check_narrow(narrow: bool, partition: Partition) -> None:
    """Raise ValueError if narrow outputs are requested for a partition that is not nested."""
    if narrow and not isinstance(partition, NestedPartition):
        raise ValueError("narrow=True, but the partition is not nested; make it with Partition.nested.")


def check_inputs(x: Tensor, bias: Tensor | None, weight: Tensor) -> None:
    """Raise InputError unless x and bias have the weight's device and dtype; under autocast, any dtype is accepted."""
    device, dtype = weight.device, weight.dtype
    for tensor in (x, bias):
        if tensor is None or (getattr(tensor, "device", None) == device and tensor.dtype is dtype):
            continue
        name = "x" if tensor is x else "bias"
        if type(tensor).__module__ == "numpy":
            raise TypeError(f"{name} is a numpy {type(tensor).__name__}; pass torch.from_numpy({name}).")
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}; pass a tensor.")
        if tensor.device != device:
            raise InputError(f"{name} is on {tensor.device} and the weight on {device}; move one of them.")
        if not torch.is_autocast_enabled(device.type):
            raise InputError(f"{name} is {tensor.dtype} and the weight {dtype}; cast one of them.")


def check_bias(shape: Sequence[int] | None, count: int, out: int) -> None:
    """Raise InputError unless a bias has shape [out] or, with one row per partition, [count, out].

    Pass None as shape if there is no bias.
    """
    if shape is not None and shape != (count, out) and shape != (out,):
        raise InputError(
            f"bias has shape {tuple(shape)}; this weight takes [{out}], or [{count}, {out}] with a row for each"
            " partition."
        )
