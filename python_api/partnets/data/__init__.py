"""The paper's data sets, read from local files; nothing is ever downloaded.

Images keep the dtype of their files, mostly uint8, and a model begins with a layer that converts them to floats:

    data = partnets.data.load("cifar10", root="data", rotated=True).subset(20_000)
    network = nn.Sequential(Normalise(data.mean, data.std), FixupResNet())
    model = nn.Sequential(ToFloat(), hyper.Averaged(hyper.Affine(), network))
    chunks = partnets.chunk(data.train, (0.9, 0.1))
"""

from partnets.data.by_name import load
from partnets.data.dataset import Data, moments
from partnets.data.images import cifar10, mnist, tiny_imagenet
from partnets.data.normalise import Normalise, ToFloat
from partnets.data.scikit_learn import digits

__all__ = [
    "Data",
    "Normalise",
    "ToFloat",
    "cifar10",
    "digits",
    "load",
    "mnist",
    "moments",
    "tiny_imagenet",
]
