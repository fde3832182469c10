"""The paper's architectures (Appendix I.3), and transformers: ordinary torch modules, for partnets.partition to divide.

Each parameter belongs to a module without children, so that a model can be partitioned layer by layer: convolutions and
linear layers by their rules, and whatever has no rule left out by its path with `skip`. All start from torch's own
initial weights, which the paper does not change, except FixupResNet, and the transformers' embeddings.
"""

from partnets.models.fixup_resnet import Bias, FixupResNet, Scale
from partnets.models.mnist_cnn import MnistCNN
from partnets.models.resnet9 import ResNet9
from partnets.models.transformer import Block, TransformerLM
from partnets.models.vit import ViT
from partnets.models.wide_resnet import ThinResNet50, WideResNet

__all__ = [
    "Bias",
    "Block",
    "FixupResNet",
    "MnistCNN",
    "ResNet9",
    "Scale",
    "ThinResNet50",
    "TransformerLM",
    "ViT",
    "WideResNet",
]
