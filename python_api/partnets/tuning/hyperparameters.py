"""The hyperparameters that `tune` finds in a network: their ranges, and functions that set a value in a training."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from partnets.data.normalise import ToFloat
from partnets.hyper import Averaged, Hyperparameter, InTraining, Learned, LearningRate, ObservationNoise, Temperature
from partnets.hyper.augmentation import Augmentation
from partnets.utils.losses import CROSS_ENTROPIES, name_of, setting

NAMES = ("dropout", "dropout:one", "weight_decay", "label_smoothing", "learning_rate")
# The factor of most settings.
MAIN = "regularisers"
# The largest value of a number without an upper bound, relative to its initial value.
FACTOR = 4.0
# Tolerance for equal positions, in single precision.
ROUNDING = 1e-6
# Light and heavy values, as fractions of a range; the first trainings of a search lie between them.
USUAL = (0.25, 0.85)


@dataclass(frozen=True)
class Setting:
    """A number that partnets.tune chooses.

    Attributes:
        name: its name in Tuned.values.
        low, high: its range, in user units.
        put: put(training, value) makes a training use a value: in its network, optimizer or loss.
        logarithmic: whether positions are on a logarithmic scale.
        untuned: its value in an untuned training; a value below `low` has the position of `low`.
        usual: a light and a heavy value, as fractions of the range.
        factor: the search moves settings of one factor jointly, and factors separately: one has all regularisers,
            another the learning rate.
        group: settings of one group have similar values, such as the dropout rates of all layers.
    """

    name: str
    low: float
    high: float
    put: Callable[[Any, float], None] = field(repr=False)
    logarithmic: bool = False
    untuned: float = 0.0
    usual: tuple[float, float] = USUAL
    factor: str = MAIN
    group: str = ""

    def value(self, position: float) -> float:
        """Return the value at a position in [0, 1] of the range; at `position`, exactly `untuned`."""
        if abs(position - self.position) < ROUNDING:
            return self.untuned
        if self.logarithmic:
            return self.low * (self.high / self.low) ** position
        return self.low + (self.high - self.low) * position

    @property
    def position(self) -> float:
        """The position of the untuned value in the range, in [0, 1]."""
        if self.untuned <= self.low:
            return 0.0
        if self.logarithmic:
            return min(1.0, math.log(self.untuned / self.low) / math.log(self.high / self.low))
        return min(1.0, (self.untuned - self.low) / (self.high - self.low))


def put_before(
    network: nn.Module, hyper: str | Hyperparameter | Sequence[str | Hyperparameter]
) -> tuple[nn.Module, list[str | Hyperparameter], int]:
    """Return the network behind all modules of `hyper` that it lacks, `hyper` as a list, and the number in front.

    The user's network is left unchanged. If it has a ToFloat, for images of bytes, augmentations get one in front too.
    """
    hyper = [hyper] if isinstance(hyper, str | nn.Module) else hyper
    _check_hyper(hyper)
    inside = set(network.modules())
    outside = [module for module in hyper if isinstance(module, nn.Module) and module not in inside]
    if any(isinstance(module, LearningRate) for module in (*inside, *outside)):
        raise ValueError(
            "the network or hyper has a LearningRate, which only partnets.optim follows; leave it out, and pass"
            " 'learning_rate'."
        )
    for module in outside:
        if isinstance(module, ObservationNoise | Temperature):
            kind = type(module).__name__
            raise ValueError(
                f"{kind} acts on predictions; put it behind the network, as in model = nn.Sequential(network,"
                f" hyper.{kind}()), and pass model and hyper=[model[-1]]."
            )
    front = [InTraining(module) if isinstance(module, Augmentation) else module for module in outside]
    if any(isinstance(module, InTraining) for module in front) and any(isinstance(one, ToFloat) for one in inside):
        front.insert(0, ToFloat())
    return nn.Sequential(*front, network) if front else network, list(hyper), len(front)


def _check_hyper(hyper: Any) -> None:
    if not isinstance(hyper, Sequence):
        raise TypeError(
            f"hyper is a {type(hyper).__name__}; pass a list of names and modules, such as ['dropout']: each has its"
            " own range."
        )
    if not hyper:
        raise ValueError(f"hyper is empty; pass names: {', '.join(map(repr, NAMES))}, or modules of hyper.")
    for i, each in enumerate(hyper):
        if isinstance(each, str) and each not in NAMES:
            raise ValueError(f"hyper has {each!r}; the names are {', '.join(map(repr, NAMES))}.")
        if isinstance(each, type):
            raise TypeError(f"hyper has the class {each.__name__}; pass an instance, such as {each.__name__}().")
        if not isinstance(each, str | Hyperparameter):
            raise TypeError(f"hyper has a {type(each).__name__}; pass names or modules of partnets.hyper.")
        if each in hyper[:i]:
            raise ValueError(f"hyper has {each if isinstance(each, str) else type(each).__name__} twice; pass it once.")
    if "dropout" in hyper and "dropout:one" in hyper:
        raise ValueError("hyper has 'dropout' and 'dropout:one'; pass one of them.")


def find_settings(
    network: nn.Module,
    hyper: Sequence[str | Hyperparameter],
    outside: int,
    loss: Any,
    optimizer: torch.optim.Optimizer,
    steps: int,
) -> tuple[list[Setting], list[str], list[Setting]]:
    """Return the settings of `hyper`.

    Args:
        network, hyper, outside: the results of put_before.
        loss: the training loss.
        optimizer: an optimizer that the user's factory made for this network.
        steps: number of steps of a training.

    Returns:
        The settings; the paths of modules that learn by gradient descent, because they change the predictions of given
        weights; and, among these, the settings of augmentations.

    Raises:
        ValueError: a name does not fit the network, the loss or the optimizer, or two numbers have the same name.
    """
    paths = {module: path for path, module in network.named_modules()}
    settings, direct, starts = [], [], []
    for each in hyper:
        if each == "label_smoothing":
            settings.append(_label_smoothing(loss))
        elif each == "weight_decay":
            settings.append(_weight_decay(optimizer, steps))
        elif each == "learning_rate":
            settings.append(_learning_rate(optimizer))
        elif isinstance(each, str):
            settings += _dropout(network, f"{outside}." if outside else "", together=each == "dropout:one")
        else:
            module = each.module if isinstance(each, InTraining) else each
            if not _is_direct(module, paths[module], network):
                settings += _learned(module, paths[module])
                continue
            direct.append(paths[module])
            starts += _learned(module, paths[module]) if isinstance(module, Augmentation) else []
    names = [one.name for one in settings] + [name for path in direct for name in network.get_submodule(path).values()]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"hyper has several numbers called {', '.join(twice)}; tune one of these modules at a time.")
    return settings, direct, starts


def _is_direct(module: Hyperparameter, path: str, network: nn.Module) -> bool:
    """Return whether a module changes predictions, so that its numbers learn by gradient descent."""
    if module.only_in_training or module.hyper_gradient != "direct":
        return False
    around = [network, *(network.get_submodule(path[:i]) for i, letter in enumerate(path) if letter == ".")]
    if isinstance(module, Augmentation) and not any(isinstance(parent, Averaged | InTraining) for parent in around):
        kind = type(module).__name__
        raise ValueError(
            f"{path or 'the network'} ({kind}) acts in prediction too; leave it out of the network, before which it is"
            f" put, put hyper.InTraining({kind}(...)) there, or average the network by hyper.Averaged."
        )
    return True


def _label_smoothing(loss: Any) -> Setting:
    if name_of(loss) not in CROSS_ENTROPIES:
        raise ValueError("hyper has 'label_smoothing', which needs torch's cross-entropy as the loss.")

    def put(training: Any, value: float) -> None:
        if isinstance(training.loss, nn.Module):
            training.loss.label_smoothing = value
        else:
            training.loss = functools.partial(training.loss, label_smoothing=value)

    untuned = float(setting(loss, "label_smoothing", 0.0))
    return Setting("label_smoothing", 0.0, 0.9, put, untuned=untuned, usual=(0.1, 0.5))


def _learning_rate(optimizer: torch.optim.Optimizer) -> Setting:
    if "initial_lr" in optimizer.param_groups[0]:
        raise ValueError(
            "hyper has 'learning_rate', which a scheduler in optimizer= sets; pass the scheduler as scheduler=."
        )
    rate = float(optimizer.param_groups[0]["lr"])
    if rate <= 0:
        raise ValueError(f"the optimizer has a learning rate of {rate:g}; pass one above 0, which is tuned.")

    def put(training: Any, value: float) -> None:
        for group in training.optimizer.param_groups:
            group["lr"] = group["lr"] * (value / rate)

    # Light and heavy are a fifth of the rate and five times the rate.
    options = {"logarithmic": True, "untuned": rate, "usual": (0.25, 0.75), "factor": "learning_rate"}
    return Setting("learning_rate", rate / 25, rate * 25, put, **options)


def _weight_decay(optimizer: torch.optim.Optimizer, steps: int) -> Setting:
    groups = optimizer.param_groups
    if any("weight_decay" not in group for group in groups):
        raise ValueError(
            f"hyper has 'weight_decay', which {type(optimizer).__name__} does not take; use torch.optim.Adam, AdamW or"
            " SGD, or put hyper.WeightDecay(network) into the network."
        )
    present = [float(group["weight_decay"]) for group in groups]
    largest = max(range(len(present)), key=present.__getitem__)
    # Groups keep their ratios, so that a group without decay, such as biases, stays without.
    shares = [decay / present[largest] if present[largest] else 1.0 for decay in present]

    def put(training: Any, value: float) -> None:
        for group, share in zip(training.optimizer.param_groups, shares, strict=True):
            group["weight_decay"] = value * share

    low, high = 1e-6, 1.0
    if isinstance(optimizer, torch.optim.AdamW) or groups[0].get("decoupled_weight_decay"):
        # Decoupled decay shrinks weights by the factor exp(-lr * decay * steps), independently of the gradient.
        shrinking = float(groups[largest]["lr"]) * steps
        if shrinking <= 0:
            raise ValueError("the optimizer has a learning rate of 0, with which its weight decay does nothing.")
        low, high = 0.01 / shrinking, 5.0 / shrinking
    return Setting("weight_decay", low, high, put, logarithmic=True, untuned=present[largest], usual=(0.35, 0.8))


def _dropout(network: nn.Module, front: str, together: bool) -> list[Setting]:
    """Return a setting for each module with dropout, or one for all; `front`: the user's network's path, with a dot."""
    # If the network is in training mode, modules in evaluation mode are left out.
    user = network.get_submodule(front.removesuffix("."))
    places = [place for place in _rates(network) if network.get_submodule(place[0]).training or not user.training]
    if not places:
        raise ValueError(
            "hyper has 'dropout', but the network has no nn.Dropout in training mode; put nn.Dropout(0.1) where"
            " activations may be dropped, such as before each nn.Linear but the first."
        )

    def rates(name: str, places: list[tuple[str, str]], group: str = "") -> Setting:
        def put(training: Any, value: float) -> None:
            for path, attribute in places:
                setattr(training.network.get_submodule(path), attribute, value)

        untuned = max(float(getattr(network.get_submodule(path), attribute)) for path, attribute in places)
        return Setting(name, 0.0, 0.9, put, untuned=untuned, group=group)

    if together or len(places) == 1:
        return [rates("dropout", places)]
    return [rates(f"dropout.{place[0].removeprefix(front)}", [place], group="dropout") for place in places]


def _rates(network: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the path of each module with dropout, and the name of its rate."""
    for path, module in network.named_modules():
        if isinstance(module, _DropoutNd):
            yield path, "p"
        elif isinstance(module, nn.MultiheadAttention) or (isinstance(module, nn.RNNBase) and module.num_layers > 1):
            yield path, "dropout"


def _learned(module: Hyperparameter, path: str) -> list[Setting]:
    """Return a setting for each number of a module, with the names of module.values()."""
    settings = []
    for inner, one in module.named_modules():
        if isinstance(one, Learned):
            at = ".".join(part for part in (path, inner) if part)
            reach = getattr(module, "reach", {})
            for index, (name, value) in enumerate(one.values(inner).items()):
                settings.append(_of_learned(one, at, name, index, value, reach.get(name)))
    if not settings:
        raise ValueError(f"hyper has a {type(module).__name__} without numbers; keep them in hyper.Learned.")
    return settings


def _of_learned(one: Learned, path: str, name: str, index: int, value: float, reach: float | None) -> Setting:
    """Return the setting of a number in a Learned; `reach`: the largest half-width of an augmentation."""
    unit, borders = one.units[index], one.range
    low = borders.low / unit if math.isfinite(borders.low) else 0.0
    high = borders.high / unit if math.isfinite(borders.high) else FACTOR * abs(value) or 1.0
    if reach:  # the sign of a half-width has no effect
        low, high = 0.0, reach
    elif value < 0 and borders.low == -math.inf:
        raise ValueError(
            f"hyper has {name}={value:g} in a range without a lowest value, which an untuned training takes; pass"
            " range=hyper.interval(low, high)."
        )
    logarithmic = low > 0 and high / low > 100
    least = low + 1e-4 * (high - low) if not logarithmic else low * 1.001

    def put(training: Any, value: float) -> None:
        learned = training.network.get_submodule(path)
        values = list(learned.values("value").values())
        values[index] = min(max(value, least), high - 1e-4 * (high - low))
        learned.assign(values if not learned.scalar else values[0])

    return Setting(name, low, high, put, logarithmic=logarithmic, untuned=low)
