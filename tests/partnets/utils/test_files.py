"""Files are replaced atomically: by several threads, through links, and if a process is killed."""

import os
import subprocess
import sys
import threading
import time

import pytest
import torch

from partnets.utils import sealed
from partnets.utils.files import OLD, replacing

# Forks processes that save 2 MB files of one repeated number until they are killed. Forks more if no process was killed
# while writing: on a busy machine, some are killed before they begin.
KILLS = """
import itertools, os, random, signal, sys, time, torch
from partnets.utils import sealed
torch.set_num_threads(1)  # the child of a fork has no others, and would wait for them
path, kills, rng, left = sys.argv[1], int(sys.argv[2]), random.Random(0), 0
save = lambda number: sealed.save({"x": torch.full((250_000,), number)}, path)
save(0)
for i in itertools.count(1):
    child, number = os.fork(), 1_000_000 * i
    while not child:
        number += 1
        save(number)
    time.sleep(rng.random() / 10)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    x = sealed.load(path, "file")["x"]
    assert (x == x[0]).all() and x[0] // 1_000_000 in range(i + 1)
    left = len(os.listdir(os.path.dirname(path))) - 1
    if i >= kills and left or i == 20 * kills:
        break
print(left)
"""


def write(path, text="new"):
    with replacing(path) as file:
        file.write(text)


@pytest.mark.full
def test_saving_deletes_temporary_files_of_killed_processes_after_a_day(tmp_path):
    path = tmp_path / "checkpoint [1].pt"
    done = subprocess.run([sys.executable, "-c", KILLS, str(path), "6"], capture_output=True, text=True, check=True)
    left = [tmp_path / name for name in os.listdir(tmp_path) if name != path.name]
    assert int(done.stdout) == len(left) > 0
    for file in left:
        os.utime(file, (time.time() - OLD - 1,) * 2)
    sealed.save({}, path)
    assert os.listdir(tmp_path) == [path.name]


def test_a_write_keeps_the_temporary_file_of_an_unfinished_write(tmp_path):
    path = tmp_path / "notes.txt"
    with replacing(path) as file:
        write(path, "between")
        file.write("last")
        assert path.read_text() == "between" and len(os.listdir(tmp_path)) == 2
    assert path.read_text() == "last" and os.listdir(tmp_path) == ["notes.txt"]


@pytest.mark.parametrize("name", ["a" * 255, "ü" * 127])
def test_names_may_be_as_long_as_the_file_system_takes(name, tmp_path):
    write(tmp_path / name)
    assert os.listdir(tmp_path) == [name]


def test_threads_that_write_to_one_path_all_do(tmp_path):
    path = tmp_path / "notes.txt"

    def writes(name):
        for i in range(30):
            write(path, f"{name} {i} " * 1000)

    threads = [threading.Thread(target=writes, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    words = path.read_text().split()
    assert words[:2] * 1000 == words and words[1] == "29" and os.listdir(tmp_path) == ["notes.txt"]


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_and_the_file_that_it_leads_to_is_replaced(there, tmp_path):
    (tmp_path / "files").mkdir()
    target, link, second = tmp_path / "files" / "notes.txt", tmp_path / "latest", tmp_path / "second"
    if there:
        target.write_text("old")
        target.chmod(0o640)
    link.symlink_to("files/notes.txt")
    second.symlink_to(link)
    write(second)
    assert second.is_symlink() and link.is_symlink() and target.read_text() == "new"
    assert not there or target.stat().st_mode & 0o777 == 0o640
    assert sorted(os.listdir(tmp_path)) == ["files", "latest", "second"] and os.listdir(target.parent) == ["notes.txt"]


def test_paths_that_are_not_files_are_refused_and_unchanged(tmp_path):
    pipe, loop = tmp_path / "pipe", tmp_path / "loop"
    os.mkfifo(pipe)
    loop.symlink_to(loop)
    for path, message in (
        (pipe, "is a device, a pipe or a socket; pass the path of a file"),
        (tmp_path, "is a folder; pass the path of a file in it"),
        (loop, "symbolic links"),
        (tmp_path / "none" / "notes.txt", "none"),
    ):
        for use in (write, lambda path: sealed.save({}, path), lambda path: sealed.load(path, "file")):
            with pytest.raises(OSError, match=message):
                use(path)
    assert sorted(os.listdir(tmp_path)) == ["loop", "pipe"] and pipe.is_fifo()


def test_a_full_disk_leaves_the_old_file_unchanged(tmp_path, monkeypatch):
    path = tmp_path / "notes.txt"
    write(path, "old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write(path)
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["notes.txt"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content[:500] + bytes([content[500] ^ 1]) + content[501:], "damaged: it has another checksum"),
        (lambda content: content[:-1], "is not a file of ours"),
        (lambda content: content[:-48], "is not a file of ours"),
        (lambda content: b"", "is not a file of ours"),
    ],
)
def test_a_damaged_file_is_named(damage, message, tmp_path):
    path = tmp_path / "one.pt"
    sealed.save({"x": torch.ones(200)}, path)
    assert torch.equal(sealed.load(path, "file of ours; pass one.")["x"], torch.ones(200))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=message):
        sealed.load(path, "file of ours; pass one.")
    with pytest.raises(ValueError, match=r"would need .*, which Trainer.load does not run"):
        sealed.save({"x": ValueError}, path)
