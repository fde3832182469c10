"""The paper's architectures (Appendix I.3), and transformers, as torch modules that partnets.partition can convert.

Each parameter belongs to a module without children, so that a model can be partitioned module by module. All parameters
have a rule. Initial weights are torch's, as in the paper, except in MLP, FixupResNet and the transformers' embeddings.
MLP and FixupResNet keep their initialisation if partnets.partition draws it from a seed.
"""

from partnets.models.fixup_resnet import Bias, FixupResNet, Scale
from partnets.models.mlp import MLP
from partnets.models.mnist_cnn import MnistCNN
from partnets.models.resnet9 import ResNet9
from partnets.models.transformer import Block, TransformerLM
from partnets.models.vit import ViT
from partnets.models.wide_resnet import ThinResNet50, WideResNet

__all__ = [
    "MLP",
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
