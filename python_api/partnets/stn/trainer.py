"""stn.Trainer: learns a best response and the hyperparameters together (Algorithm 1 of MacKay et al. 2019)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from partnets.data.chunks import Chunks
from partnets.hyper import Hyperparameter, Learned
from partnets.nn.partitioned import partitioned_layers
from partnets.stn.converting import vector_of
from partnets.stn.start import check_start
from partnets.stn.step import check_entropy, step_hyper, step_weights
from partnets.training import trainer


class Trainer(trainer.Trainer):
    """Alternates steps of the best response φ on training data and of λ and σ on data that it has not seen.

    All of partnets.Trainer, with perturbed hyperparameters in both steps: stn.step_weights and stn.step_hyper. What it
    has not seen is a validation set, with partnets.baselines.held_out; or D_k, of which subnetwork k - 1 of a
    partitioned network has seen nothing (L_ML), where all data are trained on.

    Args:
        model: that stn.convert has made, in what baselines.held_out gives, or partitioned by partnets.partition.
        chunks: of baselines.held_out, whose second is the validation set; or of partnets.chunk.
        hyper: the modules whose λ is learned; all that the layers read if None.
        hyper_every, hyper_steps: T_train and T_valid: ψ takes so many steps after each so many steps of φ.
        hyper_after: the steps of φ of the warm-up; hyperparameters are perturbed there too.
        entropy: τ, the weight of the entropy of the perturbation in the steps of λ and σ. 0.001 in published runs of
            convolutional networks, 0.0001 in those of Δ-STN.
        sampling: as of partnets.Trainer; by default only partitions that have parameters are drawn.
        **options: as of partnets.Trainer. loss is that of training, with or without what only regularises; hyper_loss
            that of validation, the plain negative log-likelihood where it is known. α₁, α₂ and α₃ are the rates of
            optimizer and hyper_optimizer, of torch.optim with all of partnets.hyper.hyperparameters(model).

    Attributes:
        history: as of partnets.Trainer; its values have each σ as "NAME, scale". lml is minus the number of validation
            examples times their mean loss.

    Raises:
        ValueError: no layer responds, or hyper_gradient is given; and as of partnets.Trainer.

    Example:
        >>> import torch
        >>> from partnets import baselines, hyper, stn
        >>> dropout = hyper.Dropout(0.5)
        >>> network = stn.convert(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), dropout, nn.Linear(8, 2)), dropout)
        >>> data = torch.randn(40, 4), torch.randint(2, (40,))
        >>> history = stn.Trainer(*baselines.held_out(network, data, validation=0.25), batch_size=8).fit(5)
        >>> sorted(history.values), history.steps["hyper_k"]
        (['networks.0.2.rate', 'networks.0.2.rate, scale'], [2, 2, 2, 2, 2])
    """

    trains_responses = True

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
        if "hyper_gradient" in options:
            raise ValueError(
                "hyper_gradient is partnets.Trainer's: here all of ψ learns through the response of the layers. Leave"
                " it out, or train by partnets.Trainer."
            )
        self.entropy = entropy
        if hyper is None:
            hyper = vector_of(model).modules
        if sampling is None:
            sampling = _owning(model, chunks)
        super().__init__(model, chunks, hyper=hyper, sampling=sampling, hyper_gradient="direct", **options)

    def values(self) -> dict[str, float]:
        """The present value of each hyperparameter, in its units, and of each σ, in those of the unconstrained one."""
        values = super().values()
        for path, module in self.hyper.items():
            for inner, one in module.named_modules():
                if isinstance(one, Learned):
                    values |= {f"{path}.{name}" if path else name: scale for name, scale in one.scales(inner).items()}
        return values

    def _update_weights(self, *arguments, **options) -> Tensor:
        return step_weights(self.model, self.optimizer, *arguments, **options)

    def _update_hyper(self, *arguments, **options) -> Tensor:
        return step_hyper(self.model, self.hyper_optimizer, *arguments, entropy=self.entropy, **options)

    def settings(self) -> dict[str, Any]:
        vector = vector_of(self.model)
        return {"centred": vector.centred, "linearised": vector.linearised, "entropy": self.entropy}

    def _start(self) -> None:
        check_start(self)
        super()._start()


def _owning(model: nn.Module, chunks: Chunks) -> tuple[float, ...]:
    """The chunks' proportions, but 0 for partitions that have no parameter, as of a validation set."""
    layers = [layer for _, layer in partitioned_layers(model)]
    return tuple(
        share if any(layer.entries(name, [tensor], k) for layer in layers for name, tensor in layer.owned()) else 0.0
        for k, share in enumerate(chunks.proportions, start=1)
    )
