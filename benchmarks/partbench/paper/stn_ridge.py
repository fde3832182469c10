"""The best response of ridge regression: learned around one λ, with σ too small, right and too wide, and for all λ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.distributions.transforms import ExpTransform

import partnets
from partbench.baselines.best_response import BestResponse
from partbench.paper.experiment import Claim, Experiment, Record, Table, lower, registered, select, text
from partnets import hyper, optim, stn

EXAMPLES, FEATURES, NOISE = 60, 20, 3.0
# λ is the logarithm of the decay.
DECAY = hyper.Range(0.0, math.inf, ExpTransform())
SCALES = {"too small": 0.01, "right": 0.3, "too wide": 2.0}
METHODS = {"stn": "STN", "delta": "Δ-STN"}
# One response for all λ in the box, linear or with hidden units (Lorraine and Duvenaud 2018).
HIDDEN = {"linear": 0, "of 16 hidden units": 16}
BOX = (-4.0, 3.0)
# Initial values of λ for tuning, on both sides of the optimum.
STARTS = BOX
STEPS, WARM_UP, QUICK_STEPS = 4000, 500, 400
LR, HYPER_LR = 1e-2, 2e-2
# Half the range of λ in the pictures.
AROUND = 3.0


class Ridge:
    """Noisy data of a linear model, with their solutions in closed form, in float64."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        truth = torch.randn(FEATURES, generator=generator)

        def draw() -> tuple[Tensor, Tensor]:
            x = torch.randn(EXAMPLES, FEATURES, generator=generator)
            return x, x @ truth + NOISE * torch.randn(EXAMPLES, generator=generator)

        self.train, self.validation = draw(), draw()

    def best(self, log_decay: float) -> Tensor:
        """Return w*(λ), which minimises the mean square error plus exp(λ) / 2 ||w||²."""
        x, y = (each.double() for each in self.train)
        hessian = x.T @ x / EXAMPLES + math.exp(log_decay) / 2 * torch.eye(FEATURES, dtype=torch.float64)
        return torch.linalg.solve(hessian, x.T @ y / EXAMPLES)

    def jacobian(self, log_decay: float) -> Tensor:
        """Return dw*/dλ by the implicit function theorem."""
        x = self.train[0].double()
        half = math.exp(log_decay) / 2
        hessian = x.T @ x / EXAMPLES + half * torch.eye(FEATURES, dtype=torch.float64)
        return -half * torch.linalg.solve(hessian, self.best(log_decay))

    def validation_loss(self, weight: Tensor) -> float:
        x, y = (each.double() for each in self.validation)
        return (x @ weight - y).square().mean().item()

    def least(self) -> float:
        """Return the lowest validation loss over all λ."""
        return min(self.validation_loss(self.best(value / 50)) for value in range(-400, 400))


class Response:
    """The learned best response of one problem, with full batches.

    If λ is fixed, each example has a separate perturbation, as in networks. If λ learns, the examples of a batch share
    one: the gradient is then without noise at the optimum, and Δ-STN finds the optimum from λ = -4, where the response
    is a twentieth of the weights.
    """

    def __init__(self, ridge: Ridge, method: str, scale: float, start: float, steps: int, tuned: bool) -> None:
        self.ridge, self.steps, self.tuned = ridge, steps, tuned
        layer = nn.Linear(FEATURES, 1, bias=False)
        self.decay = hyper.WeightDecay(layer, math.exp(start), range=DECAY)
        network = nn.Sequential(layer, self.decay, nn.Flatten(0))
        options = {"scale": scale, "learn_scale": False, "per_example": not tuned}
        stn.convert(network, self.decay, centred=method == "delta", **options)
        self.layer, self.model = network[0], partnets.Ensemble([network], num_partitions=2)
        self.optimizer = optim.Adam(self.model, lr=LR)
        self.hyper_optimizer = torch.optim.Adam([self.decay.decay.raw], lr=HYPER_LR)

    def fit(self) -> None:
        schedulers = [
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)
            for optimizer in ((self.optimizer, self.hyper_optimizer) if self.tuned else (self.optimizer,))
        ]
        for step in range(self.steps):
            stn.step_weights(self.model, self.optimizer, 1, self.ridge.train, self._loss)
            if self.tuned and step >= min(WARM_UP, self.steps // 4):
                stn.step_hyper(self.model, self.hyper_optimizer, {2: self.ridge.validation}, self._loss, entropy=0.0)
            elif self.tuned:
                self.hyper_optimizer.step()  # no gradient yet, but its scheduler expects a step
            for scheduler in schedulers:
                scheduler.step()

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (self.model(batch[0]) - batch[1]).square().mean()

    @property
    def log_decay(self) -> float:
        return self.decay.decay.raw.item()

    @torch.no_grad()
    def at(self, log_decay: float) -> Tensor:
        """Return the weights at a λ."""
        vector = self.layer.vector
        with vector.at(torch.tensor([log_decay])):
            return self.layer.merged("weight", vector.input())[0].double()

    @torch.no_grad()
    def jacobian(self) -> Tensor:
        return (self.layer.weight_scale * self.layer.hyper_weight)[0].double()


class GlobalResponse:
    """The response for all λ in BOX; if λ learns, it then follows the gradient through the learned response."""

    def __init__(self, ridge: Ridge, hidden: int, start: float, steps: int, tuned: bool) -> None:
        def loss(data: tuple[Tensor, Tensor], weights: dict[str, Tensor]) -> Tensor:
            return (data[0] @ weights["weight"] - data[1]).square().mean()

        def train(weights: dict[str, Tensor], hyper: Tensor) -> Tensor:
            return loss(ridge.train, weights) + hyper.exp().sum() / 2 * weights["weight"].square().sum()

        box = torch.tensor([BOX[0]]), torch.tensor([BOX[1]])
        adam = partial(torch.optim.Adam, lr=LR)
        self.map = BestResponse(train, {"weight": torch.zeros(FEATURES)}, adam, box=box, hidden=hidden, seed=0)
        self.validation_loss = lambda weights: loss(ridge.validation, weights)
        self.value, self.steps, self.tuned = torch.tensor([start]), steps, tuned

    def fit(self) -> None:
        self.map.fit(self.steps)
        optimizer = torch.optim.Adam([self.value], lr=HYPER_LR)
        for _ in range(self.steps if self.tuned else 0):
            hyper = self.value.clone().requires_grad_()
            (self.value.grad,) = torch.autograd.grad(self.validation_loss(self.map.weights(hyper)), hyper)
            optimizer.step()
            self.value.clamp_(*BOX)

    @property
    def log_decay(self) -> float:
        return self.value.item()

    @torch.no_grad()
    def at(self, log_decay: float) -> Tensor:
        return self.map.weights(torch.tensor([log_decay]))["weight"].double()

    def jacobian(self) -> Tensor:
        """Return the Jacobian by finite differences."""
        step = 0.05
        return (self.at(self.log_decay + step) - self.at(self.log_decay - step)) / (2 * step)


def error(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


@registered
class StnRidge(Experiment):
    """The response to one weight decay, against the one that is known."""

    name = "stn-ridge"
    paper = "the talk's pictures of the sampling distribution"
    datasets = ("synthetic",)

    def settings(self, dataset: str, seeds: Sequence[int], quick: bool) -> list[Record]:
        """Return the settings, with two problems for each seed."""
        problems = [problem for seed in seeds for problem in (2 * seed, 2 * seed + 1)]
        steps = QUICK_STEPS if quick else STEPS
        common = [{"method": method, "seed": problem, "steps": steps} for method in METHODS for problem in problems]
        still = [{**each, "scale": scale, "start": 0.0, "tuned": False} for each in common for scale in SCALES.values()]
        tuned = [{**each, "scale": 0.3, "start": start, "tuned": True} for each in common for start in STARTS]
        everywhere = [
            {"method": "global", "seed": problem, "steps": steps, "hidden": hidden, "start": start, "tuned": start != 0}
            for hidden in HIDDEN.values()
            for problem in problems
            for start in (0.0, *STARTS)
        ]
        return still + tuned + everywhere

    def train(self, setting: Record, checkpoint: Path) -> Record:
        ridge, rest = Ridge(setting["seed"]), (setting["start"], setting["steps"], setting["tuned"])
        if setting["method"] == "global":
            response = GlobalResponse(ridge, setting["hidden"], *rest)
        else:
            response = Response(ridge, setting["method"], setting["scale"], *rest)
        response.fit()
        end = response.log_decay
        best = ridge.best(end)
        shown = [end + AROUND * i / 20 for i in range(-20, 21)]
        return {
            "log_decay": end,
            "response_error": error(response.at(end), best),
            "jacobian_error": error(response.jacobian(), ridge.jacobian(end)),
            "validation": ridge.validation_loss(best) / ridge.least(),
            "shown": [[value, response.at(value)[0].item(), ridge.best(value)[0].item()] for value in shown],
        }

    def table(self, found: pd.DataFrame) -> Table:
        kinds = [
            ([label, f"{scale:g}, {kind}"], {"method": method, "scale": scale})
            for method, label in METHODS.items()
            for kind, scale in SCALES.items()
        ]
        kinds += [([f"for all λ, {label}", ""], {"method": "global", "hidden": n}) for label, n in HIDDEN.items()]
        rows = []
        for labels, kind in kinds:
            mine, tuned = (select(found, **kind, tuned=tuned) for tuned in (False, True))
            errors = f"{mine.response_error.max():.2g}", text(mine.jacobian_error, 2)
            rows.append([*labels, *errors, f"{tuned.validation.max():.3f}" if len(tuned) else ""])
        errors = "greatest error of the response", "error of its Jacobian"
        return ["", "σ", *errors, "validation loss at the λ that is found, over the least: the greatest"], rows

    def draw(self, found: pd.DataFrame) -> Figure:
        """Plot a weight over λ: the optimum, and the response learned around λ = 0 or for all λ."""
        figure = Figure(figsize=(10, 7), layout="constrained")
        panels = figure.subplots(len(METHODS) + 1, len(SCALES), sharex=True, sharey=True)
        for row, (method, label) in zip(panels, METHODS.items(), strict=False):
            for axes, (kind, scale) in zip(row, SCALES.items(), strict=True):
                _draw_response(axes, select(found, method=method, scale=scale, tuned=False), (-scale, scale))
                axes.set_title(f"{label}, σ = {scale:g}: {kind}", size="small")
        for axes, (label, hidden) in zip(panels[-1], HIDDEN.items(), strict=False):
            _draw_response(axes, select(found, method="global", hidden=hidden, tuned=False), BOX)
            axes.set_title(f"one response for all λ, {label}", size="small")
        for axes in panels[-1][len(HIDDEN) :]:
            axes.set_axis_off()
        for axes in panels[-1]:
            axes.set(xlabel="λ, the logarithm of the decay")
        panels[0][0].legend(fontsize="small")
        return figure

    def claims(self, found: pd.DataFrame) -> list[Claim]:
        claims = []
        for method, label in METHODS.items():
            errors = {scale: select(found, method=method, scale=scale, tuned=False) for scale in SCALES.values()}
            right, most = errors[0.3], 0.001 if method == "delta" else 0.02
            greatest = right.response_error.max()
            claims.append(Claim(f"{label}, σ = 0.3: error below {most:g}", f"{greatest:.2g}", greatest < most))
            greatest = right.jacobian_error.max()
            claims.append(Claim(f"{label}, σ = 0.3: the Jacobian's below 0.2", f"{greatest:.2f}", greatest < 0.2))
            for scale in (0.01, 2.0):
                ratio = errors[scale].jacobian_error.mean() / right.jacobian_error.mean()
                claims.append(Claim(f"{label}: at σ = {scale:g} twice that or more", f"{ratio:.1f} times", ratio >= 2))
            greatest = select(found, method=method, tuned=True).validation.max()
            claims.append(Claim(f"{label}: tuned within 5 % of the best λ", f"{greatest:.3f}", greatest < 1.05))
        local = select(found, method="stn", scale=0.3, tuned=False).response_error
        for label, hidden in HIDDEN.items():
            mine = select(found, method="global", hidden=hidden, tuned=False).response_error
            claims.append(lower(f"STN, σ = 0.3: error below that of one for all λ, {label}", local, mine))
        return claims


def _draw_response(axes: Axes, found: pd.DataFrame, learned: tuple[float, float]) -> None:
    """Plot the response of the first problem, and the range of λ for which it was learned."""
    values, ours, best = zip(*found.iloc[0].shown, strict=True)
    axes.plot(values, best, color="black", label="best response")
    axes.plot(values, ours, color="tab:red", label="learned")
    axes.axvspan(*learned, alpha=0.15)
