"""DropConnect: entries of a weight dropped, at a rate that is learned."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from partnets.hyper.dropout import RATES, check_rates, mask
from partnets.hyper.hyperparameter import Hyperparameter
from partnets.hyper.learned import Learned
from partnets.hyper.ranges import Range


class DropConnect(Hyperparameter):
    """In training, entries of a weight are 0 with probability p (Wan et al. 2013), one draw for each batch.

    Give it to a layer as its attribute `drop_connect`, before stn.convert: of a recurrent layer the weights of the
    hidden state are dropped (Merity et al. 2017), of a linear one its weight, with W_hyper alike. An ordinary layer
    knows nothing of it. The rate gets no gradient through the mask: see hyper.Dropout.

    Args:
        rate: the initial p.
        range: of the rate, inside [0, 1].

    Attributes:
        rate: hyper.Learned, a single value.

    Shapes:
        a weight to a mask of the same shape, 0 or 1 / (1 - p).

    Raises:
        ValueError: rate is not inside the range, or the range reaches out of [0, 1].

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
        """Nothing: what is deployed drops nothing."""
        return nn.Identity()
