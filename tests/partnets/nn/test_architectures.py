"""The architectures of other libraries in docs/models.md can be partitioned, trained and merged."""

from pathlib import Path

import pytest
import torch
from architectures import ONE, PROPORTIONS, Failed, attempt, skipped, trial
from timm.models import _registry
from torch import nn

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
# Twelve architectures with different requirements, or that failed before; architectures.py as a program tries all.
IN_FULL = {
    ("timm", "efficientnet"): "grouped convolutions of a type that timm made merge to fewer groups",
    ("timm", "nfnet"): "weights are standardised in forward",
    ("timm", "efficientvim"): "a parameter is called A",
    ("torchvision", "squeezenet"): "convolutions whose outputs are concatenated",
    ("transformers", "albert"): "one layer is called several times",
    ("transformers", "beit"): "a parent reads its child's table of biases",
    ("transformers", "bert"): "torch's fast path reads weights past the layers",
    ("transformers", "gpt2"): "weights are kept transposed",
    ("transformers", "levit"): "biases are kept between passes in evaluation mode",
    ("transformers", "mamba"): "modules have parameters of their own",
    ("transformers", "swin"): "buffers index the tables of relative positions",
    ("transformers", "t5"): "embeddings are tied",
}


def table() -> list[tuple[str, str, str, str]]:
    """Return library, family, model and outcome of each row."""
    rows, library = [], None
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            library = line.removeprefix("## ").split(":")[0]
        elif line.startswith("| ") and not line.startswith("| family"):
            family, name, outcome, *_ = (cell.strip(" `") for cell in line.strip("|").split("|"))
            rows.append((library, family, name, outcome))
    return rows


@pytest.mark.cases(usual=2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("library", "family", "name", "outcome"),
    [pytest.param(*row, id="-".join(row[:2])) for row in table() if row[:2] in IN_FULL],
)
def test_an_architecture_does_what_the_page_says(library, family, name, outcome):
    assert (trial(ONE[library](family, name)) or "yes") == outcome


# Minimal share of skipped multiply-adds, relative to a subnetwork 1 with half of the channels of every layer. It is
# below 1 because widths are rounded and the model's inputs and outputs have all channels.
NESTED = {
    ("timm", "convnext", "test_convnext"): 0.8,
    ("transformers", "gpt2", None): 0.6,
}


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("library, family, name", NESTED)
def test_a_nested_architecture_skips_what_is_not_live(library, family, name):
    architecture = ONE[library](family, name)
    model, given = architecture.accepted()
    attempt(model, given, "nested")
    assert NESTED[library, family, name] <= skipped(model, given) <= 1 / (1 - PROPORTIONS[0] ** 2)


def test_the_page_has_all_families_of_timm_and_at_least_19_of_20_pass():
    families = {family: outcome for library, family, _, outcome in table() if library == "timm"}
    assert families.keys() == set(_registry._module_to_models)
    assert sum(outcome == "yes" for outcome in families.values()) >= 0.95 * len(families)


class Reader(nn.Module):
    """A module that reads the vectors of all partitions."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x) + dict(self.layer.named_buffers()).get("bias_rows", torch.zeros(1, 4)).sum(0)


class Drifting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        if self.training:
            self.mean += x.mean(0)
        return self.layer(x) - self.mean


@pytest.mark.parametrize(
    ("make", "message"),
    [(Reader, "reads weights of later|merged subnetwork"), (Drifting, "changes mean, which partition")],
)
def test_a_trial_notices_a_leak(make, message):
    with pytest.raises(Failed, match=message):
        attempt(make(), {"x": torch.randn(3, 4)})
