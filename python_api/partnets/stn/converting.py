"""convert and freeze: the layers of an ordinary model as best responses, and back again."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import nn

from partnets.convert.deploying import deployed
from partnets.convert.finding import named, out_of_reach
from partnets.convert.merging import merge
from partnets.convert.reads import read_by
from partnets.convert.replacing import replace_modules
from partnets.hyper import Hyperparameter, assign, hyperparameters
from partnets.nn.partitioned import Partitioned
from partnets.stn.layer import RULES, HyperLayer
from partnets.stn.vector import HyperVector


def convert(
    model: nn.Module,
    hyper: Hyperparameter | Sequence[Hyperparameter],
    *,
    skip: Iterable[str | nn.Module] = (),
    centred: bool = True,
    linearised: bool = False,
    scale: float = 0.5,
    learn_scale: bool = True,
    per_example: bool = True,
    batch_dim: int = 0,
) -> nn.Module:
    """Replaces the layers of a model by best responses to its hyperparameters, in place (MacKay et al. 2019).

    Linear, convolutions, Embedding, norms, RNN, LSTM, GRU and MultiheadAttention of torch, of exactly these types. Each
    shares its parameters with the layer before, and has as many again, and a few. What stays as it is and goes on
    learning, at all hyperparameters alike: other modules, layers whose parents read their parameters, and those that
    share a parameter with one before. So do modules of partnets.hyper, and layers that require no gradient.

    To learn from L_ML without a validation set, convert first and call partnets.partition then.

    Args:
        model: changed in place.
        hyper: modules of partnets.hyper inside the model, whose numbers the layers respond to.
        skip: dotted paths or modules that stay as they are, with everything inside them.
        centred: the layers read how far the hyperparameters of an example are from their present value, so that W and b
            are the network at the present ones, and the response starts at 0 (Bae and Grosse 2020, Δ-STN). Otherwise
            they read the hyperparameters themselves.
        linearised: with `centred`, the response learns by outputs of the model that are linear in it, and whatever
            curves between is left out of its loss (Bae and Grosse 2020). By torch's forward mode: operators without it
            raise, and so does a compiled model.
        scale: σ at the start: each example's hyperparameters are perturbed by N(0, σ²), in units of the unconstrained
            ones. Where σ is small, the response is right at the present ones alone, and its slope may be anything;
            where it is wide, the network is not flexible enough for all of it. Published runs start at 0.5
            (convolutional networks) and 1 (LSTMs).
        learn_scale: whether σ learns, by the entropy term of stn.Trainer.
        per_example: whether each example has its own perturbation, or each batch one, which costs less.
        batch_dim: the dimension of the layers' inputs in which the examples are: 1 for sequences [length, batch, ...].

    Returns:
        The model; if it is a layer itself, the new layer.

    Raises:
        ValueError: no layer can respond, one does already, or the model is partitioned; a hyperparameter is outside of
            the model; a path in skip does not exist; a layer is kept where it cannot be replaced. The model has not
            changed then.
        TypeError: hyper has something else than a Hyperparameter.

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
    if any(isinstance(module, Partitioned) for module in inside):
        raise ValueError("this model is partitioned already; call stn.convert first, and partnets.partition then.")
    if any(isinstance(module, HyperLayer) for module in inside):
        raise ValueError("layers of this model respond to hyperparameters already; stn.freeze makes ordinary ones.")
    found = _responding(model, named(model, skip, "skip"))
    if not found:
        names = ", ".join(layer_type.__name__ for layer_type in RULES)
        raise ValueError(
            f"no layer of this {type(model).__name__} can respond to hyperparameters, which then get no gradient; known"
            f" are {names}, with parameters that learn."
        )
    if lost := out_of_reach(model, {path: module for path, module in model.named_modules() if module in found}):
        raise ValueError(
            f"{lost[0] or 'the model'} is kept by an object, a function or a method too, which would go on with it as"
            " it was; call it as a module's attribute, or name it in skip=."
        )
    options = {"learn_scale": learn_scale, "per_example": per_example, "batch_dim": batch_dim}
    vector = HyperVector(modules, centred=centred, linearised=linearised, scale=scale, **options)
    paths = {module: path for path, module in model.named_modules()}
    vector.names = [paths[one] for one in vector.learned]
    new = {layer: RULES[type(layer)].from_ordinary(layer, vector) for layer in found}
    model = replace_modules(model, new)
    for module in model.modules():
        # In evaluation these compute with their layers' parameters as if they were ordinary ones.
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
    return model


def _responding(model: nn.Module, skipped: Collection[nn.Module]) -> list[nn.Module]:
    """The layers that `convert` replaces."""
    stays = set(skipped)
    for module in model.modules():
        if isinstance(module, Hyperparameter):
            stays |= set(module.modules())
        if type(module) not in RULES:
            stays |= read_by(module)
    found, taken = [], set()
    for module in model.modules():
        rule, parameters = RULES.get(type(module)), set(module.parameters()) - set(hyperparameters(module))
        if rule is None or module in stays or parameters & taken or not rule.serves(module):
            continue
        found.append(module)
        taken |= parameters
    return found


def vector_of(model: nn.Module) -> HyperVector:
    """The λ that the layers of a model read.

    Raises:
        ValueError: no layer reads any, or they read several.
    """
    vectors = list({id(m.vector): m.vector for m in model.modules() if isinstance(m, HyperLayer)}.values())
    if len(vectors) != 1:
        found = "several vectors of hyperparameters" if vectors else "no hyperparameters"
        raise ValueError(
            f"the layers of this {type(model).__name__} read {found}; call stn.convert(model, hyper), once."
        )
    return vectors[0]


def freeze(model: nn.Module, values: Mapping[str, float] | None = None) -> nn.Module:
    """An ordinary model, of torch alone, which computes what this one computes at given hyperparameters.

    Layers have the weights W + (V λ) ⊙ W_hyper, each its own, also where W was tied to another's; and modules of
    partnets.hyper become what their to_ordinary() gives, as torch's dropout. It is in evaluation mode.

    Args:
        model: as of `convert`; it stays as it is. Of a partitioned one subnetwork C is frozen.
        values: hyperparameters in their units, by their dotted names in the model; the others stay at present ones.

    Raises:
        ValueError: no layer responds; a name is unknown, or a value outside of its range; or a hyperparameter has no
            to_ordinary().

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
    is_partitioned = any(isinstance(module, Partitioned) for module in model.modules())
    model = (merge(model) if is_partitioned else copy.deepcopy(model)).eval()  # so that nothing is dropped
    vector = vector_of(model)
    before = vector.present().detach()
    assign(model, values or {})
    now = vector.present().detach()
    with torch.no_grad():
        at = now - before if vector.centred else now
        new = {layer: layer.to_ordinary(at) for layer in model.modules() if isinstance(layer, HyperLayer)}
    return deployed(replace_modules(model, new), draws=0, seed=0)
