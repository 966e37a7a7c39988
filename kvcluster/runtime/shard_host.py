"""A shard's process without Ray: core, arena, driver, and the reporter that speaks to the coordinator.

Effects end here: a report is sent by the one reporter thread, a revoked lease stops the session that moves its
bytes, and `Leave` ends the process. How the coordinator is reached comes in as a function, so that the same host
runs over gRPC and within a test.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from kvcluster.config import Config
from kvcluster.core.ids import Attempt, CallId, Epoch, ShardId
from kvcluster.core.messages import (
    Effect,
    Inventory,
    Leave,
    PageSlot,
    Refused,
    RefusedKind,
    Reply,
    Report,
    ReportAck,
    ReportAnswered,
    ReportFailed,
    Revoke,
    Send,
    ShardMessage,
)
from kvcluster.core.reasons import Miss, MissReason
from kvcluster.core.shard import Shard
from kvcluster.errors import KVClusterError
from kvcluster.pages.arena import Arena
from kvcluster.runtime.driver import Driver
from kvcluster.transport.seam import Deadline, RefusedByShard, Trouble

log = logging.getLogger(__name__)

Tell = Callable[[Report | Inventory, Deadline], Reply]
"""Carries a report to the coordinator and brings its answer; raises Trouble or KVClusterError."""


class ShardHost:
    """One shard incarnation. Implements PageHost (transport/seam.py)."""

    def __init__(
        self,
        shard: ShardId,
        epoch: Epoch,
        config: Config,
        *,
        address: str,
        host: str,
        tell: Tell,
        on_end: Callable[[str], None],
    ) -> None:
        self.core = Shard(
            shard,
            epoch,
            config.shard,
            membership_ttl_ms=config.membership_ttl_ms,
            address=address,
            host=host,
        )
        self._arena = Arena(self.core.pool.allocator.capacity_bytes)
        self._tell = tell
        self._on_end = on_end
        self._report_ms = config.membership_ttl_ms
        self._outbox: queue.SimpleQueue[Report | Inventory | None] = queue.SimpleQueue()
        self._sessions: dict[Attempt, Callable[[], object]] = {}
        self._driver: Driver[ShardMessage] = Driver(
            self.core,
            self._perform,
            stall_ns=config.stall_ms * 1_000_000,
            on_failure=lambda error: on_end(f"{shard} failed: {error!r}"),
            name=shard,
        )
        self._reporter = threading.Thread(target=self._report, name=f"kvcluster-{shard}-reporter", daemon=True)

    def start(self) -> None:
        self._reporter.start()
        self._driver.start()

    def close(self) -> None:
        """Ends reporting and gives the arena back. The transports' servers are closed before."""
        self._driver.close()
        self._outbox.put(None)
        if self._reporter.is_alive():
            self._reporter.join()
        self._arena.close()

    # ---------------------------------------------------------------------------------------- PageHost

    def ask(self, build: Callable[[CallId], ShardMessage], wait_s: float) -> Reply:
        return self._driver.ask(build, wait_s)

    def view(self, slot: PageSlot) -> memoryview:
        try:
            return self._arena.view(slot.offset, slot.nbytes)
        except ValueError:
            raise Trouble(Miss(MissReason.SHARD_LOST, "the shard is ending")) from None

    def on_revoke(self, attempt: Attempt, stop: Callable[[], object]) -> AbstractContextManager[None]:
        return self._watched(attempt, stop)

    def inspect(self, look: Callable[[], object]) -> object:
        """Calls `look` while the core stands still."""
        return self._driver.inspect(look)

    @contextmanager
    def _watched(self, attempt: Attempt, stop: Callable[[], object]) -> Iterator[None]:
        # One at a time: the end of a second would end the lease under the first, which still moves bytes.
        if self._sessions.setdefault(attempt, stop) is not stop:
            raise RefusedByShard(Refused(RefusedKind.BAD, f"attempt {attempt} is under way already"))
        try:
            yield
        finally:
            self._sessions.pop(attempt, None)

    # ----------------------------------------------------------------------------------------- effects

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, Send):
            self._outbox.put(effect.message)
        elif isinstance(effect, Revoke):
            stop = self._sessions.get(effect.attempt)
            if stop is not None:
                stop()
        elif isinstance(effect, Leave):
            log.warning("leaving: %s", effect.reason)
            self._on_end(effect.reason)

    def _report(self) -> None:
        while True:
            message = self._outbox.get()
            if message is None:
                return
            try:
                answer = self._tell(message, Deadline.after_ms(self._report_ms))
            except (Trouble, KVClusterError) as error:
                log.info("the coordinator did not answer a report: %s", error)
                self._driver.tell(ReportFailed())
                continue
            assert isinstance(answer, ReportAck)
            self._driver.tell(ReportAnswered(answer))
