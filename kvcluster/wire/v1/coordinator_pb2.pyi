from kvcluster.wire.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Decision(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DECISION_UNSPECIFIED: _ClassVar[Decision]
    DECISION_WRITE: _ClassVar[Decision]
    DECISION_COMMITTED: _ClassVar[Decision]
    DECISION_PENDING: _ClassVar[Decision]
    DECISION_REFUSED: _ClassVar[Decision]

class EventKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EVENT_KIND_UNSPECIFIED: _ClassVar[EventKind]
    EVENT_KIND_PAGE: _ClassVar[EventKind]
    EVENT_KIND_GONE: _ClassVar[EventKind]
    EVENT_KIND_CORRUPT: _ClassVar[EventKind]
    EVENT_KIND_PURGED: _ClassVar[EventKind]

class LeaveReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEAVE_REASON_UNSPECIFIED: _ClassVar[LeaveReason]
    LEAVE_REASON_REPLACED: _ClassVar[LeaveReason]
    LEAVE_REASON_DRAINED: _ClassVar[LeaveReason]
DECISION_UNSPECIFIED: Decision
DECISION_WRITE: Decision
DECISION_COMMITTED: Decision
DECISION_PENDING: Decision
DECISION_REFUSED: Decision
EVENT_KIND_UNSPECIFIED: EventKind
EVENT_KIND_PAGE: EventKind
EVENT_KIND_GONE: EventKind
EVENT_KIND_CORRUPT: EventKind
EVENT_KIND_PURGED: EventKind
LEAVE_REASON_UNSPECIFIED: LeaveReason
LEAVE_REASON_REPLACED: LeaveReason
LEAVE_REASON_DRAINED: LeaveReason

class PingRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PingReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("protocol_version", "spec")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    spec: bytes
    def __init__(self, protocol_version: _Optional[int] = ..., spec: _Optional[bytes] = ...) -> None: ...

class PrepareLoadRequest(_message.Message):
    __slots__ = ("namespace", "holder", "attempt", "hashes", "need", "hold")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    NEED_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    holder: bytes
    attempt: int
    hashes: bytes
    need: _common_pb2.Need
    hold: bool
    def __init__(self, namespace: _Optional[bytes] = ..., holder: _Optional[bytes] = ..., attempt: _Optional[int] = ..., hashes: _Optional[bytes] = ..., need: _Optional[_Union[_common_pb2.Need, _Mapping]] = ..., hold: bool = ...) -> None: ...

class PrepareStoreRequest(_message.Message):
    __slots__ = ("namespace", "holder", "attempt", "first", "parent", "run", "hashes", "parts", "loss", "host", "tokens")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    holder: bytes
    attempt: int
    first: int
    parent: bytes
    run: bytes
    hashes: bytes
    parts: _containers.RepeatedScalarFieldContainer[int]
    loss: _common_pb2.Loss
    host: str
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, namespace: _Optional[bytes] = ..., holder: _Optional[bytes] = ..., attempt: _Optional[int] = ..., first: _Optional[int] = ..., parent: _Optional[bytes] = ..., run: _Optional[bytes] = ..., hashes: _Optional[bytes] = ..., parts: _Optional[_Iterable[int]] = ..., loss: _Optional[_Union[_common_pb2.Loss, str]] = ..., host: _Optional[str] = ..., tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class TicketRequest(_message.Message):
    __slots__ = ("holder", "attempt")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    holder: bytes
    attempt: int
    def __init__(self, holder: _Optional[bytes] = ..., attempt: _Optional[int] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("namespace", "hashes", "need")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    NEED_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    hashes: bytes
    need: _common_pb2.Need
    def __init__(self, namespace: _Optional[bytes] = ..., hashes: _Optional[bytes] = ..., need: _Optional[_Union[_common_pb2.Need, _Mapping]] = ...) -> None: ...

class SiblingsRequest(_message.Message):
    __slots__ = ("namespace",)
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    def __init__(self, namespace: _Optional[bytes] = ...) -> None: ...

class GetNamespacesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RegisterEngineRequest(_message.Message):
    __slots__ = ("engine",)
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    engine: Engine
    def __init__(self, engine: _Optional[_Union[Engine, _Mapping]] = ...) -> None: ...

class GetEnginesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetWeightsRequest(_message.Message):
    __slots__ = ("model", "weights", "engine")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    model: str
    weights: str
    engine: str
    def __init__(self, model: _Optional[str] = ..., weights: _Optional[str] = ..., engine: _Optional[str] = ...) -> None: ...

class PinBlocksRequest(_message.Message):
    __slots__ = ("namespace", "hashes", "ttl_ns", "replicas")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    TTL_NS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    hashes: bytes
    ttl_ns: int
    replicas: int
    def __init__(self, namespace: _Optional[bytes] = ..., hashes: _Optional[bytes] = ..., ttl_ns: _Optional[int] = ..., replicas: _Optional[int] = ...) -> None: ...

class UnpinBlocksRequest(_message.Message):
    __slots__ = ("namespace", "hashes")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    hashes: bytes
    def __init__(self, namespace: _Optional[bytes] = ..., hashes: _Optional[bytes] = ...) -> None: ...

class PurgeRequest(_message.Message):
    __slots__ = ("model", "weights", "adapter")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    model: str
    weights: str
    adapter: str
    def __init__(self, model: _Optional[str] = ..., weights: _Optional[str] = ..., adapter: _Optional[str] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("shard",)
    SHARD_FIELD_NUMBER: _ClassVar[int]
    shard: str
    def __init__(self, shard: _Optional[str] = ...) -> None: ...

class SetPolicyRequest(_message.Message):
    __slots__ = ("names", "values")
    NAMES_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    values: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, names: _Optional[_Iterable[str]] = ..., values: _Optional[_Iterable[str]] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CoordinatorReply(_message.Message):
    __slots__ = ("refused", "done", "attached", "load_grant", "store_grant", "explained", "sibling_specs", "pinned", "status", "report_ack", "purged", "namespaces", "registered", "engines")
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    LOAD_GRANT_FIELD_NUMBER: _ClassVar[int]
    STORE_GRANT_FIELD_NUMBER: _ClassVar[int]
    EXPLAINED_FIELD_NUMBER: _ClassVar[int]
    SIBLING_SPECS_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REPORT_ACK_FIELD_NUMBER: _ClassVar[int]
    PURGED_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    REGISTERED_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    refused: _common_pb2.Refused
    done: _common_pb2.Done
    attached: Attached
    load_grant: LoadGrant
    store_grant: StoreGrant
    explained: Explained
    sibling_specs: SiblingSpecs
    pinned: Pinned
    status: Status
    report_ack: ReportAck
    purged: Purged
    namespaces: Namespaces
    registered: Registered
    engines: Engines
    def __init__(self, refused: _Optional[_Union[_common_pb2.Refused, _Mapping]] = ..., done: _Optional[_Union[_common_pb2.Done, _Mapping]] = ..., attached: _Optional[_Union[Attached, _Mapping]] = ..., load_grant: _Optional[_Union[LoadGrant, _Mapping]] = ..., store_grant: _Optional[_Union[StoreGrant, _Mapping]] = ..., explained: _Optional[_Union[Explained, _Mapping]] = ..., sibling_specs: _Optional[_Union[SiblingSpecs, _Mapping]] = ..., pinned: _Optional[_Union[Pinned, _Mapping]] = ..., status: _Optional[_Union[Status, _Mapping]] = ..., report_ack: _Optional[_Union[ReportAck, _Mapping]] = ..., purged: _Optional[_Union[Purged, _Mapping]] = ..., namespaces: _Optional[_Union[Namespaces, _Mapping]] = ..., registered: _Optional[_Union[Registered, _Mapping]] = ..., engines: _Optional[_Union[Engines, _Mapping]] = ...) -> None: ...

class Attached(_message.Message):
    __slots__ = ("protocol_version", "namespace", "epoch", "ticket_ttl_ns", "run_blocks", "shards", "wants_tokens")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TICKET_TTL_NS_FIELD_NUMBER: _ClassVar[int]
    RUN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    WANTS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    namespace: bytes
    epoch: int
    ticket_ttl_ns: int
    run_blocks: int
    shards: _containers.RepeatedCompositeFieldContainer[_common_pb2.ShardAddress]
    wants_tokens: bool
    def __init__(self, protocol_version: _Optional[int] = ..., namespace: _Optional[bytes] = ..., epoch: _Optional[int] = ..., ticket_ttl_ns: _Optional[int] = ..., run_blocks: _Optional[int] = ..., shards: _Optional[_Iterable[_Union[_common_pb2.ShardAddress, _Mapping]]] = ..., wants_tokens: bool = ...) -> None: ...

class LoadGrant(_message.Message):
    __slots__ = ("blocks", "runs", "hold_ns", "miss")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    HOLD_NS_FIELD_NUMBER: _ClassVar[int]
    MISS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    runs: _common_pb2.Runs
    hold_ns: int
    miss: _common_pb2.Miss
    def __init__(self, blocks: _Optional[int] = ..., runs: _Optional[_Union[_common_pb2.Runs, _Mapping]] = ..., hold_ns: _Optional[int] = ..., miss: _Optional[_Union[_common_pb2.Miss, _Mapping]] = ...) -> None: ...

class StoreGrant(_message.Message):
    __slots__ = ("counts", "decisions", "shard_of", "miss_of", "shards", "misses")
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    SHARD_OF_FIELD_NUMBER: _ClassVar[int]
    MISS_OF_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    decisions: _containers.RepeatedScalarFieldContainer[Decision]
    shard_of: _containers.RepeatedScalarFieldContainer[int]
    miss_of: _containers.RepeatedScalarFieldContainer[int]
    shards: _containers.RepeatedCompositeFieldContainer[_common_pb2.ShardAddress]
    misses: _containers.RepeatedCompositeFieldContainer[_common_pb2.Miss]
    def __init__(self, counts: _Optional[_Iterable[int]] = ..., decisions: _Optional[_Iterable[_Union[Decision, str]]] = ..., shard_of: _Optional[_Iterable[int]] = ..., miss_of: _Optional[_Iterable[int]] = ..., shards: _Optional[_Iterable[_Union[_common_pb2.ShardAddress, _Mapping]]] = ..., misses: _Optional[_Iterable[_Union[_common_pb2.Miss, _Mapping]]] = ...) -> None: ...

class Explained(_message.Message):
    __slots__ = ("counts", "plan_of", "miss_of", "plans", "misses")
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    PLAN_OF_FIELD_NUMBER: _ClassVar[int]
    MISS_OF_FIELD_NUMBER: _ClassVar[int]
    PLANS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    plan_of: _containers.RepeatedScalarFieldContainer[int]
    miss_of: _containers.RepeatedScalarFieldContainer[int]
    plans: _common_pb2.Plans
    misses: _containers.RepeatedCompositeFieldContainer[_common_pb2.Miss]
    def __init__(self, counts: _Optional[_Iterable[int]] = ..., plan_of: _Optional[_Iterable[int]] = ..., miss_of: _Optional[_Iterable[int]] = ..., plans: _Optional[_Union[_common_pb2.Plans, _Mapping]] = ..., misses: _Optional[_Iterable[_Union[_common_pb2.Miss, _Mapping]]] = ...) -> None: ...

class SiblingSpecs(_message.Message):
    __slots__ = ("specs",)
    SPECS_FIELD_NUMBER: _ClassVar[int]
    specs: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, specs: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Namespaces(_message.Message):
    __slots__ = ("specs", "blocks")
    SPECS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    specs: _containers.RepeatedScalarFieldContainer[bytes]
    blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, specs: _Optional[_Iterable[bytes]] = ..., blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class Pinned(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class Purged(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class ShardStatus(_message.Message):
    __slots__ = ("info", "state", "seen_ns_ago")
    INFO_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SEEN_NS_AGO_FIELD_NUMBER: _ClassVar[int]
    info: ShardInfo
    state: str
    seen_ns_ago: int
    def __init__(self, info: _Optional[_Union[ShardInfo, _Mapping]] = ..., state: _Optional[str] = ..., seen_ns_ago: _Optional[int] = ...) -> None: ...

class Engine(_message.Message):
    __slots__ = ("engine", "name", "model", "weights", "fact_names", "fact_values", "private", "withdrawn", "ready")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    FACT_NAMES_FIELD_NUMBER: _ClassVar[int]
    FACT_VALUES_FIELD_NUMBER: _ClassVar[int]
    PRIVATE_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWN_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    engine: str
    name: str
    model: str
    weights: str
    fact_names: _containers.RepeatedScalarFieldContainer[str]
    fact_values: _containers.RepeatedScalarFieldContainer[str]
    private: bool
    withdrawn: int
    ready: bool
    def __init__(self, engine: _Optional[str] = ..., name: _Optional[str] = ..., model: _Optional[str] = ..., weights: _Optional[str] = ..., fact_names: _Optional[_Iterable[str]] = ..., fact_values: _Optional[_Iterable[str]] = ..., private: bool = ..., withdrawn: _Optional[int] = ..., ready: bool = ...) -> None: ...

class Registered(_message.Message):
    __slots__ = ("ttl_ns", "weights")
    TTL_NS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    ttl_ns: int
    weights: str
    def __init__(self, ttl_ns: _Optional[int] = ..., weights: _Optional[str] = ...) -> None: ...

class Engines(_message.Message):
    __slots__ = ("engines", "seen_ns_ago")
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    SEEN_NS_AGO_FIELD_NUMBER: _ClassVar[int]
    engines: _containers.RepeatedCompositeFieldContainer[Engine]
    seen_ns_ago: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, engines: _Optional[_Iterable[_Union[Engine, _Mapping]]] = ..., seen_ns_ago: _Optional[_Iterable[int]] = ...) -> None: ...

class Status(_message.Message):
    __slots__ = ("epoch", "state", "uptime_ns", "namespaces", "blocks", "tickets", "shards", "counters", "policy_names", "policy_values", "fallen_namespaces", "fallen_errors")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    UPTIME_NS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TICKETS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    POLICY_NAMES_FIELD_NUMBER: _ClassVar[int]
    POLICY_VALUES_FIELD_NUMBER: _ClassVar[int]
    FALLEN_NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    FALLEN_ERRORS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    state: str
    uptime_ns: int
    namespaces: int
    blocks: int
    tickets: int
    shards: _containers.RepeatedCompositeFieldContainer[ShardStatus]
    counters: Counters
    policy_names: _containers.RepeatedScalarFieldContainer[str]
    policy_values: _containers.RepeatedScalarFieldContainer[str]
    fallen_namespaces: bytes
    fallen_errors: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, epoch: _Optional[int] = ..., state: _Optional[str] = ..., uptime_ns: _Optional[int] = ..., namespaces: _Optional[int] = ..., blocks: _Optional[int] = ..., tickets: _Optional[int] = ..., shards: _Optional[_Iterable[_Union[ShardStatus, _Mapping]]] = ..., counters: _Optional[_Union[Counters, _Mapping]] = ..., policy_names: _Optional[_Iterable[str]] = ..., policy_values: _Optional[_Iterable[str]] = ..., fallen_namespaces: _Optional[bytes] = ..., fallen_errors: _Optional[_Iterable[int]] = ...) -> None: ...

class Counters(_message.Message):
    __slots__ = ("names", "values")
    NAMES_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    values: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, names: _Optional[_Iterable[str]] = ..., values: _Optional[_Iterable[int]] = ...) -> None: ...

class ShardInfo(_message.Message):
    __slots__ = ("shard", "epoch", "address", "host", "capacity_bytes", "free_bytes", "pages", "leases", "counters", "draining", "below", "below_capacity_bytes", "below_free_bytes", "below_pages", "below_wanted_bytes", "trouble")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    BELOW_FIELD_NUMBER: _ClassVar[int]
    BELOW_CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    BELOW_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BELOW_PAGES_FIELD_NUMBER: _ClassVar[int]
    BELOW_WANTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    shard: str
    epoch: int
    address: str
    host: str
    capacity_bytes: int
    free_bytes: int
    pages: int
    leases: int
    counters: Counters
    draining: bool
    below: _containers.RepeatedScalarFieldContainer[_common_pb2.Tier]
    below_capacity_bytes: _containers.RepeatedScalarFieldContainer[int]
    below_free_bytes: _containers.RepeatedScalarFieldContainer[int]
    below_pages: _containers.RepeatedScalarFieldContainer[int]
    below_wanted_bytes: _containers.RepeatedScalarFieldContainer[int]
    trouble: str
    def __init__(self, shard: _Optional[str] = ..., epoch: _Optional[int] = ..., address: _Optional[str] = ..., host: _Optional[str] = ..., capacity_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., pages: _Optional[int] = ..., leases: _Optional[int] = ..., counters: _Optional[_Union[Counters, _Mapping]] = ..., draining: bool = ..., below: _Optional[_Iterable[_Union[_common_pb2.Tier, str]]] = ..., below_capacity_bytes: _Optional[_Iterable[int]] = ..., below_free_bytes: _Optional[_Iterable[int]] = ..., below_pages: _Optional[_Iterable[int]] = ..., below_wanted_bytes: _Optional[_Iterable[int]] = ..., trouble: _Optional[str] = ...) -> None: ...

class Specs(_message.Message):
    __slots__ = ("tenants", "specs")
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    SPECS_FIELD_NUMBER: _ClassVar[int]
    tenants: _containers.RepeatedScalarFieldContainer[str]
    specs: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, tenants: _Optional[_Iterable[str]] = ..., specs: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Events(_message.Message):
    __slots__ = ("namespaces", "parts", "kinds", "hashes", "namespace_of", "part_of", "parents", "depths", "tiers", "losses", "purges", "codecs", "gone_tiers")
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_OF_FIELD_NUMBER: _ClassVar[int]
    PART_OF_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    DEPTHS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    LOSSES_FIELD_NUMBER: _ClassVar[int]
    PURGES_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    GONE_TIERS_FIELD_NUMBER: _ClassVar[int]
    namespaces: bytes
    parts: _containers.RepeatedScalarFieldContainer[int]
    kinds: _containers.RepeatedScalarFieldContainer[EventKind]
    hashes: bytes
    namespace_of: _containers.RepeatedScalarFieldContainer[int]
    part_of: _containers.RepeatedScalarFieldContainer[int]
    parents: bytes
    depths: _containers.RepeatedScalarFieldContainer[int]
    tiers: _containers.RepeatedScalarFieldContainer[_common_pb2.Tier]
    losses: _containers.RepeatedScalarFieldContainer[_common_pb2.Loss]
    purges: _containers.RepeatedScalarFieldContainer[int]
    codecs: _containers.RepeatedScalarFieldContainer[int]
    gone_tiers: _containers.RepeatedScalarFieldContainer[_common_pb2.Tier]
    def __init__(self, namespaces: _Optional[bytes] = ..., parts: _Optional[_Iterable[int]] = ..., kinds: _Optional[_Iterable[_Union[EventKind, str]]] = ..., hashes: _Optional[bytes] = ..., namespace_of: _Optional[_Iterable[int]] = ..., part_of: _Optional[_Iterable[int]] = ..., parents: _Optional[bytes] = ..., depths: _Optional[_Iterable[int]] = ..., tiers: _Optional[_Iterable[_Union[_common_pb2.Tier, str]]] = ..., losses: _Optional[_Iterable[_Union[_common_pb2.Loss, str]]] = ..., purges: _Optional[_Iterable[int]] = ..., codecs: _Optional[_Iterable[int]] = ..., gone_tiers: _Optional[_Iterable[_Union[_common_pb2.Tier, str]]] = ...) -> None: ...

class Tombstones(_message.Message):
    __slots__ = ("texts", "numbers", "tenant_of", "model_of", "weights_of", "adapter_of")
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    TENANT_OF_FIELD_NUMBER: _ClassVar[int]
    MODEL_OF_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_OF_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_OF_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    numbers: _containers.RepeatedScalarFieldContainer[int]
    tenant_of: _containers.RepeatedScalarFieldContainer[int]
    model_of: _containers.RepeatedScalarFieldContainer[int]
    weights_of: _containers.RepeatedScalarFieldContainer[int]
    adapter_of: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, texts: _Optional[_Iterable[str]] = ..., numbers: _Optional[_Iterable[int]] = ..., tenant_of: _Optional[_Iterable[int]] = ..., model_of: _Optional[_Iterable[int]] = ..., weights_of: _Optional[_Iterable[int]] = ..., adapter_of: _Optional[_Iterable[int]] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("info", "coordinator", "first", "events", "specs", "pressure_bytes", "sampled_namespaces", "sampled_errors", "orders")
    INFO_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    SPECS_FIELD_NUMBER: _ClassVar[int]
    PRESSURE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_ERRORS_FIELD_NUMBER: _ClassVar[int]
    ORDERS_FIELD_NUMBER: _ClassVar[int]
    info: ShardInfo
    coordinator: int
    first: int
    events: Events
    specs: Specs
    pressure_bytes: int
    sampled_namespaces: bytes
    sampled_errors: _containers.RepeatedScalarFieldContainer[int]
    orders: OrderProgress
    def __init__(self, info: _Optional[_Union[ShardInfo, _Mapping]] = ..., coordinator: _Optional[int] = ..., first: _Optional[int] = ..., events: _Optional[_Union[Events, _Mapping]] = ..., specs: _Optional[_Union[Specs, _Mapping]] = ..., pressure_bytes: _Optional[int] = ..., sampled_namespaces: _Optional[bytes] = ..., sampled_errors: _Optional[_Iterable[int]] = ..., orders: _Optional[_Union[OrderProgress, _Mapping]] = ...) -> None: ...

class OrderProgress(_message.Message):
    __slots__ = ("accepted", "running")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    accepted: int
    running: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, accepted: _Optional[int] = ..., running: _Optional[_Iterable[int]] = ...) -> None: ...

class InventoryRequest(_message.Message):
    __slots__ = ("info", "coordinator", "upto", "chunk", "last", "pages", "specs", "tombstones")
    INFO_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    UPTO_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    SPECS_FIELD_NUMBER: _ClassVar[int]
    TOMBSTONES_FIELD_NUMBER: _ClassVar[int]
    info: ShardInfo
    coordinator: int
    upto: int
    chunk: int
    last: bool
    pages: Events
    specs: Specs
    tombstones: Tombstones
    def __init__(self, info: _Optional[_Union[ShardInfo, _Mapping]] = ..., coordinator: _Optional[int] = ..., upto: _Optional[int] = ..., chunk: _Optional[int] = ..., last: bool = ..., pages: _Optional[_Union[Events, _Mapping]] = ..., specs: _Optional[_Union[Specs, _Mapping]] = ..., tombstones: _Optional[_Union[Tombstones, _Mapping]] = ...) -> None: ...

class Order(_message.Message):
    __slots__ = ("number", "evict", "move", "pull")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    EVICT_FIELD_NUMBER: _ClassVar[int]
    MOVE_FIELD_NUMBER: _ClassVar[int]
    PULL_FIELD_NUMBER: _ClassVar[int]
    number: int
    evict: EvictOrder
    move: MoveOrder
    pull: PullOrder
    def __init__(self, number: _Optional[int] = ..., evict: _Optional[_Union[EvictOrder, _Mapping]] = ..., move: _Optional[_Union[MoveOrder, _Mapping]] = ..., pull: _Optional[_Union[PullOrder, _Mapping]] = ...) -> None: ...

class EvictOrder(_message.Message):
    __slots__ = ("namespaces", "hashes", "namespace_of", "tier")
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_OF_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    namespaces: bytes
    hashes: bytes
    namespace_of: _containers.RepeatedScalarFieldContainer[int]
    tier: _common_pb2.Tier
    def __init__(self, namespaces: _Optional[bytes] = ..., hashes: _Optional[bytes] = ..., namespace_of: _Optional[_Iterable[int]] = ..., tier: _Optional[_Union[_common_pb2.Tier, str]] = ...) -> None: ...

class MoveOrder(_message.Message):
    __slots__ = ("namespaces", "hashes", "namespace_of", "to", "codecs")
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_OF_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    namespaces: bytes
    hashes: bytes
    namespace_of: _containers.RepeatedScalarFieldContainer[int]
    to: _containers.RepeatedScalarFieldContainer[_common_pb2.Tier]
    codecs: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, namespaces: _Optional[bytes] = ..., hashes: _Optional[bytes] = ..., namespace_of: _Optional[_Iterable[int]] = ..., to: _Optional[_Iterable[_Union[_common_pb2.Tier, str]]] = ..., codecs: _Optional[_Iterable[int]] = ...) -> None: ...

class PullOrder(_message.Message):
    __slots__ = ("source", "tenant", "spec", "pages", "codec", "into")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    INTO_FIELD_NUMBER: _ClassVar[int]
    source: _common_pb2.ShardAddress
    tenant: str
    spec: bytes
    pages: _common_pb2.NewPages
    codec: int
    into: _common_pb2.Tier
    def __init__(self, source: _Optional[_Union[_common_pb2.ShardAddress, _Mapping]] = ..., tenant: _Optional[str] = ..., spec: _Optional[bytes] = ..., pages: _Optional[_Union[_common_pb2.NewPages, _Mapping]] = ..., codec: _Optional[int] = ..., into: _Optional[_Union[_common_pb2.Tier, str]] = ...) -> None: ...

class ReportAck(_message.Message):
    __slots__ = ("epoch", "acked", "inventory", "tombstones", "drain", "leave", "orders")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ACKED_FIELD_NUMBER: _ClassVar[int]
    INVENTORY_FIELD_NUMBER: _ClassVar[int]
    TOMBSTONES_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    ORDERS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    acked: int
    inventory: bool
    tombstones: Tombstones
    drain: bool
    leave: LeaveReason
    orders: _containers.RepeatedCompositeFieldContainer[Order]
    def __init__(self, epoch: _Optional[int] = ..., acked: _Optional[int] = ..., inventory: bool = ..., tombstones: _Optional[_Union[Tombstones, _Mapping]] = ..., drain: bool = ..., leave: _Optional[_Union[LeaveReason, str]] = ..., orders: _Optional[_Iterable[_Union[Order, _Mapping]]] = ...) -> None: ...
