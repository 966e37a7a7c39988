"""What a seed stands for: the size of the cluster, its configuration, the load of its workers and the faults.

Everything except the course of the run itself is drawn here, before anything runs. Times are a tenth of the real ones
and bounds are small, so that a run of some seconds reaches each of them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from kvcluster.config import Config, CoordinatorConfig, ShardConfig
from kvcluster.core.file_allocator import HEAD_BYTES, SECTOR_BYTES
from kvcluster.core.quotas import Quotas, TenantQuota, TierQuota
from kvcluster.core.tiers import INGEST, Tier
from kvcluster.eviction import POLICIES
from kvcluster.replay.kernel import MS, SECOND
from kvcluster.sequences.window_policy import WindowPolicy
from tests.sim.content import BLUE, RED
from tests.sim.memory import UNIT_BYTES

DRIFT_PPM = 10_000
"""A clock is wrong by up to 1 %, so that two of them drift apart by up to 2 %: what a shard's term allows for."""

DISK_FILE_BYTES = HEAD_BYTES + 5 * SECTOR_BYTES
"""The size of a file on disk: its header, its records, and four pages of less than a sector."""

STOPS = 0.3
"""The share of seeds with a disk tier in which shards are also told to stop and to save their pages there."""

FAULTS = (
    *("crash shard", "crash coordinator", "crash worker", "crash node"),
    *("stop shard", "stop coordinator", "stop worker", "stop node"),
    *("cut both ways", "cut one way", "clog", "second coordinator", "second shard", "stale name"),
    *("rot", "bad wire", "lossy network"),
)
"""The faults besides. A seed has some of these and not others, so that each is seen without the noise of all."""


@dataclass(frozen=True, slots=True)
class SequenceLoad:
    """Workers with open sequences. Each has `users` that do something every `think_ns` on average, and a resident set
    of so many pages; its tables are told every `sync_ns`. Every other sequence keeps `keep_tokens` tokens and drops the
    oldest ones, if that is not None. With `flushes`, users also seal all that is full, whatever was dropped."""

    workers: int
    users: int
    resident_pages: int
    policy: WindowPolicy
    sync_ns: int
    think_ns: int
    keep_tokens: int | None
    flushes: bool = False


SEQUENCES = 0.25
"""The share of seeds with open sequences."""

LATE_REVOKES = 0.25
"""The share of seeds in which a core may refuse a renewal before the session hears that its lease was revoked."""

STRANGERS = 0.1
"""The share of seeds in which a worker asks for what another tenant has."""

FIRST_WITH_GPUS = 10_000_000
"""The first seed that draws whether shards have pools on GPUs. Seeds before it, of which tests name many, stay what
they were."""

FIRST_WITH_QUOTAS = 20_000_000
"""Likewise, whether tenants have quotas."""

FIRST_WITH_GRANTS = 30_000_000
"""Likewise, whether each tenant may read the other's KV."""

GRANTS = 0.5
"""The share of these seeds in which they may."""

FIRST_WITH_RUNS = 40_000_000
"""Likewise, whether weights are those of a training run."""

RUNS = 0.5
"""The share of these seeds in which they are."""

QUOTAS = 0.4
"""The share of these seeds in which tenants have quotas."""

GPUS = 0.5
"""The share of seeds with a host tier in which shards also have pools on GPUs."""

FLUSHES = 0.5
"""The share of seeds with sequences that drop tokens in which users also flush them."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One seed's cluster. `faults` come `fault_ns` apart on average; work goes on for `safety_ns`."""

    nodes: int
    workers: int
    config: Config
    limits: dict[str, int]
    models: int
    prompts: int
    halves: bool
    drift_ppm: int
    delay_ns: int
    loss: float
    twice: float
    frame_layers: int
    frame_ns: int
    think_ns: int
    patience_ns: int
    safety_ns: int
    fault_ns: int
    faults: tuple[str, ...]
    announces: bool
    event_loss: float
    half_needs: float
    sequences: SequenceLoad | None = None
    revoke_ns: int = 0
    """The longest time after which a session hears that its lease has ended."""
    strangers: bool = False
    """Whether a worker also asks for blocks of another tenant."""
    quotas: tuple[Quotas, ...] = ()
    """The quotas that are put in force one after another, `quota_ns` apart."""
    quota_ns: int = 0
    grants: float = 0.0
    """The share of the conversations of an engine that are read in the other tenant's namespace, by a grant."""
    trains: bool = False
    """Whether weights are versions of a training run, between which engines change."""
    attends: bool = False
    """Whether each worker with sequences has one more user, who attends to sequences at the shards."""

    @property
    def stall_ns(self) -> int:
        return self.config.stall_ms * MS


def draw(rng: random.Random, later: random.Random) -> Scenario:
    """Draws a scenario. Choices that were added later are drawn from `later`, so that the rest of a seed stays the
    same."""
    shards = rng.choice((1, 2, 2, 3, 3, 4, 5))
    calm = rng.random() < 0.1
    faults = () if calm else tuple(fault for fault in FAULTS if rng.random() < 0.4) or ("crash shard",)
    shaky = rng.random() < 0.5 and not calm
    config = _config(rng, shards)
    if faults and config.shard.disk_bytes:  # pages on disk make restarts worth testing
        faults += ("crash shard",) * 3
    scenario = Scenario(
        nodes=rng.randint(1, shards + 1),
        workers=rng.randint(1, 4),
        config=config,
        limits=_limits(rng) | _batches(later),
        models=rng.choice((1, 2, 2, 3, 6)),
        prompts=rng.choice((1, 2, 3)),
        halves=rng.random() < 0.2,
        drift_ppm=rng.choice((0, DRIFT_PPM, DRIFT_PPM, DRIFT_PPM)),
        delay_ns=rng.choice((MS // 5, MS, 5 * MS)),
        loss=rng.choice((0.002, 0.02)) if shaky else 0.0,
        twice=rng.choice((0.01, 0.05)) if shaky else 0.0,
        frame_layers=rng.choice((2, 4, 8)),
        frame_ns=rng.choice((MS, 10 * MS, 60 * MS)),
        think_ns=rng.choice((50 * MS, 100 * MS, 200 * MS)),
        patience_ns=rng.choice((1_500 * MS, 3 * SECOND)),
        safety_ns=rng.randint(5, 9) * SECOND,
        fault_ns=rng.choice((250 * MS, 500 * MS, 1_200 * MS)),
        faults=faults,
        announces=later.random() < 0.5,
        event_loss=later.choice((0.0, 0.0, 0.02, 0.05)),
        half_needs=later.choice((0.0, 0.3)),
    )
    policy = later.choice(tuple(POLICIES))
    return replace(scenario, config=replace(config, coordinator=replace(config.coordinator, eviction_policy=policy)))


def with_gpus(scenario: Scenario, rng: random.Random) -> Scenario:
    """Returns the scenario with a pool in a GPU's memory at every shard, in a share of the seeds with a host tier."""
    shard = scenario.config.shard
    if not shard.host_bytes or rng.random() >= GPUS:
        return scenario
    shard = replace(shard, gpu_bytes=rng.choice((4, 8, 16, 64)) * UNIT_BYTES)
    return replace(scenario, config=replace(scenario.config, shard=shard))


def with_quotas(scenario: Scenario, rng: random.Random) -> Scenario:
    """Returns the scenario with quotas that change while it runs, in a share of the seeds: low limits of some tiers, so
    that both tenants reach theirs, floors, weights and pins. Where it has one tier, it has room beside them in half of
    the seeds, so that limits evict and nothing else does."""
    if rng.random() >= QUOTAS:
        return scenario
    shard, roomy = scenario.config.shard, rng.random() < 0.5
    if roomy:
        shard = replace(shard, ram_bytes=128 * UNIT_BYTES, host_bytes=0, disk_bytes=0, disk_dir="", gpu_bytes=0)
        scenario = replace(scenario, faults=tuple(fault for fault in scenario.faults if fault != "shard told to stop"))
    tiers = [tier for tier in Tier if tier.spec.nbytes(shard)]

    def tier_quota() -> TierQuota:
        limit = rng.choice((None, 3, 6, 12, 24))
        floor = rng.choice((None, None, 1, 4, 16))
        return TierQuota(
            floor=None if floor is None else min(floor, limit or floor) * UNIT_BYTES,
            limit=None if limit is None else limit * UNIT_BYTES,
            weight=rng.choice((None, None, 0.5, 2)),
        )

    def quotas() -> Quotas:
        tenants = {
            tenant: TenantQuota(
                {tier: tier_quota() for tier in tiers if tier is INGEST or rng.random() < 0.5},
                pinned=rng.choice((None, 0, 4 * UNIT_BYTES)),
            )
            for tenant in (RED, BLUE)
            if rng.random() < 0.9
        }
        return Quotas(tenants=tenants)

    drawn = tuple(quotas() for _ in range(rng.choice((1, 2, 4, 8))))
    config = replace(scenario.config, shard=shard)
    return replace(scenario, config=config, quotas=drawn, quota_ns=rng.choice((400, 1_000)) * MS)


def with_grants(scenario: Scenario, rng: random.Random) -> Scenario:
    """Returns the scenario with tenants who read one another's KV, in a share of the seeds."""
    return replace(scenario, grants=rng.choice((0.1, 0.3, 0.6))) if rng.random() < GRANTS else scenario


def with_runs(scenario: Scenario, rng: random.Random) -> Scenario:
    """Returns the scenario with weights of a training run, in a share of the seeds."""
    return replace(scenario, trains=True) if rng.random() < RUNS else scenario


def with_stops(scenario: Scenario, rng: random.Random) -> Scenario:
    """Returns the scenario with shards that are told to stop, in a share of the seeds with a disk tier."""
    if not scenario.config.shard.disk_bytes or not scenario.faults or rng.random() >= STOPS:
        return scenario
    return replace(scenario, faults=scenario.faults + ("shard told to stop",) * 4)


def with_sequences(scenario: Scenario, rng: random.Random, windows: random.Random) -> Scenario:
    """Returns the scenario with workers that hold open sequences, in a share of the seeds. `windows` draws how their
    windows are encoded and what they drop."""
    if rng.random() >= SEQUENCES:
        return scenario
    block_tokens = 2
    load = SequenceLoad(
        workers=rng.choice((1, 1, 2)),
        users=rng.choice((1, 2, 3)),
        resident_pages=rng.choice((12, 20, 40)),
        policy=WindowPolicy(
            tail_tokens=rng.choice((0, 2, 4)),
            migration_tokens=rng.choice((1, 2, 3)) * block_tokens,
            sink_tokens=rng.choice((0, 0, 1)),
            codec=windows.choice(("raw", "raw", "q8", "q4")),
        ),
        sync_ns=rng.choice((50, 100, 200)) * MS,
        think_ns=rng.choice((20, 50, 100)) * MS,
        keep_tokens=windows.choice((None, 12, 16)),
    )
    ttl_ms = rng.choice((1_500, 3_000))
    config = scenario.config
    coordinator = replace(
        config.coordinator,
        sequence_share=rng.choice((0.2, 0.5, 0.9)),
        sequence_ttl_ms=ttl_ms,
        private_grace_ms=ttl_ms * rng.choice((1, 2)),
    )
    shard = replace(config.shard, ram_bytes=max(config.shard.ram_bytes, 48 * UNIT_BYTES))
    bounds = {"RELEASED_PER_STEP": 2, "GRACES_PER_STEP": 1} if rng.random() < 0.3 else {}
    return replace(
        scenario,
        config=replace(config, coordinator=coordinator, shard=shard),
        limits=scenario.limits | bounds,
        sequences=load,
    )


def with_late_revokes(scenario: Scenario, rng: random.Random) -> Scenario:
    """Returns the scenario with sessions that hear of the end of their leases late, in a share of the seeds."""
    late = rng.random() < LATE_REVOKES
    return replace(scenario, revoke_ns=rng.choice((20, 100)) * MS) if late else scenario


def with_strangers(scenario: Scenario, rng: random.Random) -> Scenario:
    """Returns the scenario with a worker that asks for blocks of another tenant, in a share of the seeds."""
    return replace(scenario, strangers=True) if rng.random() < STRANGERS else scenario


def with_flushes(scenario: Scenario, rng: random.Random) -> Scenario:
    """Returns the scenario with users that flush sequences, in a share of the seeds in which some drop tokens. There a
    sequence drops early and often."""
    load = scenario.sequences
    if load is None or load.keep_tokens is None or rng.random() >= FLUSHES:
        return scenario
    return replace(scenario, sequences=replace(load, flushes=True, keep_tokens=rng.choice((10, 12))))


def with_attention(scenario: Scenario, rng: random.Random) -> Scenario:
    """Returns the scenario with workers that attend to sequences at the shards, in half of the seeds with sequences. In
    half of those, sequences grow long and are soon stored, and their pages soon demoted, with loss."""
    load, config = scenario.sequences, scenario.config
    if load is None or rng.random() >= 0.5:
        return scenario
    if rng.random() < 0.5:
        policy = WindowPolicy(tail_tokens=0, migration_tokens=2, sink_tokens=0, codec="raw")
        load = replace(load, policy=policy, resident_pages=rng.choice((12, 40)), keep_tokens=None)
        coordinator = replace(config.coordinator, host_codec=rng.choice(("q8", "q4")), host_raw_blocks=0, low_free=0.3)
        shard = replace(config.shard, ram_bytes=48 * UNIT_BYTES, host_bytes=64 * UNIT_BYTES)
        config = replace(config, coordinator=replace(coordinator, high_free=0.6), shard=shard)
    return replace(scenario, config=config, sequences=load, attends=True)


def _config(rng: random.Random, shards: int) -> Config:
    units = rng.choice((8, 16, 32, 64))
    host_bytes = rng.choice((0, 8, 8, 16, 64)) * UNIT_BYTES
    disk_files = rng.choice((0, 0, 2, 4, 8, 8)) if host_bytes else 0
    return Config(
        shards=shards,
        membership_ttl_ms=1_200,
        stall_ms=200,
        coordinator=CoordinatorConfig(
            ticket_ttl_ms=1_200,
            hold_ms=rng.choice((0, 300, 600)),
            run_blocks=rng.choice((2, 4)),
            refresh_ms=300,
            rebuild_grace_ms=rng.choice((300, 900)),
            low_free=rng.choice((0.0, 0.1)),
            high_free=0.3,
            pinned_share=0.3,
            hot_loads=rng.choice((3, 1_000)),
            hot_window_ms=2_000,
            hot_replicas=rng.choice((2, 3)),
            drain_ms=rng.choice((1_500, 4_000)),
            host_codec=rng.choice(("raw", "q8", "q8", "q4")),
            host_raw_blocks=rng.choice((0, 1, 1)),
            promote_loads=rng.choice((1, 1, 2)),
        ),
        shard=ShardConfig(
            ram_bytes=units * UNIT_BYTES,
            host_bytes=host_bytes,
            disk_bytes=disk_files * DISK_FILE_BYTES,
            disk_dir="simulated" if disk_files else "",
            disk_file_bytes=DISK_FILE_BYTES,
            extent_bytes=rng.choice((UNIT_BYTES, 2 * UNIT_BYTES)),
            lease_ttl_ms=800,
            report_interval_ms=400,
            report_retry_ms=100,
            scrub_bytes=rng.choice((0, 20 * UNIT_BYTES)),
        ),
    )


def _limits(rng: random.Random) -> dict[str, int]:
    """Draws bounds of core/limits.py, so low that a run reaches them; or keeps the real ones."""
    if rng.random() < 0.5:
        return {}
    return {
        "INVENTORY_CHUNK": rng.choice((2, 5)),
        "REPORTS_PER_MESSAGE": 3,
        "STREAM_BACKLOG": rng.choice((5, 40)),
        "EVICTIONS_PER_ORDER": 3,
        "WAITING_WRITES": 2,
        "TICKETS_PER_HOLDER": 4,
        "LEASES_PER_HOLDER": 6,
        "SPAN_LOOKUPS": 2,
    }


def _batches(later: random.Random) -> dict[str, int]:
    """Draws bounds of blocks per step, so low that work is left for a later step; or keeps the real ones."""
    return {"SWEEP_BLOCKS": 2, "BATCH": 2, "REPUBLISHED_BLOCKS": 2} if later.random() < 0.3 else {}


def without_faults(scenario: Scenario) -> Scenario:
    """Returns the same cluster and load without faults."""
    return replace(scenario, faults=(), loss=0.0, twice=0.0)
