"""All best-response layers and their test inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from partnets import hyper, stn
from partnets.stn.converting import vector_of
from partnets.stn.layers import HyperEmbedding
from partnets.subnetworks.parameters import partitioned_parameters
from partnets.subnetworks.switch import noted

BATCH = 5
PROPORTIONS = (0.6, 0.4)


class Call(nn.Module):
    """A layer with two hyperparameter modules; returns the first output of recurrent layers and attention."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.dropout, self.mask = hyper.Dropout(0.3), hyper.InputMask(2)

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        """Call the layer; attention without other inputs is self-attention."""
        if isinstance(self.layer, nn.MultiheadAttention) and not others:
            others = x, x
        y = self.layer(x, *others)
        return y[0] if isinstance(y, tuple) else y


@dataclass(frozen=True)
class Case:
    """A layer that stn.convert supports.

    Attributes:
        make: a function that returns the dense layer.
        shape: shape of the input.
        batch_dim: batch dimension of the input.
        dtype: dtype of the input and the parameters.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch_dim: int = 0
    dtype: torch.dtype = torch.float64

    def input(self) -> Tensor:
        if isinstance(self.make(), nn.Embedding):
            return torch.randint(7, self.shape)
        return torch.randn(self.shape, dtype=self.dtype)

    def pair(self, *, centred: bool = False, **options) -> tuple[Call, Call]:
        """Return the dense layer and its best-response version with perturbed parameters, in evaluation mode."""
        dense = Call(self.make()).to(self.dtype).eval()
        model = copy.deepcopy(dense)
        hypers = [model.dropout, model.mask]
        stn.convert(model, hypers, centred=centred, batch_dim=self.batch_dim, **options)
        shift(model)
        return dense, model


@torch.no_grad()
def shift(model: nn.Module) -> None:
    partitioned = {one.parameter: one for one in partitioned_parameters(model)}
    for parameter in model.parameters():
        stored = partitioned[parameter].stored if parameter in partitioned else parameter
        stored.add_(torch.randn_like(stored) / 5)
    for one in partitioned.values():
        one.combine()
    noted(partitioned.values())
    for module in model.modules():
        if isinstance(module, HyperEmbedding) and module.padding_idx is not None:
            module.weight[module.padding_idx] = module.hyper_weight[module.padding_idx] = 0


def drawn(model: nn.Module, examples: int = BATCH) -> Tensor:
    """Draw hyperparameters for each example."""
    vector = vector_of(model)
    present = vector.present().detach()
    return (present + torch.randn(examples, vector.size, dtype=present.dtype)).requires_grad_()


CASES = {
    "linear": Case(lambda: nn.Linear(4, 3), (BATCH, 4)),
    "linear of sequences": Case(lambda: nn.Linear(4, 3), (BATCH, 50, 4)),
    "linear of short sequences": Case(lambda: nn.Linear(4, 3, bias=False), (BATCH, 2, 3, 4)),
    "linear with the examples second": Case(lambda: nn.Linear(4, 3), (60, BATCH, 4), batch_dim=1),
    "conv1d": Case(lambda: nn.Conv1d(4, 6, 3, groups=2, padding=1, stride=2), (BATCH, 4, 9)),
    "conv2d": Case(lambda: nn.Conv2d(4, 6, 3, padding="same", padding_mode="circular"), (BATCH, 4, 9, 8)),
    "conv2d of few positions": Case(lambda: nn.Conv2d(4, 6, 3, bias=False), (BATCH, 4, 3, 4)),
    "conv2d by channels": Case(lambda: nn.Conv2d(4, 8, (3, 2), groups=4), (BATCH, 4, 7, 7)),
    "conv3d": Case(lambda: nn.Conv3d(2, 3, 2, dilation=2, padding="same"), (BATCH, 2, 5, 4, 5)),
    "embedding": Case(lambda: nn.Embedding(7, 5, padding_idx=0), (BATCH, 3)),
    "embedding with the examples second": Case(lambda: nn.Embedding(7, 5), (3, BATCH), batch_dim=1),
    "layer norm": Case(lambda: nn.LayerNorm((3, 4)), (BATCH, 2, 3, 4)),
    "layer norm without bias": Case(lambda: nn.LayerNorm(4, bias=False), (2, BATCH, 4), batch_dim=1),
    "rms norm": Case(lambda: nn.RMSNorm(4), (BATCH, 3, 4)),
    "group norm": Case(lambda: nn.GroupNorm(2, 4), (BATCH, 4, 3)),
    "batch norm 1d": Case(lambda: nn.BatchNorm1d(4), (BATCH, 4)),
    "batch norm 2d": Case(lambda: nn.BatchNorm2d(4), (BATCH, 4, 3, 3)),
    "batch norm 3d": Case(lambda: nn.BatchNorm3d(4, momentum=None), (BATCH, 4, 2, 3, 2)),
    "rnn": Case(lambda: nn.RNN(4, 6, nonlinearity="relu", batch_first=True), (BATCH, 4, 4)),
    "lstm": Case(lambda: nn.LSTM(4, 6, 2, bidirectional=True, proj_size=3, batch_first=True), (BATCH, 4, 4)),
    "lstm with the examples second": Case(lambda: nn.LSTM(4, 6), (3, BATCH, 4), batch_dim=1),
    "gru": Case(lambda: nn.GRU(4, 6, 2, bias=False, batch_first=True), (BATCH, 4, 4)),
    "attention": Case(lambda: nn.MultiheadAttention(8, 2, batch_first=True), (BATCH, 4, 8)),
    "attention with the examples second": Case(
        lambda: nn.MultiheadAttention(8, 2, bias=False), (4, BATCH, 8), batch_dim=1
    ),
}


def by_definition(dense: Call, model: Call, x: Tensor, value: Tensor, *others: Tensor) -> Tensor:
    """Compute each example of the inputs with the dense layer and the parameters p + (V λ_i) ⊙ p_hyper."""
    vector = vector_of(model)
    read = value - vector.present().detach() if vector.centred else value
    outputs = []
    for i in range(len(read)):
        own = dict(_parameters_at(model, read[i]))
        inputs = tuple(each.narrow(vector.batch_dim, i, 1) for each in (x, *others))
        outputs.append(functional_call(dense, own, inputs))
    return torch.cat(outputs, vector.batch_dim)


def _parameters_at(model: nn.Module, read: Tensor) -> Iterator[tuple[str, Tensor]]:
    parameters = dict(model.named_parameters())
    for path, response in parameters.items():
        owner, _, name = path.rpartition(".")
        if name.startswith("hyper_"):
            path = f"{owner}.{name.removeprefix('hyper_')}"
            rows = parameters[f"{path}_scale"] @ read
            scale = rows if isinstance(model.layer, nn.Embedding) else rows.view(-1, *[1] * (response.dim() - 1))
            yield path, parameters[path] + scale * response
