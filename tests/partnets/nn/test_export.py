"""torch.export: a merged subnetwork is exported, and computes the same after saving and loading."""

import io

import pytest
import torch
from small_network import images, partitioned

import partnets
from partnets import hyper


@pytest.mark.full
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
@pytest.mark.parametrize("defaults", ["seed", "stored"])
def test_an_exported_subnetwork_computes_the_same_from_a_file(defaults, strict):
    model, x = partitioned(defaults), images()
    batch = torch.export.Dim("batch", min=2, max=64)
    merged = partnets.merge(model, 2)
    program = torch.export.export(merged, (x,), strict=strict, dynamic_shapes=({0: batch},))
    assert set(program.state_dict) == {name for name, _ in merged.named_parameters()} and not program.constants
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    with partnets.subnetwork(model, 2):
        torch.testing.assert_close(loaded(x), model(x))
        torch.testing.assert_close(loaded(x[:3]), model(x[:3]))


@pytest.mark.full
@pytest.mark.parametrize("make", [hyper.Affine, hyper.ImmerAffine, hyper.ColourJitter])
def test_an_augmentation_is_exported_for_batches_of_any_size(make):
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 64, 5))
    model = hyper.Averaged(make(), network, samples=2).eval()
    dynamic = ({0: torch.export.Dim("batch")},)
    program = torch.export.export(model, (torch.rand(4, 3, 8, 8),), dynamic_shapes=dynamic).module()
    x, results = torch.rand(7, 3, 8, 8), []
    for each in (program, model):
        torch.manual_seed(0)
        results.append(each(x))
    torch.testing.assert_close(*results)
