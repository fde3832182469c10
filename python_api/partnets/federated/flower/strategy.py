"""PartitionedFedAvg: a Flower strategy that runs the rounds of Server and checks every reply."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from logging import INFO, WARNING
from os import PathLike
from pathlib import Path
from statistics import median

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from flwr.serverapp.strategy.strategy_utils import sample_nodes
from torch import Tensor

from partkernels.arguments import check_seed
from partnets.federated.flower.app import ARRAYS, CONFIG, GRADIENT, METRICS
from partnets.federated.flower.arrays import to_record, to_values
from partnets.federated.flower.evaluation import Evaluation
from partnets.federated.flower.local_grid import LocalGrid
from partnets.federated.flower.one_by_one import OneByOne
from partnets.federated.round import Round, shown
from partnets.federated.server import Server
from partnets.federated.update import Update, names_of
from partnets.utils.checks import check_at_least
from partnets.utils.seeds import derived

# The number of successive rounds without contributors after which training stops.
EMPTY = 3


class PartitionedFedAvg(Strategy):
    """Federated averaging of partitions and, with several partitions, of ψ; with one partition, FedAvg.

    In each round, the arrays passed to configure_train are the global model; strategies that wrap this one may change
    them. All checks of a reply precede any change. Nodes that fail, are refused or reply twice affect nothing: the
    result is bit for bit as if they had not been asked. The metrics of a round are the numbers of contributors to each
    partition, of failed and of refused nodes, and the norms of the changes; `history` has the reasons.

    Args:
        server: the federated.Server, with the global model and its optimisers.
        fraction: the fraction of the connected nodes that train in a round.
        min_nodes: the number of nodes that must be connected before a round begins, and the least that train in it.
        evaluate_fraction: the fraction of the nodes that evaluate after a round; 0 disables evaluation.
        checkpoint: a file that is written after each round, and from which `start` resumes; None writes no file.
        seed: an int in [0, 2**63) from which nodes are drawn.

    Attributes:
        history: the server's federated.Round of each round, including those of a loaded checkpoint.

    Raises:
        ValueError: an argument is out of range.

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
        evaluate_fraction: float = 0.0,
        checkpoint: str | PathLike | None = None,
        seed: int = 0,
    ) -> None:
        for name, share in (("fraction", fraction), ("evaluate_fraction", evaluate_fraction)):
            if not 0 <= share <= 1:
                raise ValueError(f"{name}={share}; pass a share of the nodes in [0, 1].")
        check_at_least(1, min_nodes=min_nodes)
        check_seed("seed", seed)
        self.server, self.fraction, self.min_nodes = server, fraction, min_nodes
        self.evaluate_fraction, self.checkpoint, self.seed = evaluate_fraction, checkpoint, seed
        if checkpoint is not None and not Path(checkpoint).parent.is_dir():
            raise ValueError(
                f"checkpoint={str(checkpoint)!r} is in a folder that does not exist; create it, or pass another path."
            )
        self._asked: set[int] = set()
        self._empty = 0  # successive rounds without contributors
        self._resumed = False  # True once this training owns the file: it has resumed from it or begun

    @property
    def history(self) -> list[Round]:
        return self.server.history

    def summary(self) -> None:
        vectors = self.server.vectors
        log(INFO, "\t├──> %d partitions, in all %d numbers", vectors.count, sum(vectors.lengths.values()))
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
        """Run the rounds as Flower's Strategy.start does, resuming from the checkpoint if the file exists.

        A round without contributors is not written to the checkpoint.

        Args:
            initial_arrays: the initial model; the server's model if None. A checkpoint takes precedence.
            num_rounds: the total number of rounds, including those in the checkpoint.
            grid, timeout, train_config, evaluate_config: as for Flower's Strategy.start.
            evaluate_fn: as for Flower's Strategy.start; its first argument is the round's number in the whole training.

        Returns:
            Flower's Result, with the metrics of this call's rounds under their numbers in the whole training.

        Raises:
            RuntimeError: no node contributed in all rounds of this call, or in EMPTY successive rounds; or the model
                diverged.
            ValueError: the arrays or the checkpoint are of another model; a LocalGrid has fewer clients than min_nodes.

        Warns:
            UserWarning: no node has contributed to one of the partitions, or to ψ.
        """
        if isinstance(grid, LocalGrid) and grid.clients < self.min_nodes:
            raise ValueError(
                f"min_nodes={self.min_nodes}, but the grid has {grid.clients}; lower min_nodes, or pass more clients."
            )
        self.server.hyper_values()  # a user-defined class of ψ may raise here, before any round
        if self._has_checkpoint():
            initial_arrays = None
        self.resume()
        if initial_arrays is not None:
            self.server.load_values(self._read(initial_arrays))
        done, self._empty = self.server.rounds, 0
        if done >= num_rounds:
            log(WARNING, "%d rounds are done already, and num_rounds=%d: nothing is left to do", done, num_rounds)
        arrays = to_record(self.server.values())
        evaluate = None if evaluate_fn is None else lambda number, arrays: evaluate_fn(done + number, arrays)
        left = max(num_rounds - done, 0)
        result = super().start(
            OneByOne(grid), arrays, left, timeout, train_config, evaluate_config, evaluate_fn=evaluate
        )
        for metrics in (
            result.train_metrics_clientapp,
            result.evaluate_metrics_clientapp,
            result.evaluate_metrics_serverapp,
        ):
            found = {done + number: each for number, each in metrics.items()}
            metrics.clear()
            metrics.update(found)
        if not result.arrays:
            result.arrays = arrays
        if left:
            self._check_some_learned(left)
        return result

    def resume(self) -> int:
        """Load the checkpoint, if the file exists, as start does; for wrapping strategies, which do not call its start.

        Returns:
            The number of completed rounds.
        """
        if self._has_checkpoint():
            self.server.load(self.checkpoint)
            log(INFO, "Resuming after round %d from %s", self.server.rounds, self.checkpoint)
        self._resumed = True
        return self.server.rounds

    def _has_checkpoint(self) -> bool:
        return self.checkpoint is not None and Path(self.checkpoint).exists()

    def _check_some_learned(self, rounds: int) -> None:
        """Raise if no node contributed in these rounds; warn if a partition or ψ had no contributor."""
        found, vectors = self.history[-rounds:], self.server.vectors
        reasons = [
            f"In round {each.number}, node {node}: {why}"
            for each in reversed(found)
            for node, why in sorted({**each.failed, **each.refused}.items())
        ]
        told = f" {reasons[0]}" if reasons else ""
        if not any(_taken(each) for each in found):
            raise RuntimeError(f"no node has contributed in {rounds} rounds, and nothing was learned.{told}")
        idle = [
            f"w_{k}"
            for k in range(1, vectors.count + 1)
            if vectors.of_partition(k) and not any(each.contributors[k] for each in found)
        ]
        idle += ["ψ"] if vectors.hyper and not any(each.judges for each in found) else []
        if idle:
            warnings.warn(
                f"no node has contributed to {', '.join(idle)} in {rounds} rounds; assign nodes to each chunk: chunk k"
                f" trains w_k and later partitions, and chunks from 2 on give the gradient of ψ.{told}",
                stacklevel=3,
            )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        if not self._resumed and self._has_checkpoint():
            raise RuntimeError(
                f"{self.checkpoint} has a training that would be overwritten: call resume() before the start of a"
                " strategy that wraps this one, and pass it the server's arrays; or choose another file."
            )
        self.server.load_values(self._read(arrays))
        asked = self._sample(grid, self.fraction, "train")
        self._resumed = True
        return self._messages(asked, arrays, config, MessageType.TRAIN, self.server.rounds + 1)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        contents, failed, refused = self._heard(replies)
        updates: dict[int, Update] = {}
        for node, content in contents.items():
            try:
                updates[node] = self._update(content)
            except Exception as error:  # a node's reply may be wrong in any way
                refused[node] = f"{type(error).__name__}: {error}"
        found = self.server.step(updates.values(), updates.keys(), refused=refused, failed=failed)
        for what, why in (("failed", found.failed), ("was refused", found.refused)):
            for node, reason in sorted(why.items()):
                log(WARNING, "\t> node %d %s: %s", node, what, reason)
        for client, times in found.doubled.items():
            log(WARNING, "\t> %d nodes report client number %d, and all count; number each differently", times, client)
        self._empty = 0 if _taken(found) else self._empty + 1
        if self._empty == EMPTY:
            self._check_some_learned(EMPTY)
        if self.checkpoint is not None and not self._empty:
            self.server.save(self.checkpoint)
        return to_record(self.server.values()), self._metrics(found)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        if not self.evaluate_fraction:
            return []
        asked = self._sample(grid, self.evaluate_fraction, "evaluate")
        return self._messages(asked, arrays, config, MessageType.EVALUATE, self.server.rounds)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        if not self._asked:
            return None
        contents, failed, refused = self._heard(replies)
        told: list[Evaluation] = []
        for node, content in contents.items():
            try:
                told.append(Evaluation.of(content))
            except Exception as error:  # a node's reply may be wrong in any way
                refused[node] = f"{type(error).__name__}: {error}"
        for what, why in (("could not evaluate", failed), ("was refused", refused)):
            for node, reason in sorted(why.items()):
                log(WARNING, "\t> node %d %s: %s", node, what, shown(reason))
        uniform = self.server.weighting == "uniform"
        metrics = {"failed": len(failed), "refused": len(refused), **Evaluation.together(told, uniform)}
        return MetricRecord(metrics)

    def _heard(self, replies: Iterable[Message]) -> tuple[dict[int, RecordDict], dict[int, str], dict[int, str]]:
        """Return the contents of valid replies, the reasons of failed nodes, and the reasons of refused nodes."""
        contents: dict[int, RecordDict] = {}
        failed: dict[int, str] = {}
        refused: dict[int, str] = {}
        for reply in replies:
            node = reply.metadata.src_node_id
            if node not in self._asked:
                refused[node] = "it was not asked"
            elif node in contents or node in failed or node in refused:
                refused[node] = "it replied twice"
            elif reply.has_error():
                failed[node] = f"{reply.error.reason} (error {reply.error.code})"
            else:
                contents[node] = reply.content
        heard = contents.keys() | failed.keys() | refused.keys()
        failed |= dict.fromkeys(self._asked - heard, "it did not reply in time")
        self._asked = set()
        return {node: content for node, content in contents.items() if node not in refused}, failed, refused

    def _sample(self, grid: Grid, fraction: float, purpose: str) -> list[int]:
        """Wait until enough nodes are connected, then draw nodes as a function of the round and these nodes."""
        _, nodes = sample_nodes(grid, self.min_nodes, 0)
        number = self.server.rounds + (purpose == "train")
        generator = torch.Generator().manual_seed(derived(self.seed, f"{purpose} in round {number}"))
        chosen = torch.randperm(len(nodes), generator=generator, device="cpu")
        nodes = sorted(nodes)
        count = min(max(round(fraction * len(nodes)), self.min_nodes), len(nodes))
        return [nodes[i] for i in chosen[:count].sort().values.tolist()]

    def _messages(
        self, nodes: Sequence[int], arrays: ArrayRecord, config: ConfigRecord, message_type: str, number: int
    ) -> list[Message]:
        self._asked = set(nodes)
        told = {**config, "server-round": number, "round": number, "fingerprint": self.server.vectors.fingerprint}
        content = RecordDict({ARRAYS: arrays, CONFIG: ConfigRecord(told)})
        return [Message(content, dst_node_id=node, message_type=message_type) for node in nodes]

    def _update(self, content: RecordDict) -> Update:
        """Parse a reply; its content is checked later, by the server.

        Raises:
            Exception: the reply is malformed.
        """
        arrays, metrics, config = content[ARRAYS], content[METRICS], content[CONFIG]
        if len(content) != 3:
            raise ValueError(f"it has the records {sorted(content)}.")
        losses = {int(name.removeprefix("loss-")): metrics[name] for name in metrics if name.startswith("loss-")}
        chunk, vectors = metrics["chunk"], self.server.vectors
        if type(chunk) is not int or not 1 <= chunk <= vectors.count:
            raise ValueError(f"it has chunk {chunk!r}, but there are {vectors.count} chunks.")
        weights, gradients = names_of(vectors, chunk)
        if arrays.keys() != {*weights, *(GRADIENT + name for name in gradients)}:
            raise ValueError(f"it has the vectors {sorted(arrays)}, which are not those of chunk {chunk}.")
        return Update(
            client=metrics["client"],
            chunk=chunk,
            round=metrics["round"],
            examples=metrics["num-examples"],
            fingerprint=config["fingerprint"],
            values=to_values(ArrayRecord({name: arrays[name] for name in weights}), vectors, weights),
            gradients=to_values(ArrayRecord({name: arrays[GRADIENT + name] for name in gradients}), vectors, gradients),
            hyper_loss=metrics.get("hyper-loss"),
            losses=losses,
        )

    def _read(self, arrays: ArrayRecord) -> dict[str, Tensor]:
        """Convert a record to all vectors of the model."""
        return to_values(arrays, self.server.vectors, self.server.vectors.lengths)

    def _metrics(self, found: Round) -> MetricRecord:
        metrics: dict[str, int | float] = {"failed": len(found.failed), "refused": len(found.refused)}
        metrics |= {f"contributors-{k}": number for k, number in found.contributors.items()}
        metrics |= {f"loss-{k}": loss for k, loss in found.losses.items()}
        if found.lml is not None:
            metrics["lml"] = found.lml
        if found.norms:
            metrics |= {"norm-median": median(found.norms.values()), "norm-greatest": max(found.norms.values())}
        return MetricRecord(metrics | self.server.hyper_values())


def _taken(found: Round) -> bool:
    """Return whether a round has a contributor."""
    return any(found.contributors.values())
