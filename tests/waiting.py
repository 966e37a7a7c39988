"""Waiting for other processes: with a bound, and only as long as it takes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(look: Callable[[], T], timeout_s: float = 60.0) -> T:
    """The first answer of `look` that is true. Fails where none comes in time; the bound is for what hangs."""
    pause, give_up = threading.Event(), time.monotonic() + timeout_s
    while not (answer := look()):
        assert time.monotonic() < give_up, f"waited {timeout_s:.0f} s in vain; the last answer was {answer!r}"
        pause.wait(0.05)
    return answer
