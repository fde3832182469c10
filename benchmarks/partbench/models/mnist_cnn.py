"""MnistCNN: a network of two convolutions and three linear layers."""

from __future__ import annotations

from torch import nn


class MnistCNN(nn.Sequential):
    """The network of the MNIST experiments (Table 9), 1 276 630 parameters by default; returns logits.

    Args:
        image_size: height and width, at least 4.

    Shapes:
        x [batch, 1, image_size, image_size]; returns [batch, 10].

    Example:
        >>> import torch
        >>> MnistCNN()(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """

    def __init__(self, image_size: int = 28) -> None:
        super().__init__(
            nn.Conv2d(1, 20, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(20, 50, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(50 * (image_size // 4) ** 2, 500),
            nn.ReLU(),
            nn.Linear(500, 50),
            nn.ReLU(),
            nn.Linear(50, 10),
        )
