"""Processes in a gloo group, kept for all tests of a session because starting them takes longer than the tests."""

import datetime
import os
import traceback

import cpu_torchvision  # noqa: F401 - these processes read no conftest.py
import torch
import torch.distributed as dist
from processes import CONTEXT

# Long enough for a busy machine; deadlocked ranks fail after this time.
TIMEOUT = datetime.timedelta(seconds=60)


class Ranks:
    """A group of processes. Calling it with a function and arguments returns the list of each rank's result."""

    def __init__(self, count, store):
        self.pipes, self.processes = [], []
        for rank in range(count):
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_serve, args=(rank, count, store, theirs), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def __call__(self, function, *arguments):
        for pipe in self.pipes:
            pipe.send((function, arguments))
        answers = [pipe.recv() for pipe in self.pipes]
        for failure, _ in answers:
            assert failure is None, failure
        return [answer for _, answer in answers]

    def close(self):
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join()


def _serve(rank, count, store, pipe):
    torch.set_num_threads(1)
    # What torchrun sets, for Lightning and Hugging Face.
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    os.environ |= {name: str(value) for name, value in ranks.items()}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count, timeout=TIMEOUT)
    while (task := pipe.recv()) is not None:
        function, arguments = task
        torch.manual_seed(0)
        try:
            pipe.send((None, function(*arguments)))
        except Exception:
            pipe.send((traceback.format_exc(), None))
    dist.destroy_process_group()
