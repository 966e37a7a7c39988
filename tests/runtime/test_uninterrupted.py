"""Work of the main thread is done by another, and an interrupt undoes it: at any line, and once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count

import pytest

from kvcluster.runtime import uninterrupted as module
from kvcluster.runtime.uninterrupted import MainCall, later, uninterrupted, without_interrupt
from tests.client.test_interrupts import interrupted
from tests.waiting import eventually


def here(call: object) -> int:
    return threading.get_ident()


def raising(call: object) -> int:
    raise LookupError("nothing there")


def test_the_main_thread_hands_its_work_over_and_others_do_theirs() -> None:
    assert uninterrupted(here) != threading.get_ident()
    with ThreadPoolExecutor(1) as other:
        assert other.submit(uninterrupted, here).result() == other.submit(threading.get_ident).result()
    with pytest.raises(LookupError, match="nothing there"):
        uninterrupted(raising)


def test_work_within_work_needs_no_other_thread() -> None:
    assert uninterrupted(lambda call: uninterrupted(here) == threading.get_ident())


class Undone:
    """Work whose result is undone if it is interrupted."""

    def __init__(self) -> None:
        self.done = 0
        self.undone = 0

    def work(self, call: object) -> int:
        self.done += 1
        return self.done

    def undo(self, result: int) -> None:
        self.undone += result

    def even(self) -> bool:
        return self.undone == self.done


@pytest.mark.parametrize("brief", [False, True])
def test_what_an_interrupted_call_has_done_is_undone_once(brief: bool) -> None:
    for line in count(1):
        one = Undone()
        if not interrupted(partial(uninterrupted, one.work, one.undo, brief=brief), line):
            break
        uninterrupted(here)
        eventually(one.even)
    assert line > 10 and (one.done, one.undone) == (1, 0)


class Copying:
    """Work that uses memory until it is cancelled, or for a moment."""

    def __init__(self) -> None:
        self.using = threading.Event()
        self._cancelled = threading.Event()

    def work(self, call: MainCall[None]) -> None:
        call.finish(self.using.set, lambda begun: self._cancelled.set(), self._wait)

    def _wait(self, begun: None) -> None:
        self._cancelled.wait(0.02)
        self.using.clear()


def test_memory_is_not_used_when_an_interrupted_call_has_raised() -> None:
    for line in count(1):
        copying = Copying()
        if not interrupted(partial(uninterrupted, copying.work), line):
            break
        assert not copying.using.is_set()
    assert line > 10


def test_without_room_for_a_thread_the_main_thread_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(module, "_THREADS", module.CallThreads())
    monkeypatch.setattr(module._thread, "start_new_thread", refuse)
    assert uninterrupted(here) == threading.get_ident()
    monkeypatch.undo()
    monkeypatch.setattr(module, "_THREADS", module.CallThreads())
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert uninterrupted(here) != threading.get_ident(), "there was room for one that does what waits"


def test_what_comes_later_is_not_waited_for() -> None:
    may_end, ended = threading.Event(), threading.Event()
    later(lambda: may_end.wait(20) and ended.set())
    assert not ended.is_set()
    may_end.set()
    eventually(ended.is_set)


def test_a_method_is_done_by_another_thread_than_the_main_one_with_its_arguments() -> None:
    class Holder:
        @without_interrupt()
        def who(self, first: int, *, second: int) -> tuple[int, int, int]:
            """Says who does it."""
            return first, second, threading.get_ident()

    first, second, thread = Holder().who(1, second=2)
    assert (first, second) == (1, 2) and thread != threading.get_ident()
    assert Holder.who.__doc__ == "Says who does it."
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: Holder().who(1, second=2)[2] == threading.get_ident()).result()
