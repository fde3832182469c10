"""Thread-local values are removed when their contexts end, in any order."""

import threading

from partkernels.autograd_threads import handed_on
from partnets.utils.in_thread import HANDED_ON, InThread, holding


def test_contexts_may_end_in_any_order_and_backward_threads_get_their_values():
    first, second = InThread(), InThread()
    outer, inner = holding({first: 1}), holding({second: 2})
    outer.__enter__()
    inner.__enter__()
    assert (handed_on(HANDED_ON)[first], handed_on(HANDED_ON)[second]) == (1, 2)
    outer.__exit__(None, None, None)
    assert (first.get(), second.get()) == (None, 2)
    inner.__exit__(None, None, None)
    assert (first.get(), second.get()) == (None, None)
    assert not {first, second} & handed_on(HANDED_ON).keys()


def test_nested_values_come_back_and_threads_have_their_own():
    value, seen = InThread(), []
    with holding({value: 1}):
        with holding({value: 2}):
            assert value.get() == 2
        assert value.get() == 1
        thread = threading.Thread(target=lambda: seen.append(value.get()))
        thread.start()
        thread.join()
    assert value.get() is None and seen == [None]
