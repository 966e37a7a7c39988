"""The configuration tree: frozen, validated as a whole, and handed down as the smallest part that each object needs.

`load` is the only way in, from a TOML file, a mapping, or both (the mapping wins). Unknown keys are rejected by name,
since a setting that is silently ignored is worse than an error. Nothing else reads settings; no environment variable
changes behaviour. Durations are integer milliseconds, sizes integer bytes or text such as "4GiB".
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Any

from kvcluster.errors import ConfigError
from kvcluster.eviction import POLICIES
from kvcluster.transports import NAMES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_SIZE = re.compile(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([A-Za-z]*)\s*")
TRANSPORTS = NAMES
"""The transports that move pages, the fastest first. They are tried in this order, however a setting lists them."""

CODECS = ("raw", "q8", "q4")
"""Encodings of pages, by rising loss."""

LOSSES = ("exact", "q8", "q4")
"""Losses that KV may have, the least first."""

LOG_FORMATS = ("text", "json")
_LOOPBACK = re.compile(r"tcp://(?:127\.[0-9.]+|\[::1\]):")
_MAY_BE_ZERO = ("hold_ms", "store_wait_ms")

_Rule = tuple[bool, str]
"""Whether the rule holds, and the error message if it does not."""


@dataclass(frozen=True, slots=True)
class CoordinatorConfig:
    """`hold_ms`: time for which promised blocks are spared from eviction.
    `low_free`, `high_free`: if less than `low_free` of its bytes is free, a shard evicts until `high_free` is.
    `tenant_floor`: share of each tier that is divided evenly among the tenants that store there. What a tenant has
    below its part is not evicted for others (core/tenant_floors.py).
    `pinned_share`: share of all bytes that one tenant alone may pin. Several get less each (core/shares.py).
    `sequence_share`: likewise, for the blocks of open sequences.
    `sequence_ttl_ms`: a worker that is silent for this long has its sequences closed.
    `private_grace_ms`: time for which private pages that no sequence claims are kept, for workers to claim them.
    `hot_loads`: a run of blocks loaded this often within `hot_window_ms` gets `hot_replicas` replicas in all.
    `eviction_policy`: lru or gdsf (docs/tiers.md).
    `host_codec`: encoding of blocks demoted to the host tier, raw, q8 or q4. The first `host_raw_blocks` blocks of a
    sequence stay raw.
    `q4_error_budget`: a namespace whose sampled pages lose more than this by q4, on average, gets q8.
    `promote_loads`: a run loaded this often within `hot_window_ms` is promoted.
    `drain_ms`: after this time a draining shard leaves, whatever it still holds.
    `state_dir`: where tombstones are kept for the next coordinator; "" keeps them only in the shards."""

    ticket_ttl_ms: int = 30_000
    hold_ms: int = 10_000
    run_blocks: int = 64
    refresh_ms: int = 10_000
    rebuild_grace_ms: int = 5_000
    low_free: float = 0.05
    high_free: float = 0.10
    tenant_floor: float = 0.5
    pinned_share: float = 0.25
    sequence_share: float = 0.5
    sequence_ttl_ms: int = 30_000
    private_grace_ms: int = 60_000
    hot_loads: int = 32
    hot_window_ms: int = 60_000
    hot_replicas: int = 2
    eviction_policy: str = "lru"
    host_codec: str = "q8"
    host_raw_blocks: int = 1
    q4_error_budget: float = 0.15
    promote_loads: int = 4
    drain_ms: int = 300_000
    state_dir: str = ""


@dataclass(frozen=True, slots=True)
class ShardConfig:
    """`device_bytes`: size of the device tier, of raw pages.
    `host_bytes`: size of the host tier below it, of encoded pages; 0 for none.
    `disk_bytes`: size of the disk tier below that, of files in a folder of this shard's own within `disk_dir`; 0 for
    none.
    `disk_file_bytes`: size of each file, 0 to choose by the size of the tier.
    `q4_sampled`: share of the pages encoded in q4 whose loss is measured.
    `extent_bytes`: the allocator's unit, 0 to choose one by the size of each tier.
    `scrub_bytes`: bytes of its own pages that a shard reads per second to find corrupt ones; 0 for none."""

    device_bytes: int = 2**30
    host_bytes: int = 0
    disk_bytes: int = 0
    disk_dir: str = ""
    disk_file_bytes: int = 0
    q4_sampled: float = 0.02
    extent_bytes: int = 0
    lease_ttl_ms: int = 10_000
    report_interval_ms: int = 500
    report_retry_ms: int = 250
    scrub_bytes: int = 32 * 2**20


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Where to listen, and who may connect. The coordinator listens to workers on `port` and to shards on
    `report_port`; 0 takes a free one. Without a `token_file` the only tenant is `default`, and `host` must be a
    loopback address unless `insecure` is set. `transports`: those by which a shard lets its pages be moved; they must
    include grpc, which carries control."""

    host: str = "127.0.0.1"
    port: int = 7070
    report_port: int = 0
    token_file: str = ""
    insecure: bool = False
    threads: int = 16
    transports: tuple[str, ...] = TRANSPORTS


@dataclass(frozen=True, slots=True)
class EventsConfig:
    """KV events for external subscribers. `endpoint`: the address to publish on, such as "tcp://127.0.0.1:5557"; "" for
    none. `replay`: the address that replays missed events, out of the last `buffer_batches` batches. Events show the
    token ids of all tenants to every subscriber, so both must be loopback addresses unless `insecure` is set."""

    endpoint: str = ""
    replay: str = ""
    buffer_batches: int = 10_000
    insecure: bool = False


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """Metrics and health over HTTP. `port`: that of the coordinator; shard-0 listens on the next one, and so on. 0 for
    none. They show figures of all tenants to everyone who reaches them, so `host` should be closed to strangers.
    `tenants`: the coordinator's also show the figures of each tenant, by its name."""

    host: str = "127.0.0.1"
    port: int = 0
    tenants: bool = False


@dataclass(frozen=True, slots=True)
class LogConfig:
    """What the processes of a cluster log to their standard error. `format`: text, warnings for people; or json, one
    object a line, with a line for each decision besides (docs/metrics.md).
    `lines_per_second`: the most lines of each event, and of each module besides, in json."""

    format: str = "text"
    lines_per_second: int = 10


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """`deadline_ms`: of one call, however many parts it has.
    `store_wait_ms`: the time that a store may wait for room.
    `breaker_failures`: after this many failures in a row a shard is not asked for `breaker_ms`, then for twice as long.
    `transports`: those that may move pages, whichever others a shard offers.
    `accept`: the worst loss that loads accept, exact, q8 or q4; pages that have lost more are a miss.
    `store_niceness`: niceness of the threads that store, 0 to 19, above that of the process's others; for callers that
    do not wait for their stores.
    `resident_bytes`: memory for the pages of open sequences, taken as they grow."""

    deadline_ms: int = 10_000
    connect_ms: int = 5_000
    store_wait_ms: int = 2_000
    breaker_failures: int = 3
    breaker_ms: int = 500
    accept: str = "q4"
    transports: tuple[str, ...] = TRANSPORTS
    store_niceness: int = 0
    resident_bytes: int = 2**30


@dataclass(frozen=True, slots=True)
class Config:
    """All settings. `membership_ttl_ms`: a shard that is silent for this long is lost. `stall_ms`: a process that was
    stalled for longer extends the terms of others, since it could not receive their messages."""

    shards: int = 1
    membership_ttl_ms: int = 5_000
    stall_ms: int = 500
    coordinator: CoordinatorConfig = field(default_factory=CoordinatorConfig)
    shard: ShardConfig = field(default_factory=ShardConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    events: EventsConfig = field(default_factory=EventsConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    log: LogConfig = field(default_factory=LogConfig)
    client: ClientConfig = field(default_factory=ClientConfig)


def load(path: str | Path | None = None, overrides: Mapping[str, Any] | None = None) -> Config:
    """Returns the configuration from a TOML file and/or a nested mapping. Raises ConfigError naming the bad key."""
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from None
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, a thousand brackets
            raise ConfigError(f"{path} is not valid TOML: {error}") from None
    config: Config = _build(Config, _merged(values, overrides or {}), "")
    _check(config)
    return config


def size(text: str | int, name: str = "size") -> int:
    """Returns the bytes of "1GiB", "512 MiB", "4096" or a number. Raises ConfigError."""
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return text
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ConfigError(f"{name}: {text!r} is no size; write bytes, or a number with KiB, MiB, GiB or TiB")
    return int(Fraction(match[1]) * unit)


def _merged(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(values)
    for key, value in overrides.items():
        below = out.get(key)
        out[key] = _merged(below, value) if isinstance(value, Mapping) and isinstance(below, Mapping) else value
    return out


def _build(kind: type[Any], values: Mapping[str, Any], prefix: str) -> Any:
    known = {f.name: f for f in fields(kind)}
    for key in values:
        if key not in known:
            raise ConfigError(f"unknown setting {prefix}{key}; known here: {', '.join(known)}")
    built: dict[str, Any] = {}
    for name, value in values.items():
        where = known[name]
        if where.default_factory is not MISSING:
            if not isinstance(value, Mapping):
                raise ConfigError(f"{prefix}{name} must be a table of settings, not {value!r}")
            built[name] = _build(where.default_factory, value, f"{prefix}{name}.")  # type: ignore[arg-type]
        else:
            built[name] = _value(value, where.default, prefix + name)
    return kind(**built)


def _value(value: Any, default: Any, name: str) -> Any:
    if name.endswith("_bytes"):
        return size(value, name)
    wanted = type(default)
    if wanted is tuple:
        if not isinstance(value, (list, tuple)) or not all(isinstance(one, str) for one in value):
            raise ConfigError(f"{name} must be a list of texts, such as {list(default)!r}, not {value!r}")
        return tuple(value)
    if wanted is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise ConfigError(f"{name} must be a number such as {default!r}, not one of hundreds of digits") from None
    if type(value) is not wanted:
        raise ConfigError(f"{name} must be of type {wanted.__name__}, such as {default!r}, not {value!r}")
    return value


def _check(config: Config) -> None:
    """Raises ConfigError with the first rule that does not hold."""
    for holds, sentence in chain(
        _cluster_rules(config),
        _coordinator_rules(config.coordinator),
        _shard_rules(config.shard),
        _client_rules(config.client),
        _transport_rules(config),
        _event_rules(config.events),
        _log_rules(config.log),
        _duration_rules(config),
    ):
        if not holds:
            raise ConfigError(sentence)


def _cluster_rules(config: Config) -> Iterator[_Rule]:
    yield config.shards >= 1, "shards must be at least 1"
    yield 0 <= config.server.port <= 65_535, "server.port must be between 0 and 65535; 0 chooses a free one"
    yield (
        0 <= config.server.report_port <= 65_535,
        "server.report_port must be between 0 and 65535; 0 chooses a free one",
    )
    yield (
        config.server.report_port != config.server.port or not config.server.port,
        "server.report_port must differ from server.port: workers may not keep shards from reporting",
    )
    yield config.server.threads >= 2, "server.threads must be at least 2"
    yield (
        0 <= config.metrics.port <= 65_535 - config.shards,
        "metrics.port must be at most 65535 less the number of shards, each of which takes a port after it; 0 for none",
    )
    taken = range(config.metrics.port, config.metrics.port + config.shards + 1) if config.metrics.port else ()
    for name, port in (("port", config.server.port), ("report_port", config.server.report_port)):
        yield port not in taken, f"metrics.port and the shards' ports after it must leave out server.{name} ({port})"
    yield (
        2 * config.shard.report_interval_ms < config.membership_ttl_ms,
        "membership_ttl_ms must exceed two report intervals, or one lost report loses a shard",
    )


def _coordinator_rules(c: CoordinatorConfig) -> Iterator[_Rule]:
    yield 0 <= c.low_free <= c.high_free <= 0.9, "coordinator needs 0 <= low_free <= high_free <= 0.9"
    yield 0 <= c.tenant_floor <= 0.8, "coordinator.tenant_floor must be between 0 and 0.8"
    yield 0 <= c.pinned_share <= 0.9, "coordinator.pinned_share must be between 0 and 0.9"
    yield 0 <= c.sequence_share <= 0.9, "coordinator.sequence_share must be between 0 and 0.9"
    yield (
        c.private_grace_ms >= c.sequence_ttl_ms,
        "coordinator.private_grace_ms must be at least sequence_ttl_ms, or a slow worker's private pages are erased",
    )
    yield 1 <= c.run_blocks <= 8_192, "coordinator.run_blocks must be between 1 and 8192"
    yield c.hot_loads >= 1, "coordinator.hot_loads must be at least 1"
    yield (
        1 <= c.hot_replicas <= 64,
        "coordinator.hot_replicas must be between 1 and 64; 1 makes no copies of hot blocks",
    )
    yield c.host_codec in CODECS, f"coordinator.host_codec must be one of {', '.join(CODECS)}, not {c.host_codec!r}"
    yield (
        c.eviction_policy in POLICIES,
        f"coordinator.eviction_policy must be one of {', '.join(POLICIES)}, not {c.eviction_policy!r}",
    )
    yield 0 <= c.q4_error_budget < math.inf, "coordinator.q4_error_budget must be a number of at least 0"
    yield c.host_raw_blocks >= 0, "coordinator.host_raw_blocks must not be negative"
    yield c.promote_loads >= 1, "coordinator.promote_loads must be at least 1"


def _shard_rules(s: ShardConfig) -> Iterator[_Rule]:
    yield 0 <= s.q4_sampled <= 1, "shard.q4_sampled must be between 0 and 1"
    yield s.device_bytes >= 4_096, "shard.device_bytes must hold at least one page: give 64MiB or more"
    yield (
        not s.host_bytes or s.host_bytes >= 4_096,
        "shard.host_bytes must hold at least one page: give 64MiB or more, or 0 for no host tier",
    )
    yield not s.disk_bytes or bool(s.disk_dir), "shard.disk_bytes needs shard.disk_dir: a folder on a local drive"
    yield (
        not s.disk_dir or os.path.isabs(s.disk_dir),
        f"shard.disk_dir must be an absolute path, not {s.disk_dir!r}: shards run in folders of their own",
    )
    yield (
        not s.disk_dir or bool(s.disk_bytes),
        "shard.disk_dir needs shard.disk_bytes: the size of the disk tier in that folder",
    )
    yield (
        not s.disk_bytes or bool(s.host_bytes),
        "shard.disk_bytes needs shard.host_bytes: pages reach the disk from the host tier, and return through it",
    )
    yield (
        s.lease_ttl_ms >= 100,
        "shard.lease_ttl_ms must be at least 100: shorter leases end while their workers are merely busy",
    )


def _client_rules(client: ClientConfig) -> Iterator[_Rule]:
    yield client.accept in LOSSES, f"client.accept must be one of {', '.join(LOSSES)}, not {client.accept!r}"
    yield client.breaker_failures >= 1, "client.breaker_failures must be at least 1"
    yield 0 <= client.store_niceness <= 19, "client.store_niceness must be between 0 and 19"


def _transport_rules(config: Config) -> Iterator[_Rule]:
    yield "grpc" in config.server.transports, "server.transports must name grpc, since control goes over it"
    yield bool(config.client.transports), f"client.transports must name one of {', '.join(TRANSPORTS)}"
    for prefix, names in (("server", config.server.transports), ("client", config.client.transports)):
        for name in names:
            known = f"{prefix}.transports must be some of {', '.join(TRANSPORTS)}, not {name!r}"
            yield name in TRANSPORTS, known


def _event_rules(e: EventsConfig) -> Iterator[_Rule]:
    yield not e.replay or bool(e.endpoint), "events.replay needs events.endpoint: only published events can be replayed"
    yield e.buffer_batches >= 1, "events.buffer_batches must be at least 1"
    for name, where in (("endpoint", e.endpoint), ("replay", e.replay)):
        told = re.fullmatch(r"tcp://(?:[^:\[\]]+|\[[^\[\]]+\]):([0-9]{1,5})", where)
        is_tcp = told is not None and int(told[1]) <= 65_535
        yield not where or is_tcp, f"events.{name} must be tcp://host:port, such as tcp://127.0.0.1:5557, not {where!r}"
        yield (
            not where or e.insecure or bool(_LOOPBACK.match(where)),
            f"events.{name}: every process that reaches {where} reads the prompts of all tenants. Use a loopback "
            "address, or set events.insecure = true",
        )


def _log_rules(log: LogConfig) -> Iterator[_Rule]:
    yield log.format in LOG_FORMATS, f"log.format must be one of {', '.join(LOG_FORMATS)}, not {log.format!r}"
    yield log.lines_per_second >= 1, "log.lines_per_second must be at least 1"


def _duration_rules(config: Config) -> Iterator[_Rule]:
    sections: dict[str, Any] = {
        "": config,
        "coordinator.": config.coordinator,
        "shard.": config.shard,
        "client.": config.client,
    }
    for prefix, section in sections.items():
        for name in (f.name for f in fields(section) if f.name.endswith("_ms")):
            if name in _MAY_BE_ZERO:
                yield getattr(section, name) >= 0, f"{prefix}{name} must not be negative"
            else:
                yield getattr(section, name) > 0, f"{prefix}{name} must be positive"
