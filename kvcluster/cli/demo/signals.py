"""Turns Ctrl-C and SIGTERM into exceptions that unwind the stack, so that everything that was started is ended."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any


class Signals:
    """Within a `with` block SIGINT raises KeyboardInterrupt and SIGTERM SystemExit, in the main thread."""

    def __init__(self) -> None:
        self._received: list[int] = []
        self._put_off = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        self._before = self._install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def put_off(self) -> Iterator[None]:
        """Delays the first signal until the end of the block; a second signal raises at once.

        For a start that cannot be ended half-way: Ray would lose the exception, or leave its agents behind for a
        minute.
        """
        self._put_off = True
        try:
            yield
        finally:
            self._put_off = False
            self._install()  # Ray replaces the SIGTERM handler
        if self._received:
            self._end()

    def _install(self) -> dict[int, Any]:
        """Installs the handlers and returns the previous ones."""
        return {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}

    def _handle(self, number: int, frame: object) -> None:
        self._received.append(number)
        if not self._put_off or len(self._received) > 1:
            self._end()

    def _end(self) -> None:
        if signal.SIGTERM in self._received:
            raise SystemExit(128 + signal.SIGTERM)
        raise KeyboardInterrupt
