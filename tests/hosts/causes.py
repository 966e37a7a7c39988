"""What makes each metric move and each alert fire: real causes, on a cluster of several hosts.

A cause is a generator: it does something, yields while that lasts, and undoes it. While it has yielded, every series
that it names must rise or fall, and every alert that it names must fire; `also` are alerts that may fire besides.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tests.hosts.hosts import Cluster
from tests.hosts.metered import NODES, MeteredCluster
from tests.hosts.scraping import Series
from tests.hosts.worker import BLOCKS
from tests.waiting import eventually

Run = Callable[[MeteredCluster], Iterator[None]]


class Movement(NamedTuple):
    """A metric, and labels of the series of it that moves."""

    metric: str
    labels: Mapping[str, str]

    @classmethod
    def parse(cls, text: str) -> Movement:
        """Reads `lookup_tokens_total{result="hit"}`, whose name is without its prefix."""
        return cls("kvcluster_" + text.partition("{")[0], dict(re.findall(r'(\w+)="([^"]*)"', text)))

    def holds(self, before: Mapping[Series, float], after: Mapping[Series, float], sign: int) -> bool:
        """Whether a series of it has risen (`sign` 1) or fallen (-1). One that was not there was 0."""
        return any(
            series.is_of(self.metric, self.labels) and (value - before.get(series, 0.0)) * sign > 0
            for series, value in after.items()
        )


@dataclass(frozen=True, slots=True)
class Cause:
    """`rises`, `falls`: what moves. `fires`: the alerts of it. `also`: further alerts that it may cause."""

    name: str
    run: Run
    rises: tuple[Movement, ...]
    falls: tuple[Movement, ...]
    fires: frozenset[str]
    also: frozenset[str]

    @property
    def moves(self) -> list[tuple[Movement, int]]:
        """What moves, with the sign."""
        return [(movement, 1) for movement in self.rises] + [(movement, -1) for movement in self.falls]

    @property
    def metrics(self) -> set[str]:
        return {movement.metric for movement, _ in self.moves}


CAUSES: list[Cause] = []
"""In the order in which they happen, each on what the one before has left."""


def cause(*rises: str, falls: tuple[str, ...] = (), fires: str = "", also: str = "") -> Callable[[Run], Run]:
    """Adds a cause. `fires`, `also`: names of alerts without their prefix, separated by spaces."""

    def added(run: Run) -> Run:
        up, down = (tuple(map(Movement.parse, texts)) for texts in (rises, falls))
        alerts = [frozenset(f"KVCluster{name}" for name in names.split()) for names in (fires, also)]
        CAUSES.append(Cause(run.__name__, run, up, down, alerts[0], alerts[1]))
        return run

    return added


# ------------------------------------------------------------------------------------- stores and loads


@cause(
    *("lookups_total", 'lookup_tokens_total{result="hit"}', 'lookup_tokens_total{result="miss"}'),
    *('missed_tokens_total{reason="never_seen"}', "reused_tokens_total", "stores_total", "blocks"),
    *('store_blocks_total{decision="write"}', 'store_blocks_total{decision="committed"}'),
    *('reported_pages_total{event="committed"}', 'shard_pages_total{event="commits"}', 'tier_pages{tier="ram"}'),
    *('tenant_lookup_tokens_total{tenant="ops"}', 'tenant_written_blocks_total{tenant="ops"}', "call_seconds"),
    'tenant_bytes{tenant="ops",tier="ram",kind="used"}',
    *('exchanges_total{operation="load",result="done"}', 'exchanges_total{operation="store",result="done"}'),
    *('exchange_seconds{operation="load"}', 'moved_bytes_total{operation="load",path="tcp",tier="ram"}'),
    *('moved_bytes_total{operation="store",path="tcp",tier="ram"}', 'worker_paths{path="tcp"}'),
    'worker_breakers{state="closed"}',
    falls=('tier_bytes{tier="ram",use="free"}',),
)
def prompts_are_stored_and_loaded(world: MeteredCluster) -> Iterator[None]:
    assert world.worker("load", 0, 1)["blocks"] == 0
    assert world.worker("store", 0, 2) == {"stored": 2 * BLOCKS, "flushed": True}
    world.worker("store", 0, 1)
    found = world.worker("load", 0, 2)
    assert (found["blocks"], found["wrong"]) == (2 * BLOCKS, 0)
    yield


@cause(
    *('worker_attended_spans_total{choice="ship"}', 'worker_shipped_bytes_total{what="query"}'),
    'worker_shipped_bytes_total{what="result"}',
)
def a_query_goes_to_the_shards_that_have_the_pages(world: MeteredCluster) -> Iterator[None]:
    with world.held_worker("two") as far:
        assert far("store_long", 60) == 2 * BLOCKS
    assert world.worker("open", 60) == 2 * BLOCKS * 16
    assert world.worker("attend") == {"messages": 1, "failed": 0}
    yield
    world.worker("end")
    eventually(lambda: value_of(world, "kvcluster_sequences") == 0)  # or the next to open one is not seen to


@cause("sequences", "claimed_blocks", "private_blocks", "tickets", "namespaces")
def a_sequence_is_open_and_a_load_is_promised(world: MeteredCluster) -> Iterator[None]:
    assert world.worker("prepare", 0) == BLOCKS
    assert world.worker("sequence", 8) == 128
    world.worker("other_model")
    yield
    world.worker("end")


@cause(
    *("pinned_blocks", "ordered_pulls_total", 'moved_bytes_total{operation="replicate_in"}', "replica_requests"),
    "leases",
)
def a_prompt_is_pinned_on_more_shards_than_there_are(world: MeteredCluster) -> Iterator[None]:
    assert world.worker("pin", 1, len(NODES) + 1, 60.0) == BLOCKS
    with world.held_worker("one") as near:
        near("store", 40, 44)
        assert sum(near("borrow", seed) for seed in range(40, 44))
        yield


@cause("condemned_pages", "purged_blocks_total", 'unmoved_pages_total{operation="load"}')
def everything_is_cleared_while_it_is_read(world: MeteredCluster) -> Iterator[None]:
    with world.held_worker("one") as near:
        assert sum(near("borrow", seed) for seed in range(40, 44))
        assert world.worker("prepare", 0) == BLOCKS
        assert world.worker("clear")
        eventually(lambda: readable_pages(world) == 0)  # every shard has heard of it
        assert world.worker("redeem", 0, 1) == 0
        yield
        near("end")
    world.worker("end")


@cause(
    *('tier_move_seconds{operation="demote"}', 'tier_moved_bytes_total{source="ram",target="host"}'),
    *('tier_moved_bytes_total{source="host",target="disk"}', 'tier_pages{tier="disk"}'),
    *('reported_pages_total{event="gone"}', "eviction_age_seconds"),
    fires="EvictsYoung",
)
def more_is_stored_than_fits(world: MeteredCluster) -> Iterator[None]:
    world.worker("repeat", "store", 100, 200)
    yield
    world.worker("end")
    world.worker("clear")


@cause(falls=("cache_enabled",))
def the_cache_is_switched_off(world: MeteredCluster) -> Iterator[None]:
    operator = ("--address", f"{world.cluster.address}:7070")
    world.cluster.kvcluster("worker", "off", *operator)
    yield
    world.cluster.kvcluster("worker", "on", *operator)


@cause(fires="NotStoring")
def prompts_are_looked_up_and_never_stored(world: MeteredCluster) -> Iterator[None]:
    world.worker("repeat", "lookup", 900, 1)
    yield
    world.worker("end")


# ------------------------------------------------------------------------------------------- strangers


@cause(
    'refused_calls_total{reason="credential"}',
    'refused_connections_total{path="tcp",reason="credential"}',
    fires="CredentialRefused",
)
def a_stranger_calls(world: MeteredCluster) -> Iterator[None]:
    assert "does not know this token" in world.worker("stranger", world.address_of("one"))
    yield


@cause(
    'refused_calls_total{reason="version"}',
    'refused_connections_total{path="tcp",reason="version"}',
    fires="VersionRefused",
)
def a_release_calls_that_is_too_old(world: MeteredCluster) -> Iterator[None]:
    assert "upgrade" in world.worker("old_release", world.address_of("one"))
    yield


@cause('file_stale{file="tokens"}', fires="FileStale")
def the_token_file_is_spoilt(world: MeteredCluster) -> Iterator[None]:
    path = world.cluster.folder / "tokens"
    kept = path.read_text(encoding="utf-8")
    path.write_text("no line of a token file\n", encoding="utf-8")
    yield
    path.write_text(kept, encoding="utf-8")


@cause('file_stale{file="quotas"}', fires="FileStale")
def the_quota_file_is_spoilt(world: MeteredCluster) -> Iterator[None]:
    path = world.cluster.folder / "quotas"
    kept = path.read_text(encoding="utf-8")
    path.write_text("no line of a quota file\n", encoding="utf-8")
    yield
    path.write_text(kept, encoding="utf-8")


@cause(falls=("certificate_expires_seconds",), fires="CertificateEnds")
def a_certificate_is_replaced_by_one_that_ends_soon(world: MeteredCluster) -> Iterator[None]:
    world.cluster.renew(days=5)
    yield
    world.cluster.renew(days=90)


@cause('file_stale{file="certificates"}', fires="FileStale")
def a_certificate_is_copied_without_its_key(world: MeteredCluster) -> Iterator[None]:
    key = world.cluster.folder / "tls.key"
    kept = key.read_bytes()
    world.cluster.renew(days=90)
    made = key.read_bytes()
    key.write_bytes(kept)
    yield
    key.write_bytes(made)


@cause("calls_under_way")
def a_worker_opens_a_stream_and_says_nothing(world: MeteredCluster) -> Iterator[None]:
    world.worker("silent_stream", world.address_of("one"))
    yield
    world.worker("end")


# ------------------------------------------------------------------------------------ memory and drives


@cause('reported_pages_total{event="corrupt"}', 'shard_pages_total{event="corrupt"}', fires="CorruptPages")
def bits_flip_in_a_shard(world: MeteredCluster) -> Iterator[None]:
    world.worker("store", 10, 11)
    assert world.corrupt(10)
    yield


@cause(falls=("memory_limit_bytes",), fires="MemoryFull")
def the_limit_of_memory_is_lowered(world: MeteredCluster) -> Iterator[None]:
    used = max(
        value
        for series, value in world.prometheus.series().items()
        if series.is_of("kvcluster_memory_bytes", {"instance": f"{world.cluster.network.addresses['two']}:9401"})
    )
    world.set_memory_limit("two", int(used / 0.95))
    yield
    world.set_memory_limit("two")


@cause(
    *("degraded", "restarted_shards_total", "shard_epoch_seconds", "memory_bytes"),
    falls=("uptime_seconds",),
    fires="Degraded",
    also="ProcessDown ShardLost",
)
def a_shard_restarts_with_a_larger_pool_and_a_drive_that_cannot_be_written(world: MeteredCluster) -> Iterator[None]:
    world.configure(ram_bytes=2**26)
    world.kill_process("spare")
    world.remount("spare", read_only=True)
    yield
    world.configure()
    world.remount("spare", read_only=False)
    world.restart("spare")


# --------------------------------------------------------------------------------------- shards that go


@cause('drains_total{result="moved"}', also="ProcessDown")
def a_shard_is_drained(world: MeteredCluster) -> Iterator[None]:
    world.cluster.kvcluster(
        "worker", "drain", world.shard_at("two")["shard"], "--address", f"{world.cluster.address}:7070"
    )
    yield
    world.wait_whole()


@cause(
    *("draining", 'orders{kind="pull"}', 'waiting{queue="orders"}'),
    'drains_total{result="deadline"}',
    fires="DrainStuck DrainLate",
    also="ProcessDown BreakerOpen",
)
def a_shard_is_drained_that_no_other_reaches(world: MeteredCluster) -> Iterator[None]:
    assert world.cluster.worker("one", "store", 20, 22)["stored"] == 2 * BLOCKS  # on its own host, if it has room
    command = ("drain", world.shard_at("one")["shard"], "--no-wait", "--address", f"{world.cluster.address}:7070")
    with world.cut_off_from_nodes("one"):
        world.cluster.kvcluster("worker", *command)
        yield
    world.wait_whole()


@cause(
    *("lost_shards_total", 'shards{state="lost"}', 'worker_breakers{state="open"}', "worker_failed_attends_total"),
    fires="ProcessDown ShardLost BreakerOpen",
)
def a_node_loses_its_power(world: MeteredCluster) -> Iterator[None]:
    seeds = range(30, 32)
    assert world.cluster.worker("two", "store", seeds[0], seeds[-1] + 1)["stored"] == len(seeds) * BLOCKS
    for seed in seeds:
        assert world.worker("prepare", seed) == BLOCKS
    with world.held_worker("two") as far:
        assert far("store_long", 61) == 2 * BLOCKS
    assert world.worker("open", 61) == 2 * BLOCKS * 16
    world.cluster.kill("two")
    assert world.worker("attend")["failed"]
    world.worker("repeat", "redeem", seeds[0], len(seeds))
    yield
    world.worker("end")
    world.join("two")
    world.wait_whole()


@cause(
    *("rebuilding", "start_retries_total", "coordinator_epoch_seconds"),
    fires="NoCoordinator Rebuilding ProcessDown",
    also="ShardLost BreakerOpen",
)
def the_coordinator_dies_and_its_port_is_taken_while_a_shard_hangs(world: MeteredCluster) -> Iterator[None]:
    with world.stopped("spare"):
        world.kill_process("head")
        with eventually(lambda: taken_port(world.cluster, 7070)):
            eventually(lambda: "KVClusterNoCoordinator" in world.prometheus.firing())
        yield
    world.wait_whole()


def readable_pages(world: MeteredCluster) -> float:
    """How many pages all shards hold, as Prometheus has it."""
    return value_of(world, "kvcluster_tier_pages")


def value_of(world: MeteredCluster, metric: str) -> float:
    """The sum of all series of a metric, as Prometheus has it."""
    return sum(value for one, value in world.prometheus.series().items() if one.is_of(metric, {}))


def taken_port(cluster: Cluster, port: int) -> socket.socket | None:
    """A listener of another program at this port of the head's host; None while that is taken."""

    def listen() -> socket.socket | None:
        try:
            return socket.create_server(("0.0.0.0", port))
        except OSError:
            return None

    return cluster.network.within("head", listen)
