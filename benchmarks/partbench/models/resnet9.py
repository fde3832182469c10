"""ResNet9: a network of eight convolutions, two residual connections and a linear layer."""

from __future__ import annotations

from torch import Tensor, nn


class ResNet9(nn.Sequential):
    """The network of the federated CIFAR-10 experiments, with GroupNorm (Appendix J.2; Dys); returns logits.

    6 575 370 parameters by default.

    Args:
        groups: groups of each GroupNorm, a divisor of 64. The paper states no number; the default is from Wu and He
            (2018).
        dropout: the dropout rate before the linear layer; the default is from Dys.

    Shapes:
        x [batch, 3, height, width], both from 32 to 63; returns [batch, 10].

    Example:
        >>> import torch
        >>> ResNet9()(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(self, groups: int = 32, dropout: float = 0.2) -> None:
        super().__init__(
            _layer(3, 64, groups),
            _layer(64, 128, groups),
            nn.MaxPool2d(2),
            _Residual(_layer(128, 128, groups), _layer(128, 128, groups)),
            _layer(128, 256, groups),
            nn.MaxPool2d(2),
            _layer(256, 512, groups),
            nn.MaxPool2d(2),
            _Residual(_layer(512, 512, groups), _layer(512, 512, groups)),
            nn.MaxPool2d(4),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(512, 10),
        )


class _Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def _layer(in_channels: int, channels: int, groups: int) -> nn.Sequential:
    convolution = nn.Conv2d(in_channels, channels, 3, padding=1)
    return nn.Sequential(convolution, nn.GroupNorm(groups, channels), nn.ReLU())
