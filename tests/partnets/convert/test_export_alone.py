"""What finalize(model, "deploy") gives goes through each format into a process without partnets: the same numbers."""

import importlib.util
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import partnets
from partnets import hyper

PROPORTIONS = (0.6, 0.3, 0.1)
# Of torch.onnx and of ONNX Runtime, which runs the file.
ONNX = all(map(importlib.util.find_spec, ("onnx", "onnxscript", "onnxruntime")))


def images():
    network = nn.Sequential(
        partnets.data.Normalise((0.4,), (0.3,)),
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(144, 3),
    )
    return hyper.Averaged(hyper.Affine(rotation=40.0), network, samples=2), torch.rand(5, 1, 8, 8)


def masked():
    layers = (
        hyper.InputMask(6, probability=0.3),
        nn.Linear(6, 8),
        nn.ReLU(),
        hyper.ConcreteDropout(0.3),
        nn.Linear(8, 3),
    )
    return nn.Sequential(*layers), torch.randn(5, 6)


def features():
    extractor = hyper.Submodule(nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU()))
    return nn.Sequential(extractor, hyper.ConcreteDropout(0.3), nn.Linear(8, 3)), torch.randn(5, 6)


def transformer():
    """An architecture of partnets.models, whose class stays."""
    network = partnets.models.ViT(image_size=8, patch=4, width=8, depth=1, heads=2, in_channels=1)
    return hyper.Averaged(hyper.ImmerAffine(), network), torch.rand(5, 1, 8, 8)


# What the export to ONNX, of seconds each, is tried on: every kind of module that takes ψ's place is in one of them.
OF_ONNX = ("averaged", "masked")
MODELS = {
    "images": (images, 0),
    "averaged": (images, 4),
    "masked": (masked, 0),
    "features": (features, 0),
    "transformer": (transformer, 0),
}


def deployed(name):
    """With weights of its own in each partition, and inputs of two batch sizes."""
    make, draws = MODELS[name]
    torch.manual_seed(0)
    model, x = make()
    partnets.partition(model, PROPORTIONS)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return partnets.finalize(model, "deploy", draws=draws), [x, x[:3]]


def write(network, x, stem):
    """The network in each format that it goes into."""
    batch = ({0: torch.export.Dim("batch")},)
    torch.export.save(torch.export.export(network, (x,), dynamic_shapes=batch), f"{stem}.pt2")
    torch.jit.trace(network, (x,)).save(f"{stem}.traced.jit")
    int8 = torch.ao.quantization.quantize_dynamic(network, {nn.Linear}, dtype=torch.qint8)
    torch.jit.trace(int8, (x,)).save(f"{stem}.int8.jit")
    if stem.name not in ("averaged", "transformer"):  # of which a class is partnets'
        torch.jit.script(network).save(f"{stem}.scripted.jit")
        torch.save(network, f"{stem}.pickle")
    if stem.name == "features":
        torch.save(network.state_dict(), f"{stem}.state")
    if ONNX and stem.name in OF_ONNX:
        from onnxruntime.quantization import quantize_dynamic

        torch.onnx.export(network, (x,), f"{stem}.onnx", dynamic_shapes=batch)
        quantize_dynamic(f"{stem}.onnx", f"{stem}.int8.onnx")


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """What the networks give here, and what their files give there, by name."""
    folder = tmp_path_factory.mktemp("exported")
    inputs, expected = {}, {}
    for name in MODELS:
        network, inputs[name] = deployed(name)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit and torch.ao, that they will go
            warnings.simplefilter("ignore", torch.jit.TracerWarning)  # images' height and width are the trace's own
            warnings.filterwarnings("ignore", "torch.quantize_per_tensor", UserWarning)
            warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)  # of torch.onnx itself
            expected[name] = [network(x) for x in inputs[name]]
            write(network, inputs[name][0], folder / name)
    torch.save(inputs, folder / "inputs")
    subprocess.run([sys.executable, Path(__file__).with_name("alone.py"), folder], check=True)
    return expected, torch.load(folder / "outputs")


FORMATS = ["pt2", "traced.jit", "scripted.jit", "int8.jit", "pickle", "state", "onnx", "int8.onnx"]


@pytest.mark.full  # the usual run has the code of docs/export.md
@pytest.mark.parametrize("suffix", FORMATS)
def test_without_partnets_its_files_give_the_same(ran, suffix):
    if "onnx" in suffix and not ONNX:
        pytest.skip("needs onnx, onnxscript and onnxruntime")
    expected, outputs = ran
    names = [name for name in MODELS if f"{name}.{suffix}" in outputs]
    assert names
    for name in names:
        for here, there in zip(expected[name], outputs[f"{name}.{suffix}"], strict=True):
            rtol, atol = (0.1, 0.05) if "int8" in suffix else (1e-5, 1e-6)
            torch.testing.assert_close(there, here, rtol=rtol, atol=atol)
