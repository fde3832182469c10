"""Chunks of data, batches of them, and data sets in memory.

Images keep the dtype of their files, mostly uint8, and a model begins with a layer that converts them to floats:

    data = partnets.data.Data.from_arrays((images, labels))
    network = nn.Sequential(Normalise(data.mean, data.std), ...)
    model = nn.Sequential(ToFloat(), hyper.Averaged(hyper.Affine(), network))
    chunks = partnets.chunk(data.train, (0.9, 0.1))
"""

from partnets.data.dataset import Data, digits, moments
from partnets.data.normalise import Normalise, ToFloat
from partnets.data.parts import Parts

__all__ = ["Data", "Normalise", "Parts", "ToFloat", "digits", "moments"]
