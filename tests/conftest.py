import pytest
import torch

# On a GPU a product in TF32 errs a thousand times as much as one in float32, and PyTorch does not say which it takes.
torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
