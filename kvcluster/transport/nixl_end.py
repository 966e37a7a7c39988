"""One end of a NIXL connection: an agent of its own, and memory of its own that the other end writes into.

NIXL moves bytes by UCX: by RDMA where both machines have it, otherwise over TCP or, on one host, from process to
process. UCX trusts its peers: one that has connected may write into the memory that it was given at any time, and over
TCP it names the address itself. So an end gives away neither pages nor blocks. What arrives is copied from its memory,
and verified as it is copied. NIXL ends no transfer that has begun: an end whose transfer did not end is destroyed with
its agent and all connections of that, before its memory is released. After that nothing arrives.

An agent's own thread would never sleep, so it has none: `progress` is called while an exchange waits.
"""

from __future__ import annotations

import logging
import mmap
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

from kvcluster.core import limits
from kvcluster.core.miss import Miss, MissReason
from kvcluster.extras import needs
from kvcluster.pages.region import address_of
from kvcluster.transport.base import Deadline, Unavailable

SLOT_BYTES = 2 * limits.FRAME_BYTES
SLOTS = 2
"""One is on its way while the other is gathered, or copied and verified."""

END_BYTES = 2 * SLOTS * SLOT_BYTES
"""The memory of an end: slots that the other end writes into, and as many that are written from."""

_DESCRIPTORS = 16
"""File descriptors that an agent takes; UCX's own depend on the networks of the machine."""

_LOOKS = 32
"""A transfer that is under way is asked so many times whether it has ended before its deadline is looked at."""


class NixlEnd:
    """One end, of one thread. `metadata` and `address` are what the other end needs to write into it."""

    descriptors = _DESCRIPTORS

    def __init__(self, peer: str) -> None:
        """Raises KVClusterError if NIXL is not installed, Unavailable if it cannot be used here."""
        api = nixl()
        self._peer = peer
        self._memory = memoryview(mmap.mmap(-1, END_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        self.address = address_of(self._memory)
        self._other, self._theirs = "", 0
        self._transfer: Any = None
        half = END_BYTES // 2
        with self._unless_lost():
            self._agent = api.nixl_agent(
                secrets.token_hex(16), api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            )
            self._agent.register_memory([(self.address, half, 0, "")], "DRAM")
            self.metadata: bytes = self._agent.get_agent_metadata()  # before the half that only this end touches
            self._agent.register_memory([(self.address + half, half, 0, "")], "DRAM")

    def join(self, address: int, metadata: bytes) -> None:
        """Learns of the other end. Raises Unavailable if that is none."""
        with self._unless_lost():
            other = self._agent.add_remote_agent(metadata)
        self._other, self._theirs = other.decode() if isinstance(other, bytes) else other, address

    def arrived(self, slot: int, nbytes: int) -> memoryview:
        """Returns the first bytes of a slot that the other end writes into. They may change at any time."""
        return self._memory[slot * SLOT_BYTES : slot * SLOT_BYTES + nbytes]

    def outgoing(self, slot: int) -> memoryview:
        """Returns the slot from which that slot of the other end is written."""
        return self._memory[(SLOTS + slot) * SLOT_BYTES : (SLOTS + slot + 1) * SLOT_BYTES]

    def begin(self, slot: int, nbytes: int) -> None:
        """Begins to write so many bytes of `outgoing(slot)` into that slot of the other end. One transfer is under way
        at a time. Raises Unavailable."""
        assert self._transfer is None
        mine, theirs = address_of(self.outgoing(slot)), self._theirs + slot * SLOT_BYTES
        with self._unless_lost():
            local = self._agent.get_xfer_descs([(mine, nbytes, 0)], "DRAM")
            remote = self._agent.get_xfer_descs([(theirs, nbytes, 0)], "DRAM")
            self._transfer = self._agent.initialize_xfer("WRITE", local, remote, self._other)
            self._agent.transfer(self._transfer)

    def finish(self, deadline: Deadline, look: Callable[[], None]) -> None:
        """Returns once the bytes of that transfer lie in the other end's memory. Calls `look` meanwhile, which may
        raise. Raises Unavailable if the transfer fails, or has not ended by the deadline; no other may follow then."""
        asked = 0
        with self._unless_lost():
            while (state := self._agent.check_xfer_state(self._transfer)) == "PROC":
                asked += 1
                if not asked % _LOOKS:
                    deadline.check(self._peer)
                    look()
                time.sleep(0)  # for the other threads of this process
            if state != "DONE":
                raise RuntimeError(f"a transfer ended as {state}")
            transfer, self._transfer = self._transfer, None
            self._agent.release_xfer_handle(transfer)

    def progress(self) -> None:
        """Lets bytes of the other end arrive. Raises Unavailable."""
        with self._unless_lost():
            self._agent.get_new_notifs()

    def close(self) -> None:
        """When this returns, nothing arrives, and nothing is sent, any more."""
        if self._agent is None:
            return
        until = time.monotonic() + 0.3
        if self._transfer is not None:
            with suppress(Exception):
                while self._agent.check_xfer_state(self._transfer) == "PROC" and time.monotonic() < until:
                    self._agent.get_new_notifs()
            with suppress(Exception):  # it is still under way
                self._agent.release_xfer_handle(self._transfer)
            for _ in range(50):
                self._agent.get_new_notifs()
                time.sleep(0.001)
        self._agent = self._transfer = None

    @contextmanager
    def _unless_lost(self) -> Iterator[None]:
        """Raises Unavailable for an error of NIXL, whose kinds have nothing in common."""
        try:
            yield
        except Unavailable:
            raise
        except Exception as error:
            words = str(error) or type(error).__name__
            raise Unavailable(Miss(MissReason.SHARD_LOST, f"{self._peer}: NIXL: {words}")) from None


def nixl() -> Any:
    """Returns NIXL's interface. Raises KVClusterError, with what to do, if it is not installed."""
    with needs("nixl"):
        api = import_module("nixl._api")
    logging.getLogger("nixl").setLevel(logging.WARNING)  # it tells of each agent
    return api
