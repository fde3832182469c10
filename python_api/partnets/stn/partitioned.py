"""The rule by which partnets.partition partitions a best response: W, W_hyper, V and C.

So subnetwork k - 1 and its response have not seen chunk k, and D_k tunes λ without a validation set.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from torch import Tensor, nn

from partkernels import Normal
from partnets.subnetworks.initial_values import Distribution
from partnets.subnetworks.rules import Rule

# Initial standard deviation of V and C (the published code's). With centred hyperparameters V and C start at 0, so that
# the response starts at 0.
SCALE_STD = 0.01


@dataclass(frozen=True)
class ResponseRule(Rule):
    """The rule of a best response: W_hyper has the map of W, b_hyper is added like b, and V and C are weights."""

    @classmethod
    def of(cls, rule: Rule) -> ResponseRule:
        """Return the rule of the best response to which a layer with this rule is converted."""

        def distribution(module: nn.Module, name: str) -> Distribution | None:
            if name.endswith("_scale"):
                return functools.partial(Normal, SCALE_STD)
            return rule.distribution(module, _base(name))

        def outputs(module: nn.Module, name: str, weight: Tensor) -> Tensor:
            base = _base(name)
            if name.endswith("_scale") and module.rows(base) == 1:  # a table's outputs are its columns, and V's rows
                return rule.outputs(module, base, weight.t()).t()
            return rule.outputs(module, base, weight)

        return cls(
            rule.weights,
            rule.scales,
            distribution=distribution,
            outputs=outputs,
            refuses=_refuse if rule.statistics else rule.refuses,
            vectors=rule.vectors,
            alike=lambda name: rule.alike(_base(name)),
        )

    def knows(self, name: str) -> bool:
        return super().knows(_base(name))

    def is_weight(self, name: str, parameter: Tensor) -> bool:
        return name.endswith("_scale") or super().is_weight(_base(name), parameter)

    def map_of(self, name: str) -> str:
        return _base(name)


def _base(name: str) -> str:
    """Return the name of the parameter that NAME, hyper_NAME or NAME_scale belongs to."""
    return name.removeprefix("hyper_").removesuffix("_scale")


def _refuse(module: nn.Module) -> str:
    return (
        "with running statistics of all chunks (name it in stn.convert skip=, so that partnets.partition keeps"
        " statistics for each subnetwork, or use nn.GroupNorm)"
    )
