"""stn.Trainer: joint training of a best response and the hyperparameters (Algorithm 1 of MacKay et al. 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Generator, nn

from partnets.data.chunks import Chunks
from partnets.evaluation.snapshot import Snapshot
from partnets.hyper import Hyperparameter, Learned, penalties
from partnets.optim.base import check_held
from partnets.stn.converting import vector_of
from partnets.stn.step import Response, check_entropy, count_examples
from partnets.stn.vector import HyperVector
from partnets.subnetworks.parameters import partitioned_parameters
from partnets.training import trainer
from partnets.utils.eager import eagerly
from partnets.utils.losses import mean
from partnets.utils.modules import evaluating, to_device
from partnets.utils.random_state import preserved

# Sizes of the trial batches; two of them, so that no other dimension has the size of both.
SIZES = 2, 3
# The number of batches within which every hyperparameter must be read, even if not every batch reads it.
TRIES = 16


class Trainer(trainer.Trainer):
    """A trainer that alternates steps of the best response φ on training data with steps of λ and σ on unseen data.

    It has all features of partnets.Trainer, with perturbed hyperparameters in both steps, stn.step_weights and
    stn.step_hyper. The unseen data are a validation set, with partnets.held_out; or, if all data are trained
    on, D_k, which subnetwork k - 1 of a partitioned network has not seen (L_ML).

    Args:
        model: a model converted by stn.convert, then passed through partnets.held_out or partnets.partition.
        chunks: the chunks of partnets.held_out, with the validation set as D_2; or of partnets.chunk.
        hyper: the modules of the λ to learn; if None, all that the layers read.
        hyper_every, hyper_steps: T_train and T_valid: hyper_steps steps of λ after every hyper_every steps of φ.
        hyper_after: the number of warm-up steps of φ; hyperparameters are perturbed during warm-up too.
        entropy: τ, the weight of the entropy of the perturbation in the steps of λ and σ. 0.001 in published runs of
            convolutional networks, 0.0001 in those of Δ-STN.
        sampling: as for partnets.Trainer; by default only partitions that have parameters are drawn.
        **options: as for partnets.Trainer. loss is the training loss, with or without terms that only regularise;
            hyper_loss is the validation loss, by default the negative log-likelihood if loss has a known one. α₁ is the
            learning rate of optimizer; α₂ and α₃ are those of hyper_optimizer, an optimizer of torch.optim of all of
            partnets.hyper.hyperparameters(model).

    Attributes:
        history: as for partnets.Trainer; its values include each σ as "NAME, scale". lml is minus the number of
            validation examples times their mean loss.

    Raises:
        ValueError: no layer responds; and as for partnets.Trainer.

    Example:
        >>> import torch, partnets
        >>> from partnets import hyper, stn
        >>> dropout = hyper.Dropout(0.5)
        >>> network = stn.convert(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), dropout, nn.Linear(8, 2)), dropout)
        >>> data = torch.randn(40, 4), torch.randint(2, (40,))
        >>> history = stn.Trainer(*partnets.held_out(network, data, validation=0.25), batch_size=8).fit(5)
        >>> sorted(history.values), history.steps["hyper_k"]
        (['networks.0.2.rate', 'networks.0.2.rate, scale'], [2, 2, 2, 2, 2])
    """

    def __init__(
        self,
        model: nn.Module,
        chunks: Chunks,
        *,
        hyper: Hyperparameter | Sequence[Hyperparameter] | None = None,
        entropy: float = 1e-3,
        sampling: Sequence[float] | None = None,
        **options: Any,
    ) -> None:
        check_entropy(entropy)
        self.entropy = entropy
        if hyper is None:
            hyper = vector_of(model).modules
        if sampling is None:
            sampling = _owning(model, chunks)
        super().__init__(model, chunks, hyper=hyper, sampling=sampling, hyper_gradient="direct", **options)

    def values(self) -> dict[str, float]:
        """Return the current value of each hyperparameter, in its units, and each σ, in unconstrained units."""
        values = super().values()
        for path, module in self.hyper.items():
            for inner, one in module.named_modules():
                if isinstance(one, Learned):
                    values |= {f"{path}.{name}" if path else name: scale for name, scale in one.scales(inner).items()}
        return values

    def _make_strategy(self, hyper_gradient: str, learns: bool) -> Response:
        return Response({}, self.entropy)

    def configuration(self) -> dict[str, Any]:
        vector = vector_of(self.model)
        own = {"centred": vector.centred, "linearised": vector.linearised, "entropy": self.entropy}
        return super().configuration() | own

    def _start(self) -> None:
        _check_start(self)
        super()._start()


def _owning(model: nn.Module, chunks: Chunks) -> tuple[float, ...]:
    """Return the chunks' proportions, with 0 for partitions without parameters, such as that of a validation set."""
    parameters = partitioned_parameters(model)
    return tuple(
        share if any(one.numel(k) for one in parameters) else 0.0 for k, share in enumerate(chunks.proportions, start=1)
    )


def _check_start(trainer: Trainer) -> None:
    """Raise ValueError if layers get other examples than the batch's, or a hyperparameter is not read."""
    vector, before = vector_of(trainer.model), Snapshot(trainer.model)
    check_held(trainer.model)
    learns = {one for module in trainer.hyper.values() for one in module.modules() if isinstance(one, Learned)}
    names = {one: name for one, name in zip(vector.learned, vector.names, strict=True) if one in learns}
    try:
        with preserved(trainer.device), torch.no_grad(), eagerly(), vector.noting() as read:
            for size in SIZES:
                _train(trainer, vector, _drawn(trainer, size, 0))
            for seed in range(1, 1 + TRIES):
                if read.issuperset(names):
                    break
                batch = _drawn(trainer, SIZES[-1], seed)
                _train(trainer, vector, batch)
                with evaluating(trainer.model), vector.perturbed(count_examples(batch, vector.batch_dim)):
                    mean(trainer.hyper_loss, *trainer.forward(trainer.model, batch))
    finally:
        before.put_back()
    if unread := [name for one, name in names.items() if one not in read]:
        raise ValueError(
            f"in training nothing reads {', '.join(unread)}: its module is not called, is in evaluation mode, belongs"
            " to a layer that stn.convert left unchanged, or is a loss that is not passed as loss=. Correct this, or"
            " leave it out of stn.convert."
        )


def _drawn(trainer: Trainer, examples: int, seed: int) -> Any:
    return to_device(trainer.chunks.sample(1, examples, Generator().manual_seed(seed)), trainer.device)


def _train(trainer: Trainer, vector: HyperVector, batch: Any) -> None:
    """Compute the loss of a step of the weights; layers raise if their dimension of examples is another one."""
    # Penalties are computed only with gradients enabled.
    with vector.perturbed(count_examples(batch, vector.batch_dim)), torch.enable_grad(), penalties():
        mean(trainer.loss, *trainer.forward(trainer.model, batch))
