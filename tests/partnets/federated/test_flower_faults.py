"""Nodes that fail, are late, lie or attack do not change a bit of the global model."""

import asyncio
import copy
import logging
import math
import pickle
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from clients import client, make_noisy, run, same, server, state

pytest.importorskip("flwr", reason="Flower needs Python 3.11")

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from nodes import app, grid, start

from partnets.federated.flower import LocalGrid, PartitionedFedAvg
from partnets.federated.flower.messages import to_record
from partnets.federated.flower.one_by_one import OneByOne

# Node 3 is client 2, with chunk 3.
NODE, W3, PSI = 3, "w3.float32", "gradient.hyper.float32"
HONEST, REPLIES = app(), {}


def remembered(message, context):
    """Compute the honest reply to the same message only once."""
    asked = context.node_id, pickle.dumps(message.content)
    if asked not in REPLIES:
        REPLIES[asked] = HONEST(message, context)
    return Message(copy.deepcopy(REPLIES[asked].content), reply_to=message)


def faulty(fault):
    """Return an app in which NODE replies fault(message, honest reply) in round 2."""

    def call(message, context):
        reply, number = remembered(message, context), message.content["config"]["round"]
        return fault(message, reply) if context.node_id == NODE and number == 2 else reply

    return call


def without(number, rounds=3, missing=2):
    """Return the state after `rounds` rounds, without client `number` in round `missing`."""
    own = server()
    for each in range(1, rounds + 1):
        run(own, [client(i) for i in range(4) if each != missing or i != number], 1)
    return state(own)


@pytest.fixture(scope="module")
def expected():
    return without(2)


def put(name, array):
    return lambda content: content["arrays"].update({name: array})


def declared(**fields):
    """Return a fault that replaces fields of the array w_3 by values or by functions of the old ones."""

    def spoil(content):
        own = {name: getattr(content["arrays"][W3], name) for name in ("dtype", "shape", "stype", "data")}
        own |= {name: new(own[name]) if callable(new) else new for name, new in fields.items()}
        content["arrays"][W3] = Array(**own)

    return spoil


def entry(value):
    """Return a function that replaces an entry in the bytes of a vector."""
    return lambda data: data[:4] + np.float32(value).tobytes() + data[8:]


def put_metric(name, value):
    return lambda content: content["metrics"].update({name: value})


def vector(number, length):
    return to_record({"": torch.full((length,), number)})[""]


LIES = {
    "NaN": declared(data=entry(math.nan)),
    "infinite": declared(data=entry(-math.inf)),
    "declared shape": declared(shape=(1,)),
    "a dimension more": declared(shape=lambda shape: (*shape, 1)),
    "declared dtype": declared(dtype="float64"),
    "declared integers": declared(dtype="int32"),
    "declared serialisation": declared(stype="pickle"),
    "content of NumPy": lambda content: put(W3, Array(np.zeros(content["arrays"][W3].shape, np.float32)))(content),
    "content cut off": declared(data=lambda data: data[:-3]),
    "content with more behind": declared(data=lambda data: data + b"0000"),
    "no content": declared(data=b""),
    "w_1 from a client of chunk 3": put("w1.float32", vector(0.0, 25)),
    "ψ itself": put("hyper.float32", vector(0.0, 6)),
    "no w_3": lambda content: content["arrays"].pop(W3),
    "no gradient": lambda content: content["arrays"].pop(PSI),
    "a gradient of another length": put(PSI, vector(1.0, 5)),
    "another chunk": put_metric("chunk", 2),
    "no such chunk": put_metric("chunk", 4),
    "a chunk of a fraction": put_metric("chunk", 3.0),
    "several chunks": put_metric("chunk", [3, 1]),
    "examples of NaN": put_metric("num-examples", math.nan),
    "losses that are several": put_metric("loss-3", [1.0]),
    "a loss without a number": put_metric("loss-all", 1.0),
    "no number": lambda content: content["metrics"].pop("client"),
    "no metrics": lambda content: content.pop("metrics"),
    "no arrays": lambda content: content.pop("arrays"),
    "records of its own": lambda content: content.update({"more": ArrayRecord({"backdoor": Array(np.ones(3))})}),
    "another model": lambda content: content.update({"config": ConfigRecord({"fingerprint": "0" * 32})}),
    "nothing": RecordDict.clear,
}


def lying(what):
    def lie(message, reply):
        LIES[what](reply.content)
        return reply

    return faulty(lie)


@pytest.mark.cases(usual=20)
@pytest.mark.parametrize("what", LIES)
def test_a_lying_node_is_refused(what, expected):
    strategy = start(grid(lying(what)), 3)
    assert same(expected, state(strategy.server))
    assert [[*found.refused] for found in strategy.history] == [[], [NODE], []] and not strategy.history[1].failed


def raises(error):
    def fault(message, reply):
        raise error

    return fault


def late(message, reply):
    time.sleep(1.5)
    return reply


def alone(message, reply):
    return Message(RecordDict({"metrics": MetricRecord({"loss": 1.0})}), reply_to=message)


# What a node does in place of an honest reply, and how and why it is left out.
ENDS = {
    "an error": (raises(MemoryError("there is no more")), "failed", "MemoryError: there is no more"),
    "an exit": (raises(SystemExit(3)), "failed", "SystemExit"),
    "cancelled": (raises(asyncio.CancelledError()), "failed", "CancelledError"),
    "nothing": (lambda message, reply: None, "failed", "the app returned a NoneType"),
    "no message": (lambda message, reply: RecordDict(), "failed", "the app returned a RecordDict"),
    "late": (late, "failed", "it did not reply in time"),
    "its own message": (lambda message, reply: message, "refused", "KeyError"),
    "metrics": (alone, "refused", "KeyError"),
}


@pytest.mark.cases(usual=3)
@pytest.mark.parametrize("what", ENDS)
def test_a_client_that_ends_or_answers_nothing_in_time_is_left_out(what, expected):
    """Check that a late reply is ignored, also in the next round."""
    fault, how, reason = ENDS[what]
    strategy = start(grid(faulty(fault)), 3, timeout=1.0 if what == "late" else 3600)
    assert same(expected, state(strategy.server))
    assert [[*getattr(found, how)] for found in strategy.history] == [[], [NODE], []]
    found = strategy.history[1]
    assert len(found.failed) + len(found.refused) == 1 and reason in getattr(found, how)[NODE]


def test_another_strategy_is_named_as_the_reason(caplog):
    caplog.set_level(logging.INFO, "flwr")  # another test may have changed it
    FedAvg(fraction_evaluate=0.0).start(grid(app()), to_record(server().values()), num_rounds=1)
    assert "its strategy is not PartitionedFedAvg; start PartitionedFedAvg" in caplog.text


class Tampered(LocalGrid):
    """A network that tampers with the replies of round 2."""

    seen = None

    def send_and_receive(self, messages, *, timeout=None):
        messages = [*messages]
        if not messages:  # no evaluation
            return messages
        replies = [*super().send_and_receive(messages, timeout=timeout)]
        before, self.seen = self.seen, replies
        return self.tamper(before, replies) if messages[0].content["config"]["round"] == 2 else replies


def failure():
    return Message(Error(code=2, reason="?"), reply_to=Message(RecordDict(), NODE, "train"))


def stranger(own):
    return Message(own.content, reply_to=Message(RecordDict(), 9, "train"))


TAMPERED = {
    "twice": lambda own, others, old: [own, *others, own],
    "twice and failing": lambda own, others, old: [failure(), *others, own],
    "an old one beside": lambda own, others, old: [*others, own, old],
    "an old one instead": lambda own, others, old: [*others, old],
    "lost": lambda own, others, old: others,
    "a stranger beside": lambda own, others, old: [*others, stranger(own)],
}


@pytest.mark.cases(usual=1)
@pytest.mark.parametrize("what", TAMPERED)
def test_replies_that_the_network_repeats_or_loses(what, expected):
    def tamper(before, replies):
        old, own = ({one.metadata.src_node_id: one for one in each}[NODE] for each in (before, replies))
        return TAMPERED[what](own, [one for one in replies if one is not own], old)

    network = grid(remembered, Tampered)
    network.tamper = tamper
    strategy = start(network, 3)
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


@pytest.mark.full
def test_a_killed_server_goes_on_with_the_same_bits(tmp_path):
    """Interrupt the server within round 2, after two of four clients, and resume."""

    def kill(message, reply):
        raise KeyboardInterrupt

    checkpoint = tmp_path / "server.pt"
    with pytest.raises(KeyboardInterrupt):
        start(grid(faulty(kill)), 3, checkpoint=checkpoint)
    assert checkpoint.exists()  # of round 1
    strategy = start(grid(remembered), 3, checkpoint=checkpoint)
    assert same(without(None), state(strategy.server))
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
def test_a_client_that_changes_its_message_affects_no_other_client():
    def change(message, reply):
        message.content["config"]["round"] = 7
        del message.content["arrays"]
        return reply

    assert same(without(None), state(start(grid(faulty(change)), 3).server))


class Network(LocalGrid):
    """A grid with messages that, as over a network, are parsed from bytes and name their sender themselves."""

    node = None

    def pull_messages(self, message_ids):
        found = super().pull_messages(message_ids)
        for reply in found:
            self.parse(reply)
        return found


def over_network(parse):
    network = grid(remembered, Network)
    network.parse = parse
    return network


@pytest.mark.full
def test_a_reply_belongs_to_the_node_of_its_request():
    def forge(reply):
        if reply.metadata.src_node_id == NODE:
            reply.metadata.__dict__["_src_node_id"] = 1

    for parse in (lambda reply: None, forge):
        strategy = start(over_network(parse), 2)
        assert not any(found.refused or found.failed for found in strategy.history)
        assert same(without(None, 2), state(strategy.server))


def test_an_unreadable_reply_does_not_affect_other_replies():
    def parse(reply):
        if reply.metadata.src_node_id == NODE:
            raise ValueError("a malformed header")

    network = over_network(parse)
    strategy = start(network, 1)
    assert strategy.history[0].failed == {NODE: "it did not reply in time"}
    assert same(without(2, 1, missing=1), state(strategy.server))
    assert OneByOne(network).get_node_ids() == [1, 2, 3, 4]


@pytest.mark.full
def test_reasons_are_short_and_of_one_line(caplog):
    shout = faulty(raises(RuntimeError("no\x1b[2J\nINFO: all is well " + "!" * 1_000_000)))
    logging.getLogger("flwr").addHandler(caplog.handler)
    try:
        strategy = PartitionedFedAvg(server())
        result = strategy.start(grid(shout), num_rounds=2)
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
