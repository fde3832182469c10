"""Trainer: joint training of the weights and hyperparameters of a partitioned network (Appendix I.1)."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from os import PathLike
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from partnets import optim
from partnets.data.batch import Forward, call
from partnets.data.chunks import Chunks, check_unseen, divided, draw_k
from partnets.data.fetching import check_options
from partnets.evaluation import estimate_statistics
from partnets.evaluation.marginal_likelihood import lml
from partnets.evaluation.same_chunks import check_counts, check_same_chunks, remember_chunks
from partnets.hyper import Hyperparameter, hyperparameters
from partnets.hyper.hyperparameter import find_hyper, values_by_path
from partnets.optim.base import check_partitioned
from partnets.subnetworks.context import resident, whole
from partnets.subnetworks.parameters import partitioned_parameters
from partnets.subnetworks.state import num_partitions
from partnets.training import checkpoint, preflight
from partnets.training.best_model import Best
from partnets.training.callbacks import Callback
from partnets.training.history import History
from partnets.training.hypergradient import Choice, Strategy
from partnets.training.prefetch import Prefetch
from partnets.training.progress import Progress
from partnets.training.settings import Settings
from partnets.training.step import has_hooks, has_step_hooks, parameters_of, still_modules
from partnets.training.unrolled import alone
from partnets.utils.checks import check_at_least
from partnets.utils.losses import Loss, check_loss, check_mean, mean, plain
from partnets.utils.modules import device_of, to_device
from partnets.utils.random_state import preserved


class Trainer:
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
        hyper_gradient: how ψ learns. 'direct': through the current weights' predictions of unseen data. 'lookahead':
            through steps of the weights, so that ψ may act only on training; a partnets.Lookahead sets their number and
            differentiation. 'implicit', or a partnets.Implicit: through the minimum of the training loss. One value for
            all of hyper, or a dict for some of its modules. Other modules use their classes' settings: direct, except
            hyper.Penalty, LabelSmoothing and others that are off in evaluation. See docs/hyperparameters.md.
        callbacks: functions called after each step, in order, as callback(trainer); see partnets.callbacks and loggers.
        forward: forward(model, batch), which returns output and y; the default is partnets.data.batch.call.
        **settings: batch_size, lml_every, clip, seed and the other fields of partnets.training.Settings; and options of
            a DataLoader, such as num_workers, pin_memory and prefetch_factor, with which fit and evaluations of L_ML
            prefetch batches. These leave all draws and bits unchanged, unless the data set draws at random; then the
            bits are the same for any number of workers from 1 on.

    Warns:
        UserWarning: the loss is not a log-likelihood, such as a squared error; the partitions' shares of the weights
            are far from the chunks'; the model has modules that act in the training loss, but the loss is another; or,
            at the first step, the weights seem to have learned from later chunks already.

    Attributes:
        settings: the Settings; callbacks may change them.
        history: the History of all steps.
        hyper: the path and the module of each trained hyperparameter.
        hyper_gradient: for each module of hyper, by path, a partnets.Lookahead or Implicit; None if direct.
        generator: the generator that draws chunks and batches.
        best: the step, L_ML and state that keep_best has kept; None without keep_best.
        noise: while callbacks run, the random states with which training will continue; otherwise None.

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

    # Whether ψ learns from unseen chunks, and whether progress is shown on a terminal.
    needs_unseen = shows_progress = True

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
        hyper_gradient: Choice | None = None,
        callbacks: Iterable[Callback] = (),
        forward: Forward = call,
        **settings: Any,
    ) -> None:
        check_counts(model, chunks)
        names = {field.name for field in dataclasses.fields(Settings)}
        loading = {name: value for name, value in settings.items() if name not in names}
        self.loading = check_options(loading, type(self).__name__)
        self.settings = Settings(**{name: value for name, value in settings.items() if name in names})
        if not self.settings.other_chunks:
            check_same_chunks(model, chunks)
        self.model, self.chunks, self.forward, self.callbacks = model, chunks, forward, list(callbacks)

        self.hyper = find_hyper(model, hyper)
        self.strategy = self._make_strategy(hyper_gradient, hyper is None or bool(self.hyper))
        self.hyper_gradient = {path: self.strategy.chosen.get(module) for path, module in self.hyper.items()}
        if hyper is None and self.needs_unseen and len(chunks) > 1:
            preflight.warn_of_forgotten(model)

        preflight.check_learns(model, loss)
        preflight.warn_of_unused_losses(model, self.hyper, loss)
        check_mean(loss)
        self.loss, self.hyper_loss = loss, plain(loss) if hyper_loss is None else hyper_loss
        if (self.hyper and self.needs_unseen) or self.settings.lml_every:
            check_unseen(chunks)
        self._judges = len(chunks) > 1 and self.needs_unseen and bool(self.hyper or self.settings.lml_every)
        if self._judges:
            check_loss(self.hyper_loss)
            preflight.warn_of_proportions(model, chunks.proportions)

        psi = list(dict.fromkeys(parameter for module in self.hyper.values() for parameter in module.parameters()))
        self.optimizer = optim.Adam(model) if optimizer is None else optimizer
        self.hyper_optimizer = hyper_optimizer
        if psi and hyper_optimizer is None:
            self.hyper_optimizer = torch.optim.Adam([p for p in psi if p.requires_grad], lr=1e-3)
        _check_optimizers(model, self.optimizer, psi, self.hyper_optimizer)
        self.scheduler, self.hyper_scheduler = scheduler, hyper_scheduler
        _check_scheduler("scheduler", scheduler, self.optimizer)
        _check_scheduler("hyper_scheduler", hyper_scheduler, self.hyper_optimizer)

        if self.settings.sampling is None:
            self.settings.sampling = chunks.proportions
        owned = partitioned_parameters(model)
        self.settings.check_sampling([any(one.numel(k) for one in owned) for k in range(1, len(chunks) + 1)])
        _ = self._parts, self._hyper_parts, self.values()  # these raise if a part is empty, or has no values
        self.generator = torch.Generator().manual_seed(self.settings.seed)
        self.history = History()
        self.best = Best() if self.settings.keep_best else None
        self.noise: dict[str, Any] | None = None
        self._source = Prefetch(chunks, self.loading) if self.loading else chunks
        self._forward: nn.Module = model
        self._still = still_modules(model)
        self._started = False

    def _make_strategy(self, hyper_gradient: Any, learns: bool) -> Strategy:
        """Return how ψ learns; `learns` is whether some of it does, or might have been meant to."""
        if learns:
            _check_no_responses(self.model)
        strategy = Strategy.of(self.hyper.values(), hyper_gradient)
        if self.needs_unseen:
            preflight.warn_of_direct_dropout(self.hyper, strategy.chosen)
        return strategy

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
            steps = math.ceil(epochs * len(self.chunks.order) / self.settings.batch_size)
        check_at_least(0, steps=steps)
        fetching = nullcontext()
        if isinstance(self._source, Prefetch):
            fetching = self._source.fetching(partial(self._plan, steps), self.generator)
        stays = nullcontext() if has_step_hooks(self.optimizer) else resident(self.model)
        with fetching, stays, Progress(self.steps, steps, shown=self.shows_progress) as progress:
            for _ in range(steps):
                if self.exhausted:
                    break
                self.step()
                progress.show(self.history)
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
        is_due = self.settings.lml_every and done % self.settings.lml_every == 0
        if not is_due and not self.callbacks:
            return
        with whole(self.model):
            self._evaluate(done, is_due)

    def _evaluate(self, done: int, is_due: bool) -> None:
        """Run the evaluation of L_ML, if it is due, and the callbacks."""
        if is_due:
            self.estimate_statistics()
            # The same noise each time, so that the maximum over evaluations does not select lucky noise.
            found = lml(self.model, self.chunks, self.hyper_loss, seed=self.settings.seed, **self.evaluating)
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
        settings = self.settings
        if not settings.other_chunks:  # checked again, as weights may have been loaded since construction
            check_same_chunks(self.model, self.chunks)
        if settings.audit:
            preflight.check_leaks(self.model, self.chunks, settings.batch_size, self._audited, settings.sampling)
        if self._judges:
            preflight.check_start(self)
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
        for _ in range(self._hyper_steps(self.steps + 1)):
            found = self.step_hyper()
        return k, loss, *found

    def _hyper_steps(self, step: int) -> int:
        """Return the number of steps of ψ after a step of w."""
        late = step - self.settings.hyper_after
        is_due = self.hyper and late >= 1 and late % self.settings.hyper_every == 0
        return self.settings.hyper_steps if is_due else 0

    def step_weights(self) -> tuple[int, float]:
        """Update w_k on a batch from D_1:k, with k ~ Cat(sampling); return k and the loss.

        With one_pass, update all partitions, each on a part of a batch; return 0 and the mean loss of all examples.
        """
        clip, losses = self.settings.clip, []
        options = {"clip": clip, "backward": self._backward}
        options["masked"] = clip is not None or has_hooks(self.optimizer)
        parts = self._draw_learning(self.generator)
        for k, examples in parts.items():
            batch = self._source.sample_upto(k, examples, self.generator)
            loss = partial(self._loss, self.loss)
            losses.append(self.strategy.step_weights(self.model, self.optimizer, k, batch, loss, **options).item())
        if self.scheduler is not None:
            self.scheduler.step()
        if not self.settings.one_pass:
            return k, losses[0]
        total = sum(examples * loss for examples, loss in zip(parts.values(), losses, strict=True))
        return 0, total / self.settings.batch_size

    def step_hyper(self) -> tuple[int | None, float]:
        """Update ψ on chunks that the subnetworks have not seen; return k, None for all chunks, and the loss."""
        weights = self._draw_unseen(self.generator)
        # A wrapper such as DDP expects one backward pass for each forward pass, unlike steps that look ahead.
        model = self.model if self.strategy.seen else self._forward
        found = self.strategy.step_hyper(
            self.model,
            self.optimizer,
            self.hyper_optimizer,
            {k: self._draw_hyper(k) for k in weights},
            partial(self._loss, self.loss, model=model),
            partial(self._loss, self.hyper_loss, model=model),
            weights=weights,
            clip=self.settings.clip,
            backward=self._backward,
            averaged=self._averaged,
        )
        if self.hyper_scheduler is not None:
            self.hyper_scheduler.step()
        return None if self.settings.one_pass else next(iter(weights)), found.item()

    @property
    def _parts(self) -> dict[int, int]:
        """Return each partition's number of examples with one_pass, for the current `sampling`."""
        if not self.settings.one_pass:
            return {}
        return divided("batch_size", self.settings.batch_size, dict(enumerate(self.settings.sampling, start=1)))

    @property
    def _hyper_parts(self) -> dict[int, int]:
        """Return each unseen chunk's number of examples in ψ's batches with one_pass."""
        if not (self.settings.one_pass and self.hyper):
            return {}
        unseen = dict(enumerate(self.chunks.proportions[1:], start=2))
        return divided("hyper_batch_size", self.settings.hyper_batch_size, unseen)

    def _draw_learning(self, generator: torch.Generator) -> dict[int, int]:
        """Return the partitions that a step of w updates, with their numbers of examples."""
        return self._parts or {draw_k(self.settings.sampling, generator): self.settings.batch_size}

    def _draw_unseen(self, generator: torch.Generator) -> dict[int, float]:
        """Return the chunks of a step of ψ, with the weights of their losses."""
        u = self.chunks.proportions
        if self.settings.one_pass:
            return {k: share / sum(u[1:]) for k, share in enumerate(u[1:], start=2)}
        return {draw_k(u, generator, start=2): 1.0}

    def _hyper_draws(self, k: int) -> list[tuple[str, int, int]]:
        """Return the draws of chunk k for a step of ψ: kind, chunk and number of examples."""
        unseen = "sample", k, self._hyper_parts.get(k, self.settings.hyper_batch_size)
        seen = "sample_upto", k - 1, self._parts.get(k - 1, self.settings.batch_size)
        return [unseen] + [seen] * self.strategy.seen

    def _draw_hyper(self, k: int) -> Any:
        """Return a batch of D_k, with batches of D_1:k-1 if the strategy needs some."""
        unseen, *seen = (
            getattr(self._source, kind)(j, examples, self.generator) for kind, j, examples in self._hyper_draws(k)
        )
        return (unseen, seen) if self.strategy.seen else unseen

    def _plan(self, steps: int, generator: torch.Generator) -> Iterator[tuple[str, int, int]]:
        """Yield the draws of step_weights and step_hyper in the next `steps` steps, in order, for Prefetch."""
        for step in range(self.steps + 1, self.steps + 1 + steps):
            for k, examples in self._draw_learning(generator).items():
                yield "sample_upto", k, examples
            for _ in range(self._hyper_steps(step)):
                for k in self._draw_unseen(generator):
                    yield from self._hyper_draws(k)

    @property
    def steps(self) -> int:
        """Return the number of completed steps."""
        return len(self.history.steps["step"])

    @property
    def device(self) -> torch.device:
        """Return the model's device."""
        return device_of(self.model)

    @property
    def exhausted(self) -> bool:
        """Return whether the last `patience` evaluations gave no higher L_ML."""
        if self.settings.patience is None:
            return False
        best = self.history.best_lml()
        return sum(step > (best[0] if best else 0) for step in self.history.lml["step"]) >= self.settings.patience

    def values(self) -> dict[str, float]:
        """Return the current value of each trained hyperparameter in its units, by its module's path."""
        return values_by_path(self.hyper)

    @property
    def evaluating(self) -> dict[str, Any]:
        """Return the arguments of partnets.lml and loss_matrix that evaluate as this training does."""
        return {"batch_size": self.settings.batch_size, "forward": self.forward, **self.loading}

    def estimate_statistics(self) -> None:
        """Call partnets.estimate_statistics on the model; this does not change any bit of further training.

        Call it in a callback before evaluating a model with BatchNorm.
        """
        estimate_statistics(self.model, self.chunks, other_chunks=True, **self.evaluating)  # chunks are checked already

    def restore_best(self) -> float:
        """Restore the model, including ψ, to the state with the highest L_ML, and return this L_ML in nats.

        The optimisers are left unchanged, so call this at the end of training.

        Raises:
            ValueError: the trainer keeps no best state, or has not evaluated L_ML.
        """
        if self.best is None:
            raise ValueError("this trainer keeps no best state; construct it with keep_best=True and lml_every.")
        self.best.restore(self.model)
        return self.best.lml

    def configuration(self) -> dict[str, Any]:
        """Return the facts that must be the same to resume from a checkpoint."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        optimizers = {"optimizer": self.optimizer, "hyper_optimizer": self.hyper_optimizer}
        groups = {
            f"{which} groups": [[names[p] for p in group["params"]] for group in one.param_groups] if one else []
            for which, one in optimizers.items()
        }
        free = {"lml_every", "patience", "seed", "other_chunks", "audit"}
        settings = {name: value for name, value in vars(self.settings).items() if name not in free}
        return {
            "chunk sizes": self.chunks.sizes,
            "partitions": num_partitions(self.model),
            **checkpoint.facts_of(self.model),
            "hyper": list(self.hyper),
            "optimizer": self.optimizer.kind,
            "hyper_optimizer": type(self.hyper_optimizer).__name__,
            **groups,
            "scheduler": type(self.scheduler).__name__,
            "hyper_scheduler": type(self.hyper_scheduler).__name__,
            **settings,
            "hyper_gradient": {path: repr(one) for path, one in self.hyper_gradient.items() if one is not None},
        }

    def save(self, path: str | PathLike[str]) -> None:
        """Write a checkpoint from which `load` resumes with the same bits, atomically.

        To save in a callback, make it the last callback: the file has no metrics that later callbacks return for this
        step.

        Raises:
            ValueError: an optimiser's settings or a scheduler's state have something other than numbers and tensors; an
                older file is left unchanged.
        """
        checkpoint.save(self, path, [checkpoint.random_state(self)])

    def load(self, path: str | PathLike[str]) -> None:
        """Resume from a checkpoint: weights, partitions, ψ, optimisers, random states and history.

        The data are compared by a few examples if they are tensors; other Datasets only by length. Settings of the
        optimisers and schedulers, such as the learning rate, are taken from the file; to change them, set param_groups
        or the scheduler's attributes afterwards.

        Warns:
            UserWarning: these settings differ from the trainer's.

        Raises:
            ValueError: the file is not a checkpoint of this version, is damaged, or is of another model, other chunks,
                optimisers or settings; nothing has changed.
            OSError: the file does not exist or cannot be read.
        """
        checkpoint.load(self, path)

    def _backward(self, loss: Tensor) -> None:
        preflight.check_finite(loss, f"step {self.steps + 1}")
        loss.backward()

    _averaged = staticmethod(alone)

    def _loss(self, loss: Loss, batch: Any, *, model: nn.Module | None = None) -> Tensor:
        model = self._forward if model is None else model
        return mean(loss, *self.forward(model, to_device(batch, self.device)))


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


def _check_scheduler(name: str, scheduler: Any, optimizer: torch.optim.Optimizer | None) -> None:
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ValueError(f"{name} is a ReduceLROnPlateau, which needs a metric in step(); step it in a callback.")
    if scheduler is not None and scheduler.optimizer is not optimizer:
        raise ValueError(f"{name} belongs to another optimiser; construct it with the trainer's optimiser.")
