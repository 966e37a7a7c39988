"""KeyboardInterrupt within a call, at places that a trace function chooses."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

Trace = Callable[[FrameType, str, Any], Any]


def of_the_product(frame: FrameType) -> bool:
    return "/kvcluster/" in frame.f_code.co_filename


def interrupted_by(trace: Trace, call: Callable[[], object]) -> bool:
    """Makes a call under this trace function, and returns whether KeyboardInterrupt has ended it."""
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False
