"""A step of w_k and a step of ψ (Appendix I.1), from which all training loops are built, including Trainer's.

Loops with their own optimiser steps use the contexts weights_learning and hyper_learning.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from partnets.data.parts import weighted_parts
from partnets.hyper import Hyperparameter, penalties
from partnets.hyper.hyperparameter import hyperparameters_among
from partnets.hyper.penalty import penalised
from partnets.optim.base import PartitionedOptimizer, check_partitioned
from partnets.subnetworks.context import selected, subnetwork
from partnets.subnetworks.gradients import have_other_hooks
from partnets.subnetworks.state import num_partitions
from partnets.subnetworks.statistics import following_norms, other_norms, other_norms_among, outdate_statistics
from partnets.subnetworks.switch import Switch, switch_of
from partnets.utils.modules import evaluating, is_sharded, modules_of


@contextmanager
def weights_learning(model: nn.Module, k: int, *, masked: bool = True) -> Iterator[None]:
    """Select subnetwork k and train only partition k in the context, for a batch of D_1:k (Eq. 3); ψ is not trained.

    Modules with running statistics that partnets.partition left out are in evaluation mode, as they would carry D_k
    into earlier subnetworks.

    Args:
        model: a partitioned model.
        k: an int from 1 to C.
        masked: whether gradients are 0 outside of partition k. Optimizers of partnets.optim do not read them there. If
            False, call zero_grad() before the next partition learns: gradients that stay would reach it.
    """
    modules = modules_of(model)
    with _weights_learning(switch_of(model, modules), modules, k, masked):
        yield


@contextmanager
def _weights_learning(switch: Switch, modules: list[nn.Module], k: int, masked: bool) -> Iterator[None]:
    with selected(switch, modules, k, k, masked=masked), evaluating(*other_norms_among(modules)):
        yield


@contextmanager
def hyper_learning(model: nn.Module, k: int) -> Iterator[None]:
    """Select subnetwork k - 1 and train only ψ in the context, for a batch of D_k, unseen by the subnetwork (Eq. 4).

    Normalisation layers in training mode normalise by the batch, as in steps of w_k, and do not update running
    statistics.

    Args:
        model: a partitioned model.
        k: an int from 2 to C.

    Raises:
        ValueError: k is out of range.
    """
    check_k(num_partitions(model), k, least=2)
    with subnetwork(model, active=k - 1, update=None), evaluating(*following_norms(model)):
        yield


def still_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules that stay in evaluation mode during training.

    These are modules with running statistics that partnets.partition left out, and modules that are in evaluation mode
    now although the model is not, such as a frozen backbone.
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
    masked: bool | None = None,
) -> Tensor:
    """Take one step of partition w_k on a batch of D_1:k (Eq. 3): zero, compute and clip gradients, then step.

    Call model.train() before; step schedulers afterwards.

    Args:
        model: a partitioned model.
        optimizer: an optimiser of partnets.optim of this model.
        k: an int from 1 to C.
        batch: the argument of `loss`, from chunks 1..k only, as Chunks.sample_upto returns it; or the data.Parts of a
            batch, over which gradients accumulate.
        loss: loss(batch), the mean negative log-likelihood per example in nats, computed by the model. The terms of
            hyper.Penalty modules in the model are added to it.
        clip: the norm to which the gradient of w_k is clipped; None does not clip.
        backward: a function that computes the gradients of the loss; its method backward() by default. If it scales the
            loss, it must unscale the gradients, such as by scaler.unscale_(optimizer), before they are clipped.
        masked: whether gradients are 0 outside of w_k, and kept after the step. If False, they are not masked, which
            saves a pass over them, and are cleared after the step. True by default with `clip` or `backward`, and if
            the optimizer has step hooks or a parameter has hooks of its gradient.

    Returns:
        The loss without penalties, detached.

    Raises:
        ValueError: k or clip is out of range; nothing has changed.
        RuntimeError: the loss gives w_k no gradient, such as that of another model; w_k has not been stepped.

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
        >>> torch.equal(changed, partnets.partitions(model)["weight"].mask(2))
        True
    """
    check_partitioned(optimizer)
    modules = modules_of(model)
    switch = switch_of(model, modules)
    check_k(switch.num_partitions, k, least=1)
    check_clip(clip)
    _check_all_known(modules, optimizer)
    optimizer.zero_grad()
    if masked is None:
        masked = clip is not None or backward is not Tensor.backward or has_hooks(optimizer)
    values = []
    with _weights_learning(switch, modules, k, masked):
        for part, weight in weighted_parts(batch):
            value, total = penalised(loss, part)
            backward(total if weight == 1 else weight * total)
            values.append(weight * value.detach())
    clip_gradient(optimizer, clip)
    optimizer.step(update=k)
    if not masked:
        optimizer.zero_grad()
    return sum(values[1:], values[0])


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer has hooks of its steps, which may read gradients and write into the whole network."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def has_hooks(optimizer: PartitionedOptimizer) -> bool:
    """Return whether an optimizer has hooks of its steps, or parameters with hooks of their gradients."""
    return has_step_hooks(optimizer) or have_other_hooks(optimizer.parameters())


def _check_all_known(modules: list[nn.Module], optimizer: PartitionedOptimizer) -> None:
    """Raise RuntimeError if the optimiser lacks a trainable weight, such as one frozen at its construction."""
    stepped = set(map(id, optimizer.parameters()))
    learning = {
        id(parameter)
        for module in modules
        for parameter in module._parameters.values()
        if parameter is not None and parameter.requires_grad
    }
    missing = learning - stepped
    if missing and (missing := missing.difference(map(id, hyperparameters_among(modules)))) and learning & stepped:
        # If the optimiser has no trainable parameter of the model, step() raises.
        names = [name for name, parameter in modules[0].named_parameters() if id(parameter) in missing]
        raise RuntimeError(
            f"{', '.join(names)} would never learn: the optimiser was constructed while it was frozen, or before it"
            " replaced another parameter. Make a new one."
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
    """Take one step of the hyperparameters ψ on chunks that the subnetworks have not seen (Eq. 4).

    Args:
        model: a partitioned model with ψ inside.
        optimizer: an optimizer of torch.optim of ψ.
        batches: {k: a batch of D_k} with k from 2 on, usually one; subnetwork k - 1 computes the loss of D_k's batch,
            or of its data.Parts.
        loss: as for step_weights.
        weights: the weight of each chunk's loss, by k; equal weights with a sum of 1 if None.
        backward: as for step_weights.

    Returns:
        The sum of the weighted losses, detached.

    Raises:
        ValueError: a k is out of range, batches is empty, or a parameter of ψ is not in the model; nothing has changed.
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
        with hyper_learning(model, k), penalties(), evaluating(*off):  # penalties regularise only w
            for part, share in weighted_parts(batch):
                value, weight = loss(part), weights[k] * share
                if weight != 1:  # usually there is one chunk
                    value = weight * value
                if value.requires_grad:  # otherwise ψ has no effect, which check_reached reports below
                    backward(value)
                values.append(value.detach())
    check_reached(model, parameters_of(optimizer))
    optimizer.step()
    outdate_statistics(model)
    return sum(values[1:], values[0])


def training_only(model: nn.Module) -> list[Hyperparameter]:
    """Return the modules that act only on training, which are turned off when unseen data evaluate ψ.

    Evaluated by a loss that it enters directly, ψ would just minimise it: less label smoothing, a weaker penalty. They
    are turned off even if they do not learn.
    """
    return [
        module
        for module in modules_of(model)
        if isinstance(module, Hyperparameter) and module.hyper_gradient != "direct"
    ]


def checked_weights(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Mapping[int, Any], weights: Mapping[int, float] | None
) -> Mapping[int, float]:
    """Return the weight of each chunk's loss; raise ValueError unless these batches allow a step of ψ."""
    if not isinstance(batches, Mapping) or not batches:
        raise ValueError(f"batches is {_kind(batches)}; pass {{k: a batch of D_k}}, with k from 2 on.")
    if isinstance(optimizer, PartitionedOptimizer):
        raise ValueError(f"optimizer is a {type(optimizer).__name__} of partitions; pass one of torch.optim, of ψ.")
    check_k(num_partitions(model), *batches, least=2)
    known = {id(parameter) for module in modules_of(model) for parameter in module._parameters.values()}
    if strange := [parameter for parameter in parameters_of(optimizer) if id(parameter) not in known]:
        raise ValueError(
            f"optimizer has {len(strange)} parameters that are not in the model; put the modules of ψ into the model,"
            " including a loss with parameters."
        )
    weights = dict.fromkeys(batches, 1 / len(batches)) if weights is None else weights
    if weights.keys() != batches.keys():
        raise ValueError(f"weights are of the chunks {[*weights]}, but batches of {[*batches]}; pass one for each.")
    return weights


def check_k(last: int, *ks: int, least: int) -> None:
    """Raise ValueError unless each k is an int from `least` to `last`, the number of partitions."""
    for k in ks:
        if type(k) is not int or not least <= k <= last:
            what = "ψ learns on chunks that a subnetwork has not seen" if least == 2 else "it has as many partitions"
            raise ValueError(f"k={_kind(k)}, of a model with C={last}; pass an int in {least}..{last}: {what}.")


def _kind(value: Any) -> str:
    """Return a short description of a wrong argument, without all of its numbers."""
    return repr(value) if isinstance(value, int | float | str | None) else f"a {type(value).__name__}"


def check_clip(clip: float | None) -> None:
    """Raise ValueError unless clip is a finite norm above 0, or None."""
    if clip is not None and not 0 < clip < math.inf:
        raise ValueError(f"clip={clip}; pass the greatest norm of a gradient, above 0, or None.")


def clip_gradient(optimizer: torch.optim.Optimizer, clip: float | None) -> None:
    """Clip the gradient of all of an optimiser's parameters to a norm; do nothing if clip is None.

    Parameters may be sharded among different ranks, or whole on each; torch computes the norm of one kind at a time.
    """
    if clip is None:
        return
    kinds: dict[Any, list[nn.Parameter]] = defaultdict(list)  # gradients outside of w_k are 0
    for parameter in parameters_of(optimizer):
        kinds[parameter.device_mesh if is_sharded(parameter) else None].append(parameter)
    if len(kinds) == 1:
        nn.utils.clip_grad_norm_(*kinds.values(), clip)
        return
    norms = [nn.utils.get_total_norm([p.grad for p in some if p.grad is not None]) for some in kinds.values()]
    norm = torch.stack([norm.full_tensor() if is_sharded(norm) else norm for norm in norms]).norm()
    for some in kinds.values():
        nn.utils.clip_grads_with_norm_(some, clip, norm)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return all parameters of an optimiser."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def check_reached(model: nn.Module, parameters: list[nn.Parameter]) -> None:
    """Raise RuntimeError, naming them, if parameters of ψ have no gradient."""
    missing = [parameter for parameter in parameters if parameter.requires_grad and parameter.grad is None]
    if not missing:
        return
    names = {parameter: name for name, parameter in model.named_parameters()}
    unreached = [names.get(parameter, "a parameter") for parameter in missing]
    idle = {parameter for module in model.modules() if not module.training for parameter in module.parameters()}
    if not idle.isdisjoint(missing):
        raise RuntimeError(
            f"the loss gives {', '.join(unreached)} no gradient, and the model or a part of it is in evaluation mode;"
            " call model.train() before the step."
        )
    raise RuntimeError(
        f"the loss gives {', '.join(unreached)} no gradient; use it in the model's forward, without detaching, or leave"
        " it out of the hyperparameters' optimiser. If it acts only on training, learn it by looking ahead:"
        " partnets.Trainer(hyper_gradient='lookahead') or partnets.step_lookahead; if it draws without a gradient, by"
        " partnets.stn."
    )
