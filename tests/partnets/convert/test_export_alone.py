"""Models of finalize(model, "deploy"), exported in each format, give the same outputs in a process without partnets."""

import importlib.util
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from small_network import perturbed
from torch import nn

import partnets
from partnets import hyper

PROPORTIONS = (0.6, 0.3, 0.1)
# Requirements of torch.onnx, and ONNX Runtime, which runs the file.
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


# Models to export to ONNX, which takes seconds each. Together they have every kind of module that replaces ψ.
OF_ONNX = ("averaged", "masked")
MODELS = {
    "images": (images, 0),
    "averaged": (images, 4),
    "masked": (masked, 0),
    "features": (features, 0),
}


def deployed(name):
    """Return a deployed model with different weights in each partition, and inputs of two batch sizes."""
    make, draws = MODELS[name]
    torch.manual_seed(0)
    model, x = make()
    perturbed(partnets.partition(model, PROPORTIONS), 0.05)
    return partnets.finalize(model, "deploy", draws=draws), [x, x[:3]]


def write(network, x, stem):
    """Export the network in each format that it supports."""
    batch = ({0: torch.export.Dim("batch")},)
    torch.export.save(torch.export.export(network, (x,), dynamic_shapes=batch), f"{stem}.pt2")
    torch.jit.trace(network, (x,)).save(f"{stem}.traced.jit")
    if stem.name != "averaged":  # it contains a class of partnets
        torch.jit.script(network).save(f"{stem}.scripted.jit")
        torch.save(network, f"{stem}.pickle")
    if stem.name == "features":
        torch.save(network.state_dict(), f"{stem}.state")
    if ONNX and stem.name in OF_ONNX:
        torch.onnx.export(network, (x,), f"{stem}.onnx", dynamic_shapes=batch)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Return the networks' outputs here and the outputs of their files in the other process, by name."""
    folder = tmp_path_factory.mktemp("exported")
    inputs, expected = {}, {}
    for name in MODELS:
        network, inputs[name] = deployed(name)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit is deprecated
            warnings.simplefilter("ignore", torch.jit.TracerWarning)  # the trace fixes images' height and width
            warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)  # raised by torch.onnx
            expected[name] = [network(x) for x in inputs[name]]
            write(network, inputs[name][0], folder / name)
    torch.save(inputs, folder / "inputs")
    subprocess.run([sys.executable, Path(__file__).with_name("alone.py"), folder], check=True)
    return expected, torch.load(folder / "outputs")


FORMATS = ["pt2", "traced.jit", "scripted.jit", "pickle", "state", "onnx"]


@pytest.mark.full  # the usual run tests the code of docs/export.md
@pytest.mark.parametrize("suffix", FORMATS)
def test_exported_files_give_the_same_outputs_without_partnets(ran, suffix):
    if "onnx" in suffix and not ONNX:
        pytest.skip("needs onnx, onnxscript and onnxruntime")
    expected, outputs = ran
    names = [name for name in MODELS if f"{name}.{suffix}" in outputs]
    assert names
    for name in names:
        for here, there in zip(expected[name], outputs[f"{name}.{suffix}"], strict=True):
            torch.testing.assert_close(there, here, rtol=1e-5, atol=1e-6)
