"""Trainer: learns the weights and the hyperparameters of a partitioned network together (Appendix I.1)."""

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
from partnets.evaluation.metrics import check_counts
from partnets.evaluation.out_of_chunk import lml
from partnets.evaluation.same_chunks import check_same_chunks, remember_chunks
from partnets.hyper import Hyperparameter, hyperparameters
from partnets.hyper.hyperparameter import find_hyper
from partnets.subnetworks.parameters import partitioned_parameters
from partnets.optim.base import check_partitioned
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
from partnets.training.step import check_clip, parameters_of, step_hyper, step_weights, still_modules
from partnets.utils.checks import check_at_least
from partnets.utils.likelihood import check_loss, check_mean, plain
from partnets.utils.modules import to_device
from partnets.utils.random_state import preserved


class Trainer(TrainingState):
    """Alternates steps of the partitions w_k (Eq. 3) and of the hyperparameters ψ (Eq. 4), as in Appendix I.1.

    A step of w_k is partnets.step_weights on a batch of D_1:k with k ~ Cat(sampling), one of ψ partnets.step_hyper on a
    batch of D_k with k ~ Cat(u_2..u_C), u being the chunks' proportions. Loops of your own take the same two. With
    one_pass all of them learn in each step, from one batch that is divided among them (Appendix C).

    While one of the two is updated, the other requires no gradient and none is computed. Batches go to the model's
    device. Before the first step a batch of D_2 is tried, of which nothing stays but a warning or an error. Chunks and
    batches are drawn by a generator of the trainer's own; the model's noise comes from torch's.

    Args:
        model: partitioned, with as many partitions as there are chunks.
        chunks: of examples (x, y), or of dicts with labels.
        hyper: ψ: a module of partnets.hyper, or several, inside the model; None for steps of w alone.
        loss: loss(output, y), the mean negative log-likelihood in nats, as torch's criteria return it, per example or
            per token; or the losses themselves, whose mean is taken. For L_ML see partnets.lml.
        hyper_loss: the loss of ψ's steps and of L_ML, without what only regularises the weights. If None, the negative
            log-likelihood in `loss` where it is known, as torch's cross-entropy without its label smoothing, and `loss`
            itself where it is not.
        optimizer: of partnets.optim, of this model; Adam with a learning rate of 1e-3 if None.
        hyper_optimizer: of torch.optim, of the parameters of hyper; Adam with a learning rate of 1e-3 if None.
        scheduler, hyper_scheduler: of torch.optim.lr_scheduler, of these two optimisers; stepped after each step of w
            of any partition (as in Appendix I.1), and after each step of ψ.
        batch_size, hyper_batch_size: examples in a step of w and of ψ; the latter as the former if None.
        sampling: C probabilities, with which k is drawn for a step of w; the chunks' proportions if None.
        clip: the gradient of w_k is scaled down to this norm where it is longer, over all parameters; None leaves it.
        hyper_every: ψ takes steps after each so many steps of w.
        hyper_steps: how many, each on a batch of its own.
        hyper_after: how many steps of w come before the first of ψ.
        hyper_chunks: 'one': a step of ψ takes a batch of one chunk, D_k with k ~ Cat(u_2..u_C). 'all': one of each
            unseen chunk, weighted by their sizes, at C - 1 times the cost: the same gradient in the mean, less noise.
        one_pass: each step updates w_1..w_C one after another, each on its part of batch_size examples, by `sampling`;
            and a step of ψ takes its part of hyper_batch_size from each unseen chunk, by their sizes. So no batch is
            larger than its part: see docs/training.md for what that costs.
        hyper_gradient: how ψ learns. 'direct': from how it changes what the present weights predict of unseen data.
            'lookahead': from how steps of the weights that it has a part in change that, so that it may act on training
            alone; a partnets.Lookahead says how many, and how they are differentiated. 'implicit': from how the minimum
            of the training loss changes; or a partnets.Implicit. For all of hyper, or a dict for some modules of it.
            Others learn as their classes say: directly, but for hyper.Penalty, LabelSmoothing and what else is off in
            evaluation. See docs/hyperparameters.md.
        lml_every: evaluates L_ML in full each time that so many steps are done, with the same noise; None never does.
        keep_best: keeps a copy of the model where L_ML was highest; see restore_best.
        patience: fit ends where so many evaluations of L_ML in a row brought none higher; None never ends early.
        callbacks: called after each step, in this order, as callback(trainer); see partnets.callbacks and loggers.
        seed: an int in [0, 2**63) of the trainer's generator.
        other_chunks: whether the model may have learned from other chunks than these; see partnets.lml.
        audit: whether to look, before the first step, for what of the model carries later chunks into earlier
            subnetworks, as partnets.audit does; it takes some passes.
        forward: forward(model, batch), which returns output and y; see partnets.data.batch.call for the usual one.
        **loading: num_workers, pin_memory, prefetch_factor and others of a DataLoader's options: fit and the evaluation
            of L_ML fetch batches ahead by them. The draws are the same, and so is every bit unless the data set draws
            at random; then it is the same for any number of workers from 1 on.

    Warns:
        UserWarning: the loss is no log-likelihood, as a squared error; the partitions' shares of the weights are far
            from the chunks'; the model has what acts in the training loss, which is another;
            or, at the first step, the weights seem to have learned from later chunks already.

    Attributes:
        history, generator, best, noise: see TrainingState, which is what callbacks are given.

    Raises:
        ValueError: the model and the chunks differ in C, hyper is not inside the model, an optimiser belongs to other
            parameters, a scheduler to another optimiser, a loss is a sum over the batch, the model has learned from
            other chunks, or a number is out of range. At the first step: ψ reaches the loss only, or the audit finds a
            leak.
        FloatingPointError: in a step whose loss is not finite, before anything is stepped by it.
        TypeError: an option is none of these, nor of a DataLoader's, or one that says which examples a batch has.

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

    # Whether ψ learns from chunks that a subnetwork has not seen, whether a terminal shows progress, and whether layers
    # may respond to ψ.
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
                "hyper_chunks='all' takes a batch of each chunk, and one_pass a part of one; pass one of them."
            )
        if lml_every is None and (keep_best or patience is not None):
            raise ValueError("keep_best and patience go by L_ML; pass lml_every, how many steps apart to evaluate it.")
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
        _ = self._parts, self._hyper_parts  # which raise if a part is empty
        self.best, self.patience, self.callbacks = Best() if keep_best else None, patience, list(callbacks)
        self.clip, self.seed, self.generator = clip, seed, torch.Generator().manual_seed(seed)
        self.noise: dict | None = None
        self._still = still_modules(model)
        self._started = False
        self.history = History()

    def fit(self, steps: int | None = None, *, epochs: float | None = None) -> History:
        """Trains for so many more steps, or until L_ML exhausts `patience`; on a terminal it shows progress.

        An interruption may leave a step half done; from a checkpoint of before it, training goes on with the same bits.

        Args:
            steps: how many.
            epochs: in their place, how often as many examples are drawn as there are: len(data) / batch_size steps.

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
        with fetching, Progress(self.steps, steps, shown=self.shows_progress) as progress:
            for _ in range(steps):
                if self.exhausted:
                    break
                self.step()
                progress.update(self.history)
            self.estimate_statistics()
        return self.history

    def step(self) -> None:
        """An iteration, its record, and what is due after it.

        The model is in training mode, except for what was in evaluation mode while the model was not when this trainer
        was constructed, as a frozen backbone, and for modules with running statistics that partnets.partition left out:
        they would carry D_k into earlier subnetworks.
        """
        self.model.train()
        for module in self._still:
            module.eval()
        if not self._started:
            self._start()
        done = self.steps + 1
        self.history.add(done, *self.iterate(), self.values())
        if self.lml_every and done % self.lml_every == 0:
            self.estimate_statistics()
            # The same noise each time: a maximum over evaluations should not be that of the luckiest one.
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
        if not self.other_chunks:  # the weights may have come since this trainer was made
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
        """One iteration of Appendix I.1; returns k and loss of the step of w, and of the last of ψ if some are due.

        As k, 0 stands for all partitions, and None for all unseen chunks.
        """
        k, loss = self.step_weights()
        found = None, None
        if self._hyper_learns(self.steps + 1):
            for _ in range(self.hyper_steps):
                found = self.step_hyper()
        return k, loss, *found

    @property
    def _source(self) -> Chunks | Ahead:
        """Where batches come from."""
        return self._ahead or self.chunks

    def _hyper_learns(self, step: int) -> bool:
        late = step - self.hyper_after
        return bool(self.hyper) and late >= 1 and late % self.hyper_every == 0

    def step_weights(self) -> tuple[int, float]:
        """Updates w_k on a batch from D_1:k, with k ~ Cat(sampling); returns k and the loss.

        With one_pass updates all of them, on a part of a batch each; returns 0 and the mean loss of all examples.
        """
        parts, options = self._draw_learning(self.generator), {"clip": self.clip, "backward": self._backward}
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
        """Updates ψ on chunks that the subnetworks have not seen; returns k, None for all chunks, and the loss."""
        k, weights = self._draw_unseen(self.generator)
        if not self._inner_steps:
            batches, judge = _Drawn(weights, self._draw), partial(self._loss, self.hyper_loss)
            found = self._update_hyper(batches, judge, weights=weights, backward=self._backward)
        else:
            batches = _Drawn(weights, lambda j: (self._draw(j), [self._draw_seen(j) for _ in range(self._inner_steps)]))
            by = {module: self.hyper_gradient[path] for path, module in self.hyper.items()}
            # By the model itself: what it may be wrapped in expects one backward pass for each forward pass.
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
        """With one_pass, the examples of a batch from which each partition learns; `sampling` may change meanwhile."""
        if not self.one_pass:
            return {}
        return divided("batch_size", self.batch_size, dict(enumerate(self.sampling, start=1)))

    @property
    def _hyper_parts(self) -> dict[int, int]:
        """The same of ψ's batches and unseen chunks."""
        if not (self.one_pass and self.hyper):
            return {}
        unseen = dict(enumerate(self.chunks.proportions[1:], start=2))
        return divided("hyper_batch_size", self.hyper_batch_size, unseen)

    def _draw_learning(self, generator: torch.Generator) -> dict[int, int]:
        """The partitions that a step of w updates, and of how many examples."""
        return self._parts or {draw_k(self.sampling, generator): self.batch_size}

    def _examples_of(self, chunk: int) -> int:
        """How many a step of ψ takes from a chunk."""
        return self._hyper_parts.get(chunk, self.hyper_batch_size)

    @property
    def _inner_steps(self) -> int:
        """How many batches a step of ψ takes of what the subnetwork has seen."""
        return most_steps(self.hyper_gradient.values())

    def _draw(self, j: int) -> Any:
        return self._source.sample(j, self._examples_of(j), self.generator)

    def _draw_seen(self, j: int) -> Any:
        return self._source.sample_upto(j - 1, self._examples_upto(j - 1), self.generator)

    def _examples_upto(self, k: int) -> int:
        """How many a step of w_k takes."""
        return self._parts.get(k, self.batch_size)

    def _draw_unseen(self, generator: torch.Generator) -> tuple[int | None, dict[int, float]]:
        """The chunk of a step of ψ, None for all of them, and the weight of each."""
        u = self.chunks.proportions
        k = draw_k(u, generator, start=2) if self.hyper_chunks == "one" and not self.one_pass else None
        return k, {k: 1.0} if k else {j: share / sum(u[1:]) for j, share in enumerate(u[1:], start=2)}

    def _plan(self, steps: int, generator: torch.Generator) -> Iterator[tuple[str, int, int]]:
        """What step_weights and step_hyper will draw in so many steps, in their order: see Ahead."""
        for step in range(self.steps + 1, self.steps + 1 + steps):
            for k, examples in self._draw_learning(generator).items():
                yield "draw_upto", k, examples
            for _ in range(self.hyper_steps if self._hyper_learns(step) else 0):
                for j in self._draw_unseen(generator)[1]:
                    yield "draw", j, self._examples_of(j)
                    for _ in range(self._inner_steps):
                        yield "draw_upto", j - 1, self._examples_upto(j - 1)

    def save(self, path: str | PathLike) -> None:
        """Writes a checkpoint, from which `load` resumes with the same bits; whole or not at all.

        In a callback: put it last, by itself. What other callbacks return for this step after it is not in the file.

        Raises:
            ValueError: an optimiser's settings or a scheduler's state have something else than numbers and tensors;
                an older file stays then.
        """
        checkpoint.save(self, path, [checkpoint.random_state(self)])

    def load(self, path: str | PathLike) -> None:
        """Resumes from a checkpoint: weights, partitions, ψ, optimisers, random states and history.

        That the data are the same is known by a few examples of tensors; of another Dataset by its length alone.
        Settings of the optimisers and schedulers, such as the learning rate, are the file's: to change them, set
        param_groups, or the scheduler's attributes, afterwards.

        Warns:
            UserWarning: these settings were others here.

        Raises:
            ValueError: the file is no checkpoint, or that of another model, other chunks, optimisers or batch sizes;
                nothing has changed then.
            OSError: it is not there, or cannot be read.
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
    """A batch for each of some chunks, drawn when it is asked for: one is in memory at a time."""

    def __init__(self, ks: Iterable[int], draw: Callable[[int], Any]) -> None:
        self.ks, self.draw = list(ks), draw

    def __getitem__(self, k: int) -> Any:
        return self.draw(k)

    def __iter__(self) -> Iterator[int]:
        return iter(self.ks)

    def __len__(self) -> int:
        return len(self.ks)


def _check_no_responses(model: nn.Module) -> None:
    """Raises ValueError if layers of a model respond to ψ, whose gradient is not what this trainer takes."""
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
            f"hyper_optimizer is {type(hyper_optimizer).__name__}, whose step computes the loss several times; take one"
            " that needs no closure, as Adam."
        )


def _check_scheduler(name: str, scheduler, optimizer):
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ValueError(f"{name} is a ReduceLROnPlateau, whose steps need a metric; step it in a callback of yours.")
    if scheduler is not None and scheduler.optimizer is not optimizer:
        raise ValueError(f"{name} belongs to another optimiser; construct it with the one that the trainer gets.")
    return scheduler


def _check_sampling(sampling: Sequence[float], model: nn.Module, chunks: Chunks) -> tuple[float, ...]:
    sampling = tuple(map(float, sampling))
    if len(sampling) != chunks.count or not all(0 <= share < math.inf for share in sampling) or not sum(sampling):
        raise ValueError(f"sampling={sampling}; pass {chunks.count} probabilities, one for each partition.")
    owned = partitioned_parameters(model)
    for k, share in enumerate(sampling, start=1):
        owns = any(one.partition is None or one.partition.sizes()[k - 1] for one in owned)
        if share and not owns:
            only = tuple(float(j != k) for j in range(1, chunks.count + 1))
            raise ValueError(f"partition {k} has no parameter to learn; pass sampling, as {only}, that leaves it out.")
    return sampling
