"""A coordinator's process without Ray: core, driver, the files that keep tombstones and settings, and KV events."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from kvcluster.config import Config
from kvcluster.core.coordinator.coordinator import Coordinator
from kvcluster.core.ids import CallId, Epoch, Tenant
from kvcluster.core.messages import (
    CoordinatorMessage,
    CoordinatorQuestion,
    Effect,
    Leave,
    ProcessInfo,
    Publish,
    Reply,
    Republish,
    Request,
    SetQuotas,
    Stalled,
    Warn,
)
from kvcluster.core.miss import Miss, MissReason
from kvcluster.errors import ConfigError
from kvcluster.extras import install
from kvcluster.runtime import json_log
from kvcluster.runtime.audit_log import CALLS, audit_answer, set_up_audit
from kvcluster.runtime.driver import Driver
from kvcluster.runtime.json_log import decided, warned
from kvcluster.runtime.metric_samples import CoordinatorFigures, Histogram, Sample, coordinator_samples
from kvcluster.runtime.policy_file import read_settings, write_settings
from kvcluster.runtime.quota_file import QuotaFile
from kvcluster.runtime.tombstones import Keeping, NotKept, TombstoneFile
from kvcluster.transport.base import Unavailable
from kvcluster.transport.certificates import CertificateNames, Certificates

if TYPE_CHECKING:
    from kvcluster.runtime.event_publisher import EventPublisher

T = TypeVar("T")

_CALL_S = 0.0005
"""As TenantTurns' `call_s`: a gRPC call with its request and its answer."""


def _never(shown: CertificateNames) -> bool:
    """Where no certificate is revoked."""
    return False


class CoordinatorHost:
    """One coordinator incarnation. Raises ConfigError if the state that the last incarnation kept cannot be read, or if
    a dependency that the configuration needs is not installed."""

    def __init__(
        self,
        epoch: Epoch,
        config: Config,
        *,
        on_end: Callable[[Leave], None],
        process: ProcessInfo | None = None,
        certificates: Certificates | None = None,
        is_revoked: Callable[[CertificateNames], bool] = _never,
        restarted: bool = False,
    ) -> None:
        """`process`: for the status. `certificates`: with which KV events are published, to those whose own
        certificate is not revoked. `restarted`: it serves whether or not its quota file can be used."""
        if config.log.audit_file:
            set_up_audit(config.log.audit_file)
        self.quotas = QuotaFile(config.server.quota_file, must_exist=not restarted)
        state_dir = config.coordinator.state_dir
        file = TombstoneFile(state_dir) if state_dir else None
        self._made = time.monotonic_ns()
        self.core = Coordinator(
            epoch,
            config.coordinator,
            membership_ttl_ms=config.membership_ttl_ms,
            expected=config.shards_in_all,
            now=self._made,
            tombstones=file.take_over() if file is not None else (),
            announces=bool(config.events.endpoint),
            process=process,
        )
        if state_dir and (why_not := self.core.admin_handler.apply_policy(read_settings(state_dir))) is not None:
            raise ConfigError(f"the settings kept in coordinator.state_dir cannot be applied: {why_not}")
        self._on_end = on_end
        self._tenants = config.metrics.tenants
        self.publisher = publisher_of(config, epoch, lambda: self._driver.tell(Republish()), certificates, is_revoked)
        self._driver: Driver[CoordinatorMessage] = Driver(
            Keeping(
                self.core,
                file.write if file is not None else _keep_nothing,
                partial(write_settings, state_dir) if state_dir else _keep_nothing,
            ),
            self._perform,
            stall_ns=config.stall_ms * 1_000_000,
            on_failure=lambda error: on_end(Leave(f"the coordinator failed: {error!r}")),
            name="coordinator",
            call_s=_CALL_S,
        )

    def start(self) -> None:
        """Starts the publisher and the driver. Raises ConfigError if KV events are configured and cannot be
        published."""
        if self.publisher is not None:
            self.publisher.start()
        # No shard could report until now: the time that this actor waited for its port must not count as grace.
        self._driver.tell(Stalled(time.monotonic_ns() - self._made))
        self.quotas.watch(lambda quotas, trouble: self._driver.tell(SetQuotas(quotas, trouble)))
        self._driver.start()

    def close(self) -> None:
        self.quotas.close()
        self._driver.close()
        if self.publisher is not None:
            self.publisher.close()

    def ask(
        self,
        build: Callable[[CallId], Request[CoordinatorQuestion]],
        wait_s: float,
        decodes_of: Tenant | None = None,
    ) -> Reply:
        """As Driver.ask. Also raises Unavailable if the change that was asked for took effect but could not be made
        durable."""
        asked: list[Request[CoordinatorQuestion]] = []

        shown = json_log.shown()

        def noted(call: CallId) -> Request[CoordinatorQuestion]:
            request = build(call)
            if shown or type(getattr(request, "question", None)).__name__ in CALLS:
                asked.append(request)
            return request

        try:
            reply = self._driver.ask(noted, wait_s, decodes_of)
        except Unavailable as error:
            for request in asked:
                audit_answer(request, None, str(error))
            raise
        for request in asked:
            audit_answer(request, None if isinstance(reply, NotKept) else reply, getattr(reply, "detail", ""))
        if isinstance(reply, NotKept):
            raise Unavailable(Miss(MissReason.SHARD_LOST, reply.detail))
        decision = json_log.answered(asked[0], reply) if asked and shown else None
        if decision is not None:
            decided(decision[0], **decision[1])
        return reply

    def tell(self, message: CoordinatorMessage) -> None:
        """Steps the core with a message to which no caller waits for an answer."""
        self._driver.tell(message)

    def inspect(self, look: Callable[[], T]) -> T:
        """Calls `look` while the core is not stepped."""
        return self._driver.inspect(look)

    def samples(self) -> list[Sample | Histogram]:
        """Returns the series of COORDINATOR_METRICS."""
        return self._driver.inspect(
            lambda: coordinator_samples(figures_of(self.core, time.monotonic_ns(), tenants=self._tenants))
        )

    def why_not_alive(self) -> str:
        """Returns why this incarnation should be ended; "" if it should not."""
        return self._driver.failure or (self.publisher.failure if self.publisher is not None else "")

    def why_not_ready(self) -> str:
        """Returns why it cannot serve now; "" if it can."""
        if self._driver.failure:
            return self._driver.failure
        return "it learns from the shards what they hold" if self.core.rebuilding else ""

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, Publish):
            assert self.publisher is not None, "the core was configured to publish events"
            self.publisher.publish(effect)
        elif isinstance(effect, Warn):
            warned(effect.event, why=effect.text)
        elif isinstance(effect, Leave):
            warned("leaving", why=effect.reason)
            self._on_end(effect)


def figures_of(core: Coordinator, now: int, *, tenants: bool = False) -> CoordinatorFigures:
    """Returns the figures of a coordinator for a scrape; with `tenants` also those of each tenant."""
    status = core.status(now)
    return CoordinatorFigures(
        status,
        core.state.missed_tokens,
        core.state.eviction_ages,
        core.state.members.open_orders(),
        core.state.namespaces.pins.count(now),
        core.replicator.requests,
        core.state.counted_by_tenant if tenants else {},
        status.tenants if tenants else (),
    )


def publisher_of(
    config: Config,
    epoch: Epoch,
    on_behind: Callable[[], None],
    certificates: Certificates | None,
    is_revoked: Callable[[CertificateNames], bool] = _never,
) -> EventPublisher | None:
    """Returns the publisher of KV events, or None if none is configured. Raises ConfigError if its dependency is not
    installed. `certificates`: None to publish in the clear."""
    events = config.events
    if not events.endpoint:
        return None
    try:
        from kvcluster.runtime.event_publisher import EventPublisher
        from kvcluster.runtime.zmtp_server import EventAccess
    except ImportError as error:
        raise ConfigError(f"events.endpoint needs {error.name}: {install('msgspec')}") from None
    return EventPublisher(
        events.endpoint,
        replay=events.replay,
        buffer_batches=events.buffer_batches,
        first_sequence=epoch,
        on_behind=on_behind,
        access=None if certificates is None else EventAccess(certificates, config.name, is_revoked),
    )


def _keep_nothing(what: object) -> None:
    """Keeps nothing. Without a state folder only the shards remember tombstones, and settings last until a restart."""
