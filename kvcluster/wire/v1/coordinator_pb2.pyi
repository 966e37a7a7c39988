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
EVENT_KIND_PURGED: EventKind
LEAVE_REASON_UNSPECIFIED: LeaveReason
LEAVE_REASON_REPLACED: LeaveReason
LEAVE_REASON_DRAINED: LeaveReason

class PingRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class IssueCredentialRequest(_message.Message):
    __slots__ = ("epoch", "proof", "generation", "audience")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    AUDIENCE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    proof: bytes
    generation: int
    audience: int
    def __init__(self, epoch: _Optional[int] = ..., proof: _Optional[bytes] = ..., generation: _Optional[int] = ..., audience: _Optional[int] = ...) -> None: ...

class IssuedCredential(_message.Message):
    __slots__ = ("token", "valid_ns")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    VALID_NS_FIELD_NUMBER: _ClassVar[int]
    token: str
    valid_ns: int
    def __init__(self, token: _Optional[str] = ..., valid_ns: _Optional[int] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("protocol_version", "spec", "owner")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    spec: bytes
    owner: str
    def __init__(self, protocol_version: _Optional[int] = ..., spec: _Optional[bytes] = ..., owner: _Optional[str] = ...) -> None: ...

class PrepareLoadRequest(_message.Message):
    __slots__ = ("namespace", "attempt", "hashes", "need", "hold", "awaited", "again")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    NEED_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    AWAITED_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    attempt: bytes
    hashes: bytes
    need: _common_pb2.Need
    hold: bool
    awaited: int
    again: bool
    def __init__(self, namespace: _Optional[bytes] = ..., attempt: _Optional[bytes] = ..., hashes: _Optional[bytes] = ..., need: _Optional[_Union[_common_pb2.Need, _Mapping]] = ..., hold: bool = ..., awaited: _Optional[int] = ..., again: bool = ...) -> None: ...

class PrepareStoreRequest(_message.Message):
    __slots__ = ("namespace", "attempt", "first", "parent", "run", "hashes", "parts", "loss", "host", "tokens")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
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
    attempt: bytes
    first: int
    parent: bytes
    run: bytes
    hashes: bytes
    parts: _containers.RepeatedScalarFieldContainer[int]
    loss: _common_pb2.Loss
    host: str
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, namespace: _Optional[bytes] = ..., attempt: _Optional[bytes] = ..., first: _Optional[int] = ..., parent: _Optional[bytes] = ..., run: _Optional[bytes] = ..., hashes: _Optional[bytes] = ..., parts: _Optional[_Iterable[int]] = ..., loss: _Optional[_Union[_common_pb2.Loss, str]] = ..., host: _Optional[str] = ..., tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class TicketRequest(_message.Message):
    __slots__ = ("attempt",)
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    attempt: bytes
    def __init__(self, attempt: _Optional[bytes] = ...) -> None: ...

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
    __slots__ = ("info",)
    INFO_FIELD_NUMBER: _ClassVar[int]
    info: Engine
    def __init__(self, info: _Optional[_Union[Engine, _Mapping]] = ...) -> None: ...

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

class GetPinsRequest(_message.Message):
    __slots__ = ("model", "skip")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SKIP_FIELD_NUMBER: _ClassVar[int]
    model: str
    skip: int
    def __init__(self, model: _Optional[str] = ..., skip: _Optional[int] = ...) -> None: ...

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
    __slots__ = ("shard", "leaving")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    shard: str
    leaving: bool
    def __init__(self, shard: _Optional[str] = ..., leaving: bool = ...) -> None: ...

class SetPolicyRequest(_message.Message):
    __slots__ = ("settings",)
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    settings: _common_pb2.Pairs
    def __init__(self, settings: _Optional[_Union[_common_pb2.Pairs, _Mapping]] = ...) -> None: ...

class SyncTablesRequest(_message.Message):
    __slots__ = ("namespace", "holder", "number", "changes")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    holder: bytes
    number: int
    changes: TableChanges
    def __init__(self, namespace: _Optional[bytes] = ..., holder: _Optional[bytes] = ..., number: _Optional[int] = ..., changes: _Optional[_Union[TableChanges, _Mapping]] = ...) -> None: ...

class TableChanges(_message.Message):
    __slots__ = ("sequence", "keep", "blocks", "private", "parent", "closed")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PRIVATE_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    sequence: bytes
    keep: _containers.RepeatedScalarFieldContainer[int]
    blocks: HashLists
    private: _containers.RepeatedScalarFieldContainer[int]
    parent: SequenceTable
    closed: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, sequence: _Optional[bytes] = ..., keep: _Optional[_Iterable[int]] = ..., blocks: _Optional[_Union[HashLists, _Mapping]] = ..., private: _Optional[_Iterable[int]] = ..., parent: _Optional[_Union[SequenceTable, _Mapping]] = ..., closed: _Optional[_Iterable[bool]] = ...) -> None: ...

class HashLists(_message.Message):
    __slots__ = ("counts", "items")
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    items: bytes
    def __init__(self, counts: _Optional[_Iterable[int]] = ..., items: _Optional[bytes] = ...) -> None: ...

class SequenceTable(_message.Message):
    __slots__ = ("table", "of")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    OF_FIELD_NUMBER: _ClassVar[int]
    table: bytes
    of: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, table: _Optional[bytes] = ..., of: _Optional[_Iterable[int]] = ...) -> None: ...

class ProbeRequest(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CoordinatorReply(_message.Message):
    __slots__ = ("refused", "done", "attached", "load_grant", "store_grant", "explained", "sibling_specs", "pinned", "status", "report_ack", "purged", "namespaces", "registered", "engines", "tables_synced", "probed", "pins", "issued_credential")
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
    TABLES_SYNCED_FIELD_NUMBER: _ClassVar[int]
    PROBED_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    ISSUED_CREDENTIAL_FIELD_NUMBER: _ClassVar[int]
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
    tables_synced: TablesSynced
    probed: Probed
    pins: Pins
    issued_credential: IssuedCredential
    def __init__(self, refused: _Optional[_Union[_common_pb2.Refused, _Mapping]] = ..., done: _Optional[_Union[_common_pb2.Done, _Mapping]] = ..., attached: _Optional[_Union[Attached, _Mapping]] = ..., load_grant: _Optional[_Union[LoadGrant, _Mapping]] = ..., store_grant: _Optional[_Union[StoreGrant, _Mapping]] = ..., explained: _Optional[_Union[Explained, _Mapping]] = ..., sibling_specs: _Optional[_Union[SiblingSpecs, _Mapping]] = ..., pinned: _Optional[_Union[Pinned, _Mapping]] = ..., status: _Optional[_Union[Status, _Mapping]] = ..., report_ack: _Optional[_Union[ReportAck, _Mapping]] = ..., purged: _Optional[_Union[Purged, _Mapping]] = ..., namespaces: _Optional[_Union[Namespaces, _Mapping]] = ..., registered: _Optional[_Union[Registered, _Mapping]] = ..., engines: _Optional[_Union[Engines, _Mapping]] = ..., tables_synced: _Optional[_Union[TablesSynced, _Mapping]] = ..., probed: _Optional[_Union[Probed, _Mapping]] = ..., pins: _Optional[_Union[Pins, _Mapping]] = ..., issued_credential: _Optional[_Union[IssuedCredential, _Mapping]] = ...) -> None: ...

class Probed(_message.Message):
    __slots__ = ("number", "running", "coordinator", "shards", "silent")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    SILENT_FIELD_NUMBER: _ClassVar[int]
    number: int
    running: bool
    coordinator: ProcessFacts
    shards: _containers.RepeatedCompositeFieldContainer[ShardFindings]
    silent: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, number: _Optional[int] = ..., running: bool = ..., coordinator: _Optional[_Union[ProcessFacts, _Mapping]] = ..., shards: _Optional[_Iterable[_Union[ShardFindings, _Mapping]]] = ..., silent: _Optional[_Iterable[str]] = ...) -> None: ...

class ShardFindings(_message.Message):
    __slots__ = ("shard", "findings")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    shard: str
    findings: Findings
    def __init__(self, shard: _Optional[str] = ..., findings: _Optional[_Union[Findings, _Mapping]] = ...) -> None: ...

class ProcessFacts(_message.Message):
    __slots__ = ("pool_bytes", "limit_bytes", "ports")
    POOL_BYTES_FIELD_NUMBER: _ClassVar[int]
    LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    PORTS_FIELD_NUMBER: _ClassVar[int]
    pool_bytes: int
    limit_bytes: int
    ports: ListeningPorts
    def __init__(self, pool_bytes: _Optional[int] = ..., limit_bytes: _Optional[int] = ..., ports: _Optional[_Union[ListeningPorts, _Mapping]] = ...) -> None: ...

class ListeningPorts(_message.Message):
    __slots__ = ("use", "port", "allowed")
    USE_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_FIELD_NUMBER: _ClassVar[int]
    use: _containers.RepeatedScalarFieldContainer[str]
    port: _containers.RepeatedScalarFieldContainer[int]
    allowed: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, use: _Optional[_Iterable[str]] = ..., port: _Optional[_Iterable[int]] = ..., allowed: _Optional[_Iterable[str]] = ...) -> None: ...

class Findings(_message.Message):
    __slots__ = ("number", "facts", "clock_ns", "clock_error_ns", "links")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_NS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_ERROR_NS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    number: int
    facts: ProcessFacts
    clock_ns: int
    clock_error_ns: int
    links: Links
    def __init__(self, number: _Optional[int] = ..., facts: _Optional[_Union[ProcessFacts, _Mapping]] = ..., clock_ns: _Optional[int] = ..., clock_error_ns: _Optional[int] = ..., links: _Optional[_Union[Links, _Mapping]] = ...) -> None: ...

class Links(_message.Message):
    __slots__ = ("shard", "transport", "trip_ns", "why")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    TRIP_NS_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    shard: _containers.RepeatedScalarFieldContainer[str]
    transport: _containers.RepeatedScalarFieldContainer[str]
    trip_ns: _containers.RepeatedScalarFieldContainer[int]
    why: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, shard: _Optional[_Iterable[str]] = ..., transport: _Optional[_Iterable[str]] = ..., trip_ns: _Optional[_Iterable[int]] = ..., why: _Optional[_Iterable[str]] = ...) -> None: ...

class Attached(_message.Message):
    __slots__ = ("protocol_version", "namespace", "epoch", "ticket_ttl_ns", "run_blocks", "shards", "wants_tokens", "read_only")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TICKET_TTL_NS_FIELD_NUMBER: _ClassVar[int]
    RUN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    WANTS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    READ_ONLY_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    namespace: bytes
    epoch: int
    ticket_ttl_ns: int
    run_blocks: int
    shards: _containers.RepeatedCompositeFieldContainer[_common_pb2.ShardAddress]
    wants_tokens: bool
    read_only: bool
    def __init__(self, protocol_version: _Optional[int] = ..., namespace: _Optional[bytes] = ..., epoch: _Optional[int] = ..., ticket_ttl_ns: _Optional[int] = ..., run_blocks: _Optional[int] = ..., shards: _Optional[_Iterable[_Union[_common_pb2.ShardAddress, _Mapping]]] = ..., wants_tokens: bool = ..., read_only: bool = ...) -> None: ...

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
    __slots__ = ("runs",)
    RUNS_FIELD_NUMBER: _ClassVar[int]
    runs: StoreRuns
    def __init__(self, runs: _Optional[_Union[StoreRuns, _Mapping]] = ...) -> None: ...

class StoreRuns(_message.Message):
    __slots__ = ("count", "decision", "shard", "miss")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    MISS_FIELD_NUMBER: _ClassVar[int]
    count: _containers.RepeatedScalarFieldContainer[int]
    decision: _containers.RepeatedScalarFieldContainer[Decision]
    shard: _common_pb2.AddressTable
    miss: _common_pb2.MissTable
    def __init__(self, count: _Optional[_Iterable[int]] = ..., decision: _Optional[_Iterable[_Union[Decision, str]]] = ..., shard: _Optional[_Union[_common_pb2.AddressTable, _Mapping]] = ..., miss: _Optional[_Union[_common_pb2.MissTable, _Mapping]] = ...) -> None: ...

class Explained(_message.Message):
    __slots__ = ("fates",)
    FATES_FIELD_NUMBER: _ClassVar[int]
    fates: BlockFates
    def __init__(self, fates: _Optional[_Union[BlockFates, _Mapping]] = ...) -> None: ...

class BlockFates(_message.Message):
    __slots__ = ("count", "plan", "miss")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    MISS_FIELD_NUMBER: _ClassVar[int]
    count: _containers.RepeatedScalarFieldContainer[int]
    plan: _common_pb2.PlanTable
    miss: _common_pb2.MissTable
    def __init__(self, count: _Optional[_Iterable[int]] = ..., plan: _Optional[_Union[_common_pb2.PlanTable, _Mapping]] = ..., miss: _Optional[_Union[_common_pb2.MissTable, _Mapping]] = ...) -> None: ...

class SiblingSpecs(_message.Message):
    __slots__ = ("specs",)
    SPECS_FIELD_NUMBER: _ClassVar[int]
    specs: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, specs: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Namespaces(_message.Message):
    __slots__ = ("known",)
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    known: SpecBlocks
    def __init__(self, known: _Optional[_Union[SpecBlocks, _Mapping]] = ...) -> None: ...

class SpecBlocks(_message.Message):
    __slots__ = ("spec", "blocks")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    spec: _containers.RepeatedScalarFieldContainer[bytes]
    blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, spec: _Optional[_Iterable[bytes]] = ..., blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class Pinned(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class Pins(_message.Message):
    __slots__ = ("runs", "next", "more")
    RUNS_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    runs: PinnedRuns
    next: int
    more: int
    def __init__(self, runs: _Optional[_Union[PinnedRuns, _Mapping]] = ..., next: _Optional[int] = ..., more: _Optional[int] = ...) -> None: ...

class PinnedRuns(_message.Message):
    __slots__ = ("tenant", "spec", "before", "first", "blocks", "block_bytes", "left_ns")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEFT_NS_FIELD_NUMBER: _ClassVar[int]
    tenant: _common_pb2.TextTable
    spec: SpecTable
    before: bytes
    first: _containers.RepeatedScalarFieldContainer[int]
    blocks: HashLists
    block_bytes: _containers.RepeatedScalarFieldContainer[int]
    left_ns: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tenant: _Optional[_Union[_common_pb2.TextTable, _Mapping]] = ..., spec: _Optional[_Union[SpecTable, _Mapping]] = ..., before: _Optional[bytes] = ..., first: _Optional[_Iterable[int]] = ..., blocks: _Optional[_Union[HashLists, _Mapping]] = ..., block_bytes: _Optional[_Iterable[int]] = ..., left_ns: _Optional[_Iterable[int]] = ...) -> None: ...

class SpecTable(_message.Message):
    __slots__ = ("table", "of")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    OF_FIELD_NUMBER: _ClassVar[int]
    table: _containers.RepeatedScalarFieldContainer[bytes]
    of: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, table: _Optional[_Iterable[bytes]] = ..., of: _Optional[_Iterable[int]] = ...) -> None: ...

class Purged(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class ShardStatus(_message.Message):
    __slots__ = ("info", "state", "seen_ns_ago", "restarts", "restarted_ns_ago")
    INFO_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SEEN_NS_AGO_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    RESTARTED_NS_AGO_FIELD_NUMBER: _ClassVar[int]
    info: ShardInfo
    state: str
    seen_ns_ago: int
    restarts: int
    restarted_ns_ago: int
    def __init__(self, info: _Optional[_Union[ShardInfo, _Mapping]] = ..., state: _Optional[str] = ..., seen_ns_ago: _Optional[int] = ..., restarts: _Optional[int] = ..., restarted_ns_ago: _Optional[int] = ...) -> None: ...

class Engine(_message.Message):
    __slots__ = ("engine", "name", "model", "weights", "facts", "private", "withdrawn", "ready", "protocol")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    PRIVATE_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWN_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    engine: str
    name: str
    model: str
    weights: str
    facts: _common_pb2.Pairs
    private: bool
    withdrawn: int
    ready: bool
    protocol: int
    def __init__(self, engine: _Optional[str] = ..., name: _Optional[str] = ..., model: _Optional[str] = ..., weights: _Optional[str] = ..., facts: _Optional[_Union[_common_pb2.Pairs, _Mapping]] = ..., private: bool = ..., withdrawn: _Optional[int] = ..., ready: bool = ..., protocol: _Optional[int] = ...) -> None: ...

class Registered(_message.Message):
    __slots__ = ("ttl_ns", "weights")
    TTL_NS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    ttl_ns: int
    weights: str
    def __init__(self, ttl_ns: _Optional[int] = ..., weights: _Optional[str] = ...) -> None: ...

class Engines(_message.Message):
    __slots__ = ("known",)
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    known: EngineList
    def __init__(self, known: _Optional[_Union[EngineList, _Mapping]] = ...) -> None: ...

class TablesSynced(_message.Message):
    __slots__ = ("ttl_ns", "epoch", "reopen", "refused", "forgotten")
    TTL_NS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REOPEN_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    FORGOTTEN_FIELD_NUMBER: _ClassVar[int]
    ttl_ns: int
    epoch: int
    reopen: bytes
    refused: bytes
    forgotten: bool
    def __init__(self, ttl_ns: _Optional[int] = ..., epoch: _Optional[int] = ..., reopen: _Optional[bytes] = ..., refused: _Optional[bytes] = ..., forgotten: bool = ...) -> None: ...

class EngineList(_message.Message):
    __slots__ = ("engine", "seen_ns_ago")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    SEEN_NS_AGO_FIELD_NUMBER: _ClassVar[int]
    engine: _containers.RepeatedCompositeFieldContainer[Engine]
    seen_ns_ago: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, engine: _Optional[_Iterable[_Union[Engine, _Mapping]]] = ..., seen_ns_ago: _Optional[_Iterable[int]] = ...) -> None: ...

class Status(_message.Message):
    __slots__ = ("epoch", "state", "uptime_ns", "namespaces", "blocks", "tickets", "shards", "counters", "policy", "fallen", "sequences", "claimed_blocks", "private_blocks", "tenant", "node", "release", "config_hash", "protocol", "waiting", "orphans", "tenants", "warnings")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    UPTIME_NS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TICKETS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    FALLEN_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    CLAIMED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PRIVATE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    CONFIG_HASH_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    ORPHANS_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    state: str
    uptime_ns: int
    namespaces: int
    blocks: int
    tickets: int
    shards: _containers.RepeatedCompositeFieldContainer[ShardStatus]
    counters: Counters
    policy: _common_pb2.Pairs
    fallen: CodecErrors
    sequences: int
    claimed_blocks: int
    private_blocks: int
    tenant: str
    node: str
    release: str
    config_hash: str
    protocol: int
    waiting: _containers.RepeatedScalarFieldContainer[str]
    orphans: Orphans
    tenants: _containers.RepeatedCompositeFieldContainer[TenantStatus]
    warnings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, epoch: _Optional[int] = ..., state: _Optional[str] = ..., uptime_ns: _Optional[int] = ..., namespaces: _Optional[int] = ..., blocks: _Optional[int] = ..., tickets: _Optional[int] = ..., shards: _Optional[_Iterable[_Union[ShardStatus, _Mapping]]] = ..., counters: _Optional[_Union[Counters, _Mapping]] = ..., policy: _Optional[_Union[_common_pb2.Pairs, _Mapping]] = ..., fallen: _Optional[_Union[CodecErrors, _Mapping]] = ..., sequences: _Optional[int] = ..., claimed_blocks: _Optional[int] = ..., private_blocks: _Optional[int] = ..., tenant: _Optional[str] = ..., node: _Optional[str] = ..., release: _Optional[str] = ..., config_hash: _Optional[str] = ..., protocol: _Optional[int] = ..., waiting: _Optional[_Iterable[str]] = ..., orphans: _Optional[_Union[Orphans, _Mapping]] = ..., tenants: _Optional[_Iterable[_Union[TenantStatus, _Mapping]]] = ..., warnings: _Optional[_Iterable[str]] = ...) -> None: ...

class TenantStatus(_message.Message):
    __slots__ = ("tenant", "tiers", "pinned_bytes", "most_pinned_bytes", "sequences", "most_sequences", "engines", "most_engines", "calls_per_1000_s", "bytes_per_s")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MOST_PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MOST_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    MOST_ENGINES_FIELD_NUMBER: _ClassVar[int]
    CALLS_PER_1000_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    tiers: _containers.RepeatedCompositeFieldContainer[TenantTier]
    pinned_bytes: int
    most_pinned_bytes: int
    sequences: int
    most_sequences: int
    engines: int
    most_engines: int
    calls_per_1000_s: int
    bytes_per_s: int
    def __init__(self, tenant: _Optional[str] = ..., tiers: _Optional[_Iterable[_Union[TenantTier, _Mapping]]] = ..., pinned_bytes: _Optional[int] = ..., most_pinned_bytes: _Optional[int] = ..., sequences: _Optional[int] = ..., most_sequences: _Optional[int] = ..., engines: _Optional[int] = ..., most_engines: _Optional[int] = ..., calls_per_1000_s: _Optional[int] = ..., bytes_per_s: _Optional[int] = ...) -> None: ...

class TenantTier(_message.Message):
    __slots__ = ("tier", "used_bytes", "floor_bytes", "limit_bytes")
    TIER_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FLOOR_BYTES_FIELD_NUMBER: _ClassVar[int]
    LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    tier: _common_pb2.Tier
    used_bytes: int
    floor_bytes: int
    limit_bytes: int
    def __init__(self, tier: _Optional[_Union[_common_pb2.Tier, str]] = ..., used_bytes: _Optional[int] = ..., floor_bytes: _Optional[int] = ..., limit_bytes: _Optional[int] = ...) -> None: ...

class Orphans(_message.Message):
    __slots__ = ("shard", "node")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    shard: _containers.RepeatedScalarFieldContainer[str]
    node: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, shard: _Optional[_Iterable[str]] = ..., node: _Optional[_Iterable[str]] = ...) -> None: ...

class Counters(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: _containers.RepeatedScalarFieldContainer[str]
    value: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[_Iterable[str]] = ..., value: _Optional[_Iterable[int]] = ...) -> None: ...

class CodecErrors(_message.Message):
    __slots__ = ("namespace", "error")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    error: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, namespace: _Optional[bytes] = ..., error: _Optional[_Iterable[int]] = ...) -> None: ...

class ShardInfo(_message.Message):
    __slots__ = ("shard", "epoch", "address", "host", "capacity_bytes", "free_bytes", "pages", "leases", "counters", "draining", "others", "trouble", "writing_bytes", "node", "release", "config_hash", "protocol", "stopping", "server_name")
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
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    WRITING_BYTES_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    CONFIG_HASH_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    SERVER_NAME_FIELD_NUMBER: _ClassVar[int]
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
    others: TierUses
    trouble: str
    writing_bytes: int
    node: str
    release: str
    config_hash: str
    protocol: int
    stopping: bool
    server_name: str
    def __init__(self, shard: _Optional[str] = ..., epoch: _Optional[int] = ..., address: _Optional[str] = ..., host: _Optional[str] = ..., capacity_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., pages: _Optional[int] = ..., leases: _Optional[int] = ..., counters: _Optional[_Union[Counters, _Mapping]] = ..., draining: bool = ..., others: _Optional[_Union[TierUses, _Mapping]] = ..., trouble: _Optional[str] = ..., writing_bytes: _Optional[int] = ..., node: _Optional[str] = ..., release: _Optional[str] = ..., config_hash: _Optional[str] = ..., protocol: _Optional[int] = ..., stopping: bool = ..., server_name: _Optional[str] = ...) -> None: ...

class TierUses(_message.Message):
    __slots__ = ("tier", "capacity_bytes", "free_bytes", "pages", "wanted_bytes", "writing_bytes")
    TIER_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    WANTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITING_BYTES_FIELD_NUMBER: _ClassVar[int]
    tier: _containers.RepeatedScalarFieldContainer[_common_pb2.Tier]
    capacity_bytes: _containers.RepeatedScalarFieldContainer[int]
    free_bytes: _containers.RepeatedScalarFieldContainer[int]
    pages: _containers.RepeatedScalarFieldContainer[int]
    wanted_bytes: _containers.RepeatedScalarFieldContainer[int]
    writing_bytes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tier: _Optional[_Iterable[_Union[_common_pb2.Tier, str]]] = ..., capacity_bytes: _Optional[_Iterable[int]] = ..., free_bytes: _Optional[_Iterable[int]] = ..., pages: _Optional[_Iterable[int]] = ..., wanted_bytes: _Optional[_Iterable[int]] = ..., writing_bytes: _Optional[_Iterable[int]] = ...) -> None: ...

class Specs(_message.Message):
    __slots__ = ("tenant", "spec")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    tenant: _containers.RepeatedScalarFieldContainer[str]
    spec: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, tenant: _Optional[_Iterable[str]] = ..., spec: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Events(_message.Message):
    __slots__ = ("kinds", "pages", "gone", "purges")
    KINDS_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    PURGES_FIELD_NUMBER: _ClassVar[int]
    kinds: _containers.RepeatedScalarFieldContainer[EventKind]
    pages: PageEvents
    gone: GoneEvents
    purges: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, kinds: _Optional[_Iterable[_Union[EventKind, str]]] = ..., pages: _Optional[_Union[PageEvents, _Mapping]] = ..., gone: _Optional[_Union[GoneEvents, _Mapping]] = ..., purges: _Optional[_Iterable[int]] = ...) -> None: ...

class PageEvents(_message.Message):
    __slots__ = ("namespace", "key", "parent", "depth", "tier", "loss", "codec")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    namespace: _common_pb2.HashTable
    key: _common_pb2.PageKeys
    parent: bytes
    depth: _containers.RepeatedScalarFieldContainer[int]
    tier: _containers.RepeatedScalarFieldContainer[_common_pb2.Tier]
    loss: _containers.RepeatedScalarFieldContainer[_common_pb2.Loss]
    codec: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, namespace: _Optional[_Union[_common_pb2.HashTable, _Mapping]] = ..., key: _Optional[_Union[_common_pb2.PageKeys, _Mapping]] = ..., parent: _Optional[bytes] = ..., depth: _Optional[_Iterable[int]] = ..., tier: _Optional[_Iterable[_Union[_common_pb2.Tier, str]]] = ..., loss: _Optional[_Iterable[_Union[_common_pb2.Loss, str]]] = ..., codec: _Optional[_Iterable[int]] = ...) -> None: ...

class GoneEvents(_message.Message):
    __slots__ = ("namespace", "key", "corrupt", "tier")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    namespace: _common_pb2.HashTable
    key: _common_pb2.PageKeys
    corrupt: _containers.RepeatedScalarFieldContainer[bool]
    tier: _containers.RepeatedScalarFieldContainer[_common_pb2.Tier]
    def __init__(self, namespace: _Optional[_Union[_common_pb2.HashTable, _Mapping]] = ..., key: _Optional[_Union[_common_pb2.PageKeys, _Mapping]] = ..., corrupt: _Optional[_Iterable[bool]] = ..., tier: _Optional[_Iterable[_Union[_common_pb2.Tier, str]]] = ...) -> None: ...

class Tombstones(_message.Message):
    __slots__ = ("number", "tenant", "model", "weights", "adapter")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    number: _containers.RepeatedScalarFieldContainer[int]
    tenant: _common_pb2.TextTable
    model: _common_pb2.TextTable
    weights: _common_pb2.TextTable
    adapter: _common_pb2.TextTable
    def __init__(self, number: _Optional[_Iterable[int]] = ..., tenant: _Optional[_Union[_common_pb2.TextTable, _Mapping]] = ..., model: _Optional[_Union[_common_pb2.TextTable, _Mapping]] = ..., weights: _Optional[_Union[_common_pb2.TextTable, _Mapping]] = ..., adapter: _Optional[_Union[_common_pb2.TextTable, _Mapping]] = ...) -> None: ...

class Pressure(_message.Message):
    __slots__ = ("tenant", "nbytes")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    tenant: _containers.RepeatedScalarFieldContainer[str]
    nbytes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tenant: _Optional[_Iterable[str]] = ..., nbytes: _Optional[_Iterable[int]] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("info", "coordinator", "first", "events", "specs", "pressure", "orders", "samples", "findings", "wanted_on_device")
    INFO_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    SPECS_FIELD_NUMBER: _ClassVar[int]
    PRESSURE_FIELD_NUMBER: _ClassVar[int]
    ORDERS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    WANTED_ON_DEVICE_FIELD_NUMBER: _ClassVar[int]
    info: ShardInfo
    coordinator: int
    first: int
    events: Events
    specs: Specs
    pressure: Pressure
    orders: OrderProgress
    samples: CodecErrors
    findings: Findings
    wanted_on_device: NamespacedHashes
    def __init__(self, info: _Optional[_Union[ShardInfo, _Mapping]] = ..., coordinator: _Optional[int] = ..., first: _Optional[int] = ..., events: _Optional[_Union[Events, _Mapping]] = ..., specs: _Optional[_Union[Specs, _Mapping]] = ..., pressure: _Optional[_Union[Pressure, _Mapping]] = ..., orders: _Optional[_Union[OrderProgress, _Mapping]] = ..., samples: _Optional[_Union[CodecErrors, _Mapping]] = ..., findings: _Optional[_Union[Findings, _Mapping]] = ..., wanted_on_device: _Optional[_Union[NamespacedHashes, _Mapping]] = ...) -> None: ...

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
    pages: PageEvents
    specs: Specs
    tombstones: Tombstones
    def __init__(self, info: _Optional[_Union[ShardInfo, _Mapping]] = ..., coordinator: _Optional[int] = ..., upto: _Optional[int] = ..., chunk: _Optional[int] = ..., last: bool = ..., pages: _Optional[_Union[PageEvents, _Mapping]] = ..., specs: _Optional[_Union[Specs, _Mapping]] = ..., tombstones: _Optional[_Union[Tombstones, _Mapping]] = ...) -> None: ...

class Order(_message.Message):
    __slots__ = ("evict", "move", "pull")
    EVICT_FIELD_NUMBER: _ClassVar[int]
    MOVE_FIELD_NUMBER: _ClassVar[int]
    PULL_FIELD_NUMBER: _ClassVar[int]
    evict: EvictOrder
    move: MoveOrder
    pull: PullOrder
    def __init__(self, evict: _Optional[_Union[EvictOrder, _Mapping]] = ..., move: _Optional[_Union[MoveOrder, _Mapping]] = ..., pull: _Optional[_Union[PullOrder, _Mapping]] = ...) -> None: ...

class EvictOrder(_message.Message):
    __slots__ = ("number", "blocks", "tier")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    number: int
    blocks: NamespacedHashes
    tier: _common_pb2.Tier
    def __init__(self, number: _Optional[int] = ..., blocks: _Optional[_Union[NamespacedHashes, _Mapping]] = ..., tier: _Optional[_Union[_common_pb2.Tier, str]] = ...) -> None: ...

class NamespacedHashes(_message.Message):
    __slots__ = ("namespace", "hash")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    namespace: _common_pb2.HashTable
    hash: bytes
    def __init__(self, namespace: _Optional[_Union[_common_pb2.HashTable, _Mapping]] = ..., hash: _Optional[bytes] = ...) -> None: ...

class MoveOrder(_message.Message):
    __slots__ = ("number", "moves")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    number: int
    moves: Moves
    def __init__(self, number: _Optional[int] = ..., moves: _Optional[_Union[Moves, _Mapping]] = ...) -> None: ...

class Moves(_message.Message):
    __slots__ = ("namespace", "hash", "to", "codec", "keeps", "up")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    KEEPS_FIELD_NUMBER: _ClassVar[int]
    UP_FIELD_NUMBER: _ClassVar[int]
    namespace: _common_pb2.HashTable
    hash: bytes
    to: _containers.RepeatedScalarFieldContainer[_common_pb2.Tier]
    codec: _containers.RepeatedScalarFieldContainer[int]
    keeps: _containers.RepeatedScalarFieldContainer[bool]
    up: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, namespace: _Optional[_Union[_common_pb2.HashTable, _Mapping]] = ..., hash: _Optional[bytes] = ..., to: _Optional[_Iterable[_Union[_common_pb2.Tier, str]]] = ..., codec: _Optional[_Iterable[int]] = ..., keeps: _Optional[_Iterable[bool]] = ..., up: _Optional[_Iterable[bool]] = ...) -> None: ...

class PullOrder(_message.Message):
    __slots__ = ("number", "source", "tenant", "spec", "pages", "codec", "into")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    INTO_FIELD_NUMBER: _ClassVar[int]
    number: int
    source: _common_pb2.ShardAddress
    tenant: str
    spec: bytes
    pages: _common_pb2.NewPages
    codec: int
    into: _common_pb2.Tier
    def __init__(self, number: _Optional[int] = ..., source: _Optional[_Union[_common_pb2.ShardAddress, _Mapping]] = ..., tenant: _Optional[str] = ..., spec: _Optional[bytes] = ..., pages: _Optional[_Union[_common_pb2.NewPages, _Mapping]] = ..., codec: _Optional[int] = ..., into: _Optional[_Union[_common_pb2.Tier, str]] = ...) -> None: ...

class ReportAck(_message.Message):
    __slots__ = ("epoch", "acked", "inventory", "tombstones", "drain", "leave", "orders", "probe")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ACKED_FIELD_NUMBER: _ClassVar[int]
    INVENTORY_FIELD_NUMBER: _ClassVar[int]
    TOMBSTONES_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    ORDERS_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    acked: int
    inventory: bool
    tombstones: Tombstones
    drain: bool
    leave: LeaveReason
    orders: _containers.RepeatedCompositeFieldContainer[Order]
    probe: ProbeOrder
    def __init__(self, epoch: _Optional[int] = ..., acked: _Optional[int] = ..., inventory: bool = ..., tombstones: _Optional[_Union[Tombstones, _Mapping]] = ..., drain: bool = ..., leave: _Optional[_Union[LeaveReason, str]] = ..., orders: _Optional[_Iterable[_Union[Order, _Mapping]]] = ..., probe: _Optional[_Union[ProbeOrder, _Mapping]] = ...) -> None: ...

class ProbeOrder(_message.Message):
    __slots__ = ("number", "peers")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    number: int
    peers: _containers.RepeatedCompositeFieldContainer[_common_pb2.ShardAddress]
    def __init__(self, number: _Optional[int] = ..., peers: _Optional[_Iterable[_Union[_common_pb2.ShardAddress, _Mapping]]] = ...) -> None: ...
