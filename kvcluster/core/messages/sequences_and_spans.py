"""Questions of workers about the block tables of open sequences, to the coordinator
(core/coordinator/sequence_handler.py), and about spans for remote attention, to a shard (docs/adr/0061).

A worker sends the changes of many sequences in one SyncTables, in the namespace of their public blocks, and renews its
lease with it. A table longer than limits.BLOCKS_PER_CALL is sent in several messages: `keep` grows.

For remote attention a worker registers spans at a shard, and attends to them in one exchange.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from kvcluster.core.groups import Part
from kvcluster.core.ids import Attempt, BlockHash, Epoch, Holder, NamespaceId, SequenceId, SpanId
from kvcluster.core.messages.shard import PageSlot
from kvcluster.core.miss import Loss
from kvcluster.core.spec import KVSpec


@dataclass(frozen=True, slots=True)
class TableChange:
    """A change of one sequence's table: its first `keep` blocks stay, `blocks` follow them.

    `keep` is 0 for a new sequence without a parent; then a table that the sequence has is replaced. The last `private`
    of `blocks` are private: random ids, in the namespace of private pages. `parent` is set when the sequence is opened
    as a fork: it begins with the first `keep` blocks of the parent. With `closed` the table is dropped, and the other
    fields mean nothing.
    """

    sequence: SequenceId
    keep: int
    blocks: tuple[BlockHash, ...] = ()
    private: int = 0
    parent: SequenceId | None = None
    closed: bool = False


@dataclass(frozen=True, slots=True)
class SyncTables:
    """Brings the tables of one holder up to date, and renews its lease; without changes it only renews. Answered by
    TablesSynced.

    `number` is 1, 2, ... for each holder; a repeat of the last number gets the same answer and changes nothing, and a
    lower number is refused (STALE). The changes name at most limits.BLOCKS_PER_CALL blocks in all. They are made in
    order.
    """

    holder: Holder
    number: int
    changes: tuple[TableChange, ...] = ()


@dataclass(frozen=True, slots=True)
class TablesSynced:
    """The lease from now on, the coordinator's epoch, and what of the changes was not made.

    `reopen`: the sequences for which the coordinator does not know the table (or that of `parent`) up to `keep`: send
    them whole. `refused`: those whose new blocks would exceed a limit (share, tokens, sequences); nothing of that
    change was made. `forgotten`: the coordinator knew nothing of this holder (it restarted, or the lease ended), and
    made no change: send all open tables whole, with the next numbers.
    """

    ttl_ns: int
    epoch: Epoch
    reopen: tuple[SequenceId, ...] = ()
    refused: tuple[SequenceId, ...] = ()
    forgotten: bool = False


class SpanBlocks(NamedTuple):
    """A span to be registered: the pages of one group and part of consecutive blocks, the first of which has `depth`
    blocks before it in its sequence. A page that has lost more than `accept` is not attended to."""

    span: SpanId
    group: int
    part: Part
    depth: int
    hashes: tuple[BlockHash, ...]
    accept: Loss = Loss.EXACT


@dataclass(frozen=True, slots=True)
class RegisterSpans:
    """Registers spans of one namespace for a holder, and ends others of it, of any namespace. Answered by Done. A span
    that is registered already, as it is, stays so."""

    holder: Holder
    epoch: Epoch
    spans: tuple[SpanBlocks, ...]
    ended: tuple[SpanId, ...] = ()


class SpanMiss(Enum):
    """Why a shard does not attend to a span."""

    UNKNOWN = "unknown"  # it is not registered, or no longer: register it again
    GONE = "gone"  # the shard no longer has one of its pages
    LOSSY = "lossy"  # one of its pages has lost more than is accepted
    STORED = "stored"  # one of its pages lies on disk: load it
    CORRUPT = "corrupt"  # one of its pages does not match its checksums


@dataclass(frozen=True, slots=True)
class PinSpans:
    """Grants a lease over all pages of these registered spans. Answered by SpanGrant, or by SpansPending."""

    attempt: Attempt
    epoch: Epoch
    spans: tuple[SpanId, ...]


@dataclass(frozen=True, eq=False)
class SpanPages:
    """The pages of a registered span, where they lie now. While they stay there, each grant has the same object."""

    span: SpanId
    namespace: NamespaceId
    spec: KVSpec
    group: int
    part: Part
    depth: int
    slots: tuple[PageSlot, ...]

    @cached_property
    def loss(self) -> Loss:
        """The worst of the pages."""
        return max((slot.loss for slot in self.slots), default=Loss.EXACT)


@dataclass(frozen=True, slots=True)
class SpanGrant:
    """For each span its pages, or why they are not available. If there is a SpanMiss there is no lease."""

    spans: tuple[SpanPages | SpanMiss, ...]


@dataclass(frozen=True, slots=True)
class SpansPending:
    """The shard has looked up as many blocks of these spans as it does in one step, and no lease was granted. Ask
    again: it goes on from there."""


class AttendRow(NamedTuple):
    """The queries of one sequence: `tokens` consecutive ones from `position` on, its spans in ascending order, and the
    subtrees (level, index) of which results are wanted."""

    position: int
    tokens: int
    spans: tuple[SpanId, ...]
    subtrees: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class AttendRequest:
    """Attend to one layer of registered spans: one exchange of a transport. The query, `[tokens, heads, dim]` of all
    rows in `dtype`, is sent beside it.

    `layer` counts from the part's own first layer. `softcap`, `window` and `latent_values` are 0 for none. `fused`:
    whether the worker computes with fused multiply-add; a shard that does not would give other bits.
    """

    attempt: Attempt
    epoch: Epoch
    layer: int
    heads: int
    dim: int
    dtype: str
    scale: float
    rows: tuple[AttendRow, ...]
    softcap: float = 0.0
    window: int = 0
    latent_values: int = 0
    fused: bool = False

    @property
    def tokens(self) -> int:
        """Query tokens of all rows."""
        return sum(row.tokens for row in self.rows)

    @property
    def spans(self) -> tuple[SpanId, ...]:
        """Every span that a row names, once."""
        return tuple(dict.fromkeys(span for row in self.rows for span in row.spans))


@dataclass(frozen=True, slots=True)
class Attended:
    """The results are sent beside it, `nbytes` of them: float32, for each row and each of its subtrees `out` `[tokens,
    heads, value_dim]` and `lse` `[tokens, heads]`. `loss`: the worst of the pages. `time_us`: how long the shard took,
    from the request to this answer, in microseconds; 0 if it is not stated."""

    nbytes: int
    loss: Loss
    time_us: int = 0


@dataclass(frozen=True, slots=True)
class SpansLacking:
    """Nothing was computed, because these spans are not available."""

    spans: tuple[tuple[SpanId, SpanMiss], ...]


class DeclineReason(Enum):
    """Why a shard does not attend now, or never does."""

    BUSY = "busy"  # its queue of computes is full, or the tenant's share of it
    ARITHMETIC = "arithmetic"  # its results would have other bits
    UNSUPPORTED = "unsupported"  # it lacks what attention needs


@dataclass(frozen=True, slots=True)
class AttendDeclined:
    """Nothing was computed: load the pages instead."""

    reason: DeclineReason
    detail: str = ""


AttendAnswer = Attended | SpansLacking | AttendDeclined
