from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Loss(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOSS_EXACT: _ClassVar[Loss]
    LOSS_Q8: _ClassVar[Loss]
    LOSS_Q4: _ClassVar[Loss]

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_RAM: _ClassVar[Tier]
    TIER_HOST: _ClassVar[Tier]
    TIER_DISK: _ClassVar[Tier]
    TIER_GPU: _ClassVar[Tier]

class MissReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MISS_REASON_UNSPECIFIED: _ClassVar[MissReason]
    MISS_REASON_NEVER_SEEN: _ClassVar[MissReason]
    MISS_REASON_EVICTED: _ClassVar[MissReason]
    MISS_REASON_PENDING: _ClassVar[MissReason]
    MISS_REASON_BELOW_BLOCK: _ClassVar[MissReason]
    MISS_REASON_NAMESPACE: _ClassVar[MissReason]
    MISS_REASON_PART: _ClassVar[MissReason]
    MISS_REASON_LOSSY: _ClassVar[MissReason]
    MISS_REASON_CORRUPT: _ClassVar[MissReason]
    MISS_REASON_SHARD_LOST: _ClassVar[MissReason]
    MISS_REASON_REBUILDING: _ClassVar[MissReason]
    MISS_REASON_FULL: _ClassVar[MissReason]
    MISS_REASON_DEADLINE: _ClassVar[MissReason]
    MISS_REASON_SLOWER_THAN_RECOMPUTE: _ClassVar[MissReason]
    MISS_REASON_OFF: _ClassVar[MissReason]
    MISS_REASON_COORDINATOR_LOST: _ClassVar[MissReason]
    MISS_REASON_DEVICE_LOST: _ClassVar[MissReason]

class RefusedKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REFUSED_KIND_UNSPECIFIED: _ClassVar[RefusedKind]
    REFUSED_KIND_UNKNOWN_NAMESPACE: _ClassVar[RefusedKind]
    REFUSED_KIND_STALE: _ClassVar[RefusedKind]
    REFUSED_KIND_LIMIT: _ClassVar[RefusedKind]
    REFUSED_KIND_BAD: _ClassVar[RefusedKind]
LOSS_EXACT: Loss
LOSS_Q8: Loss
LOSS_Q4: Loss
TIER_RAM: Tier
TIER_HOST: Tier
TIER_DISK: Tier
TIER_GPU: Tier
MISS_REASON_UNSPECIFIED: MissReason
MISS_REASON_NEVER_SEEN: MissReason
MISS_REASON_EVICTED: MissReason
MISS_REASON_PENDING: MissReason
MISS_REASON_BELOW_BLOCK: MissReason
MISS_REASON_NAMESPACE: MissReason
MISS_REASON_PART: MissReason
MISS_REASON_LOSSY: MissReason
MISS_REASON_CORRUPT: MissReason
MISS_REASON_SHARD_LOST: MissReason
MISS_REASON_REBUILDING: MissReason
MISS_REASON_FULL: MissReason
MISS_REASON_DEADLINE: MissReason
MISS_REASON_SLOWER_THAN_RECOMPUTE: MissReason
MISS_REASON_OFF: MissReason
MISS_REASON_COORDINATOR_LOST: MissReason
MISS_REASON_DEVICE_LOST: MissReason
REFUSED_KIND_UNSPECIFIED: RefusedKind
REFUSED_KIND_UNKNOWN_NAMESPACE: RefusedKind
REFUSED_KIND_STALE: RefusedKind
REFUSED_KIND_LIMIT: RefusedKind
REFUSED_KIND_BAD: RefusedKind

class Miss(_message.Message):
    __slots__ = ("reason", "detail")
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    reason: MissReason
    detail: str
    def __init__(self, reason: _Optional[_Union[MissReason, str]] = ..., detail: _Optional[str] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("kind", "detail")
    KIND_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    kind: RefusedKind
    detail: str
    def __init__(self, kind: _Optional[_Union[RefusedKind, str]] = ..., detail: _Optional[str] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ("ok",)
    OK_FIELD_NUMBER: _ClassVar[int]
    ok: bool
    def __init__(self, ok: bool = ...) -> None: ...

class Spec(_message.Message):
    __slots__ = ("model", "weights", "adapter", "rope", "block_tokens", "groups", "extra", "private")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ROPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    EXTRA_FIELD_NUMBER: _ClassVar[int]
    PRIVATE_FIELD_NUMBER: _ClassVar[int]
    model: str
    weights: str
    adapter: str
    rope: str
    block_tokens: int
    groups: _containers.RepeatedCompositeFieldContainer[Group]
    extra: Pairs
    private: bool
    def __init__(self, model: _Optional[str] = ..., weights: _Optional[str] = ..., adapter: _Optional[str] = ..., rope: _Optional[str] = ..., block_tokens: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[Group, _Mapping]]] = ..., extra: _Optional[_Union[Pairs, _Mapping]] = ..., private: bool = ...) -> None: ...

class Group(_message.Message):
    __slots__ = ("layers", "planes", "reuse")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    PLANES_FIELD_NUMBER: _ClassVar[int]
    REUSE_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedScalarFieldContainer[int]
    planes: _containers.RepeatedCompositeFieldContainer[Plane]
    reuse: Reuse
    def __init__(self, layers: _Optional[_Iterable[int]] = ..., planes: _Optional[_Iterable[_Union[Plane, _Mapping]]] = ..., reuse: _Optional[_Union[Reuse, _Mapping]] = ...) -> None: ...

class Reuse(_message.Message):
    __slots__ = ("kind", "tokens")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    tokens: int
    def __init__(self, kind: _Optional[str] = ..., tokens: _Optional[int] = ...) -> None: ...

class Plane(_message.Message):
    __slots__ = ("name", "heads", "dim", "dtype", "packing")
    NAME_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    PACKING_FIELD_NUMBER: _ClassVar[int]
    name: str
    heads: int
    dim: int
    dtype: str
    packing: str
    def __init__(self, name: _Optional[str] = ..., heads: _Optional[int] = ..., dim: _Optional[int] = ..., dtype: _Optional[str] = ..., packing: _Optional[str] = ...) -> None: ...

class Pairs(_message.Message):
    __slots__ = ("key", "value")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    key: _containers.RepeatedScalarFieldContainer[str]
    value: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, key: _Optional[_Iterable[str]] = ..., value: _Optional[_Iterable[str]] = ...) -> None: ...

class HashTable(_message.Message):
    __slots__ = ("table", "of")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    OF_FIELD_NUMBER: _ClassVar[int]
    table: bytes
    of: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, table: _Optional[bytes] = ..., of: _Optional[_Iterable[int]] = ...) -> None: ...

class PlaceTable(_message.Message):
    __slots__ = ("table", "of")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    OF_FIELD_NUMBER: _ClassVar[int]
    table: _containers.RepeatedScalarFieldContainer[int]
    of: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, table: _Optional[_Iterable[int]] = ..., of: _Optional[_Iterable[int]] = ...) -> None: ...

class TextTable(_message.Message):
    __slots__ = ("table", "of")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    OF_FIELD_NUMBER: _ClassVar[int]
    table: _containers.RepeatedScalarFieldContainer[str]
    of: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, table: _Optional[_Iterable[str]] = ..., of: _Optional[_Iterable[int]] = ...) -> None: ...

class MissTable(_message.Message):
    __slots__ = ("table", "of")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    OF_FIELD_NUMBER: _ClassVar[int]
    table: _containers.RepeatedCompositeFieldContainer[Miss]
    of: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, table: _Optional[_Iterable[_Union[Miss, _Mapping]]] = ..., of: _Optional[_Iterable[int]] = ...) -> None: ...

class AddressTable(_message.Message):
    __slots__ = ("table", "of")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    OF_FIELD_NUMBER: _ClassVar[int]
    table: _containers.RepeatedCompositeFieldContainer[ShardAddress]
    of: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, table: _Optional[_Iterable[_Union[ShardAddress, _Mapping]]] = ..., of: _Optional[_Iterable[int]] = ...) -> None: ...

class Need(_message.Message):
    __slots__ = ("parts", "accept", "avoid")
    PARTS_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_FIELD_NUMBER: _ClassVar[int]
    AVOID_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedScalarFieldContainer[int]
    accept: Loss
    avoid: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, parts: _Optional[_Iterable[int]] = ..., accept: _Optional[_Union[Loss, str]] = ..., avoid: _Optional[_Iterable[str]] = ...) -> None: ...

class PageKeys(_message.Message):
    __slots__ = ("hash", "place")
    HASH_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    hash: HashTable
    place: PlaceTable
    def __init__(self, hash: _Optional[_Union[HashTable, _Mapping]] = ..., place: _Optional[_Union[PlaceTable, _Mapping]] = ...) -> None: ...

class NewPages(_message.Message):
    __slots__ = ("key", "parent", "depth", "loss")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    key: PageKeys
    parent: HashTable
    depth: _containers.RepeatedScalarFieldContainer[int]
    loss: _containers.RepeatedScalarFieldContainer[Loss]
    def __init__(self, key: _Optional[_Union[PageKeys, _Mapping]] = ..., parent: _Optional[_Union[HashTable, _Mapping]] = ..., depth: _Optional[_Iterable[int]] = ..., loss: _Optional[_Iterable[_Union[Loss, str]]] = ...) -> None: ...

class ShardAddress(_message.Message):
    __slots__ = ("shard", "epoch", "address", "host", "server_name")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    SERVER_NAME_FIELD_NUMBER: _ClassVar[int]
    shard: str
    epoch: int
    address: str
    host: str
    server_name: str
    def __init__(self, shard: _Optional[str] = ..., epoch: _Optional[int] = ..., address: _Optional[str] = ..., host: _Optional[str] = ..., server_name: _Optional[str] = ...) -> None: ...

class Sources(_message.Message):
    __slots__ = ("place", "shard", "tier", "loss")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    place: _containers.RepeatedScalarFieldContainer[int]
    shard: AddressTable
    tier: _containers.RepeatedScalarFieldContainer[Tier]
    loss: _containers.RepeatedScalarFieldContainer[Loss]
    def __init__(self, place: _Optional[_Iterable[int]] = ..., shard: _Optional[_Union[AddressTable, _Mapping]] = ..., tier: _Optional[_Iterable[_Union[Tier, str]]] = ..., loss: _Optional[_Iterable[_Union[Loss, str]]] = ...) -> None: ...

class Covers(_message.Message):
    __slots__ = ("counts", "items")
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    items: Sources
    def __init__(self, counts: _Optional[_Iterable[int]] = ..., items: _Optional[_Union[Sources, _Mapping]] = ...) -> None: ...

class Plans(_message.Message):
    __slots__ = ("counts", "items")
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    items: Covers
    def __init__(self, counts: _Optional[_Iterable[int]] = ..., items: _Optional[_Union[Covers, _Mapping]] = ...) -> None: ...

class PlanTable(_message.Message):
    __slots__ = ("table", "of")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    OF_FIELD_NUMBER: _ClassVar[int]
    table: Plans
    of: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, table: _Optional[_Union[Plans, _Mapping]] = ..., of: _Optional[_Iterable[int]] = ...) -> None: ...

class Runs(_message.Message):
    __slots__ = ("count", "plan")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    count: _containers.RepeatedScalarFieldContainer[int]
    plan: PlanTable
    def __init__(self, count: _Optional[_Iterable[int]] = ..., plan: _Optional[_Union[PlanTable, _Mapping]] = ...) -> None: ...

class TicketBody(_message.Message):
    __slots__ = ("namespace", "attempt", "hashes", "need", "runs")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    NEED_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    attempt: bytes
    hashes: bytes
    need: Need
    runs: Runs
    def __init__(self, namespace: _Optional[bytes] = ..., attempt: _Optional[bytes] = ..., hashes: _Optional[bytes] = ..., need: _Optional[_Union[Need, _Mapping]] = ..., runs: _Optional[_Union[Runs, _Mapping]] = ...) -> None: ...
