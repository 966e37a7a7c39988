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
    TIER_DEVICE: _ClassVar[Tier]
    TIER_HOST: _ClassVar[Tier]
    TIER_DISK: _ClassVar[Tier]

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
TIER_DEVICE: Tier
TIER_HOST: Tier
TIER_DISK: Tier
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
    __slots__ = ("model", "weights", "adapter", "rope", "block_tokens", "groups", "extra")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ROPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    EXTRA_FIELD_NUMBER: _ClassVar[int]
    model: str
    weights: str
    adapter: str
    rope: str
    block_tokens: int
    groups: _containers.RepeatedCompositeFieldContainer[Group]
    extra: _containers.RepeatedCompositeFieldContainer[Pair]
    def __init__(self, model: _Optional[str] = ..., weights: _Optional[str] = ..., adapter: _Optional[str] = ..., rope: _Optional[str] = ..., block_tokens: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[Group, _Mapping]]] = ..., extra: _Optional[_Iterable[_Union[Pair, _Mapping]]] = ...) -> None: ...

class Group(_message.Message):
    __slots__ = ("layers", "planes", "reuse", "window_tokens")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    PLANES_FIELD_NUMBER: _ClassVar[int]
    REUSE_FIELD_NUMBER: _ClassVar[int]
    WINDOW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedScalarFieldContainer[int]
    planes: _containers.RepeatedCompositeFieldContainer[Plane]
    reuse: str
    window_tokens: int
    def __init__(self, layers: _Optional[_Iterable[int]] = ..., planes: _Optional[_Iterable[_Union[Plane, _Mapping]]] = ..., reuse: _Optional[str] = ..., window_tokens: _Optional[int] = ...) -> None: ...

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

class Pair(_message.Message):
    __slots__ = ("key", "value")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: str
    def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class Need(_message.Message):
    __slots__ = ("groups", "parts", "accept", "avoid")
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_FIELD_NUMBER: _ClassVar[int]
    AVOID_FIELD_NUMBER: _ClassVar[int]
    groups: int
    parts: _containers.RepeatedScalarFieldContainer[int]
    accept: Loss
    avoid: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, groups: _Optional[int] = ..., parts: _Optional[_Iterable[int]] = ..., accept: _Optional[_Union[Loss, str]] = ..., avoid: _Optional[_Iterable[str]] = ...) -> None: ...

class PageKeys(_message.Message):
    __slots__ = ("hashes", "parts", "hash_of", "part_of")
    HASHES_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    HASH_OF_FIELD_NUMBER: _ClassVar[int]
    PART_OF_FIELD_NUMBER: _ClassVar[int]
    hashes: bytes
    parts: _containers.RepeatedScalarFieldContainer[int]
    hash_of: _containers.RepeatedScalarFieldContainer[int]
    part_of: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, hashes: _Optional[bytes] = ..., parts: _Optional[_Iterable[int]] = ..., hash_of: _Optional[_Iterable[int]] = ..., part_of: _Optional[_Iterable[int]] = ...) -> None: ...

class NewPages(_message.Message):
    __slots__ = ("keys", "parent_of", "depths", "losses")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    PARENT_OF_FIELD_NUMBER: _ClassVar[int]
    DEPTHS_FIELD_NUMBER: _ClassVar[int]
    LOSSES_FIELD_NUMBER: _ClassVar[int]
    keys: PageKeys
    parent_of: _containers.RepeatedScalarFieldContainer[int]
    depths: _containers.RepeatedScalarFieldContainer[int]
    losses: _containers.RepeatedScalarFieldContainer[Loss]
    def __init__(self, keys: _Optional[_Union[PageKeys, _Mapping]] = ..., parent_of: _Optional[_Iterable[int]] = ..., depths: _Optional[_Iterable[int]] = ..., losses: _Optional[_Iterable[_Union[Loss, str]]] = ...) -> None: ...

class ShardAddress(_message.Message):
    __slots__ = ("shard", "epoch", "address", "host")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    shard: str
    epoch: int
    address: str
    host: str
    def __init__(self, shard: _Optional[str] = ..., epoch: _Optional[int] = ..., address: _Optional[str] = ..., host: _Optional[str] = ...) -> None: ...

class Source(_message.Message):
    __slots__ = ("shard", "part", "tier", "loss")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    shard: int
    part: _containers.RepeatedScalarFieldContainer[int]
    tier: Tier
    loss: Loss
    def __init__(self, shard: _Optional[int] = ..., part: _Optional[_Iterable[int]] = ..., tier: _Optional[_Union[Tier, str]] = ..., loss: _Optional[_Union[Loss, str]] = ...) -> None: ...

class Cover(_message.Message):
    __slots__ = ("absent", "sources")
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    absent: bool
    sources: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, absent: bool = ..., sources: _Optional[_Iterable[int]] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("groups",)
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[Cover]
    def __init__(self, groups: _Optional[_Iterable[_Union[Cover, _Mapping]]] = ...) -> None: ...

class Plans(_message.Message):
    __slots__ = ("shards", "sources", "plans")
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    PLANS_FIELD_NUMBER: _ClassVar[int]
    shards: _containers.RepeatedCompositeFieldContainer[ShardAddress]
    sources: _containers.RepeatedCompositeFieldContainer[Source]
    plans: _containers.RepeatedCompositeFieldContainer[Plan]
    def __init__(self, shards: _Optional[_Iterable[_Union[ShardAddress, _Mapping]]] = ..., sources: _Optional[_Iterable[_Union[Source, _Mapping]]] = ..., plans: _Optional[_Iterable[_Union[Plan, _Mapping]]] = ...) -> None: ...

class Runs(_message.Message):
    __slots__ = ("plans", "counts", "plan_of")
    PLANS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    PLAN_OF_FIELD_NUMBER: _ClassVar[int]
    plans: Plans
    counts: _containers.RepeatedScalarFieldContainer[int]
    plan_of: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, plans: _Optional[_Union[Plans, _Mapping]] = ..., counts: _Optional[_Iterable[int]] = ..., plan_of: _Optional[_Iterable[int]] = ...) -> None: ...

class TicketBody(_message.Message):
    __slots__ = ("namespace", "holder", "attempt", "hashes", "need", "runs")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    NEED_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    holder: bytes
    attempt: int
    hashes: bytes
    need: Need
    runs: Runs
    def __init__(self, namespace: _Optional[bytes] = ..., holder: _Optional[bytes] = ..., attempt: _Optional[int] = ..., hashes: _Optional[bytes] = ..., need: _Optional[_Union[Need, _Mapping]] = ..., runs: _Optional[_Union[Runs, _Mapping]] = ...) -> None: ...
