"""Settings: the numbers that determine a training, which are keyword arguments of Trainer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from partkernels.arguments import check_seed
from partnets.training.step import check_clip
from partnets.utils.checks import check_at_least


@dataclass(kw_only=True)
class Settings:
    """The numbers and switches of a Trainer, which it takes as keyword arguments.

    w_k are the weights of partition k, trained on chunks 1..k. ψ are the hyperparameters, judged by unseen chunks 2..C.

    Args:
        batch_size, hyper_batch_size: the number of examples in a step of w and of ψ; hyper_batch_size is batch_size if
            None.
        sampling: C probabilities with which k is drawn for a step of w; the chunks' proportions if None.
        clip: the norm, over all parameters, to which the gradient of w_k is clipped; None does not clip.
        hyper_every: the number of steps of w between updates of ψ.
        hyper_steps: the number of steps of ψ in an update, each on another batch.
        hyper_after: the number of steps of w before the first step of ψ.
        one_pass: whether each step updates all of w_1..w_C, one after another, instead of one w_k that is drawn.
            `sampling` divides batch_size among them, and the sizes of chunks 2..C divide hyper_batch_size. Each
            partition then has a smaller batch: see docs/training.md for the effect.
        lml_every: the number of steps between evaluations of L_ML on all unseen examples, with the same random draws
            each time; None never evaluates.
        keep_best: whether to keep a copy of the model at the highest L_ML; see Trainer.restore_best.
        patience: the number of successive evaluations without a higher L_ML that ends fit; None never ends early.
        seed: an int in [0, 2**63), the seed of the trainer's generator.
        other_chunks: whether the model may have learned from other chunks than these; see partnets.lml.
        audit: whether to check, before the first step, that no part of the model carries later chunks into earlier
            subnetworks, as partnets.audit does; this takes some passes.

    Raises:
        ValueError: a setting is out of range.

    Example:
        >>> Settings(batch_size=16).hyper_batch_size
        16
    """

    batch_size: int = 128
    hyper_batch_size: int | None = None
    sampling: Sequence[float] | None = None
    clip: float | None = None
    hyper_every: int = 1
    hyper_steps: int = 1
    hyper_after: int = 0
    one_pass: bool = False
    lml_every: int | None = None
    keep_best: bool = False
    patience: int | None = None
    seed: int = 0
    other_chunks: bool = False
    audit: bool = True

    def __post_init__(self) -> None:
        if self.hyper_batch_size is None:
            self.hyper_batch_size = self.batch_size
        counts = ("batch_size", "hyper_batch_size", "hyper_every", "hyper_steps", "lml_every", "patience")
        given = {name: getattr(self, name) for name in counts if getattr(self, name) is not None}
        check_at_least(1, **given)
        check_at_least(0, hyper_after=self.hyper_after)
        check_clip(self.clip)
        check_seed("seed", self.seed)
        if not isinstance(self.one_pass, bool):
            raise ValueError(f"one_pass={self.one_pass!r}; pass True or False.")
        if self.lml_every is None and (self.keep_best or self.patience is not None):
            raise ValueError("keep_best and patience need L_ML; pass lml_every, the steps between its evaluations.")

    def check_sampling(self, owns: Sequence[bool]) -> None:
        """Raise ValueError unless `sampling` has a probability for each partition, and 0 for those that own nothing.

        Args:
            owns: whether each partition owns parameters.
        """
        self.sampling = tuple(map(float, self.sampling))
        if (
            len(self.sampling) != len(owns)
            or not all(0 <= share < math.inf for share in self.sampling)
            or not sum(self.sampling)
        ):
            raise ValueError(f"sampling={self.sampling}; pass {len(owns)} probabilities, one for each partition.")
        for k, (share, is_owner) in enumerate(zip(self.sampling, owns, strict=True), start=1):
            if share and not is_owner:
                only = tuple(float(j != k) for j in range(1, len(owns) + 1))
                raise ValueError(f"partition {k} has no parameter to learn; leave it out by sampling, such as {only}.")
