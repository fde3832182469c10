"""A run of Lightning or Hugging Face whose second process dies resumes to the same bits.

As a program, it is that run: torchrun test_distributed_killed.py ENGINE FOLDER. It resumes from the last checkpoint in
the folder. Rank 0 writes the weights at the end to FOLDER/end.pt.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

sys.path[:0] = [str(folder) for folder in Path(__file__).parents[:3]]

import cpu_torchvision  # noqa: E402, F401 - a program reads no conftest.py
import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402


def die(step):
    """Kill the second process after a step, once; not in a run without torchrun."""
    if step == 5 and dist.get_rank() == 1 and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
        os.kill(os.getpid(), signal.SIGKILL)


def by_lightning(folder):
    import test_distributed_lightning as lightning

    class Classifier(lightning.Classifier):
        def on_train_batch_end(self, *_):
            die(self.global_step // 2)

    lightning.Classifier = Classifier
    return lightning.fit(folder, noise=0.3, save=True, resume=next(folder.glob("step=8*.ckpt"), None))


def by_hugging_face(folder):
    import test_distributed_hugging_face as hugging_face
    from transformers import TrainerCallback

    class Dies(TrainerCallback):
        def on_step_end(self, arguments, state, control, **_):
            die(state.global_step)

    saved = folder / "checkpoint-3"
    options = {"save_steps": 3, "callbacks": [Dies()]}
    return hugging_face.train(str(folder), {"noise": 0.3}, options, str(saved) if saved.exists() else None)[1]


ENGINES = {"lightning": by_lightning, "hugging_face": by_hugging_face}


@pytest.mark.full  # starts torchrun and two processes, twice
@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_resumed_after_a_killed_process_ends_with_the_same_bits(two_ranks, tmp_path, engine):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    folder = tmp_path / "killed"
    command = [*torchrun, __file__, engine, str(folder)]
    killed = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert killed.returncode == 0 and "exitcode: -9" in killed.stderr, killed.stderr
    expected, _ = two_ranks(ENGINES[engine], tmp_path / "complete")
    assert all(map(torch.equal, torch.load(folder / "end.pt"), expected))


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = ENGINES[sys.argv[1]](Path(sys.argv[2]))
    if dist.get_rank() == 0:
        torch.save(found, Path(sys.argv[2]) / "end.pt")
    dist.destroy_process_group()
