"""What is looked at once, before a training's first step: whether L_ML will mean anything, and whether ψ can learn."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Generator, Tensor, nn
from torch.utils._pytree import tree_leaves

from partnets.data import batch as batches
from partnets.data.chunks import Chunks
from partnets.evaluation.auditing import leaks
from partnets.evaluation.same_chunks import has_learned
from partnets.hyper import ConcreteDropout, Hyperparameter, penalties
from partnets.subnetworks.parameters import partitioned_parameters
from partnets.training.state import TrainingState
from partnets.training.step import hyper_learning
from partnets.utils.held import Held
from partnets.utils.likelihood import IGNORED, is_cross_entropy
from partnets.utils.modules import device_of, to_device
from partnets.utils.random_state import preserved
from partnets.utils.reached import reached
from partnets.utils.targets import check_targets, tried

# Examples of which an audit's batches have at most so many, on each rank.
AUDITED = 16
# Shares of the weights and of the examples that differ by more than this are hardly meant.
FAR_APART = 0.2
# An untrained network's loss is about the labels' entropy, or above; and of few labels the entropy says little.
KNOWS, FEWEST = 0.5, 16


def check_leaks(
    model: nn.Module,
    chunks: Chunks,
    batch_size: int,
    compute: Callable[[Any], tuple[Any, Tensor]],
    sampling: Sequence[float] = (),
) -> None:
    """As refuse_leaks, with two batches of D_2.

    Args:
        batch_size: that of the training, of which AUDITED are enough on each rank.
        sampling: which subnetworks learn: those whose share is not 0; all if empty.
    """
    if chunks.count == 1:
        return
    generator, size = Generator().manual_seed(0), min(batch_size, AUDITED * chunks.ranks)
    last = max((k for k, share in enumerate(sampling, start=1) if share), default=chunks.count)
    refuse_leaks(model, lambda: chunks.sample(2, size, generator), compute, last)


def refuse_leaks(
    model: nn.Module, draw: Callable[[], Any], compute: Callable[[Any], tuple[Any, Tensor]], last: int | None = None
) -> None:
    """Raises ValueError, naming it, for what partnets.audit finds with two batches; the model stays as it was.

    Args:
        draw: gives a batch, another one at each call.
        compute: gives the model's output and loss for a batch on its device.
        last: of the subnetworks that learn; C if None.
    """
    device = device_of(model)
    with preserved(device):  # a data set may draw too
        found = leaks(model, compute, *to_device([draw(), draw()], device), last)
    if found:
        listed = "\n".join(f"  {leak}" for leak in found)
        raise ValueError(
            "this model carries later chunks into earlier subnetworks, so that L_ML and ψ would know what they are"
            f" judged by, or loses what it writes or should learn:\n{listed}\npartnets.audit looks for it at any time;"
            " audit=False trains all the same."
        )


def check_start(trainer: TrainingState) -> None:
    """As try_judging, of subnetwork 1 on a batch of D_2.

    Warns:
        UserWarning: the weights seem to have learned from D_2 already.
    """

    def draw() -> Any:
        return trainer.chunks.sample(2, trainer.hyper_batch_size, Generator().manual_seed(0))

    direct = {path: module for path, module in trainer.hyper.items() if trainer.hyper_gradient[path] is None}
    loss, y = try_judging(trainer.model, direct, 2, draw, trainer.hyper_loss, trainer.forward)
    if trainer.steps == 0 and not has_learned(trainer.model):
        warn_of_knowledge(trainer.hyper_loss, loss, y)


def try_judging(
    model: nn.Module,
    hyper: dict[str, nn.Module],
    k: int,
    draw: Callable[[], Any],
    hyper_loss: batches.Loss,
    forward: batches.Forward,
) -> tuple[Tensor, Any]:
    """Tries subnetwork k - 1 on a batch of D_k, and changes nothing by it: noise and what the model holds stay.

    Returns:
        The loss, and y.

    Raises:
        ValueError: a hyperparameter reaches the loss, but not the model's output; the loss is a sum; or the model does
            not take the batch, or the loss its output and targets.
    """
    before, device = Held(model), device_of(model)
    try:
        with preserved(device), hyper_learning(model, k), penalties():  # which regularise w alone
            output, y = tried(model, to_device(draw(), device), forward)
            check_targets(hyper_loss, output, y)
            loss = batches.mean(hyper_loss, output, y)
    finally:
        before.put_back()
    check_reaches_output(hyper, output, loss)
    batches.check_no_sum(hyper_loss, output, y, loss)
    return loss, y


def check_learns(model: nn.Module, loss: batches.Loss) -> None:
    """Raises ValueError if a loss has parameters of its own, of which no optimiser knows."""
    own = dict(loss.named_parameters()) if isinstance(loss, nn.Module) else {}
    strange = [name for name, p in own.items() if p.requires_grad and not any(p is one for one in model.parameters())]
    if strange:
        raise ValueError(
            f"the loss has {', '.join(strange)}, which would never learn; put what learns into the model, as"
            " hyper.ObservationNoise for a variance."
        )


def warn_of_direct_dropout(hyper: Mapping[str, nn.Module], by: Mapping[str, Any]) -> None:
    """Warn if a dropout rate learns directly: it goes to 0 whatever the data are.

    Example:
        >>> from partnets import hyper
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     warn_of_direct_dropout({"2": hyper.ConcreteDropout(0.5)}, {"2": None})
        >>> str(caught[0].message)
        "2 (ConcreteDropout) learns directly: with given weights less noise always predicts better, so that its ...
    """
    found = [path for path, module in hyper.items() if isinstance(module, ConcreteDropout) and by[path] is None]
    if found:
        warnings.warn(
            f"{', '.join(found)} (ConcreteDropout) learns directly: with given weights less noise always predicts"
            " better, so that its rate goes to 0. Tune it by partnets.tune(network, data, ['dropout'], steps=...), or"
            " pass hyper_gradient={module: 'lookahead'}.",
            stacklevel=3,
        )


def warn_of_forgotten(model: nn.Module) -> None:
    """Warn if a model has hyperparameters that could learn, and a trainer was given none.

    Example:
        >>> from partnets import hyper
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     warn_of_forgotten(nn.Sequential(hyper.InputMask(4), nn.Linear(4, 2)))
        >>> str(caught[0].message)
        'the model has 0 (InputMask), and hyper= was not given, so that it stays as it is; pass hyper=[...] with ...
    """
    found = [
        f"{path or 'the model'} ({type(module).__name__})"
        for path, module in model.named_modules()
        if isinstance(module, Hyperparameter) and any(p.requires_grad for p in module.parameters())
    ]
    if found:
        warnings.warn(
            f"the model has {', '.join(found)}, and hyper= was not given, so that it stays as it is; pass hyper=[...]"
            " with what is to learn, or hyper=[] if nothing is.",
            stacklevel=3,
        )


def warn_of_unused_losses(model: nn.Module, hyper: dict[str, nn.Module], loss: batches.Loss) -> None:
    """Warns if a model has what acts in the training loss alone, and the loss is another.

    What is to learn is left out, since its gradient tells; but for what acts on inputs as well, and has one.
    """
    acting = ((path, module) for path, module in model.named_modules() if getattr(module, "acts_in_loss", False))
    unused = [
        f"{type(module).__name__} ({path})" if path else "the model"
        for path, module in acting
        if path not in hyper or module.acts_on_inputs
    ]
    if unused and not getattr(loss, "acts_in_loss", False):
        warnings.warn(
            f"{', '.join(unused)} acts in the training loss alone, and the loss is another one: pass it as loss= (of"
            " hyper.Mixup its loss) unless that calls it, or leave it out of the model.",
            stacklevel=3,
        )


def check_reaches_output(hyper: dict[str, nn.Module], output: Any, loss: Tensor) -> None:
    """Raises ValueError, naming them, if parameters of ψ reach a loss otherwise than through the model's output."""
    outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    if not outputs:  # an object that only its library can look into
        return
    through, of_loss = reached(outputs), reached([loss])
    aside = [
        f"{path}.{name}"
        for path, module in hyper.items()
        for name, parameter in module.named_parameters()
        if parameter in of_loss and parameter not in through
    ]
    if aside:
        raise ValueError(
            f"{', '.join(aside)} reaches the loss, but not the model's output. A step of ψ would choose what makes the"
            " loss small, as no smoothing and no penalty, and not what predicts unseen data. Pass hyper_loss=, the"
            " plain negative log-likelihood, and leave it out of hyper; its values can be compared by L_ML: see"
            " partnets.sweep and docs/hyperparameters.md."
        )


def warn_of_knowledge(hyper_loss: batches.Loss, value: Tensor, y: Any, k: int = 2) -> None:
    """Warns if this loss of subnetwork k - 1, before any step, is far below what guessing the labels y costs."""
    if not is_cross_entropy(hyper_loss) or not isinstance(y, Tensor) or y.is_floating_point():
        return
    loss = value.item()
    labels = y[y != IGNORED]
    if labels.numel() < FEWEST:
        return
    shares = labels.unique(return_counts=True)[1] / labels.numel()
    entropy = -(shares * shares.log()).sum().item()
    if loss < KNOWS * entropy:
        warnings.warn(
            f"before its first step, subnetwork {k - 1} predicts labels of chunk {k} with a loss of {loss:.2f} nats,"
            f" where guessing by their frequencies costs {entropy:.2f}. If the weights have seen these examples, as"
            " those of a model that was trained on them before partnets.partition, L_ML and ψ are about data that are"
            " known: start from fresh weights, or from such as learned from other data or from chunk 1 alone.",
            stacklevel=6,
        )


def warn_of_proportions(model: nn.Module, proportions: Sequence[float]) -> None:
    """Warns if the partitions' shares of the weights are far from these, the chunks' of the examples."""
    weights = [one for one in partitioned_parameters(model) if one.partition is not None]
    counted = [one.partition.sizes() for one in weights if one.parameter.requires_grad and not one.partition.is_meta]
    owned = [sum(sizes) for sizes in zip(*counted, strict=True)]
    if not sum(owned):
        return
    shares = [size / sum(owned) for size in owned]
    if max(abs(a - b) for a, b in zip(shares, proportions, strict=True)) > FAR_APART:
        ours, theirs = (", ".join(f"{100 * share:.0f}" for share in each) for each in (shares, proportions))
        warnings.warn(
            f"the partitions have {ours} % of the weights, and the chunks {theirs} % of the examples: few weights learn"
            " from many examples, or many from few. Pass partnets.partition and partnets.chunk the same proportions"
            " unless you mean it.",
            stacklevel=3,
        )


def check_finite(loss: Tensor, what: str) -> None:
    """Raises FloatingPointError if a loss is NaN or infinite."""
    if not math.isfinite(value := loss.item()):
        raise FloatingPointError(
            f"the loss of {what} is {value}. Look for inputs that are not finite, a"
            " learning rate that is too high (clip= helps), and logarithms or divisions in the loss."
        )
