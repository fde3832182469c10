"""The toy data of mask learning, with informative and spurious features."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from partnets.data.dataset import Data, moments


def input_selection(
    examples: int = 1000, *, test: int = 1000, seed: int = 0, informative: int = 15, spurious: int = 15
) -> Data:
    """Draw the data set of Section 5 for the selection of a network's inputs.

    y in {0, 1}, equally often; x_i = y + ε_i for the informative features, which come first, and x_i = ε_i for the
    spurious ones, with ε_i ~ N(0, 1). The paper does not state y's values; it has 1000 training examples in Section 5
    and 3000 in Appendix I.5.

    Args:
        examples, test: the numbers of training and test examples.
        seed: an int in [0, 2**63). The test examples do not depend on the number of training examples.
        informative, spurious: the numbers of features.

    Returns:
        Features float32 [n, informative + spurious].

    Example:
        >>> data = input_selection()
        >>> data
        Data(input-selection: 1000 examples to train and 1000 to test, [30] of float32, 2 classes)
        >>> min(data.mean[:15]) > 0.3 > 0.1 > max(data.mean[15:])
        True
    """
    generator = Generator().manual_seed(seed)

    def draw(n: int) -> tuple[Tensor, Tensor]:
        y = torch.randperm(n, generator=generator, device="cpu") % 2
        x = torch.randn(n, informative + spurious, generator=generator, device="cpu")
        x[:, :informative] += y[:, None]
        return x, y

    test_examples = draw(test)
    train = draw(examples)
    return Data("input-selection", train, test_examples, 2, *moments(train[0]))
