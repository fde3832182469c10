import pytest
import torch

# On a GPU, TF32 products have a thousand times the error of float32 ones, and PyTorch does not report which it uses.
torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
