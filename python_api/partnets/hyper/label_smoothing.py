"""LabelSmoothing: cross-entropy with smoothed labels, whose smoothing is learned."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from partnets.hyper.dropout import RATES, check_rates
from partnets.hyper.hyperparameter import Hyperparameter
from partnets.hyper.learned import Learned
from partnets.hyper.ranges import Range
from partnets.utils.likelihood import IGNORED


class LabelSmoothing(Hyperparameter):
    """The cross-entropy as a training loss, with label smoothing s of each example's own (Szegedy et al. 2016).

    (1 - s) (-log p_y) + s times the mean of -log p over the classes, as torch.nn.functional.cross_entropy has it. Pass
    it as `loss` and put it into the model too, at its end: there it passes the logits through. In evaluation mode it is
    the plain cross-entropy, by which validation goes, also where a function of yours calls it.

    Args:
        smoothing: the initial s.
        range: of it, inside [0, 1].

    Attributes:
        smoothing: hyper.Learned, a single value.

    Shapes:
        logits [batch, classes, ...] and labels [batch, ...] to the losses of all labels that are not -100, a vector.
        logits alone to themselves.

    Raises:
        ValueError: smoothing is not inside the range, or the range reaches out of [0, 1].

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
    # By which unseen data are judged.
    plain = staticmethod(F.cross_entropy)

    def __init__(self, smoothing: float = 0.1, *, range: Range = RATES) -> None:
        super().__init__()
        check_rates(range)
        range.check("smoothing", smoothing)
        self.smoothing = Learned(smoothing, range)

    def forward(self, logits: Tensor, labels: Tensor | None = None) -> Tensor:
        if labels is None:
            return logits
        counts, losses = labels != IGNORED, F.cross_entropy(logits, labels, reduction="none")
        if self.training:
            losses = losses + self.smoothing(labels) * (-logits.log_softmax(1).mean(1) - losses)
        return losses[counts]
