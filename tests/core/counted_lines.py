"""Counted work: the lines of Python that a call executes, which do not depend on the machine."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")


def counted(call: Callable[[], T]) -> tuple[T, int]:
    """What the call returns, and the lines that were executed for it: not those of finalizers, if what other tests left
    is collected meanwhile."""
    lines = 0

    def count(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()
    sys.settrace(count)
    try:
        returned = call()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return returned, lines
