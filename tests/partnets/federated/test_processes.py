"""The same app in one process, in Flower's simulation and in networked processes gives the same bits after crashes."""

import contextlib
import datetime
import ipaddress
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


def make_certificates(folder):
    """Create a self-signed certificate of this machine and its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    now = datetime.datetime.now(datetime.timezone.utc)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    made = made.serial_number(1).not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
    made = made.add_extension(address, critical=True)
    made = made.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    certificate, secret = folder / "certificate.pem", folder / "key.pem"
    certificate.write_bytes(made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    kind = serialization.PrivateFormat.PKCS8
    secret.write_bytes(key.private_bytes(serialization.Encoding.PEM, kind, serialization.NoEncryption()))
    return certificate, secret


class Network:
    """A SuperLink and the SuperNodes of the first clients on this machine, each in a group of processes."""

    def __init__(self, folder, secure, nodes=4):
        self.folder, self.programs = folder, {}
        port = free_port()
        certificate, key = make_certificates(folder) if secure else (None, None)
        trust = ["--root-certificates", certificate] if secure else ["--insecure"]
        self.environment = os.environ | {
            "FLWR_HOME": str(folder), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1",
            "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": f"{HERE}{os.pathsep}{os.environ['PYTHONPATH']}", "NO_PROXY": "*",
        }  # fmt: skip
        how = f'root-certificates = "{certificate}"' if secure else "insecure = true"
        (folder / "config.toml").write_text(f'[superlink.here]\naddress = "127.0.0.1:{port}"\n{how}\n')
        shown = ["--ssl-certfile", certificate, "--ssl-keyfile", key, "--ssl-ca-certfile", certificate]
        own = ["--disable-runtime-dependency-installation", "--host", "127.0.0.1", "--port", port]
        self.begin("superlink", "flower-superlink", *own, *(shown if secure else ["--insecure"]))
        self.wait(lambda: _answers(port), "the SuperLink answers")
        for number, chunk in enumerate(CHUNKS[:nodes]):
            config = f"partition-id={number} num-partitions={nodes} chunk={chunk}"
            own = ["--superlink", f"127.0.0.1:{port}", "--port", free_port(), "--node-config", config]
            self.begin(f"node{number}", "flower-supernode", *trust, *own)

    def begin(self, name, *command):
        with open(self.folder / f"{name}.log", "w") as log:
            self.programs[name] = subprocess.Popen(
                [*map(str, command)], stdout=log, stderr=log, env=self.environment, start_new_session=True
            )

    def kill(self, name):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.programs[name].pid, signal.SIGKILL)
        self.programs.pop(name).wait()

    def close(self):
        for name in [*self.programs]:
            self.kill(name)

    def flwr(self, *arguments):
        return subprocess.run(["flwr", *map(str, arguments)], cwd=PROJECT, env=self.environment, capture_output=True,
                              text=True, timeout=LONG)  # fmt: skip

    def run(self, *, wait=True, **config):
        """Run the app to its end and return whether it was completed."""
        told = " ".join(f"{name.replace('_', '-')}={json.dumps(value)}" for name, value in config.items())
        # Streaming the log waits for the end of the run. Polling would take longer, since each poll starts a process.
        self.flwr("run", ".", "here", "--run-config", told, *(["--stream"] if wait else []))
        return self.status() == "finished:completed"

    def status(self):
        """Return the status of the latest run, which the exit status of `flwr run` does not tell."""
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


@contextlib.contextmanager
def network(folder, **options):
    found = None
    try:
        found = Network(folder, **options)
        yield found
    finally:
        if found is not None:
            found.close()


@pytest.fixture(scope="module")
def secure(tmp_path_factory):
    with network(tmp_path_factory.mktemp("network"), secure=True) as found:
        yield found


def load(path):
    own = server(make_noisy)
    own.load(path)
    return own


def without(number, rounds):
    """Return the state after three rounds if a client misses some of them."""
    own = server(make_noisy)
    for each in range(1, 4):
        run(own, [client(i, make=make_noisy) for i in range(4) if i != number or each not in rounds], 1)
    return state(own)


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
def test_a_network_without_encryption_gives_the_same_bits(tmp_path):
    """Check the minimum: one client per chunk, and a second round that continues the first."""
    torch.set_num_threads(1)
    expected = state(start(grid(app(make_noisy), 3), 2, server(make_noisy)).server)
    with network(tmp_path, secure=False, nodes=3) as found:
        assert found.run(checkpoint=str(tmp_path / "server.pt"), rounds=2, min_nodes=3), found.logs()
    assert same(expected, state(load(tmp_path / "server.pt")))


@pytest.mark.full
def test_a_server_that_is_killed_goes_on_with_the_same_bits(secure, expected, tmp_path):
    path = tmp_path / "server.pt"
    assert not secure.run(checkpoint=str(path), server_dies_after=2), secure.logs()
    assert load(path).rounds == 2
    assert secure.run(checkpoint=str(path)), secure.logs()
    assert same(expected, state(load(path)))


@pytest.mark.full
def test_a_client_that_is_killed_is_left_out(secure, tmp_path):
    path = tmp_path / "server.pt"
    assert secure.run(checkpoint=str(path), client_dies_in=2), secure.logs()
    assert same(without(2, (2,)), state(load(path)))


@pytest.mark.full
def test_a_node_that_is_killed_is_left_out(secure, tmp_path):
    """Kill a node after round 1; Flower may still ask it in round 2. This must be the network's last test."""
    path = tmp_path / "server.pt"
    secure.run(wait=False, checkpoint=str(path), min_nodes=3)
    secure.wait(path.exists, "round 1 is done")
    secure.kill("node2")
    secure.wait(lambda: secure.status().startswith("finished"), "the run is finished")
    found = state(load(path))
    assert load(path).rounds == 3
    assert any(same(without(2, rounds), found) for rounds in ((2, 3), (3,))), secure.logs()
