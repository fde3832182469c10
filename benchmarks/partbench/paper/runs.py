"""runs: the trainings of an experiment, each stored in a separate file, so that an interruption loses only a part."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from multiprocessing import get_context
from pathlib import Path

import torch
from tqdm import tqdm

import partnets
from partbench.paper.experiment import Experiment, Record
from partnets.utils.files import replacing

# Steps between checkpoints of a long training.
CHECKPOINT_EVERY = 500


def run(
    experiment: Experiment, settings: Sequence[Record], folder: Path, *, jobs: int = 1, device: str = "cpu"
) -> list[Record]:
    """Run the trainings that have no file in the folder yet, and return all records in the settings' order.

    Args:
        folder: has one file for each training, named by its settings; created if missing.
        jobs: the number of trainings at once, each in a process with an equal share of the threads.
        device: of the networks; data stay on the CPU.
    """
    folder.mkdir(parents=True, exist_ok=True)
    missing = [setting for setting in settings if not path_of(folder, setting).exists()]
    threads = max(1, torch.get_num_threads() // jobs)
    with tqdm(total=len(settings), initial=len(settings) - len(missing), desc=experiment.name, unit="training") as bar:
        for setting in missing if jobs == 1 else ():
            _train(experiment, setting, folder, threads, device)
            bar.update()
        if jobs > 1:  # forked processes would inherit the threads' locks
            with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
                waiting = [pool.submit(_train, experiment, setting, folder, threads, device) for setting in missing]
                for future in as_completed(waiting):
                    future.result()
                    bar.update()
    return finished(folder, settings)


def restore(folder: Path, settings: Sequence[Record], records: Sequence[Record], source: Path) -> None:
    """Write a file for each training that has a result among the records but no file yet.

    So a file of results is enough to continue, also on another machine.

    Raises:
        ValueError: a record matches none of the settings, and would be lost.
    """
    folder.mkdir(parents=True, exist_ok=True)
    left = list(records)
    for setting in settings:
        path, done = path_of(folder, setting), [one for one in left if setting.items() <= one.items()]
        left = [one for one in left if one not in done]
        if done and not path.exists():
            _write(path, done[0])
    if left:
        raise ValueError(f"{source} has {len(left)} trainings with other settings, such as {left[0]}; move it away.")


def finished(folder: Path, settings: Sequence[Record]) -> list[Record]:
    """Return the records of the trainings that have a file in the folder, in the settings' order."""
    return [_read(path, setting) for setting in settings if (path := path_of(folder, setting)).exists()]


def fit(trainer: partnets.Trainer, steps: int, checkpoint: Path) -> partnets.History:
    """Train up to this many steps in total, from the checkpoint if it exists, and save one at the end."""
    trainer.callbacks.append(partnets.callbacks.every(CHECKPOINT_EVERY, lambda trainer: trainer.save(checkpoint)))
    if checkpoint.exists():
        trainer.load(checkpoint)
    if trainer.steps < steps:
        trainer.fit(steps - trainer.steps)
        trainer.save(checkpoint)
    return trainer.history


def _train(experiment: Experiment, setting: Record, folder: Path, threads: int, device: str) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(setting["seed"])
    path = path_of(folder, setting)
    start = time.perf_counter()
    # torch.compile does not trace through a default device, not even the CPU.
    where = nullcontext() if device == "cpu" else torch.device(device)
    kind = torch.device(device).type
    with where, torch.autocast(kind, torch.bfloat16, enabled=setting.get("bfloat16", False)):
        result = experiment.train(setting, path.with_suffix(".checkpoint"))
    record = {**setting, **result, "seconds": round(time.perf_counter() - start, 1)}
    _write(path, record)
    for checkpoint in folder.glob(f"{path.stem}.*"):
        if checkpoint != path:
            checkpoint.unlink()


def _write(path: Path, record: Record) -> None:
    with replacing(path) as file:
        json.dump(record, file)


def _read(path: Path, setting: Record) -> Record:
    try:
        record = json.loads(path.read_text())
        if not setting.items() <= record.items():
            raise ValueError("it belongs to another training")
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); delete it to repeat the training.") from error
    return record


def path_of(folder: Path, setting: Record) -> Path:
    """Return the file of a training, named by its settings."""
    digest = hashlib.blake2b(json.dumps(setting, sort_keys=True).encode(), digest_size=8).hexdigest()
    return folder / f"{digest}.json"
