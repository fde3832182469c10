"""laplace: the marginal likelihood of a trained network by a post-hoc Laplace approximation."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from partnets.data.examples import as_dataset
from partnets.hyper import hyperparameters
from partnets.utils.likelihood import no_classes
from partnets.utils.modules import device_of, evaluating, frozen
from partnets.utils.targets import check_targets


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
        ValueError: the model is no classifier of these examples: its outputs are not [batch, classes], or a label is
            not a whole number in 0..classes-1.

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
    loader = DataLoader(as_dataset(data), batch_size=batch_size)
    _check_classifier(model, loader)
    # What requires a gradient counts as a weight, with a prior.
    with frozen(hyperparameters(model)), evaluating(model), warnings.catch_warnings():
        # It is about predictions, of which there are none here.
        warnings.filterwarnings("ignore", "By default `link_approx`", UserWarning)
        fitted = Laplace(model, "classification", subset_of_weights="all", hessian_structure=structure)
        fitted.fit(loader)
        fitted.optimize_prior_precision(method="marglik")
        return float(fitted.log_marginal_likelihood())


@torch.no_grad()
def _check_classifier(model: nn.Module, loader: DataLoader) -> None:
    """Raise ValueError unless the outputs are [batch, classes] and the labels whole numbers below `classes`."""
    with evaluating(model):
        for x, y in loader:
            output = model(x.to(device_of(model))).cpu()
            if output.dim() != 2 or y.shape != output.shape[:1]:
                raise ValueError(
                    f"the outputs are {list(output.shape)} and the labels {list(y.shape)}; baselines.laplace is for"
                    " classifiers, of logits [batch, classes] and labels [batch]."
                )
            check_targets(F.cross_entropy, output, y)
            if (strange := y[no_classes(output, y)]).numel():
                raise ValueError(f"a label is {int(strange[0])}, which is no class; leave such examples out.")
