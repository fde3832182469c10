"""The reference backend, which defines every operator in plain PyTorch, on any device and floating dtype.

It materialises the subnetwork's weight, which the other backends never do. They are tested against it.
"""

from partkernels.backend.description import READY, Backend

BACKEND = Backend("reference", lambda: READY, rank=0, makes_maps=True, makes_defaults=True)
