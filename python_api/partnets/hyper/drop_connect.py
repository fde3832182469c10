"""DropConnect: dropout of a weight's entries, with a learned rate."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from partnets.hyper.dropout import RATES, check_rates, mask
from partnets.hyper.hyperparameter import Hyperparameter
from partnets.hyper.learned import Learned
from partnets.hyper.ranges import Range


class DropConnect(Hyperparameter):
    """Dropout of a weight's entries: in training they are 0 with probability p, one draw per batch (Wan et al. 2013).

    Set it as the attribute `drop_connect` of a layer before stn.convert. It drops the hidden-state weights of recurrent
    layers (Merity et al. 2017), and the weight of linear layers, with the same mask for W_hyper. A torch.nn layer
    ignores the attribute. The rate gets no gradient through the mask: see hyper.Dropout.

    Args:
        rate: the initial p.
        range: range of the rate, inside [0, 1].

    Attributes:
        rate: hyper.Learned, a single value.

    Shapes:
        A weight; returns a mask of the same shape, with entries 0 or 1 / (1 - p).

    Raises:
        ValueError: rate is outside the range, or the range exceeds [0, 1].

    Example:
        >>> from partnets import stn
        >>> lstm = nn.LSTM(4, 8)
        >>> lstm.drop_connect = DropConnect(0.5)
        >>> stn.convert(lstm, lstm.drop_connect)(torch.ones(5, 2, 4))[0].shape
        torch.Size([5, 2, 8])
    """

    only_in_training = True

    def __init__(self, rate: float = 0.5, *, range: Range = RATES) -> None:
        super().__init__()
        check_rates(range)
        range.check("rate", rate)
        self.rate = Learned(rate, range)

    def forward(self, weight: Tensor) -> Tensor:
        if not self.training:
            return torch.ones_like(weight)
        return mask(self.rate(), weight.shape, weight.dtype)

    def to_ordinary(self) -> nn.Module:
        """Return nn.Identity(): a deployed model drops nothing."""
        return nn.Identity()
