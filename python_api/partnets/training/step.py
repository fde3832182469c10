"""A step of w_k and a step of ψ (Appendix I.1): what every training loop is made of, Trainer's own included.

A loop that has optimiser steps of its own takes weights_learning and hyper_learning, which say what learns meanwhile.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from partnets.hyper import Hyperparameter, hyperparameters, penalties
from partnets.hyper.penalty import penalised
from partnets.subnetworks.statistics import other_norms, outdate_statistics
from partnets.subnetworks.context import subnetwork
from partnets.subnetworks.state import num_partitions as count
from partnets.optim.base import PartitionedOptimizer, check_partitioned
from partnets.utils.modules import evaluating, is_sharded


@contextmanager
def weights_learning(model: nn.Module, k: int, *, masked: bool = True) -> Iterator[None]:
    """Inside, subnetwork k computes and partition k alone learns, from a batch of D_1:k (Eq. 3); ψ does not.

    Modules with running statistics that partnets.partition left out are in evaluation mode: they would carry D_k into
    earlier subnetworks.

    Args:
        model: partitioned.
        k: 1..C.
        masked: whether gradients are 0 outside of partition k. Optimizers of partnets.optim do not read them there.
    """
    with subnetwork(model, active=k, update=k, masked=masked), evaluating(*other_norms(model)):
        yield


@contextmanager
def hyper_learning(model: nn.Module, k: int) -> Iterator[None]:
    """Inside, subnetwork k - 1 computes and ψ alone learns, from a batch of D_k, which it has not seen (Eq. 4).

    Normalisation layers in training mode normalise by the batch, as they do where w_k learns, and leave no running
    statistics.

    Args:
        model: with partitioned layers.
        k: 2..C.

    Raises:
        ValueError: k is out of range: no subnetwork comes before the first.
    """
    check_k(model, k, least=2)
    with subnetwork(model, active=k - 1, update=None), evaluating(*other_norms(model)):
        yield


def still_modules(model: nn.Module) -> list[nn.Module]:
    """What stays in evaluation mode while a model trains.

    Modules with running statistics that partnets.partition left out, and what is in evaluation mode now while the model
    is not, as a frozen backbone.
    """
    still = other_norms(model)
    return still + [module for module in model.modules() if model.training and not module.training]


def step_weights(
    model: nn.Module,
    optimizer: PartitionedOptimizer,
    k: int,
    batch: Any,
    loss: Callable[[Any], Tensor],
    *,
    clip: float | None = None,
    backward: Callable[[Tensor], None] = Tensor.backward,
) -> Tensor:
    """One step of the partition w_k on a batch of D_1:k (Eq. 3): gradients from zero, clipped, and stepped.

    Modes are the caller's: call model.train() before. Step a scheduler afterwards.

    Args:
        model: with partitioned layers.
        optimizer: of partnets.optim, of this model.
        k: 1..C.
        batch: what `loss` takes; from chunks 1..k alone, as Chunks.sample_upto gives it.
        loss: loss(batch), the mean negative log-likelihood per example in nats, computed by the model. What
            hyper.Penalty modules in the model give is added to it.
        clip: the gradient of w_k is scaled down to this norm where it is longer; None leaves it.
        backward: computes the gradients of the loss, if not its own backward(). They are clipped and stepped as it
            leaves them: one that scales the loss has to unscale them, as by scaler.unscale_(optimizer).

    Returns:
        The loss without penalties, detached.

    Raises:
        ValueError: k or clip is out of range; nothing has changed then.
        RuntimeError: the loss gives w_k no gradient, as where it is that of another model; w_k has not been stepped.

    Example:
        >>> import partnets
        >>> model = partnets.partition(nn.Linear(4, 2), (0.8, 0.2))
        >>> optimizer = partnets.optim.SGD(model, lr=0.1)
        >>> x, y = torch.ones(3, 4), torch.tensor([0, 1, 1])
        >>> before = model.weight.detach().clone()
        >>> def loss(batch):
        ...     return nn.functional.cross_entropy(model(batch[0]), batch[1])
        >>> value = step_weights(model, optimizer, 2, (x, y), loss)
        >>> changed = model.weight != before
        >>> torch.equal(changed, model.partition.mask(2))
        True
    """
    check_partitioned(optimizer)
    check_k(model, k, least=1)
    check_clip(clip)
    _check_all_known(model, optimizer)
    optimizer.zero_grad()
    masked = clip is not None or backward is not Tensor.backward
    with weights_learning(model, k, masked=masked):
        value, total = penalised(loss, batch)
        backward(total)
    clip_gradient(optimizer, clip)
    optimizer.step(update=k)
    if not masked:
        optimizer.zero_grad()
    return value.detach()


def _check_all_known(model: nn.Module, optimizer: PartitionedOptimizer) -> None:
    """Raises RuntimeError if a weight learns that the optimiser lacks, as one that was frozen when it was made."""
    stepped = set(optimizer.parameters())
    learning = {parameter for parameter in model.parameters() if parameter.requires_grad}
    missing = learning - stepped
    if missing and (missing := missing.difference(hyperparameters(model))) and learning & stepped:
        # Of another model's parameters it has none, which step() says.
        names = [name for name, parameter in model.named_parameters() if parameter in missing]
        raise RuntimeError(
            f"{', '.join(names)} would never learn: the optimiser was made when it was frozen, or before it took"
            " another's place. Make a new one."
        )


def step_hyper(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Mapping[int, Any],
    loss: Callable[[Any], Tensor],
    *,
    weights: Mapping[int, float] | None = None,
    backward: Callable[[Tensor], None] = Tensor.backward,
) -> Tensor:
    """One step of the hyperparameters ψ on chunks that the subnetworks have not seen (Eq. 4).

    Args:
        model: with partitioned layers and ψ inside.
        optimizer: of torch.optim, of ψ.
        batches: {k: a batch of D_k}, k from 2 on: usually one; subnetwork k - 1 computes on it. `loss` takes it.
        loss: as of step_weights.
        weights: of each chunk's loss, by its number; alike, with a sum of 1, if None.
        backward: as of step_weights.

    Returns:
        The sum of the weighted losses, detached.

    Raises:
        ValueError: a k is out of range, there is no batch, or a parameter of ψ is not the model's; nothing has changed
            then.
        RuntimeError: the loss gives a parameter of the optimiser no gradient; ψ has not been stepped.

    Example:
        >>> import partnets
        >>> from partnets import hyper
        >>> model = partnets.partition(nn.Sequential(mask := hyper.InputMask(4), nn.Linear(4, 2)), (0.8, 0.2))
        >>> optimizer = torch.optim.Adam(mask.parameters(), lr=0.1)
        >>> x, y = torch.ones(3, 4), torch.tensor([0, 1, 1])
        >>> def loss(batch):
        ...     return nn.functional.cross_entropy(model(batch[0]), batch[1])
        >>> value = step_hyper(model, optimizer, {2: (x, y)}, loss)
        >>> bool((mask.logits != 0).all())
        True
    """
    weights = checked_weights(model, optimizer, batches, weights)
    optimizer.zero_grad()
    values, off = [], training_only(model)
    for k, batch in batches.items():
        with hyper_learning(model, k), penalties(), evaluating(*off):  # penalties regularise w alone
            value = weights[k] * loss(batch)
            if value.requires_grad:  # otherwise ψ reaches nothing, which is reported below
                backward(value)
        values.append(value.detach())
    check_reached(model, parameters_of(optimizer))
    optimizer.step()
    outdate_statistics(model)
    return sum(values)


def training_only(model: nn.Module) -> list[Hyperparameter]:
    """The modules of a model that act on training alone: they are off where unseen data judge, also if they are still.

    Judged by a loss that it has a part in, ψ would make that small: labels less smooth, a penalty weaker.
    """
    return [
        module for module in model.modules() if isinstance(module, Hyperparameter) and module.hyper_gradient != "direct"
    ]


def checked_weights(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Mapping[int, Any], weights: Mapping[int, float] | None
) -> Mapping[int, float]:
    """The weight of each chunk's loss; raises ValueError unless a step of ψ can be taken with these batches."""
    if not isinstance(batches, Mapping) or not batches:
        raise ValueError(f"batches is {_kind(batches)}; pass {{k: a batch of D_k}}, with k from 2 on.")
    if isinstance(optimizer, PartitionedOptimizer):
        raise ValueError(f"optimizer is a {type(optimizer).__name__} of partitions; pass one of torch.optim, of ψ.")
    check_k(model, *batches, least=2)
    known = set(model.parameters())
    if strange := [parameter for parameter in parameters_of(optimizer) if parameter not in known]:
        raise ValueError(
            f"optimizer has {len(strange)} parameters that are not in the model; put the modules of ψ into it, a loss"
            " that has something to learn as well."
        )
    weights = dict.fromkeys(batches, 1 / len(batches)) if weights is None else weights
    if weights.keys() != batches.keys():
        raise ValueError(f"weights are of the chunks {[*weights]} and batches of {[*batches]}; pass one for each.")
    return weights


def check_k(model: nn.Module, *ks: int, least: int) -> None:
    last = count(model)
    for k in ks:
        if type(k) is not int or not least <= k <= last:
            what = "ψ learns on chunks that a subnetwork has not seen" if least == 2 else "it has as many partitions"
            raise ValueError(f"k={_kind(k)}, of a model with C={last}; pass an int in {least}..{last}: {what}.")


def _kind(value: Any) -> str:
    """What a wrong argument is, without all of its numbers."""
    return repr(value) if isinstance(value, int | float | str | None) else f"a {type(value).__name__}"


def check_clip(clip: float | None) -> None:
    """Raises ValueError unless this is a norm that gradients can be clipped to, or None."""
    if clip is not None and not 0 < clip < math.inf:
        raise ValueError(f"clip={clip}; pass the greatest norm of a gradient, above 0, or None.")


def clip_gradient(optimizer: torch.optim.Optimizer, clip: float | None) -> None:
    """Scales the gradient of all that an optimiser steps down to a norm where it is longer; with None it stays.

    Some parameters may be sharded, and others whole on every rank: torch takes the norm of one kind at a time.
    """
    if clip is None:
        return
    kinds: dict[bool, list[nn.Parameter]] = defaultdict(list)  # all gradients but those of w_k are 0
    for parameter in parameters_of(optimizer):
        kinds[is_sharded(parameter)].append(parameter)
    if len(kinds) == 1:
        nn.utils.clip_grad_norm_(*kinds.values(), clip)
        return
    norms = [nn.utils.get_total_norm([p.grad for p in some if p.grad is not None]) for some in kinds.values()]
    norm = torch.stack([norm.full_tensor() if is_sharded(norm) else norm for norm in norms]).norm()
    for some in kinds.values():
        nn.utils.clip_grads_with_norm_(some, clip, norm)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """All that an optimiser steps."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def check_reached(model: nn.Module, parameters: list[nn.Parameter]) -> None:
    """Raises RuntimeError, naming them, if some of ψ's parameters have no gradient."""
    missing = [parameter for parameter in parameters if parameter.requires_grad and parameter.grad is None]
    if not missing:
        return
    names = {parameter: name for name, parameter in model.named_parameters()}
    unreached = [names.get(parameter, "a parameter") for parameter in missing]
    idle = {parameter for module in model.modules() if not module.training for parameter in module.parameters()}
    if not idle.isdisjoint(missing):
        raise RuntimeError(
            f"the loss gives {', '.join(unreached)} no gradient, and the model, or a part of it, is in evaluation mode;"
            " call model.train() before the step."
        )
    raise RuntimeError(
        f"the loss gives {', '.join(unreached)} no gradient; use it in the model's forward, without detaching, or leave"
        " it out of the hyperparameters' optimiser. What acts on training alone learns by looking ahead:"
        " partnets.Trainer(hyper_gradient='lookahead'), or partnets.step_lookahead; what draws without a gradient, by"
        " partnets.stn."
    )
