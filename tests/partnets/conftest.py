import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """The tensors here are small: on a busy machine, threads that wait for one another take ten times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
