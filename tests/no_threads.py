"""A process that has no room for another thread, as under a limit of processes or of address space."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch


@contextmanager
def no_room_for_threads() -> Iterator[None]:
    """Within the block no thread starts, with the error that Python raises then."""
    with patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread")):
        yield
