"""Several subnetworks in one call of a model, one for each example (Appendix C)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from partnets.hyper.penalty import penalties, weighed_penalties
from partnets.subnetworks.computed import computed_parameters
from partnets.subnetworks.switch import Switch
from partnets.utils.modules import frozen, is_sharded, overlapping

# Parts of an output that may be the same for all examples.
_PLAIN = (int, float, str, type(None))


class Group(NamedTuple):
    """The examples of one subnetwork and of one partition that learns: their indices, in order."""

    active: int
    update: int | None
    rows: list[int]


def grouped(active: Tensor | int, update: Tensor | int | None, num_partitions: int) -> list[Group]:
    """Return groups of examples with the same active subnetwork and the same learning partition.

    Args:
        active, update: those of partnets.subnetwork; one of them is a tensor.
        num_partitions: C.

    Raises:
        ValueError: a tensor does not contain whole numbers, one for each example, or a number is out of range.

    Example:
        >>> grouped(torch.tensor([2, 1, 2]), torch.tensor([2, 0, 2]), num_partitions=2)
        [Group(active=1, update=None, rows=[1]), Group(active=2, update=2, rows=[0, 2])]
    """
    given = _numbers("active", active), _numbers("update", update)
    lengths = {len(numbers) for numbers in given if isinstance(numbers, list)}
    if len(lengths) > 1:
        raise ValueError(
            f"active is of {len(given[0])} examples and update of {len(given[1])}; pass a number of each for each."
        )
    (examples,) = lengths
    actives, updates = (numbers if isinstance(numbers, list) else [numbers] * examples for numbers in given)
    for row, (k, learning) in enumerate(zip(actives, updates, strict=True)):
        if not 1 <= k <= num_partitions:
            raise ValueError(
                f"active of example {row} is {k}; pass 1..{num_partitions}, of the {num_partitions} partitions."
            )
        if not 0 <= learning <= k:
            raise ValueError(f"update of example {row} is {learning}; pass 1..{k}, up to its active, or 0 for none.")
    if not examples:
        return [Group(num_partitions, None, [])]
    pairs = list(zip(actives, updates, strict=True))
    order = sorted(range(examples), key=pairs.__getitem__)
    return [Group(k, learning or None, list(rows)) for (k, learning), rows in groupby(order, key=pairs.__getitem__)]


def _numbers(name: str, given: Tensor | int | None) -> list[int] | int:
    if given is None and name == "update":
        return 0
    if not isinstance(given, Tensor):
        if isinstance(given, bool) or not isinstance(given, int):
            raise ValueError(f"{name} is {given!r}; pass a number, or a tensor of one for each example.")
        return given
    if given.dim() != 1 or given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
        raise ValueError(
            f"{name} has the shape {tuple(given.shape)} and {given.dtype}; pass a tensor [N] of whole numbers, one for"
            " each example."
        )
    return given.tolist()


@contextmanager
def grouping(model: nn.Module, groups: list[Group], switch: Switch, withheld: Iterable[nn.Parameter]) -> Iterator[None]:
    """Let model(...) compute the groups in turn, each in its subnetwork, in the context.

    For DistributedDataParallel, the module inside computes the groups: ranks may have different groups, and gradients
    are sent once.

    Args:
        withheld: parameters that get no gradient from examples from which a partition learns.
    """
    if switch.wholes or any(is_sharded(one.parameter) for one in switch.exchanged):
        raise ValueError(
            f"the model is {'an Ensemble' if switch.wholes else 'sharded'}, and computes one subnetwork at a time;"
            " enter one, with numbers instead of tensors."
        )
    while isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    own, forward = vars(model).get("forward"), model.forward
    inside, entry = [False], switch.states[0].entry

    @torch.compiler.disable
    def compute(*inputs, **options) -> Any:
        if switch.states[0].entry is not entry:  # another context is the innermost one, or none
            return forward(*inputs, **options)
        inside[0] = True
        try:
            return _computed(forward, groups, switch, withheld, inputs, options)
        finally:
            inside[0] = False

    def refuse(module: nn.Module, args: tuple[Any, ...]) -> None:
        if not inside[0] and module is not model and switch.states[0].entry is entry:
            raise RuntimeError(
                f"a {type(module).__name__} is in several subnetworks here, and its examples are unknown: call the"
                " model that partnets.subnetwork was given, or enter one subnetwork, with numbers instead of tensors."
            )

    hooks = [module.register_forward_pre_hook(refuse) for module in switch.modules]
    vars(model)["forward"] = compute
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        if vars(model).get("forward") is compute:  # otherwise it was wrapped meanwhile
            del vars(model)["forward"]
            vars(model).update({} if own is None else {"forward": own})


def _computed(
    forward: Callable[..., Any],
    groups: list[Group],
    switch: Switch,
    withheld: Iterable[nn.Parameter],
    inputs: tuple[Any, ...],
    options: dict[str, Any],
) -> Any:
    """Return the output of a model's forward for all examples, computed group by group."""
    count, outputs = sum(len(group.rows) for group in groups), []
    if not any(_has_rows(leaf, count) for leaf in tree_flatten((inputs, options))[0]):
        raise ValueError(
            f"no input has {count} rows, and active and update are of as many examples; give the model tensors whose"
            " first dimension is that of the examples."
        )
    if len(groups) > 1:
        _check_divides((inputs, options), count)
    for group in groups:
        # The loss is a mean over all examples, so a group's penalty counts by its share of them.
        counting = weighed_penalties(len(group.rows) / count) if group.update else penalties()
        parameters = computed_parameters(switch, group.active, group.update)
        with parameters, frozen(withheld if group.update else ()), counting:
            given, named = tree_map(_taking(group.rows, count), (inputs, options))
            outputs.append(forward(*given, **named))
    return _joined(outputs, groups) if len(outputs) > 1 else outputs[0]


def _check_divides(given: Any, count: int) -> None:
    """Raise ValueError for an input that has a value for each example, but is not a tensor."""
    if isinstance(given, PackedSequence):
        raise ValueError(
            "an input is a PackedSequence, whose rows are words of all examples; with a subnetwork for each example"
            " give padded sequences and their lengths, and let the model pack them."
        )
    is_array = not isinstance(given, Tensor) and hasattr(given, "__array__") and bool(getattr(given, "shape", ()))
    is_plain = isinstance(given, tuple) and all(isinstance(part, int | float | str) for part in given)
    if (isinstance(given, list) or is_plain or is_array) and len(given) == count:
        raise ValueError(
            f"an input is a {type(given).__name__} of {count}, as many as there are examples, and is not divided among"
            " them: make it one tensor, or let the model keep it if it belongs to all examples."
        )
    parts = given.values() if isinstance(given, Mapping) else given if isinstance(given, list | tuple) else ()
    for part in parts:
        _check_divides(part, count)


def _has_rows(leaf: Any, count: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == count


def _taking(rows: list[int], count: int) -> Callable[[Any], Any]:
    """Return a function that takes these rows of a tensor with a row for each example; a view if adjacent."""
    follow = rows == list(range(rows[0], rows[0] + len(rows))) if rows else True

    def take(leaf: Any) -> Any:
        if len(rows) == count or not _has_rows(leaf, count):
            return leaf
        return leaf.narrow(0, rows[0], len(rows)) if follow else leaf[torch.tensor(rows, device=leaf.device)]

    return take


def _joined(outputs: list[Any], groups: list[Group]) -> Any:
    """Join the outputs of all groups, in the order of the examples."""
    leaves, structures = zip(*map(tree_flatten, outputs), strict=True)
    if any(structure != structures[0] for structure in structures):
        raise ValueError("the model's output has other parts in other subnetworks; compute them apart.")
    order = [row for group in groups for row in group.rows]
    back = None if order == sorted(order) else torch.tensor(order, device="cpu").argsort()

    def join(*parts: Any) -> Any:
        if overlapping({str(i): part for i, part in enumerate(parts) if isinstance(part, Tensor)}):
            raise ValueError(
                f"the model's output has a part of shape {tuple(parts[0].shape)} that is one tensor of all groups of"
                " examples, as a buffer is; let it give tensors whose first dimension is that of the examples alone."
            )
        if all(_has_rows(part, len(group.rows)) for part, group in zip(parts, groups, strict=True)):
            if len({part.shape[1:] for part in parts}) > 1:
                shapes = ", ".join(str(tuple(part.shape)) for part in parts)
                raise ValueError(
                    f"the model's output has a part of shapes {shapes} for the groups of examples, which do not fit"
                    " each other; compute apart what is similarities between examples, or padded as each needs."
                )
            joined = torch.cat(parts)
            return joined if back is None else joined[back.to(joined.device)]
        if all(isinstance(part, _PLAIN) and part == parts[0] for part in parts):
            return parts[0]
        part, examples = parts[0], len(groups[0].rows)
        what = f"shape {tuple(part.shape)}" if isinstance(part, Tensor) else f"type {type(part).__name__}"
        raise ValueError(
            f"the model's output has a part of {what} for {examples} examples, which can't be put together with those"
            " of other subnetworks; let it give tensors whose first dimension is that of the examples, and no loss or"
            " cache."
        )

    return tree_unflatten(list(map(join, *leaves)), structures[0])
