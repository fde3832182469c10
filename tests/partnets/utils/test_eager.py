"""Compiled code runs eagerly within `eagerly`, independently of other threads."""

import threading

import torch

from partnets.utils.eager import eagerly


def test_of_two_threads_the_last_one_to_leave_puts_the_compiler_back():
    compiled = torch.compile(lambda x: torch.compiler.is_compiling(), backend="eager")
    first_left, second_entered = threading.Event(), threading.Event()
    found = []

    def second():
        with eagerly():
            second_entered.set()
            assert first_left.wait(60)
            found.append(compiled(torch.ones(1)))

    thread = threading.Thread(target=second)
    with eagerly():
        thread.start()
        assert second_entered.wait(60)
    first_left.set()
    thread.join()
    assert found == [False] and compiled(torch.ones(1))
