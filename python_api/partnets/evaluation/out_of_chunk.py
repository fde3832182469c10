"""lml: the out-of-chunk log-likelihood that hyperparameters maximise."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partnets.data.chunks import Chunks, check_unseen
from partnets.evaluation.metrics import check_counts, mean_loss
from partnets.nn.live import subnetwork
from partnets.utils.modules import device_of
from partnets.utils.random_state import preserved


def lml(
    model: nn.Module,
    chunks: Chunks,
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    *,
    batch_size: int = 256,
    seed: int | None = None,
) -> float:
    """L_ML = sum over k = 2..C of log p(D_k | w_s^(k-1)), in nats: Eq. 2 without its first term.

    An approximation of the conditional marginal likelihood log p(D_2:C | D_1) (Section 3). Runs without gradients and
    in evaluation mode, and leaves the model's modes and the random states as they were.

    Args:
        model: with partitioned layers, as many partitions as there are chunks.
        chunks: of (x, y) examples; batches go to the model's device.
        loss: loss(output, y), the mean negative log-likelihood per example in nats, as torch's criteria return it.
        batch_size: the examples at once.
        seed: of torch's random state during the evaluation, for models with noise; None goes on from the present one.

    Raises:
        ValueError: the model and the chunks differ in C, C is below 2, or batch_size is below 1.

    Example:
        >>> import partnets
        >>> model = partnets.Linear(4, 2, proportions=(0.5, 0.5), defaults="zero", bias=False)
        >>> _ = nn.init.zeros_(model.weight)
        >>> chunks = partnets.chunk((torch.randn(20, 4), torch.randint(2, (20,))), (0.5, 0.5))
        >>> round(lml(model, chunks), 2)  # 10 examples at probability 1/2
        -6.93
    """
    check_counts(model, chunks)
    check_unseen(chunks)
    total = 0.0
    with preserved(device_of(model)):
        if seed is not None:
            torch.manual_seed(seed)
        for k in range(2, chunks.count + 1):
            with subnetwork(model, active=k - 1):
                total -= chunks.sizes[k - 1] * mean_loss(
                    model, chunks[k], loss, batch_size=batch_size, collate=chunks.collate
                )
    return total
