"""load: image data sets by name."""

from __future__ import annotations

import os
from os import PathLike

from partkernels.arguments import check_seed
from partnets.data.dataset import Data
from partnets.data.images import cifar10, mnist, tiny_imagenet
from partnets.data.scikit_learn import digits

FROM_FILES = {"mnist": mnist, "cifar10": cifar10, "tiny-imagenet": tiny_imagenet}


def load(name: str, root: str | PathLike | None = None, *, rotated: bool = False, seed: int = 0) -> Data:
    """Load 'digits', 'mnist', 'cifar10' or 'tiny-imagenet', upright or rotated.

    Args:
        name: one of these.
        root: the folder of the files, as in the function of this name. By default the environment variable
            PARTNETS_DATA, or ./data. One folder can hold all data sets. digits needs none.
        rotated: whether to rotate each image by a separate angle, as in Data.rotated.
        seed: an int in [0, 2**63), seed of the angles and of the split of digits.

    Raises:
        ValueError: the name is unknown, seed is out of range, or a file is damaged.
        FileNotFoundError: a file is missing.
        ImportError: scikit-learn, for digits, or torchvision, for all others, is not installed.

    Example:
        >>> load("digits", rotated=True)
        Data(rotated-digits: 1297 examples to train and 500 to test, [1, 16, 16] of float32, 10 classes)
    """
    check_seed("seed", seed)
    if name == "digits":
        data = digits(seed=seed)
    elif name in FROM_FILES:
        data = FROM_FILES[name](root or os.environ.get("PARTNETS_DATA") or "data")
    else:
        raise ValueError(f"there is no data set {name!r}; pass one of {', '.join(('digits', *FROM_FILES))}.")
    return data.rotated(seed) if rotated else data
