"""PartitionedFedAvg: a Flower strategy that runs the rounds of Server and checks every reply."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from logging import INFO, WARNING
from os import PathLike
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from flwr.serverapp.strategy.strategy_utils import sample_nodes

from partkernels.arguments import check_seed
from partnets.federated.flower.local_grid import LocalGrid
from partnets.federated.flower.messages import ARRAYS, CONFIG, read_update, read_values, to_record
from partnets.federated.flower.one_by_one import OneByOne
from partnets.federated.round import Round, Update
from partnets.federated.server import Server
from partnets.utils.checks import check_at_least
from partnets.utils.seeds import derived

# The number of successive rounds without contributors after which training stops.
EMPTY = 3


class PartitionedFedAvg(Strategy):
    """Federated averaging of partitions and, with several partitions, of ψ; with one partition, FedAvg.

    In each round, the arrays passed to configure_train are the global model; strategies that wrap this one may change
    them. All checks of a reply precede any change. Nodes that fail, are refused or reply twice affect nothing: the
    result is bit for bit as if they had not been asked. The metrics of a round are the numbers of contributors to each
    partition, of failed and of refused nodes, L_ML, the losses and ψ; `history` has the reasons.

    Clients are not asked to evaluate: L_ML is a loss on data that the subnetwork has not seen. Pass evaluate_fn to
    start for an evaluation on the server.

    Args:
        server: the federated.Server, with the global model and its optimisers.
        fraction: the fraction of the connected nodes that train in a round.
        min_nodes: the number of nodes that must be connected before a round begins, and the least that train in it.
        checkpoint: a file that is written after each round with contributors, and loaded here if it exists; None writes
            no file.
        seed: an int in [0, 2**63) from which nodes are drawn.

    Attributes:
        history: the server's federated.Round of each round, including those of a loaded checkpoint.

    Raises:
        ValueError: an argument is out of range; and as for Server.load.

    Example:
        >>> import torch, partnets
        >>> from partnets import federated
        >>> from partnets.federated.flower import LocalGrid, client_app
        >>> def make_model():
        ...     return partnets.partition(torch.nn.Linear(4, 3), (0.5, 0.5), seed=0)
        >>> def load_data(number, clients):
        ...     return torch.ones(5, 4), torch.full((5,), number % 3)
        >>> grid = LocalGrid(client_app(make_model, load_data, proportions=(0.5, 0.5)), clients=4)
        >>> strategy = PartitionedFedAvg(federated.Server(make_model()))
        >>> result = strategy.start(grid, num_rounds=2)
        >>> [each.contributors for each in strategy.history]
        [{1: 2, 2: 4}, {1: 2, 2: 4}]
    """

    def __init__(
        self,
        server: Server,
        *,
        fraction: float = 1.0,
        min_nodes: int = 2,
        checkpoint: str | PathLike[str] | None = None,
        seed: int = 0,
    ) -> None:
        if not 0 <= fraction <= 1:
            raise ValueError(f"fraction={fraction}; pass a share of the nodes in [0, 1].")
        check_at_least(1, min_nodes=min_nodes)
        check_seed("seed", seed)
        self.server, self.fraction, self.min_nodes = server, fraction, min_nodes
        self.checkpoint, self.seed = None if checkpoint is None else Path(checkpoint), seed
        self._asked: set[int] = set()
        self._empty = 0  # successive rounds without contributors
        if self._has_checkpoint():
            server.load(self.checkpoint)
            log(INFO, "Resuming after round %d from %s", server.rounds, checkpoint)
        elif self.checkpoint is not None and not self.checkpoint.parent.is_dir():
            raise ValueError(
                f"checkpoint={str(checkpoint)!r} is in a folder that does not exist; create it, or pass another path."
            )

    @property
    def history(self) -> list[Round]:
        return self.server.history

    def summary(self) -> None:
        vectors = self.server.vectors
        log(INFO, "\t├──> %d partitions, in all %d numbers", vectors.num_partitions, sum(vectors.lengths.values()))
        log(INFO, "\t└──> %g of the nodes train in a round, at least %d", self.fraction, self.min_nodes)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run the rounds as Flower's Strategy.start does, after those of the checkpoint.

        Args:
            initial_arrays: the initial model; the server's model if None. A checkpoint takes precedence.
            num_rounds: the total number of rounds, including those in the checkpoint.
            grid, timeout, train_config: as for Flower's Strategy.start.
            evaluate_config: not used.
            evaluate_fn: as for Flower's Strategy.start; its first argument is the round's number in the whole training.

        Returns:
            Flower's Result, with the metrics of this call's rounds under their numbers in the whole training.

        Raises:
            RuntimeError: no node contributed in all rounds of this call, or in EMPTY successive rounds; or the model
                diverged.
            ValueError: the arrays are of another model; a LocalGrid has fewer clients than min_nodes.
        """
        if isinstance(grid, LocalGrid) and grid.clients < self.min_nodes:
            raise ValueError(
                f"min_nodes={self.min_nodes}, but the grid has {grid.clients}; lower min_nodes, or pass more clients."
            )
        self.server.hyper_values()  # a user-defined class of ψ may raise here, before any round
        if initial_arrays is not None and not self._has_checkpoint():
            self.server.load_values(read_values(initial_arrays, self.server.vectors))
        done, self._empty = self.server.rounds, 0
        left, arrays = max(num_rounds - done, 0), to_record(self.server.values())
        if not left:
            log(WARNING, "%d rounds are done already, and num_rounds=%d: nothing is left to do", done, num_rounds)
        evaluate = None if evaluate_fn is None else lambda number, arrays: evaluate_fn(done + number, arrays)
        result = super().start(OneByOne(grid), arrays, left, timeout, train_config, evaluate_fn=evaluate)
        for metrics in (result.train_metrics_clientapp, result.evaluate_metrics_serverapp):
            found = {done + number: each for number, each in metrics.items()}
            metrics.clear()
            metrics.update(found)
        if not result.arrays:
            result.arrays = arrays
        if left:
            self._check_some_learned(left)
        return result

    def _has_checkpoint(self) -> bool:
        return self.checkpoint is not None and self.checkpoint.exists()

    def _check_some_learned(self, rounds: int) -> None:
        """Raise if no node contributed in these rounds."""
        found = self.history[-rounds:]
        if any(map(_has_contributors, found)):
            return
        reasons = [
            f" In round {each.number}, node {node}: {why}"
            for each in reversed(found)
            for node, why in sorted({**each.failed, **each.refused}.items())
        ]
        first = reasons[0] if reasons else ""
        raise RuntimeError(f"no node has contributed in {rounds} rounds, and nothing was learned.{first}")

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self.server.load_values(read_values(arrays, self.server.vectors))
        number = self.server.rounds + 1
        nodes = self._sample(grid, number)
        self._asked = set(nodes)
        told = {**config, "server-round": number, "round": number, "fingerprint": self.server.vectors.fingerprint}
        content = RecordDict({ARRAYS: arrays, CONFIG: ConfigRecord(told)})
        return [Message(content, dst_node_id=node, message_type=MessageType.TRAIN) for node in nodes]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        contents, failed, refused = self._heard(replies)
        updates: dict[int, Update] = {}
        for node, content in contents.items():
            try:
                updates[node] = read_update(content, self.server.vectors)
            except Exception as error:  # a node's reply may be wrong in any way
                refused[node] = f"{type(error).__name__}: {error}"
        found = self.server.step(updates.values(), updates.keys(), refused=refused, failed=failed)
        for what, why in (("failed", found.failed), ("was refused", found.refused)):
            for node, reason in sorted(why.items()):
                log(WARNING, "\t> node %d %s: %s", node, what, reason)
        self._empty = 0 if _has_contributors(found) else self._empty + 1
        if self._empty == EMPTY:
            self._check_some_learned(EMPTY)
        if self.checkpoint is not None and not self._empty:
            self.server.save(self.checkpoint)
        return to_record(self.server.values()), self._metrics(found)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        return None

    def _heard(self, replies: Iterable[Message]) -> tuple[dict[int, RecordDict], dict[int, str], dict[int, str]]:
        """Return the contents of valid replies, the reasons of failed nodes, and the reasons of refused nodes."""
        heard: dict[int, list[Message]] = defaultdict(list)
        for reply in replies:
            heard[reply.metadata.src_node_id].append(reply)
        contents, refused = {}, dict.fromkeys(heard.keys() - self._asked, "it was not asked")
        failed = dict.fromkeys(self._asked - heard.keys(), "it did not reply in time")
        for node in heard.keys() & self._asked:
            first, *more = heard[node]
            if more:
                refused[node] = "it replied twice"
            if first.has_error():
                failed[node] = f"{first.error.reason} (error {first.error.code})"
            elif not more:
                contents[node] = first.content
        self._asked = set()
        return contents, failed, refused

    def _sample(self, grid: Grid, number: int) -> list[int]:
        """Wait until enough nodes are connected, then draw nodes as a function of the round and these nodes."""
        _, nodes = sample_nodes(grid, self.min_nodes, 0)
        generator = torch.Generator().manual_seed(derived(self.seed, f"train in round {number}"))
        chosen = torch.randperm(len(nodes), generator=generator, device="cpu")
        nodes = sorted(nodes)
        count = min(max(round(self.fraction * len(nodes)), self.min_nodes), len(nodes))
        return [nodes[i] for i in chosen[:count].sort().values.tolist()]

    def _metrics(self, found: Round) -> MetricRecord:
        metrics: dict[str, int | float] = {"failed": len(found.failed), "refused": len(found.refused)}
        metrics |= {f"contributors-{k}": number for k, number in found.contributors.items()}
        metrics |= {f"loss-{k}": loss for k, loss in found.losses.items()}
        if found.lml is not None:
            metrics["lml"] = found.lml
        return MetricRecord(metrics | self.server.hyper_values())


def _has_contributors(found: Round) -> bool:
    return any(found.contributors.values())
