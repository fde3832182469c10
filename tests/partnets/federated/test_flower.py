"""Training with Flower: the same bits as without it, bytes sent, and strategies that wrap ours."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from clients import (
    CHUNKS,
    PROPORTIONS,
    client,
    load_data,
    make_model,
    make_network,
    make_noisy,
    make_undivided,
    run,
    same,
    server,
    state,
)
from torch import nn

import partnets
from partnets import federated, hyper

pytest.importorskip("flwr", reason="Flower needs Python 3.11")

from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import Strategy
from nodes import app, grid, start

from partnets.federated.flower import LocalGrid, PartitionedFedAvg, client_app
from partnets.federated.flower.messages import read_values, to_record


class Cast(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, x):
        return x.to(self.dtype)


def make_lower():
    """Return a model with one layer in bfloat16 and the others in float32."""
    model, psi = make_model()
    lower = model[1].to(torch.bfloat16)
    return nn.Sequential(psi, Cast(torch.bfloat16), lower, Cast(torch.float32), *model[2:]), psi


@pytest.mark.full
@pytest.mark.parametrize("make, chunks", [(make_noisy, CHUNKS), (make_undivided, (1, 1, 1, 1)), (make_lower, CHUNKS)])
def test_rounds_are_those_of_the_core(make, chunks):
    own = server(make)
    assert {*own.vectors.dtypes.values()} == {torch.float32, *([torch.bfloat16] if make is make_lower else [])}
    run(own, [client(number, chunk, make=make) for number, chunk in enumerate(chunks)], 3)
    strategy = PartitionedFedAvg(server(make))
    result = strategy.start(grid(app(make), chunks=chunks), num_rounds=3)
    assert same(state(own), state(strategy.server))
    # Flower numbers its nodes from 1.
    for mine, found in zip(own.history, strategy.history, strict=True):
        assert replace(mine, norms={number + 1: norm for number, norm in mine.norms.items()}) == found
    assert same(read_values(result.arrays, own.vectors), own.values())
    assert result.train_metrics_clientapp.keys() == {1, 2, 3}
    told, mine = result.train_metrics_clientapp[2], own.history[1]
    assert told.get("lml") == mine.lml and told["contributors-1"] == mine.contributors[1]
    assert told["failed"] == told["refused"] == 0 and told["loss-1"] == mine.losses[1]


@pytest.mark.full
def test_nodes_are_drawn_from_seed_and_round():
    def asked(seed):
        strategy = start(grid(app()), 3, fraction=0.5, seed=seed)
        return [[one.contributors[3], one.examples] for one in strategy.history], strategy.server.values()

    (first, values), (again, same_values), (other, _) = asked(0), asked(0), asked(1)
    assert first == again and same(values, same_values) and first != other
    assert all(number == 2 for number, _ in first)


@pytest.mark.full
@pytest.mark.parametrize("proportions, expected", [((0.7, 0.2, 0.1), 0.77), ((0.9, 0.1), 0.91)])
def test_upload_sizes_relative_to_federated_averaging_match_the_paper(proportions, expected):
    """Check Appendix J.1 for 10 clients, in serialised bytes; the biases of the partitions are a thousandth here."""

    def network():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, 10))

    def whole():
        return partnets.Ensemble([network()]), None

    def divided():
        model = nn.Sequential(augmentation := hyper.Affine(rotation=5.0), nn.Flatten(), *network())
        return partnets.partition(model, proportions, seed=0), augmentation

    def load(number, clients):
        return torch.ones(4, 1, 32, 32), torch.zeros(4, dtype=torch.long)

    def load_flat(number, clients):
        return torch.ones(4, 1024), torch.zeros(4, dtype=torch.long)

    uploaded, downloaded = [], []
    for each in (client_app(whole, load_flat), client_app(divided, load, proportions=proportions)):
        here = LocalGrid(each, 10)
        model, psi = (divided if uploaded else whole)()
        strategy = start(here, 1, federated.Server(model, hyper=psi))
        assert not strategy.history[0].failed and not strategy.history[0].refused
        uploaded.append(here.received)
        downloaded.append(here.sent)
    assert uploaded[1] / uploaded[0] == pytest.approx(expected, abs=0.005)
    assert downloaded[1] / downloaded[0] == pytest.approx(1, abs=0.005)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_arrays_are_vectors_to_the_bit(dtype):
    vectors = federated.Client(partnets.partition(nn.Linear(2, 3).to(dtype), (1.0,)), load_data(0), 1).vectors
    (name,) = vectors.lengths
    vector = torch.randn(9).to(dtype)
    vector[:1] = math.nan
    found = read_values(to_record({name: vector}), vectors)[name]
    assert found.dtype == dtype and torch.equal(found.view(torch.uint8), vector.view(torch.uint8))


def test_a_nodes_client_number_comes_from_its_configuration():
    made = []

    def make():
        made.append(1)
        return make_model()

    strategy = start(LocalGrid(app(make, proportions=(0.5, 0.25, 0.25), seed=4), 4), 2)
    chunks = federated.assign(4, (0.5, 0.25, 0.25), seed=4)
    assert strategy.server.pinned == {number + 1: (number, chunk) for number, chunk in enumerate(chunks)}
    assert len(made) == 1  # for all clients of this process, in all rounds


def other_layers():
    torch.manual_seed(0)
    return partnets.partition(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)), (0.5, 0.3, 0.2), seed=1)


def other_seed():
    _, psi = make_model()
    return partnets.partition(nn.Sequential(psi, *make_network()), PROPORTIONS, seed=1), psi


@pytest.mark.parametrize(
    ("begin", "error", "message"),
    [
        (lambda: start(LocalGrid(app(), 4, node_config=lambda number: {"partition-id": "two"}), 1), RuntimeError,
         "a node has the configuration"),
        (lambda: start(LocalGrid(app(), 4, node_config=lambda number: {"chunk": 9}), 1), RuntimeError,
         r"no node has contributed in 1 rounds.*chunk=9"),
        (lambda: start(grid(app(other_layers)), 1), RuntimeError, r"it has the vectors .* by the same make_model"),
        (lambda: start(grid(app(other_seed)), 1), RuntimeError, r"other modules, partitions, .* the same make_model"),
        (lambda: start(LocalGrid(app(proportions=(0.5, 0.5)), 4), 1), RuntimeError,
         r"proportions=\(0\.5, 0\.5\) are of 2 chunks, but the model has C=3"),
        (lambda: start(LocalGrid(app(), 1), 1), ValueError, r"min_nodes=2, but the grid has 1"),
        (lambda: LocalGrid(app(), 0), ValueError, "clients=0"),
        (lambda: PartitionedFedAvg(server(), checkpoint="none/server.pt"), ValueError, "folder that does not exist"),
        (lambda: PartitionedFedAvg(server(), seed=-1), ValueError, "seed=-1"),
        (lambda: PartitionedFedAvg(server(), fraction=1.5), ValueError, r"fraction=1\.5; pass a share"),
        (lambda: PartitionedFedAvg(server(), min_nodes=0), ValueError, "min_nodes=0"),
        (lambda: PartitionedFedAvg(server()).start(grid(app()), to_record({"w": torch.ones(3)})), ValueError,
         "must have"),
    ],
)  # fmt: skip
def test_invalid_configurations_raise(begin, error, message):
    with pytest.raises(error, match=message):
        begin()


@pytest.mark.full
def test_data_that_are_drawn_at_random_are_the_same_in_all_rounds():
    seen = {}

    def load(number, clients):
        chosen = torch.randperm(20)[:9]
        seen.setdefault(number, []).append(chosen.tolist())
        return tuple(part[chosen] for part in load_data(number))

    own, before = server(), torch.get_rng_state()
    start(grid(app(load=load)), 3, own)
    assert torch.equal(before, torch.get_rng_state())
    assert all(len(each) == 3 and each[0] == each[1] == each[2] for each in seen.values()) and seen[0] != seen[1]


class Doubled(Strategy):
    """A strategy that wraps another, uses Flower's start, and sends changed arrays to the clients."""

    def __init__(self, inner):
        self.inner = inner
        for name in ("summary", "aggregate_train", "configure_evaluate", "aggregate_evaluate"):
            setattr(self, name, getattr(inner, name))

    def configure_train(self, server_round, arrays, config, grid):
        doubled = {name: 2 * vector for name, vector in read_values(arrays, self.inner.server.vectors).items()}
        return self.inner.configure_train(server_round, to_record(doubled), config, grid)

    def summary(self): ...
    def aggregate_train(self, server_round, replies): ...
    def configure_evaluate(self, server_round, arrays, config, grid): ...
    def aggregate_evaluate(self, server_round, replies): ...


@pytest.mark.full
def test_a_wrapping_strategy_sets_the_model_and_resumes_from_a_checkpoint(tmp_path):
    own = server()
    for _ in range(3):
        own.load_values({name: 2 * vector for name, vector in own.values().items()})
        run(own, [client(number) for number in range(4)], 1)
    for rounds in (2, 1):
        inner = PartitionedFedAvg(server(), checkpoint=tmp_path / "server.pt")
        Doubled(inner).start(grid(app()), to_record(inner.server.values()), num_rounds=rounds)
    assert same(state(own), state(inner.server)) and inner.server.rounds == 3


@pytest.mark.full
def test_the_servers_own_evaluation_counts_rounds_on(tmp_path):
    seen = []

    def evaluate(number, arrays):
        seen.append(number)
        return MetricRecord({"number": number})

    for rounds in (2, 5, 5):
        strategy = PartitionedFedAvg(server(), checkpoint=tmp_path / "server.pt")
        result = strategy.start(grid(app()), num_rounds=rounds, evaluate_fn=evaluate)
    assert seen == [0, 1, 2, 2, 3, 4, 5, 5]
    assert [*result.evaluate_metrics_serverapp] == [5]
    assert same(read_values(result.arrays, strategy.server.vectors), strategy.server.values())


@pytest.mark.full
def test_training_starts_from_the_initial_arrays():
    own, other, seen = server(), PartitionedFedAvg(server()), []
    own.load_values({name: vector + 0.1 for name, vector in own.values().items()})
    arrays, first = to_record(own.values()), own.values()
    run(own, [client(number) for number in range(4)], 2)
    other.start(grid(app()), arrays, num_rounds=2, evaluate_fn=lambda *_: seen.append(other.server.values()))
    assert same(state(own), state(other.server)) and same(first, seen[0])


def test_any_app_runs_in_a_local_grid():
    """Run Flower's FedAvg with an app that does not use partnets, and with a mod."""
    from flwr.clientapp import ClientApp
    from flwr.serverapp.strategy import FedAvg

    seen = []

    def mod(message, context, call):
        seen.append(context.node_id)
        return call(message, context)

    plain = ClientApp(mods=[mod])

    @plain.train()
    def train(message, context):
        arrays = ArrayRecord({"x": Array(np.full(3, float(context.run_config["value"])))})
        return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})}), reply_to=message)

    strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=3)
    here = LocalGrid(plain, 3, run_config={"value": 7})
    found = strategy.start(here, ArrayRecord({"x": Array(np.zeros(3))}), num_rounds=2)
    assert found.arrays["x"].numpy().tolist() == pytest.approx([7.0] * 3)
    assert sorted(seen) == [1, 1, 2, 2, 3, 3]
