"""The two steps of stn.Trainer, of the best response and of the hyperparameters (Algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves, tree_map

from partnets.hyper.penalty import penalised
from partnets.optim.base import PartitionedOptimizer
from partnets.stn.converting import vector_of
from partnets.stn.layer import HyperLayer
from partnets.stn.vector import HyperVector
from partnets.subnetworks.rules import rule_of
from partnets.subnetworks.statistics import partitioned_norms
from partnets.training import step
from partnets.training.hypergradient import Strategy
from partnets.training.unrolled import Averaged, alone
from partnets.utils.linearised import is_linear, lifted, linearised
from partnets.utils.modules import evaluating


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
    """Take one step of the best response φ on training data, at perturbed hyperparameters (Algorithm 1).

    With `centred` hyperparameters, two passes make one step (Bae and Grosse 2020): the response learns at perturbed
    hyperparameters with W and b constant, and all other parameters learn at the present ones.

    Args:
        model: a model converted by stn.convert, in a partnets.Ensemble or partitioned.
        optimizer, k, batch, loss, clip, backward, masked: as for partnets.step_weights; with a validation set, k is 1.

    Returns:
        The loss at perturbed hyperparameters, without penalties, detached.

    Raises:
        ValueError, RuntimeError: as for partnets.step_weights; or no layer responds; or the response is `linearised`,
            and the loss has no derivative in forward mode or is not computed from the model's output.

    Example:
        >>> import partnets
        >>> from partnets import hyper, stn
        >>> dropout = hyper.Dropout(0.5)
        >>> model = partnets.Ensemble([stn.convert(nn.Sequential(dropout, nn.Linear(4, 2)), dropout)], num_partitions=2)
        >>> optimizer = partnets.optim.SGD(model, lr=0.1)
        >>> x, y = torch.ones(3, 4), torch.tensor([0, 1, 1])
        >>> def loss(batch):
        ...     return nn.functional.cross_entropy(model(batch[0]), batch[1])
        >>> value = step_weights(model, optimizer, 1, (x, y), loss)
    """
    vector, gradients = vector_of(model), {}
    if masked is None:
        masked = clip is not None or backward is not Tensor.backward or step.has_step_hooks(optimizer)
    with ExitStack() as stack:

        def perturbed_loss(batch: Any) -> Tensor:
            with ExitStack() as entered:
                if vector.centred:
                    with vector.at(vector.present().detach()):
                        backward(penalised(loss, batch)[1])
                    gradients.update(_gradients_of_others(model))
                    entered.enter_context(vector.response_learning())
                    entered.enter_context(_statistics_kept(model))
                count = count_examples(batch, vector.batch_dim)
                if vector.linearised:
                    value = _linearised_loss(model, vector, count, batch, loss)
                else:
                    entered.enter_context(vector.perturbed(count))
                    value = loss(batch)
                stack.push(entered.pop_all())  # checkpoints recompute in the backward pass
            return value

        def backward_of_both(total: Tensor) -> None:
            """Run backward, then restore the gradients at present hyperparameters of all other parameters."""
            for parameter in gradients:
                parameter.grad = None
            with stack:
                backward(total)
            for parameter, gradient in gradients.items():
                parameter.grad = gradient

        options = {"clip": clip, "backward": backward_of_both, "masked": masked}
        return step.step_weights(model, optimizer, k, batch, perturbed_loss, **options)


def _linearised_loss(
    model: nn.Module, vector: HyperVector, examples: int, batch: Any, loss: Callable[[Any], Tensor]
) -> Tensor:
    """Return the loss of outputs that are linear in the response."""
    with linearised(), vector.perturbed(examples), model.register_forward_hook(_lift):
        try:
            value = loss(batch)
        except NotImplementedError as error:
            raise RuntimeError(
                "the response is linearised, but an operator of the model has no derivative in forward mode; pass"
                " linearised=False to stn.convert."
            ) from error
        if is_linear(value):
            raise RuntimeError(
                "the response is linearised, but the loss is not computed from the output of model(...), or the"
                " model is compiled; compute it from this output, or pass linearised=False to stn.convert."
            )
    return value


@contextmanager
def _statistics_kept(model: nn.Module) -> Iterator[None]:
    """Restore running statistics on exit, so that a batch counts once, at the present hyperparameters."""
    norms = [module for module in model.modules() if isinstance(module, _NormBase)]
    buffers = [norm._buffers.get(name) for norm in norms for name in rule_of(_NormBase).statistics]
    before = [(buffer, buffer.clone()) for buffer in buffers if buffer is not None]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


def _gradients_of_others(model: nn.Module) -> Iterator[tuple[nn.Parameter, Tensor | None]]:
    """Yield parameters outside of the response and their gradients, safe from the next backward pass."""
    responses = {response for m in model.modules() if isinstance(m, HyperLayer) for response in m.responses()}
    for parameter in model.parameters():
        if parameter not in responses:
            grad = parameter.grad  # with DistributedDataParallel it may be a view of a bucket that is reused
            yield parameter, grad.clone() if grad is not None and grad._is_view() else grad


def _lift(model: nn.Module, _: tuple, output: Any) -> Any:
    """Add to the output at the present hyperparameters its derivative towards the perturbed ones; a forward hook."""
    if not any(map(is_linear, tree_leaves(output))):
        raise RuntimeError(
            f"the output of this {type(model).__name__} has no forward-mode derivative of the response, such as in a"
            " compiled model; pass linearised=False to stn.convert."
        )
    return tree_map(lifted, output)


def step_hyper(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Mapping[int, Any],
    loss: Callable[[Any], Tensor],
    *,
    entropy: float = 1e-3,
    weights: Mapping[int, float] | None = None,
    backward: Callable[[Tensor], None] = Tensor.backward,
) -> Tensor:
    """Take one step of the hyperparameters λ and of σ on data that the best response has not seen (Algorithm 1).

    The model is in evaluation mode. The gradient passes through the best response and through hyperparameters that act
    in evaluation.

    Args:
        model: as for step_weights.
        optimizer: an optimizer of torch.optim of partnets.hyper.hyperparameters(model), which includes σ.
        batches: {k: a batch of D_k}; with a validation set, {2: a batch of it}.
        loss, weights, backward: as for partnets.step_hyper.
        entropy: τ, the weight of the entropy of the perturbation.

    Returns:
        The loss, without the entropy, detached.

    Raises:
        ValueError, RuntimeError: as for partnets.step_hyper; or no layer responds, or entropy is negative.
    """
    check_entropy(entropy)
    vector, values = vector_of(model), []
    with ExitStack() as stack:

        def perturbed_loss(batch: Any) -> Tensor:
            with ExitStack() as entered:
                entered.enter_context(_judging(model))
                entered.enter_context(vector.perturbed(count_examples(batch, vector.batch_dim), learns=True))
                value = loss(batch)
                stack.push(entered.pop_all())  # checkpoints recompute in the backward pass
            values.append(value.detach())
            return value - entropy * vector.entropy() if entropy else value

        def backward_at_perturbed(total: Tensor) -> None:
            with stack:
                backward(total)

        step.step_hyper(model, optimizer, batches, perturbed_loss, weights=weights, backward=backward_at_perturbed)
    weights = dict.fromkeys(batches, 1 / len(batches)) if weights is None else weights
    return sum(weights[k] * value for k, value in zip(batches, values, strict=True))


@dataclass(frozen=True)
class Response(Strategy):
    """The strategy by which ψ learns through the response of the layers.

    Attributes:
        entropy: as for step_hyper.
    """

    entropy: float

    def step_weights(self, *arguments: Any, **options: Any) -> Tensor:
        return step_weights(*arguments, **options)

    def step_hyper(
        self,
        model: nn.Module,
        optimizer: PartitionedOptimizer,
        hyper_optimizer: torch.optim.Optimizer,
        batches: Mapping[int, Any],
        loss: Callable[[Any], Tensor],
        hyper_loss: Callable[[Any], Tensor],
        *,
        weights: Mapping[int, float] | None = None,
        clip: float | None = None,
        backward: Callable[[Tensor], None] = Tensor.backward,
        averaged: Averaged = alone,
    ) -> Tensor:
        options = {"entropy": self.entropy, "weights": weights, "backward": backward}
        return step_hyper(model, hyper_optimizer, batches, hyper_loss, **options)


def check_entropy(entropy: float) -> None:
    """Raise ValueError unless entropy is finite and not negative."""
    if not 0 <= entropy < math.inf:
        raise ValueError(f"entropy={entropy}; pass the weight of the entropy term, 0 or more.")


@contextmanager
def _judging(model: nn.Module) -> Iterator[None]:
    """Set a model to evaluation mode, but let partitioned norms normalise by the batch, as in steps of the weights."""
    norms = [norm for norm in partitioned_norms(model) if norm.training]
    with evaluating(model):
        for norm in norms:
            norm.training = True
        yield


def count_examples(batch: Any, batch_dim: int) -> int:
    """Return the number of examples in a batch.

    Raises:
        ValueError: none of its tensors has this dimension.
    """
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim() > batch_dim:
            return leaf.shape[batch_dim]
    raise ValueError(
        f"a batch has no tensor with a dimension {batch_dim} of examples; collate its examples into tensors."
    )
