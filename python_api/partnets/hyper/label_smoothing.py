"""LabelSmoothing: cross-entropy with a learned label smoothing."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from partnets.hyper.dropout import RATES, check_rate
from partnets.hyper.hyperparameter import Hyperparameter
from partnets.hyper.learned import Learned
from partnets.hyper.ranges import Range
from partnets.utils.losses import IGNORED


class LabelSmoothing(Hyperparameter):
    """The cross-entropy as a training loss, with label smoothing s for each example (Szegedy et al. 2016).

    The loss is (1 - s) (-log p_y) + s times the mean of -log p over the classes, as in
    torch.nn.functional.cross_entropy. Pass it as `loss`, and also put it at the end of the model, where it passes the
    logits through. In evaluation mode it is the cross-entropy without smoothing, which validation uses.

    Args:
        smoothing: the initial s.
        range: range of s, inside [0, 1].

    Shapes:
        logits [batch, classes, ...] and labels [batch, ...]; returns a vector of losses, without labels of -100. A
        call with logits only returns them.

    Raises:
        ValueError: smoothing is outside the range, or the range exceeds [0, 1].

    Example:
        >>> import torch
        >>> smoothing = LabelSmoothing(0.1)
        >>> logits, y = torch.randn(3, 4), torch.tensor([0, 3, 1])
        >>> expected = F.cross_entropy(logits, y, label_smoothing=0.1)
        >>> torch.allclose(smoothing(logits, y).mean(), expected)
        True
    """

    per_example = True
    hyper_gradient = "lookahead"
    acts_in_loss, acts_on_inputs = True, False
    # The loss of held-out data.
    plain = staticmethod(F.cross_entropy)

    def __init__(self, smoothing: float = 0.1, *, range: Range = RATES) -> None:
        super().__init__()
        check_rate("smoothing", smoothing, range)
        self.smoothing = Learned(smoothing, range)

    def forward(self, logits: Tensor, labels: Tensor | None = None) -> Tensor:
        if labels is None:
            return logits
        counts, losses = labels != IGNORED, F.cross_entropy(logits, labels, reduction="none")
        if self.training:
            losses = losses + self.smoothing(labels) * (-logits.log_softmax(1).mean(1) - losses)
        return losses[counts]

    def to_torch(self) -> nn.Module:
        """Return nn.Identity()."""
        return nn.Identity()
