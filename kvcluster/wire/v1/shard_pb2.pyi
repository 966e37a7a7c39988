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
WRITTEN_UNSPECIFIED: Written
WRITTEN_COMMITTED: Written
WRITTEN_DUPLICATE: Written
WRITTEN_PENDING: Written
WRITTEN_CORRUPT: Written
WRITTEN_FULL: Written
WRITTEN_LOST: Written

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
    __slots__ = ("namespace", "attempt", "epoch", "wants", "accept")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WANTS_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    attempt: bytes
    epoch: int
    wants: PageWants
    accept: _common_pb2.Loss
    def __init__(self, namespace: _Optional[bytes] = ..., attempt: _Optional[bytes] = ..., epoch: _Optional[int] = ..., wants: _Optional[_Union[PageWants, _Mapping]] = ..., accept: _Optional[_Union[_common_pb2.Loss, str]] = ...) -> None: ...

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
