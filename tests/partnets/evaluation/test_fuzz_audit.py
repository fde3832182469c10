"""Random small models: sound ones do not leak later partitions, and audits distinguish them from leaking ones.

To add a kind of block, add a class or function of a width, and a line in SOUND or LEAKING.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from fuzzing import Draw, number_of, run_cases
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import partnets
from partnets.subnetworks.parameters import partitioned_parameters
from partnets.subnetworks.state import num_partitions, partition_of
from partnets.subnetworks.switch import noted

# Sound blocks, [n, width] -> [n, width].


class Read(nn.Module):
    """A layer followed by its transposed weight, as in tied autoencoders."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.layer(x), self.layer.weight.t())


class Own(nn.Module):
    """A block that owns parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.matrix, self.scale = nn.Parameter(torch.randn(width, width) / width), nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix * self.scale


class Tied(nn.Module):
    """Two layers that share a weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.out.weight = self.into.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.into(x).tanh())


class LookedUp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(x.argmax(1))


class Constant(nn.Module):
    """A block with a constant buffer, a count of passes, and the attention of the last pass."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("positions", torch.arange(width) / width)
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        self.attention = (x + self.positions).softmax(1)
        return x * self.attention


class AsImages(nn.Module):
    """Convolutions over inputs viewed as [n, 1, width, 1]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 2, (3, 1), padding=(1, 0))
        self.norm = nn.BatchNorm2d(2)
        self.second = nn.ConvTranspose2d(2, 1, (3, 1), padding=(1, 0))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x[:, None, :, None])).relu())[:, 0, :, 0]


class Raw(nn.Module):
    """A block that reads its parameters by a search."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + 1e-3 * sum(parameter.square().mean() for parameter in self.layer.parameters())


class Closure(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.norm = lambda: self._modules["layer"]._parameters["bias"].norm()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * (1 + self.norm())


class Bound(nn.Module):
    """A block that keeps a method of a layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.call = self.layer.forward

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x)


# Containers of blocks.


class Residual(nn.Module):
    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleList(inner)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.inner:
            x = x + block(x)
        return x


class Twice(nn.Module):
    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*inner)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.inner(x))


class Mixed(nn.Module):
    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({str(i): block for i, block in enumerate(inner)})

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([block(x) for block in self.inner.values()]).mean(0)


SOUND: dict[str, Callable[[int], nn.Module]] = {
    "linear": lambda width: nn.Linear(width, width),
    "without bias": lambda width: nn.Linear(width, width, bias=False),
    "layer norm": nn.LayerNorm,
    "batch norm": nn.BatchNorm1d,
    "group norm": lambda width: nn.GroupNorm(2, width),
    "relu": lambda _: nn.ReLU(),
    "prelu": nn.PReLU,
    "dropout": lambda _: nn.Dropout(0.3),
    "weight norm": lambda width: parametrizations.weight_norm(nn.Linear(width, width)),
    **{each.__name__: each for each in (Read, Own, Tied, LookedUp, Constant, AsImages, Raw, Closure, Bound)},
}
AROUND = (nn.Sequential, Residual, Twice, Mixed)


# Leaking blocks.


class RunningMean(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class Spread(nn.Module):
    """A number in a dict that follows the data (not a maximum, which subnetwork 1 might dominate)."""

    def __init__(self, _: int) -> None:
        super().__init__()
        self.kept = {"spread": [1.0]}

    def forward(self, x: Tensor) -> Tensor:
        self.kept["spread"].append(0.9 * self.kept["spread"].pop() + 0.1 * x.std().item())
        return x / self.kept["spread"][0]


class Hooked(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer, mean = nn.Linear(width, width), torch.zeros(width)

        def centre(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
            mean.lerp_(output.detach().mean(0), 0.1)
            return output - mean

        self.layer.register_forward_hook(centre)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Clipped(nn.Module):
    """A block that modifies its weight in forward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.layer.weight.clamp_(-1, 1)
        return self.layer(x)


LEAKING = {each.__name__: each for each in (RunningMean, Spread, Hooked, Clipped)}


def drawn_blocks(draw: Draw, width: int, depth: int) -> list[nn.Module]:
    def block() -> nn.Module:
        if depth and draw.chance(0.3):
            return draw.choice(AROUND)(*drawn_blocks(draw, width, depth - 1))
        name = draw.choice(list(SOUND))
        draw.say(f"{draw.said} {name}")
        return SOUND[name](width)

    return [block() for _ in range(draw.randint(1, 3))]


def drawn_model(draw: Draw, leak: str | None) -> tuple[nn.Module, Tensor, Tensor]:
    """Draw a partitioned model, with a leak if given, and two batches."""
    width = draw.choice((2, 4, 6, 10))
    features, count = draw.choice((3, 7)), draw.choice((2, 3, 3, 5))
    torch.manual_seed(draw.getrandbits(40))
    draw.say(f"{leak}, width {width}, {count} partitions:")
    blocks = drawn_blocks(draw, width, depth=2)
    if leak is not None:
        blocks.insert(draw.randrange(len(blocks) + 1), LEAKING[leak](width))
    model = nn.Sequential(nn.Linear(features, width), *blocks, nn.Linear(width, 3))
    shares = [draw.uniform(0.1, 1) for _ in range(count)]
    options = {"scheme": draw.choice(("weight", "weight", "node")), "defaults": draw.choice(("seed", "zero", "stored"))}
    with warnings.catch_warnings():
        # partition warns if the share of a partition is too small for a unit of any layer.
        warnings.simplefilter("ignore")
        proportions, seed = [share / sum(shares) for share in shares], draw.getrandbits(40)
        if any(map(parametrize.is_parametrized, model.modules())):
            options["defaults"] = "seed"  # the weight norm of rows of zeros is NaN
        partnets.partition(model, proportions, seed=seed, **options)
    return model, torch.randn(8, features), 2 * torch.randn(8, features) - 1


# Independent implementations: the entries of later partitions, and the outputs of a subnetwork.


@torch.no_grad()
def poison(model: nn.Module, k: int) -> nn.Module:
    """Set all entries of partitions above k to NaN."""
    found = partitioned_parameters(model)
    for one in found:
        if one.is_vector:
            one.rows[k:] = torch.nan
            one.combine()
        else:
            one.parameter[partition_of(one.module, one.name).ids() > k] = torch.nan
    noted(found)
    return model


def given_by(model: nn.Module, k: int, x: Tensor) -> list[Tensor]:
    """Return subnetwork k's output in training, all gradients, and its output in evaluation."""
    torch.manual_seed(0)
    with partnets.subnetwork(model.train(), k, k):
        y = model(x)
        grads = torch.autograd.grad(y.square().sum(), list(model.parameters()), allow_unused=True)
    with torch.no_grad(), partnets.subnetwork(model.eval(), k):
        evaluated = model(x)
    return [y.detach(), *(grad for grad in grads if grad is not None), evaluated]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def sound(draw: Draw) -> None:
    """Check that subnetworks do not depend on later partitions or their passes, and that an audit finds no leak."""
    model, x, other = drawn_model(draw, None)
    count = num_partitions(model)
    for k in range(1, count):
        clean = given_by(copy.deepcopy(model), k, x)
        assert same(clean, given_by(poison(copy.deepcopy(model), k), k, x)), f"subnetwork {k} reads later partitions"
    worlds = []
    for batch in (x, other):
        world = copy.deepcopy(model)
        given_by(world, count, batch)
        worlds.append(given_by(poison(world, 1), 1, x))
    assert same(*worlds), "subnetwork 1 remembers what a later one has seen"
    found = partnets.audit(model, (x, None))
    assert found == [], found


def leaking(draw: Draw) -> None:
    """Check that a leak is found by an audit."""
    model, x, _ = drawn_model(draw, draw.choice(list(LEAKING)))
    assert partnets.audit(model, (x, None)) != []


@pytest.mark.full
def test_subnetworks_of_random_models_do_not_know_later_partitions_nor_do_audits_claim_it():
    run_cases(sound, number_of(12, of_calls=0.05))


@pytest.mark.full
def test_leaks_in_random_models_are_found():
    run_cases(leaking, number_of(12, of_calls=0.05))
