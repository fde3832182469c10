"""lml: the log-likelihood of held-out chunks, a marginal likelihood that hyperparameters maximise."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch.nn.functional as F
from torch import nn

from partnets.data.batch import Forward, call
from partnets.data.chunks import Chunks, check_unseen
from partnets.data.fetching import check_options
from partnets.evaluation.metrics import total_loss
from partnets.evaluation.running_statistics import fresh_statistics
from partnets.evaluation.same_chunks import adopt_chunks
from partnets.subnetworks.context import subnetwork
from partnets.utils import random_state
from partnets.utils.losses import Loss, check_loss, plain
from partnets.utils.modules import device_of


def lml(
    model: nn.Module,
    chunks: Chunks,
    loss: Loss = F.cross_entropy,
    *,
    batch_size: int = 256,
    seed: int | None = None,
    other_chunks: bool = False,
    forward: Forward = call,
    **loading: Any,
) -> float:
    """Compute L_ML = sum over k = 2..C of log p(D_k | w_s^(k-1)), in nats: Eq. 2 without its first term.

    This approximates the conditional marginal likelihood log p(D_2:C | D_1) (Section 3). It runs without gradients and
    in evaluation mode, and leaves the model's modes and the random states unchanged. Running statistics of BatchNorm
    layers are estimated first (see partnets.estimate_statistics), and restored afterwards.

    Args:
        model: a model with partitioned layers, with as many partitions as there are chunks.
        chunks: chunks of examples (x, y), or of dicts with labels; batches are moved to the model's device.
        loss: loss(output, y), the mean negative log-likelihood in nats, as torch's criteria return it, or the loss of
            each example or token. If y has a class for each token, L_ML is a sum over tokens, otherwise over examples;
            labels of -100 are ignored: see mean_loss. Label smoothing and class weights of torch's cross-entropy and
            nll_loss are not used, as in Trainer.
        batch_size: number of examples per batch.
        seed: seed of the random states (torch's, Python's, NumPy's) during the evaluation, for models and data with
            noise; with None, the current states are used.
        other_chunks: whether the model may have learned from other chunks than these. Trainers store in the model, and
            in its state_dict, which chunks it learns from; you must know which examples of other chunks are new to it.
        forward: forward(model, batch), which returns output and y; see partnets.data.batch.call for the default.
        **loading: num_workers, pin_memory and other options of a DataLoader.

    Warns:
        UserWarning: the loss is not a log-likelihood, such as a squared error; or it is NaN.

    Raises:
        ValueError: the model and the chunks differ in C, C is below 2, the loss is a sum over the batch, the model has
            learned from other chunks, or batch_size is below 1.
        TypeError: an option is not a DataLoader's, or not one that can be set here.

    Example:
        >>> import partnets, torch
        >>> model = partnets.Linear(4, 2, proportions=(0.5, 0.5), defaults="zero", bias=False)
        >>> _ = nn.init.zeros_(model.weight)
        >>> chunks = partnets.chunk((torch.randn(20, 4), torch.randint(2, (20,))), (0.5, 0.5))
        >>> round(lml(model, chunks), 2)  # 10 examples at probability 1/2
        -6.93
    """
    check_loss(loss)
    loss, total = plain(loss), 0.0
    check_unseen(chunks)
    how = {"batch_size": batch_size, "forward": forward}
    options = {"collate": chunks.collate, "loading": check_options(loading, "lml"), **how}
    fresh = fresh_statistics(model, chunks, other_chunks=other_chunks, **how, **loading)
    with fresh, random_state.preserved(device_of(model)):
        if seed is not None:
            random_state.seed_all(seed)  # a data set may use Python's or NumPy's generator
        for k in range(2, len(chunks) + 1):
            with subnetwork(model, active=k - 1):
                found = total_loss(model, chunks[k], loss, **options)[0]
            if math.isnan(found) and not math.isnan(total):
                warnings.warn(f"the loss of subnetwork {k - 1} on chunk {k} is nan, and so is L_ML.", stacklevel=2)
            total -= found
    if not other_chunks:
        adopt_chunks(model, chunks)
    return total
