"""Nodes that fail, are late, lie or attack do not change a bit of the global model."""

import asyncio
import logging
import math
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from clients import CHUNKS, client, make_noisy, run, same, server, state

pytest.importorskip("flwr", reason="Flower needs Python 3.11")

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from nodes import app, grid, hurting, start

from partnets.federated.flower import LocalGrid, PartitionedFedAvg
from partnets.federated.flower.messages import to_record

# Node 3 is client 2, with chunk 3.
NODE, W3, PSI = 3, "w3.float32", "gradient.hyper.float32"


def without(number, rounds=3, missing=2):
    """Return the state after `rounds` rounds, without client `number` in round `missing`."""
    own = server()
    for each in range(1, rounds + 1):
        run(own, [client(i) for i in range(4) if each != missing or i != number], 1)
    return state(own)


def put(name, change):
    """Return a fault that replaces an array of a reply."""

    def spoil(reply):
        reply["arrays"][name] = change(reply["arrays"].get(name))

    return spoil


def declared(**fields):
    return put(W3, lambda array: Array(**{**_fields(array), **fields}))


def content(change):
    return put(W3, lambda array: Array(**{**_fields(array), "data": change(array.data)}))


def _fields(array):
    return {"dtype": array.dtype, "shape": array.shape, "stype": array.stype, "data": array.data}


def values(change):
    """Return a fault that changes w_3 as a NumPy array of float32."""
    return content(lambda data: change(np.frombuffer(data, np.float32).copy()).tobytes())


def spoiled_entry(value):
    def change(vector):
        vector[1] = value
        return vector

    return values(change)


def put_metric(name, value):
    return lambda reply: reply["metrics"].update({name: value})


def drop(*path):
    return lambda reply: reply[path[0]].pop(path[1]) if len(path) > 1 else reply.pop(path[0])


def vector(number, length):
    return lambda _: next(iter(to_record({"": torch.full((length,), number)}).values()))


FAULTS = {
    "NaN": spoiled_entry(math.nan),
    "infinite": spoiled_entry(-math.inf),
    "declared shape": declared(shape=(1,)),
    "a dimension more": put(W3, lambda array: Array(array.dtype, (*array.shape, 1), array.stype, array.data)),
    "declared dtype": declared(dtype="float64"),
    "declared integers": declared(dtype="int32"),
    "declared serialisation": declared(stype="pickle"),
    "content of NumPy": put(W3, lambda array: Array(np.zeros(array.shape, np.float32))),
    "content cut off": content(lambda data: data[:-3]),
    "content with more behind": content(lambda data: data + b"0000"),
    "no content": content(lambda data: b""),
    "w_1 from a client of chunk 3": put("w1.float32", vector(0.0, 25)),
    "ψ itself": put("hyper.float32", vector(0.0, 6)),
    "no w_3": drop("arrays", W3),
    "no gradient": drop("arrays", PSI),
    "a gradient of another length": put(PSI, vector(1.0, 5)),
    "another chunk": put_metric("chunk", 2),
    "no such chunk": put_metric("chunk", 4),
    "a chunk of a fraction": put_metric("chunk", 3.0),
    "several chunks": put_metric("chunk", [3, 1]),
    "examples of NaN": put_metric("num-examples", math.nan),
    "losses that are several": put_metric("loss-3", [1.0]),
    "a loss without a number": put_metric("loss-all", 1.0),
    "no number": drop("metrics", "client"),
    "no metrics": drop("metrics"),
    "no arrays": drop("arrays"),
    "records of its own": lambda reply: reply.update({"more": ArrayRecord({"backdoor": Array(np.ones(3))})}),
    "another model": lambda reply: reply.update({"config": ConfigRecord({"fingerprint": "0" * 32})}),
    "nothing": RecordDict.clear,
}


def lying(what):
    """Return an app with a lying node NODE in round 2."""

    def spoil(reply):
        FAULTS[what](reply.content)

    return hurting(spoil, NODE)


@pytest.fixture(scope="module")
def expected():
    return without(2)


@pytest.mark.cases(usual=20)
@pytest.mark.parametrize("what", FAULTS)
def test_a_lying_node_is_refused(what, expected):
    strategy = start(grid(lying(what)), 3)
    assert same(expected, state(strategy.server))
    assert [[*found.refused] for found in strategy.history] == [[], [NODE], []] and not strategy.history[1].failed


def failing(node, what):
    honest = app()

    def call(message, context):
        if context.node_id == node and message.content["config"]["round"] == 2:
            return what(message)
        return honest(message, context)

    return call


def test_replies_after_the_timeout_are_ignored(expected):
    """Check that a late reply is ignored, also in the next round."""

    def late(reply):
        time.sleep(1.5)

    strategy = start(grid(hurting(late, NODE)), 3, timeout=1.0)
    assert same(expected, state(strategy.server))
    assert strategy.history[1].failed == {NODE: "it did not reply in time"}


def test_another_strategy_is_named_as_the_reason(caplog):
    caplog.set_level(logging.INFO, "flwr")  # another test may have changed it
    FedAvg(fraction_evaluate=0.0).start(grid(app()), to_record(server().values()), num_rounds=1)
    assert "its strategy is not PartitionedFedAvg; start PartitionedFedAvg" in caplog.text


class Tampered(LocalGrid):
    """A network that tampers with the replies of round 2."""

    def __init__(self, tamper):
        super().__init__(app(), 4, node_config=lambda number: {"chunk": CHUNKS[number]})
        self.tamper, self.rounds, self.seen = tamper, 0, []

    def send_and_receive(self, messages, *, timeout=None):
        messages = [*messages]
        if not messages:  # no evaluation
            return messages
        self.rounds += 1
        replies = [*super().send_and_receive(messages, timeout=timeout)]
        self.seen.append(replies)
        return self.tamper(replies, self.seen) if self.rounds == 2 else replies


@pytest.mark.cases(usual=1)
@pytest.mark.parametrize(
    "what", ["twice", "twice and failing", "an old one beside", "an old one instead", "lost", "a stranger beside"]
)
def test_replies_that_the_network_repeats_or_loses(what, expected):
    def tamper(replies, seen):
        (own,) = [one for one in replies if one.metadata.src_node_id == NODE]
        (old,) = [one for one in seen[0] if one.metadata.src_node_id == NODE]
        others = [one for one in replies if one is not own]
        match what:
            case "twice":
                return [own, *others, own]
            case "twice and failing":
                failed = Message(RecordDict(), NODE, "train")
                failed = Message(Error(code=2, reason="?"), reply_to=failed)
                return [failed, *others, own]
            case "an old one beside":
                return [*others, own, old]
            case "an old one instead":
                return [*others, old]
            case "a stranger beside":
                return [*others, Message(own.content, reply_to=Message(RecordDict(), 9, "train"))]
        return others

    strategy = start(Tampered(tamper), 3)
    assert same(expected, state(strategy.server))
    assert NODE in {*strategy.history[1].refused, *strategy.history[1].failed}
    assert strategy.history[1].refused.get(9) == ("it was not asked" if what == "a stranger beside" else None)


def all_fail(message, context):
    raise RuntimeError("all are gone")


def test_rounds_without_any_reply_change_nothing():
    strategy = PartitionedFedAvg(server())
    with pytest.raises(RuntimeError, match=r"no node has contributed in 2 rounds.* node 1: RuntimeError: all are gone"):
        strategy.start(grid(all_fail), num_rounds=2)
    assert same(state(server()), state(strategy.server)) and strategy.server.rounds == 2
    assert strategy.history[1].contributors == {1: 0, 2: 0, 3: 0} and len(strategy.history[1].failed) == 4


KILLED = """
import os, sys
sys.path.insert(0, sys.argv[1])
from clients import server
from nodes import app, grid, start

calls = 0
honest = app()

def call(message, context):
    global calls
    calls += 1
    if calls == 7:
        os.kill(os.getpid(), 9)
    return honest(message, context)

start(grid(call), 3, server(), checkpoint=sys.argv[2])
"""


@pytest.mark.full
def test_a_killed_server_goes_on_with_the_same_bits(tmp_path):
    """Kill the server within round 2, each of four clients, and resume."""
    checkpoint = tmp_path / "server.pt"
    done = subprocess.run(
        [sys.executable, "-c", KILLED, os.path.dirname(__file__), str(checkpoint)], capture_output=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    strategy = start(grid(app()), 3, checkpoint=checkpoint)
    assert same(state(start(grid(app()), 3).server), state(strategy.server))
    assert [found.number for found in strategy.history] == [1, 2, 3]


def test_rounds_without_contributors_are_not_saved(tmp_path):
    """Check that such a run stops early, and that the same call trains all rounds once the error is fixed."""
    with pytest.raises(RuntimeError, match="no node has contributed in 3 rounds"):
        start(grid(all_fail), 200, checkpoint=tmp_path / "server.pt")
    assert not (tmp_path / "server.pt").exists()
    strategy = start(grid(app()), 2, checkpoint=tmp_path / "server.pt")
    assert strategy.server.rounds == 2
    with pytest.raises(RuntimeError, match="in 1 rounds"):
        start(grid(all_fail), 3, checkpoint=tmp_path / "server.pt")
    resumed = server()
    resumed.load(tmp_path / "server.pt")
    assert resumed.rounds == 2 and same(state(resumed), state(strategy.server))


@pytest.mark.full
def test_a_client_that_changes_its_message_affects_no_other_client(expected):
    honest = app()

    def call(message, context):
        if context.node_id == 1 and message.content["config"]["round"] == 2:
            reply = honest(message, context)
            message.content["config"]["round"] = 7
            del message.content["arrays"]
            return reply
        return honest(message, context)

    assert same(state(start(grid(app()), 3).server), state(start(grid(call), 3).server))


@pytest.mark.cases(usual=2)
@pytest.mark.parametrize(
    "what", ["an error", "nothing", "no message", "its own message", "metrics", "an exit", "cancelled"]
)
def test_a_client_that_ends_or_answers_nothing_has_failed(what, expected):
    def call(message):
        match what:
            case "an error":
                raise MemoryError("there is no more")
            case "an exit":
                sys.exit(3)
            case "cancelled":
                raise asyncio.CancelledError
            case "metrics":
                return Message(RecordDict({"metrics": MetricRecord({"loss": 1.0})}), reply_to=message)
        return {"nothing": None, "no message": RecordDict(), "its own message": message}[what]

    strategy = start(grid(failing(NODE, call)), 3)
    assert same(expected, state(strategy.server))
    assert NODE in {*strategy.history[1].failed, *strategy.history[1].refused} and not strategy.history[2].failed


class Network(LocalGrid):
    """A grid with messages that, as over a network, are parsed from bytes and name their sender themselves."""

    node = None

    def __init__(self, forge=lambda reply: None):
        super().__init__(app(), 4, node_config=lambda number: {"chunk": CHUNKS[number]})
        self.forge = forge

    def pull_messages(self, message_ids):
        found = super().pull_messages(message_ids)
        for reply in found:
            self.forge(reply)
        return found


@pytest.mark.full
def test_a_reply_belongs_to_the_node_of_its_request():
    def forge(reply):
        if reply.metadata.src_node_id == NODE:
            reply.metadata.__dict__["_src_node_id"] = 1

    for each in (Network(), Network(forge)):
        strategy = start(each, 2)
        assert not any(found.refused or found.failed for found in strategy.history)
        assert same(without(None, 2), state(strategy.server))


@pytest.mark.full
def test_reasons_are_short_and_of_one_line(caplog):
    def shout(message):
        raise RuntimeError("no\x1b[2J\nINFO: all is well " + "!" * 1_000_000)

    logging.getLogger("flwr").addHandler(caplog.handler)
    try:
        strategy = PartitionedFedAvg(server())
        result = strategy.start(grid(failing(NODE, shout)), num_rounds=2)
        refusing = start(grid(lying("NaN")), 2)
    finally:
        logging.getLogger("flwr").removeHandler(caplog.handler)
    (reason,) = strategy.history[1].failed.values()
    assert len(reason) < 400 and reason.isprintable() and "no[2J INFO: all is well !!" in reason
    assert refusing.history[1].refused == {NODE: "w3.float32 has NaN or infinite numbers."}
    failed, refused = {one for one in caplog.messages if "> node" in one}
    assert len(failed) < 500 and "\n" not in failed + refused
    told = result.train_metrics_clientapp
    assert [told[i]["failed"] for i in (1, 2)] == [0, 1] and told[2]["contributors-3"] == 3


@pytest.mark.full
def test_servers_in_parallel_threads_do_not_interfere():
    """Check that threads do not interfere, although make_model seeds the process's random states."""
    expected = state(start(grid(app(make_noisy)), 2, server(make_noisy)).server)
    servers = [server(make_noisy) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda own: state(start(grid(app(make_noisy)), 2, own).server), servers)]
    assert all(same(expected, each) for each in found)
