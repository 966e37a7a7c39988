"""The rules for settings, beyond the type of each: a configuration that contradicts itself or cannot work is
refused."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from dataclasses import fields
from itertools import chain
from typing import Any

from kvcluster.config.ports import METRICS_PORTS, is_loopback, overlapping, parse_ports, port_table
from kvcluster.config.sections import (
    CODECS,
    ENCRYPTIONS,
    GPU_DEVICES,
    LOG_FORMATS,
    LOSSES,
    NETWORK,
    NO_ENCRYPTION,
    NODE_PORTS,
    TLS,
    TRANSPORTS,
    ClientConfig,
    Config,
    CoordinatorConfig,
    EventsConfig,
    LogConfig,
    ShardConfig,
)
from kvcluster.errors import ConfigError
from kvcluster.eviction import POLICIES

_LOOPBACK = re.compile(r"tcp://(?:127\.[0-9.]+|\[::1\]):")
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,38}[a-z0-9])?")
_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?|[0-9A-Fa-f:]{2,39}")
_WORKER_PORTS = 16
_LEAST_NODE_TIMEOUT_MS, _MOST_NODE_TIMEOUT_MS = 8_000, 600_000
_MAY_BE_ZERO = ("deadline_ms", "hold_ms", "store_wait_ms", "volume_wait_ms", "stop_ms")

_Rule = tuple[bool, str]
"""Whether the rule holds, and the error message if it does not."""


def check(config: Config) -> None:
    """Raises ConfigError with the first rule that does not hold."""
    for holds, sentence in chain(
        _cluster_rules(config),
        _coordinator_rules(config.coordinator),
        _shard_rules(config.shard, "shard"),
        _group_rules(config),
        _ray_rules(config),
        _security_rules(config),
        _client_rules(config.client),
        _transport_rules(config),
        _event_rules(config.events, encrypted=config.security.encryption == TLS),
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
        0 <= config.metrics.port <= 65_535 - METRICS_PORTS,
        f"metrics.port must be at most {65_535 - METRICS_PORTS}: shards take ports after it; 0 for none",
    )
    yield bool(_NAME.fullmatch(config.name)), f"name must be up to 40 of a-z, 0-9 and '-', not {config.name!r}"
    advertised = config.server.advertise
    yield (
        not advertised or bool(_HOST.fullmatch(advertised)),
        f"server.advertise must be a host name or address without a port, not {advertised!r}",
    )
    quotas = config.server.quota_file
    yield (
        not quotas or os.path.isabs(quotas),
        f"server.quota_file must be an absolute path, not {quotas!r}: actors run elsewhere",
    )
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


def _shard_rules(s: ShardConfig, at: str) -> Iterator[_Rule]:
    yield 0 <= s.q4_sampled <= 1, f"{at}.q4_sampled must be between 0 and 1"
    least = "must be at least 4KiB, and hold many pages: one of 16 tokens of an 8B model takes 2 MiB"
    yield s.ram_bytes >= 4_096, f"{at}.ram_bytes {least}"
    yield not s.host_bytes or s.host_bytes >= 4_096, f"{at}.host_bytes {least}; 0 for no host tier"
    yield s.gpu_device in GPU_DEVICES, f"{at}.gpu_device must be {' or '.join(GPU_DEVICES)}, not {s.gpu_device!r}"
    yield not s.gpu_bytes or s.gpu_bytes >= 4_096, f"{at}.gpu_bytes {least}; 0 for no GPU tier"
    yield (
        not s.gpu_bytes or bool(s.host_bytes),
        f"{at}.gpu_bytes needs {at}.host_bytes: readers of other machines get copies of its pages there",
    )
    yield (
        s.num_gpus in (0, 1) or (0.0001 <= s.num_gpus < 1 and round(s.num_gpus, 4) == s.num_gpus),
        f"{at}.num_gpus must be 1 or a part of one GPU with four decimals at most, such as 0.5, not {s.num_gpus:g}",
    )
    yield not s.num_gpus or bool(s.gpu_bytes), f"{at}.num_gpus needs {at}.gpu_bytes: the shard's pool on its GPU"
    yield not s.disk_bytes or bool(s.disk_dir), f"{at}.disk_bytes needs {at}.disk_dir: a folder on a local drive"
    yield (
        not s.disk_dir or os.path.isabs(s.disk_dir),
        f"{at}.disk_dir must be an absolute path, not {s.disk_dir!r}: shards run in folders of their own",
    )
    yield (
        not s.disk_dir or bool(s.disk_bytes),
        f"{at}.disk_dir needs {at}.disk_bytes: the size of the disk tier in that folder",
    )
    yield (
        not s.disk_bytes or bool(s.host_bytes),
        f"{at}.disk_bytes needs {at}.host_bytes: pages reach the disk from the host tier, and return through it",
    )
    yield (
        s.lease_ttl_ms >= 100,
        f"{at}.lease_ttl_ms must be at least 100: shorter leases end while their workers are merely busy",
    )
    yield 0 <= s.attend_threads <= 1_024, f"{at}.attend_threads must be between 0 and 1024"
    yield (
        s.stop_ms <= 3_600_000,
        f"{at}.stop_ms must be at most 3600000; keep it below the time after which a stopped process is killed, such "
        "as the 30 s of a pod",
    )


def _group_rules(config: Config) -> Iterator[_Rule]:
    yield not config.groups or config.shards == 1, "give shards or groups, not both"
    for name, group in config.groups.items():
        at = f"groups.{name}"
        yield bool(_NAME.fullmatch(name)), f"groups: a name is up to 40 of a-z, 0-9 and '-', not {name!r}"
        yield group.shards >= 1, f"{at}.shards must be at least 1"
        yield (
            not group.per_node or bool(group.resources),
            f"{at}.per_node needs {at}.resources: the nodes that offer them get a shard",
        )
        for resource, amount in group.resources.items():
            yield amount > 0, f"{at}.resources.{resource} must be positive"
        yield from _shard_rules(group.shard, f"{at}.shard")


def _ray_rules(config: Config) -> Iterator[_Rule]:
    ray, server = config.ray, config.server
    yield 1 <= ray.port <= 65_535, "ray.port must be between 1 and 65535"
    yield (
        len(parse_ports(ray.node_ports, "ray.node_ports")) >= NODE_PORTS,
        f"ray.node_ports must be a range of at least {NODE_PORTS} ports",
    )
    yield (
        len(parse_ports(ray.worker_ports, "ray.worker_ports")) >= _WORKER_PORTS,
        f"ray.worker_ports must be a range of at least {_WORKER_PORTS} ports: Ray keeps some in reserve",
    )
    yield (
        _LEAST_NODE_TIMEOUT_MS <= ray.node_timeout_ms <= _MOST_NODE_TIMEOUT_MS,
        f"ray.node_timeout_ms must be between {_LEAST_NODE_TIMEOUT_MS} and {_MOST_NODE_TIMEOUT_MS}: a busy node may be "
        "silent for some seconds, and a lost one is to be replaced",
    )
    yield (
        not ray.redis or ray.redis.rpartition(":")[2].isdigit(),
        f"ray.redis must be HOST:PORT, not {ray.redis!r}",
    )
    secret = server.secret_file
    yield (
        not ray.redis_password_from_secret or bool(ray.redis and secret and not ray.redis_password_file),
        "ray.redis_password_from_secret needs ray.redis and server.secret_file, and no ray.redis_password_file",
    )
    yield (
        not secret or os.path.isabs(secret),
        f"server.secret_file must be an absolute path, the same on each node, not {secret!r}",
    )
    shared = overlapping(port_table(config))
    yield (
        shared is None,
        "" if shared is None else f"{shared[0].setting} and {shared[1].setting} share a port; move one of them",
    )


LEAST_STAGING_BYTES = 16 * 2**20
"""A quarter of it holds one record of limits.RECORD_BYTES after decoding, and the table of its moves."""


def _client_rules(client: ClientConfig) -> Iterator[_Rule]:
    yield client.accept in LOSSES, f"client.accept must be one of {', '.join(LOSSES)}, not {client.accept!r}"
    yield client.breaker_failures >= 1, "client.breaker_failures must be at least 1"
    yield 0 <= client.store_niceness <= 19, "client.store_niceness must be between 0 and 19"
    staging = client.device_staging_bytes
    assert isinstance(staging, int), "sizes are numbers by now"
    least = f"client.device_staging_bytes must be 0 or at least {LEAST_STAGING_BYTES}, not {staging}"
    yield staging == 0 or staging >= LEAST_STAGING_BYTES, least


def _security_rules(config: Config) -> Iterator[_Rule]:
    security, client = config.security, config.client
    sections = {"security": security.encryption, "client": client.encryption, "ray": config.ray.encryption}
    for prefix, chosen in sections.items():
        known = f"{prefix}.encryption must be one of {', '.join(ENCRYPTIONS)}, not {chosen!r}"
        yield chosen in ("", *ENCRYPTIONS), known
    encrypts = security.encryption == TLS
    for name in ("ca_file", "cert_file", "key_file"):
        path = getattr(security, name)
        yield (
            bool(path) == encrypts,
            f"security.{name} is needed for security.encryption = {TLS!r}, and has no meaning without it",
        )
        yield not path or os.path.isabs(path), f"security.{name} must be an absolute path, not {path!r}"
    yield (
        encrypts or not security.client_certificates,
        f"security.client_certificates needs security.encryption = {TLS!r}",
    )
    yield (
        bool(security.encryption) or is_loopback(config.server.host),
        f"server.host is {config.server.host}, which other machines reach, and nothing says how their traffic is "
        f"encrypted: set security.encryption to {TLS!r}, to {NETWORK!r} if the network below encrypts (WireGuard, a "
        f"mesh), or to {NO_ENCRYPTION!r} (docs/security.md)",
    )
    yield (
        bool(config.ray.encryption) or not (encrypts and config.server.secret_file),
        "security.encryption does not encrypt what Ray's processes send one another: set ray.encryption to "
        f"{TLS!r} (the certificate of each node must have its address), {NETWORK!r} or {NO_ENCRYPTION!r}",
    )
    yield config.ray.encryption != TLS or encrypts, f"ray.encryption = {TLS!r} needs security.encryption = {TLS!r}"
    yield (
        not client.ca_file or client.encryption in ("", TLS),
        f"client.ca_file is for TLS, and client.encryption is {client.encryption!r}: name one of both",
    )
    yield bool(client.cert_file) == bool(client.key_file), "client.cert_file and client.key_file belong together"


def _transport_rules(config: Config) -> Iterator[_Rule]:
    yield "grpc" in config.server.transports, "server.transports must name grpc, since control goes over it"
    for prefix, path in (("server", config.server.socket_dir), ("client", config.client.socket_dir)):
        yield not path or path.startswith("/"), f"{prefix}.socket_dir must be an absolute path, not {path!r}"
    yield bool(config.client.transports), f"client.transports must name one of {', '.join(TRANSPORTS)}"
    for prefix, names in (("server", config.server.transports), ("client", config.client.transports)):
        for name in names:
            known = f"{prefix}.transports must be some of {', '.join(TRANSPORTS)}, not {name!r}"
            yield name in TRANSPORTS, known


def _event_rules(e: EventsConfig, *, encrypted: bool) -> Iterator[_Rule]:
    yield not e.replay or bool(e.endpoint), "events.replay needs events.endpoint: only published events can be replayed"
    yield e.buffer_batches >= 1, "events.buffer_batches must be at least 1"
    for name, where in (("endpoint", e.endpoint), ("replay", e.replay)):
        match = re.fullmatch(r"tcp://(?:[^:\[\]]+|\[[^\[\]]+\]):([0-9]{1,5})", where)
        is_tcp = match is not None and int(match[1]) <= 65_535
        yield not where or is_tcp, f"events.{name} must be tcp://host:port, such as tcp://127.0.0.1:5557, not {where!r}"
        yield (
            not where or e.insecure or encrypted or bool(_LOOPBACK.match(where)),
            f"events.{name}: every process that reaches {where} reads the prompts of all tenants. Use a loopback "
            "address, or TLS (security.encryption), or set events.insecure = true",
        )


def _log_rules(log: LogConfig) -> Iterator[_Rule]:
    yield log.format in LOG_FORMATS, f"log.format must be one of {', '.join(LOG_FORMATS)}, not {log.format!r}"
    yield (
        not log.audit_file or os.path.isabs(log.audit_file),
        f"log.audit_file must be an absolute path, not {log.audit_file!r}: actors run elsewhere",
    )
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
