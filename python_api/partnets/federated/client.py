"""Client: the computation of one client in a round, from its examples and the server's vectors (Appendix J.1)."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from partkernels.arguments import check_seed
from partnets import optim
from partnets.data.batch import Forward, call
from partnets.data.examples import Collate, as_dataset
from partnets.data.fetching import batches
from partnets.evaluation.snapshot import Snapshot
from partnets.federated.privacy import Privacy
from partnets.federated.round import Update
from partnets.federated.vectors import Vectors
from partnets.hyper import penalties
from partnets.optim.base import PartitionedOptimizer
from partnets.training.preflight import AUDITED, check_learns, refuse_leaks, try_judging, warn_of_knowledge
from partnets.training.step import check_reached, hyper_learning, step_weights, still_modules, training_only
from partnets.utils import random_state
from partnets.utils.checks import check_at_least
from partnets.utils.losses import Loss, check_loss, mean, plain, summed
from partnets.utils.modules import device_of, evaluating, to_device
from partnets.utils.seeds import derived

# Held while a client is constructed from its data or computes: threads share the random states, and clients a model.
TURN = threading.RLock()


class Client:
    """A client of chunk D_k: trains w_k..w_C separately and computes the gradient of ψ through subnetwork k-1.

    Each partition starts from the server's values, even if an earlier partition has changed here (Eq. 25). The gradient
    of ψ is that of the mean loss of all examples, or of all tokens if these have classes, through subnetwork k-1, which
    no client of chunk k changes (Eq. 26). Random draws depend only on seed, number and round, so a repeated round gives
    the same bits.

    After a round the model has the learned values, but no later round depends on them: weights come from the server,
    and buffers and attributes, such as counters, are reset for each partition to their values at construction.

    Args:
        model: a partitioned model, or a dense one in partnets.Ensemble for federated averaging.
        data: a Dataset of (x, y) or of dicts with labels, or tensors (x, y).
        chunk: k, the chunk of all of its examples, from 1 to C.
        number: the number of this client, from 0.
        hyper: ψ: one or several modules of partnets.hyper inside the model; None if no ψ is learned.
        loss: as for partnets.Trainer.
        hyper_loss: as for partnets.Trainer.
        optimizer: a function of the model that returns a local optimiser of partnets.optim, called for each partition
            in each round. If None, optim.SGD with a learning rate of 0.05, the paper's on MNIST.
        batch_size: the batch size of the local steps.
        epochs: the number of passes over the client's examples, for each partition.
        hyper_batch_size: the number of examples for the gradient of ψ, drawn in each round; all examples if None.
        audit: whether to check, before the first round in this process, that no part of the model carries data of later
            chunks into earlier subnetworks, as partnets.audit does; this takes some passes.
        privacy: hides updates from the server too. An update then has no losses and reports one example.
        forward, collate: as for partnets.Trainer and partnets.chunk.
        seed: an int in [0, 2**63), the same for all clients.

    Attributes:
        vectors: the Vectors that are sent and received.

    Raises:
        TypeError, ValueError: data are not a data set or are empty, the chunk is out of range, hyper is given with only
            one partition, the model has running statistics, the loss is a sum or has parameters, or an argument is out
            of range. In the first round: the audit finds a leak, or ψ affects the loss but not the outputs.

    Example:
        >>> import partnets
        >>> from partnets import hyper
        >>> model = nn.Sequential(mask := hyper.InputMask(4), nn.Linear(4, 3))
        >>> model = partnets.partition(model, (0.7, 0.2, 0.1))
        >>> data = torch.randn(20, 4), torch.randint(3, (20,))
        >>> client = Client(model, data, chunk=2, hyper=mask)
        >>> update = client.train(client.vectors.read(), round=1)
        >>> list(update.values), list(update.gradients), update.examples
        (['w2.float32', 'w3.float32'], ['hyper.float32'], 20)
    """

    def __init__(
        self,
        model: nn.Module,
        data: Dataset[Any] | Sequence[Any],
        chunk: int,
        number: int = 0,
        *,
        hyper: nn.Module | Iterable[nn.Module] | None = None,
        loss: Loss = F.cross_entropy,
        hyper_loss: Loss | None = None,
        optimizer: Callable[[nn.Module], PartitionedOptimizer] | None = None,
        batch_size: int = 64,
        epochs: int = 1,
        hyper_batch_size: int | None = None,
        audit: bool = True,
        privacy: Privacy | None = None,
        forward: Forward = call,
        collate: Collate = default_collate,
        seed: int = 0,
    ) -> None:
        check_at_least(1, batch_size=batch_size, epochs=epochs)
        if hyper_batch_size is not None:
            check_at_least(1, hyper_batch_size=hyper_batch_size)
        check_seed("seed", seed)
        self.model, self.vectors = model, Vectors(model, hyper)
        self.hyper = self.vectors.hyper_modules
        self._check_hyper()
        check_learns(model, loss)
        self.loss, self.hyper_loss = loss, plain(loss) if hyper_loss is None else hyper_loss
        check_loss(self.hyper_loss)
        self.optimizer = partial(optim.SGD, lr=0.05) if optimizer is None else optimizer
        self.batch_size, self.epochs, self.hyper_batch_size = batch_size, epochs, hyper_batch_size
        self.privacy, self.forward, self.collate, self.seed = privacy, forward, collate, seed
        self._still = still_modules(model)
        parameters = {path for path, _ in model.named_parameters(remove_duplicate=False)}
        self._held = Snapshot(model, without=parameters | self.vectors.paths())
        # The checks before the first round, run once for all clients that share the model.
        self._to_try = {"leaks", "judging"} if audit else {"judging"}
        self._take(data, chunk, number)

    def with_data(self, data: Dataset[Any] | Sequence[Any], chunk: int, number: int) -> Client:
        """Return another client that shares this one's model; any number of clients can share it in one process."""
        other = copy.copy(self)
        other._take(data, chunk, number)
        return other

    def _take(self, data: Dataset | Sequence, chunk: int, number: int) -> None:
        self.data = as_dataset(data)
        if not len(self.data):
            raise ValueError(f"client {number} has no examples; leave it out, or give each client at least one.")
        if isinstance(chunk, bool) or not isinstance(chunk, int) or not 1 <= chunk <= self.vectors.num_partitions:
            count = self.vectors.num_partitions
            raise ValueError(
                f"chunk={chunk!r} of client {number}, of a model with C={count}; pass an int in 1..{count}."
            )
        check_at_least(0, number=number)
        self.chunk, self.number = chunk, number

    def _check_hyper(self) -> None:
        if self.hyper and self.vectors.num_partitions == 1:
            raise ValueError(
                "hyper is given, but the model has one partition, which sees all data: no subnetwork can evaluate ψ."
                " Partition the model, or pass hyper=None for federated averaging."
            )

    def train(self, values: Mapping[str, Tensor], round: int) -> Update:
        """Run a round: local steps of w_k..w_C, and the gradient of ψ.

        Args:
            values: all vectors, including those of ψ, as Server.values() returns them.
            round: the number of the round, from 1.

        Raises:
            ValueError: values do not fit the model; nothing has changed.
            RuntimeError: a learned value is not finite, ψ has no gradient, or parameters were frozen or unfrozen.
        """
        check_at_least(1, round=round)
        self.vectors.check_learning()
        self.vectors.check(values, self.vectors.lengths)
        device, drawn = device_of(self.model), derived(self.seed, f"client {self.number} in round {round}")
        with TURN, random_state.preserved(device):
            random_state.seed(drawn)
            if device.type != "cpu":
                torch.get_device_module(device).manual_seed(drawn)
            return self._train(values, round, torch.Generator().manual_seed(drawn))

    def _train(self, values: Mapping[str, Tensor], round: int, generator: torch.Generator) -> Update:
        vectors, (weights, of_hyper) = self.vectors, self.vectors.sent_by(self.chunk)
        vectors.write(values)
        self._begin()
        self._try(round)
        learned: dict[str, Tensor] = {}
        losses: dict[int, float] = {}
        for k in range(self.chunk, vectors.num_partitions + 1):
            own = vectors.of_partition(k)
            if not own:
                continue
            losses[k] = self._learn(k, generator)
            learned |= vectors.read(own)
            vectors.write({name: values[name] for name in own})
        vectors.write(learned)
        examples, hyper_loss, gradients = len(self.data), None, {}
        if of_hyper:
            hyper_loss = self._judge(generator)
            gradients = vectors.read_gradients(of_hyper)
        if self.privacy is not None:
            learned, gradients = self._hidden(learned, gradients, values)
            examples, hyper_loss, losses = 1, None, {}
        try:
            vectors.check(learned, weights)
            vectors.check(gradients, of_hyper)
        except ValueError as error:
            raise RuntimeError(
                f"client {self.number} diverged in round {round}: {error} Remove examples that are not finite, or lower"
                " the learning rate of its optimiser."
            ) from error
        return Update(
            self.number, self.chunk, round, examples, vectors.fingerprint, learned, gradients, hyper_loss, losses
        )

    def _hidden(
        self, learned: Mapping[str, Tensor], gradients: Mapping[str, Tensor], values: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the learned vectors and the gradients with privacy applied; the model keeps the exact ones."""
        changes = {name: vector.double() - values[name].double() for name, vector in learned.items()}
        hidden = self.privacy.noisy(self.privacy.clipped({**changes, **gradients}))
        dtypes = self.vectors.dtypes
        weights = {name: (values[name].double() + hidden[name]).to(dtypes[name]) for name in learned}
        return weights, {name: hidden[name].to(dtypes[name]) for name in gradients}

    def _begin(self) -> None:
        """Reset the model's state other than weights, and set all modules but those in evaluation mode to training."""
        self._held.put_back()
        self.model.train()
        for module in self._still:
            module.eval()

    def _try(self, round: int) -> None:
        """Run the checks of partnets.Trainer before its first step; they change nothing."""
        generator = torch.Generator().manual_seed(0)

        def draw() -> Any:
            size = min(self.batch_size, AUDITED)
            places = torch.randint(len(self.data), (size,), generator=generator, device="cpu")
            (batch,) = batches(self.data, size, places, self.collate)
            return batch

        def compute(batch: Any) -> tuple[Any, Tensor]:
            output, y = self.forward(self.model, batch)
            return output, mean(self.loss, output, y)

        if "leaks" in self._to_try and self.vectors.num_partitions > 1:
            refuse_leaks(self.model, draw, compute)
        self._to_try.discard("leaks")
        if "judging" in self._to_try and self.chunk > 1 and self.hyper:
            value, y = try_judging(self.model, self.hyper, self.chunk, draw, self.hyper_loss, self.forward)
            if round == 1:
                warn_of_knowledge(self.hyper_loss, value, y, self.chunk)
            self._to_try.discard("judging")

    def _learn(self, k: int, generator: torch.Generator) -> float:
        """Train w_k on the client's examples; return the mean loss of all steps."""
        self._begin()
        optimizer, losses = self.optimizer(self.model), []
        for _ in range(self.epochs):
            order = torch.randperm(len(self.data), generator=generator, device="cpu")
            for batch in batches(self.data, self.batch_size, order, self.collate):
                losses.append(step_weights(self.model, optimizer, k, batch, self._loss).item())
        return sum(losses) / len(losses)

    def _judge(self, generator: torch.Generator) -> float:
        """Set ψ's gradient to that of the mean loss through subnetwork k - 1; return the sum of this loss."""
        self._begin()
        self.model.zero_grad()
        chosen = torch.randperm(len(self.data), generator=generator, device="cpu")[: self.hyper_batch_size]
        found, targets = 0.0, 0
        parts = chosen.split(self.batch_size)
        for part, batch in zip(parts, batches(self.data, self.batch_size, chosen, self.collate), strict=True):
            with self._judging(), penalties(), evaluating(*training_only(self.model)):  # penalties regularise only w
                loss, counted = self._summed_loss(batch, len(part))
                if loss.requires_grad:  # otherwise ψ has no effect, which check_reached reports below
                    (loss / len(chosen)).backward()
            found, targets = found + loss.item(), targets + counted
        check_reached(self.model, self.vectors.hyper)
        for parameter in self.vectors.hyper if targets else ():
            parameter.grad *= len(chosen) / targets
        return found * (len(self.data) / len(chosen))

    def _judging(self):
        return hyper_learning(self.model, self.chunk)

    def _summed_loss(self, batch: Any, examples: int) -> tuple[Tensor, int]:
        """Return the sum of the loss that ψ learns from, and its number of targets."""
        return summed(self.hyper_loss, *self._computed(batch), examples)

    def _loss(self, batch: Any) -> Tensor:
        return mean(self.loss, *self._computed(batch))

    def _computed(self, batch: Any) -> tuple[Any, Any]:
        return self.forward(self.model, to_device(batch, device_of(self.model)))
