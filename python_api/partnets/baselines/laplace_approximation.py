"""laplace: the marginal likelihood of a trained network by a post-hoc Laplace approximation."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from partnets.data.examples import as_dataset
from partnets.hyper import hyperparameters
from partnets.utils.modules import evaluating, frozen


def laplace(
    model: nn.Module, data: Dataset | Sequence[Tensor], *, structure: str = "diag", batch_size: int = 256
) -> float:
    """log p(D | ψ) of a classifier by Laplace's approximation around its weights (Immer et al. 2021), in nats.

    The prior's precision is the one, the same for all weights, that maximises the result.

    Args:
        model: an ordinary module, trained; returns logits. Hyperparameters in it stay as they are.
        data: what it was trained on, a Dataset of (x, y) or tensors (x, y).
        structure: of the Hessian's approximation, as laplace-torch names it: 'diag', 'kron' or 'full'.
        batch_size: the examples at once.

    Raises:
        ImportError: laplace-torch is not installed.

    Example:
        >>> import torch
        >>> laplace(nn.Linear(4, 2), (torch.randn(50, 4), torch.randint(2, (50,)))) < 0  # doctest: +SKIP
        True
    """
    try:
        from laplace import Laplace
    except ImportError as error:
        raise ImportError(
            "baselines.laplace needs laplace-torch; pip install laplace-torch, or partkernels' extra 'laplace', or,"
            " where torchvision cannot be installed, laplace-torch and what it imports with pip's --no-deps."
        ) from error
    # What requires a gradient counts as a weight, with a prior.
    with frozen(hyperparameters(model)), evaluating(model), warnings.catch_warnings():
        # It is about predictions, of which there are none here.
        warnings.filterwarnings("ignore", "By default `link_approx`", UserWarning)
        fitted = Laplace(model, "classification", subset_of_weights="all", hessian_structure=structure)
        fitted.fit(DataLoader(as_dataset(data), batch_size=batch_size))
        fitted.optimize_prior_precision(method="marglik")
        return float(fitted.log_marginal_likelihood())
