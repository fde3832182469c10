"""convert and freeze: conversion of a model's layers to best responses and back."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence

from torch import nn

from partnets.convert.deploying import deployed
from partnets.hyper import Hyperparameter, assign, hyperparameters
from partnets.stn.layer import RULES, HyperLayer
from partnets.stn.vector import HyperVector
from partnets.subnetworks.merging import merge
from partnets.subnetworks.partitioning import named
from partnets.subnetworks.state import partitioned_modules
from partnets.utils.modules import Model


def convert(
    model: Model,
    hyper: Hyperparameter | Sequence[Hyperparameter],
    *,
    skip: Iterable[str | nn.Module] = (),
    centred: bool = True,
    linearised: bool = False,
    scale: float = 0.5,
    learn_scale: bool = True,
    per_example: bool = True,
    batch_dim: int = 0,
) -> Model:
    """Turn the layers of a model into best responses to its hyperparameters, in place (MacKay et al. 2019).

    torch's Linear, convolutions, Embedding, norms, RNN, LSTM, GRU and MultiheadAttention become subclasses of
    stn.HyperLayer, but subclasses of them stay. A layer keeps its parameters and gets slightly more than as many again.
    Other modules have the same weights for all hyperparameters; so do layers that share a parameter with an earlier
    one, layers that require no gradient, and modules of partnets.hyper. Name layers in `skip` if another module reads
    their parameters, as F.linear(x, self.layer.weight): this raises while hyperparameters are perturbed.

    To learn from L_ML without a validation set, call partnets.partition after this.

    Args:
        model: the model, changed in place.
        hyper: modules of partnets.hyper inside the model, with the numbers that the layers respond to.
        skip: dotted paths or modules to leave unchanged, with everything inside them.
        centred: whether layers read the difference of an example's hyperparameters from their current values. W and b
            are then the network at the current values, and the response starts at 0 (Bae and Grosse 2020, Δ-STN).
            Otherwise layers read the hyperparameters themselves.
        linearised: with `centred`, whether the response learns from outputs of the model linearised in it (Bae and
            Grosse 2020). This uses torch's forward mode: operators without it raise, and so does a compiled model.
        scale: the initial σ: each example's hyperparameters are perturbed by N(0, σ²), in units of the unconstrained
            hyperparameters. If σ is too small, the response is right only at the current values and its slope is
            undetermined; if it is too large, the network cannot fit the whole range. Published runs start at 0.5
            (convolutional networks) and 1 (LSTMs).
        learn_scale: whether σ is learned, by the entropy term of stn.Trainer.
        per_example: whether each example has its own perturbation; one for each batch costs less.
        batch_dim: the dimension of the examples in the layers' inputs: 1 for sequences [length, batch, ...].

    Returns:
        The model.

    Raises:
        ValueError: no layer can respond, one does already, or the model is partitioned; a hyperparameter is outside of
            the model; or a path in skip does not exist. The model has not changed.
        TypeError: hyper contains something other than a Hyperparameter.

    Example:
        >>> from partnets import hyper
        >>> dropout = hyper.Dropout(0.5)
        >>> convert(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), dropout, nn.Linear(8, 2)), dropout)[0]
        HyperLinear(in_features=4, out_features=8, bias=True, hyper=1)
    """
    inside = set(model.modules())
    modules = [hyper] if isinstance(hyper, nn.Module) else list(hyper)
    if outside := [type(module).__name__ for module in modules if module not in inside]:
        raise ValueError(
            f"hyper has a {outside[0]} that is not inside the model; build the model with it, as in"
            " nn.Sequential(hyper, network)."
        )
    if partitioned_modules(model):
        raise ValueError("this model is partitioned already; call stn.convert before partnets.partition.")
    if any(isinstance(module, HyperLayer) for module in inside):
        raise ValueError("layers of this model respond to hyperparameters already; convert them back by stn.freeze.")
    found = _responding(model, named(model, skip, "skip"))
    if not found:
        names = ", ".join(layer_type.__name__ for layer_type in RULES)
        raise ValueError(
            f"no layer of this {type(model).__name__} can respond to hyperparameters, which would get no gradient; use"
            f" one of {names}, with parameters that learn."
        )
    options = {"learn_scale": learn_scale, "per_example": per_example, "batch_dim": batch_dim}
    vector = HyperVector(modules, centred=centred, linearised=linearised, scale=scale, **options)
    paths = {module: path for path, module in model.named_modules()}
    vector.names = [paths[one] for one in vector.learned]
    for layer in found:
        RULES[type(layer)].convert(layer, vector)
    for module in model.modules():
        # In evaluation mode these would use their layers' W and b directly, without the response.
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
    return model


def _responding(model: nn.Module, skipped: Collection[nn.Module]) -> list[nn.Module]:
    """Return the layers that `convert` turns into best responses."""
    stays = set(skipped)
    for module in model.modules():
        if isinstance(module, Hyperparameter):
            stays |= set(module.modules())
    found, taken = [], set()
    for module in model.modules():
        rule, parameters = RULES.get(type(module)), set(module.parameters()) - set(hyperparameters(module))
        if rule is None or module in stays or parameters & taken or not rule.serves(module):
            continue
        found.append(module)
        taken |= parameters
    return found


def vector_of(model: nn.Module) -> HyperVector:
    """Return the HyperVector that the layers of a model read.

    Raises:
        ValueError: no layer reads one, or they read several.
    """
    vectors = list({id(m.vector): m.vector for m in model.modules() if isinstance(m, HyperLayer)}.values())
    if len(vectors) != 1:
        found = "several vectors of hyperparameters" if vectors else "no hyperparameters"
        raise ValueError(
            f"the layers of this {type(model).__name__} read {found}; call stn.convert(model, hyper) once."
        )
    return vectors[0]


def freeze(model: Model, values: Mapping[str, float] | None = None) -> Model:
    """Return a model of torch modules only that computes the same function at fixed hyperparameters.

    Layers have the weights W + (V λ) ⊙ W_hyper; tied weights become separate ones. Modules of partnets.hyper are
    replaced by the result of their to_torch(), such as torch's dropout. The new model is in evaluation mode.

    Args:
        model: a model converted by `convert`, left unchanged. For a partitioned model, subnetwork C is frozen.
        values: hyperparameters in their units, by their dotted names in the model; others keep their current values.

    Raises:
        ValueError: no layer responds; a name is unknown, or a value is outside of its range; or a hyperparameter has no
            to_torch().

    Example:
        >>> from partnets import hyper
        >>> dropout = hyper.Dropout(0.5)
        >>> model = convert(nn.Sequential(nn.Linear(4, 2), dropout), dropout)
        >>> freeze(model, {"1.rate": 0.25})
        Sequential(
          (0): Linear(in_features=4, out_features=2, bias=True)
          (1): Dropout(p=0.25, inplace=False)
        )
    """
    model = merge(model) if partitioned_modules(model) else copy.deepcopy(model)
    model.eval()  # so that nothing is dropped
    vector = vector_of(model)
    before = vector.present().detach()
    assign(model, values or {})
    now = vector.present().detach()
    for layer in model.modules():
        if isinstance(layer, HyperLayer):
            layer.end_response(now - before if vector.centred else now)
    return deployed(model, draws=0, seed=0)
