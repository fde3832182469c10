"""Inspection of losses for L_ML, which requires the mean negative log-likelihood over a batch."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Loss = Callable[[Any, Any], Tensor]
# The default ignore_index of torch's cross_entropy, with which Hugging Face's collators pad labels.
IGNORED = -100

# torch's losses that are distances or margins, by the names of functions and modules.
SQUARED = {"mse_loss", "MSELoss"}
OTHERS = {
    "l1_loss", "L1Loss", "smooth_l1_loss", "SmoothL1Loss", "huber_loss", "HuberLoss", "hinge_embedding_loss",
    "HingeEmbeddingLoss", "margin_ranking_loss", "MarginRankingLoss", "multi_margin_loss", "MultiMarginLoss",
    "triplet_margin_loss", "TripletMarginLoss", "cosine_embedding_loss", "CosineEmbeddingLoss",
}  # fmt: skip
CROSS_ENTROPIES = {"cross_entropy", "CrossEntropyLoss"}
NLL_LOSSES = {"nll_loss", "NLLLoss"}
# torch's losses of binary labels, and of binary labels and counts, with a value for each entry of the targets.
BINARY_OF_LOGITS = {"binary_cross_entropy_with_logits", "BCEWithLogitsLoss"}
BINARY = {"binary_cross_entropy", "BCELoss", *BINARY_OF_LOGITS}
OF_NUMBERS = {*BINARY, "poisson_nll_loss", "PoissonNLLLoss"}


def setting(loss: Loss, name: str, usual: Any) -> Any:
    """Return an argument of one of torch's losses, or `usual` if it was not given."""
    return loss.keywords.get(name, usual) if isinstance(loss, functools.partial) else getattr(loss, name, usual)


def check_loss(loss: Loss, stacklevel: int = 3) -> None:
    """Raise ValueError if a loss of torch is a sum over a batch; warn if it is not a log-likelihood."""
    check_mean(loss)
    name = name_of(loss)
    if name in SQUARED | OTHERS:
        cure = (
            "; put hyper.ObservationNoise() behind the model and pass loss=hyper.gaussian_nll to learn the variance too"
            if name in SQUARED
            else ""
        )
        warnings.warn(
            f"{name} is not a negative log-likelihood, so L_ML has no unit and the size of ψ's gradient is arbitrary"
            f"{cure}. To avoid this warning, pass your own loss that returns a negative log-likelihood.",
            stacklevel=stacklevel,
        )


def check_mean(loss: Loss) -> None:
    """Raise ValueError if a loss has reduction='sum', a sum over the batch."""
    if setting(loss, "reduction", "mean") == "sum":
        raise ValueError(
            f"the loss {name_of(loss)} has reduction='sum', which grows with the batch; pass the mean over the"
            " examples, or reduction='none'."
        )


def weighs(loss: Loss) -> bool:
    """Return whether this is one of torch's losses with class weights."""
    return any(setting(loss, name, None) is not None for name in ("weight", "pos_weight")) and bool(name_of(loss))


def plain(loss: Loss, weighed: bool = False) -> Loss:
    """Return the negative log-likelihood in a training loss: its attribute `plain`, or torch's loss without options.

    Label smoothing and class weights are removed from torch's losses: with class weights, each choice of weights would
    evaluate itself, and a mean would depend on the weights in its batch. `weighed` keeps fixed class weights. Other
    losses are returned unchanged.
    """
    if hasattr(loss, "plain"):  # such as hyper.LabelSmoothing
        return loss.plain
    name = name_of(loss)
    if name not in CROSS_ENTROPIES | NLL_LOSSES | BINARY:
        return loss
    usual = {"label_smoothing": 0.0} if name in CROSS_ENTROPIES else {}
    if not weighed:
        usual |= {"weight": None} | ({"pos_weight": None} if name in BINARY_OF_LOGITS else {})
    changes = setting(loss, "label_smoothing", 0.0) or (weighs(loss) and not weighed)
    if not changes:
        return loss
    if isinstance(loss, functools.partial):
        return functools.partial(loss.func, *loss.args, **(loss.keywords | usual))
    loss = copy.deepcopy(loss)
    for name, value in usual.items():
        setattr(loss, name, value)
    return loss


def ignored(loss: Loss) -> int:
    """Return the class that a loss ignores, its ignore_index, or -100."""
    return setting(loss, "ignore_index", IGNORED)


def ignores(loss: Loss) -> bool:
    """Return whether this is one of torch's losses with an ignore_index."""
    return name_of(loss) in CROSS_ENTROPIES | NLL_LOSSES


def are_whole(targets: Tensor) -> bool:
    """Return whether a tensor has an integer dtype, like labels."""
    return not (targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool)


def are_labels(output: Any, targets: Any) -> bool:
    """Return whether targets are integers and the output has one dimension more, like logits of classes."""
    tensors = isinstance(output, Tensor) and isinstance(targets, Tensor)
    return tensors and are_whole(targets) and output.dim() == targets.dim() + 1


def class_axis(output: Any, targets: Any) -> int | None:
    """Return the dimension of the classes in logits; None if output and targets are not logits and integer labels.

    It is 1 for [batch, classes, ...] with targets [batch, ...], and -1 for [batch, ..., classes].
    """
    if not are_labels(output, targets):
        return None
    if (*output.shape[:1], *output.shape[2:]) == targets.shape:
        return 1
    return -1 if output.shape[:-1] == targets.shape else None


def no_classes(output: Any, targets: Tensor) -> Tensor:
    """Return which integer targets are not a class of these logits, bool like the targets; -100 never is one."""
    axis = class_axis(output, targets)
    if axis is None or output.shape[axis] == 1:  # one output, such as a regression's
        return targets.long() == IGNORED
    return (targets < 0) | (targets >= output.shape[axis])


def counted(loss: Loss, losses: Callable[[], Tensor], output: Any, targets: Any) -> Tensor | None:
    """Return which integer targets count, bool like the targets; None if there is no loss for each target.

    For torch's losses, all targets but ignore_index count. For other losses, all count but those that are not a class
    of the logits and have a loss of 0; `losses` is called only in this case.
    """
    if not isinstance(targets, Tensor) or not are_whole(targets):
        return None
    if ignores(loss):
        return targets != ignored(loss)
    found = losses()
    return ~(no_classes(output, targets) & (found == 0)) if found.shape == targets.shape else None


def counting(loss: Loss, losses: Tensor, output: Any, targets: Any) -> Tensor:
    """Return a vector of the losses of targets that count; all losses if there is not one loss for each target."""
    which = counted(loss, lambda: losses, output, targets) if losses.dim() else None
    return losses if which is None or which.shape != losses.shape else losses[which]


def of_each(loss: Loss) -> Loss:
    """Return one of torch's losses with reduction='none'; return other losses unchanged."""
    if isinstance(loss, nn.modules.loss._Loss):
        loss = copy.copy(loss)
        loss.reduction = "none"
        return loss
    function = loss.func if isinstance(loss, functools.partial) else loss
    if getattr(function, "__module__", "") == F.__name__:
        return functools.partial(loss, reduction="none")
    return loss


def of_each_that_counts(loss: Loss, output: Any, targets: Any) -> Tensor:
    """Return the losses of the targets that count, or the mean if the loss returns only a mean."""
    return counting(loss, of_each(loss)(output, targets), output, targets)


def is_cross_entropy(loss: Loss) -> bool:
    """Return whether this is torch's cross-entropy, as a function or a module."""
    return name_of(loss) in CROSS_ENTROPIES


def is_of_numbers(loss: Loss) -> bool:
    """Return whether this is a loss of torch that averages over all entries of the targets, not over examples."""
    return name_of(loss) in OF_NUMBERS


def name_of(loss: Loss) -> str:
    """Return the name of one of torch's losses; "" for other losses."""
    function = loss.func if isinstance(loss, functools.partial) else loss
    if isinstance(function, nn.Module):
        function = type(function)
    name = getattr(function, "__name__", "")
    return name if function in (getattr(F, name, None), getattr(nn, name, None)) else ""
