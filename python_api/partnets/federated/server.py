"""Server: averages what clients have learned into steps of the global model (Appendix J.1)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike

import torch
from torch import Tensor, nn

from partnets import optim
from partnets.federated.privacy import Privacy
from partnets.federated.update import Update, names_of, norm
from partnets.federated.vectors import Vectors
from partnets.hyper.hyperparameter import find_hyper, values_by_path
from partnets.nn.live import subnetwork
from partnets.optim.base import PartitionedOptimizer, check_partitioned
from partnets.training import validation
from partnets.training.step import parameters_of
from partnets.utils import sealed
from partnets.utils.checks import check_at_least

FORMAT = 1
_EXPECTED = f"state of a federated server, of format {FORMAT}; pass a file that Server.save wrote."
# Beside format, configuration and the hyperparameters' optimiser, which there may be none of.
_NAMES = ("rounds", "pinned", "values", "optimizer", "hyper_optimizer")


@dataclass(frozen=True)
class Round:
    """What became of the updates of a round.

    Attributes:
        number: of the round, from 1.
        contributors: of each partition, how many updates its step is the mean of; 0 where it took none.
        judges: how many updates the step of ψ is the mean of.
        refused: why, for each client whose update was refused.
        lml: L_ML of the contributors' examples through the subnetworks that have not seen them, in nats (Eq. 2): minus
            the sum of their losses; None if there are none.
        examples: how many that is of.
        losses: of each partition that learned, the mean training loss of its contributors.
    """

    number: int
    contributors: Mapping[int, int]
    judges: int = 0
    refused: Mapping[int, str] = field(default_factory=dict)
    lml: float | None = None
    examples: int = 0
    losses: Mapping[int, float] = field(default_factory=dict)


class Server:
    """The global model, its optimisers, and who has which chunk.

    A round: `values` goes to the clients, `step` takes what came back. For each partition the mean of what its
    contributors have changed, with its sign turned, is the gradient of one step of the optimiser (Reddi et al. 2020);
    a partition without contributors keeps its weights and moments. The mean of the clients' gradients is that of ψ. An
    update that does not fit in every respect is refused: the round is, to the bit, that of the other clients.

    Args:
        model: as that of the clients, from the same code.
        hyper: ψ, as the clients have it.
        optimizer: of partnets.optim, of this model; Adam with a learning rate of 1e-3 if None.
        hyper_optimizer: of torch.optim, of ψ; Adam with a learning rate of 3e-3 if None, as in the paper on MNIST.
        weighting: "examples": a client counts in a mean by how many examples it has, as it says itself; "uniform":
            all alike, so that none can say it has millions.
        chunks: of each client, by its number, the chunk that it must have, as assign gives them; what each says first
            if None.
        privacy: bounds what a client changes, and adds noise to the means; with uniform weights, which say nothing.
        max_norm, hyper_max_norm: an update that changes weights by more than this, as a Euclidean norm over all of its
            partitions, or whose gradient of ψ is longer, is refused; None refuses none for that.

    Attributes:
        rounds: how many steps there have been.
        pinned: of each sender that contributed, which client it is and its chunk: others are refused from then on.
        vectors: what travels.

    Raises:
        ValueError: an argument is none of these, an optimiser belongs to another model; and as Vectors.

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
        chunks: Sequence[int] | None = None,
        privacy: Privacy | None = None,
        max_norm: float | None = None,
        hyper_max_norm: float | None = None,
    ) -> None:
        if weighting not in ("examples", "uniform"):
            raise ValueError(f"weighting={weighting!r}; pass 'examples' or 'uniform'.")
        if privacy is not None and weighting != "uniform":
            raise ValueError(
                "privacy with weighting='examples' would show how many examples a client has; pass weighting='uniform'."
            )
        for name, bound in (("max_norm", max_norm), ("hyper_max_norm", hyper_max_norm)):
            if bound is not None and not 0 < bound < math.inf:
                raise ValueError(f"{name}={bound}; pass a finite number above 0, or None.")
        self.model, self.vectors = model, Vectors(model, hyper)
        self.hyper = find_hyper(model, hyper)
        self.optimizer = optim.Adam(model) if optimizer is None else optimizer
        check_partitioned(self.optimizer)
        if self.vectors.hyper and hyper_optimizer is None:
            hyper_optimizer = torch.optim.Adam(self.vectors.hyper, lr=3e-3)
        self.hyper_optimizer = hyper_optimizer
        self._check_optimizers({*self.vectors.hyper})
        self.weighting, self.privacy = weighting, privacy
        self.max_norm, self.hyper_max_norm = max_norm, hyper_max_norm
        self.chunks = None if chunks is None else tuple(chunks)
        if any(type(chunk) is not int or not 1 <= chunk <= self.vectors.count for chunk in self.chunks or ()):
            raise ValueError(
                f"chunks={chunks!r} of a model with C={self.vectors.count}; pass ints in 1..C, as of assign."
            )
        self.rounds, self.pinned = 0, {}

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

    def values(self) -> dict[str, Tensor]:
        """All vectors of the global model, ψ's too: what each client gets."""
        return self.vectors.read()

    def load_values(self, values: Mapping[str, Tensor]) -> None:
        """Makes these the global model's; the optimisers keep their moments.

        Raises:
            ValueError: they do not fit; nothing has changed then.
        """
        self.vectors.check(values, self.vectors.lengths)
        self.vectors.write(values)

    def why_refused(self, update: Update, sender: int) -> str | None:
        """What makes an update unfit for the present round; None if it fits."""
        count, number = self.vectors.count, self.rounds + 1
        integers = {"client": (update.client, 0), "chunk": (update.chunk, 1), "examples": (update.examples, 1)}
        for name, (value, least) in integers.items():
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 53:
                return f"{name}={value!r} is no int of {least} or more"
        if update.chunk > count:
            return f"chunk={update.chunk}, and there are {count}"
        if update.round != number:
            return f"it is of round {update.round!r}, and this is round {number}"
        if update.fingerprint != self.vectors.fingerprint:
            return "its model has other partitions, default values or frozen weights; run the server's code and seeds"
        own = update.client, update.chunk
        if (pinned := self.pinned.get(sender, own)) != own:
            return "it is client {} of chunk {} now and was client {} of chunk {}".format(*own, *pinned)
        if self.chunks is not None and self.chunks[update.client : update.client + 1] != (update.chunk,):
            return "client {} with chunk {} is not among the server's chunks".format(*own)
        weights, gradients = names_of(self.vectors, update.chunk)
        try:
            self.vectors.check(update.values, weights)
            self.vectors.check(update.gradients, gradients)
        except ValueError as error:
            return str(error)
        numbers = [*update.losses.values(), *([] if update.hyper_loss is None else [update.hyper_loss])]
        if not all(isinstance(number, float) and math.isfinite(number) for number in numbers):
            return f"its losses {numbers} are not finite"
        if (update.hyper_loss is not None and not gradients) or not update.losses.keys() <= {*range(1, count + 1)}:
            return "its losses are not those of its chunk"
        sent = self.vectors.read(weights)
        changes = {name: update.values[name].double() - sent[name].double() for name in weights}
        for what, vectors, bound in (
            ("change of the weights", changes, self.max_norm),
            ("gradient of ψ", update.gradients, self.hyper_max_norm),
        ):
            for name, vector in vectors.items():
                # Adam keeps squares: one that overflows would stay, and its entry never move again.
                most = torch.finfo(self.vectors.dtypes[name]).max ** 0.5
                if vector.numel() and not vector.abs().max() < most:
                    return f"its {what} has {vector.abs().max():.3g} in {name}, whose square would overflow"
            if bound is not None and not (length := norm(vectors)) <= bound:
                return f"its {what} has a norm of {length:.3g}, above the bound of {bound}"
        return None

    def step(self, updates: Iterable[Update], senders: Iterable[int] | None = None) -> Round:
        """A round: refuses what does not fit, and steps each partition and ψ by the mean of the rest.

        The order of the updates makes no difference. Who sends several is refused, and so is who says that it is a
        client that another one is, unless it was so first.

        Args:
            updates: of this round.
            senders: who each is from, where that is known by other means: a network's number for the node. What the
                updates say themselves if None.
        """
        updates, number = list(updates), self.rounds + 1
        senders = [update.client for update in updates] if senders is None else list(senders)
        refused = {
            sender: why
            for sender, update in zip(senders, updates, strict=True)
            if (why := self.why_refused(update, sender)) is not None
        }
        refused |= {one: "it sent several updates in one round" for one, times in Counter(senders).items() if times > 1}
        refused |= self._claimed_twice(
            {sender: one.client for sender, one in zip(senders, updates, strict=True) if sender not in refused}
        )
        accepted = {sender: update for sender, update in zip(senders, updates, strict=True) if sender not in refused}
        self.pinned |= {sender: (update.client, update.chunk) for sender, update in accepted.items()}
        # In an order of their own, which rounding goes by; senders' numbers may be other ones in each run.
        accepted = [accepted[one] for one in sorted(accepted, key=lambda one: (accepted[one].client, one))]
        sent = self.values()
        contributors = {}
        for k in range(1, self.vectors.count + 1):
            names = self.vectors.of_partition(k)
            given = [update for update in accepted if update.chunk <= k]
            contributors[k] = len(given) if names else 0
            if contributors[k]:
                changes = ({name: sent[name].double() - one.values[name] for name in names} for one in given)
                self._step_partition(k, self._mean(given, changes))
        judges = [update for update in accepted if update.gradients]
        if judges:
            self.hyper_optimizer.zero_grad()
            self.vectors.write_gradients(self._mean(judges, (update.gradients for update in judges)))
            self.hyper_optimizer.step()
        self.rounds = number
        unseen = [update for update in judges if update.chunk > 1 and update.hyper_loss is not None]
        lml = -math.fsum(update.examples * update.hyper_loss for update in unseen) if unseen else None
        examples = sum(update.examples for update in unseen)
        return Round(number, contributors, len(judges), refused, lml, examples, _mean_losses(accepted))

    def _claimed_twice(self, clients: Mapping[int, int]) -> dict[int, str]:
        """Why, for each sender who says that it is a client that another one is; whose it was first, keeps it."""
        refused = {}
        for client, times in Counter(clients.values()).items():
            if times > 1:
                claiming = [sender for sender in clients if clients[sender] == client]
                known = [sender for sender in self.pinned if sender in claiming][:1]
                why = f"{times} senders say that they are client {client}; give each node a number of its own"
                refused |= {sender: why for sender in claiming if sender not in known}
        return refused

    def _step_partition(self, k: int, gradient: Mapping[str, Tensor]) -> None:
        self.optimizer.zero_grad()
        with subnetwork(self.model, active=k, update=k):  # which lets the optimiser know that the partition learns
            self.vectors.write_gradients(gradient)
        self.optimizer.step(update=k)
        self.optimizer.zero_grad()

    def _mean(self, updates: Sequence[Update], vectors: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The weighted mean of each vector over updates, added up in double precision; with noise if there is any."""
        weights = [float(update.examples) if self.weighting == "examples" else 1.0 for update in updates]
        total = math.fsum(weights)
        found: dict[str, Tensor] = {}
        for weight, each in zip(weights, vectors, strict=True):
            each = each if self.privacy is None else self.privacy.shortened(each)
            for name, vector in each.items():
                part = vector.double() * (weight / total)
                found[name] = found[name] + part if name in found else part
        if self.privacy is not None:
            found = self.privacy.noisy(found, 1 / len(updates))
        return {name: vector.to(self.vectors.dtypes[name]) for name, vector in found.items()}

    def hyper_values(self) -> dict[str, float]:
        """The present ψ in its units, under the names that History has."""
        return values_by_path(self.hyper)

    def save(self, path: str | PathLike) -> None:
        """Writes all that decides further rounds to a file; as a whole or not at all."""
        sealed.save({"format": FORMAT, "configuration": self._configuration(), **self._state()}, path)

    def load(self, path: str | PathLike) -> None:
        """Goes on where a server was that wrote a file, with the same bits; runs no code from it.

        Raises:
            ValueError: it is no such file, or of a server with another model, ψ or optimisers; nothing has changed
                then.
            OSError: it is not there, or cannot be read.
        """
        saved = sealed.load(path, _EXPECTED)
        own = self._configuration()
        if saved.get("format") != FORMAT or {*_NAMES} - saved.keys() or "configuration" not in saved:
            raise ValueError(f"{path} is no {_EXPECTED}")
        if different := [name for name, value in own.items() if saved["configuration"].get(name) != value]:
            raise ValueError(
                f"{path} was saved by a server with another {', '.join(different)}; construct this one as that one was."
            )
        try:
            check_at_least(0, rounds=saved["rounds"])
            for sender, (client, chunk) in saved["pinned"].items():
                check_at_least(0, sender=sender, client=client)
                check_at_least(1, chunk=chunk)
            self.vectors.check(saved["values"], self.vectors.lengths)
            validation.check(self, {name: saved[name] for name in ("optimizer", "hyper_optimizer")}, 0)
        except Exception as error:  # what is damaged may fail anywhere
            raise ValueError(f"{path} is damaged, or of another program, and nothing has changed. {error}") from error
        self.vectors.write(saved["values"])
        self.optimizer.load_state_dict(saved["optimizer"])
        if self.hyper_optimizer is not None:
            self.hyper_optimizer.load_state_dict(saved["hyper_optimizer"])
        self.rounds, self.pinned = saved["rounds"], saved["pinned"]

    def _configuration(self) -> dict:
        return {
            "fingerprint": self.vectors.fingerprint,
            "hyper": list(self.hyper),
            "optimizer": self.optimizer.kind,
            "hyper_optimizer": type(self.hyper_optimizer).__name__,
            "weighting": self.weighting,
        }

    def _state(self) -> dict:
        return {
            "rounds": self.rounds,
            "pinned": self.pinned,
            "values": self.values(),
            "optimizer": self.optimizer.state_dict(),
            "hyper_optimizer": None if self.hyper_optimizer is None else self.hyper_optimizer.state_dict(),
        }


def _mean_losses(updates: Sequence[Update]) -> dict[int, float]:
    """Of each partition the mean training loss of those who said one, by examples."""
    found: dict[int, float] = {}
    for k in sorted({k for update in updates for k in update.losses}):
        told = [(update.examples, update.losses[k]) for update in updates if k in update.losses]
        found[k] = math.fsum(examples * loss for examples, loss in told) / sum(examples for examples, _ in told)
    return found
