"""SGD, Adam and AdamW for one partition at a time, in one pass over the weight (Appendix I.1)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from partkernels.arguments import check_betas, check_momentum, check_not_negative
from partkernels.operators.optimizers import Steps
from partnets.optim.base import Entries, PartitionedOptimizer, decay_of


class SGD(PartitionedOptimizer):
    """Stochastic gradient descent with momentum, for one partition at a time. With C = 1, it equals torch.optim.SGD.

    Args:
        model: a model in which each trainable parameter is partitioned or belongs to a module of partnets.hyper; the
            latter need another optimiser.
        lr: the learning rate. torch's schedulers work; the paper counts the steps of all partitions.
        momentum: the momentum; 0 keeps no state.
        weight_decay: this number times the parameter is added to the gradient. One number, or C numbers, one for each
            partition, as `optim.decays(precision, chunks.sizes)` returns them (Appendix I.1). Norms' scales decay
            towards 0 too, as in torch, in each partition; put them into a group without decay to prevent this.
        nesterov: whether to use Nesterov's momentum; it requires momentum above 0.
        groups: parameters with other settings, as in torch.optim: dicts of "params" and of the arguments that differ,
            such as "lr". All other parameters form the last group. For example, FixUp's scalars at a tenth of the rate:
            `[{"params": [p for m in model.modules() if isinstance(m, (partnets.nn.Bias, partnets.nn.Scale))
            for p in m.parameters()], "lr": lr / 10}]`.

    Raises:
        ValueError: an argument is out of range, a trainable parameter is neither partitioned nor of partnets.hyper, or
            a group has an unknown parameter or setting.

    Example:
        >>> import torch, partnets
        >>> model = partnets.Linear(2, 1, bias=False, proportions=(0.5, 0.5), defaults="zero", seed=0)
        >>> optimizer = SGD(model, lr=1.0)
        >>> _ = nn.init.zeros_(model.weight)
        >>> model.weight.grad = torch.ones(1, 2)
        >>> optimizer.step(update=2)
        >>> model.weight.sum().item()
        -1.0
    """

    unserved = "dampening", "maximize"

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        momentum: float = 0.0,
        weight_decay: float | Sequence[float] = 0.0,
        nesterov: bool = False,
        *,
        groups: Iterable[dict[str, Any]] = (),
    ) -> None:
        super().__init__(model, groups, lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov)

    def add_param_group(self, group: dict[str, Any]) -> None:
        settings = self.defaults | group
        check_momentum(settings["momentum"], settings["nesterov"])  # not in check: a schedule may pass through 0
        super().add_param_group(group)

    def check(self, settings: dict[str, Any]) -> None:
        super().check(settings)
        check_not_negative(momentum=settings["momentum"])

    def moments(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum",) if group["momentum"] else ()

    def step_all(self, entries: Entries, grads: Sequence[Tensor], update: int, group: dict[str, Any]) -> None:
        if entries.steps is None:
            entries.steps = Steps(entries.parameters, entries.moments, entries.partitions, update)
        settings = {name: group[name] for name in ("lr", "momentum")}
        entries.steps(grads, **settings, weight_decay=decay_of(group, update), nesterov=group["nesterov"])

    def torchs(
        self, moments: list[Tensor], state: dict[str, Any], update: int, group: dict[str, Any]
    ) -> tuple[type[torch.optim.Optimizer], dict[str, Any], dict[str, Any]]:
        settings = self.settings_of(group, update)
        return torch.optim.SGD, settings, dict(zip(("momentum_buffer",), moments, strict=False))


class Adam(PartitionedOptimizer):
    """Adam (Kingma and Ba 2015), for one partition at a time. With C = 1, it equals torch.optim.Adam.

    Args:
        model, lr, weight_decay, groups: as for SGD.
        betas: the decay rates of the two moments, in [0, 1).
        eps: the number added to the denominator.

    Raises:
        ValueError: as for SGD.

    Example:
        >>> import torch, partnets
        >>> model = partnets.Linear(4, 3, proportions=(0.5, 0.5), seed=0)
        >>> optimizer = Adam(model, lr=1e-2)
        >>> with partnets.subnetwork(model, active=1, update=1):
        ...     model(torch.ones(2, 4)).sum().backward()
        >>> optimizer.step(update=1)
        >>> optimizer.state[model.weight]["step"]
        tensor([1, 0])
    """

    unserved = "amsgrad", "maximize", "decoupled_weight_decay"
    decoupled = False

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | Sequence[float] = 0.0,
        *,
        groups: Iterable[dict[str, Any]] = (),
    ) -> None:
        super().__init__(model, groups, lr=lr, weight_decay=weight_decay, betas=tuple(betas), eps=eps)

    def check(self, settings: dict[str, Any]) -> None:
        super().check(settings)
        check_betas(settings["betas"])
        check_not_negative(eps=settings["eps"])

    def moments(self, group: dict[str, Any]) -> tuple[str, ...]:
        return "exp_avg", "exp_avg_sq"

    def new_steps(self, parameter: nn.Parameter, group: dict[str, Any]) -> Tensor:
        return torch.zeros(self.num_partitions, dtype=torch.int64, device=parameter.device)

    def _started(self, state, parameter, group):
        state = super()._started(state, parameter, group)
        state["step"] = state["step"].to(parameter.device)  # torch loads it where it was saved
        return state

    def step_all(self, entries: Entries, grads: Sequence[Tensor], update: int, group: dict[str, Any]) -> None:
        if entries.steps is None:
            counters = [state["step"] for state in entries.states]
            entries.steps = Steps(entries.parameters, entries.moments, entries.partitions, update, counters)
        beta1, beta2 = group["betas"]
        numbers = {"lr": group["lr"], "beta1": beta1, "beta2": beta2, "eps": group["eps"]}
        entries.steps(grads, **numbers, weight_decay=decay_of(group, update), decoupled=self.decoupled)

    def torchs(
        self, moments: list[Tensor], state: dict[str, Any], update: int, group: dict[str, Any]
    ) -> tuple[type[torch.optim.Optimizer], dict[str, Any], dict[str, Any]]:
        optimizer = torch.optim.AdamW if self.decoupled else torch.optim.Adam
        step = state["step"][update - 1].double().cpu()
        moments = dict(zip(self.moments(group), moments, strict=True))
        return optimizer, self.settings_of(group, update), {"step": step, **moments}


class AdamW(Adam):
    """AdamW (Loshchilov and Hutter 2019), for one partition at a time. With C = 1, it equals torch.optim.AdamW.

    Args:
        model, lr, betas, eps, groups: as for Adam.
        weight_decay: a step multiplies the partition by 1 - lr * weight_decay. One number, or C numbers, one for each
            partition.

    Raises:
        ValueError: as for SGD.

    Example:
        >>> import torch, partnets
        >>> model = partnets.Linear(4, 3, bias=False, proportions=(0.5, 0.5), seed=0)
        >>> before = model.weight.detach().clone()
        >>> model.weight.grad = torch.full((3, 4), 1e-20)
        >>> AdamW(model, lr=0.1, weight_decay=(0.0, 5.0)).step(update=2)
        >>> mask = partnets.partitions(model)["weight"].mask(2)
        >>> torch.allclose(model.weight, torch.where(mask, before / 2, before))
        True
    """

    unserved = "amsgrad", "maximize"
    decoupled = True

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | Sequence[float] = 1e-2,
        *,
        groups: Iterable[dict[str, Any]] = (),
    ) -> None:
        super().__init__(model, lr, betas, eps, weight_decay, groups=groups)
