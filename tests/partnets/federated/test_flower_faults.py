"""Nodes that fail, are late, lie or attack do not change a bit of the global model."""

import asyncio
import io
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from clients import CHUNKS, client, make_noisy, run, same, server, state

pytest.importorskip("flwr", reason="Flower needs Python 3.11")

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg, Strategy
from nodes import app, grid, hurting, start

from partnets.federated.flower import LocalGrid, PartitionedFedAvg
from partnets.federated.flower.arrays import to_record

# Node 3 is client 2, with chunk 3.
NODE, W3, PSI = 3, "w3.float32", "gradient.hyper.float32"


def without(number, rounds=3, missing=2):
    """Return the state after `rounds` rounds, without client `number` in round `missing`."""
    own = server()
    for each in range(1, rounds + 1):
        run(own, [client(i) for i in range(4) if each != missing or i != number], 1)
    return state(own)


def arrays(reply):
    return reply.content["arrays"]


def put(name, array):
    def spoil(reply):
        arrays(reply)[name] = array(arrays(reply)[name]) if callable(array) else array

    return spoil


def put_metric(name, value):
    def spoil(reply):
        reply.content["metrics"][name] = value

    return spoil


def put_values(change):
    """Return a fault that changes w_3 as a NumPy array."""
    return put(W3, lambda array: Array(change(array.numpy().copy())))


def npy(array, **options):
    file = io.BytesIO()
    np.lib.format.write_array(file, array, **options)
    return file.getvalue()


def lying_content(change):
    """Return a fault that declares w_3's dtype and shape but has other content."""
    return put(W3, lambda array: Array(array.dtype, array.shape, array.stype, change(array)))


def spoiled_entry(value):
    def change(vector):
        vector[1] = value
        return vector

    return change


class Bomb:
    """An object that runs code when it is unpickled."""

    def __reduce__(self):
        return os.abort, ()


def objects(array):
    return npy(np.array([Bomb()] * array.shape[0], dtype=object), allow_pickle=True)


def drop(record, name):
    def spoil(reply):
        del reply.content[record][name]

    return spoil


def drop_record(name):
    def spoil(reply):
        del reply.content[name]

    return spoil


def more_records(reply):
    reply.content["more"] = ArrayRecord({"backdoor": Array(np.ones(3))})


def other_model(reply):
    reply.content["config"] = ConfigRecord({"fingerprint": "0" * 32})


def nothing(reply):
    reply.content = RecordDict()


FAULTS = {
    "NaN": put_values(spoiled_entry(math.nan)),
    "infinite": put_values(spoiled_entry(-math.inf)),
    "huge": put_values(spoiled_entry(1e30)),
    "a shape less": put_values(lambda vector: vector[:-1]),
    "a dimension more": put_values(lambda vector: vector[:, None]),
    "another dtype": put_values(lambda vector: vector.astype(np.float64)),
    "integers": put_values(lambda vector: vector.astype(np.int32)),
    "complex numbers": put_values(lambda vector: vector.astype(np.complex64)),
    "declared shape": put(W3, lambda array: Array(array.dtype, (1,), array.stype, array.data)),
    "declared dtype": put(W3, lambda array: Array("float64", array.shape, array.stype, array.data)),
    "declared serialisation": put(W3, lambda array: Array(array.dtype, array.shape, "pickle", array.data)),
    "bytes of bfloat16": put(W3, lambda array: Array(array.dtype, array.shape, "torch.bytes", array.data)),
    "content of another length": lying_content(lambda array: npy(array.numpy()[:-1])),
    "content of another dtype": lying_content(lambda array: npy(array.numpy().astype(np.float64))),
    "content of integers": lying_content(lambda array: npy(np.arange(array.shape[0], dtype=np.int32))),
    "content of another byte order": lying_content(lambda array: npy(array.numpy().astype(">f4"))),
    "content of objects": lying_content(objects),
    "content of a newer format": lying_content(lambda array: npy(array.numpy(), version=(2, 0))),
    "content cut off": lying_content(lambda array: array.data[:-3]),
    "content with more behind": lying_content(lambda array: array.data + b"0000"),
    "content without a header": lying_content(lambda array: b"\x93NUMPY"),
    "a header that is code": lying_content(
        lambda array: array.data[:10] + b"__import__('os').abort()" + array.data[34:]
    ),
    "no content": lying_content(lambda array: b""),
    "noise": lying_content(lambda array: bytes(range(256))),
    "w_1 from a client of chunk 3": put("w1.float32", Array(np.zeros(25, np.float32))),
    "ψ itself": put("hyper.float32", Array(np.zeros(6, np.float32))),
    "no w_3": drop("arrays", W3),
    "no gradient": drop("arrays", PSI),
    "a gradient of NaN": put(PSI, Array(np.full(6, math.nan, np.float32))),
    "a gradient of another length": put(PSI, Array(np.ones(5, np.float32))),
    "another client": put_metric("client", 0),
    "another chunk": put_metric("chunk", 2),
    "an earlier chunk": put_metric("chunk", 1),
    "no such chunk": put_metric("chunk", 4),
    "a chunk of a fraction": put_metric("chunk", 3.0),
    "several chunks": put_metric("chunk", [3, 1]),
    "an older round": put_metric("round", 1),
    "a later round": put_metric("round", 3),
    "no examples": put_metric("num-examples", 0),
    "less than no examples": put_metric("num-examples", -5),
    "all the examples in the world": put_metric("num-examples", 1 << 62),
    "examples of NaN": put_metric("num-examples", math.nan),
    "a loss of NaN": put_metric("hyper-loss", math.nan),
    "a loss of another partition": put_metric("loss-1", 1.0),
    "losses that are several": put_metric("loss-3", [1.0]),
    "a loss that overflows": put_metric("hyper-loss", 1.7e308),
    "a loss without a number": put_metric("loss-all", 1.0),
    "a number below none": put_metric("client", -1),
    "no number": drop("metrics", "client"),
    "no chunk": drop("metrics", "chunk"),
    "no metrics": drop_record("metrics"),
    "no arrays": drop_record("arrays"),
    "records of its own": more_records,
    "another model": other_model,
    "nothing": nothing,
}


@pytest.fixture(scope="module")
def expected():
    return without(2)


@pytest.mark.parametrize("what", FAULTS)
def test_a_lying_node_is_refused(what, expected):
    strategy = start(grid(hurting(FAULTS[what], NODE)), 3)
    assert same(expected, state(strategy.server))
    assert [[*found.refused] for found in strategy.history] == [[], [NODE], []] and not strategy.history[1].failed


def failing(node, what):
    honest = app()

    def call(message, context):
        if context.node_id == node and message.content["config"]["round"] == 2:
            return what(message)
        return honest(message, context)

    return call


@pytest.mark.full
def test_a_node_that_raises_has_failed(expected):
    def crash(message):
        raise MemoryError("there is no more")

    strategy = start(grid(failing(NODE, crash)), 3)
    assert same(expected, state(strategy.server))
    assert "MemoryError: there is no more" in strategy.history[1].failed[NODE] and not strategy.history[2].failed


@pytest.mark.full
def test_a_node_that_answers_something_else_is_refused(expected):
    def answer(message):
        return Message(RecordDict({"metrics": MetricRecord({"loss": 1.0})}), reply_to=message)

    strategy = start(grid(failing(NODE, answer)), 3)
    assert same(expected, state(strategy.server)) and [*strategy.history[1].refused] == [NODE]


def test_what_comes_after_the_timeout_is_not_heard(expected):
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
@pytest.mark.parametrize("what", ["twice", "twice and failing", "an old one beside", "an old one instead", "lost"])
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
        return others

    strategy = start(Tampered(tamper), 3)
    assert same(expected, state(strategy.server))
    assert NODE in {*strategy.history[1].refused, *strategy.history[1].failed}


@pytest.mark.full
def test_who_was_not_asked_is_not_heard():
    def stranger(replies, seen):
        return [*replies, Message(replies[-1].content, reply_to=Message(RecordDict(), 9, "train"))]

    strategy = start(Tampered(stranger), 3)
    assert same(without(None), state(strategy.server)) and strategy.history[1].refused == {9: "it was not asked"}


def all_fail(message, context):
    raise RuntimeError("all are gone")


def test_rounds_without_any_reply_change_nothing():
    strategy = PartitionedFedAvg(server())
    with pytest.raises(RuntimeError, match=r"no node has contributed in 2 rounds.* node 1: RuntimeError: all are gone"):
        strategy.start(grid(all_fail), num_rounds=2)
    assert same(state(server()), state(strategy.server)) and strategy.server.rounds == 2
    assert strategy.history[1].contributors == {1: 0, 2: 0, 3: 0} and len(strategy.history[1].failed) == 4


def test_who_is_refused_and_why_is_in_the_log_and_the_metrics(caplog):
    logging.getLogger("flwr").addHandler(caplog.handler)
    try:
        strategy = PartitionedFedAvg(server())
        result = strategy.start(grid(hurting(FAULTS["NaN"], NODE)), num_rounds=2)
    finally:
        logging.getLogger("flwr").removeHandler(caplog.handler)
    assert "node 3 was refused: w3.float32 has NaN or infinite numbers." in caplog.text
    told = result.train_metrics_clientapp
    assert [told[i]["refused"] for i in (1, 2)] == [0, 1] and told[2]["contributors-3"] == 3


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
    if calls == int(sys.argv[3]):
        os.kill(os.getpid(), 9)
    return honest(message, context)

start(grid(call), 3, server(), checkpoint=sys.argv[2])
"""


@pytest.mark.full
@pytest.mark.parametrize("call", [7])
def test_a_killed_server_goes_on_with_the_same_bits(call, tmp_path):
    """Kill the server within round 1 or 2, each of four clients, and resume."""
    checkpoint = tmp_path / "server.pt"
    done = subprocess.run(
        [sys.executable, "-c", KILLED, os.path.dirname(__file__), str(checkpoint), str(call)], capture_output=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert checkpoint.exists() == (call > 4)
    strategy = start(grid(app()), 3, checkpoint=checkpoint)
    assert same(state(start(grid(app()), 3).server), state(strategy.server))
    assert [found.number for found in strategy.history] == [1, 2, 3]


def test_rounds_to_which_nobody_contributes_are_not_written(tmp_path):
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


class Around(Strategy):
    """A strategy that wraps another and uses Flower's start()."""

    def __init__(self, inner):
        self.inner = inner
        for name in ("configure_train", "aggregate_train", "configure_evaluate", "aggregate_evaluate", "summary"):
            setattr(self, name, getattr(inner, name))

    def summary(self): ...
    def configure_train(self, server_round, arrays, config, grid): ...
    def aggregate_train(self, server_round, replies): ...
    def configure_evaluate(self, server_round, arrays, config, grid): ...
    def aggregate_evaluate(self, server_round, replies): ...


@pytest.mark.full
def test_a_strategy_around_goes_on_from_the_checkpoint_or_leaves_it(tmp_path):
    path = tmp_path / "server.pt"
    start(grid(app()), 2, checkpoint=path)
    before = path.read_bytes()
    inner = PartitionedFedAvg(server(), checkpoint=path)
    with pytest.raises(RuntimeError, match=r"call resume\(\) before the start"):
        Around(inner).start(grid(app()), to_record(inner.server.values()), num_rounds=1)
    assert path.read_bytes() == before
    assert inner.resume() == 2
    Around(inner).start(grid(app()), to_record(inner.server.values()), num_rounds=1)
    assert same(state(start(grid(app()), 3).server), state(inner.server)) and inner.server.rounds == 3


@pytest.mark.full
def test_a_client_that_changes_its_message_changes_nobody_elses(expected):
    honest = app()

    def call(message, context):
        if context.node_id == 1 and message.content["config"]["round"] == 2:
            reply = honest(message, context)
            message.content["config"]["round"] = 7
            del message.content["arrays"]
            return reply
        return honest(message, context)

    assert same(state(start(grid(app()), 3).server), state(start(grid(call), 3).server))


@pytest.mark.cases(usual=1)
@pytest.mark.parametrize("what", ["nothing", "no message", "its own message", "an exit", "cancelled"])
def test_a_client_that_ends_or_answers_nothing_has_failed(what, expected):
    def call(message):
        if what == "an exit":
            sys.exit(3)
        if what == "cancelled":
            raise asyncio.CancelledError
        return {"nothing": None, "no message": RecordDict(), "its own message": message}[what]

    strategy = start(grid(failing(NODE, call)), 3)
    assert same(expected, state(strategy.server))
    assert NODE in {*strategy.history[1].failed, *strategy.history[1].refused}


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
def test_whose_a_reply_is_follows_from_what_it_answers():
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
        strategy = start(grid(failing(NODE, shout)), 2)
    finally:
        logging.getLogger("flwr").removeHandler(caplog.handler)
    (reason,) = strategy.history[1].failed.values()
    assert len(reason) < 400 and reason.isprintable() and "no[2J INFO: all is well !!" in reason
    (logged,) = {one for one in caplog.messages if "> node" in one}
    assert len(logged) < 500 and "\n" not in logged


def test_nodes_with_one_number_are_told_of(caplog):
    logging.getLogger("flwr").addHandler(caplog.handler)
    try:
        own = LocalGrid(app(), 4, node_config=lambda number: {"chunk": 1, "partition-id": number % 3})
        with pytest.warns(UserWarning, match="ψ"):
            strategy = start(own, 1)
    finally:
        logging.getLogger("flwr").removeHandler(caplog.handler)
    assert strategy.history[0].doubled == {0: 2}
    assert "2 nodes report client number 0, and all count; number each differently" in caplog.text


FORKED = """
import os, sys, threading
sys.path.insert(0, sys.argv[1])
from clients import server
from nodes import app, grid, start
from partnets.federated.client import taking_turns

held, done = threading.Event(), threading.Event()

def work():
    with taking_turns():
        held.set()
        done.wait()

thread = threading.Thread(target=work)
thread.start()
held.wait()
child = os.fork()
if not child:
    start(grid(app()), 1)
    os._exit(7)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
done.set()
thread.join()
sys.exit(code)
"""


@pytest.mark.full
def test_a_child_of_a_fork_does_not_wait_for_a_thread_that_it_lacks():
    command = [sys.executable, "-W", "ignore", "-c", FORKED, os.path.dirname(__file__)]
    assert subprocess.run(command, timeout=120, capture_output=True).returncode == 7


@pytest.mark.full
def test_threads_that_make_models_disturb_nobody():
    """Check that threads do not interfere, although make_model seeds the process's random states."""
    expected, found = state(start(grid(app(make_noisy)), 2, server(make_noisy)).server), []
    servers = [server(make_noisy) for _ in range(4)]

    def work(own):
        found.append(state(start(grid(app(make_noisy)), 2, own).server))

    threads = [threading.Thread(target=work, args=(own,)) for own in servers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and all(same(expected, each) for each in found)
