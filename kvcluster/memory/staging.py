"""A staging buffer: private memory that bytes pass through, small enough that they stay in the CPU cache."""

from __future__ import annotations

from kvcluster.memory.region import address_of

_ALIGNMENT = 64


class Staging:
    """A buffer as large as the largest piece so far. Used by one thread."""

    def __init__(self) -> None:
        self._buffer = memoryview(b"")

    def room(self, nbytes: int) -> memoryview:
        """Returns `nbytes` bytes of the buffer, which earlier results share; their content is undefined. They begin at
        a multiple of 64 bytes."""
        if self._buffer.nbytes < nbytes:
            whole = memoryview(bytearray(nbytes + _ALIGNMENT))
            self._buffer = whole[-address_of(whole) % _ALIGNMENT :]
        return self._buffer[:nbytes]
