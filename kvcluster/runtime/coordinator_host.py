"""A coordinator's process without Ray: core, driver, the files of what was purged and set, and KV events."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvcluster.config import Config, EventsConfig
from kvcluster.core.coordinator import Coordinator
from kvcluster.core.ids import CallId, Epoch
from kvcluster.core.messages import (
    CoordinatorMessage,
    CoordinatorQuestion,
    Effect,
    Leave,
    Publish,
    Reply,
    Request,
    Retell,
    Warn,
)
from kvcluster.core.miss import Miss, MissReason
from kvcluster.errors import ConfigError
from kvcluster.runtime.driver import Driver
from kvcluster.runtime.settings_file import SettingsFile
from kvcluster.runtime.tombstones import Keeping, NotKept, TombstoneFile
from kvcluster.transport.base import Unavailable

if TYPE_CHECKING:
    from kvcluster.runtime.event_publisher import EventPublisher

log = logging.getLogger(__name__)


class CoordinatorHost:
    """One coordinator incarnation. Raises ConfigError where what the last has kept cannot be read, or where what is
    configured is not installed."""

    def __init__(self, epoch: Epoch, config: Config, *, on_end: Callable[[Leave], None]) -> None:
        file = TombstoneFile(config.coordinator.state_dir) if config.coordinator.state_dir else None
        self.core = Coordinator(
            epoch,
            config.coordinator,
            membership_ttl_ms=config.membership_ttl_ms,
            expected=config.shards,
            now=time.monotonic_ns(),
            tombstones=file.take_over() if file is not None else (),
            announces=bool(config.events.endpoint),
        )
        settings = SettingsFile(config.coordinator.state_dir) if config.coordinator.state_dir else None
        if settings is not None and (why_not := self.core.set(settings.read())) is not None:
            raise ConfigError(f"what was set before cannot be set now: {why_not}")
        self._on_end = on_end
        self.publisher = publisher_of(config.events, epoch, lambda: self._driver.tell(Retell()))
        self._driver: Driver[CoordinatorMessage] = Driver(
            Keeping(
                self.core,
                file.write if file is not None else _keep_nothing,
                settings.write if settings is not None else _keep_nothing,
            ),
            self._perform,
            stall_ns=config.stall_ms * 1_000_000,
            on_failure=lambda error: on_end(Leave(f"the coordinator failed: {error!r}")),
            name="coordinator",
        )

    def start(self) -> None:
        """Raises ConfigError where KV events are to be published and cannot be."""
        if self.publisher is not None:
            self.publisher.start()
        self._driver.start()

    def close(self) -> None:
        self._driver.close()
        if self.publisher is not None:
            self.publisher.close()

    def ask(self, build: Callable[[CallId], Request[CoordinatorQuestion]], wait_s: float) -> Reply:
        """As Driver.ask. Raises Unavailable as well where what was asked for cannot be promised for good."""
        reply = self._driver.ask(build, wait_s)
        if isinstance(reply, NotKept):
            raise Unavailable(Miss(MissReason.SHARD_LOST, reply.detail))
        return reply

    def inspect(self, look: Callable[[], object]) -> object:
        """Calls `look` while the core stands still."""
        return self._driver.inspect(look)

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, Publish):
            assert self.publisher is not None, "it was told to announce"
            self.publisher.publish(effect)
        elif isinstance(effect, Warn):
            log.warning("%s", effect.text)
        elif isinstance(effect, Leave):
            log.warning("leaving: %s", effect.reason)
            self._on_end(effect)


def publisher_of(events: EventsConfig, epoch: Epoch, on_behind: Callable[[], None]) -> EventPublisher | None:
    """What publishes KV events, or None where nobody is told. Raises ConfigError where what it takes is not there."""
    if not events.endpoint:
        return None
    try:
        from kvcluster.runtime.event_publisher import EventPublisher
    except ImportError as error:
        raise ConfigError(f"events.endpoint needs {error.name}: pip install 'kvcluster[events]'") from None
    return EventPublisher(
        events.endpoint,
        replay=events.replay,
        buffer_batches=events.buffer_batches,
        first_sequence=epoch,
        on_behind=on_behind,
    )


def _keep_nothing(what: object) -> None:
    """Without a folder the shards alone remember what was purged, and nobody what was set."""
