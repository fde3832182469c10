"""Hypergradients: Strategy, with Lookahead and Implicit for ψ that acts only on training, and step_lookahead."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from partnets.hyper import Hyperparameter, penalties
from partnets.optim.base import PartitionedOptimizer, check_partitioned
from partnets.subnetworks.statistics import outdate_statistics
from partnets.training import step
from partnets.training.step import (
    check_clip,
    check_reached,
    checked_weights,
    hyper_learning,
    parameters_of,
    training_only,
)
from partnets.training.unrolled import (
    Averaged,
    InnerSteps,
    accumulated,
    added,
    alone,
    check_all_finite,
    leaving_nothing,
)
from partnets.utils.checks import check_at_least
from partnets.utils.modules import evaluating, modules_of
from partnets.utils.solvers import conjugate_gradients, neumann

METHODS = ("neumann", "conjugate_gradients")


@dataclass(frozen=True)
class Lookahead:
    """The unrolled hypergradient of ψ, through steps of the weights that depend on it.

    It is the gradient with respect to ψ of loss(D_k; w'), with w' the weights after steps of partition k - 1 on batches
    of D_1:k-1, by the optimiser that trains them, with its current moments. These steps are undone.

    Args:
        steps: the number of steps of the weights, each on another batch.
        exact: whether to use autograd's second derivatives, which keep the graph of each step. Otherwise the finite
            difference of two gradients for each step (DARTS, Liu et al. 2019) takes less memory, and less time if there
            is more than one step.

    Raises:
        ValueError: steps is below 1.

    Example:
        >>> Lookahead(steps=3, exact=False)
        Lookahead(steps=3, exact=False)
    """

    steps: int = 1
    exact: bool = True

    def __post_init__(self) -> None:
        check_at_least(1, steps=self.steps)

    def gradients(
        self, inner: InnerSteps, batches: Sequence[Any], judged: Callable[..., Any]
    ) -> tuple[Tensor, list[Any], list[Any]]:
        for batch in batches:
            inner.step(batch)
        value, by_weights, direct = judged()
        return value, inner.back(by_weights), direct


@dataclass(frozen=True)
class Implicit:
    """The hypergradient of ψ through the minimum of the training loss, by the implicit function theorem.

    It is the gradient through w*(ψ), the minimum of the training loss on a batch of D_1:k-1 over the entries of
    partition k - 1, as if the current weights were this minimum. It is accurate near the end of a training and for
    slowly changing ψ. It requires products with the Hessian, with one pass for each.

    Args:
        method: 'neumann' uses H⁻¹ ≈ alpha Σ_{j<terms} (I - alpha H)ʲ, a lookahead of `terms` steps of gradient descent
            (Lorraine, Vicol and Duvenaud 2020); 'conjugate_gradients' solves the equation if H is positive definite
            (Pedregosa 2016).
        terms: the number of terms of the series, or the largest number of products.
        alpha: for 'neumann': above 0 and below 2 / the Hessian's largest eigenvalue.
        damping: added to the diagonal of H; above minus its lowest eigenvalue.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> Implicit("conjugate_gradients", terms=5, damping=0.1)
        Implicit(method='conjugate_gradients', terms=5, alpha=0.01, damping=0.1)
    """

    method: str = "neumann"
    terms: int = 10
    alpha: float = 0.01
    damping: float = 0.0

    steps = 1
    exact = True

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method={self.method!r}; pass one of {', '.join(METHODS)}.")
        check_at_least(1, terms=self.terms)
        if not self.alpha > 0 or not self.damping >= 0:
            raise ValueError(
                f"alpha={self.alpha}, damping={self.damping}; pass an alpha above 0, and a damping of at least 0."
            )

    def gradients(
        self, inner: InnerSteps, batches: Sequence[Any], judged: Callable[..., Any]
    ) -> tuple[Tensor, list[Any], list[Any]]:
        value, by_weights, direct = judged()
        if self.method == "neumann":
            solve = functools.partial(neumann, terms=self.terms, alpha=self.alpha)
        else:
            solve = functools.partial(conjugate_gradients, most=self.terms)
        return value, inner.solved(batches[0], by_weights, solve, self.damping), direct


Technique = Lookahead | Implicit
# How ψ learns: one technique for all modules, or one for each module; the keys are Hyperparameters.
Choice = str | Technique | Mapping[Any, str | Technique]
# By name, with default settings; "direct" is None: only through the forward pass.
TECHNIQUES: dict[str, Technique | None] = {"direct": None, "lookahead": Lookahead(), "implicit": Implicit()}


@dataclass(frozen=True)
class Strategy:
    """The rule by which ψ learns, for trainers and integrations.

    Attributes:
        chosen: for each module of ψ, a Lookahead or an Implicit; None if it learns directly.

    Example:
        >>> from partnets import hyper
        >>> Strategy.of([hyper.InputMask(4)], None).seen, Strategy.of([hyper.LabelSmoothing(0.1)], None).seen
        (0, 1)
    """

    chosen: Mapping[Hyperparameter, Technique | None]

    @classmethod
    def of(cls, hyper: Iterable[Hyperparameter], given: Choice | None) -> Strategy:
        """Return the strategy of modules: as given, or by the attribute `hyper_gradient` of their classes.

        Raises:
            ValueError: a value is not a technique, or is given for a module that is not in hyper.
        """
        hyper = list(hyper)
        chosen = {} if given is None else given
        if not isinstance(chosen, Mapping):
            return cls(dict.fromkeys(hyper, _technique(given)))
        if strange := [one for one in chosen if one not in hyper]:
            shown = f"a {type(strange[0]).__name__}" if isinstance(strange[0], nn.Module) else repr(strange[0])
            raise ValueError(f"hyper_gradient has {shown}, which is not in hyper; pass only modules in hyper.")
        return cls({one: _technique(chosen.get(one, one.hyper_gradient)) for one in hyper})

    @classmethod
    def of_parameters(cls, model: nn.Module, learning: Sequence[nn.Parameter], given: Any) -> Strategy:
        """Return the strategy of the modules in `given`, and of the outermost modules with the other parameters."""
        found = list(given) if isinstance(given, Mapping) else []
        inside = set(modules_of(model))
        if strange := [type(one).__name__ for one in found if one not in inside]:
            raise ValueError(
                f"hyper_gradient has a {strange[0]}, which is not in the model; pass modules of the model."
            )
        known = {parameter for module in found for parameter in module.parameters()}
        rest, inner = set(learning) - known, set()
        for module in model.modules():
            if isinstance(module, Hyperparameter) and module not in inner and rest & set(module.parameters()):
                inner.update(module.modules())
                found.append(module)
        return cls.of(dict.fromkeys(found), given)

    @property
    def seen(self) -> int:
        """Return the number of batches of D_1:k-1 that a step of ψ needs for each of D_k; 0 if all of ψ is direct."""
        return max((one.steps for one in self.chosen.values() if one is not None), default=0)

    def step_weights(
        self, model: nn.Module, optimizer: PartitionedOptimizer, *arguments: Any, **options: Any
    ) -> Tensor:
        """Take a step of w_k, as partnets.step_weights does."""
        return step.step_weights(model, optimizer, *arguments, **options)

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
        """Take a step of ψ: partnets.step_lookahead with (unseen, seen) batches if `seen`, otherwise step_hyper."""
        if not self.seen:
            return step.step_hyper(model, hyper_optimizer, batches, hyper_loss, weights=weights, backward=backward)
        options = {"by": self.chosen, "weights": weights, "clip": clip, "averaged": averaged}
        return step_lookahead(model, optimizer, hyper_optimizer, batches, loss, hyper_loss, **options)


def _technique(given: Any) -> Technique | None:
    """Return the Technique for a name, or the given Technique; None for 'direct'."""
    if given is None or isinstance(given, Technique):
        return given
    if not isinstance(given, str) or given not in TECHNIQUES:
        raise ValueError(
            f"hyper_gradient={given!r}; pass 'direct', 'lookahead', 'implicit', a partnets.Lookahead or Implicit, or a"
            " dict from hyperparameter modules to these."
        )
    return TECHNIQUES[given]


def step_lookahead(
    model: nn.Module,
    optimizer: PartitionedOptimizer,
    hyper_optimizer: torch.optim.Optimizer,
    batches: Mapping[int, tuple[Any, Sequence[Any]]],
    loss: Callable[[Any], Tensor],
    hyper_loss: Callable[[Any], Tensor],
    *,
    by: Choice | None = None,
    weights: Mapping[int, float] | None = None,
    clip: float | None = None,
    averaged: Averaged = alone,
) -> Tensor:
    """Take one step of ψ that may act on training, on chunks that the subnetworks have not seen.

    It extends partnets.step_hyper by gradients through the weights: see Lookahead and Implicit. Modules that learn so
    are in evaluation mode for unseen data. The weights, the optimiser, running statistics and per-subnetwork buffers
    are restored.

    Args:
        model: a partitioned model with ψ inside.
        optimizer: an optimiser of partnets.optim of this model.
        hyper_optimizer: an optimizer of torch.optim of ψ.
        batches: {k: (a batch of D_k, batches of D_1:k-1)} with k from 2 on, and one batch of D_1:k-1 for each step to
            look ahead; each may be data.Parts.
        loss: loss(batch), as for partnets.step_weights, a mean; the terms of hyper.Penalty modules are added.
        hyper_loss: loss(batch) of unseen data, without terms that only regularise.
        by: 'direct', 'lookahead', 'implicit', a Lookahead or an Implicit, for all of ψ; or a dict from modules with
            parameters in hyper_optimizer to these. None uses the settings of the modules' classes.
        weights: the weight of each chunk's loss, by k; equal weights with a sum of 1 if None.
        clip: as for partnets.step_weights; the steps ahead are clipped too.
        averaged: partnets.distributed.ranks.averaged if each rank has a part of the batches; the losses must then use
            the model without DDP.

    Returns:
        The sum of the weighted losses over all ranks, detached, at the current weights if some of ψ learns directly,
        otherwise at the weights after the steps.

    Raises:
        ValueError: a k is out of range or has a wrong number of batches, `by` is invalid, a parameter of ψ is not in
            the model, the weights are sharded, or finite differences are requested but a loss detaches weights; ψ has
            not been stepped.
        FloatingPointError: a loss or ψ's gradient is not finite.
        RuntimeError: a parameter of hyper_optimizer affects neither loss, such as one that draws from a distribution
            without a gradient; ψ has not been stepped. Or autograd has no second derivative of an operator: pass
            Lookahead(exact=False).
        ArithmeticError: in Implicit's methods, the curvature is negative or the series grows.

    Example:
        >>> import partnets
        >>> from partnets import hyper
        >>> layer = nn.Linear(4, 2)
        >>> model = nn.Sequential(layer, decay := hyper.WeightDecay(layer, 0.1))
        >>> model = partnets.partition(model, (0.8, 0.2))
        >>> optimizer = partnets.optim.SGD(model, lr=0.1)
        >>> hyper_optimizer = torch.optim.Adam(decay.parameters(), lr=0.1)
        >>> x, y = torch.randn(3, 4), torch.tensor([0, 1, 1])
        >>> def loss(batch):
        ...     return nn.functional.cross_entropy(model(batch[0]), batch[1])
        >>> value = step_lookahead(model, optimizer, hyper_optimizer, {2: ((x, y), [(x, y)])}, loss, loss)
        >>> decay.values()["decay"] != 0.1
        True
    """
    check_partitioned(optimizer)
    check_clip(clip)
    weights = checked_weights(model, hyper_optimizer, batches, weights)
    learning = parameters_of(hyper_optimizer)
    strategy = Strategy.of_parameters(model, learning, by)
    chosen = strategy.chosen
    for module, one in chosen.items():
        if one is not None and not one.exact and module.detaches:
            raise ValueError(
                f"{type(module).__name__} detaches the values that it computes weights from, which finite differences"
                " would ignore; pass Lookahead(exact=True) for it."
            )
    # ψ by technique; a parameter of two modules belongs to the first one.
    own, left = defaultdict(list), {parameter: None for parameter in learning if parameter.requires_grad}
    for module, one in chosen.items():
        if one is not None:
            own[one] += [parameter for parameter in module.parameters() if parameter in left]
            left = {parameter: None for parameter in left if parameter not in set(module.parameters())}
    off = [module for module, one in chosen.items() if one is not None]
    off += [module for module in training_only(model) if module not in chosen]
    hyper_optimizer.zero_grad()
    values = []
    for k, (unseen, seen) in batches.items():
        if len(seen) != strategy.seen:
            raise ValueError(f"there are {len(seen)} batches of D_1:{k - 1}, but {strategy.seen} steps to look ahead.")
        found: dict[nn.Parameter, Tensor] = {}
        losses = []
        if left or not own:
            with hyper_learning(model, k), penalties(), evaluating(*off):
                value, gradients = accumulated(hyper_loss, unseen, list(left))
                losses.append(check_all_finite(value, averaged, "a step of ψ"))
            found |= zip(left, gradients, strict=True)
        with leaving_nothing(model):
            for one, psi in own.items():
                inner = InnerSteps(model, optimizer, k - 1, loss, psi, one.exact, clip, averaged)
                judged = functools.partial(inner.judged, unseen, hyper_loss, psi, off)
                value, through, of_forward = one.gradients(inner, seen[: one.steps], judged)
                losses.append(check_all_finite(value, averaged, "a step of ψ"))
                found |= zip(psi, added(through, of_forward), strict=True)
        values.append(weights[k] * losses[0])
        for parameter, gradient in zip(learning, averaged([found.get(one) for one in learning], learning), strict=True):
            if gradient is not None:
                gradient = weights[k] * gradient
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
    check_reached(model, learning)
    _check_gradients(model, learning)
    hyper_optimizer.step()
    outdate_statistics(model)
    return sum(values)


def _check_gradients(model: nn.Module, learning: Sequence[nn.Parameter]) -> None:
    """Raise FloatingPointError, naming them, if gradients of ψ are not finite."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    wrong = [names[p] for p in learning if p.grad is not None and not p.grad.isfinite().all()]
    if wrong:
        raise FloatingPointError(
            f"the gradient of {', '.join(wrong)} through the steps ahead is not finite; ψ has not been stepped. Look"
            " for roots of 0 and divisions by 0 in the loss, which have no finite second derivative."
        )
