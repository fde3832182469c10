"""The paper's architectures (Appendix I.3), and transformers, as torch modules that partnets.partition can convert.

Each parameter belongs to a module without children, so that a model can be partitioned module by module. All parameters
have a rule. Initial weights are torch's, as in the paper, except in MLP, FixupResNet and the transformers' embeddings.
MLP and FixupResNet keep their initialisation if partnets.partition draws it from a seed.
"""

from partbench.models.fixup_resnet import FixupResNet
from partbench.models.mlp import MLP
from partbench.models.mnist_cnn import MnistCNN
from partbench.models.resnet9 import ResNet9
from partbench.models.transformer import Block, TransformerLM
from partbench.models.vit import ViT
from partbench.models.wide_resnet import ThinResNet50, WideResNet

__all__ = [
    "MLP",
    "Block",
    "FixupResNet",
    "MnistCNN",
    "ResNet9",
    "ThinResNet50",
    "TransformerLM",
    "ViT",
    "WideResNet",
]
