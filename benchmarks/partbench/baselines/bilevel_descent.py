"""bilevel: gradient descent of hyperparameters on the validation loss of the weights that result from them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from partbench.baselines.best_response import BestResponse
from partbench.baselines.hypergradients import IMPLICIT, ITERATIVE, Hypergradient, Rule
from partbench.baselines.inner_problem import Inner, Loss, MakeOptimizer, check_floating, check_maker, evaluate
from partbench.baselines.schedules import Schedule
from partnets.utils.checks import check_at_least

METHODS = (*IMPLICIT, *ITERATIVE, "best_response", "fixed")


@dataclass(frozen=True)
class Bilevel:
    """The result of bilevel.

    Attributes:
        weights: the final weights, by name.
        hyper: λ after the last step.
        validation: F in each outer step, before its step of λ.
        values: λ in each outer step, before its step of λ, [steps, n].
        seconds: time from the start to the end of each outer step, without callbacks.
        evaluations: number of gradient evaluations from the start to the end of each outer step.
    """

    weights: dict[str, Tensor]
    hyper: Tensor
    validation: list[float]
    values: Tensor
    seconds: list[float]
    evaluations: list[int]


def bilevel(
    train: Loss,
    validate: Loss,
    weights: Mapping[str, Tensor],
    hyper: Tensor | Schedule,
    *,
    method: str = "conjugate_gradients",
    steps: int,
    inner_steps: int,
    optimizer: MakeOptimizer,
    hyper_optimizer: MakeOptimizer | None = None,
    terms: int = 20,
    alpha: float | None = None,
    damping: float = 0.0,
    restart: bool = False,
    box: tuple[float | Tensor, float | Tensor] | None = None,
    hidden: int = 0,
    seed: int = 0,
    callback: Callable[[int, dict[str, Tensor], Tensor], None] | None = None,
) -> Bilevel:
    """Minimise F(w*(λ), λ) over λ with w*(λ) = argmin_w f(w, λ): the alternatives to self-tuning networks.

    Each outer step takes inner_steps steps of the weights on the training loss f, then one of λ on the validation loss
    F:

    'conjugate_gradients', 'neumann', 'unrolled', 'truncated'   by baselines.hypergradient
    'best_response'     a hypernetwork from λ to the weights learns for all λ in a box, in steps * inner_steps steps
                        before the first step of λ, and F is minimised through it (Lorraine and Duvenaud 2018)
    'fixed'             λ is given: a tensor, or a schedule such as those of baselines.schedules

    Methods ignore the options of other methods, so that all can be called with the same options.

    Cost is counted in gradient evaluations, each a forward and a backward pass. A step of the weights takes one, and
    the gradient of F one. A product with second derivatives takes two: one product for each conjugate gradient, for
    each Neumann term but the first, for each differentiated step, and one with ∂²f/∂w∂λ in implicit differentiation.

    Args:
        train, validate, weights, terms, alpha, damping: as in baselines.hypergradient; see there for minibatches.
        hyper: λ, usually [n], floating point and unconstrained; it is left unchanged. For 'fixed' also a schedule, a
            function from the step of the weights, counted from 0, to λ.
        method: one of the above.
        steps: number of outer steps.
        inner_steps: steps of the weights in each outer step; the hypernetwork takes steps * inner_steps steps in all.
        optimizer: makes the optimiser of the weights or the hypernetwork, as in baselines.hypergradient.
        hyper_optimizer: makes the optimiser of λ; required unless λ is fixed.
        restart: whether each outer step trains from the given weights instead of the last ones; not for
            'best_response' and 'fixed', which train once.
        box: λ's minimum and maximum, numbers or tensors of its shape. 'best_response' requires it; other methods clamp
            λ to it, except 'fixed'.
        hidden: number of hidden units in 'best_response', 0 for a linear map.
        seed: seed of 'best_response', for the sampled λ and its hidden units.
        callback: called in each outer step before the step of λ, with its number, counted from 0, the weights and λ,
            such as to record a test loss.

    Raises:
        ValueError, FloatingPointError, ArithmeticError: as in baselines.hypergradient; or an argument that the method
            requires is missing, or λ or its box is invalid.

    Example:
        >>> x, y = torch.randn(20, 5), torch.randn(20)  # noise: a large penalty is best
        >>> def train(weights, hyper):
        ...     return (x @ weights["w"] - y).square().mean() + (hyper.exp() * weights["w"].square()).sum()
        >>> def validate(weights, hyper):
        ...     return (x @ weights["w"]).square().mean()
        >>> sgd, adam = partial(torch.optim.SGD, lr=0.1), partial(torch.optim.Adam, lr=0.1)
        >>> options = {"steps": 20, "inner_steps": 10, "optimizer": sgd, "hyper_optimizer": adam}
        >>> result = bilevel(train, validate, {"w": torch.zeros(5)}, torch.tensor([-2.0]), **options)
        >>> result.values.shape, len(result.validation), bool(result.hyper > -2)
        (torch.Size([20, 1]), 20, True)
    """
    check_at_least(1, steps=steps, inner_steps=inner_steps)
    check_at_least(0, hidden=hidden)
    if method not in METHODS:
        raise ValueError(f"method={method!r}; pass one of {', '.join(METHODS)}.")
    check_maker("optimizer", optimizer)
    if method != "fixed":
        check_maker("hyper_optimizer", hyper_optimizer)
    if restart and method in ("best_response", "fixed"):
        raise ValueError(f"restart=True; leave it out, as {method!r} trains once.")
    if callable(hyper) and method != "fixed":
        raise ValueError(f"hyper is a schedule, which {method!r} cannot learn; pass a tensor, or method='fixed'.")
    initial = hyper(0) if callable(hyper) else hyper
    check_floating("hyper", initial)
    value = initial.detach().clone()
    if box is not None or method == "best_response":
        box = _tensors(box, value)

    if method == "best_response":
        total = steps * inner_steps
        advance = BestResponse(train, validate, weights, optimizer, box=box, hidden=hidden, seed=seed, steps=total)
    elif method == "fixed":
        inner = Inner(train, weights, optimizer, differentiable=False)
        schedule = hyper if callable(hyper) else lambda step: initial
        advance = partial(_follow, inner, validate, schedule, itertools.count(), inner_steps)
    else:
        rule = Rule(method, inner_steps, terms, alpha, damping)
        inner = Inner(train, weights, optimizer, differentiable=rule.iterative)
        advance = partial(rule, inner, validate)
    outer = hyper_optimizer([value]) if method != "fixed" else None

    validation, values, seconds, evaluations, elapsed = [], [], [], [], 0.0
    for step in range(steps):
        began = time.perf_counter()
        if restart:
            inner.restart()
        found = advance(value)
        elapsed += time.perf_counter() - began
        validation.append(found.validation)
        values.append(value.clone())
        evaluations.append(found.evaluations)
        if callback is not None:
            callback(step, found.weights, values[-1])
        began = time.perf_counter()
        if outer is not None:
            value.grad = found.gradient
            outer.step()
            if box is not None:
                value.clamp_(*box)
        elapsed += time.perf_counter() - began
        seconds.append(elapsed)
    value.grad = None
    return Bilevel(found.weights, value, validation, torch.stack(values), seconds, evaluations)


def _follow(
    inner: Inner, validate: Loss, schedule: Schedule, count: Iterator[int], inner_steps: int, hyper: Tensor
) -> Hypergradient:
    """Take steps of the weights at the schedule's values, which are written into hyper."""
    for step in itertools.islice(count, inner_steps):
        inner.step(hyper.copy_(schedule(step)))
    with torch.no_grad():
        loss = evaluate("validate", validate, inner.weights, hyper)
    return Hypergradient(None, loss.item(), inner.copies(), inner.evaluations)


def _tensors(box: tuple[float | Tensor, float | Tensor] | None, hyper: Tensor) -> tuple[Tensor, Tensor]:
    if box is None or len(box) != 2:
        raise ValueError(f"box={box}; pass (least, greatest) of hyper, within which 'best_response' learns.")
    low, high = (torch.as_tensor(border).to(hyper).expand_as(hyper) for border in box)
    if not ((low < high) & (low <= hyper) & (hyper <= high) & (high - low).isfinite()).all():
        raise ValueError(f"box={box} and hyper={hyper}; pass (least, greatest), finite, with hyper between them.")
    return low, high
