"""Lets torchvision be imported beside PyTorch's CPU build; import this before it.

PyPI's torchvision is built for CUDA. With PyTorch's CPU build its operators do not load, and registering their shapes
raises. timm and transformers import torchvision but need none of these operators.
"""

import sys
import types

import torch

if torch.version.cuda is None:
    sys.modules.setdefault("torchvision._meta_registrations", types.ModuleType("torchvision._meta_registrations"))
