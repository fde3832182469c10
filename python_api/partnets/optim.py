"""SGD, Adam and AdamW that step one partition at a time, with moments and step counts for each (Appendix I.1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from partkernels import Partition, adam_step, sgd_step
from partkernels.optimizers import check_betas, check_momentum, check_not_negative
from partnets.hyper import hyperparameters
from partnets.partitioned import Partitioned, count, partitioned_layers


class PartitionedOptimizer(torch.optim.Optimizer):
    """What the optimisers share. A subclass defines moments and step_entries.

    Each entry of a parameter has one owner, so the state is one tensor like the parameter for each moment. A step
    changes entries of one partition, in the parameter and in its state; all others keep their bits.
    """

    def __init__(self, model: nn.Module, *, lr: float, weight_decay: float | Sequence[float], **defaults) -> None:
        check_not_negative(lr=lr)
        self.count = count(model)
        decays = tuple(weight_decay) if isinstance(weight_decay, Sequence) else (weight_decay,) * self.count
        if len(decays) != self.count or not all(decay >= 0 for decay in decays):
            raise ValueError(
                f"weight_decay={weight_decay}; pass a number that is not negative, or {self.count} of them, one for"
                " each partition."
            )
        self._owners = _owners(model)
        super().__init__(list(self._owners), {"lr": lr, "weight_decay": decays, **defaults})

    def parameters(self) -> list[nn.Parameter]:
        """All parameters that this optimiser updates."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    @torch.no_grad()
    def step(self, update: int) -> None:
        """Updates the entries of one partition; parameters without a gradient are left out.

        Args:
            update: the partition, 1..C.

        Raises:
            ValueError: update is out of range.
        """
        if isinstance(update, bool) or not isinstance(update, int) or not 1 <= update <= self.count:
            raise ValueError(
                f"update={update!r}, but there are {self.count} partitions; pass an int in 1..{self.count}."
            )
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                moments = self.moments(group)
                for moment in moments:
                    if moment not in state:
                        state[moment] = torch.zeros_like(parameter)
                tensors = [parameter, parameter.grad, *(state[moment] for moment in moments)]
                layer, name = self._owners[parameter]
                if name != "weight" and self.count > 1:  # the rows of a bias are its partitions
                    tensors = [tensor[update - 1] for tensor in tensors]
                self.step_entries(tensors, state, layer.partition if name == "weight" else None, update, group)

    def moments(self, group: dict) -> tuple[str, ...]:
        """The names in the state of those tensors that are like the parameter."""
        raise NotImplementedError

    def step_entries(
        self, tensors: list[Tensor], state: dict, partition: Partition | None, update: int, group: dict
    ) -> None:
        """Steps one partition of a parameter.

        Args:
            tensors: the parameter, its gradient and its moments; if there is no partition, all of their entries are
                to be stepped.
        """
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict) -> None:
        """As torch.optim.Optimizer's; the state must be of the same model.

        Raises:
            ValueError: parameters, their shapes or the number of partitions differ; nothing has changed then.
        """
        parameters = self.parameters()
        saved = sum(len(group["params"]) for group in state_dict["param_groups"])
        if saved != len(parameters):
            raise ValueError(
                f"the saved optimiser has {saved} parameters and this one {len(parameters)}; load the state of an"
                " optimiser of the same model."
            )
        for index, state in state_dict["state"].items():
            for name, value in state.items():
                expected = (self.count,) if name == "step" else tuple(parameters[index].shape)
                if tuple(value.shape) != expected:
                    raise ValueError(
                        f"the saved {name} of parameter {index} has shape {tuple(value.shape)} instead of {expected};"
                        " load the state of an optimiser of the same model."
                    )
        super().load_state_dict(state_dict)


class SGD(PartitionedOptimizer):
    """Stochastic gradient descent with momentum, a partition at a time. With C = 1, torch.optim.SGD.

    Args:
        model: all its trainable parameters must be those of partitioned layers or of partnets.hyper's modules; the
            latter have an optimiser of their own.
        lr: the learning rate. torch's schedulers work; the paper counts every step of any partition.
        momentum: 0 keeps no state.
        weight_decay: added to the gradient, times the parameter. One number, or C, one for each partition: for a
            Gaussian prior of precision lambda, lambda divided by the number of examples in D_1:k (Appendix I.1):
            `[precision / sum(chunks.sizes[:k]) for k in range(1, chunks.count + 1)]`.
        nesterov: Nesterov's momentum; needs one.

    Raises:
        ValueError: an argument is out of range, or a trainable parameter is none of the above.

    Example:
        >>> import partnets
        >>> model = partnets.Linear(2, 1, bias=False, proportions=(0.5, 0.5), defaults="zero", seed=0)
        >>> optimizer = SGD(model, lr=1.0)
        >>> _ = nn.init.zeros_(model.weight)
        >>> model.weight.grad = torch.ones(1, 2)
        >>> optimizer.step(update=2)
        >>> model.weight.sum().item()
        -1.0
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        momentum: float = 0.0,
        weight_decay: float | Sequence[float] = 0.0,
        nesterov: bool = False,
    ) -> None:
        check_momentum(momentum, nesterov)
        super().__init__(model, lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov)

    def moments(self, group):
        return ("momentum",) if group["momentum"] else ()

    def step_entries(self, tensors, state, partition, update, group):
        parameter, grad, *buffer = tensors
        sgd_step(
            parameter,
            grad,
            buffer[0] if buffer else None,
            partition,
            update,
            lr=group["lr"],
            momentum=group["momentum"],
            weight_decay=group["weight_decay"][update - 1],
            nesterov=group["nesterov"],
        )


class Adam(PartitionedOptimizer):
    """Adam (Kingma and Ba 2015), a partition at a time. With C = 1, torch.optim.Adam.

    Args:
        model, lr, weight_decay: as for SGD; weight_decay is added to the gradient.
        betas: of the two moments, in [0, 1).
        eps: added to the denominator.

    Raises:
        ValueError: an argument is out of range, or a trainable parameter belongs to no partitioned layer.

    Example:
        >>> import partnets
        >>> model = partnets.Linear(4, 3, proportions=(0.5, 0.5), seed=0)
        >>> optimizer = Adam(model, lr=1e-2)
        >>> with partnets.subnetwork(model, active=1, update=1):
        ...     model(torch.ones(2, 4)).sum().backward()
        >>> optimizer.step(update=1)
        >>> optimizer.state[model.weight]["step"]
        tensor([1, 0])
    """

    decoupled = False

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | Sequence[float] = 0.0,
    ) -> None:
        check_betas(betas)
        check_not_negative(eps=eps)
        super().__init__(model, lr=lr, weight_decay=weight_decay, betas=tuple(betas), eps=eps)

    def moments(self, group):
        return "exp_avg", "exp_avg_sq"

    def step_entries(self, tensors, state, partition, update, group):
        if "step" not in state:
            state["step"] = torch.zeros(self.count, dtype=torch.int64)
        step = state["step"].tolist()[update - 1] + 1
        adam_step(
            *tensors,
            partition,
            update,
            step=step,
            lr=group["lr"],
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"][update - 1],
            decoupled=self.decoupled,
        )
        state["step"][update - 1] = step


class AdamW(Adam):
    """AdamW (Loshchilov and Hutter 2019), a partition at a time. With C = 1, torch.optim.AdamW.

    Args:
        model, lr, betas, eps: as for Adam.
        weight_decay: the partition that is stepped shrinks by the factor 1 - lr * weight_decay. One number, or C, one
            for each partition.

    Raises:
        ValueError: as Adam.

    Example:
        >>> import partnets
        >>> model = partnets.Linear(4, 3, bias=False, proportions=(0.5, 0.5), seed=0)
        >>> before = model.weight.detach().clone()
        >>> model.weight.grad = torch.zeros(3, 4)
        >>> AdamW(model, lr=0.1, weight_decay=(0.0, 5.0)).step(update=2)
        >>> torch.allclose(model.weight, torch.where(model.partition.mask(2), before / 2, before))
        True
    """

    decoupled = True

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | Sequence[float] = 1e-2,
    ) -> None:
        super().__init__(model, lr, betas, eps, weight_decay)


def _owners(model: nn.Module) -> dict[nn.Parameter, tuple[Partitioned, str]]:
    """The layer and name of each trainable parameter that a partitioned layer owns; raises for any other."""
    owners = {
        parameter: (layer, name)
        for _, layer in partitioned_layers(model)
        for name, parameter in layer.named_parameters(recurse=False)
        if parameter.requires_grad
    }
    known = owners.keys() | set(hyperparameters(model))
    strangers = [
        path for path, parameter in model.named_parameters() if parameter.requires_grad and parameter not in known
    ]
    if strangers:
        raise ValueError(
            f"{', '.join(strangers)} would learn from every chunk: no partitioned layer owns them. Freeze them with"
            " requires_grad_(False), partition their layers with partnets.partition, or derive their module from"
            " partnets.hyper.Hyperparameter."
        )
    return owners
