"""Declarations of messages: which value of the core is in which field of a protobuf message, in both directions.

A *field* encodes one value and decodes it; a *column* does so for a list of values. A message is declared once, as a
Struct of named fields, Columns of named columns or OneOf of structs, and every declaration has `encode` and `decode`.
Encoding trusts the core's own values. Decoding trusts nothing: a column checks the size of a list before it copies it,
and every number is checked before it is used; for malformed input it raises ProtocolError, LimitError or SpecError. A
message with a field that no declaration names fails when it is imported.

Three techniques keep messages small and fast. Hashes are packed into one `bytes`. Repeated values are *interned*: each
is sent once, in a table, so that decoding builds it once and all references share one object. And lists of records
travel as parallel lists of numbers instead of a list of messages.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar, cast

from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from google.protobuf.message import Message

from kvcluster.core.columns import make_rows
from kvcluster.errors import ProtocolError
from kvcluster.wire.checks import QUANTITY_MAX, TEXT_CHARS, agree, at_most, must, numbers, parse, text

T = TypeVar("T")
V = TypeVar("V")

# -------------------------------------------------------------------------------------------- fields


class Field(Protocol[V]):
    """How one value is represented in a field."""

    @property
    def encode(self) -> Callable[[V], Any]:
        """Returns what the protobuf message holds; None leaves the field out."""

    @property
    def decode(self) -> Callable[[Any], V]:
        """The inverse, with every check."""


class Column(Protocol[V]):
    """How a list of values is represented in a field."""

    @property
    def encode(self) -> Callable[[Sequence[V]], Any]: ...

    @property
    def decode(self) -> Callable[[Any, int, str], list[V]]:
        """The inverse, from the field, the limit of its length and a description of the values."""


@dataclass(frozen=True, slots=True)
class Scalar(Generic[V]):
    """A field of one value, from its two functions."""

    encode: Callable[[V], Any]
    decode: Callable[[Any], V]


@dataclass(frozen=True, slots=True)
class Values(Generic[V]):
    """A column, from its two functions."""

    encode: Callable[[Sequence[V]], Any]
    decode: Callable[[Any, int, str], list[V]]


def _same(value: T) -> T:
    return value


PLAIN: Scalar[Any] = Scalar(_same, _same)
"""A value whose whole range is valid, as it is."""

NUMBERS: Values[Any] = Values(_same, numbers)
"""A column of such values."""


def amount(what: str, most: int = QUANTITY_MAX) -> Scalar[int]:
    """A number from 0 to `most`."""
    return Scalar(_same, lambda value: at_most(value, most, what))


def amounts(what: str, most: int = QUANTITY_MAX) -> Values[int]:
    """A column of such numbers."""

    def decode(wire: Collection[int], most_values: int, values: str) -> list[int]:
        at_most(max(wire, default=0), most, what)
        return numbers(wire, most_values, values)

    return Values(_same, decode)


def words(what: str, most: int = TEXT_CHARS) -> Scalar[Any]:
    """A text of at most `most` characters."""
    return Scalar(_same, lambda value: text(value, what, most))


def each(field: Field[V]) -> Values[V]:
    """A column of such fields."""

    def decode(wire: Collection[Any], most: int, what: str) -> list[V]:
        at_most(len(wire), most, what)
        return [field.decode(value) for value in wire]

    return Values(lambda values: [field.encode(value) for value in values], decode)


class EnumField(Generic[V]):
    """Maps an enum of the core to the protobuf enum with the same member names. A missing member fails at import. With
    `unspecified`, None is the value 0, which a protobuf enum calls unspecified."""

    def __init__(self, ours: type[Enum], theirs: EnumTypeWrapper, prefix: str, *, unspecified: bool = False) -> None:
        codes: dict[Any, int] = {member: theirs.Value(prefix + member.name) for member in ours}
        codes |= {None: 0} if unspecified else {}
        self._members = {number: member for member, number in codes.items()}
        self._name = ours.__name__
        self.encode: Callable[[V], int] = codes.__getitem__
        self.column: Values[V] = Values(lambda members: list(map(codes.__getitem__, members)), self._decode_column)

    def decode(self, number: int) -> V:
        """Returns the member. Raises ProtocolError if it is not known."""
        return self.decode_all((number,))[0]

    def decode_all(self, numbers: Iterable[int]) -> list[V]:
        """Returns the members. Raises ProtocolError if one is not known."""
        members = self._members
        try:
            return [members[number] for number in numbers]
        except KeyError as unknown:
            raise ProtocolError(
                f"{self._name} {unknown} is not known here; a newer kvcluster sent it: upgrade this side"
            ) from None

    def _decode_column(self, wire: Collection[int], most: int, what: str) -> list[V]:
        return self.decode_all(numbers(wire, most, what))


class Maybe(Generic[V]):
    """A field of a Struct that may be absent, which is None."""

    def __init__(self, field: Field[V]) -> None:
        self.decode = field.decode
        self._field = field

    def encode(self, value: V | None) -> Any:
        return None if value is None else self._field.encode(value)


class Rows(Generic[V]):
    """A column as a field: a tuple of at most `most` values; `what` describes them."""

    def __init__(self, column: Column[V], most: int, what: str) -> None:
        self.encode = column.encode
        self._column, self._most, self._what = column, most, what

    def decode(self, wire: Any) -> tuple[V, ...]:
        return tuple(self._column.decode(wire, self._most, self._what))


# ------------------------------------------------------------------------------------------- columns


class Interned(Generic[V]):
    """A column in which values repeat: a table of the distinct ones, and the index of each value in it. If no value
    repeats there are no indices. With `absent`, a value may be None. `noun` names one value."""

    def __init__(self, message: type[Message], table: Column[Any], noun: str, *, absent: bool = False) -> None:
        self._message, self._table, self._noun, self._absent = message, table, noun, absent

    def encode(self, values: Sequence[V]) -> Message:
        distinct = dict.fromkeys([None, *values] if self._absent else values)
        entries = list(distinct)[self._absent :]
        of: Sequence[int] = ()
        if len(entries) < len(values):
            if len(distinct) == 1:  # most often so, and then no value has to be hashed once more
                of = [0] * len(values)
            else:
                index = {value: at for at, value in enumerate(distinct)}
                of = [index[value] for value in values]
        return self._message(table=self._table.encode(entries), of=of)

    def decode(self, m: Any, most: int, what: str) -> list[V]:
        entries = self._table.decode(m.table, most, what)
        of = numbers(m.of, most, what)
        if not of:
            return entries
        entries[:0] = [None] * self._absent
        try:
            return [entries[index] for index in of]
        except IndexError:
            raise ProtocolError(f"a message refers to {self._noun} beyond the {len(entries)} that it holds") from None


class Ragged(Generic[V]):
    """A column of tuples: their lengths, and all their items in one column. With `absent`, None may stand for a tuple.
    `noun` describes the items of one."""

    def __init__(self, message: type[Message], items: Column[V], most: int, noun: str, *, absent: bool = False) -> None:
        self._message, self._items, self._most, self._noun, self._absent = message, items, most, noun, absent

    def encode(self, values: Sequence[Sequence[V] | None]) -> Message:
        counts = [0 if value is None else len(value) + self._absent for value in values]
        items = [item for value in values for item in value or ()]
        return self._message(counts=counts, items=self._items.encode(items))

    def decode(self, m: Any, most: int, what: str) -> list[Any]:
        counts = numbers(m.counts, most, what)
        at_most(max(counts, default=0) - self._absent, self._most, self._noun)
        lengths = [max(0, count - self._absent) for count in counts]
        items = self._items.decode(m.items, sum(lengths), self._noun)
        must(len(items) == sum(lengths), f"{what} have {sum(lengths)} items; {len(items)} came")
        left = iter(items)
        found = [tuple(itertools.islice(left, length)) for length in lengths]
        return [one if count or not self._absent else None for one, count in zip(found, counts, strict=True)]


class Columns(Generic[V]):
    """A column of records, as parallel lists: one column for each field of the record. `kind` makes a record of its
    fields, and `split` is the inverse; without `split` the columns are the attributes of a dataclass, or the items of a
    tuple; without `kind` a record is a plain tuple. `join` stands in place of `kind`, and makes all records of all
    columns at once."""

    def __init__(
        self,
        message: type[Message],
        kind: Callable[..., V] | None = None,
        /,
        split: Callable[[V], tuple[Any, ...]] | None = None,
        join: Callable[..., list[V]] | None = None,
        later: Mapping[str, Any] = MappingProxyType({}),
        **columns: Column[Any],
    ) -> None:
        """`later`: columns that older senders do not have, and what their records have there."""
        self._later = later
        assert list(message.DESCRIPTOR.fields_by_name) == list(columns), message.DESCRIPTOR.name
        self._message, self._columns = message, columns
        named = isinstance(kind, type) and issubclass(kind, tuple)
        self._split = split if split is not None or kind is None or named else attrgetter(*columns)
        self._join: Callable[..., Any]
        if join is not None or kind is None:
            self._join = join or zip
        else:
            self._join = partial(make_rows, cast("type[Any]", kind)) if named and split is None else partial(map, kind)

    def encode(self, rows: Sequence[V]) -> Message | None:
        if not rows:
            return None
        lists = zip(*(rows if self._split is None else map(self._split, rows)), strict=True)
        fields = zip(self._columns.items(), lists, strict=True)
        return self._message(**{name: column.encode(values) for (name, column), values in fields})

    def decode(self, m: Any, most: int, what: str) -> list[V]:
        if not m.ListFields():
            return []
        lists = [column.decode(getattr(m, name), most, what) for name, column in self._columns.items()]
        for at, name in enumerate(self._columns):
            if name in self._later and not lists[at]:
                lists[at] = [self._later[name]] * len(lists[0])
        agree(what, *lists)
        return list(self._join(*lists))


# ------------------------------------------------------------------------------------------- messages

_ENVELOPE = {"protocol_version", "namespace"}
"""Fields of a message that need not be in its struct: of the conversation, and of a request (methods.py)."""


class Struct(Generic[V]):
    """A message with a field for each attribute of `kind`. `check` raises if the decoded values contradict one another.
    `protocol_version` and `namespace` of a message are for methods.py to set and to read."""

    def __init__(
        self,
        message: type[Message],
        kind: type[V],
        /,
        check: Callable[[V], object] | None = None,
        **fields: Field[Any],
    ) -> None:
        known = set(message.DESCRIPTOR.fields_by_name)
        assert set(fields) <= known and known - set(fields) <= _ENVELOPE, f"{message.DESCRIPTOR.name}: {fields.keys()}"
        self.message, self.kind, self._check = message, kind, check
        self._encoders = [(name, field.encode) for name, field in fields.items()]
        self._decoders = [(name, field.decode) for name, field in fields.items()]
        self._maybe = {name for name, field in fields.items() if isinstance(field, Maybe)}

    def encode(self, value: V) -> Any:
        fields = {name: encode(getattr(value, name)) for name, encode in self._encoders}
        return self.message(**fields)

    def decode(self, m: Any) -> V:
        value = self.kind(
            **{
                name: decode(getattr(m, name)) if name not in self._maybe or m.HasField(name) else None
                for name, decode in self._decoders
            }
        )
        if self._check is not None:
            self._check(value)
        return value


class OneOf:
    """A message with one alternative for each of several structs. `what` names it."""

    def __init__(self, message: type[Message], what: str, **structs: Struct[Any]) -> None:
        (oneof,) = message.DESCRIPTOR.oneofs
        assert [field.name for field in oneof.fields] == list(structs), message.DESCRIPTOR.name
        self.message, self._what, self._oneof, self._structs = message, what, oneof.name, structs
        self._by_kind = {struct.kind: (name, struct) for name, struct in structs.items()}

    def encode(self, value: object) -> Any:
        name, struct = self._by_kind.get(type(value), (None, None))
        assert name is not None and struct is not None, f"{type(value).__name__} cannot be {self._what}"
        return self.message(**{name: struct.encode(value)})

    def field_of(self, kind: type[Any]) -> str:
        """Returns the name of the alternative for values of that type."""
        return self._by_kind[kind][0]

    def decode(self, m: Any) -> Any:
        name = m.WhichOneof(self._oneof)
        if name is None:
            raise ProtocolError(f"{self._what} is empty, or of a kind that is not known here: upgrade this side")
        return self._structs[name].decode(getattr(m, name))


def in_bytes(message: type[Message], field: Field[V]) -> tuple[Callable[[V], bytes], Callable[[bytes], V]]:
    """Returns the encoder and the decoder of a whole message as bytes."""

    def encode(value: V) -> bytes:
        data: bytes = field.encode(value).SerializeToString()
        return data

    return encode, lambda data: field.decode(parse(message, data))
