"""Checks of the arguments that all operators share; what only one takes, it checks beside its registration."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from partkernels.arguments import InputError, meets_itself
from partkernels.operators.memory import share_memory
from partkernels.partition import NestedPartition, Partition


def check_weight(weight: Tensor, partition: Partition, with_defaults: bool = True) -> None:
    """Raises unless the partition was made for a weight like this one; its defaults too, where they are used."""
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
    """Raises ValueError if a weight that learns shares memory with its stored defaults.

    What a later partition learns would be what earlier subnetworks have in its place.
    """
    if torch.compiler.is_compiling() or isinstance(weight, FakeTensor) or isinstance(stored, FakeTensor):
        return
    try:
        are_together = share_memory(weight, stored)
    except (NotImplementedError, RuntimeError):  # some that wrap others have no memory of their own
        return
    if are_together:
        raise ValueError(
            "the weight and its stored defaults share memory, so that these would learn; pass Stored(weight.clone())."
        )


def check_entries_apart(name: str, tensor: Tensor) -> None:
    """Raises ValueError unless each entry of a tensor that is to be written has memory of its own."""
    if not tensor.is_contiguous() and meets_itself(tensor.shape, tensor.stride()):
        raise ValueError(
            f"{name} has entries that share memory, as those of an expanded tensor, and cannot be written apart; pass"
            f" {name}.clone(memory_format=torch.contiguous_format), and keep it."
        )


def check_narrow(narrow: bool, partition: Partition) -> None:
    """Raises ValueError unless what is live of a layer lies side by side, where that alone is asked for."""
    if narrow and not isinstance(partition, NestedPartition):
        raise ValueError("narrow=True with partitions that are not nested; make them by Partition.nested.")


def check_inputs(x: Tensor, bias: Tensor | None, weight: Tensor) -> None:
    """Raises InputError unless both have the weight's device and dtype; under autocast, any dtype will do."""
    device, dtype = weight.device, weight.dtype
    for tensor in (x, bias):
        if tensor is None or (getattr(tensor, "device", None) == device and tensor.dtype is dtype):
            continue
        name = "x" if tensor is x else "bias"
        if type(tensor).__module__ == "numpy":
            raise TypeError(f"{name} is a {type(tensor).__name__} of numpy; pass torch.from_numpy({name}).")
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}; pass a tensor.")
        if tensor.device != device:
            raise InputError(f"{name} is on {tensor.device} and the weight on {device}; move one of them.")
        if not torch.is_autocast_enabled(device.type):
            raise InputError(f"{name} is {tensor.dtype} and the weight {dtype}; cast one of them.")


def check_bias(shape: Sequence[int] | None, count: int, out: int) -> None:
    """Raises InputError unless a bias has an entry for each of so many outputs, or a row of them for each partition.

    None is the shape of none.
    """
    if shape is not None and shape != (count, out) and shape != (out,):
        raise InputError(
            f"bias has shape {tuple(shape)}; this weight takes [{out}], or [{count}, {out}] with a row for each"
            " partition."
        )
