"""A coordinator's process without Ray: core and driver."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from kvcluster.config import Config
from kvcluster.core.coordinator import Coordinator
from kvcluster.core.ids import CallId, Epoch
from kvcluster.core.messages import CoordinatorMessage, Effect, Leave, Reply
from kvcluster.runtime.driver import Driver

log = logging.getLogger(__name__)


class CoordinatorHost:
    """One coordinator incarnation."""

    def __init__(self, epoch: Epoch, config: Config, *, on_end: Callable[[str], None]) -> None:
        self.core = Coordinator(
            epoch,
            config.coordinator,
            membership_ttl_ms=config.membership_ttl_ms,
            expected=config.shards,
            now=time.monotonic_ns(),
        )
        self._on_end = on_end
        self._driver: Driver[CoordinatorMessage] = Driver(
            self.core,
            self._perform,
            stall_ns=config.stall_ms * 1_000_000,
            on_failure=lambda error: on_end(f"the coordinator failed: {error!r}"),
            name="coordinator",
        )

    def start(self) -> None:
        self._driver.start()

    def close(self) -> None:
        self._driver.close()

    def ask(self, build: Callable[[CallId], CoordinatorMessage], wait_s: float) -> Reply:
        return self._driver.ask(build, wait_s)

    def inspect(self, look: Callable[[], object]) -> object:
        """Calls `look` while the core stands still."""
        return self._driver.inspect(look)

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, Leave):
            log.warning("leaving: %s", effect.reason)
            self._on_end(effect.reason)
