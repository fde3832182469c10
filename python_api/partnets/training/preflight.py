"""Checks before a training's first step: whether L_ML is meaningful, and whether ψ can learn."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Generator, Tensor, nn
from torch.utils._pytree import tree_leaves

from partnets.data.batch import Forward, tried
from partnets.data.chunks import Chunks
from partnets.evaluation.auditing import leaks
from partnets.evaluation.same_chunks import has_learned
from partnets.evaluation.snapshot import Snapshot
from partnets.hyper import ConcreteDropout, Hyperparameter, penalties
from partnets.subnetworks.parameters import partitioned_parameters
from partnets.training.step import hyper_learning
from partnets.utils.losses import CROSS_ENTROPIES, Loss, check_no_sum, entropy, ignored, mean, name_of
from partnets.utils.modules import device_of, to_device
from partnets.utils.random_state import preserved
from partnets.utils.targets import check_targets

# The largest number of examples in an audit's batches, on each rank.
AUDITED = 16
# Shares of the weights and of the examples that differ by more than this are probably not intended.
FAR_APART = 0.2
# A loss below KNOWS times the labels' entropy is not that of an untrained network; with fewer than FEWEST labels the
# entropy is not meaningful.
KNOWS, FEWEST = 0.5, 16


def check_leaks(
    model: nn.Module,
    chunks: Chunks,
    batch_size: int,
    compute: Callable[[Any], tuple[Any, Tensor]],
    sampling: Sequence[float] = (),
) -> None:
    """Call refuse_leaks with two batches of D_2.

    Args:
        batch_size: the training's batch size; at most AUDITED examples on each rank are used.
        sampling: the subnetworks' shares of the steps, 0 for those that do not learn; empty if all learn.
    """
    if len(chunks) == 1:
        return
    generator, size = Generator().manual_seed(0), min(batch_size, AUDITED * chunks.ranks)
    last = max((k for k, share in enumerate(sampling, start=1) if share), default=len(chunks))
    refuse_leaks(model, lambda: chunks.sample(2, size, generator), compute, last)


def refuse_leaks(
    model: nn.Module, draw: Callable[[], Any], compute: Callable[[Any], tuple[Any, Tensor]], last: int | None = None
) -> None:
    """Raise ValueError that lists the leaks that partnets.audit finds with two batches; leave the model unchanged.

    Args:
        draw: returns a different batch at each call.
        compute: returns the model's output and loss for a batch on its device.
        last: the last subnetwork that learns; C if None.
    """
    device = device_of(model)
    with preserved(device):  # data sets may draw from the random states too
        found = leaks(model, compute, *to_device([draw(), draw()], device), last)
    if found:
        listed = "\n".join(f"  {leak}" for leak in found)
        raise ValueError(
            "this model carries later chunks into earlier subnetworks, so that L_ML and ψ would be evaluated on data"
            f" they have seen, or it loses state or gradients:\n{listed}\nUse partnets.audit to check for this at any"
            " time, or audit=False to train without the check."
        )


def check_start(trainer: Any) -> None:
    """Call try_judging for subnetwork 1 on a batch of D_2; warn if the weights seem to have learned from D_2."""

    def draw() -> Any:
        return trainer.chunks.sample(2, trainer.settings.hyper_batch_size, Generator().manual_seed(0))

    direct = {path: module for path, module in trainer.hyper.items() if trainer.hyper_gradient[path] is None}
    loss, y = try_judging(trainer.model, direct, 2, draw, trainer.hyper_loss, trainer.forward)
    if trainer.steps == 0 and not has_learned(trainer.model):
        warn_of_knowledge(trainer.hyper_loss, loss, y)


def try_judging(
    model: nn.Module,
    hyper: Mapping[str, nn.Module],
    k: int,
    draw: Callable[[], Any],
    hyper_loss: Loss,
    forward: Forward,
) -> tuple[Tensor, Any]:
    """Evaluate subnetwork k - 1 on a batch of D_k, then restore random states and the model's state.

    Returns:
        The loss, and y.

    Raises:
        ValueError: a hyperparameter affects the loss, but not the model's output; the loss is a sum; the model does not
            take the batch; or the loss does not take the output and targets.
    """
    before, device = Snapshot(model), device_of(model)
    try:
        with preserved(device), hyper_learning(model, k), penalties():  # penalties regularise only w
            output, y = tried(model, to_device(draw(), device), forward)
            check_targets(hyper_loss, output, y)
            loss = mean(hyper_loss, output, y)
    finally:
        before.put_back()
    check_reaches_output(hyper, output, loss)
    check_no_sum(hyper_loss, output, y, loss)
    return loss, y


def check_learns(model: nn.Module, loss: Loss) -> None:
    """Raise ValueError if a loss has trainable parameters outside of the model, which no optimiser has."""
    own = dict(loss.named_parameters()) if isinstance(loss, nn.Module) else {}
    strange = [name for name, p in own.items() if p.requires_grad and not any(p is one for one in model.parameters())]
    if strange:
        raise ValueError(
            f"the loss has {', '.join(strange)}, which would never learn; put trainable modules into the model, such as"
            " hyper.ObservationNoise for a variance."
        )


def warn_of_direct_dropout(hyper: Mapping[str, nn.Module], by: Mapping[nn.Module, Any]) -> None:
    """Warn if a dropout rate learns directly, because it goes to 0 for all data."""
    found = [path for path, module in hyper.items() if isinstance(module, ConcreteDropout) and by[module] is None]
    if found:
        warnings.warn(
            f"{', '.join(found)} (ConcreteDropout) learns directly, but at fixed weights less noise always predicts"
            " better, so its rate goes to 0; tune it by partnets.tune(network, data, ['dropout'], steps=...), or pass"
            " hyper_gradient={module: 'lookahead'}.",
            stacklevel=3,
        )


def warn_of_forgotten(model: nn.Module) -> None:
    """Warn if a model has trainable hyperparameters, for a trainer without hyper=."""
    found = [
        f"{path or 'the model'} ({type(module).__name__})"
        for path, module in model.named_modules()
        if isinstance(module, Hyperparameter) and any(p.requires_grad for p in module.parameters())
    ]
    if found:
        warnings.warn(
            f"the model has {', '.join(found)}, but hyper= was not given, so it does not learn; pass hyper=[...] with"
            " the modules that are to learn, or hyper=[] if none is.",
            stacklevel=3,
        )


def warn_of_unused_losses(model: nn.Module, hyper: Mapping[str, nn.Module], loss: Loss) -> None:
    """Warn if a model has modules that act through the training loss, such as LabelSmoothing, but `loss` is another.

    Args:
        hyper: the modules that learn, by path. If one of them acts in the loss only, its missing gradient raises an
            error instead. Mixup also changes inputs, so it has a gradient, and is warned of.
        loss: the training loss.
    """
    acting = ((path, module) for path, module in model.named_modules() if getattr(module, "acts_in_loss", False))
    unused = [
        f"{type(module).__name__} ({path})" if path else "the model"
        for path, module in acting
        if path not in hyper or module.acts_on_inputs
    ]
    if unused and not getattr(loss, "acts_in_loss", False):
        warnings.warn(
            f"{', '.join(unused)} acts only in the training loss, but the loss is another one; pass it as loss= (for"
            " hyper.Mixup, its loss) unless the loss calls it, or leave it out of the model.",
            stacklevel=3,
        )


def check_reaches_output(hyper: Mapping[str, nn.Module], output: Any, loss: Tensor) -> None:
    """Raise ValueError, naming them, if parameters of ψ affect a loss but not the model's output."""
    outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    if not outputs:  # an object of another library, which cannot be inspected
        return
    through, of_loss = graph_leaves(outputs), graph_leaves([loss])
    aside = [
        f"{path}.{name}"
        for path, module in hyper.items()
        for name, parameter in module.named_parameters()
        if parameter in of_loss and parameter not in through
    ]
    if aside:
        raise ValueError(
            f"{', '.join(aside)} reaches the loss, but not the model's output, so steps of ψ would only minimise the"
            " loss, such as by no smoothing and no penalty, and not improve predictions of unseen data. Pass"
            " hyper_loss=, the negative log-likelihood, and leave it out of hyper; to compare its values by L_ML, see"
            " docs/hyperparameters.md."
        )


def graph_leaves(tensors: Iterable[Tensor]) -> set[Tensor]:
    """Return the leaves that tensors were computed from and that require a gradient."""
    leaves = {tensor for tensor in tensors if tensor.requires_grad and tensor.grad_fn is None}
    nodes = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if hasattr(node, "variable"):
            leaves.add(node.variable)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return leaves


def warn_of_knowledge(hyper_loss: Loss, value: Tensor, y: Any, k: int = 2, stacklevel: int = 6) -> None:
    """Warn if the loss of subnetwork k - 1, before any step, is far below the entropy of the labels y."""
    if name_of(hyper_loss) not in CROSS_ENTROPIES or not isinstance(y, Tensor) or y.is_floating_point():
        return
    labels = y[y != ignored(hyper_loss)]
    if labels.numel() < FEWEST:
        return
    loss, guessing = value.item(), entropy(labels.unique(return_counts=True)[1]) / labels.numel()
    if loss < KNOWS * guessing:
        warnings.warn(
            f"before its first step, subnetwork {k - 1} predicts labels of chunk {k} with a loss of {loss:.2f} nats,"
            f" but guessing by their frequencies costs {guessing:.2f}. If the weights were trained on these examples"
            " before, L_ML and hyperparameters are evaluated on known data: start from new weights, or from weights"
            " trained on other data or on chunk 1 only.",
            stacklevel=stacklevel,
        )


def warn_of_proportions(model: nn.Module, proportions: Sequence[float]) -> None:
    """Warn if the partitions' shares of the weights are far from proportions, the chunks' shares of the examples."""
    learning = (one for one in partitioned_parameters(model) if one.parameter.requires_grad)
    partitions = (one.partition for one in learning if one.partition is not None and one.state.narrow is None)
    counted = [partition.sizes() for partition in partitions if not partition.is_meta]
    owned = [sum(sizes) for sizes in zip(*counted, strict=True)]
    if not sum(owned):
        return
    shares = [size / sum(owned) for size in owned]
    if max(abs(a - b) for a, b in zip(shares, proportions, strict=True)) > FAR_APART:
        ours, theirs = (", ".join(f"{100 * share:.0f}" for share in each) for each in (shares, proportions))
        warnings.warn(
            f"the partitions have {ours} % of the weights, but the chunks {theirs} % of the examples: few weights learn"
            " from many examples, or many from few. Pass the same proportions to partnets.partition and partnets.chunk"
            " unless this is intended.",
            stacklevel=3,
        )


def check_finite(loss: Tensor, what: str) -> None:
    """Raise FloatingPointError if a loss is NaN or infinite."""
    if not math.isfinite(value := loss.item()):
        raise FloatingPointError(
            f"the loss of {what} is {value}. Look for inputs that are not finite, a learning rate that is too high"
            " (clip= helps), and logarithms or divisions in the loss."
        )
