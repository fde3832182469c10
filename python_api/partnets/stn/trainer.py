"""stn.Trainer: joint training of a best response and the hyperparameters (Algorithm 1 of MacKay et al. 2019)."""

from __future__ import annotations

from typing import Any

from torch import nn

from partnets.data.chunks import Chunks
from partnets.hyper import Hyperparameter, Learned
from partnets.stn.converting import vector_of
from partnets.stn.start import check_start
from partnets.stn.step import Response, check_entropy
from partnets.subnetworks.parameters import partitioned_parameters
from partnets.training import trainer


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
        hyper: Hyperparameter | list[Hyperparameter] | None = None,
        entropy: float = 1e-3,
        sampling=None,
        **options,
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
        check_start(self)
        super()._start()


def _owning(model: nn.Module, chunks: Chunks) -> tuple[float, ...]:
    """Return the chunks' proportions, with 0 for partitions without parameters, such as that of a validation set."""
    parameters = partitioned_parameters(model)
    return tuple(
        share if any(one.numel(k) for one in parameters) else 0.0 for k, share in enumerate(chunks.proportions, start=1)
    )
