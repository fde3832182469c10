"""Augerino: augmentations learned on the training loss, with a bonus for their width (Benton et al. 2020)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import repeat

from torch import Generator, Tensor

from partnets.hyper import Affine, Hyperparameter
from partnets.subnetworks.context import subnetwork
from partnets.training.step import check_reached, clip_gradient, parameters_of
from partnets.training.trainer import Trainer

# As in their code: beyond it, the safe variant gives no bonus.
SAFE_WIDTH = 10.0
# Options of partnets.Trainer for separate steps of w and ψ.
SEPARATE = {"hyper_every", "hyper_steps", "hyper_after", "hyper_batch_size", "sampling", "one_pass"}


class Augerino(Trainer):
    """A trainer with joint steps of w and ψ on the training loss minus regularisation * ||width||_2.

    The bonus is unbounded, so training may diverge (Appendix E). The safe variant removes the bonus's gradient while
    any width is 10 or more.

    Args:
        model, chunks: the results of partnets.single_chunk.
        hyper: one hyper.Affine, which has Augerino's widths.
        regularisation: 0.01 in the paper.
        safe: whether to use the safe variant.
        options: as in partnets.Trainer. The paper has a learning rate of 0.05 for ψ on MNIST.

    Raises:
        ValueError: as in partnets.Trainer; or there is more than one chunk.

    Example:
        >>> import torch, partnets
        >>> from torch import nn
        >>> from partnets import hyper
        >>> data = torch.rand(20, 1, 8, 8), torch.randint(10, (20,))
        >>> augmentation = hyper.Affine(rotation=5.0)
        >>> model = nn.Sequential(augmentation, nn.Flatten(), nn.Linear(64, 10))
        >>> history = Augerino(*partnets.single_chunk(model, data), hyper=augmentation).fit(3)
        >>> history.steps["k"]
        [1, 1, 1]
    """

    needs_unseen = False

    def __init__(self, model, chunks, *, hyper, regularisation: float = 0.01, safe: bool = True, **options) -> None:
        if unused := sorted(SEPARATE & set(options)):
            raise ValueError(f"{', '.join(unused)}: Augerino steps w and ψ together; leave these out.")
        if len(chunks) > 1:
            raise ValueError(f"there are {len(chunks)} chunks; Augerino learns from one: use partnets.single_chunk.")
        super().__init__(model, chunks, hyper=hyper, **options)
        self.augmentation = only_affine(self.hyper.values())
        self.regularisation, self.safe = regularisation, safe

    def iterate(self) -> tuple[int, float, None, None]:
        """Take a step of w and of ψ on one batch; the recorded loss is without the bonus."""
        batch = self._source.sample_upto(1, self.settings.batch_size, self.generator)
        self.optimizer.zero_grad()
        self.hyper_optimizer.zero_grad()
        with subnetwork(self.model, active=1, update=1, hyper=True):
            loss = self._loss(self.loss, batch)
            (loss - self.regularisation * bonus(self.augmentation, self.safe)).backward()
        check_reached(self.model, parameters_of(self.hyper_optimizer))
        clip_gradient(self.optimizer, self.settings.clip)
        self.optimizer.step(update=1)
        if self.scheduler is not None:
            self.scheduler.step()
        self.hyper_optimizer.step()
        if self.hyper_scheduler is not None:
            self.hyper_scheduler.step()
        return 1, loss.item(), None, None

    def _plan(self, steps: int, generator: Generator) -> Iterator[tuple[str, int, int]]:
        return repeat(("sample_upto", 1, self.settings.batch_size), steps)


def bonus(augmentation: Affine, safe: bool = True) -> Tensor:
    """Return ||width||_2, which is subtracted from the training loss: a scalar.

    Args:
        safe: whether it has no gradient while any width is 10 or more.

    Example:
        >>> augmentation = Affine()
        >>> bool(bonus(augmentation) == augmentation.widths().norm())
        True
    """
    widths = augmentation.widths()
    if safe and not (widths < SAFE_WIDTH).all():
        widths = widths.detach()
    return widths.norm()


def only_affine(modules: Iterable[Hyperparameter]) -> Affine:
    """Return the only module, a hyper.Affine; raise ValueError for anything else."""
    modules = list(modules)
    if [type(module) for module in modules] != [Affine]:
        kinds = ", ".join(type(module).__name__ for module in modules) or "None"
        raise ValueError(f"hyper is {kinds}; pass one hyper.Affine, which has the widths for the bonus.")
    return modules[0]
