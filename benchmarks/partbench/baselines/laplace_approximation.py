"""laplace: the marginal likelihood of a trained network by a post-hoc Laplace approximation."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from partnets.data.examples import as_dataset
from partnets.hyper import hyperparameters
from partnets.utils.losses import no_classes
from partnets.utils.modules import evaluating, frozen


def laplace(model: nn.Module, data: Dataset | Sequence[Tensor], *, batch_size: int = 256) -> float:
    """Compute log p(D | ψ) of a classifier by Laplace's approximation at its weights (Immer et al. 2021), in nats.

    The approximate Hessian is diagonal. The prior has one precision for all weights, chosen to maximise the result.

    Args:
        model: a trained torch module that returns logits. Hyperparameters in it are left unchanged.
        data: its training data, a Dataset of (x, y) or tensors (x, y).
        batch_size: number of examples per pass.

    Raises:
        ImportError: laplace-torch is not installed.
        ValueError: the logits are not [batch, classes], or a label is not one of these classes.

    Example:
        >>> import torch
        >>> laplace(nn.Linear(4, 2), (torch.randn(50, 4), torch.randint(2, (50,)))) < 0  # doctest: +SKIP
        True
    """
    try:
        from laplace import Laplace
    except ImportError as error:
        raise ImportError(
            "baselines.laplace needs laplace-torch; pip install laplace-torch, or, where torchvision cannot be"
            " installed, laplace-torch and its dependencies with pip's --no-deps."
        ) from error
    loader = DataLoader(as_dataset(data), batch_size=batch_size)
    with torch.no_grad(), evaluating(model):
        for x, y in loader:
            logits = model(x)
            if logits.dim() != 2 or y.dim() != 1 or y.is_floating_point() or bool(no_classes(logits, y).any()):
                raise ValueError(
                    f"the outputs are {list(logits.shape)} and the targets {y.dtype} {list(y.shape)}; baselines.laplace"
                    " needs logits [batch, classes] and labels from 0 to classes - 1."
                )
    # laplace-torch treats every parameter that requires a gradient as a weight with a prior.
    with frozen(hyperparameters(model)), evaluating(model), warnings.catch_warnings():
        # The warning concerns predictions, which are not made here.
        warnings.filterwarnings("ignore", "By default `link_approx`", UserWarning)
        fitted = Laplace(model, "classification", subset_of_weights="all", hessian_structure="diag")
        fitted.fit(loader)
        fitted.optimize_prior_precision(method="marglik")
        return float(fitted.log_marginal_likelihood())
