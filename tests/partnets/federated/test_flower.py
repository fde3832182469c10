"""Training with Flower: the same bits as without it, bytes sent, evaluations, and strategies that wrap ours."""

import logging
import math
from dataclasses import replace

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

from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import Strategy
from nodes import app, grid, start

from partnets.federated.flower import LocalGrid, PartitionedFedAvg, client_app
from partnets.federated.flower.arrays import to_array, to_values, to_vector
from partnets.federated.flower.one_by_one import OneByOne


@pytest.mark.full
def test_rounds_are_those_of_the_core():
    own, metrics = server(make_noisy), {}
    for _ in range(3):
        found = run(own, [client(number, make=make_noisy) for number in range(4)], 1)
        metrics[found.number] = found
    strategy = PartitionedFedAvg(server(make_noisy))
    result = strategy.start(grid(app(make_noisy)), num_rounds=3)
    assert same(state(own), state(strategy.server))
    # Flower numbers its nodes from 1.
    assert [replace(each, norms=[*each.norms.values()]) for each in strategy.history] == [
        replace(each, norms=[*each.norms.values()]) for each in metrics.values()
    ]
    assert same(to_values(result.arrays, own.vectors, own.vectors.lengths), own.values())
    assert result.train_metrics_clientapp.keys() == {1, 2, 3}
    told = result.train_metrics_clientapp[2]
    assert told["lml"] == metrics[2].lml and told["contributors-2"] == 3 and told["failed"] == told["refused"] == 0
    assert told["loss-3"] == metrics[2].losses[3]


def test_undivided_networks_are_averaged_too():
    own = server(make_undivided)
    run(own, [client(number, chunk=1, make=make_undivided) for number in range(4)], 2)
    strategy = start(LocalGrid(app(make_undivided), 4), 2, server(make_undivided))
    assert same(own.values(), strategy.server.values())


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
def test_what_is_uploaded_beside_plain_averaging(proportions, expected):
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


@pytest.mark.full
def test_bfloat16_travels():
    def make():
        model, psi = make_model()
        model[1].to(torch.bfloat16)  # one layer; the others stay in float32
        return nn.Sequential(model[0], Cast(torch.bfloat16), model[1], Cast(torch.float32), *model[2:]), psi

    own = server(make)
    assert {*own.vectors.dtypes.values()} == {torch.bfloat16, torch.float32}
    run(own, [client(number, make=make) for number in range(4)], 2)
    strategy = start(grid(app(make)), 2, server(make))
    assert same(state(own), state(strategy.server))


class Cast(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, x):
        return x.to(self.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("length", [0, 1, 7])
def test_arrays_are_vectors_to_the_bit(dtype, length):
    vector = torch.randn(length).to(dtype)
    vector[:1] = math.nan
    bits = torch.int64 if dtype == torch.float64 else torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(to_vector(to_array(vector), dtype, length).view(bits), vector.view(bits))


def test_who_a_node_is_comes_from_its_configuration():
    strategy = start(LocalGrid(app(proportions=(0.5, 0.25, 0.25), seed=4), 4), 1)
    chunks = federated.assign(4, (0.5, 0.25, 0.25), seed=4)
    assert strategy.server.pinned == {number + 1: (number, chunk) for number, chunk in enumerate(chunks)}
    with pytest.raises(RuntimeError, match="a node has the configuration"):
        start(LocalGrid(app(), 4, node_config=lambda number: {"partition-id": "two"}), 1)
    with pytest.raises(RuntimeError, match=r"no node has contributed in 1 rounds.*chunk=9"):
        start(LocalGrid(app(), 4, node_config=lambda number: {"chunk": 9}), 1)


def test_a_model_made_otherwise_is_no_member():
    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
        return partnets.partition(model, (0.5, 0.3, 0.2), seed=1)

    own = server()
    before = state(own)
    with pytest.raises(RuntimeError, match=r"it has the vectors .* Make both by the same make_model"):
        start(grid(app(make)), 1, own)

    def other_seed():
        _, psi = make_model()
        return partnets.partition(nn.Sequential(psi, *make_network()), PROPORTIONS, seed=1), psi

    with pytest.raises(RuntimeError, match=r"other modules, partitions, .* make both by the same make_model"):
        start(grid(app(other_seed)), 1)
    assert same(before, state(own))


def test_proportions_are_those_of_the_model():
    with pytest.raises(RuntimeError, match=r"proportions=\(0\.5, 0\.5\) are of 2 chunks, but the model has C=3"):
        start(LocalGrid(app(proportions=(0.5, 0.5)), 4), 1)


@pytest.mark.cases(usual=1)
@pytest.mark.parametrize(("chunks", "idle"), [((1, 1, 1, 1), "ψ"), ((3, 3, 2, 3), "w_1")])
def test_what_nobody_has_contributed_to_is_named(chunks, idle):
    own = LocalGrid(app(), 4, node_config=lambda number: {"chunk": chunks[number]})
    with pytest.warns(UserWarning, match=f"no node has contributed to {idle} in 2 rounds"):
        strategy = start(own, 2)
    assert strategy.history[1].judges == (0 if idle == "ψ" else 4)


def test_evaluation_is_over_all_examples():
    own = server()
    strategy = PartitionedFedAvg(own, evaluate_fraction=1.0)
    result = strategy.start(grid(app(load_test=lambda number, clients: load_data(number + 1))), num_rounds=2)
    x, y = (torch.cat(parts) for parts in zip(*(load_data(number + 1) for number in range(4)), strict=True))
    told = result.evaluate_metrics_clientapp[2]
    assert told["num-examples"] == len(x)
    assert told["accuracy"] == pytest.approx(partnets.accuracy(own.model, (x, y)))
    assert told["loss"] == pytest.approx(partnets.mean_loss(own.model, (x, y)), rel=1e-5)
    assert not strategy.start(grid(app()), num_rounds=2).evaluate_metrics_clientapp  # no rounds are left


def evaluating(change, rounds=1, **options):
    """Return the last round's metrics if node 2's evaluations are replaced by change(reply)."""
    honest = app()

    def call(message, context):
        reply = honest(message, context)
        if message.metadata.message_type == "evaluate" and context.node_id == 2:
            return change(reply) or reply
        return reply

    strategy = PartitionedFedAvg(server(**options), evaluate_fraction=1.0)
    return strategy.start(grid(call), num_rounds=rounds).evaluate_metrics_clientapp[rounds]


HONEST = sum(len(load_data(i)[0]) for i in (0, 2, 3))


@pytest.mark.cases(usual=1)
@pytest.mark.parametrize(
    "metrics",
    [{"accuracy": math.nan}, {"accuracy": 2.0}, {"loss": math.inf}, {"loss": 1.7e308}, {"loss": [1.0, 2.0]},
     {"num-examples": -9}, {"num-targets": 0}, {"num-targets": 1 << 62}],
)  # fmt: skip
def test_what_a_node_says_of_its_evaluation_is_checked(metrics):
    def lie(reply):
        reply.content["metrics"] = MetricRecord({**reply.content["metrics"], **metrics})

    told = evaluating(lie)
    assert told["num-examples"] == HONEST and (told["refused"], told["failed"]) == (1, 0)


@pytest.mark.full
def test_a_node_that_cannot_evaluate_says_why(caplog):
    def fail(reply):
        raise OSError("my disk is gone")

    logging.getLogger("flwr").addHandler(caplog.handler)
    try:
        told = evaluating(fail)
    finally:
        logging.getLogger("flwr").removeHandler(caplog.handler)
    assert told["num-examples"] == HONEST and (told["refused"], told["failed"]) == (0, 1)
    assert "node 2 could not evaluate: OSError: my disk is gone" in caplog.text


@pytest.mark.full
def test_evaluations_count_alike_where_clients_do():
    def much(reply):
        reply.content["metrics"] = MetricRecord({**reply.content["metrics"], "num-targets": 1 << 52, "loss": 5.0})

    assert evaluating(much)["loss"] > 4.9 > 2.5 > evaluating(much, weighting="uniform")["loss"]


def test_clients_with_privacy_tell_no_loss_and_no_reason(caplog):
    private = app(privacy=federated.Privacy(1.0, 1.0))
    told = PartitionedFedAvg(server(), evaluate_fraction=1.0).start(grid(private), num_rounds=1)
    assert dict(told.evaluate_metrics_clientapp[1]) == {"failed": 4, "refused": 0}

    def load(number, clients):
        x, y = load_data(number)
        return x, y + 7  # torch's error would quote these labels

    with pytest.raises(RuntimeError, match="with privacy, the reason is only in its own log") as found:
        start(grid(app(load=load, privacy=federated.Privacy(1.0, 1.0))), 1)
    assert "Target" not in str(found.value)


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


def test_what_cannot_begin_says_so(tmp_path):
    with pytest.raises(ValueError, match=r"min_nodes=2, but the grid has 1"):
        start(LocalGrid(app(), 1), 1)
    with pytest.raises(ValueError, match="in a folder that does not exist"):
        PartitionedFedAvg(server(), checkpoint=tmp_path / "none" / "server.pt")
    with pytest.raises(ValueError, match="seed=-1"):
        PartitionedFedAvg(server(), seed=-1)


class Doubled(Strategy):
    """A strategy that wraps another and sends changed arrays to the clients."""

    def __init__(self, inner):
        self.inner = inner
        self.summary, self.aggregate_train = inner.summary, inner.aggregate_train
        self.configure_evaluate, self.aggregate_evaluate = inner.configure_evaluate, inner.aggregate_evaluate

    def configure_train(self, server_round, arrays, config, grid):
        vectors = self.inner.server.vectors
        doubled = {name: 2 * v for name, v in to_values(arrays, vectors, vectors.lengths).items()}
        record = ArrayRecord({name: to_array(vector) for name, vector in doubled.items()})
        return self.inner.configure_train(server_round, record, config, grid)

    def summary(self): ...
    def aggregate_train(self, server_round, replies): ...
    def configure_evaluate(self, server_round, arrays, config, grid): ...
    def aggregate_evaluate(self, server_round, replies): ...


@pytest.mark.full
def test_strategies_around_ours_decide_what_the_model_is():
    own = server()
    for _ in range(2):
        own.load_values({name: 2 * vector for name, vector in own.values().items()})
        run(own, [client(number) for number in range(4)], 1)
    inner = PartitionedFedAvg(server())
    Doubled(inner).start(grid(app()), to_record(inner), num_rounds=2)
    assert same(state(own), state(inner.server))


def to_record(strategy):
    return ArrayRecord({name: to_array(vector) for name, vector in strategy.server.values().items()})


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
    assert same(to_values(result.arrays, strategy.server.vectors, strategy.server.vectors.lengths),
                strategy.server.values())  # fmt: skip


@pytest.mark.full
def test_initial_arrays_are_where_it_starts():
    own, other = server(), PartitionedFedAvg(server())
    own.load_values({name: vector + 0.1 for name, vector in own.values().items()})
    arrays = to_record(PartitionedFedAvg(own))
    first, seen = own.values(), []
    run(own, [client(number) for number in range(4)], 2)
    other.start(grid(app()), arrays, num_rounds=2, evaluate_fn=lambda *_: seen.append(other.server.values()))
    assert same(state(own), state(other.server)) and same(first, seen[0])
    zeros = ArrayRecord({name: to_array(torch.zeros_like(vector)) for name, vector in first.items()})
    other.start(grid(app()), zeros, num_rounds=3, evaluate_fn=lambda *_: seen.append(other.server.values()))
    assert not any(vector.any() for vector in seen[-2].values())
    with pytest.raises(ValueError, match="must have"):
        PartitionedFedAvg(server()).start(grid(app()), ArrayRecord({"w": to_array(torch.ones(3))}), num_rounds=1)


@pytest.mark.full
def test_mods_are_around_the_client():
    seen = []

    def mod(message, context, call):
        seen.append(context.node_id)
        return call(message, context)

    start(grid(app(mods=[mod])), 1)
    assert sorted(seen) == [1, 2, 3, 4]


def test_any_app_runs_in_a_local_grid():
    """Run Flower's FedAvg with an app that does not use partnets."""
    from flwr.clientapp import ClientApp
    from flwr.serverapp.strategy import FedAvg

    plain = ClientApp()

    @plain.train()
    def train(message, context):
        arrays = ArrayRecord({"x": to_array(torch.full((3,), float(context.run_config["value"])))})
        return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})}), reply_to=message)

    strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=3)
    found = strategy.start(LocalGrid(plain, 3, run_config={"value": 7}), ArrayRecord({"x": to_array(torch.zeros(3))}),
                           num_rounds=2)  # fmt: skip
    assert found.arrays["x"].numpy().tolist() == pytest.approx([7.0] * 3)
    with pytest.raises(ValueError, match="clients=0"):
        LocalGrid(plain, 0)


@pytest.mark.full
def test_each_process_makes_its_model_once():
    made = []

    def make():
        made.append(1)
        return make_model()

    start(grid(app(make)), 3)
    assert len(made) == 1


def test_wrong_use_is_an_error_that_names_the_cure():
    with pytest.raises(ValueError, match=r"fraction=1\.5; pass a share"):
        PartitionedFedAvg(server(), fraction=1.5)
    with pytest.raises(ValueError, match="min_nodes=0"):
        PartitionedFedAvg(server(), min_nodes=0)


def test_one_unreadable_reply_takes_no_other_with_it():
    class Broken(LocalGrid):
        """A grid that, like a network's, parses pulled messages, and cannot parse those of node 2."""

        node = None

        def pull_messages(self, message_ids):
            found = super().pull_messages(message_ids)
            if any(one.metadata.src_node_id == 2 for one in found):
                raise ValueError("a malformed header")
            return found

    here = Broken(app(), 4, node_config=lambda number: {"chunk": CHUNKS[number]})
    strategy = start(here, 1)
    honest = server()
    run(honest, [client(number) for number in (0, 2, 3)], 1)
    assert strategy.history[0].failed == {2: "it did not reply in time"} and same(state(honest), state(strategy.server))
    assert OneByOne(here).get_node_ids() == [1, 2, 3, 4]
