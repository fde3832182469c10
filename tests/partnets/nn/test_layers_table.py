"""docs/layers.md: every cell of its table is tried out here."""

import io
import re
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

import partnets
from partnets import distributed, models

PROPORTIONS = (0.5, 0.3, 0.2)
PAGE = Path(__file__).parents[3] / "docs" / "layers.md"


class Token(nn.Module):
    """A module with bare parameters."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return torch.cat([self.token.expand(len(x), -1, -1), x], 1) * self.gain


def conv1d_of_transformers():
    from transformers.pytorch_utils import Conv1D

    return Conv1D(8, 8)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(9, 8), nn.Linear(8, 9, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(self.table(ids))


SEQUENCE, IDS = (4, 6, 8), torch.arange(12).view(3, 4) % 9
# Each row's layer, and its arguments or the shape of its only one.
ROWS = {
    "Linear": (lambda: nn.Linear(8, 8), SEQUENCE),
    "Bilinear": (lambda: nn.Bilinear(8, 8, 4), (torch.randn(4, 8), torch.randn(4, 8))),
    "Conv1d": (lambda: nn.Conv1d(6, 4, 3), SEQUENCE),
    "Conv2d": (lambda: nn.Conv2d(2, 4, 3), (4, 2, 6, 6)),
    "Conv3d": (lambda: nn.Conv3d(2, 4, 3), (4, 2, 4, 4, 4)),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(6, 4, 3), SEQUENCE),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(2, 4, 3), (4, 2, 6, 6)),
    "ConvTranspose3d": (lambda: nn.ConvTranspose3d(2, 4, 3), (4, 2, 4, 4, 4)),
    "Embedding": (lambda: nn.Embedding(9, 8), (IDS,)),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(9, 8), (IDS,)),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(8, 2, batch_first=True), (torch.randn(SEQUENCE),) * 3),
    "RNN": (lambda: nn.RNN(8, 8), SEQUENCE),
    "LSTM": (lambda: nn.LSTM(8, 8), SEQUENCE),
    "GRU": (lambda: nn.GRU(8, 8), SEQUENCE),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), (4, 4, 6, 6)),
    "LayerNorm": (lambda: nn.LayerNorm(8), SEQUENCE),
    "RMSNorm": (lambda: nn.RMSNorm(8), SEQUENCE),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(8), (4, 8)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(2), (4, 2, 6, 6)),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(2), (4, 2, 4, 4, 4)),
    "models.Bias": (models.Bias, SEQUENCE),
    "models.Scale": (models.Scale, SEQUENCE),
    "transformers' Conv1D": (conv1d_of_transformers, SEQUENCE),
    "bare parameters": (Token, SEQUENCE),
    "tied weights": (Tied, (IDS,)),
}


def arguments(name):
    torch.manual_seed(1)
    given = ROWS[name][1]
    made = (torch.randn(given),) if isinstance(given[0], int) else given
    return tuple(x.clone().requires_grad_() if x.is_floating_point() else x for x in made)


def partitioned(name, **options):
    torch.manual_seed(0)
    model = partnets.partition(nn.Sequential(ROWS[name][0]()), PROPORTIONS, **options)[0]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 4)
    return model


def first(output):
    return tree_leaves(output)[0]


def learned(call, model, name):
    """The first output, and the parameters' gradients of its sum of squares."""
    model.zero_grad()
    y = first(call(*arguments(name)))
    y.float().square().sum().backward()
    grads = [parameter.grad for parameter in model.parameters()]
    return [y.detach(), *(grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in grads)]


def scheme(name, kind):
    layer = partitioned(name, scheme=kind)
    for active in (1, 2):
        with partnets.subnetwork(layer, active):
            torch.testing.assert_close(
                first(partnets.merge(layer, active)(*arguments(name))), first(layer(*arguments(name)))
            )


def compiles(name):
    layer = partitioned(name)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with partnets.subnetwork(layer, 2, 1):
        torch.testing.assert_close(learned(compiled, layer, name), learned(layer, layer, name))


def autocasts(name):
    layer, theirs = partitioned(name), ROWS[name][0]()
    with torch.autocast("cpu", dtype=torch.bfloat16), partnets.subnetwork(layer, 2, 1):
        try:
            dtype = first(theirs(*arguments(name))).dtype
        except RuntimeError as error:  # torch has no LSTM in bfloat16 for some processors
            with pytest.raises(RuntimeError, match=str(error)[:40]):
                layer(*arguments(name))
            return
        y = first(layer(*arguments(name)))
        assert y.dtype == dtype
    y.float().sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in layer.parameters())


def replicates(name, alone):
    layer = partitioned(name)
    with partnets.subnetwork(layer, 2, 1):
        expected = learned(layer, layer, name)
        torch.testing.assert_close(learned(distributed.DDP(layer), layer, name), expected)


def shards(name, alone):
    layer = partitioned(name)
    with partnets.subnetwork(layer, 2, 1):
        expected = learned(layer, layer, name)
        distributed.fully_shard(layer, mesh=dist.init_device_mesh("cpu", (1,)))
        torch.testing.assert_close(learned(layer, layer, name), expected)


def exports(name):
    layer = partitioned(name).eval()
    with partnets.subnetwork(layer, 2):
        expected = first(layer(*arguments(name)))
        program = torch.export.export(layer, arguments(name))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    torch.testing.assert_close(first(torch.export.load(file).module()(*arguments(name))), expected)


COLUMNS = {"compile": compiles, "autocast": autocasts, "DDP": replicates, "FSDP2": shards, "export": exports}


@pytest.fixture(scope="module")
def alone():
    """A process group of this process."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        yield
        dist.destroy_process_group()


def table():
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert rows[0] == ["layer", "scheme", *COLUMNS]
    return {re.sub("[`]", "", row[0]): dict(zip(rows[0][1:], row[1:], strict=True)) for row in rows[2:]}


def test_the_page_names_every_layer():
    assert list(table()) == list(ROWS)


@pytest.mark.filterwarnings("ignore:.*torch.nn.utils.stateless|.*lstm.*|.*is using the experimental")
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("column", COLUMNS)
def test_what_the_page_says_of_a_layer_is_so(name, column, request):
    cell, check = table()[name][column], COLUMNS[column]
    given = (name, request.getfixturevalue("alone")) if column in ("DDP", "FSDP2") else (name,)
    if cell == "yes":
        check(*given)
    else:
        assert cell == "no, nor torch's"
        with pytest.raises(Exception, match=r"\S"):
            check(*given)
        torch.compiler.reset()
        with pytest.raises(Exception, match=r"\S"):
            torch.compile(ROWS[name][0](), fullgraph=True, backend="aot_eager")(*arguments(name))


@pytest.mark.parametrize("name", ROWS)
def test_the_schemes_that_the_page_names_work(name):
    cell = table()[name]["scheme"]
    for kind in ("weight", "node"):
        scheme(name, kind)  # whoever has no weights takes both
    has_weights = any(getattr(layer, "partitions", None) for layer in partitioned(name).modules())
    assert cell == ("weight, node" if has_weights else "rows")
