"""HyperLayer: torch's layers with parameters that are functions of the hyperparameters (MacKay et al. 2019)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from partnets.hyper import hyperparameters
from partnets.hyper.learned import check_examples
from partnets.stn.partitioned import SCALE_STD, ResponseRule
from partnets.stn.response import Product, respond
from partnets.stn.vector import HyperVector, is_each
from partnets.subnetworks.rules import register, rule_of
from partnets.utils.linearised import lifted

# The attributes of a weight that are the same at all λ.
DESCRIPTIONS = {
    *("dtype", "device", "shape", "ndim", "layout", "is_cuda", "is_meta", "is_sparse", "is_quantized", "requires_grad"),
    *("size", "dim", "numel", "stride", "is_floating_point", "element_size", "itemsize", "nbytes", "__len__"),
}

# torch's layers and their replacements by `convert`; exact types, since a subclass may compute something else.
RULES: dict[type[nn.Module], type[HyperLayer]] = {}


class _Described(Tensor):
    """A parameter that gives only its metadata, such as its dtype, and refuses computations."""

    @classmethod
    def of(cls, parameter: Tensor, what: str) -> Tensor:
        new = parameter.detach().as_subclass(cls)
        new.what = what
        return new

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        name = function.__name__
        if (function.__self__.__name__ if name == "__get__" else name) in DESCRIPTIONS:
            return super().__torch_function__(function, types, args, kwargs or {})
        what = next(leaf.what for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        raise RuntimeError(
            f"{name} is called with the {what} outside of the layer while hyperparameters are perturbed, but the layer"
            " computes with another weight; name it in stn.convert skip= to keep torch's layer, or use"
            " hyper.WeightDecay for a penalty of weights."
        )


class HyperLayer(nn.Module):
    """A mixin for torch's layers that replaces each parameter p by the best response p + (V λ) ⊙ p_hyper.

    A linear function of λ scales the rows of a weight, or the dimension that `rows` returns. A subclass has the bases
    HyperLayer and torch's layer, sets `responding` to the parameters' names, and computes with `merged` and
    `responded`. stn.convert then converts torch's layer to it, and partnets.partition derives its rule from torch's.

    Attributes:
        dense: torch's layer.
        NAME: the parameter itself, W_elem or b_elem, under torch's name.
        hyper_NAME: W_hyper or b_hyper, of the same shape.
        NAME_scale: V or C, [rows, n].
        vector: the HyperVector.
    """

    dense: type[nn.Module]
    responding: tuple[str, ...] = ("weight", "bias")
    # The beginning of the names of weights whose entries hyper.DropConnect drops; None if it drops none.
    drops: str | None = "weight"
    # Named in errors of partnets.finalize and partnets.Trainer, which do not support these layers.
    made_dense_by, trained_by = "partnets.stn.freeze", "partnets.stn.Trainer"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        last = cls.__bases__[-1]
        if not issubclass(last, HyperLayer):
            cls.dense, RULES[last] = last, cls
            register(cls, ResponseRule.of(rule_of(last)))

    @classmethod
    def named_by(cls, layer: nn.Module) -> tuple[str, ...]:
        """Return the names that respond after torch's layer is converted."""
        return cls.responding

    @classmethod
    def serves(cls, layer: nn.Module) -> bool:
        """Return whether all parameters of a layer are trainable and none is parametrized or lazy."""
        own = {name for name in cls.named_by(layer) if layer._parameters.get(name) is not None}
        parameters = set(layer.parameters()) - set(hyperparameters(layer))
        is_whole = own == {name for name, parameter in layer._parameters.items() if parameter is not None}
        return is_whole and bool(own) and all(p.requires_grad and not is_lazy(p) for p in parameters)

    @classmethod
    def convert(cls, layer: nn.Module, vector: HyperVector) -> None:
        """Turn a layer that this class serves into a best response, in place; it keeps its parameters."""
        layer.__class__ = cls
        layer.begin_response(vector)

    def begin_response(self, vector: HyperVector) -> None:
        """Register the parameters of the response, which turn torch's layer into a function of λ."""
        self.vector = vector
        drawn = self._drawn()
        for name in list(self.names()):
            parameter = self._parameters[name]
            scale = parameter.new_empty(parameter.shape[self.rows(name)], vector.size)
            if vector.centred:
                nn.init.zeros_(scale)
            else:
                nn.init.normal_(scale, std=SCALE_STD)
            self.register_parameter(f"hyper_{name}", nn.Parameter(drawn[name]))
            self.register_parameter(f"{name}_scale", nn.Parameter(scale))

    def _drawn(self) -> dict[str, Tensor]:
        """Draw W_hyper and b_hyper by torch's initialisation.

        W_hyper is rescaled to the root mean square of W if the two differ by a factor of 2 or more. Parameters that
        torch sets to 0, such as the bias of a norm, are 1: 0 times a scale of 0 would never learn.
        """
        new = self.dense.__new__(self.dense)
        # torch's norms also reset their running statistics, and its recurrent layers their submodules, such as a
        # hyper.DropConnect.
        parts = {"_parameters": dict(self._parameters), "_buffers": copy.deepcopy(self._buffers), "_modules": {}}
        vars(new).update(vars(self) | parts)
        for name in self.names():
            like = self._parameters[name]
            new._parameters[name] = nn.Parameter(torch.empty_like(like, memory_format=torch.contiguous_format))
        new.reset_parameters()
        drawn = {}
        for name in self.names():
            values, present = new._parameters[name].detach(), self._parameters[name].detach()
            if not values.any():
                values = torch.ones_like(values)
            elif present.dim() > 1 and present.any():
                ratio = (present.square().mean() / values.square().mean()).sqrt()
                values = values if 0.5 < ratio < 2 else values * ratio
            drawn[name] = values
        return drawn

    def end_response(self, hyper: Tensor) -> None:
        """Turn this layer back into torch's, in place, at one `input` of the hyperparameters, [n].

        Its parameters are new ones.
        """
        with torch.no_grad():
            values = {name: self.merged(name, hyper).clone() for name in self.names()}
        for name, value in values.items():
            self._parameters[name] = nn.Parameter(value, requires_grad=self._parameters[name].requires_grad)
            del self._parameters[f"hyper_{name}"], self._parameters[f"{name}_scale"]
        del self.vector
        self._modules.pop("drop_connect", None)
        self.__class__ = self.dense

    def rows(self, name: str) -> int:
        """Return the dimension of a parameter along which V λ scales it; entries with the same index share a scale."""
        return 0

    def names(self) -> Iterator[str]:
        """Return the names of the parameters that respond."""
        return (name for name in self.responding if self._parameters.get(name) is not None)

    def responses(self) -> Iterator[nn.Parameter]:
        """Yield W_hyper, b_hyper, V and C."""
        for name in self.names():
            yield from (self._parameters[f"hyper_{name}"], self._parameters[f"{name}_scale"])

    def hyper_of(self, x: Tensor, features: int | None = None, batch_dim: int | None = None) -> Tensor | None:
        """Return the hyperparameters that the layer reads for an input x, [n] or [batch, n]; None for W and b.

        Args:
            features: the first feature dimension of x, if it has one; the examples are before it.
            batch_dim: the dimension of the examples, if it differs from the model's.

        Raises:
            ValueError: x has other examples than those for which λ was given.
        """
        hyper = self.vector.input()
        if is_each(hyper):
            check_examples(x, self.vector.batch_dim if batch_dim is None else batch_dim, len(hyper), features, self)
        return hyper

    def value(self, name: str) -> Tensor | None:
        """Return a parameter of this layer, or None; W and b are detached while only the response learns."""
        value = self._parameters.get(name)
        if value is not None and name in self.responding and self.vector.response_learns:
            return value.detach()
        return value

    def scale(self, name: str, hyper: Tensor) -> Tensor:
        """Return V λ, [rows] or [batch, rows]."""
        scale = self.value(f"{name}_scale")
        return hyper.to(scale.dtype) @ scale.t()

    def dropped(self, name: str) -> Tensor | None:
        """Return the factors of a weight's entries by the hyper.DropConnect in attribute drop_connect, or None."""
        drop_connect = self._modules.get("drop_connect")
        drops = drop_connect is not None and self.drops is not None and name.startswith(self.drops)
        return drop_connect(self.value(name)) if drops else None

    def merged(self, name: str, hyper: Tensor | None) -> Tensor | None:
        """Return p + (V λ) ⊙ p_hyper for one λ, [n], or p if hyper is None; None if the layer has no such p."""
        parameter = self.value(name)
        if parameter is None:
            return None
        if hyper is not None:
            shape = [1] * parameter.dim()
            shape[self.rows(name)] = -1
            parameter = torch.addcmul(parameter, self.scale(name, hyper).view(shape), self.value(f"hyper_{name}"))
        mask = self.dropped(name)
        return parameter if mask is None else parameter * mask

    def responded(self, x: Tensor, hyper: Tensor, product: Product) -> Tensor:
        """Return the output for x, [batch, ...], with a λ for each example, [batch, n]."""
        return self.affine(hyper, product, "weight", "bias" if "bias" in self.responding else None)(x)

    def affine(self, hyper: Tensor, product: Product, weight: str, bias: str | None) -> Callable[[Tensor], Tensor]:
        """Return x -> W x + b with each example's own W and b; the same entries are dropped at each call."""
        operands = [self.value(weight), self.value(f"hyper_{weight}"), self.value(f"{weight}_scale")]
        if (mask := self.dropped(weight)) is not None:
            operands[:2] = operands[0] * mask, operands[1] * mask
        offset = ()
        if bias is not None and (value := self.value(bias)) is not None:
            offset = value, self.value(f"hyper_{bias}")[:, None] * self.value(f"{bias}_scale")
        return lambda x: respond(x, hyper, *operands, product, *offset)

    def squared_norm(self, name: str) -> Tensor:
        """Return ||p + (V λ) ⊙ p_hyper||², [] or [batch], without forming each example's parameter."""
        hyper = self.vector.input()
        if hyper is None:
            return self.value(name).square().sum()
        # Quadratic in the response, so lifted: it need not be linear in the perturbation.
        parameter, response, scale = self.value(name), self.value(f"hyper_{name}"), self.scale(name, lifted(hyper))
        others = [dim for dim in range(parameter.dim()) if dim != self.rows(name)]

        def by_row(product: Tensor) -> Tensor:
            return product.sum(others) if others else product

        squares = by_row(parameter * parameter), by_row(parameter * response), by_row(response * response)
        return (squares[0] + scale * (2 * squares[1] + scale * squares[2])).sum(-1)

    def __getattr__(self, name: str) -> Any:
        """Return the attribute; while λ is perturbed, return W only as metadata, because it is not the whole weight."""
        value, own = super().__getattr__(name), self.__dict__
        if f"hyper_{name}" not in own.get("_parameters", ()) or torch.compiler.is_compiling():
            return value
        return _Described.of(value, f"{name} of this {type(self).__name__}") if own["vector"].is_perturbed else value

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if (metadata := getattr(destination, "_metadata", None)) is not None:
            metadata.setdefault(prefix[:-1], {})["responds"] = self.vector.description()

    def _load_from_state_dict(self, state_dict, prefix, metadata, *rest):
        theirs, ours = metadata.get("responds"), self.vector.description()
        if theirs not in (None, ours):
            raise RuntimeError(
                f"{prefix[:-1]} was saved as a response to {theirs}, but responds to {ours}; load it into a model that"
                " stn.convert has converted with the same hyperparameters in the same order."
            )
        super()._load_from_state_dict(state_dict, prefix, metadata, *rest)

    def extra_repr(self) -> str:
        own = super().extra_repr()
        return f"{own}, hyper={self.vector.size}" if own else f"hyper={self.vector.size}"
