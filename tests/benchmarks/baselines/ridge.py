"""Ridge regression with penalties exp(λ), which has a closed-form best response and hypergradient."""

from functools import partial

import torch


class Ridge:
    """The losses f(w, λ) = |Xw - y|² / 2n + Σ exp(λᵢ) wᵢ² / 2 and F(w) = |X'w - y'|² / 2n' on other examples.

    All numbers are float64. λ has one penalty for all features, or one for each.
    """

    def __init__(self, seed=0, n=60, d=20):
        generator = torch.Generator().manual_seed(seed)
        draw = partial(torch.randn, generator=generator, dtype=torch.float64)
        self.d, truth = d, draw(d) / d**0.5
        self.x, self.x_validation = draw(n, d), draw(n, d)
        self.y, self.y_validation = (x @ truth + 1.5 * draw(n) for x in (self.x, self.x_validation))
        self.start = {"w": draw(d)}

    def train(self, weights, hyper):
        fit = (self.x @ weights["w"] - self.y).square().mean() / 2
        return fit + (hyper.exp() * weights["w"].square()).sum() / 2

    def validate(self, weights, hyper):
        return (self.x_validation @ weights["w"] - self.y_validation).square().mean() / 2

    def hessian(self, hyper):
        return self.x.T @ self.x / len(self.x) + torch.diag(hyper.exp().expand(self.d))

    def best(self, hyper):
        return {"w": torch.linalg.solve(self.hessian(hyper), self.x.T @ self.y / len(self.x))}

    def reached(self, hyper):
        """Return F(λ, w*(λ))."""
        return self.validate(self.best(hyper), hyper).item()

    def gradient(self, hyper):
        """Return dF/dλ = -(∂²f/∂λ∂w) H⁻¹ ∂F/∂w."""
        w = self.best(hyper)["w"]
        by_w = self.x_validation.T @ (self.x_validation @ w - self.y_validation) / len(self.x_validation)
        by_feature = -hyper.exp() * w * torch.linalg.solve(self.hessian(hyper), by_w)
        return by_feature if len(hyper) > 1 else by_feature.sum().reshape(1)
