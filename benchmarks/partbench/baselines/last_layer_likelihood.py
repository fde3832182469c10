"""last_layer: augmentations learned by the marginal likelihood of a Gaussian process on a network's last features."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from partbench.baselines.sparse_process import SparseProcess
from partnets.data.chunks import chunk
from partnets.hyper import Averaged
from partnets.training.preflight import check_finite
from partnets.utils.modules import device_of, evaluating, frozen, to_device

# Number of draws from the process for the expectation of a softmax.
DRAWS = 16


class LastLayer(nn.Module):
    """Log-probabilities of classes from Gaussian processes on averaged features: the result of last_layer.

    Args:
        augmentation: maps [n, ...] to [n, ...] with a separate draw for each example.
        features: maps [n, ...] to [n, features].
        process: processes on these features, one for each class.
        samples: number of copies of each example, over which the processes are averaged.

    Attributes:
        bounds: in each step of last_layer the lower bound on log p(D | ψ) / |D| in nats, estimated from its batch.

    Shapes:
        x [batch, ...]; returns [batch, classes].
    """

    def __init__(self, augmentation: nn.Module, features: nn.Module, process: SparseProcess, samples: int) -> None:
        super().__init__()
        self.augmentation, self.features, self.process, self.samples = augmentation, features, process, samples
        self.bounds: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self._log_probabilities(x).logsumexp(0) - math.log(DRAWS)

    def bound(self, x: Tensor, y: Tensor, examples: int) -> Tensor:
        """Return a lower bound on log p(D | ψ) / |D| in nats for |D| = examples, from a batch: a scalar.

        The expectation over augmentations and process values is outside of the logarithm of the softmax, which is
        concave in these values (Schwöbel et al. 2021). More samples make the bound tighter.
        """
        expected = self._log_probabilities(x).mean(0).gather(1, y[:, None]).mean()
        return expected - self.process.divergence() / examples

    def _log_probabilities(self, x: Tensor) -> Tensor:
        """Return log-probabilities [DRAWS, batch, classes] for values drawn from the processes."""
        copies = self.features(self.augmentation(x.repeat_interleave(self.samples, 0)))
        mean, variance = self.process(copies.unflatten(0, (len(x), self.samples)))
        return (mean + variance.sqrt() * torch.randn_like(mean.expand(DRAWS, -1, -1))).log_softmax(2)


def last_layer(
    augmentation: nn.Module,
    network: nn.Module,
    data: Dataset | Sequence[Tensor],
    *,
    steps: int,
    pretraining: int = 200,
    phase: int = 400,
    samples: int = 4,
    inducing: int = 100,
    batch_size: int = 128,
    lr: float = 1e-3,
    process_lr: float = 1e-2,
    hyper_lr: float = 1e-2,
    seed: int = 0,
    callback: Callable[[int, LastLayer], None] | None = None,
) -> LastLayer:
    """Learn ψ from all of the data by the last-layer marginal likelihood (Schwöbel et al. 2021).

    The network is first trained as usual for a few steps. Gaussian processes, which have a lower bound on the marginal
    likelihood, then replace its last layer. In alternating phases, ψ and the processes, or the network, learn by this
    bound. If they learned jointly, the network would fit the data before ψ has moved. Pretraining is short because a
    network that has memorised its data needs no invariance (their Section 7, confirmed here on digits).

    Args:
        augmentation: maps [n, ...] to [n, ...] with a separate draw for each example; its parameters are ψ. The paper
            uses partbench.paper.augmentations.SchwobelAffine.
        network: maps [n, ...] to logits [n, classes] with a final nn.Linear, which becomes nn.Identity.
        data: a Dataset of (x, y) or tensors (x, y), where y are classes.
        steps: number of steps on the bound.
        pretraining: number of steps on the cross-entropy before these, at four times lr.
        phase: number of steps of ψ and the processes, then of the network.
        samples: number of copies of each example.
        inducing: number of inducing points, initialised to the features of as many examples.
        batch_size: examples of a step.
        lr, process_lr, hyper_lr: Adam's learning rates of the network, the processes and ψ.
        seed: an int in [0, 2**63), seed of the draws of examples. The noise of augmentations uses torch's generator.
        callback: called after each step with its number, counted from 1, and the model.

    Returns:
        The network, the augmentation and the processes as a classifier. ψ and the network are changed in place.

    Raises:
        ValueError: the output does not come from an nn.Linear, or half of the examples or more have the same features.
        FloatingPointError: a loss is not finite; raised before the step.

    Example:
        >>> from partnets import hyper
        >>> data = torch.rand(60, 1, 8, 8), torch.randint(3, (60,))
        >>> augmentation = hyper.Affine()
        >>> network = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 3))
        >>> model = last_layer(augmentation, network, data, steps=4, phase=2, inducing=10, pretraining=5)
        >>> model(data[0]).exp().sum(1).allclose(torch.ones(60)), len(model.bounds)
        (True, 4)
    """
    chunks, generator = chunk(data, (1.0,), seed=seed), torch.Generator().manual_seed(seed)
    examples, device = chunks.sizes[0], device_of(network)

    def batch(size: int) -> tuple[Tensor, Tensor]:
        return to_device(chunks.sample_upto(1, size, generator), device)

    head = _head(network, augmentation, batch(2)[0])
    optimizer = torch.optim.Adam(network.parameters(), lr=4 * lr)
    averaged = Averaged(augmentation, network, samples=samples)
    psi = list(augmentation.parameters())
    with frozen(psi):
        for step in range(pretraining):
            x, y = batch(batch_size)
            _descend(F.cross_entropy(averaged(x), y), optimizer, f"step {step + 1} of pretraining")

    classes = network.get_submodule(head).out_features
    network.set_submodule(head, nn.Identity())
    with torch.no_grad():
        process = SparseProcess(network(augmentation(batch(inducing)[0])), classes)
    model = LastLayer(augmentation, network, process, samples)
    groups = (psi, hyper_lr), (process.parameters(), process_lr), (network.parameters(), lr)
    optimizer = torch.optim.Adam([{"params": list(learns), "lr": rate} for learns, rate in groups])
    waiting = network, nn.ModuleList([augmentation, process])
    for step in range(steps):
        with frozen(waiting[step // phase % 2].parameters()):
            bound = model.bound(*batch(batch_size), examples)
            _descend(-bound, optimizer, f"step {step + 1}")
        model.bounds.append(bound.item())
        if callback is not None:
            callback(step + 1, model)
    return model


def _descend(loss: Tensor, optimizer: torch.optim.Optimizer, what: str) -> None:
    check_finite(loss, what)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def _head(network: nn.Module, augmentation: nn.Module, x: Tensor) -> str:
    """Return the path of the nn.Linear that returns the network's output."""
    outputs: dict[str, Tensor] = {}
    linears = {path: module for path, module in network.named_modules() if path and isinstance(module, nn.Linear)}
    hooks = [
        module.register_forward_hook(lambda _, inputs, output, path=path: outputs.__setitem__(path, output))
        for path, module in linears.items()
    ]
    try:
        with torch.no_grad(), evaluating(network):
            output = network(augmentation(x))
    finally:
        for hook in hooks:
            hook.remove()
    head = next((path for path, found in outputs.items() if found is output), None)
    if head is None:
        raise ValueError(
            f"the network's output is not that of an nn.Linear in it; it has {', '.join(linears) or 'none'}. Let it end"
            " in one, which the processes replace."
        )
    return head
