"""The settings: a tree of frozen dataclasses. Each object is handed the smallest part that it needs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kvcluster.errors import ConfigError
from kvcluster.transports import NAMES

TRANSPORTS = NAMES
"""The transports that move pages, the fastest first. They are tried in this order, however a setting lists them."""

CODECS = ("raw", "q8", "q4")
"""Encodings of pages, by rising loss."""

TWIN = "twin"
GPU_DEVICES = ("cuda", TWIN)
"""The kinds of memory that a GPU tier may lie in (ShardConfig.gpu_device)."""

LOSSES = ("exact", "q8", "q4")
"""Losses that KV may have, the least first."""

LOG_FORMATS = ("text", "json")

TLS, NETWORK, NO_ENCRYPTION = "tls", "network", "none"
ENCRYPTIONS = (TLS, NETWORK, NO_ENCRYPTION)
"""What encrypts the traffic of a cluster (SecurityConfig.encryption)."""

SHARD_RESOURCE = "kvcluster_shard"
"""The custom resource of Ray that a node offers for each shard that it takes."""

DEFAULT_GROUP = "shard"
"""The name of the only group where the configuration names none."""

OF = "of"
"""In the metadata of a field that is a mapping: the type of its values."""

NODE_PORTS = 8
"""How many ports Ray's own processes listen on, on each node."""


@dataclass(frozen=True, slots=True)
class CoordinatorConfig:
    """`hold_ms`: time for which promised blocks are spared from eviction.
    `low_free`, `high_free`: if less than `low_free` of its bytes is free, a shard evicts until `high_free` is.
    `tenant_floor`: share of each tier that is divided evenly among the tenants that store there. What a tenant has
    below its part is not evicted for others (core/coordinator/tenant_floors.py).
    `pinned_share`: share of all bytes that one tenant alone may pin. Several get less each (core/tenant_shares.py).
    `sequence_share`: likewise, for the blocks of open sequences.
    `sequence_ttl_ms`: a worker that is silent for this long has its sequences closed.
    `private_grace_ms`: time for which private pages that no sequence claims are kept, for workers to claim them.
    `hot_loads`: a run of blocks loaded this often within `hot_window_ms` gets `hot_replicas` replicas in all.
    `eviction_policy`: lru or gdsf (docs/tiers.md).
    `host_codec`: encoding of blocks demoted to the host tier, raw, q8 or q4. The first `host_raw_blocks` blocks of a
    sequence stay raw.
    `q4_error_budget`: a namespace whose sampled pages lose more than this by q4, on average, gets q8.
    `promote_loads`: a run below RAM loaded this often within `hot_window_ms` is promoted.
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
    """`ram_bytes`: size of the RAM tier, of raw pages; up to release 0.2 it was called `device_bytes`.
    `gpu_bytes`: size of the tier above it, of raw pages in the memory of the shard's GPU; 0 for none.
    `num_gpus`: the GPUs that a shard with that tier claims of Ray, which shows it those alone: 1, or a part such as 0.5
    where several claim one.
    `gpu_device`: `cuda`, the first GPU that the shard's process is shown; or `twin`, memory of the process itself that
    is used as a GPU's is, for a trial without one. It is slow.
    `host_bytes`: size of the host tier below it, of encoded pages; 0 for none.
    `disk_bytes`: size of the disk tier below that, of files in a folder of this shard's own within `disk_dir`; 0 for
    none.
    `disk_file_bytes`: size of each file, 0 to choose by the size of the tier.
    `q4_sampled`: share of the pages encoded in q4 whose loss is measured.
    `extent_bytes`: the allocator's unit, 0 to choose one by the size of each tier.
    `scrub_bytes`: bytes of its own pages that a shard reads per second to find corrupt ones; 0 for none.
    `attend_threads`: threads that compute attention for workers, 0 for half of the processors.
    `stop_ms`: how long a shard with a disk tier that is asked to stop may save pages there; 0 to save none."""

    ram_bytes: int = 2**30
    gpu_bytes: int = 0
    num_gpus: float = 0.0
    gpu_device: str = "cuda"
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
    attend_threads: int = 0
    stop_ms: int = 20_000


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """A group of shards that are alike, such as those of nodes with a GPU.

    `shards`: how many; with `per_node`, how many on every node that offers the resources.
    `resources`: what each shard claims of Ray's custom resources, by name; {} for none.
    `labels`: Ray labels that the node of a shard must have.
    `shard`: its tiers and all else, by default as in [shard]."""

    shards: int = 1
    per_node: bool = False
    resources: Mapping[str, float] = field(default_factory=lambda: {SHARD_RESOURCE: 1.0}, metadata={OF: float})
    labels: Mapping[str, str] = field(default_factory=dict, metadata={OF: str})
    shard: ShardConfig = field(default_factory=ShardConfig)

    @property
    def on_twins(self) -> bool:
        """Whether its shards use twins, so that they claim GPUs that need not exist."""
        return bool(self.shard.num_gpus) and self.shard.gpu_device == TWIN


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Where to listen, and who may connect. The coordinator listens to workers on `port` and to shards on
    `report_port`; 0 takes a free one.
    `advertise`: a name or address, without a port, at which workers reach the coordinator on whichever node it runs;
    "" announces the address of its node.
    `shard_ports`: a shard listens on the first ports of this range that are free on its node, one for each of grpc and
    tcp; "0" takes any. "" is the range of 64 ports that begins 30 behind `port` (of port 7070: "7100-7163"), and any
    ports if `port` is 0.
    Without a `token_file` the only tenant is `default`, and `host` must be a loopback address unless `insecure` is set.
    `quota_file`: what each tenant is granted (docs/operations.md), by its absolute path, on each node; "" for nothing
    beside the shares of all tenants.
    `secret_file`: the secret with which the nodes and actors of the cluster authenticate one another, the same file on
    each node; "" keeps the cluster on this machine, with a secret of its own.
    `transports`: those that a shard serves; they must include grpc, which carries control.
    `socket_dir`: the directory, by its absolute path, in which a shard's local socket lies, over which it hands its
    memory to workers of its node that have the directory too; "" for an abstract name, which only processes of the
    shard's user in its network namespace reach. Others must not be able to write there."""

    host: str = "127.0.0.1"
    port: int = 7070
    report_port: int = 0
    advertise: str = ""
    shard_ports: str = ""
    token_file: str = ""
    quota_file: str = ""
    secret_file: str = ""
    insecure: bool = False
    threads: int = 16
    transports: tuple[str, ...] = TRANSPORTS
    socket_dir: str = ""


@dataclass(frozen=True, slots=True)
class SecurityConfig:
    """How traffic beyond shared memory is encrypted, and by which certificates processes know one another.

    `encryption`: `tls`; `network`, which says that the network below encrypts, as WireGuard or a mesh does; `none`; ""
    for a cluster whose addresses are all loopback, which needs none. Beyond loopback one of the three must be named.
    `ca_file`: PEM certificates of the authorities that certificates are verified against. `cert_file`, `key_file`: this
    node's own certificate, with the chain that leads to an authority, and its key, PEM. Names of files that each node
    has under the same path. They are read again when they change.
    `client_certificates`: workers and operators must show a certificate, too. One with the URI
    kvcluster://CLUSTER/tenant/NAME or kvcluster://CLUSTER/operator needs no token."""

    encryption: str = ""
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    client_certificates: bool = False


@dataclass(frozen=True, slots=True)
class EventsConfig:
    """KV events for external subscribers. `endpoint`: the address to publish on, such as "tcp://127.0.0.1:5557"; "" for
    none. `replay`: the address that replays missed events, out of the last `buffer_batches` batches. Events show the
    token ids of all tenants to every subscriber, so both must be loopback addresses unless `insecure` is set or the
    cluster speaks TLS, where subscribers show a certificate."""

    endpoint: str = ""
    replay: str = ""
    buffer_batches: int = 10_000
    insecure: bool = False


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """Metrics and health over HTTP. `port`: that of the coordinator; each shard listens on the first port after it that
    is free on its node. 0 for none. They show figures of all tenants to everyone who reaches them, so `host` should be
    closed to strangers. `tenants`: the coordinator's also show the figures of each tenant, by its name."""

    host: str = "127.0.0.1"
    port: int = 0
    tenants: bool = False


@dataclass(frozen=True, slots=True)
class LogConfig:
    """What the processes of a cluster log to their standard error. `format`: text, warnings for people; or json, one
    object a line, with a line for each decision besides (docs/metrics.md).
    `lines_per_second`: the most lines of each event, and of each module besides, in json.
    `audit_file`: the file, by its absolute path on the coordinator's node, to which each call of an operator is
    appended, one JSON object a line; "" for none, where such calls are in the log in json alone."""

    format: str = "text"
    lines_per_second: int = 10
    audit_file: str = ""


@dataclass(frozen=True, slots=True)
class RayConfig:
    """The Ray of a cluster of several nodes, which `up` and `join` start with fixed ports.

    `port`: of the head. `node_ports`: a range of NODE_PORTS ports for the processes that Ray has on each node.
    `worker_ports`: a range for the actors, one port each, and some that Ray keeps in reserve.
    `node_timeout_ms`: how long a node may be silent, as behind a link that is cut, before the head gives it up and its
    shards start elsewhere, empty. Until then its shards keep their pages, and serve them again when it is back. A node
    whose processes end is given up within seconds.
    `encryption`: of the traffic of Ray's own processes: `tls`, with the files of SecurityConfig, whose certificate must
    then have the node's address; `network` or `none`, as there. A cluster that speaks TLS must name one.
    `redis`: HOST:PORT of a Redis that keeps the head's state, so that the cluster survives the loss of the head's node;
    "" for none. `redis_password_file`: holds its password; or, with `redis_password_from_secret`, it is derived from
    `server.secret_file` (docs/operations.md)."""

    port: int = 6379
    node_ports: str = "6380-6387"
    worker_ports: str = "10002-10129"
    node_timeout_ms: int = 150_000
    encryption: str = ""
    redis: str = ""
    redis_password_file: str = ""
    redis_password_from_secret: bool = False


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """The settings of one client.

        config = kvcluster.ClientConfig(deadline_ms=2_000, resident_bytes=2**28)
        client = kvcluster.connect("127.0.0.1:7070", spec, config=config)

    `deadline_ms`: of one call, however many parts it has; 0 for a default (docs/tuning.md): 1 s for a lookup, and 1 ms
    a MB more for a load; 10 s for stores and all other calls that no request waits for.
    `store_wait_ms`: the time that a store may wait for room.
    `breaker_failures`: after this many failures in a row a shard is not asked for `breaker_ms`, then for twice as long.
    `transports`: those that may move pages, whichever others a shard offers.
    `socket_dir`: the directory in which shards of this node have their local sockets (server.socket_dir); "" for that
    in the environment variable KVCLUSTER_SOCKET_DIR.
    `accept`: the worst loss that loads accept, exact, q8 or q4; pages that have lost more are a miss.
    `encryption`: tls, network or none (SecurityConfig); "" is that in the environment variable KVCLUSTER_ENCRYPTION,
    tls if there is a `ca_file`, and none for an address on loopback. To other addresses nothing is sent until one is
    named.
    `ca_file`: PEM certificates of the authorities that servers are verified against, "" for that in KVCLUSTER_CA_FILE.
    `cert_file`, `key_file`: a certificate of this client's own and its key, for clusters with
    `security.client_certificates`; "" for those in KVCLUSTER_CERT_FILE and KVCLUSTER_KEY_FILE.
    `server_name`: the name that the coordinator's certificate must have, "" for that in KVCLUSTER_SERVER_NAME, or else
    the host of its address.
    `store_niceness`: niceness of the threads that store, 0 to 19, above that of the process's others; for callers that
    do not wait for their stores.
    `resident_bytes`: memory for the pages of open sequences, taken as they grow; a number, or text such as "4GiB".
    `device_staging_bytes`: memory of a GPU, and half as much pinned memory, through which KV of CUDA tensors is loaded
    and stored, for all clients of the process; 0: CUDA tensors are refused. No release has been run with it on a
    GPU."""

    deadline_ms: int = 0
    connect_ms: int = 5_000
    store_wait_ms: int = 2_000
    breaker_failures: int = 3
    breaker_ms: int = 500
    accept: str = "q4"
    transports: tuple[str, ...] = TRANSPORTS
    socket_dir: str = ""
    encryption: str = ""
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    server_name: str = ""
    store_niceness: int = 0
    resident_bytes: int | str = 2**30
    device_staging_bytes: int | str = 0


@dataclass(frozen=True, slots=True)
class Config:
    """All settings. `name`: of the cluster, among those of one Ray. `shards`: how many, if there are no `groups`.
    `volume_wait_ms`: if the node of a shard with a disk tier is away, how long to wait for it before another shard
    replaces it.
    `membership_ttl_ms`: a shard that is silent for this long is lost. `stall_ms`: a process that was
    stalled for longer extends the terms of others, since it could not receive their messages."""

    name: str = "kvcluster"
    shards: int = 1
    volume_wait_ms: int = 300_000
    membership_ttl_ms: int = 5_000
    stall_ms: int = 500
    coordinator: CoordinatorConfig = field(default_factory=CoordinatorConfig)
    shard: ShardConfig = field(default_factory=ShardConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    events: EventsConfig = field(default_factory=EventsConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    log: LogConfig = field(default_factory=LogConfig)
    client: ClientConfig = field(default_factory=ClientConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    groups: Mapping[str, GroupConfig] = field(default_factory=dict, metadata={OF: GroupConfig})

    @property
    def shard_groups(self) -> Mapping[str, GroupConfig]:
        """The groups of shards by name: `groups`, or one group of `shards` that are as in [shard]."""
        return self.groups or {DEFAULT_GROUP: GroupConfig(self.shards, shard=self.shard)}

    @property
    def gpus_of_twins(self) -> int:
        """The number of GPUs that a Ray node must declare, which need not exist, for the twins of its shards to
        claim."""
        claims = ((group.shards, group.shard.num_gpus) for group in self.shard_groups.values() if group.on_twins)
        return sum(math.ceil(shards / math.floor(1 / gpus)) for shards, gpus in claims)

    @property
    def shards_in_all(self) -> int | None:
        """How many shards the groups have together; None if that depends on the nodes that join."""
        groups = self.shard_groups.values()
        return None if any(group.per_node for group in groups) else sum(group.shards for group in groups)

    @property
    def own_client(self) -> ClientConfig:
        """The settings with which processes that have this configuration connect to its cluster: those of `client`,
        encrypted as the cluster is."""
        if self.client.encryption or self.client.ca_file:
            return self.client
        security = self.security
        files = {name: getattr(security, name) for name in ("ca_file", "cert_file", "key_file")}
        return replace(self.client, encryption=security.encryption, **files)

    def of_group(self, group: str) -> Config:
        """Returns the settings for a shard of this group: its own [shard] in place of that of all. Raises ConfigError
        if there is no such group."""
        if group not in self.shard_groups:
            raise ConfigError(f"the configuration has no group {group!r} of shards: {', '.join(self.shard_groups)}")
        return replace(self, shard=self.shard_groups[group].shard)
