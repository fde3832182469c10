"""The same app in one process, in Flower's simulation and in networked processes gives the same bits after crashes."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from clients import CHUNKS, client, make_noisy, run, same, server, state

pytest.importorskip("flwr", reason="Flower needs Python 3.11")

from nodes import app, grid, start

HERE = Path(__file__).parent
ROOT, PROJECT = HERE.parents[2], HERE / "flower_project"
# Timeout of one program in seconds.
LONG = 300


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Network:
    """A SuperLink and the SuperNodes of all clients on this machine, each in a group of processes."""

    def __init__(self, folder):
        self.folder, self.programs, port = folder, {}, free_port()
        self.environment = os.environ | {
            "FLWR_HOME": str(folder), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1",
            "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": f"{HERE}{os.pathsep}{os.environ['PYTHONPATH']}", "NO_PROXY": "*",
        }  # fmt: skip
        (folder / "config.toml").write_text(f'[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n')
        own = ["--disable-runtime-dependency-installation", "--host", "127.0.0.1", "--port", port]
        self.begin("superlink", "flower-superlink", *own, "--insecure")
        self.wait(lambda: _answers(port), "the SuperLink answers")
        for number, chunk in enumerate(CHUNKS):
            config = f"partition-id={number} num-partitions={len(CHUNKS)} chunk={chunk}"
            own = ["--superlink", f"127.0.0.1:{port}", "--port", free_port(), "--node-config", config]
            self.begin(f"node{number}", "flower-supernode", "--insecure", *own)

    def begin(self, name, *command):
        with open(self.folder / f"{name}.log", "w") as log:
            self.programs[name] = subprocess.Popen(
                [*map(str, command)], stdout=log, stderr=log, env=self.environment, start_new_session=True
            )

    def close(self):
        for program in self.programs.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
            program.wait()

    def flwr(self, *arguments):
        return subprocess.run(["flwr", *map(str, arguments)], cwd=PROJECT, env=self.environment, capture_output=True,
                              text=True, timeout=LONG)  # fmt: skip

    def run(self, **config):
        """Run the app to its end; return whether it was completed, which the exit status of `flwr` does not tell."""
        told = " ".join(f"{name.replace('_', '-')}={json.dumps(value)}" for name, value in config.items())
        # Streaming the log waits for nearly the end of the run; only polling would start many processes.
        self.flwr("run", ".", "here", "--run-config", told, "--stream")
        self.wait(lambda: self.status().startswith("finished"), "the run is finished")
        return self.status() == "finished:completed"

    def status(self):
        """Return the status of the latest run."""
        found = json.loads(self.flwr("list", "here", "--format", "json").stdout)["runs"]
        return max(found, key=lambda each: each["pending-at"])["status"]

    def wait(self, condition, what):
        end = time.monotonic() + LONG
        while not condition():
            assert time.monotonic() < end, f"not in {LONG} s: {what}\n{self.logs()}"
            time.sleep(0.5)

    def logs(self):
        return "\n".join(f"{path.name}:\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log")))


def _answers(port):
    with socket.socket() as found:
        return found.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    found = Network(tmp_path_factory.mktemp("network"))
    yield found
    found.close()


def load(path):
    own = server(make_noisy)
    own.load(path)
    return own


@pytest.fixture(scope="module")
def expected():
    torch.set_num_threads(1)
    return state(start(grid(app(make_noisy)), 3, server(make_noisy)).server)


def test_the_nodes_of_the_page_ask_where_its_superlink_answers():
    page = (ROOT / "docs" / "federated.md").read_text()
    [(host, port)] = re.findall(r"--host (\S+) --port (\d+)", page)
    assert host == "0.0.0.0"  # the default is not reachable from other machines
    assert re.findall(r"example\.org:(\d+)", page) == [port] * 2  # for a SuperNode and for flwr run


@pytest.mark.full
def test_flowers_simulation_gives_the_same_bits(expected, tmp_path):
    pytest.importorskip("ray", reason="Flower's simulation needs Ray")
    code = f"""
from flwr.simulation import run_simulation
from flwr.serverapp import ServerApp
import clients, nodes
server = ServerApp()

@server.main()
def main(grid, context):
    nodes.start(grid, 3, clients.server(clients.make_noisy), checkpoint={str(tmp_path / "server.pt")!r}, min_nodes=4)

def chunked(message, context, call):
    context.node_config["chunk"] = clients.CHUNKS[context.node_config["partition-id"]]
    return call(message, context)

run_simulation(server, nodes.app(clients.make_noisy, mods=[chunked]), 4)
"""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    environment |= {"PYTHONPATH": f"{HERE}{os.pathsep}{os.environ['PYTHONPATH']}", "FLWR_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=LONG)
    assert (tmp_path / "server.pt").exists(), done.stderr[-5000:]
    assert same(expected, state(load(tmp_path / "server.pt")))


@pytest.mark.full
def test_networked_processes_give_the_same_bits(network, expected, tmp_path):
    assert network.run(checkpoint=str(tmp_path / "server.pt")), network.logs()
    assert same(expected, state(load(tmp_path / "server.pt")))


@pytest.mark.full
def test_a_client_that_is_killed_is_left_out(network, tmp_path):
    path, own = tmp_path / "server.pt", server(make_noisy)
    assert network.run(checkpoint=str(path), client_dies_in=2), network.logs()
    for number in range(1, 4):
        run(own, [client(i, make=make_noisy) for i in range(4) if i != 2 or number != 2], 1)
    assert same(state(own), state(load(path)))
