"""The checks of stn.Trainer before its first step: each example has its own λ, and all of λ is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.utils._pytree import tree_leaves

from partnets.data.batch import mean
from partnets.evaluation.snapshot import Snapshot
from partnets.hyper import Learned, penalties
from partnets.optim.base import check_held
from partnets.stn.converting import vector_of
from partnets.stn.layer import HyperLayer
from partnets.stn.step import count_examples
from partnets.stn.vector import HyperVector
from partnets.training.trainer import Trainer
from partnets.utils.eager import eagerly
from partnets.utils.modules import evaluating, to_device
from partnets.utils.random_state import preserved

# Sizes of the trial batches; two of them, to tell the dimension of examples from others of the same size.
SIZES = 2, 3
# The number of batches within which every hyperparameter must be read, even if not every batch reads it.
TRIES = 16
# The standard deviation of V λ: large enough to be detected, small enough for deep networks.
SPREAD = 0.1
# The tolerance, in units in the last place of the greatest output.
ROUNDING = 8


def check_start(trainer: Trainer) -> None:
    """Raise ValueError if a hyperparameter is not read or examples' hyperparameters mix; change nothing."""
    vector, before = vector_of(trainer.model), Snapshot(trainer.model)
    check_held(trainer.model)
    try:
        with preserved(trainer.device), torch.no_grad(), eagerly(), vector.noting() as noted:
            batches = [_drawn(trainer, examples) for examples in SIZES]
            outputs = [_trained(trainer, vector, batch) for batch in batches]
            _check_read(trainer, vector, noted)
            if vector.own().any():
                noted.clear()
                _check_own(trainer, vector, batches[-1], _dims_of_examples(*outputs), noted)
    finally:
        before.put_back()


def _drawn(trainer: Trainer, examples: int, seed: int = 0) -> Any:
    batch = trainer.chunks.sample(1, examples, Generator().manual_seed(seed))
    return to_device(batch, trainer.device)


def _trained(trainer: Trainer, vector: HyperVector, batch: Any) -> list[Tensor]:
    """Return the outputs in a step of the weights; layers raise if their dimension of examples is another one."""
    # Penalties are computed only with gradients enabled.
    with vector.perturbed(count_examples(batch, vector.batch_dim)), torch.enable_grad(), penalties():
        output, y = trainer.forward(trainer.model, batch)
        mean(trainer.loss, output, y)
    return _tensors(output)


def _tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _check_read(trainer: Trainer, vector: HyperVector, read: set[nn.Module]) -> None:
    """Raise ValueError if training does not read a learned hyperparameter, which would then move only by chance."""
    learns = {one for module in trainer.hyper.values() for one in module.modules() if isinstance(one, Learned)}
    named = {one: name for one, name in zip(vector.learned, vector.names, strict=True) if one in learns}
    for seed in range(1, 1 + TRIES):
        if read.issuperset(named):
            return
        batch = _drawn(trainer, SIZES[-1], seed)
        _trained(trainer, vector, batch)
        with evaluating(trainer.model), vector.perturbed(count_examples(batch, vector.batch_dim)):
            mean(trainer.hyper_loss, *trainer.forward(trainer.model, batch))
    if unread := [name for one, name in named.items() if one not in read]:
        raise ValueError(
            f"in training nothing reads {', '.join(unread)}: its module is not called, is in evaluation mode, belongs"
            " to a layer that stn.convert left unchanged, or is a loss that is not passed as loss=. Correct this, or"
            " leave it out of stn.convert."
        )


def _check_own(
    trainer: Trainer, vector: HyperVector, batch: Any, dims: Sequence[int | None], noted: set[nn.Module]
) -> None:
    """Raise ValueError if an example's output depends on another example's hyperparameters."""
    model, count = trainer.model, count_examples(batch, vector.batch_dim)
    for layer in model.modules():
        for name in layer.names() if isinstance(layer, HyperLayer) else ():
            layer._parameters[f"{name}_scale"].normal_(0, SPREAD / vector.size**0.5)
    present = vector.present()
    first, other = (present + torch.randn(count, vector.size, device=present.device) for _ in range(2))
    first = torch.where(vector.own().to(present.device), first, first[:1])
    is_first = torch.arange(count, device=present.device)[:, None] == 0

    def outputs(value: Tensor) -> list[Tensor]:
        torch.manual_seed(0)
        with evaluating(model), vector.at(torch.where(vector.own().to(value.device), value, first)):
            return _tensors(trainer.forward(model, batch)[0])

    expected = outputs(first)
    for changed, same in ((~is_first, slice(0, 1)), (is_first, slice(1, None))):
        for theirs, ours, dim in zip(expected, outputs(torch.where(changed, other, first)), dims, strict=True):
            if dim is None:
                continue
            theirs, ours = (each.movedim(dim, 0)[same].double() for each in (theirs, ours))
            most = ROUNDING * torch.finfo(expected[0].dtype).eps * theirs.abs().max()
            if (theirs - ours).abs().max() > most:
                rows = [path for path, module in model.named_modules() if module in noted]
                raise ValueError(
                    "an example's output depends on the hyperparameters of other examples: the model mixes examples, or"
                    " uses only one row of a layer that expands a single row to the batch; layers that got one row:"
                    f" {', '.join(rows) or 'none'}. Name such layers in stn.convert skip=, or pass per_example=False."
                )


def _dims_of_examples(*outputs: list[Tensor]) -> list[int | None]:
    """Return the dimension of each output that has the size of the batch, or None."""
    shapes = [zip(*(tensor.shape for tensor in tensors), strict=True) for tensors in zip(*outputs, strict=True)]
    return [next((dim for dim, sizes in enumerate(each) if sizes == SIZES), None) for each in shapes]
