"""PartitionedTrainer: a transformers.Trainer that trains weights and hyperparameters together (Appendix I.1)."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from partnets.convert import merge
from partnets.data.chunks import Chunks
from partnets.data.fetching import batches
from partnets.data.loader import Draw, Loader
from partnets.data.parts import Parts
from partnets.distributed.ddp import broadcast_rows, expect, leave_buffers_alone, pack
from partnets.distributed.ranks import averaged, check_agreement, on_all_ranks, partitions
from partnets.distributed.shared_chunks import share
from partnets.evaluation.running_statistics import estimate_statistics
from partnets.evaluation.same_chunks import check_counts, check_same_chunks, remember_chunks
from partnets.hyper import penalties
from partnets.hyper.hyperparameter import Hyperparameter, hyperparameters, values_by_path
from partnets.hyper.penalty import with_terms
from partnets.optim import AdamW, PartitionedOptimizer
from partnets.optim.base import check_partitioned
from partnets.subnetworks.context import subnetwork
from partnets.training.checkpoint import raise_other_chunks
from partnets.training.hypergradient import Choice, Strategy
from partnets.training.preflight import check_leaks, check_learns
from partnets.training.step import parameters_of, still_modules, weights_learning
from partnets.training.unrolled import alone
from partnets.utils import random_state, sealed
from partnets.utils.modules import device_of, evaluating

try:
    import transformers
except ImportError as error:
    raise ImportError(
        "partnets.integrations.hugging_face needs transformers; pip install 'transformers>=5' accelerate, or"
        " partkernels' extra 'transformers'."
    ) from error

if TYPE_CHECKING:
    from transformers import TrainerControl
    from transformers.trainer_utils import EvalLoopOutput

# transformers' names of optimisers that partnets.optim.AdamW replaces.
ADAMW = {"adamw_torch", "adamw_torch_fused"}
# The file of the partitioned model, its chunks, and the state of ψ's optimizer.
PARTITIONED = "partitioned.pt"


class PartitionedTrainer(transformers.Trainer):
    """A transformers.Trainer for a partitioned model, without a validation set.

    A training step is a step of ψ (Eq. 4) and one of w_k (Eq. 3), as in partnets.Trainer; transformers clips the
    gradient of w_k, steps and schedules. With gradient_accumulation_steps, both accumulate: see data.Parts. Batches are
    drawn by partnets.Loader and collated by the data collator. Checkpoints and save_model contain a model of torch's
    layers for from_pretrained and, in partitioned.pt, the partitioned model, from which resume_from_checkpoint resumes
    to the same bits. With metric_for_best_model="lml" and greater_is_better=True, load_best_model_at_end selects by
    L_ML. Label smoothing applies only to the weights. A compute_loss_func applies to ψ and L_ML too, so it should be a
    negative log-likelihood. For another of transformers' trainers, derive a class from this one and from that.

    Processes that torchrun or accelerate has started share each batch by DistributedDataParallel.

    Args:
        model: a model of transformers with partitioned layers and modules of partnets.hyper.
        train_dataset: partnets.Chunks, as many chunks as the model has partitions.
        eval_dataset: Chunks for L_ML, or another dataset for transformers' evaluation; train_dataset if None.
        hyper_optimizer: a function of the parameters of ψ that returns their optimizer, such as
            functools.partial(torch.optim.Adam, lr=0.05); Adam with a learning rate of 1e-3 if None.
        hyper_gradient: how ψ learns, as for partnets.Trainer.
        audit: as for partnets.Trainer.
        optimizers: as for transformers.Trainer, with an optimiser of partnets.optim.
        others: further arguments of transformers.Trainer.

    Raises:
        ImportError: transformers is not installed; at import of this module.
        ValueError: train_dataset is not Chunks or differs in C from the model, the optimiser is not of partnets.optim,
            or the arguments ask for fp16, a train_sampling_strategy other than "random", several GPUs in one process,
            or ddp_find_unused_parameters=False. When training starts: the audit finds a leak, or the processes differ
            in the model or the chunks.

    Example:
        >>> from partnets.integrations.hugging_face import PartitionedTrainer
        >>> PartitionedTrainer(model, arguments, train_dataset=chunks).train()  # doctest: +SKIP
    """

    model: nn.Module

    def __init__(
        self,
        *args: Any,
        hyper_optimizer: Callable[..., torch.optim.Optimizer] | None = None,
        hyper_gradient: Choice | None = None,
        audit: bool = True,
        eval_dataset: Any = None,
        **options: Any,
    ) -> None:
        chunks = options.get("train_dataset")
        if not isinstance(chunks, Chunks):
            raise ValueError(f"train_dataset is a {type(chunks).__name__}; pass partnets.chunk(dataset, proportions).")
        self._make_optimizer = hyper_optimizer or (lambda parameters: torch.optim.Adam(parameters, lr=1e-3))
        self._given, self._audit, self._strategy = hyper_gradient, audit, None
        super().__init__(*args, eval_dataset=chunks if eval_dataset is None else eval_dataset, **options)
        self._check_arguments()
        self._adopt(self.model)
        if self.optimizer is not None:
            self.optimizer = _stepping(self.optimizer)
        config = getattr(self.model, "config", None)
        if getattr(config, "problem_type", None) == "regression" or getattr(config, "num_labels", 2) == 1:
            warnings.warn(
                "the model's loss is a squared error, not a negative log-likelihood, so L_ML has no unit and the size"
                " of ψ's gradient is arbitrary; pass a compute_loss_func that returns a negative log-likelihood.",
                stacklevel=2,
            )

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Return a new model of model_init, for a training or a trial of hyperparameter_search."""
        model = super().call_model_init(trial)
        if self._strategy is not None:  # otherwise transformers' constructor called
            self._adopt(model)
        return model

    def _adopt(self, model: nn.Module) -> None:
        """Check a model, and make the optimizer of its ψ."""
        check_counts(model, self.train_dataset)
        check_learns(model, self.compute_loss_func)
        psi = hyperparameters(model)
        self.hyper_optimizer = self._make_optimizer(psi) if psi else None
        learning = parameters_of(self.hyper_optimizer) if psi else []
        self._strategy = Strategy.of_parameters(model, learning, self._given if learning else None)
        self._hyper_losses: list[Tensor] = []
        self._still, self._to_audit = still_modules(model), self._audit

    def _check_arguments(self) -> None:
        args, cure = self.args, "pass one of partnets.optim as optimizers=(optimizer, None)."
        optim, given = getattr(args.optim, "value", args.optim), self.optimizer_cls_and_kwargs
        strategy = getattr(args, "train_sampling_strategy", "random")  # absent in transformers 5.0
        if args.n_gpu > 1:
            raise ValueError(
                f"one process has {args.n_gpu} GPUs, which DataParallel would use; start one for each, such as by"
                " torchrun or accelerate launch."
            )
        if args.world_size > 1 and args.ddp_find_unused_parameters is False:
            raise ValueError(
                "ddp_find_unused_parameters is False, but each step trains other parameters; leave it out."
            )
        if optim not in ADAMW and self.optimizer is None:
            raise ValueError(f"optim is {optim}; {cure}")
        if args.optim_args and self.optimizer is None:
            raise ValueError(f"optim_args={args.optim_args!r} are for an optimiser of transformers; {cure}")
        if given is not None:
            raise ValueError(f"optimizer_cls_and_kwargs has {given[0].__name__}, which steps all partitions; {cure}")
        if strategy != "random":
            raise ValueError(
                f"train_sampling_strategy is {strategy}, but partnets.Loader draws at random; leave it 'random'."
            )
        if args.fp16:
            raise ValueError(
                "fp16=True scales gradients, but a step of ψ does not unscale them; train with bf16 or float32."
            )

    def dense_model(self) -> nn.Module:
        """Return the model to save for from_pretrained, with torch's layers of the whole network.

        It still contains modules of partnets.hyper, which from_pretrained does not know. Override this to return
        partnets.finalize(self.model, "deploy") and to store learned values in the architecture, such as a dropout rate
        in the configuration.
        """
        return merge(self.model)

    def values(self) -> dict[str, float]:
        """Return the current value of each hyperparameter in its units, by its module's path."""
        named = self.model.named_modules()
        return values_by_path({path: module for path, module in named if isinstance(module, Hyperparameter)})

    def create_optimizer(self, model: nn.Module | None = None) -> PartitionedOptimizer:
        """Create partnets.optim.AdamW with the arguments' settings, unless `optimizers` was given.

        As in transformers, biases and the weights of norms do not decay.
        """
        if self.optimizer is None:
            given = self.args
            betas = given.adam_beta1, given.adam_beta2
            settings = {"lr": given.learning_rate, "eps": given.adam_epsilon, "weight_decay": given.weight_decay}
            names = set(self.get_decay_parameter_names(self.model))
            without = [p for n, p in self.model.named_parameters() if p.requires_grad and n not in names]
            psi = set(hyperparameters(self.model))
            groups = [{"params": [p for p in without if p not in psi], "weight_decay": 0.0}]
            self.optimizer = _stepping(AdamW(self.model, betas=betas, groups=groups, **settings))
        return self.optimizer

    def get_train_dataloader(self) -> DataLoader[Draw]:
        """Return a partnets.Loader; the batches of an epoch have as many examples as the chunks, rounded up.

        With gradient_accumulation_steps, an item is a part of a batch, and the first one comes with the batch of ψ.
        """
        self._check_arguments()  # a trial of a search sets others
        chunks, size = self._collated(self.train_dataset), self.args.train_batch_size
        check_same_chunks(self.model, chunks)
        remember_chunks(self.model, chunks)
        if (ranks := self.args.world_size) > 1:  # DistributedDataParallel wraps the model afterwards
            check_agreement(partitions(self.model) | {"the chunks": chunks.fingerprint})
            leave_buffers_alone(self.model)
            broadcast_rows(self.model, self.args.device)
            chunks = share(chunks)
        options = {"num_workers": self.args.dataloader_num_workers, "pin_memory": self.args.dataloader_pin_memory}
        if self.args.dataloader_num_workers:
            options["persistent_workers"] = self.args.dataloader_persistent_workers
            options["prefetch_factor"] = self.args.dataloader_prefetch_factor
        parts = self.args.gradient_accumulation_steps
        examples = ranks * parts * size
        steps = parts * math.ceil(len(chunks.order) / examples)
        options |= {"hyper_batch_size": None if self.hyper_optimizer is None else examples, "accumulate": parts}
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        loader = Loader(chunks, examples, steps=steps, seed=seed, steps_ahead=self._strategy.seen, **options)
        loader.dataset.has_parts_as_items = True  # transformers' loop takes a part at a time
        return self.accelerator.prepare(loader) if ranks == 1 else loader  # which would give ranks other draws

    def _collated(self, chunks: Chunks) -> Chunks:
        """Return the chunks with transformers' data collator, unless they have their own collate."""
        chunks = copy.copy(chunks)
        if chunks.collate is default_collate:  # otherwise collate was passed to partnets.chunk
            chunks.collate = self._get_collator_with_removed_columns(self.data_collator, "training")
        return chunks

    def training_step(self, model: nn.Module, inputs: Draw, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Take a step of ψ and compute the gradient of w_k, which transformers' loop clips and steps."""
        self.model.train()
        for module in self._still:
            module.eval()
        if self._to_audit:
            chunks, size = self._collated(self.train_dataset), self.args.train_batch_size
            # A leak may be visible only in one rank's examples.
            on_all_ranks(
                lambda: check_leaks(self.model, chunks, size, lambda batch: (self._computed(batch, self.model),) * 2)
            )
            self._to_audit = False
        pack(model)
        k, batch, hyper_k, hyper_batch = inputs
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # inside accelerate's wrapper, if any
        if all(parameter.grad is None for parameter in optimizer.parameters()):
            optimizer.zero_grad()  # transformers' loop has cleared `.grad` only
        if hyper_k is not None:
            if self._strategy.seen:
                unseen, seen = hyper_batch
                hyper_batch = self._weighted(unseen), [self._weighted(one) for one in seen]
            else:
                hyper_batch = self._weighted(hyper_batch)
            models, batches = (self.model, optimizer, self.hyper_optimizer), {hyper_k: hyper_batch}
            # DistributedDataParallel expects one backward pass for each forward pass, unlike steps that look ahead.
            computing = self.model if self._strategy.seen else model
            options = {"clip": self.args.max_grad_norm or None, "backward": partial(self._backward, model=computing)}
            options["averaged"] = averaged if self.args.world_size > 1 else alone
            losses = partial(self._computed, model=computing), partial(self._judged, model=computing)
            with _synchronised(model):
                self._hyper_losses.append(self._strategy.step_hyper(*models, batches, *losses, **options))
            self.hyper_optimizer.zero_grad()  # otherwise the loop's clipping would include ψ's gradient
        with weights_learning(self.model, k):
            parts = self.args.gradient_accumulation_steps
            share = self._shared_targets(batch) / num_items_in_batch if num_items_in_batch else 1 / parts
            loss = torch.zeros((), device=self.args.device)
            if share:  # the mean of no targets is NaN
                loss = share * self._computed(batch, model)
                self._backward(loss, model)
        optimizer.update = k
        return loss.detach()

    def _backward(self, loss: Tensor, model: nn.Module) -> None:
        expect(model)
        self.accelerator.backward(loss)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Draw], num_batches: int, device: torch.device
    ) -> tuple[list[Draw], int | None]:
        """Return transformers' draws of a step, and the number of targets in their batches of w_k, if it is known."""
        draws, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        counts = [self._shared_targets(draw.batch) for draw in draws]
        return draws, None if None in counts else sum(counts) or None

    def _shared_targets(self, batch: Any) -> int | None:
        """Return _targets in one process; None in several, which would wait for each other."""
        return None if self.args.world_size > 1 else self._targets(batch)

    def _targets(self, batch: Any) -> int | None:
        """Return the number of labels in a batch that are not -100, over which transformers' losses are means.

        None if labels are not integers.
        """
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        if not isinstance(labels, Tensor) or labels.is_floating_point():
            return None
        names = [one.__name__ for one in type(self.model).__mro__]
        if any(kind in name for kind in ("CausalLM", "LMHead") for name in names):
            labels = labels[..., 1:]  # the first one has no logits
        return int(labels.ne(-100).sum())

    def _weighted(self, batch: Any) -> Any:
        """Return a batch whose parts have their shares of its targets as weights."""
        counts = [self._shared_targets(part) for part in batch] if isinstance(batch, Parts) else []
        if None in counts or not sum(counts):
            return batch
        return Parts(batch, [count / sum(counts) for count in counts])

    def _computed(self, batch: Any, model: nn.Module) -> Tensor:
        """Return the loss as transformers' training_step computes it, without a backward pass."""
        with self.compute_loss_context_manager():
            return self.compute_loss(model, self._prepare_inputs(batch))

    def _judged(self, batch: Any, model: nn.Module) -> Tensor:
        """Return the loss without label smoothing, which only regularises the weights."""
        smoother, self.label_smoother = self.label_smoother, None
        try:
            return self._computed(batch, model)
        finally:
            self.label_smoother = smoother

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor | tuple[Tensor, Any]:
        """Return transformers' loss as a mean over this batch, plus the terms of hyper.Penalty modules.

        transformers' count of labels, num_items_in_batch, is not used: it exceeds the number of losses of some models.
        """
        with penalties() as found:
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        loss = with_terms(loss, found)
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        """Log as transformers does; add the mean loss of ψ's steps and the present ψ to a training loss."""
        if "loss" in logs:
            if self._hyper_losses:
                loss = torch.stack(self._hyper_losses).mean()
                loss = averaged([loss], [loss])[0] if self.args.world_size > 1 else loss
                logs = logs | {"hyper_loss": loss.item()}
                self._hyper_losses.clear()
            logs = logs | self.values()
        super().log(logs, *args, **options)

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        **options: Any,
    ) -> dict[str, float]:
        """Return L_ML of chunks in nats (Eq. 2) as "eval_lml", with the values of ψ.

        L_ML is minus the sum over unseen chunks of mean loss times number of labels that are not -100, or times number
        of examples if labels are not integers. Other data, and compute_metrics, are evaluated as in transformers.
        """
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(data, str):
            data = self.eval_dataset[data]
        if not isinstance(data, Chunks):
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix, **options)
        check_same_chunks(self.model, data)
        values = {f"{metric_key_prefix}_{name}": value for name, value in self.values().items()}
        metrics = {f"{metric_key_prefix}_lml": self._lml(self._collated(data))} | values
        self.log(metrics)
        self.control: TrainerControl = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    @torch.no_grad()
    def _lml(self, chunks: Chunks) -> float:
        self._estimate_statistics()
        found, size = 0.0, self.args.eval_batch_size
        with random_state.preserved(device_of(self.model)), evaluating(self.model):
            for k in range(2, len(chunks) + 1):
                random_state.seed_all(self.args.seed)  # the same noise in each evaluation
                with subnetwork(self.model, active=k - 1):
                    for i, batch in enumerate(batches(chunks[k], size, collate=chunks.collate)):
                        count = self._targets(batch)
                        if count is None:
                            count = min(size, chunks.sizes[k - 1] - i * size)
                        if count:  # the mean of no targets is NaN
                            found -= count * self._judged(batch, self.model).item()
        return found

    def evaluation_loop(self, *args: Any, **options: Any) -> EvalLoopOutput:
        """Run transformers' loop for evaluate and predict, after estimating BatchNorm's statistics."""
        self._estimate_statistics()
        return super().evaluation_loop(*args, **options)

    def _estimate_statistics(self) -> None:
        """Estimate BatchNorm's statistics with batches as the data collator makes them."""
        chunks = self._collated(self.train_dataset)
        estimate_statistics(self.model, chunks, forward=lambda model, batch: (model(**batch), None))

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Save dense_model() for from_pretrained, and the partitioned model, to resume from."""
        self._estimate_statistics()
        partitioned, self.model = self.model, self.dense_model()
        try:
            super()._save(output_dir)
        finally:
            self.model = partitioned
        if not self.args.should_save:  # transformers calls this on all ranks
            return
        chunks = self.train_dataset
        states = {"model": self.model.state_dict(), "order": chunks.order, "sizes": chunks.sizes}
        if self.hyper_optimizer is not None:
            states["hyper_optimizer"] = self.hyper_optimizer.state_dict()
        sealed.save(states, Path(output_dir or self.args.output_dir) / PARTITIONED)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        path = Path(resume_from_checkpoint) / PARTITIONED
        if not path.exists():
            raise ValueError(f"{path} does not exist; resume from a checkpoint that a PartitionedTrainer saved.")
        states = sealed.load(path, f"{PARTITIONED} of a checkpoint; pass one that a PartitionedTrainer saved.")
        chunks = self.train_dataset
        if not torch.equal(states["order"], chunks.order) or states["sizes"] != chunks.sizes:
            raise_other_chunks(path)
        try:
            if self.hyper_optimizer is not None:
                self.hyper_optimizer.load_state_dict(states["hyper_optimizer"])
            self.model.load_state_dict(states["model"])
        except Exception as error:  # each part raises other types
            raise ValueError(f"{path} does not fit this trainer: {error}") from error

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)


@contextmanager
def _synchronised(model: nn.Module) -> Iterator[None]:
    """Average gradients over ranks in the context, also in parts of a batch before the last one."""
    before = getattr(model, "require_backward_grad_sync", None)
    if before is not None:
        model.require_backward_grad_sync = True
    try:
        yield
    finally:
        if before is not None:
            model.require_backward_grad_sync = before


def _stepping(optimizer: PartitionedOptimizer) -> PartitionedOptimizer:
    """Let step(), as loops for any optimiser call it, step partition `update`, that of the last batch; return it."""
    check_partitioned(optimizer, "optimizers[0]")
    if not hasattr(optimizer, "update"):  # another trainer may have had it before
        optimizer.update = None
        optimizer.register_step_pre_hook(lambda own, args, options: ((own, own.update, *args[1:]), options))
    return optimizer
