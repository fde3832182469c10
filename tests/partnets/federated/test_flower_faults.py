"""Nodes that fail, are late, lie or attack: the global model is, to the bit, as if they had not been asked."""

import io
import logging
import math
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from clients import CHUNKS, client, run, same, server, state

pytest.importorskip("flwr", reason="Flower needs Python 3.11")

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from nodes import app, grid, hurting, start

from partnets.federated.flower import LocalGrid, PartitionedFedAvg

# The node with the number 3 is client 2, of chunk 3.
NODE, W3, PSI = 3, "w3.float32", "gradient.hyper.float32"


def without(number, rounds=3, missing=2):
    """The state after so many rounds, of which one without this client."""
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
    """Changes w_3 as an array of NumPy's."""
    return put(W3, lambda array: Array(change(array.numpy().copy())))


def npy(array, **options):
    file = io.BytesIO()
    np.lib.format.write_array(file, array, **options)
    return file.getvalue()


def lying_content(change):
    """Says w_3's dtype and shape, and has something else inside."""
    return put(W3, lambda array: Array(array.dtype, array.shape, array.stype, change(array)))


def spoiled_entry(value):
    def change(vector):
        vector[1] = value
        return vector

    return change


class Bomb:
    """What runs code where it is unpickled."""

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
    "a loss of another partition": put_metric("loss-1", [1.0]),
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
    assert [[*found.refused] for found in strategy.history] == [[], [NODE], []] and not strategy.failed[2]


def failing(node, what):
    honest = app()

    def call(message, context):
        if context.node_id == node and message.content["config"]["round"] == 2:
            return what(message)
        return honest(message, context)

    return call


def test_a_node_that_raises_has_failed(expected):
    def crash(message):
        raise MemoryError("there is no more")

    strategy = start(grid(failing(NODE, crash)), 3)
    assert same(expected, state(strategy.server))
    assert "MemoryError: there is no more" in strategy.failed[2][NODE] and not strategy.failed[3]


def test_a_node_that_answers_something_else_is_refused(expected):
    def answer(message):
        return Message(RecordDict({"metrics": MetricRecord({"loss": 1.0})}), reply_to=message)

    strategy = start(grid(failing(NODE, answer)), 3)
    assert same(expected, state(strategy.server)) and [*strategy.history[1].refused] == [NODE]


def test_what_comes_after_the_timeout_is_not_heard(expected):
    """Nor in the next round."""

    def late(reply):
        time.sleep(1.5)

    strategy = start(grid(hurting(late, NODE)), 3, timeout=1.0)
    assert same(expected, state(strategy.server))
    assert strategy.failed[2] == {NODE: "it did not reply in time"}


class Tampered(LocalGrid):
    """A network of which one changes what arrives in round 2."""

    def __init__(self, tamper):
        super().__init__(app(), 4, node_config=lambda number: {"chunk": CHUNKS[number]})
        self.tamper, self.rounds, self.seen = tamper, 0, []

    def send_and_receive(self, messages, *, timeout=None):
        messages = [*messages]
        if not messages:  # of the evaluation, which there is none of
            return messages
        self.rounds += 1
        replies = [*super().send_and_receive(messages, timeout=timeout)]
        self.seen.append(replies)
        return self.tamper(replies, self.seen) if self.rounds == 2 else replies


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
    assert NODE in {*strategy.history[1].refused, *strategy.failed[2]}


def test_who_was_not_asked_is_not_heard():
    def stranger(replies, seen):
        return [*replies, Message(replies[-1].content, reply_to=Message(RecordDict(), 9, "train"))]

    strategy = start(Tampered(stranger), 3)
    assert same(without(None), state(strategy.server)) and strategy.history[1].refused == {9: "it was not asked"}


def test_rounds_without_any_reply_change_nothing():
    def crash(message, context):
        raise RuntimeError("all are gone")

    strategy = PartitionedFedAvg(server())
    with pytest.raises(RuntimeError, match=r"no node has contributed in 2 rounds.* node 1: RuntimeError: all are gone"):
        strategy.start(grid(crash), num_rounds=2)
    assert same(state(server()), state(strategy.server)) and strategy.server.rounds == 2
    assert strategy.history[1].contributors == {1: 0, 2: 0, 3: 0} and len(strategy.failed[2]) == 4


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


@pytest.mark.parametrize("call", [2, 7])
def test_a_killed_server_goes_on_with_the_same_bits(call, tmp_path):
    """Killed within round 1 or 2 of four clients each."""
    checkpoint = tmp_path / "server.pt"
    done = subprocess.run(
        [sys.executable, "-c", KILLED, os.path.dirname(__file__), str(checkpoint), str(call)], capture_output=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert checkpoint.exists() == (call > 4)
    strategy = start(grid(app()), 3, checkpoint=checkpoint)
    assert same(state(start(grid(app()), 3).server), state(strategy.server))
    assert [found.number for found in strategy.history] == ([2, 3] if call > 4 else [1, 2, 3])
