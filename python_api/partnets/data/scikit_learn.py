"""Digits: the 8x8 grey digits included in scikit-learn."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Generator

from partkernels.arguments import check_seed
from partnets.data.dataset import Data, moments

EXAMPLES = 1797


def digits(size: int = 16, *, test: int = 500, seed: int = 0) -> Data:
    """Load the 1797 digits of scikit-learn, enlarged bilinearly and split at random. Needs scikit-learn.

    Args:
        size: height and width of the images, at least 1; 8 leaves them unchanged.
        test: the number of test examples, 1..1796; the others are for training.
        seed: an int in [0, 2**63), seed of the split.

    Returns:
        Images float32 [n, 1, size, size] in [0, 1].

    Raises:
        ImportError: scikit-learn is not installed.
        ValueError: a number is out of range.

    Example:
        >>> digits()
        Data(digits: 1297 examples to train and 500 to test, [1, 16, 16] of float32, 10 classes)
    """
    check_seed("seed", seed)
    if size < 1:
        raise ValueError(f"size={size}; pass at least 1.")
    if not 1 <= test < EXAMPLES:
        raise ValueError(f"test={test}, but there are {EXAMPLES} digits; pass 1..{EXAMPLES - 1}.")
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("digits come with scikit-learn; pip install scikit-learn.") from error
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32, device="cpu").view(-1, 1, 8, 8) / 16
    images = F.interpolate(images, (size, size), mode="bilinear", align_corners=False)
    order = torch.randperm(EXAMPLES, generator=Generator().manual_seed(seed), device="cpu")
    images, labels = images[order], torch.tensor(labels, dtype=torch.int64, device="cpu")[order]
    train = images[:-test], labels[:-test]
    return Data("digits", train, (images[-test:], labels[-test:]), 10, *moments(train[0]))
