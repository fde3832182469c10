"""restart: initial values anew, as torch has them or as a layer's `seed_defaults` say."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from partkernels import Defaults, Zeros
from partnets import seeds
from partnets.hyper import Hyperparameter, hyperparameters


def declared(layer: nn.Module, seed: int) -> Defaults | None:
    """What the layer's `seed_defaults` make of a seed; None if it has none. See partnets.partition.

    Raises:
        ValueError: they are neither defaults nor make any.

    Example:
        >>> import functools, partkernels
        >>> layer = nn.Linear(2, 2)
        >>> layer.seed_defaults = functools.partial(partkernels.Normal, 0.1)
        >>> declared(layer, seed=3)
        Normal(std=0.1, seed=3, stream=0)
    """
    start = getattr(layer, "seed_defaults", None)
    if start is None:
        return None
    made = start(seed=seed) if callable(start) else start
    if not isinstance(made, Defaults):
        raise ValueError(
            f"seed_defaults of a {getattr(layer, 'ordinary', type(layer)).__name__} is {start!r}; set it to"
            " partkernels.Zeros(), or to what makes defaults of a seed, as functools.partial(partkernels.Normal, 0.1)"
            " does."
        )
    return made


def restart(module: nn.Module) -> None:
    """Gives a module and all inside it initial values anew, drawn by torch's global generator.

    Each is reset by its own reset_parameters, children before their parents; a weight with `seed_defaults` is drawn
    from those, and the bias beside it is 0. Parameters that require no gradient keep their values, and so does all
    inside a module of partnets.hyper.

    Args:
        module: without partitions.

    Raises:
        ValueError: modules with trainable parameters of their own have neither. All are named; nothing has changed.

    Example:
        >>> layer = nn.LayerNorm(2)
        >>> _ = nn.init.zeros_(layer.weight)
        >>> restart(layer)
        >>> layer.weight.tolist()
        [1.0, 1.0]
    """
    psi = {inner for one in module.modules() if isinstance(one, Hyperparameter) for inner in one.modules()}
    modules = {path: one for path, one in module.named_modules() if one not in psi and not _is_still(one)}
    stuck = [f"{path or 'itself'} ({type(one).__name__})" for path, one in modules.items() if not _knows(one)]
    if stuck:
        raise ValueError(
            f"no initial values for {', '.join(stuck)}; give the class a reset_parameters() that sets its parameters"
            " to them, as torch's layers have it."
        )
    still = {p: p.detach().clone() for p in module.parameters() if not p.requires_grad}
    still |= {p: p.detach().clone() for p in hyperparameters(module)}
    for one in reversed(modules.values()):
        if (reset := _reset(one)) is not None:
            reset()
        if (start := declared(one, seeds.drawn())) is not None:
            for parameter in one.parameters(recurse=False):
                fill(parameter, start if parameter.dim() > 1 else Zeros())
    with torch.no_grad():
        for parameter, value in still.items():
            parameter.copy_(value)


@torch.no_grad()
def fill(weight: Tensor, defaults: Defaults) -> None:
    """Sets a weight to its defaults."""
    weight.copy_(defaults.values(weight.shape, weight.dtype, weight.device))


def _reset(module: nn.Module):
    # torch.nn.MultiheadAttention's and Transformer's have an underscore.
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def _knows(module: nn.Module) -> bool:
    """Whether a module can set its own parameters to initial values, or has none."""
    own = module._parameters.keys()
    says = getattr(module, "seed_defaults", None) is not None and own <= {"weight", "bias"}
    return not own or says or _reset(module) is not None


def _is_still(module: nn.Module) -> bool:
    """Whether a module has parameters of its own and none that learns: then its buffers stay as well."""
    own = list(module.parameters(recurse=False))
    return bool(own) and not any(parameter.requires_grad for parameter in own)
