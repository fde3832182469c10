"""Losses: which of torch's they are, which targets count, and their mean and sum over these targets.

L_ML requires the mean negative log-likelihood over a batch.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from partnets.utils.random_state import preserved

Loss = Callable[[Any, Any], Tensor]
# The default ignore_index of torch's cross_entropy, with which Hugging Face's collators pad labels.
IGNORED = -100
# To see which outputs a loss depends on, they are scaled to this size: a saturated softmax has no gradient.
SMALL = 0.01
# The largest sum of a softmax's gradients, relative to the sum of their absolute values.
ROUNDING = 1e-4

# torch's losses by the names of functions and modules. Distances and margins:
SQUARED = {"mse_loss", "MSELoss"}
DISTANCES = {*SQUARED, "l1_loss", "L1Loss", "smooth_l1_loss", "SmoothL1Loss", "huber_loss", "HuberLoss"}
NO_LIKELIHOODS = DISTANCES | {
    "hinge_embedding_loss", "HingeEmbeddingLoss", "margin_ranking_loss", "MarginRankingLoss", "multi_margin_loss",
    "MultiMarginLoss", "triplet_margin_loss", "TripletMarginLoss", "cosine_embedding_loss", "CosineEmbeddingLoss",
}  # fmt: skip
# Losses of classes, which have an ignore_index.
CROSS_ENTROPIES = {"cross_entropy", "CrossEntropyLoss", "token_cross_entropy"}
OF_CLASSES = {*CROSS_ENTROPIES, "nll_loss", "NLLLoss"}
# Losses of binary labels, and of binary labels and counts, which average over all entries of the targets.
BINARY_OF_LOGITS = {"binary_cross_entropy_with_logits", "BCEWithLogitsLoss"}
BINARY = {"binary_cross_entropy", "BCELoss", *BINARY_OF_LOGITS}
OF_NUMBERS = {*BINARY, "poisson_nll_loss", "PoissonNLLLoss"}


def token_cross_entropy(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    """Return the mean cross-entropy of tokens, for logits [batch, length, classes] and labels [batch, length].

    Labels of -100 are ignored. **options are those of torch's cross_entropy.
    """
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), **options)


def unwrapped(loss: Loss) -> Loss:
    """Return the module in a functools.partial without arguments; return other losses unchanged."""
    is_wrapped = isinstance(loss, functools.partial) and isinstance(loss.func, nn.Module)
    return loss.func if is_wrapped and not (loss.args or loss.keywords) else loss


def name_of(loss: Loss) -> str:
    """Return the name of one of torch's losses, or of token_cross_entropy; "" for other losses."""
    function = loss.func if isinstance(loss, functools.partial) else loss
    if isinstance(function, nn.Module):
        function = type(function)
    name = getattr(function, "__name__", "")
    return name if function in (getattr(F, name, None), getattr(nn, name, None), token_cross_entropy) else ""


def setting(loss: Loss, name: str, usual: Any) -> Any:
    """Return an argument of one of torch's losses, or `usual` if it was not given."""
    loss = unwrapped(loss)
    return loss.keywords.get(name, usual) if isinstance(loss, functools.partial) else getattr(loss, name, usual)


def entropy(counts: Tensor) -> float:
    """Return the loss in nats of a guess by frequencies, summed over all labels; counts are [classes, ...]."""
    counts = counts.double()
    return -float(torch.special.xlogy(counts, counts / counts.sum(0)).sum())


def check_loss(loss: Loss, stacklevel: int = 3) -> None:
    """Raise ValueError if a loss of torch is a sum over a batch; warn if it is not a log-likelihood."""
    check_mean(loss)
    name = name_of(loss)
    if name in NO_LIKELIHOODS:
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
    if name not in OF_CLASSES | BINARY:
        return loss
    usual = {"label_smoothing": 0.0} if name in CROSS_ENTROPIES else {}
    if not weighed:
        usual |= {"weight": None} | ({"pos_weight": None} if name in BINARY_OF_LOGITS else {})
    changes = setting(loss, "label_smoothing", 0.0) or (weighs(loss) and not weighed)
    if not changes:
        return loss
    loss = unwrapped(loss)
    if isinstance(loss, functools.partial):
        return functools.partial(loss.func, *loss.args, **(loss.keywords | usual))
    loss = copy.deepcopy(loss)
    for name, value in usual.items():
        setattr(loss, name, value)
    return loss


def of_each(loss: Loss) -> Loss:
    """Return one of torch's losses with reduction='none'; return other losses unchanged."""
    loss = unwrapped(loss)
    if isinstance(loss, nn.modules.loss._Loss):
        loss = copy.copy(loss)
        loss.reduction = "none"
        return loss
    function = loss.func if isinstance(loss, functools.partial) else loss
    if getattr(function, "__module__", "") == F.__name__:
        return functools.partial(loss, reduction="none")
    return loss


def ignored(loss: Loss) -> int:
    """Return the class that a loss ignores, its ignore_index, or -100."""
    return setting(loss, "ignore_index", IGNORED)


def are_whole(y: Any) -> bool:
    """Return whether targets are a tensor of an integer dtype, like labels."""
    return isinstance(y, Tensor) and not (y.is_floating_point() or y.is_complex() or y.dtype == torch.bool)


def are_labels(output: Any, y: Any) -> bool:
    """Return whether targets are integers and the output has one dimension more, like logits of classes."""
    return isinstance(output, Tensor) and are_whole(y) and output.dim() == y.dim() + 1


def class_axis(output: Any, y: Any) -> int | None:
    """Return the dimension of the classes in logits; None if output and targets are not logits and integer labels.

    It is 1 for [batch, classes, ...] with targets [batch, ...], and -1 for [batch, ..., classes].
    """
    if not are_labels(output, y):
        return None
    if (*output.shape[:1], *output.shape[2:]) == y.shape:
        return 1
    return -1 if output.shape[:-1] == y.shape else None


def no_classes(output: Any, y: Tensor) -> Tensor:
    """Return which integer targets are not a class of these logits, bool like the targets; -100 never is one."""
    axis = class_axis(output, y)
    if axis is None or output.shape[axis] == 1:  # one output, such as a regression's
        return y.long() == IGNORED
    return (y < 0) | (y >= output.shape[axis])


def counted(loss: Loss, losses: Callable[[], Tensor], output: Any, y: Any) -> Tensor | None:
    """Return which integer targets count, bool like the targets; None if there is no loss for each target.

    For torch's losses, all targets but ignore_index count. For other losses, all count but those that are not a class
    of the logits and have a loss of 0; `losses` is called only in this case.
    """
    if not are_whole(y):
        return None
    if name_of(loss) in OF_CLASSES:
        return y != ignored(loss)
    found = losses()
    return ~(no_classes(output, y) & (found == 0)) if found.shape == y.shape else None


def counting(loss: Loss, losses: Tensor, output: Any, y: Any) -> Tensor:
    """Return a vector of the losses of targets that count; all losses if there is not one loss for each target."""
    which = counted(loss, lambda: losses, output, y) if losses.dim() else None
    return losses if which is None or which.shape != losses.shape else losses[which]


def of_each_that_counts(loss: Loss, output: Any, y: Any) -> Tensor:
    """Return the losses of the targets that count, or the mean if the loss returns only a mean."""
    return counting(loss, of_each(loss)(output, y), output, y)


def scores(output: Any) -> Any:
    """Return the logits of an output that has them by this name, as in transformers, or the output itself."""
    if isinstance(output, Mapping) and "logits" in output:
        return output["logits"]
    return output if isinstance(output, Tensor) else getattr(output, "logits", output)


def losses(loss: Loss, output: Any, y: Any) -> Tensor:
    """Return loss(output, y): a scalar, which is a mean over the batch, or a tensor with the loss of each target.

    torch's losses, also compiled or wrapped ones, receive output.logits if the output has them, as in transformers.

    Raises:
        TypeError: the loss does not return a tensor.

    Example:
        >>> logits, y = torch.zeros(3, 2), torch.tensor([0, 1, 1])
        >>> losses(nn.functional.cross_entropy, logits, y)
        tensor(0.6931)
        >>> losses(nn.CrossEntropyLoss(reduction="none"), {"logits": logits}, y)
        tensor([0.6931, 0.6931, 0.6931])
    """
    function = loss.func if isinstance(loss, functools.partial) else loss
    is_torchs = (getattr(function, "__module__", None) or "").startswith("torch.nn.")  # or a wrapper of one
    output = scores(output) if is_torchs or name_of(loss) else output
    found = loss(output, y)
    if not isinstance(found, Tensor):
        raise TypeError(
            f"loss(output, y) gave a {type(found).__name__}; it must give a tensor: a mean, or the loss of each target."
        )
    if found.shape == (1,) and isinstance(y, Tensor) and y.dim() > 0 and len(y) > 1:
        # A mean with keepdim=True, unless it is the loss of the only target that counts.
        twice = _of_twice(loss, output, y)
        return found if twice is not None and twice.shape == (2,) else found[0]
    return found


def _of_twice(loss: Loss, output: Any, y: Any) -> Tensor | None:
    """Return loss(output, y) with each example twice; None if that is impossible."""
    if not (isinstance(y, Tensor) and y.dim()):
        return None

    def twice(leaf: Any) -> Any:
        is_of_examples = isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == len(y)
        return leaf.repeat_interleave(2, 0) if is_of_examples else leaf

    try:
        with preserved(y.device), torch.no_grad():
            return loss(tree_map(twice, output), twice(y))
    except (RuntimeError, TypeError, ValueError, IndexError):  # a custom loss that needs the original batch
        return None


def mean(loss: Loss, output: Any, y: Any) -> Tensor:
    """Return the loss to minimise, a scalar; 0 if all targets of the batch are ignored.

    Example:
        >>> logits, y = torch.zeros(3, 2), torch.tensor([0, 1, 1])
        >>> mean(nn.CrossEntropyLoss(reduction="none"), logits, y)
        tensor(0.6931)
        >>> mean(nn.CrossEntropyLoss(), logits, y.fill_(-100))
        tensor(0.)
    """
    found, output = losses(loss, output, y), scores(output)
    if found.dim():
        found = counting(loss, found, output, y)
        return found.mean() if found.numel() else found.sum()
    if class_axis(output, y) is None:
        return found
    uncounted = y == ignored(loss) if name_of(loss) in OF_CLASSES else no_classes(output, y)
    return found.masked_fill(uncounted.all() & found.isnan(), 0.0)


def check_no_sum(loss: Loss, output: Any, y: Any, value: Tensor) -> None:
    """Raise ValueError if a loss, `value` for this batch, doubles when each example is repeated."""
    twice = _of_twice(functools.partial(mean, loss), output, y)
    if twice is not None and value.item() != 0 and abs(twice.item() / value.item() - 2) < 1e-3:
        raise ValueError(
            "the loss is twice as large for a batch that holds each example twice: it is a sum; pass the mean over the"
            " examples."
        )


def summed(loss: Loss, output: Any, y: Any, examples: int) -> tuple[Tensor, int]:
    """Return the differentiable sum of a batch's losses, a float64 scalar on the CPU, and their number.

    Losses with a dimension are summed; `counted` says which count. A mean is multiplied by the number of targets over
    which it was taken: for torch's losses of classes, those that are not ignore_index; for its binary and count losses,
    the entries of y; for other losses of a softmax, the places at which logits have a gradient; otherwise the examples.

    Example:
        >>> logits, y = torch.zeros(2, 3, requires_grad=True), torch.tensor([0, -100])
        >>> found, count = summed(nn.functional.cross_entropy, logits, y, examples=2)
        >>> found.backward()
        >>> count, [round(value, 2) for value in logits.grad[0].tolist()]
        (1, [-0.67, 0.33, 0.33])
    """
    found = losses(loss, tree_map(_in_single, output), y)
    if found.dim():
        found = counting(loss, found, scores(output), y)
        return found.sum(dtype=torch.float64).cpu(), found.numel()
    count = _targets(loss, output, y, examples)
    found = found.to("cpu", torch.float64)
    return (count * found if count else torch.zeros_like(found)), count


def _in_single(leaf: Any) -> Any:
    """Convert 16-bit floats to float32, so that a batch's mean is not rounded to 8 bits before it is summed."""
    is_low = isinstance(leaf, Tensor) and leaf.dtype in (torch.bfloat16, torch.half)
    return leaf.float() if is_low else leaf


def _targets(loss: Loss, output: Any, y: Any, examples: int) -> int:
    """Return the number of targets over which a mean was taken."""
    logits = scores(output)
    if isinstance(y, Tensor) and name_of(loss) in OF_NUMBERS:
        return y.numel()
    if name_of(loss):
        return int((y != ignored(loss)).sum()) if are_labels(logits, y) else examples
    value, found = _gradients(loss, output, y)
    if value.isnan() and not found:  # finite outputs would have a gradient
        return 0
    axes = [_class_axis_of(gradient) for gradient in found]
    if len(found) == 1 and axes[0] is None:
        axes = [class_axis(found[0], y)]  # such as of log-probabilities
    pairs = zip(found, axes, strict=True)
    if counts := [int((gradient != 0).any(axis).sum()) for gradient, axis in pairs if axis is not None]:
        return max(counts)
    if not found and are_labels(logits, y):  # logits of an object that is no tree of tensors
        return int((y != IGNORED).sum())
    return examples - _missing(found, y, examples)


def _gradients(loss: Loss, output: Any, y: Any) -> tuple[Tensor, list[Tensor]]:
    """Return a mean, and its gradient with respect to each floating-point tensor of an output, if it is not 0.

    The mean is 0 if it has no gradient.
    """
    leaves, tree = tree_flatten(output)
    with torch.inference_mode(False), torch.enable_grad():
        leaves = [_small(leaf) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf for leaf in leaves]
        wanted = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.dim()]
        try:
            with preserved(wanted[0].device if wanted else torch.device("cpu")):
                value = losses(loss, tree_unflatten(leaves, tree), y)
                found = torch.autograd.grad(value, wanted, allow_unused=True)
        except RuntimeError:  # the loss has no gradient
            return torch.zeros(()), []
    return value.detach(), [one for one in found if one is not None and bool((one != 0).any())]


def _small(leaf: Tensor) -> Tensor:
    leaf = _in_single(leaf.detach().clone())
    largest = leaf.abs().amax() if leaf.numel() else leaf.new_ones(())
    return (leaf * (SMALL / largest.clamp(min=SMALL))).requires_grad_()


def _class_axis_of(gradient: Tensor) -> int | None:
    """Return the dimension along which a gradient sums to 0, as a softmax is unchanged by a constant added there."""
    for axis in range(1, gradient.dim()):
        if bool((gradient.sum(axis).abs() <= ROUNDING * gradient.abs().sum(axis)).all()):
            return axis
    return None


def _missing(gradients: list[Tensor], y: Any, examples: int) -> int:
    """Return the number of examples with a negative or NaN target on which a mean does not depend."""
    counts, strange = torch.zeros(examples, dtype=torch.bool), torch.zeros(examples, dtype=torch.bool)
    for leaf in gradients:
        if len(leaf) == examples:
            counts |= (leaf != 0).view(examples, -1).any(1).cpu()
    for leaf in tree_leaves(y):
        if isinstance(leaf, Tensor) and leaf.shape[:1] == (examples,) and not leaf.is_complex():
            strange |= (leaf.isnan() | (leaf < 0)).view(examples, -1).any(1).cpu()
    return int((strange & ~counts).sum()) if counts.any() else 0
