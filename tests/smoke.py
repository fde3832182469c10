"""A check of an installed wheel: its compiled backend runs under both packages without a warning; both have types.

usage: python -W error smoke.py [none]    none: a wheel without a compiled backend
"""

import sys
import warnings
from importlib.resources import files

import torch

import partkernels as pk
import partnets

if "none" in sys.argv:
    warnings.filterwarnings("ignore", "partkernels runs on cpu through its reference backend")
else:
    assert pk.backends()["cpu"] == "ready", pk.backends()
model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.Flatten(), torch.nn.Linear(144, 3))
partnets.partition(model, (0.8, 0.1, 0.1))
x = torch.randn(2, 1, 8, 8)
with partnets.subnetwork(model, active=2, update=2):
    ours = model(x)
    with pk.use_backend("reference"):
        reference = model(x)
    ours.sum().backward()
torch.testing.assert_close(ours, reference)
assert all(files(package).joinpath("py.typed").is_file() for package in (pk, partnets))
print("the wheel works")
