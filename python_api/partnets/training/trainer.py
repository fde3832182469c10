"""Trainer: joint training of the weights and hyperparameters of a partitioned network (Appendix I.1)."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from os import PathLike
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from partkernels.arguments import check_seed
from partnets import optim
from partnets.data.batch import Forward, Loss, call, mean
from partnets.data.chunks import Chunks, check_unseen, divided, draw_k
from partnets.data.fetching import check_options
from partnets.evaluation.marginal_likelihood import lml
from partnets.evaluation.metrics import check_counts
from partnets.evaluation.same_chunks import check_same_chunks, remember_chunks
from partnets.hyper import Hyperparameter, hyperparameters
from partnets.hyper.hyperparameter import find_hyper
from partnets.optim.base import check_partitioned
from partnets.subnetworks.context import resident, whole
from partnets.subnetworks.parameters import partitioned_parameters
from partnets.training import checkpoint
from partnets.training.ahead import Ahead
from partnets.training.best_model import Best
from partnets.training.callbacks import Callback
from partnets.training.history import History
from partnets.training.inner_steps import alone
from partnets.training.lookahead import Technique, most_steps, step_lookahead, techniques
from partnets.training.progress import Progress
from partnets.training.start import (
    check_finite,
    check_leaks,
    check_learns,
    check_start,
    warn_of_direct_dropout,
    warn_of_forgotten,
    warn_of_proportions,
    warn_of_unused_losses,
)
from partnets.training.state import TrainingState
from partnets.training.step import check_clip, has_step_hooks, parameters_of, step_hyper, step_weights, still_modules
from partnets.utils.checks import check_at_least
from partnets.utils.likelihood import check_loss, check_mean, plain
from partnets.utils.modules import to_device
from partnets.utils.random_state import preserved


class Trainer(TrainingState):
    """A trainer that alternates steps of the partitions w_k (Eq. 3) and of the hyperparameters ψ (Appendix I.1, Eq. 4).

    A step of w_k is partnets.step_weights on a batch of D_1:k, k ~ Cat(sampling). A step of ψ is partnets.step_hyper on
    a batch of D_k, k ~ Cat(u_2..u_C), where u are the chunks' proportions. Custom loops call the same functions.
    With one_pass, all partitions learn in each step, from parts of one batch (Appendix C).

    While w or ψ is updated, the other requires no gradient. Batches are moved to the model's device. Before the first
    step, checks run on a batch of D_2 and are undone. The trainer's generator draws chunks and batches; the model's
    noise is drawn by torch's.

    Args:
        model: a partitioned model, with as many partitions as there are chunks.
        chunks: chunks of examples (x, y), or of dicts with labels.
        hyper: ψ: one or several modules of partnets.hyper inside the model; None trains only w.
        loss: loss(output, y), the mean negative log-likelihood in nats, per example or per token, as torch's criteria
            return it; or the separate losses, which are averaged. For L_ML see partnets.lml.
        hyper_loss: the loss of ψ's steps and of L_ML, without terms that only regularise the weights. If None, the
            negative log-likelihood in `loss` if it is known, such as torch's cross-entropy without label smoothing,
            otherwise `loss`.
        optimizer: an optimiser of partnets.optim of this model; Adam with a learning rate of 1e-3 if None.
        hyper_optimizer: an optimizer of torch.optim of hyper's parameters; Adam with a learning rate of 1e-3 if None.
        scheduler, hyper_scheduler: schedulers of torch.optim.lr_scheduler of these two optimisers, stepped after each
            step of w of any partition (as in Appendix I.1) and after each step of ψ.
        batch_size, hyper_batch_size: the number of examples in a step of w and of ψ; hyper_batch_size is batch_size if
            None.
        sampling: C probabilities with which k is drawn for a step of w; the chunks' proportions if None.
        clip: the norm, over all parameters, to which the gradient of w_k is clipped; None does not clip.
        hyper_every: the number of steps of w between updates of ψ.
        hyper_steps: the number of steps of ψ in an update, each on another batch.
        hyper_after: the number of steps of w before the first step of ψ.
        hyper_chunks: 'one': a step of ψ takes a batch of one chunk, D_k with k ~ Cat(u_2..u_C). 'all': it takes a batch
            of each unseen chunk, weighted by their sizes: the same expected gradient with less noise, at C - 1 times
            the cost.
        one_pass: whether each step updates w_1..w_C in turn, each on its share of batch_size examples, by `sampling`,
            and a step of ψ takes a share of hyper_batch_size from each unseen chunk, by their sizes. Batches are then
            smaller: see docs/training.md for the effect.
        hyper_gradient: how ψ learns. 'direct': through the present weights' predictions of unseen data. 'lookahead':
            through steps of the weights, so that ψ may act only on training; a partnets.Lookahead sets their number and
            differentiation. 'implicit', or a partnets.Implicit: through the minimum of the training loss. One value for
            all of hyper, or a dict for some of its modules. Other modules use their classes' settings: direct, except
            hyper.Penalty, LabelSmoothing and others that are off in evaluation. See docs/hyperparameters.md.
        lml_every: the number of steps between full evaluations of L_ML, all with the same noise; None never evaluates.
        keep_best: whether to keep a copy of the model at the highest L_ML; see restore_best.
        patience: the number of successive evaluations without a higher L_ML that ends fit; None never ends early.
        callbacks: functions called after each step, in order, as callback(trainer); see partnets.callbacks and loggers.
        seed: an int in [0, 2**63), the seed of the trainer's generator.
        other_chunks: whether the model may have learned from other chunks than these; see partnets.lml.
        audit: whether to check, before the first step, that no part of the model carries later chunks into earlier
            subnetworks, as partnets.audit does; this takes some passes.
        forward: forward(model, batch), which returns output and y; the default is partnets.data.batch.call.
        **loading: options of a DataLoader, such as num_workers, pin_memory and prefetch_factor, with which fit and
            evaluations of L_ML prefetch batches. The draws and every bit are unchanged, unless the data set draws at
            random; then the bits are the same for any number of workers from 1 on.

    Warns:
        UserWarning: the loss is not a log-likelihood, such as a squared error; the partitions' shares of the weights
            are far from the chunks'; the model has modules that act in the training loss, but the loss is another; or,
            at the first step, the weights seem to have learned from later chunks already.

    Attributes:
        history, generator, best, noise: as in TrainingState, the base class, which callbacks can rely on.

    Raises:
        ValueError: the model and the chunks differ in C, hyper is not inside the model, an optimiser belongs to other
            parameters, a scheduler to another optimiser, a loss is a sum over the batch, the model has learned from
            other chunks, or a number is out of range. At the first step: ψ affects the loss but not the outputs, or the
            audit finds a leak.
        FloatingPointError: in a step with a loss that is not finite, before any update by it.
        TypeError: an option is unknown to this class and to DataLoader, or determines the examples of a batch.

    Example:
        >>> import partnets
        >>> from partnets import hyper
        >>> x = torch.randn(60, 4)
        >>> mask = hyper.InputMask(4)
        >>> model = partnets.partition(nn.Sequential(mask, nn.Linear(4, 2)), (0.8, 0.2))
        >>> chunks = partnets.chunk((x, (x[:, 0] > 0).long()), (0.8, 0.2))
        >>> history = Trainer(model, chunks, hyper=mask, batch_size=16, lml_every=10).fit(20)
        >>> history.lml["step"], sorted(history.values)
        ([10, 20], ['0.0', '0.1', '0.2', '0.3'])
    """

    # Whether ψ learns from unseen chunks, whether progress is shown on a terminal, and whether layers may respond to ψ.
    needs_unseen = shows_progress = True
    trains_responses = False

    def __init__(
        self,
        model: nn.Module,
        chunks: Chunks,
        *,
        hyper: Hyperparameter | Sequence[Hyperparameter] | None = None,
        loss: Loss = F.cross_entropy,
        hyper_loss: Loss | None = None,
        optimizer: optim.PartitionedOptimizer | None = None,
        hyper_optimizer: torch.optim.Optimizer | None = None,
        scheduler: LRScheduler | None = None,
        hyper_scheduler: LRScheduler | None = None,
        batch_size: int = 128,
        hyper_batch_size: int | None = None,
        sampling: Sequence[float] | None = None,
        clip: float | None = None,
        hyper_every: int = 1,
        hyper_steps: int = 1,
        hyper_after: int = 0,
        hyper_chunks: str = "one",
        one_pass: bool = False,
        hyper_gradient: str | Technique | Mapping[Hyperparameter, str | Technique] | None = None,
        lml_every: int | None = None,
        keep_best: bool = False,
        patience: int | None = None,
        callbacks: Iterable[Callback] = (),
        seed: int = 0,
        other_chunks: bool = False,
        audit: bool = True,
        forward: Forward = call,
        **loading,
    ) -> None:
        check_counts(model, chunks)
        if not other_chunks:
            check_same_chunks(model, chunks)
        self.loading = check_options(loading, type(self).__name__)
        hyper_batch_size = batch_size if hyper_batch_size is None else hyper_batch_size
        optional = {"lml_every": lml_every, "patience": patience}
        given = {name: number for name, number in optional.items() if number is not None}
        check_at_least(1, batch_size=batch_size, hyper_batch_size=hyper_batch_size, **given)
        check_at_least(1, hyper_every=hyper_every, hyper_steps=hyper_steps)
        check_at_least(0, hyper_after=hyper_after)
        check_clip(clip)
        check_seed("seed", seed)
        if hyper_chunks not in ("one", "all"):
            raise ValueError(f"hyper_chunks={hyper_chunks!r}; pass 'one' or 'all'.")
        if not isinstance(one_pass, bool):
            raise ValueError(f"one_pass={one_pass!r}; pass True or False.")
        if one_pass and hyper_chunks == "all":
            raise ValueError(
                "hyper_chunks='all' takes a batch of each chunk, but one_pass a part of one; pass one of them."
            )
        if lml_every is None and (keep_best or patience is not None):
            raise ValueError("keep_best and patience need L_ML; pass lml_every, the steps between its evaluations.")
        self.hyper = find_hyper(model, hyper)
        if not self.trains_responses and (hyper is None or self.hyper):
            _check_no_responses(model)
        chosen = techniques(self.hyper.values(), hyper_gradient)
        self.hyper_gradient = {path: chosen[module] for path, module in self.hyper.items()}
        if self.needs_unseen and not self.trains_responses:
            warn_of_direct_dropout(self.hyper, self.hyper_gradient)
        if (self.hyper and self.needs_unseen) or lml_every:
            check_unseen(chunks)
        psi = list(dict.fromkeys(parameter for module in self.hyper.values() for parameter in module.parameters()))

        if hyper is None and self.needs_unseen and chunks.count > 1:
            warn_of_forgotten(model)
        check_learns(model, loss)
        warn_of_unused_losses(model, self.hyper, loss)
        check_mean(loss)
        self.hyper_loss = plain(loss) if hyper_loss is None else hyper_loss
        self._judges = chunks.count > 1 and self.needs_unseen and bool(self.hyper or lml_every)
        if self._judges:
            check_loss(self.hyper_loss)
            warn_of_proportions(model, chunks.proportions)
        self.model, self.chunks, self.loss, self.forward = model, chunks, loss, forward
        self.audit, self.other_chunks = audit, other_chunks
        self._ahead = Ahead(chunks, self.loading) if self.loading else None
        self._forward: nn.Module = model
        self.optimizer = optim.Adam(model) if optimizer is None else optimizer
        self.hyper_optimizer = hyper_optimizer
        if psi and hyper_optimizer is None:
            self.hyper_optimizer = torch.optim.Adam([p for p in psi if p.requires_grad], lr=1e-3)
        _check_optimizers(model, self.optimizer, psi, self.hyper_optimizer)
        self.scheduler = _check_scheduler("scheduler", scheduler, self.optimizer)
        self.hyper_scheduler = _check_scheduler("hyper_scheduler", hyper_scheduler, self.hyper_optimizer)
        self.batch_size, self.hyper_batch_size, self.lml_every = batch_size, hyper_batch_size, lml_every
        self.sampling = _check_sampling(chunks.proportions if sampling is None else sampling, model, chunks)
        self.hyper_every, self.hyper_steps = hyper_every, hyper_steps
        self.hyper_after, self.hyper_chunks = hyper_after, hyper_chunks
        self.one_pass = one_pass
        _ = self._parts, self._hyper_parts  # these raise if a part is empty
        self.best, self.patience, self.callbacks = Best() if keep_best else None, patience, list(callbacks)
        self.clip, self.seed, self.generator = clip, seed, torch.Generator().manual_seed(seed)
        self.noise: dict | None = None
        self._still = still_modules(model)
        self._started = False
        self.history = History()

    def fit(self, steps: int | None = None, *, epochs: float | None = None) -> History:
        """Train for a number of further steps, or until L_ML exhausts `patience`; show progress on a terminal.

        An interruption may leave a step incomplete; training resumes with the same bits from an earlier checkpoint.

        Args:
            steps: the number of steps.
            epochs: the number of epochs of len(data) / batch_size steps, instead of steps.

        Raises:
            ValueError: steps or epochs is negative.
            TypeError: both are given, or neither.
        """
        if (steps is None) == (epochs is None):
            raise TypeError("fit takes steps or epochs; pass one of them.")
        if steps is None:
            if not 0 <= epochs < math.inf:
                raise ValueError(f"epochs={epochs}; pass a number, at least 0.")
            steps = math.ceil(epochs * len(self.chunks.order) / self.batch_size)
        check_at_least(0, steps=steps)
        fetching = self._ahead.fetching(partial(self._plan, steps), self.generator) if self._ahead else nullcontext()
        stays = nullcontext() if has_step_hooks(self.optimizer) else resident(self.model)
        with fetching, stays, Progress(self.steps, steps, shown=self.shows_progress) as progress:
            for _ in range(steps):
                if self.exhausted:
                    break
                self.step()
                progress.update(self.history)
        self.estimate_statistics()
        return self.history

    def step(self) -> None:
        """Run an iteration, record it, and run the evaluation and callbacks that are due.

        The model is in training mode, except for two kinds of modules: those in evaluation mode at construction of this
        trainer although the model was not, such as a frozen backbone, and those with running statistics that
        partnets.partition left out, as they would carry D_k into earlier subnetworks.
        """
        self.model.train()
        for module in self._still:
            module.eval()
        if not self._started:
            with whole(self.model):
                self._start()
        done = self.steps + 1
        self.history.add(done, *self.iterate(), self.values())
        is_due = self.lml_every and done % self.lml_every == 0
        if not is_due and not self.callbacks:
            return
        with whole(self.model):
            self._evaluate(done, is_due)

    def _evaluate(self, done: int, is_due: bool) -> None:
        """Run the evaluation of L_ML, if it is due, and the callbacks."""
        if is_due:
            self.estimate_statistics()
            # The same noise each time, so that the maximum over evaluations does not select lucky noise.
            found = lml(self.model, self.chunks, self.hyper_loss, seed=self.seed, **self.evaluating)
            self.history.add_lml(done, found)
            if self.best is not None:
                self.best.offer(self.model, done, found)
        if self.callbacks:
            with preserved(self.device) as self.noise:
                try:
                    for callback in self.callbacks:
                        if (metrics := callback(self)) is not None:
                            self.history.add_metrics(done, metrics)
                finally:
                    self.noise = None

    def _start(self) -> None:
        if not self.other_chunks:  # checked again, as weights may have been loaded since construction
            check_same_chunks(self.model, self.chunks)
        if self.audit:
            check_leaks(self.model, self.chunks, self.batch_size, self._audited, self.sampling)
        if self._judges:
            check_start(self)
        remember_chunks(self.model, self.chunks)
        self._started = True

    def _audited(self, batch: Any) -> tuple[Any, Tensor]:
        output, y = self.forward(self.model, batch)
        return output, mean(self.loss, output, y)

    def iterate(self) -> tuple[int, float, int | None, float | None]:
        """Run one iteration of Appendix I.1; return k and loss of the step of w and of the last step of ψ, if due.

        k is 0 for all partitions, and None for all unseen chunks.
        """
        k, loss = self.step_weights()
        found = None, None
        if self._hyper_learns(self.steps + 1):
            for _ in range(self.hyper_steps):
                found = self.step_hyper()
        return k, loss, *found

    @property
    def _source(self) -> Chunks | Ahead:
        """Return the source of batches."""
        return self._ahead or self.chunks

    def _hyper_learns(self, step: int) -> bool:
        late = step - self.hyper_after
        return bool(self.hyper) and late >= 1 and late % self.hyper_every == 0

    def step_weights(self) -> tuple[int, float]:
        """Update w_k on a batch from D_1:k, with k ~ Cat(sampling); return k and the loss.

        With one_pass, update all partitions, each on a part of a batch; return 0 and the mean loss of all examples.
        """
        parts = self._draw_learning(self.generator)
        options = {
            "clip": self.clip,
            "backward": self._backward,
            "masked": self.clip is not None or has_step_hooks(self.optimizer),
        }
        losses = []
        for k, examples in parts.items():
            batch = self._source.sample_upto(k, examples, self.generator)
            losses.append(self._update_weights(k, batch, partial(self._loss, self.loss), **options).item())
        if self.scheduler is not None:
            self.scheduler.step()
        if not self.one_pass:
            return k, losses[0]
        return 0, sum(examples * loss for examples, loss in zip(parts.values(), losses, strict=True)) / self.batch_size

    def step_hyper(self) -> tuple[int | None, float]:
        """Update ψ on chunks that the subnetworks have not seen; return k, None for all chunks, and the loss."""
        k, weights = self._draw_unseen(self.generator)
        if not self._inner_steps:
            batches, judge = _Drawn(weights, self._draw), partial(self._loss, self.hyper_loss)
            found = self._update_hyper(batches, judge, weights=weights, backward=self._backward)
        else:
            batches = _Drawn(weights, lambda j: (self._draw(j), [self._draw_seen(j) for _ in range(self._inner_steps)]))
            by = {module: self.hyper_gradient[path] for path, module in self.hyper.items()}
            # Uses the model itself: a wrapper such as DDP expects one backward pass for each forward pass.
            losses = (partial(self._loss, loss, model=self.model) for loss in (self.loss, self.hyper_loss))
            options = {"by": by, "weights": weights, "clip": self.clip, "averaged": self._averaged}
            found = step_lookahead(self.model, self.optimizer, self.hyper_optimizer, batches, *losses, **options)
        if self.hyper_scheduler is not None:
            self.hyper_scheduler.step()
        return k, found.item()

    def _update_weights(self, *arguments, **options) -> Tensor:
        return step_weights(self.model, self.optimizer, *arguments, **options)

    def _update_hyper(self, *arguments, **options) -> Tensor:
        return step_hyper(self.model, self.hyper_optimizer, *arguments, **options)

    @property
    def _parts(self) -> dict[int, int]:
        """Return each partition's number of examples with one_pass, for the current `sampling`."""
        if not self.one_pass:
            return {}
        return divided("batch_size", self.batch_size, dict(enumerate(self.sampling, start=1)))

    @property
    def _hyper_parts(self) -> dict[int, int]:
        """Return each unseen chunk's number of examples in ψ's batches with one_pass."""
        if not (self.one_pass and self.hyper):
            return {}
        unseen = dict(enumerate(self.chunks.proportions[1:], start=2))
        return divided("hyper_batch_size", self.hyper_batch_size, unseen)

    def _draw_learning(self, generator: torch.Generator) -> dict[int, int]:
        """Return the partitions that a step of w updates, with their numbers of examples."""
        return self._parts or {draw_k(self.sampling, generator): self.batch_size}

    def _examples_of(self, chunk: int) -> int:
        """Return the number of examples that a step of ψ takes from a chunk."""
        return self._hyper_parts.get(chunk, self.hyper_batch_size)

    @property
    def _inner_steps(self) -> int:
        """Return the number of batches of seen chunks that a step of ψ needs."""
        return most_steps(self.hyper_gradient.values())

    def _draw(self, j: int) -> Any:
        return self._source.sample(j, self._examples_of(j), self.generator)

    def _draw_seen(self, j: int) -> Any:
        return self._source.sample_upto(j - 1, self._examples_upto(j - 1), self.generator)

    def _examples_upto(self, k: int) -> int:
        """Return the number of examples in a step of w_k."""
        return self._parts.get(k, self.batch_size)

    def _draw_unseen(self, generator: torch.Generator) -> tuple[int | None, dict[int, float]]:
        """Draw the chunk of a step of ψ, None for all chunks; return it with the weight of each chunk."""
        u = self.chunks.proportions
        k = draw_k(u, generator, start=2) if self.hyper_chunks == "one" and not self.one_pass else None
        return k, {k: 1.0} if k else {j: share / sum(u[1:]) for j, share in enumerate(u[1:], start=2)}

    def _plan(self, steps: int, generator: torch.Generator) -> Iterator[tuple[str, int, int]]:
        """Yield the draws of step_weights and step_hyper in the next `steps` steps, in order, for Ahead."""
        for step in range(self.steps + 1, self.steps + 1 + steps):
            for k, examples in self._draw_learning(generator).items():
                yield "draw_upto", k, examples
            for _ in range(self.hyper_steps if self._hyper_learns(step) else 0):
                for j in self._draw_unseen(generator)[1]:
                    yield "draw", j, self._examples_of(j)
                    for _ in range(self._inner_steps):
                        yield "draw_upto", j - 1, self._examples_upto(j - 1)

    def save(self, path: str | PathLike) -> None:
        """Write a checkpoint from which `load` resumes with the same bits, atomically.

        To save in a callback, make it the last callback: the file has no metrics that later callbacks return for this
        step.

        Raises:
            ValueError: an optimiser's settings or a scheduler's state have something other than numbers and tensors; an
                older file is left unchanged.
        """
        checkpoint.save(self, path, [checkpoint.random_state(self)])

    def load(self, path: str | PathLike) -> None:
        """Resume from a checkpoint: weights, partitions, ψ, optimisers, random states and history.

        The data are compared by a few examples if they are tensors; other Datasets only by length. Settings of the
        optimisers and schedulers, such as the learning rate, are taken from the file; to change them, set param_groups
        or the scheduler's attributes afterwards.

        Warns:
            UserWarning: these settings differ from the trainer's.

        Raises:
            ValueError: the file is not a checkpoint, or is of another model, other chunks, optimisers or batch sizes;
                nothing has changed.
            OSError: the file does not exist or cannot be read.
        """
        checkpoint.load(self, path)

    def _backward(self, loss: Tensor) -> None:
        check_finite(loss, f"step {self.steps + 1}")
        loss.backward()

    _averaged = staticmethod(alone)

    def _loss(self, loss: Loss, batch: Any, *, model: nn.Module | None = None) -> Tensor:
        model = self._forward if model is None else model
        return mean(loss, *self.forward(model, to_device(batch, self.device)))


class _Drawn(Mapping):
    """A mapping from chunks to batches, drawn on access, so that only one is in memory at a time."""

    def __init__(self, ks: Iterable[int], draw: Callable[[int], Any]) -> None:
        self.ks, self.draw = list(ks), draw

    def __getitem__(self, k: int) -> Any:
        return self.draw(k)

    def __iter__(self) -> Iterator[int]:
        return iter(self.ks)

    def __len__(self) -> int:
        return len(self.ks)


def _check_no_responses(model: nn.Module) -> None:
    """Raise ValueError if layers of a model respond to ψ, which this trainer does not support."""
    for path, module in model.named_modules():
        if (by := getattr(module, "trained_by", None)) is not None:
            raise ValueError(
                f"{path or 'the model'} is a {type(module).__name__}, which responds to hyperparameters; train it by"
                f" {by}, or pass hyper=[] if none is to learn."
            )


def _check_optimizers(model, optimizer, psi, hyper_optimizer) -> None:
    check_partitioned(optimizer)
    names = {parameter: name for name, parameter in model.named_parameters()}
    if not set(optimizer.parameters()) <= names.keys():
        raise ValueError("optimizer has parameters of another model; construct it with the trainer's model.")
    known = set(optimizer.parameters()) | set(hyperparameters(model))
    if missing := [name for parameter, name in names.items() if parameter.requires_grad and parameter not in known]:
        raise ValueError(
            f"optimizer lacks {', '.join(missing)}, which would never learn; construct it with the trainer's model, or"
            " freeze them with requires_grad_(False)."
        )
    if hyper_optimizer is None:
        return
    trained = set(parameters_of(hyper_optimizer))
    if not {parameter for parameter in psi if parameter.requires_grad} <= trained <= set(psi):
        raise ValueError("hyper_optimizer has other parameters than hyper; construct it with hyper.parameters().")
    closure = inspect.signature(hyper_optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ValueError(
            f"hyper_optimizer is {type(hyper_optimizer).__name__}, which needs a closure for its step; pass one that"
            " does not, such as Adam."
        )


def _check_scheduler(name: str, scheduler, optimizer):
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ValueError(f"{name} is a ReduceLROnPlateau, which needs a metric in step(); step it in a callback.")
    if scheduler is not None and scheduler.optimizer is not optimizer:
        raise ValueError(f"{name} belongs to another optimiser; construct it with the trainer's optimiser.")
    return scheduler


def _check_sampling(sampling: Sequence[float], model: nn.Module, chunks: Chunks) -> tuple[float, ...]:
    sampling = tuple(map(float, sampling))
    if len(sampling) != chunks.count or not all(0 <= share < math.inf for share in sampling) or not sum(sampling):
        raise ValueError(f"sampling={sampling}; pass {chunks.count} probabilities, one for each partition.")
    owned = partitioned_parameters(model)
    for k, share in enumerate(sampling, start=1):
        owns = any(one.numel(k) for one in owned)
        if share and not owns:
            only = tuple(float(j != k) for j in range(1, chunks.count + 1))
            raise ValueError(f"partition {k} has no parameter to learn; leave it out by sampling, such as {only}.")
    return sampling
