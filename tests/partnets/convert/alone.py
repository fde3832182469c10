"""A program that runs the files of test_export_alone in a process that cannot import partnets or partkernels.

usage: `python alone.py FOLDER`
"""

import sys
import warnings
from pathlib import Path

import torch
from torch import nn


def plain():
    """Return the architecture of "features", written without partnets."""
    return nn.Sequential(nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU()), nn.Dropout(), nn.Linear(8, 3))


def from_state_dict(path):
    network = plain().eval()
    network.load_state_dict(torch.load(path))
    return network


def onnx(path):
    import onnxruntime

    session = onnxruntime.InferenceSession(path)
    name = session.get_inputs()[0].name
    return lambda x: torch.from_numpy(session.run(None, {name: x.numpy()})[0])


LOADERS = {
    ".pt2": lambda path: torch.export.load(path).module(),
    ".jit": torch.jit.load,
    ".pickle": lambda path: torch.load(path, weights_only=False),
    ".state": from_state_dict,
    ".onnx": onnx,
}


def main(folder):
    for name in ("partnets", "partkernels"):
        assert name not in sys.modules
        sys.modules[name] = None  # importing it or one of its modules raises
    warnings.simplefilter("ignore")  # torch.jit and torch.ao are deprecated
    inputs, outputs = torch.load(folder / "inputs"), {}
    for path in sorted(folder.iterdir()):
        if path.suffix in LOADERS:
            network = LOADERS[path.suffix](path)
            with torch.no_grad():
                outputs[path.name] = [network(x) for x in inputs[path.name.split(".")[0]]]
    torch.save(outputs, folder / "outputs")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
