from kvcluster.wire.v1 import common_pb2 as _common_pb2
from kvcluster.wire.v1 import coordinator_pb2 as _coordinator_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Written(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WRITTEN_UNSPECIFIED: _ClassVar[Written]
    WRITTEN_COMMITTED: _ClassVar[Written]
    WRITTEN_DUPLICATE: _ClassVar[Written]
    WRITTEN_PENDING: _ClassVar[Written]
    WRITTEN_CORRUPT: _ClassVar[Written]
    WRITTEN_FULL: _ClassVar[Written]
    WRITTEN_LOST: _ClassVar[Written]

class SpanMiss(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SPAN_MISS_UNSPECIFIED: _ClassVar[SpanMiss]
    SPAN_MISS_UNKNOWN: _ClassVar[SpanMiss]
    SPAN_MISS_GONE: _ClassVar[SpanMiss]
    SPAN_MISS_LOSSY: _ClassVar[SpanMiss]
    SPAN_MISS_STORED: _ClassVar[SpanMiss]
    SPAN_MISS_CORRUPT: _ClassVar[SpanMiss]

class DeclineReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DECLINE_REASON_UNSPECIFIED: _ClassVar[DeclineReason]
    DECLINE_REASON_BUSY: _ClassVar[DeclineReason]
    DECLINE_REASON_ARITHMETIC: _ClassVar[DeclineReason]
    DECLINE_REASON_UNSUPPORTED: _ClassVar[DeclineReason]
WRITTEN_UNSPECIFIED: Written
WRITTEN_COMMITTED: Written
WRITTEN_DUPLICATE: Written
WRITTEN_PENDING: Written
WRITTEN_CORRUPT: Written
WRITTEN_FULL: Written
WRITTEN_LOST: Written
SPAN_MISS_UNSPECIFIED: SpanMiss
SPAN_MISS_UNKNOWN: SpanMiss
SPAN_MISS_GONE: SpanMiss
SPAN_MISS_LOSSY: SpanMiss
SPAN_MISS_STORED: SpanMiss
SPAN_MISS_CORRUPT: SpanMiss
DECLINE_REASON_UNSPECIFIED: DeclineReason
DECLINE_REASON_BUSY: DeclineReason
DECLINE_REASON_ARITHMETIC: DeclineReason
DECLINE_REASON_UNSUPPORTED: DeclineReason

class FlushRequest(_message.Message):
    __slots__ = ("wait_ns",)
    WAIT_NS_FIELD_NUMBER: _ClassVar[int]
    wait_ns: int
    def __init__(self, wait_ns: _Optional[int] = ...) -> None: ...

class SuspectRequest(_message.Message):
    __slots__ = ("namespace", "epoch", "keys")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    epoch: int
    keys: _common_pb2.PageKeys
    def __init__(self, namespace: _Optional[bytes] = ..., epoch: _Optional[int] = ..., keys: _Optional[_Union[_common_pb2.PageKeys, _Mapping]] = ...) -> None: ...

class RegisterSpansRequest(_message.Message):
    __slots__ = ("namespace", "holder", "epoch", "spans", "ended")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    holder: bytes
    epoch: int
    spans: SpanList
    ended: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, namespace: _Optional[bytes] = ..., holder: _Optional[bytes] = ..., epoch: _Optional[int] = ..., spans: _Optional[_Union[SpanList, _Mapping]] = ..., ended: _Optional[_Iterable[int]] = ...) -> None: ...

class SpanList(_message.Message):
    __slots__ = ("span", "place", "depth", "hashes", "accept")
    SPAN_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_FIELD_NUMBER: _ClassVar[int]
    span: _containers.RepeatedScalarFieldContainer[int]
    place: _common_pb2.PlaceTable
    depth: _containers.RepeatedScalarFieldContainer[int]
    hashes: _coordinator_pb2.HashLists
    accept: _containers.RepeatedScalarFieldContainer[_common_pb2.Loss]
    def __init__(self, span: _Optional[_Iterable[int]] = ..., place: _Optional[_Union[_common_pb2.PlaceTable, _Mapping]] = ..., depth: _Optional[_Iterable[int]] = ..., hashes: _Optional[_Union[_coordinator_pb2.HashLists, _Mapping]] = ..., accept: _Optional[_Iterable[_Union[_common_pb2.Loss, str]]] = ...) -> None: ...

class GetOffersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ShardReply(_message.Message):
    __slots__ = ("refused", "done", "attached", "offers")
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    refused: _common_pb2.Refused
    done: _common_pb2.Done
    attached: AttachedShard
    offers: Offers
    def __init__(self, refused: _Optional[_Union[_common_pb2.Refused, _Mapping]] = ..., done: _Optional[_Union[_common_pb2.Done, _Mapping]] = ..., attached: _Optional[_Union[AttachedShard, _Mapping]] = ..., offers: _Optional[_Union[Offers, _Mapping]] = ...) -> None: ...

class Offers(_message.Message):
    __slots__ = ("protocol_version", "epoch", "offers", "refused")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    epoch: int
    offers: OfferList
    refused: _common_pb2.Pairs
    def __init__(self, protocol_version: _Optional[int] = ..., epoch: _Optional[int] = ..., offers: _Optional[_Union[OfferList, _Mapping]] = ..., refused: _Optional[_Union[_common_pb2.Pairs, _Mapping]] = ...) -> None: ...

class OfferList(_message.Message):
    __slots__ = ("transport", "address", "version", "details")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    transport: _containers.RepeatedScalarFieldContainer[str]
    address: _containers.RepeatedScalarFieldContainer[str]
    version: _containers.RepeatedScalarFieldContainer[int]
    details: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, transport: _Optional[_Iterable[str]] = ..., address: _Optional[_Iterable[str]] = ..., version: _Optional[_Iterable[int]] = ..., details: _Optional[_Iterable[bytes]] = ...) -> None: ...

class AttachedShard(_message.Message):
    __slots__ = ("protocol_version", "namespace", "epoch", "lease_ttl_ns")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_NS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    namespace: bytes
    epoch: int
    lease_ttl_ns: int
    def __init__(self, protocol_version: _Optional[int] = ..., namespace: _Optional[bytes] = ..., epoch: _Optional[int] = ..., lease_ttl_ns: _Optional[int] = ...) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ("namespace", "attempt", "epoch", "wants", "accept", "on_device")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WANTS_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_FIELD_NUMBER: _ClassVar[int]
    ON_DEVICE_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    attempt: bytes
    epoch: int
    wants: PageWants
    accept: _common_pb2.Loss
    on_device: bool
    def __init__(self, namespace: _Optional[bytes] = ..., attempt: _Optional[bytes] = ..., epoch: _Optional[int] = ..., wants: _Optional[_Union[PageWants, _Mapping]] = ..., accept: _Optional[_Union[_common_pb2.Loss, str]] = ..., on_device: bool = ...) -> None: ...

class PageWants(_message.Message):
    __slots__ = ("key", "layer_start", "layer_stop")
    KEY_FIELD_NUMBER: _ClassVar[int]
    LAYER_START_FIELD_NUMBER: _ClassVar[int]
    LAYER_STOP_FIELD_NUMBER: _ClassVar[int]
    key: _common_pb2.PageKeys
    layer_start: _containers.RepeatedScalarFieldContainer[int]
    layer_stop: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, key: _Optional[_Union[_common_pb2.PageKeys, _Mapping]] = ..., layer_start: _Optional[_Iterable[int]] = ..., layer_stop: _Optional[_Iterable[int]] = ...) -> None: ...

class WriteRequest(_message.Message):
    __slots__ = ("namespace", "attempt", "epoch", "wait_ns", "pages")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WAIT_NS_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    attempt: bytes
    epoch: int
    wait_ns: int
    pages: _common_pb2.NewPages
    def __init__(self, namespace: _Optional[bytes] = ..., attempt: _Optional[bytes] = ..., epoch: _Optional[int] = ..., wait_ns: _Optional[int] = ..., pages: _Optional[_Union[_common_pb2.NewPages, _Mapping]] = ...) -> None: ...

class WrittenTable(_message.Message):
    __slots__ = ("table", "of")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    OF_FIELD_NUMBER: _ClassVar[int]
    table: _containers.RepeatedScalarFieldContainer[Written]
    of: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, table: _Optional[_Iterable[_Union[Written, str]]] = ..., of: _Optional[_Iterable[int]] = ...) -> None: ...

class AttendRequest(_message.Message):
    __slots__ = ("attempt", "epoch", "layer", "heads", "dim", "dtype", "scale", "softcap", "window", "latent_values", "fused", "rows")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    SOFTCAP_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    LATENT_VALUES_FIELD_NUMBER: _ClassVar[int]
    FUSED_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    attempt: bytes
    epoch: int
    layer: int
    heads: int
    dim: int
    dtype: str
    scale: float
    softcap: float
    window: int
    latent_values: int
    fused: bool
    rows: AttendRows
    def __init__(self, attempt: _Optional[bytes] = ..., epoch: _Optional[int] = ..., layer: _Optional[int] = ..., heads: _Optional[int] = ..., dim: _Optional[int] = ..., dtype: _Optional[str] = ..., scale: _Optional[float] = ..., softcap: _Optional[float] = ..., window: _Optional[int] = ..., latent_values: _Optional[int] = ..., fused: bool = ..., rows: _Optional[_Union[AttendRows, _Mapping]] = ...) -> None: ...

class AttendRows(_message.Message):
    __slots__ = ("position", "tokens", "spans", "subtrees")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    SUBTREES_FIELD_NUMBER: _ClassVar[int]
    position: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    spans: NumberLists
    subtrees: SubtreeLists
    def __init__(self, position: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., spans: _Optional[_Union[NumberLists, _Mapping]] = ..., subtrees: _Optional[_Union[SubtreeLists, _Mapping]] = ...) -> None: ...

class NumberLists(_message.Message):
    __slots__ = ("counts", "items")
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    items: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, counts: _Optional[_Iterable[int]] = ..., items: _Optional[_Iterable[int]] = ...) -> None: ...

class SubtreeLists(_message.Message):
    __slots__ = ("counts", "items")
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    items: SubtreeList
    def __init__(self, counts: _Optional[_Iterable[int]] = ..., items: _Optional[_Union[SubtreeList, _Mapping]] = ...) -> None: ...

class SubtreeList(_message.Message):
    __slots__ = ("level", "index")
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    level: _containers.RepeatedScalarFieldContainer[int]
    index: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, level: _Optional[_Iterable[int]] = ..., index: _Optional[_Iterable[int]] = ...) -> None: ...

class AttendReply(_message.Message):
    __slots__ = ("attended", "lacking", "declined")
    ATTENDED_FIELD_NUMBER: _ClassVar[int]
    LACKING_FIELD_NUMBER: _ClassVar[int]
    DECLINED_FIELD_NUMBER: _ClassVar[int]
    attended: Attended
    lacking: SpansLacking
    declined: AttendDeclined
    def __init__(self, attended: _Optional[_Union[Attended, _Mapping]] = ..., lacking: _Optional[_Union[SpansLacking, _Mapping]] = ..., declined: _Optional[_Union[AttendDeclined, _Mapping]] = ...) -> None: ...

class Attended(_message.Message):
    __slots__ = ("nbytes", "loss", "time_us")
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    TIME_US_FIELD_NUMBER: _ClassVar[int]
    nbytes: int
    loss: _common_pb2.Loss
    time_us: int
    def __init__(self, nbytes: _Optional[int] = ..., loss: _Optional[_Union[_common_pb2.Loss, str]] = ..., time_us: _Optional[int] = ...) -> None: ...

class SpansLacking(_message.Message):
    __slots__ = ("spans",)
    SPANS_FIELD_NUMBER: _ClassVar[int]
    spans: LackingList
    def __init__(self, spans: _Optional[_Union[LackingList, _Mapping]] = ...) -> None: ...

class LackingList(_message.Message):
    __slots__ = ("span", "why")
    SPAN_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    span: _containers.RepeatedScalarFieldContainer[int]
    why: _containers.RepeatedScalarFieldContainer[SpanMiss]
    def __init__(self, span: _Optional[_Iterable[int]] = ..., why: _Optional[_Iterable[_Union[SpanMiss, str]]] = ...) -> None: ...

class AttendDeclined(_message.Message):
    __slots__ = ("reason", "detail")
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    reason: DeclineReason
    detail: str
    def __init__(self, reason: _Optional[_Union[DeclineReason, str]] = ..., detail: _Optional[str] = ...) -> None: ...
