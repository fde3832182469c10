"""Server: averages the clients' updates into steps of the global model (Appendix J.1)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from partnets import optim
from partnets.evaluation.snapshot import same
from partnets.federated.privacy import Privacy
from partnets.federated.round import Round, Update, shown
from partnets.federated.vectors import Vectors, norm
from partnets.hyper.hyperparameter import values_by_path
from partnets.optim.base import PartitionedOptimizer, check_partitioned
from partnets.training.checkpoint import settings_of, warn_of_others
from partnets.training.step import parameters_of
from partnets.utils import sealed

EXPECTED = "file of a federated server; pass a file that Server.save wrote."
# The entries of a file besides the format and the configuration.
ENTRIES = {"rounds", "pinned", "history", "values", "optimizer", "hyper_optimizer"}
# An upper bound of reported losses, so that no sum of them overflows.
GREATEST_LOSS = 1e100


class Server:
    """The global model, its optimisers, and the assignment of clients to chunks.

    In a round, send `values` to the clients and pass their replies to `step`. For each partition, minus the mean change
    of its contributors is the gradient of one optimiser step (Reddi et al. 2020); a partition without contributors
    keeps its weights and moments. The gradient of ψ is the mean of the clients' gradients. An update that fails any
    check is refused, and the round equals, bit for bit, that of the other clients.

    Clients must not share the server's model, even in the same process: construct theirs by the same code.

    Args:
        model: a model constructed by the clients' code.
        hyper: ψ, as for the clients.
        optimizer: an optimiser of partnets.optim of this model; Adam with a learning rate of 1e-3 if None.
        hyper_optimizer: an optimiser of torch.optim of ψ; Adam with a learning rate of 3e-3 if None, as in the paper on
            MNIST.
        weighting: "examples" weights clients in a mean by the number of examples that they report; "uniform" weights
            all clients equally, so that no client can claim millions of examples.
        privacy: bounds each client's change and adds noise to the means; requires weighting="uniform".
        max_norm, hyper_max_norm: the largest Euclidean norms of an update's change of the weights, over all of its
            partitions, and of its gradient of ψ; updates above are refused. None sets no bound.

    Attributes:
        rounds: the number of completed rounds.
        history: the Round of each.
        pinned: the client number and chunk of each sender that has contributed. Updates of a sender with another number
            or chunk are refused, and those of a client number with another chunk.
        vectors: the Vectors that are sent and received.

    Raises:
        ValueError: an argument is out of range, an optimiser belongs to another model, or Adam would train float16, in
            which squares underflow; and as for Vectors.

    Example:
        >>> import partnets
        >>> from partnets.federated import Client
        >>> model = partnets.partition(nn.Linear(4, 3), (0.6, 0.4), seed=0)
        >>> server = Server(model)
        >>> client = Client(partnets.partition(nn.Linear(4, 3), (0.6, 0.4), seed=0), (torch.ones(5, 4),
        ...     torch.tensor([0, 1, 2, 2, 2])), chunk=2)
        >>> server.step([client.train(server.values(), round=1)]).contributors
        {1: 0, 2: 1}
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        hyper: nn.Module | Iterable[nn.Module] | None = None,
        optimizer: PartitionedOptimizer | None = None,
        hyper_optimizer: torch.optim.Optimizer | None = None,
        weighting: str = "examples",
        privacy: Privacy | None = None,
        max_norm: float | None = None,
        hyper_max_norm: float | None = None,
    ) -> None:
        if weighting not in ("examples", "uniform"):
            raise ValueError(f"weighting={weighting!r}; pass 'examples' or 'uniform'.")
        if privacy is not None and weighting != "uniform":
            raise ValueError(
                "privacy with weighting='examples' would reveal clients' numbers of examples; pass weighting='uniform'."
            )
        for name, bound in (("max_norm", max_norm), ("hyper_max_norm", hyper_max_norm)):
            if bound is not None and not 0 < bound < math.inf:
                raise ValueError(f"{name}={bound}; pass a finite number above 0, or None.")
        self.model, self.vectors = model, Vectors(model, hyper)
        self.hyper = self.vectors.hyper_modules
        self.optimizer = optim.Adam(model) if optimizer is None else optimizer
        check_partitioned(self.optimizer)
        if self.vectors.hyper and hyper_optimizer is None:
            hyper_optimizer = torch.optim.Adam(self.vectors.hyper, lr=3e-3)
        self.hyper_optimizer = hyper_optimizer
        self._check_optimizers({*self.vectors.hyper})
        self.weighting, self.privacy = weighting, privacy
        self.max_norm, self.hyper_max_norm = max_norm, hyper_max_norm
        self.rounds = 0
        self.pinned: dict[int, tuple[int, int]] = {}
        self.history: list[Round] = []
        self._sent: dict[str, Tensor] | None = None  # the result of the last values(), until the step

    def _check_optimizers(self, psi: set[nn.Parameter]) -> None:
        own = {parameter for parameter in self.model.parameters() if parameter.requires_grad} - psi
        learned = set(self.optimizer.parameters())
        if learned - own or {*self.vectors.owners} - learned:
            raise ValueError("optimizer has other parameters than the model; construct it with the server's model.")
        if set(parameters_of(self.hyper_optimizer) if self.hyper_optimizer else ()) != psi:
            raise ValueError(
                "hyper_optimizer has other parameters than hyper; construct it with hyper.parameters(), or leave both"
                " out."
            )
        if torch.float16 in self.vectors.dtypes.values() and not isinstance(self.optimizer, optim.SGD):
            raise ValueError(
                "parameters are float16, in which Adam's squared gradients underflow; convert them to float32 or"
                " bfloat16, or pass optimizer=partnets.optim.SGD(model, lr=1.0)."
            )

    def values(self) -> dict[str, Tensor]:
        """Return all vectors of the global model, including those of ψ, to be sent to each client in this round."""
        self.vectors.check_learning()
        self._sent = self.vectors.read()
        return {name: vector.clone() for name, vector in self._sent.items()}

    def load_values(self, values: Mapping[str, Tensor]) -> None:
        """Set the global model's vectors to these; the optimisers keep their moments.

        Raises:
            ValueError: they do not fit the model; nothing has changed.
        """
        self.vectors.check(values, self.vectors.lengths)
        self.vectors.write(values)
        self._sent = self.vectors.read()

    def _own_values(self) -> dict[str, Tensor]:
        """Return the model's vectors after checking that they have not changed since the round began.

        Raises:
            RuntimeError: they have changed, such as by clients that share the server's model; they are restored.
        """
        present = self.vectors.read()
        if self._sent is None or all(map(same, present.values(), self._sent.values())):
            return present
        self.vectors.write(self._sent)
        raise RuntimeError(
            "the server's model has changed since the round began: a client computes with the same module, or other"
            " code has modified it. Construct the clients' models separately, at each call of make_model; set values by"
            " load_values."
        )

    def why_refused(self, update: Update, sender: int) -> str | None:
        """Return the reason to refuse an update in the present round, or None if it fits."""
        try:
            self._check(update, sender)
        except ValueError as error:
            return str(error)
        return None

    def _check(self, update: Update, sender: int) -> None:
        """Raise ValueError unless an update fits the present round."""
        count, number = self.vectors.num_partitions, self.rounds + 1
        integers = {"client": (update.client, 0), "chunk": (update.chunk, 1), "examples": (update.examples, 1)}
        for name, (value, least) in integers.items():
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 53:
                raise ValueError(f"{name}={value!r} is not an int of {least} or more")
        if update.chunk > count:
            raise ValueError(f"chunk={update.chunk}, but there are {count} chunks")
        if update.round != number:
            raise ValueError(f"it is of round {update.round!r}, but this is round {number}")
        if update.fingerprint != self.vectors.fingerprint:
            raise ValueError(
                "its model has other modules, partitions, default values or frozen weights: use the same code and seeds"
            )
        own = update.client, update.chunk
        if (pinned := self.pinned.get(sender, own)) != own:
            raise ValueError("it is client {} of chunk {} now but was client {} of chunk {}".format(*own, *pinned))
        if any(client == update.client and chunk != update.chunk for client, chunk in self.pinned.values()):
            raise ValueError(f"client {update.client} is of chunk {update.chunk} now but was of another chunk")
        weights, gradients = self.vectors.sent_by(update.chunk)
        self.vectors.check(update.values, weights)
        self.vectors.check(update.gradients, gradients)
        reported = [*update.losses.values(), *([] if update.hyper_loss is None else [update.hyper_loss])]
        if not all(isinstance(loss, float) and abs(loss) < GREATEST_LOSS for loss in reported):
            raise ValueError(f"its losses {reported} are not finite numbers")
        own_losses = {*range(update.chunk, count + 1)}
        if (update.hyper_loss is not None and not gradients) or not update.losses.keys() <= own_losses:
            raise ValueError("its losses are not those of its chunk")
        self._check_size("change of the weights", self._changes(update), self.max_norm)
        self._check_size("gradient of ψ", update.gradients, self.hyper_max_norm)

    def _check_size(self, what: str, vectors: Mapping[str, Tensor], bound: float | None) -> None:
        """Raise ValueError if a number's square overflows, which would stay in Adam's moments, or by the bound."""
        for name, vector in vectors.items():
            most = torch.finfo(self.vectors.dtypes[name]).max ** 0.5
            if vector.numel() and not vector.abs().max() < most:
                raise ValueError(f"its {what} has {vector.abs().max():.3g} in {name}, whose square would overflow")
        if bound is not None and not (length := norm(vectors)) <= bound:
            raise ValueError(f"its {what} has a norm of {length:.3g}, above the bound of {bound}")

    def _changes(self, update: Update) -> dict[str, Tensor]:
        """Return the change of the weights by a valid update, in double precision."""
        sent = self._sent or self.vectors.read()
        return {name: vector.double() - sent[name].double() for name, vector in update.values.items()}

    def step(
        self,
        updates: Iterable[Update],
        senders: Iterable[int] | None = None,
        *,
        refused: Mapping[int, str] | None = None,
        failed: Mapping[int, str] | None = None,
    ) -> Round:
        """Complete a round: refuse invalid updates, and step each partition and ψ by the mean of the others.

        The order of the updates does not matter. A sender of several updates is refused.

        Args:
            updates: the updates of this round.
            senders: the sender of each update if known independently, such as a network's node number. If None, the
                client numbers that the updates report.
            refused, failed: reasons for senders without an update, to be recorded.

        Raises:
            RuntimeError: the model has changed since `values`, or has diverged and is not finite.
        """
        updates, number = list(updates), self.rounds + 1  # a generator computes its updates here
        sent = self._own_values()
        senders = [update.client for update in updates] if senders is None else list(senders)
        refused, times = dict(refused or {}), Counter(senders)
        for sender, update in zip(senders, updates, strict=True):
            why = "it sent several updates in one round" if times[sender] > 1 else self.why_refused(update, sender)
            if why is not None:
                refused[sender] = why
        accepted = {sender: update for sender, update in zip(senders, updates, strict=True) if sender not in refused}
        several = Counter(client for client, _ in {(update.client, update.chunk) for update in accepted.values()})
        for sender, update in list(accepted.items()):
            if several[update.client] > 1:
                refused[sender] = f"client {update.client} is of several chunks in this round"
                del accepted[sender]
        norms = {sender: norm(self._changes(update)) for sender, update in accepted.items()}
        self.pinned |= {sender: (update.client, update.chunk) for sender, update in accepted.items()}
        # A fixed order, on which rounding depends: senders' numbers may differ between runs.
        accepted = [accepted[one] for one in sorted(accepted, key=lambda one: (accepted[one].client, one))]
        contributors = {}
        for k in range(1, self.vectors.num_partitions + 1):
            names = self.vectors.of_partition(k)
            given = [update for update in accepted if update.chunk <= k]
            contributors[k] = len(given) if names else 0
            if contributors[k]:
                changes = ({name: sent[name].double() - one.values[name] for name in names} for one in given)
                self.optimizer.zero_grad()
                self.vectors.write_gradients(self._mean(given, changes))
                self.optimizer.step(update=k)
                self.optimizer.zero_grad()
        judges = [update for update in accepted if update.gradients]
        if judges:
            self.hyper_optimizer.zero_grad()
            self.vectors.write_gradients(self._mean(judges, (update.gradients for update in judges)))
            self.hyper_optimizer.step()
        try:
            self.vectors.check(self.values(), self.vectors.lengths)
        except ValueError as error:
            raise RuntimeError(
                f"the global model diverged in round {number}: {error} Lower the learning rate of the server's"
                " optimisers, and resume from an earlier checkpoint."
            ) from error
        self.rounds = number
        unseen = [update for update in judges if update.chunk > 1 and update.hyper_loss is not None]
        lml = -math.fsum(update.hyper_loss for update in unseen) if unseen else None
        examples = sum(update.examples for update in unseen)
        self.history.append(
            Round(
                number,
                contributors,
                len(judges),
                {sender: shown(why) for sender, why in refused.items()},
                {sender: shown(why) for sender, why in (failed or {}).items()},
                norms,
                lml,
                examples,
                _mean_losses(accepted),
            )
        )
        return self.history[-1]

    def _mean(self, updates: Sequence[Update], vectors: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return each vector's weighted mean over updates, summed in double precision; with privacy, add noise."""
        weights = [float(update.examples) if self.weighting == "examples" else 1.0 for update in updates]
        total = math.fsum(weights)
        found: dict[str, Tensor] = {}
        for weight, each in zip(weights, vectors, strict=True):
            each = each if self.privacy is None else self.privacy.clipped(each)
            for name, vector in each.items():
                part = vector.double() * (weight / total)
                found[name] = found[name] + part if name in found else part
        if self.privacy is not None:
            found = self.privacy.noisy(found, 1 / len(updates))
        return {name: vector.to(self.vectors.dtypes[name]) for name, vector in found.items()}

    def hyper_values(self) -> dict[str, float]:
        """Return the current values of ψ in their units, under the names that History uses."""
        return values_by_path(self.hyper)

    def save(self, path: str | PathLike[str]) -> None:
        """Write all state that determines further rounds to a file, atomically."""
        state = {
            "rounds": self.rounds,
            "pinned": self.pinned,
            "history": [asdict(each) for each in self.history],
            "values": self.vectors.read(),
            "optimizer": self.optimizer.state_dict(),
            "hyper_optimizer": None if self.hyper_optimizer is None else self.hyper_optimizer.state_dict(),
        }
        sealed.save({"configuration": self._configuration(), **state}, path)

    def load(self, path: str | PathLike[str]) -> None:
        """Resume from a file that `save` wrote, with the same bits; no code from the file is run.

        The optimisers' settings are loaded too.

        Warns:
            UserWarning: the file's settings, such as the learning rate, differ from those of this server.

        Raises:
            ValueError: the file is invalid, or of a server with another model, ψ or optimisers; nothing has changed.
            OSError: the file does not exist or cannot be read.
        """
        saved = sealed.load(path, EXPECTED)
        if ENTRIES - saved.keys() or not isinstance(saved.get("configuration"), dict):
            raise ValueError(f"{path} is not a {EXPECTED}")
        theirs = saved["configuration"]
        if different := [name for name, value in self._configuration().items() if theirs.get(name) != value]:
            raise ValueError(
                f"{path} was saved by a server with another {', '.join(different)}; construct this server with the"
                " same."
            )
        self.optimizer.check_state_dict(saved["optimizer"])
        optimizers = {"optimizer": self.optimizer, "hyper_optimizer": self.hyper_optimizer}
        before = settings_of(optimizers)
        if self.hyper_optimizer is not None:  # first, as it raises if its groups differ
            self.hyper_optimizer.load_state_dict(saved["hyper_optimizer"])
        self.load_values(saved["values"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.rounds, self.pinned = saved["rounds"], saved["pinned"]
        self.history = [Round(**each) for each in saved["history"]]
        warn_of_others(before, settings_of(optimizers), path, stacklevel=2)

    def _configuration(self) -> dict[str, Any]:
        return {
            "fingerprint": self.vectors.fingerprint,
            "hyper": list(self.hyper),
            "optimizer": self.optimizer.kind,
            "hyper_optimizer": type(self.hyper_optimizer).__name__,
            "weighting": self.weighting,
            "privacy": None if self.privacy is None else asdict(self.privacy),
        }


def _mean_losses(updates: Sequence[Update]) -> dict[int, float]:
    """Return each partition's mean training loss over the updates that report one, weighted by examples."""
    found: dict[int, float] = {}
    for k in sorted({k for update in updates for k in update.losses}):
        told = [(update.examples, update.losses[k]) for update in updates if k in update.losses]
        found[k] = math.fsum(examples * loss for examples, loss in told) / sum(examples for examples, _ in told)
    return found
