"""Hyperparameter: the base class of modules with hyperparameters ψ, which learn from the held-out chunks' loss."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from partnets.hyper.learned import Learned
from partnets.utils.modules import modules_of

CURE = "give its class a to_torch() that returns a torch.nn module with the same output in evaluation mode."


class Hyperparameter(nn.Module):
    """A module with hyperparameters ψ as its parameters (Eq. 4).

    partnets.partition leaves it unchanged, partnets.optim leaves its parameters to a separate optimiser, and
    partnets.Trainer records its values. Derive from it, keep numbers in hyper.Learned, and call those in forward;
    state_dict and values() then work without further code. partnets.tune and partnets.finalize(model, "deploy") also
    need a method to_torch().

    Example:
        >>> import torch
        >>> from partnets import hyper
        >>> class Noise(hyper.Hyperparameter):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.strength = hyper.Learned(0.5, hyper.positive)
        ...     def forward(self, x):
        ...         return x + self.strength() * torch.randn_like(x)
        >>> noise = Noise()
        >>> noise(torch.zeros(2, 3)).shape, noise.values()
        (torch.Size([2, 3]), {'strength': 0.5})
    """

    # Whether partnets.stn may give each example its own value. forward must then call its hyper.Learned with a tensor
    # that has the examples, as in self.strength(x). Otherwise a batch shares one value.
    per_example = False
    # How partnets.Trainer learns it: 'direct', through the forward pass of held-out data, or 'lookahead', through a
    # step of the weights, for modules that act only in training mode, and pass x through in evaluation mode. See
    # partnets.Lookahead.
    hyper_gradient = "direct"
    # Whether it passes x through in evaluation mode and has no useful gradient; partnets.tune then tries values of it.
    only_in_training = False
    # Whether it detaches a tensor that depends on the weights; finite differences would differentiate through it.
    detaches = False

    def values(self) -> dict[str, float]:
        """Return the current value of each hyper.Learned inside, in user units, by attribute name or `names`.

        Raises:
            NotImplementedError: the module has no hyper.Learned; with other parameters, define values() yourself.
        """
        values = {
            name: value
            for path, module in self.named_modules()
            if isinstance(module, Learned)
            for name, value in module.values(path).items()
        }
        if not values:
            raise NotImplementedError(
                f"{type(self).__name__} has no values(); keep its parameters in hyper.Learned, or define values() to"
                " return a dict of floats, for progress and History."
            )
        return values

    def to_torch(self) -> nn.Module:
        """Return a torch.nn module that computes the same in evaluation mode, for partnets.finalize(model, "deploy").

        Define it beside forward; it is nn.Identity() for modules that act only in training.

        Raises:
            ValueError: the class does not define it.
        """
        raise ValueError(f"this {type(self).__name__} has no to_torch(); {CURE}")


def hyperparameters(model: nn.Module) -> list[nn.Parameter]:
    """Return ψ: the parameters of all Hyperparameter modules of a model, each once.

    Example:
        >>> from partnets import hyper
        >>> len(hyperparameters(nn.Sequential(hyper.InputMask(4), nn.Linear(4, 2))))
        1
    """
    return hyperparameters_among(modules_of(model))


def hyperparameters_among(modules: list[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters of all Hyperparameter modules in a list, each once."""
    found = [module for module in modules if isinstance(module, Hyperparameter)]
    return list(dict.fromkeys(parameter for module in found for parameter in module.parameters()))


def modules_outside_of_hyper(networks: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules in these networks, each once, without Hyperparameter modules and those inside of them."""
    modules = [module for network in networks for module in network.modules()]
    hyper = {part for module in modules if isinstance(module, Hyperparameter) for part in module.modules()}
    return [module for module in dict.fromkeys(modules) if module not in hyper]


def find_hyper(model: nn.Module, hyper: Hyperparameter | Iterable[Hyperparameter] | None) -> dict[str, Hyperparameter]:
    """Return the path and module of each hyperparameter module to learn.

    Args:
        hyper: a module of the model, several, or None.

    Raises:
        ValueError: a module is not a Hyperparameter, not part of the model, or without a trainable parameter.
    """
    modules = [] if hyper is None else [hyper] if isinstance(hyper, nn.Module) else list(dict.fromkeys(hyper))
    paths = {module: path for path, module in model.named_modules()}
    for module in modules:
        if not isinstance(module, Hyperparameter):
            raise ValueError(
                f"hyper has a {type(module).__name__}; derive it from partnets.hyper.Hyperparameter, so that"
                " partnets.partition and the optimisers can distinguish its parameters from the weights."
            )
        if module not in paths:
            raise ValueError(
                f"hyper has a {type(module).__name__} that is not inside the model; build the model with it, as in"
                " nn.Sequential(hyper, network)."
            )
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise ValueError(f"hyper has {paths[module]}, without a trainable parameter; leave it out of hyper.")
    return {paths[module]: module for module in modules}


def check_direct(modules: Mapping[str, Hyperparameter], where: str) -> None:
    """Raise ValueError if some of these modules act only in training, but psi learns directly."""
    ahead = [f"{path} ({type(one).__name__})" for path, one in modules.items() if one.hyper_gradient != "direct"]
    if ahead:
        raise ValueError(
            f"{', '.join(ahead)} acts only in training, but {where} hyperparameters learn directly, through the model's"
            " predictions; tune it by partnets.Trainer in one process, then set it here by hyper.assign."
        )


def named_values(model: nn.Module) -> dict[Learned, dict[str, float]]:
    """Return the values of each hyper.Learned of a model, in user units, under the dotted names used in History."""
    found: dict[Learned, dict[str, float]] = {}
    for path, module in model.named_modules():
        if isinstance(module, Hyperparameter):
            for inner, one in module.named_modules():
                if isinstance(one, Learned) and one not in found:
                    prefix = f"{path}." if path else ""
                    found[one] = {prefix + name: value for name, value in one.values(inner).items()}
    return found


def assign(model: nn.Module, values: Mapping[str, float]) -> None:
    """Set hyperparameters of a model, in user units, by the dotted names used in History; others keep their values.

    The model may be a single network or a partnets.Ensemble of it.

    Raises:
        ValueError: a name is unknown, or a value is outside its range; the model is then unchanged.

    Example:
        >>> from partnets import hyper
        >>> model = nn.Sequential(hyper.ConcreteDropout(0.5))
        >>> assign(model, {"0.rate": 0.25})
        >>> model[0].values()
        {'rate': 0.25}
    """
    known = named_values(model)
    names = [name for present in known.values() for name in present]
    others = {_of_network(name): name for name in names}
    values = {name if name in names else others.get(_of_network(name), name): value for name, value in values.items()}
    if unknown := [name for name in values if name not in names]:
        raise ValueError(f"values has {', '.join(unknown)}; the hyperparameters of this model are {', '.join(names)}.")
    changed = {
        one: [values.get(name, value) for name, value in present.items()]
        for one, present in known.items()
        if present.keys() & values.keys()
    }
    for one, numbers in changed.items():
        one.check(numbers)
    for one, numbers in changed.items():
        one.assign(numbers)


def _of_network(name: str) -> str:
    """Return the name in a single network of a hyperparameter that an Ensemble has under this name."""
    return name.removeprefix("networks.0.")


def values_by_path(modules: Mapping[str, Hyperparameter]) -> dict[str, float]:
    """Return the current value of each hyperparameter of these modules, in user units, under its module's path."""
    return {
        f"{path}.{name}" if path else name: value
        for path, module in modules.items()
        for name, value in module.values().items()
    }
