import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Use one thread: with small tensors on a busy machine, threads that wait for each other take ten times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
