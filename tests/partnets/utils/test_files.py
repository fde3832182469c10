"""Files are replaced atomically: by several threads, through links, and if a process is killed."""

import os
import subprocess
import sys
import threading

import pytest

from partnets.utils import sealed
from partnets.utils.files import replacing

# Forks processes that save 2 MB files of one repeated number until they are killed, and prints how many temporary files
# they left. Forks more if no process was killed while writing: on a busy machine, some are killed before they begin.
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
    left += len(os.listdir(os.path.dirname(path))) - 1
    if i >= kills and left or i == 20 * kills:
        break
save(0)
print(left)
"""


def write(path, text="new"):
    with replacing(path) as file:
        file.write(text)


@pytest.mark.full
@pytest.mark.parametrize("kills", [6])
def test_where_a_process_is_killed_one_of_its_files_is_there_and_nothing_of_it_after_the_next(kills, tmp_path):
    path = tmp_path / "checkpoint [1].pt"
    done = subprocess.run(
        [sys.executable, "-c", KILLS, str(path), str(kills)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout)
    assert os.listdir(tmp_path) == [path.name]


def test_what_another_still_writes_is_left_alone(tmp_path):
    path = tmp_path / "notes.txt"
    with replacing(path) as file:
        write(path, "between")
        file.write("last")
        assert path.read_text() == "between" and len(os.listdir(tmp_path)) == 2
    assert path.read_text() == "last" and os.listdir(tmp_path) == ["notes.txt"]


@pytest.mark.parametrize("name", ["a" * 255, "ü" * 127])
def test_names_may_be_as_long_as_the_file_system_takes(name, tmp_path):
    path = tmp_path / name
    with replacing(path) as file, replacing(tmp_path / name[:-1]) as other:
        file.write("long")
        other.write("shorter")
    assert path.read_text() == "long" and len(os.listdir(tmp_path)) == 2


def test_what_another_host_or_another_file_has_left_is_kept(tmp_path):
    for name in (".notes.txt.00000000.ab", ".notes.txt.old.00000000.ab", ".notes.txt"):
        (tmp_path / name).touch()
    write(tmp_path / "notes.txt")
    assert len(os.listdir(tmp_path)) == 4


def test_threads_that_write_to_one_path_all_do(tmp_path):
    path, errors = tmp_path / "notes.txt", []

    def writes(name):
        try:
            for i in range(30):
                write(path, f"{name} {i} " * 1000)
        except OSError as error:
            errors.append(error)

    threads = [threading.Thread(target=writes, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and os.listdir(tmp_path) == ["notes.txt"]
    words = path.read_text().split()
    assert words[:2] * 1000 == words and words[1] == "29"


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_and_what_it_leads_to_is_replaced(there, tmp_path):
    (tmp_path / "files").mkdir()
    target, link, second = tmp_path / "files" / "notes.txt", tmp_path / "latest", tmp_path / "second"
    if there:
        target.write_text("old")
    link.symlink_to("files/notes.txt")
    second.symlink_to(link)
    write(second)
    assert second.is_symlink() and link.is_symlink() and target.read_text() == "new"
    assert sorted(os.listdir(tmp_path)) == ["files", "latest", "second"] and os.listdir(target.parent) == ["notes.txt"]


def test_what_is_no_file_is_refused_and_stays(tmp_path):
    pipe, loop = tmp_path / "pipe", tmp_path / "loop"
    os.mkfifo(pipe)
    loop.symlink_to(loop)
    (tmp_path / "null").symlink_to("/dev/null")
    for path, message in (
        (pipe, "is a device, a pipe or a socket; pass the path of a file"),
        (tmp_path / "null", "is a device, a pipe or a socket"),
        (tmp_path, "is a folder; pass the path of a file in it"),
        (loop, "symbolic links"),
    ):
        for use in (write, lambda path: sealed.save({}, path), lambda path: sealed.load(path, "file")):
            with pytest.raises(OSError, match=message) as error:
                use(path)
            assert str(path) in str(error.value)
    assert sorted(os.listdir(tmp_path)) == ["loop", "null", "pipe"]
    assert pipe.is_fifo() and os.path.exists("/dev/null") and not os.path.isfile("/dev/null")


def test_a_disk_that_is_full_leaves_the_old_file_alone(tmp_path, monkeypatch):
    path = tmp_path / "notes.txt"
    write(path, "old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write(path)
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["notes.txt"]


def test_without_locks_files_are_written_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr("partnets.utils.files.fcntl", None)
    path = tmp_path / "notes.txt"
    write(path, "old")
    write(path)
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["notes.txt"]
