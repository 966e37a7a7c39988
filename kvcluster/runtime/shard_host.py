"""A shard's process without Ray: core, arena, stores of tiers, driver, and a thread for each kind of slow work.

Effects end here: the reporter sends reports, the verifier reads pages again, the mover moves pages between tiers, the
stager reads them from stores, and the fetcher brings them from other shards; a revoked lease stops the exchange that
moves its bytes, and `Leave` ends the process. The coordinator and other shards are reached through functions that are
passed in, so that the same host runs over gRPC and within a test.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

from kvcluster.config import Config
from kvcluster.core import limits
from kvcluster.core.codecs import Codec
from kvcluster.core.ids import Attempt, CallId, ShardId, Tenant
from kvcluster.core.messages import (
    Effect,
    Erase,
    Fetch,
    Findings,
    Inventory,
    Leave,
    Moved,
    MovePages,
    Offers,
    PageSlot,
    PagesSaved,
    PeersTried,
    ProbeOrder,
    ProcessInfo,
    Refused,
    RefusedKind,
    Reply,
    Report,
    ReportAck,
    ReportAnswered,
    ReportFailed,
    Request,
    Revoke,
    SavePages,
    Send,
    ShardAddress,
    ShardMessage,
    ShardQuestion,
    Stage,
    Staged,
    Tier,
    TierLost,
    TryPeers,
    Verify,
)
from kvcluster.core.miss import Miss
from kvcluster.core.shard.shard import Shard
from kvcluster.core.tiers import ON_DEVICE
from kvcluster.errors import KVClusterError
from kvcluster.memory.arena import Arena
from kvcluster.runtime import json_log, tier_store
from kvcluster.runtime.compute_pool import ComputePool
from kvcluster.runtime.driver import Driver
from kvcluster.runtime.json_log import AckReader, decided, warned
from kvcluster.runtime.metric_samples import Histogram, Refusal, Sample, ShardMetrics, shard_samples
from kvcluster.runtime.quota_file import QuotaFile
from kvcluster.runtime.replica_pull import OpenSource, ReplicaPuller
from kvcluster.runtime.scrub import NICENESS, verify
from kvcluster.runtime.tenant_rates import Rated, RateLimiter
from kvcluster.runtime.threads import JobThread
from kvcluster.runtime.tier_store import TierStores, open_stores
from kvcluster.transport.attend_session import ATTEND_PATHS, import_attention
from kvcluster.transport.base import ComputeTurn, Deadline, RefusedByShard, Unavailable
from kvcluster.transport.exchange_summary import ExchangeSummary
from kvcluster.transport.shm_server import SharedPool

log = logging.getLogger(__name__)

_CALL_S = 0.0001
"""As TenantTurns' `call_s`: most are steps of exchanges, which have a connection already."""

_LAST_STEP_S = 5.0
"""How long after its deadline the core may take to report what it has saved: it may be busy with other steps."""

R = TypeVar("R")
Tell = Callable[[Report | Inventory, Deadline], Reply]
"""Sends a report to the coordinator and returns its answer; raises Unavailable or KVClusterError."""


class ShardHost:
    """One shard incarnation. Implements PageHost (transport/base.py) and ShmHost (transport/shm_server.py)."""

    def __init__(
        self,
        me: ShardAddress,
        config: Config,
        *,
        process: ProcessInfo | None = None,
        tell: Tell,
        open_source: OpenSource,
        on_end: Callable[[Leave], None],
        probe: Callable[[ProbeOrder], Findings] = lambda order: Findings(order.number),
        rates: RateLimiter | None = None,
    ) -> None:
        """`process`: for the status. `probe`: see peer_probe.py. `rates`: of what it moves for tenants, none by
        default."""
        self._rates = rates or RateLimiter(QuotaFile(""))
        shard = me.shard
        stores, found = open_stores(config.shard, shard)
        self.core = Shard(
            *(shard, me.epoch, config.shard),
            membership_ttl_ms=config.membership_ttl_ms,
            address=me.address,
            host=me.host,
            server_name=me.server_name,
            process=process,
            found=found,
        )
        self._arena = Arena(sum(self.core.pool.memory_bytes.values()))
        self._stores = TierStores(self._arena.regions(self.core.pool.memory_bytes), stores)
        self._shard, self._tell, self._on_end, self._probe = shard, tell, on_end, probe
        self._report_ms = config.membership_ttl_ms
        self._codec = Codec[config.coordinator.host_codec.upper()]
        self._raw_blocks = config.coordinator.host_raw_blocks
        self._metrics, self._acks, self._lost, self._losing = ShardMetrics(), AckReader(), set[Tier](), threading.Lock()
        self._sessions: dict[Attempt, Callable[[Miss], object]] = {}

        def fail(error: BaseException) -> None:
            on_end(Leave(f"{shard} failed: {error!r}"))

        self._driver: Driver[ShardMessage] = Driver(
            Rated(self.core, self._rates),
            self._perform,
            stall_ns=config.stall_ms * 1_000_000,
            on_failure=fail,
            name=shard,
            call_s=_CALL_S,
        )
        self._fetcher, self._compute = ReplicaPuller(self, open_source), ComputePool(config.shard.attend_threads, shard)
        self._threads = self._jobs(shard, fail)

    def start(self, offers: Offers | None = None) -> None:
        """Starts the threads and the driver. `offers` are the transports that serve this shard beside gRPC, as reported
        to clients. Before that, while nobody asks this shard anything, it imports what attention needs: an import holds
        the interpreter's lock for long stretches, on a busy node for seconds."""
        self.core.offers = offers or self.core.offers
        if any(offer.transport in ATTEND_PATHS for offer in self.core.offers.offers):
            import_attention()
        for thread in dict.fromkeys(self._threads.values()):
            thread.start()
        self._compute.start()
        self._driver.start()

    def save(self, stop_ms: int) -> PagesSaved:
        """Saves the hottest pages in memory to the durable store, because the shard is to stop: returns when all are
        saved or `stop_ms` have passed, what was saved and what was not. From now on the shard stores nothing more; it
        serves loads until it is closed. A second call joins the first, or returns its result.

        Raises Unavailable if the shard is closed or has failed.
        """
        until = time.monotonic_ns() + stop_ms * 1_000_000
        answer = self._driver.ask(
            lambda call: SavePages(call, until, self._codec, self._raw_blocks), stop_ms / 1_000 + _LAST_STEP_S
        )
        assert isinstance(answer, PagesSaved)
        log.warning(  # what operators look for after an upgrade
            "%s saved %d pages (%d bytes) before its end; not saved: %d pages (%d bytes)",
            *(self._shard, answer.pages, answer.nbytes, answer.left_pages, answer.left_bytes),
        )
        return answer

    def close(self) -> None:
        """Ends the driver and its threads and gives the arena back. The caller has closed the transports' servers
        before."""
        self._driver.close()
        self._compute.close()
        self._fetcher.close()
        for thread in dict.fromkeys(self._threads.values()):
            thread.close()
        self._stores.close()
        self._arena.close()

    def samples(self) -> list[Sample | Histogram]:
        """Returns the series of SHARD_METRICS."""

        def of_core() -> list[Sample]:
            core = self.core
            return shard_samples(core.info(), {**core.waiting, **self._waiting_jobs()}, core.pool.condemned)

        return [*self._driver.inspect(of_core), *self._metrics.samples()]

    def why_not_alive(self) -> str:
        """Returns why this incarnation should be ended; "" if it should not."""
        return self._driver.failure

    def why_not_ready(self) -> str:
        """Returns why it cannot serve now; "" if it can."""
        return self._driver.failure or (
            "" if self.core.state.member(time.monotonic_ns()) else "no coordinator answers its reports"
        )

    # ------------------------------------------------------------------------------- PageHost and ShmHost

    def ask(
        self, build: Callable[[CallId], Request[ShardQuestion]], wait_s: float, decodes_of: Tenant | None = None
    ) -> Reply:
        return self._driver.ask(build, wait_s, decodes_of)

    def decoding(self, tenant: Tenant, wait_s: float) -> AbstractContextManager[None]:
        return self._driver.decoding(tenant, wait_s)

    def read(self, slot: PageSlot, start: int = 0, stop: int | None = None) -> memoryview:
        return self._stores.read(slot, start, stop)

    def fill(self, slot: PageSlot, start: int = 0, stop: int | None = None) -> AbstractContextManager[memoryview]:
        return self._stores.fill(slot, start, stop)

    @property
    def arena_bytes(self) -> int:
        return self._arena.nbytes

    @property
    def region_starts(self) -> Mapping[Tier, int]:
        regions = {tier: region.address - self._arena.address for tier, region in self._stores.regions.items()}
        return regions | dict.fromkeys(ON_DEVICE, self.arena_bytes)

    @property
    def pool(self) -> SharedPool | None:
        return self._stores.pool

    @property
    def lease_ttl_ns(self) -> int:
        return self.core.leases.ttl_ns

    def open_arena(self, *, writable: bool) -> int:
        return self._arena.open(writable=writable)

    @contextmanager
    def on_revoke(self, attempt: Attempt, stop: Callable[[Miss], object]) -> Iterator[None]:
        # One session for each attempt: when a second one ended, it would end the lease of the first, which still moves
        # bytes.
        if self._sessions.setdefault(attempt, stop) is not stop:
            raise RefusedByShard(Refused(RefusedKind.BAD, f"attempt {attempt} is under way already"))
        try:
            yield
        finally:
            self._sessions.pop(attempt, None)

    def compute(self, tenant: Tenant, work: Callable[[ComputeTurn], R], deadline: Deadline) -> R:
        return self._compute.run(tenant, work, deadline)

    def exchange_ended(self, summary: ExchangeSummary) -> None:
        self._metrics.exchange_ended(summary)
        self._rates.moved(summary)
        if json_log.shown():
            decided("exchange_ended", **json_log.exchange_fields(summary))

    def connection_refused(self, path: str, error: KVClusterError) -> None:
        self._metrics.connection_refused(path, error)
        decided("connection_refused", path=path, reason=Refusal.of(error).value, why=str(error))

    def inspect(self, look: Callable[[], object]) -> object:
        """Calls `look` while the core is not stepped."""
        return self._driver.inspect(look)

    # ----------------------------------------------------------------------------------------- effects

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, Revoke):
            stop = self._sessions.get(effect.attempt)
            if stop is not None:
                stop(effect.why)
        elif isinstance(effect, Leave):
            warned("leaving", why=effect.reason)
            self._on_end(effect)
        else:
            self._threads[type(effect)].submit(effect)

    def _jobs(self, shard: ShardId, on_failure: Callable[[BaseException], None]) -> dict[type[Effect], JobThread[Any]]:
        """Returns the thread that carries out each kind of effect."""

        def job(name: str, do: Callable[[Any], None], **options: int) -> JobThread[Any]:
            return JobThread(do, name=f"{shard}-{name}", on_failure=on_failure, **options)

        # If the drive is stuck, an erasure for each answer of the coordinator may wait behind a batch of moves. One
        # thread runs both, so that no page written later is erased.
        moves = job("mover", self._move, niceness=tier_store.NICENESS, most=limits.TOMBSTONES)
        # The core has one job of each kind under way at a time, except for Stage: one for each lease.
        return {
            Send: job("reporter", lambda send: self._report(send.message)),
            Verify: job(
                "verifier",
                lambda order: self._driver.tell(verify(order, self._stores)),
                niceness=NICENESS,
            ),
            MovePages: moves,
            Erase: moves,
            Stage: job("stager", self._stage, most=limits.PINS_FROM_DISK),
            Fetch: job("fetcher", self._fetcher.fetch),
            TryPeers: job("prober", lambda m: self._driver.tell(PeersTried(self._probe(m.order)))),
        }

    def _report(self, message: Report | Inventory) -> None:
        self._look_for_lost_tiers()
        try:
            answer = self._tell(message, Deadline.after_ms(self._report_ms))
        except (Unavailable, KVClusterError) as error:
            log.info("the coordinator did not answer a report: %s", error)
            self._driver.tell(ReportFailed())
            return
        if isinstance(answer, ReportAck):
            for event, fields in self._acks.news(answer):
                decided(event, **fields)
            self._driver.tell(ReportAnswered(answer))
        else:
            log.warning("the coordinator refused a report: %s", answer)
            self._driver.tell(ReportFailed())

    def _move(self, order: MovePages | Erase) -> None:
        if isinstance(order, MovePages):
            began = time.monotonic()
            moved = tier_store.move(order, self._stores)
            self._moved(order, moved, time.monotonic() - began)
            self._driver.tell(moved)
            self._look_for_lost_tiers()
        else:
            self._stores.erase(order)

    def _stage(self, order: Stage) -> None:
        began = time.monotonic()
        staged = tier_store.stage(order, self._stores)
        self._moved(order, staged, time.monotonic() - began)
        self._driver.tell(staged)
        self._look_for_lost_tiers()

    def _look_for_lost_tiers(self) -> None:
        """Reports a tier whose store has failed to the core, once."""
        for tier, why in self._stores.failed().items():
            with self._losing:
                known = tier in self._lost
                self._lost.add(tier)
            if not known:
                warned("tier_lost", tier=tier.name.lower(), why=why)
                self._driver.tell(TierLost(tier, why))

    def _moved(self, order: MovePages | Stage, result: Moved | Staged, seconds: float) -> None:
        self._metrics.moved(order, result, seconds)
        place = {"source": order.pages[0].source.tier.name.lower(), "target": order.pages[0].target.tier.name.lower()}
        decided("pages_moved", **place, pages=len(order.pages), corrupt=len(result.corrupt), ms=round(seconds * 1e3, 3))

    def _waiting_jobs(self) -> dict[str, int]:
        """Returns the number of jobs that wait for each thread."""
        kinds: dict[str, type[Effect]] = {"scrubs": Verify, "moves": MovePages, "disk_reads": Stage, "pulls": Fetch}
        waiting = {name: self._threads[kind].waiting for name, kind in kinds.items()}
        return {**waiting, "computes": self._compute.waiting}
