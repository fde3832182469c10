"""What a loss is to L_ML: a negative log-likelihood, whose mean over a batch it gives."""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Loss = Callable[[Any, Any], Tensor]
# torch's ignore_index: of cross_entropy, and what Hugging Face's collators pad labels with.
IGNORED = -100

# Of torch's losses those that are distances or margins, by the names of functions and of modules.
SQUARED = {"mse_loss", "MSELoss"}
OTHERS = {
    "l1_loss", "L1Loss", "smooth_l1_loss", "SmoothL1Loss", "huber_loss", "HuberLoss", "hinge_embedding_loss",
    "HingeEmbeddingLoss", "margin_ranking_loss", "MarginRankingLoss", "multi_margin_loss", "MultiMarginLoss",
    "triplet_margin_loss", "TripletMarginLoss", "cosine_embedding_loss", "CosineEmbeddingLoss",
}  # fmt: skip
CROSS_ENTROPIES = {"cross_entropy", "CrossEntropyLoss"}
NLL_LOSSES = {"nll_loss", "NLLLoss"}
# Those of yes or no, and of counts, for each number of the targets.
BINARY_OF_LOGITS = {"binary_cross_entropy_with_logits", "BCEWithLogitsLoss"}
BINARY = {"binary_cross_entropy", "BCELoss", *BINARY_OF_LOGITS}
OF_NUMBERS = {*BINARY, "poisson_nll_loss", "PoissonNLLLoss"}


def setting(loss: Loss, name: str, usual: Any) -> Any:
    """An argument that one of torch's losses was given."""
    return loss.keywords.get(name, usual) if isinstance(loss, functools.partial) else getattr(loss, name, usual)


def check_loss(loss: Loss, stacklevel: int = 3) -> None:
    """Raises ValueError for a sum over a batch, and warns of a loss that is no log-likelihood, where torch's tell.

    Example:
        >>> check_loss(nn.CrossEntropyLoss(reduction="sum"))
        Traceback (most recent call last):
        ValueError: the loss CrossEntropyLoss has reduction='sum', which grows with the batch; pass the mean ...
    """
    check_mean(loss)
    name = name_of(loss)
    if name in SQUARED | OTHERS:
        cure = (
            "; put hyper.ObservationNoise() behind the model and pass loss=hyper.gaussian_nll, which learns the"
            " variance as well"
            if name in SQUARED
            else ""
        )
        warnings.warn(
            f"{name} is no negative log-likelihood, so that L_ML is in no nats and a step of ψ weighs nothing by it"
            f"{cure}. A loss of your own that returns one goes without this warning.",
            stacklevel=stacklevel,
        )


def check_mean(loss: Loss) -> None:
    """Raises ValueError for a sum over a batch, where torch's losses tell."""
    if setting(loss, "reduction", "mean") == "sum":
        raise ValueError(
            f"the loss {name_of(loss)} has reduction='sum', which grows with the batch; pass the mean over the"
            " examples, or reduction='none'."
        )


def weighs(loss: Loss) -> bool:
    """Whether this is one of torch's losses with weights of classes.

    Example:
        >>> weighs(nn.CrossEntropyLoss(torch.ones(3))), weighs(nn.CrossEntropyLoss())
        (True, False)
    """
    return any(setting(loss, name, None) is not None for name in ("weight", "pos_weight")) and bool(name_of(loss))


def plain(loss: Loss, weighed: bool = False) -> Loss:
    """The negative log-likelihood in a training loss; one of one's own is unchanged, but for what it names `plain`.

    Of these, label smoothing goes and so do the classes' weights: with them, each choice of weights would be its own
    judge, and a mean that of the weights in its batch. `weighed`: for weights that nothing chooses, which stay.

    Example:
        >>> plain(nn.CrossEntropyLoss(label_smoothing=0.1)).label_smoothing
        0.0
        >>> plain(F.mse_loss) is F.mse_loss
        True
    """
    if hasattr(loss, "plain"):  # hyper.LabelSmoothing's
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
    """The class that a loss leaves out: torch's criteria tell it."""
    return setting(loss, "ignore_index", IGNORED)


def ignores(loss: Loss) -> bool:
    """Whether this is one of torch's losses that leave a class out."""
    return name_of(loss) in CROSS_ENTROPIES | NLL_LOSSES


def are_whole(targets: Tensor) -> bool:
    """Return whether a tensor has whole numbers, as labels are."""
    return not (targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool)


def are_labels(output: Any, targets: Any) -> bool:
    """Return whether targets are whole numbers, and the output has one dimension more, as logits of classes have."""
    tensors = isinstance(output, Tensor) and isinstance(targets, Tensor)
    return tensors and are_whole(targets) and output.dim() == targets.dim() + 1


def class_axis(output: Any, targets: Any) -> int | None:
    """Return the dimension of the classes in logits; None if these are no logits of whole numbers as targets.

    It is 1 of [batch, classes, ...] with targets [batch, ...], and -1 of [batch, ..., classes].

    Example:
        >>> y = torch.zeros(4, 7, dtype=torch.int64)
        >>> class_axis(torch.zeros(4, 3, 7), y), class_axis(torch.zeros(4, 7, 3), y), class_axis(torch.zeros(4, 7), y)
        (1, -1, None)
    """
    if not are_labels(output, targets):
        return None
    if (*output.shape[:1], *output.shape[2:]) == targets.shape:
        return 1
    return -1 if output.shape[:-1] == targets.shape else None


def no_classes(output: Any, targets: Tensor) -> Tensor:
    """Return which whole numbers are no class of these logits, bool like the targets: -100 is none of any.

    Example:
        >>> no_classes(torch.zeros(4, 3), torch.tensor([0, 2, 255, -1]))
        tensor([False, False,  True,  True])
    """
    axis = class_axis(output, targets)
    if axis is None or output.shape[axis] == 1:  # one output, as of a regression
        return targets.long() == IGNORED
    return (targets < 0) | (targets >= output.shape[axis])


def counted(loss: Loss, losses: Callable[[], Tensor], output: Any, targets: Any) -> Tensor | None:
    """Return which whole numbers count as targets, bool like them; None if there is no loss of each.

    For one of torch's losses, all but its ignore_index count. For another loss, all count but those that are no class
    of the logits and have a loss of 0. `losses` is called in this case alone.

    Example:
        >>> logits, y = torch.zeros(3, 2), torch.tensor([0, 255, 1])
        >>> loss = functools.partial(F.cross_entropy, ignore_index=255, reduction="none")
        >>> counted(loss, lambda: loss(logits, y), logits, y)
        tensor([ True, False,  True])
        >>> counted(lambda output, y: loss(output, y), lambda: loss(logits, y), logits, y)
        tensor([ True, False,  True])
    """
    if not isinstance(targets, Tensor) or not are_whole(targets):
        return None
    if ignores(loss):
        return targets != ignored(loss)
    found = losses()
    return ~(no_classes(output, targets) & (found == 0)) if found.shape == targets.shape else None


def counting(loss: Loss, losses: Tensor, output: Any, targets: Any) -> Tensor:
    """Return the losses of those targets that count, a vector; all if they are not of one target each."""
    which = counted(loss, lambda: losses, output, targets) if losses.dim() else None
    return losses if which is None or which.shape != losses.shape else losses[which]


def of_each(loss: Loss) -> Loss:
    """One of torch's losses with the losses of all targets instead of their mean; another as it is."""
    if isinstance(loss, nn.modules.loss._Loss):
        loss = copy.copy(loss)
        loss.reduction = "none"
        return loss
    function = loss.func if isinstance(loss, functools.partial) else loss
    if getattr(function, "__module__", "") == F.__name__:
        return functools.partial(loss, reduction="none")
    return loss


def of_each_that_counts(loss: Loss, output: Any, targets: Any) -> Tensor:
    """The losses of those targets that count, or the mean of a loss that gives no other.

    Example:
        >>> logits, y = torch.zeros(3, 2), torch.tensor([0, -100, 1])
        >>> of_each_that_counts(F.cross_entropy, logits, y)
        tensor([0.6931, 0.6931])
    """
    return counting(loss, of_each(loss)(output, targets), output, targets)


def same_loss(first: Loss, second: Loss) -> bool:
    """Whether two losses are one: the same object, or torch's with the same settings.

    Example:
        >>> same_loss(nn.CrossEntropyLoss(), nn.CrossEntropyLoss()), same_loss(nn.CrossEntropyLoss(), nn.MSELoss())
        (True, False)
        >>> same_loss(F.cross_entropy, functools.partial(F.cross_entropy, label_smoothing=0.0))
        True
    """
    if first is second or first == second:
        return True
    name = name_of(first)
    return bool(name) and name == name_of(second) and _settings(first) == _settings(second)


def _settings(loss: Loss) -> dict[str, str]:
    """The arguments of one of torch's losses, as text."""
    if isinstance(loss, nn.Module):
        found = {**vars(loss), **loss._buffers}
    else:
        bound = inspect.signature(loss.func if isinstance(loss, functools.partial) else loss).parameters.values()
        usual = {parameter.name: parameter.default for parameter in bound if parameter.default is not parameter.empty}
        found = usual | getattr(loss, "keywords", {})
    return {name: repr(value) for name, value in found.items() if not name.startswith("_")}


def is_cross_entropy(loss: Loss) -> bool:
    """Whether this is torch's cross-entropy, as a function or a module."""
    return name_of(loss) in CROSS_ENTROPIES


def is_of_numbers(loss: Loss) -> bool:
    """Whether this is a loss of torch's whose mean is over all numbers of the targets, not over examples.

    Example:
        >>> is_of_numbers(nn.BCEWithLogitsLoss()), is_of_numbers(nn.CrossEntropyLoss())
        (True, False)
    """
    return name_of(loss) in OF_NUMBERS


def name_of(loss: Loss) -> str:
    """The name of one of torch's losses; empty for any other."""
    function = loss.func if isinstance(loss, functools.partial) else loss
    if isinstance(function, nn.Module):
        function = type(function)
    name = getattr(function, "__name__", "")
    return name if function in (getattr(F, name, None), getattr(nn, name, None)) else ""
