"""hypergradient: dF/dλ of a validation loss F through weights that learn from a training loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from partbench.baselines.inner_problem import (
    Inner,
    Loss,
    MakeOptimizer,
    check_floating,
    check_maker,
    evaluate,
    flat,
    raise_independent,
)
from partnets.utils.checks import check_at_least
from partnets.utils.solvers import conjugate_gradients, neumann

IMPLICIT = ("conjugate_gradients", "neumann")
ITERATIVE = ("unrolled", "truncated")


@dataclass(frozen=True)
class Hypergradient:
    """The result of hypergradient.

    Attributes:
        gradient: dF/dλ, of hyper's shape; None if λ is fixed.
        validation: F at the weights below.
        weights: the weights after the inner steps.
        evaluations: number of gradient evaluations, counted as in baselines.bilevel.
    """

    gradient: Tensor | None
    validation: float
    weights: dict[str, Tensor]
    evaluations: int


def hypergradient(
    train: Loss,
    validate: Loss,
    weights: Mapping[str, Tensor],
    hyper: Tensor,
    *,
    method: str = "conjugate_gradients",
    inner_steps: int = 0,
    optimizer: MakeOptimizer | None = None,
    terms: int = 20,
    alpha: float | None = None,
    damping: float = 0.0,
) -> Hypergradient:
    """Compute dF/dλ = ∂F/∂λ + (dw/dλ)ᵀ ∂F/∂w, after inner_steps steps of the weights.

    Implicit differentiation assumes that the weights are w*(λ) = argmin_w f(w, λ), where dw/dλ = -H⁻¹ ∂²f/∂w∂λ with
    f's Hessian H. 'conjugate_gradients' solves with H (Pedregosa 2016); 'neumann' uses H⁻¹ ≈ α Σ_{j<K} (I - αH)ʲ
    (Lorraine, Vicol and Duvenaud 2020). Iterative differentiation backpropagates through the steps of the optimiser:
    'unrolled' through all (Maclaurin et al. 2015), 'truncated' through the last K (Shaban et al. 2019). At w*, the last
    K steps of gradient descent with learning rate α give the same result as K Neumann terms.

    The functions train and validate may draw minibatches. Each inner step calls train once. Implicit differentiation
    calls train and validate once more each, and all its Hessian-vector products use that batch and its random numbers.

    f must be twice differentiable. cuDNN's recurrent networks and fused attention are not;
    torch.backends.cudnn.flags(enabled=False) disables the first.

    Args:
        train, validate: functions of (weights, hyper) that return the scalars f and F.
        weights: the initial weights, floating-point tensors by name; they are left unchanged.
        hyper: λ, usually [n], floating point and unconstrained.
        method: 'conjugate_gradients', 'neumann', 'unrolled' or 'truncated'.
        inner_steps: number of steps of the weights before; at least 1 if iterative.
        optimizer: required for steps: a function that makes a torch.optim optimiser of parameters and, if the method is
            iterative, differentiable=True, such as functools.partial(torch.optim.SGD, lr=0.1). SGD, Adam, AdamW and
            RMSprop are known to have the right derivatives.
        terms: K, at least 1: the number of Neumann terms or differentiated steps, or the limit of conjugate gradients.
        alpha: α of 'neumann', below 2 / H's largest eigenvalue.
        damping: added to H's diagonal in implicit differentiation.

    Raises:
        ValueError: the method is unknown; a number is too low or missing; a loss is not a scalar or does not depend on
            its arguments.
        FloatingPointError: a loss or the result is NaN or infinite.
        ArithmeticError: H has negative curvature, or the Neumann series grows.

    Example:
        >>> import functools
        >>> x, y = torch.randn(9, 2), torch.randn(9)
        >>> def train(weights, hyper):
        ...     return (x @ weights["w"] - y).square().mean() + (hyper.exp() * weights["w"].square()).sum()
        >>> def validate(weights, hyper):
        ...     return (x @ weights["w"] - 1).square().mean()
        >>> sgd = functools.partial(torch.optim.SGD, lr=0.1)
        >>> found = hypergradient(train, validate, {"w": torch.zeros(2)}, torch.zeros(2), inner_steps=50, optimizer=sgd)
        >>> found.gradient.shape
        torch.Size([2])
    """
    rule = Rule(method, inner_steps, terms, alpha, damping)
    if inner_steps:
        check_maker("optimizer", optimizer)
    return rule(Inner(train, weights, optimizer, differentiable=rule.iterative), validate, hyper)


@dataclass(frozen=True)
class Rule:
    """The checked options of a method of differentiation."""

    method: str
    inner_steps: int
    terms: int
    alpha: float | None
    damping: float

    @property
    def iterative(self) -> bool:
        return self.method in ITERATIVE

    @property
    def tracked(self) -> int:
        """The number of inner steps that autograd records."""
        return {"unrolled": self.inner_steps, "truncated": min(self.terms, self.inner_steps)}.get(self.method, 0)

    def __post_init__(self) -> None:
        if self.method not in IMPLICIT + ITERATIVE:
            raise ValueError(f"method={self.method!r}; pass one of {', '.join(IMPLICIT + ITERATIVE)}.")
        check_at_least(int(self.iterative), inner_steps=self.inner_steps)
        check_at_least(1, terms=self.terms)
        if self.method == "neumann" and not (self.alpha is not None and self.alpha > 0):
            raise ValueError(
                f"alpha={self.alpha}; pass 'neumann' the series' step, above 0 and below 2 / the Hessian's largest"
                " eigenvalue, such as a learning rate with which gradient descent converges."
            )
        if not self.damping >= 0:
            raise ValueError(f"damping={self.damping}; pass a number of at least 0.")

    def __call__(self, inner: Inner, validate: Loss, hyper: Tensor) -> Hypergradient:
        check_floating("hyper", hyper)
        hyper = hyper.detach().clone().requires_grad_()
        for _ in range(self.inner_steps - self.tracked):
            inner.step(hyper.detach())
        for step in range(self.tracked):
            inner.step(hyper, track=True, check=step == 0)
        find = _iterative if self.iterative else _implicit
        gradient, loss = find(self, inner, validate, hyper)
        if not gradient.isfinite().all():
            raise FloatingPointError(
                f"the hypergradient by {self.method!r} is {gradient}. Look for square roots of 0, as in Adam after a"
                " gradient of 0 (a larger eps, or SGD), and for a learning rate or alpha that is too high."
            )
        return Hypergradient(gradient, loss, inner.copies(), inner.evaluations)


def _iterative(rule: Rule, inner: Inner, validate: Loss, hyper: Tensor) -> tuple[Tensor, float]:
    loss, _, gradient = _validation(validate, inner.weights, hyper)
    if gradient is None:
        raise_independent()
    # The backward pass takes a Hessian-vector product for each recorded step, and validate's gradient.
    inner.evaluations += 2 * rule.tracked + 1
    inner.detach()
    return gradient, loss.item()


def _implicit(rule: Rule, inner: Inner, validate: Loss, hyper: Tensor) -> tuple[Tensor, float]:
    weights = {name: weight.clone().requires_grad_() for name, weight in inner.weights.items()}
    leaves = list(weights.values())
    gradient = flat(inner.gradient(weights, hyper, create_graph=True, check=True))
    if not gradient.requires_grad:
        raise_independent()
    loss, by_weights, direct = _validation(validate, weights, hyper)

    def product(vector: Tensor) -> Tensor:
        inner.evaluations += 2
        products = torch.autograd.grad(gradient, leaves, vector, retain_graph=True, materialize_grads=True)
        return flat(products) + rule.damping * vector

    right = flat(by_weights)
    if rule.method == "neumann":
        solution = neumann(product, right, rule.terms, rule.alpha)
    else:
        solution = conjugate_gradients(product, right, rule.terms)
    (mixed,) = torch.autograd.grad(gradient, hyper, solution, allow_unused=True)
    if mixed is None:
        raise_independent()
    inner.evaluations += 3  # validate's gradient, and the product with mixed derivatives
    return -mixed if direct is None else direct - mixed, loss.item()


def _validation(
    validate: Loss, weights: dict[str, Tensor], hyper: Tensor
) -> tuple[Tensor, list[Tensor], Tensor | None]:
    """Return F, its gradient by each weight, and that by hyper, or None if F does not depend on hyper."""
    loss = evaluate("validate", validate, weights, hyper)
    *by_weights, by_hyper = torch.autograd.grad(loss, [*weights.values(), hyper], allow_unused=True)
    if all(gradient is None for gradient in by_weights):
        raise ValueError("validate(weights, hyper) does not depend on the weights; compute it from this argument.")
    pairs = zip(weights.values(), by_weights, strict=True)
    return loss, [torch.zeros_like(weight) if by is None else by for weight, by in pairs], by_hyper
