"""Statistics of a worker's sequences, as plain, printable values: how much they take (SequenceUse, ResidentUse), where
the spans of a step were attended to and why (AttendExplanation, which `explain_attention` returns), and what remote
attention has chosen, sent and received (ShippedCounts)."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from kvcluster.sequences.attend_planner import SpanChoice
from kvcluster.sequences.block_table import ABSENT, CODED
from kvcluster.sequences.blocks import StoreState
from kvcluster.sequences.open_sequences import OpenSequences
from kvcluster.sequences.state import SequenceState


@dataclass(frozen=True, slots=True)
class SequenceUse:
    """One sequence, in tokens: all, those of sealed blocks, of blocks that the cluster has, of blocks that are in the
    resident set, those of them that are encoded there, of private blocks, and dropped ones."""

    tokens: int
    sealed: int
    stored: int
    resident: int
    encoded: int
    private: int
    dropped: int


@dataclass(frozen=True, slots=True)
class ResidentUse:
    """The resident set of a client. Of raw pages, each of `block_tokens` tokens and `page_bytes`: how many it may have,
    those in use, those that can be taken at once, because they are free or the cluster has their block, and the most
    that ever were in use. Encoded pages, and their bytes. Pages borrowed from shards, which are not in it. The open
    sequences, and the blocks that wait to be stored. A client whose spec sequences cannot have has no pages."""

    pages: int = 0
    pages_used: int = 0
    pages_available: int = 0
    pages_peak: int = 0
    page_bytes: int = 0
    block_tokens: int = 0
    encoded_pages: int = 0
    encoded_bytes: int = 0
    borrowed_pages: int = 0
    sequences: int = 0
    blocks_waiting: int = 0

    @property
    def capacity_bytes(self) -> int:
        """The bytes that it may have, raw and encoded."""
        return self.pages * self.page_bytes

    @property
    def used_bytes(self) -> int:
        """The bytes in use, raw and encoded."""
        return self.pages_used * self.page_bytes + self.encoded_bytes

    @property
    def utilisation(self) -> float:
        """The part of it that is in use, from 0 to 1."""
        return self.used_bytes / self.capacity_bytes if self.pages else 0.0

    @property
    def tokens_available(self) -> int:
        """The raw tokens of whole blocks for which pages can be taken at once."""
        return self.pages_available * self.block_tokens

    @property
    def ratio(self) -> float:
        """How many times smaller encoded pages are than raw ones; 1.0 if there are none."""
        return self.encoded_pages * self.page_bytes / self.encoded_bytes if self.encoded_bytes else 1.0


def sequence_use(state: SequenceState) -> SequenceUse:
    """Returns what one sequence takes."""
    blocks, whole = state.blocks, state.block_tokens
    sizes = [min(whole, max(0, state.length - depth * whole)) for depth in range(len(blocks))]
    of_block, of_entry = [*zip(blocks, sizes, strict=True)], [*zip(state.table, sizes, strict=True)]
    return SequenceUse(
        state.length,
        state.sealed * whole,
        sum(size for block, size in of_block if block.stored is StoreState.YES),
        sum(size for entry, size in of_entry if entry != ABSENT),
        sum(size for entry, size in of_entry if entry < ABSENT),
        sum(size for block, size in of_block if block.private),
        len(state.dropped_tokens),
    )


def resident_use(machine: OpenSequences, borrowed: int, waiting: int, block_tokens: int) -> ResidentUse:
    """Returns what all sequences take; `borrowed` pages, and `waiting` blocks to be stored."""
    pages = machine.pages
    slots = {codec: pages.coded(codec) for codec in CODED}
    return ResidentUse(
        pages=pages.capacity,
        pages_used=pages.used,
        pages_available=max(0, pages.available),
        pages_peak=pages.peak,
        page_bytes=pages.page_bytes,
        block_tokens=block_tokens,
        encoded_pages=sum(slots.values()),
        encoded_bytes=sum(count * pages.nbytes(codec) for codec, count in slots.items()),
        borrowed_pages=borrowed,
        sequences=len(machine.open_states()),
        blocks_waiting=waiting,
    )


class SpanPlace(NamedTuple):
    """Where positions `start` to `stop` of some rows of a step were attended to: `choice`, and the shard that has
    them."""

    start: int
    stop: int
    rows: tuple[int, ...]
    shard: str
    choice: SpanChoice


class AttendExplanation(NamedTuple):
    """Where the spans of the last step that had a planner were attended to, in order; what lies between them is
    attended to in this process. `why` is what the planner's `explain` returns for that step; empty if the planner
    has none."""

    places: tuple[SpanPlace, ...]
    why: str

    def __str__(self) -> str:
        lines = [
            f"tokens {place.start}-{place.stop} of row {', '.join(map(str, place.rows))}: {place.choice.value} "
            f"({place.shard})"
            for place in self.places
        ]
        return "\n".join([*lines, self.why] if self.why else lines)


@dataclass
class ShippedCounts:
    """What one client's remote attention has done since it began: messages, spans that rows named in them, bytes of
    queries and of results, and messages that brought none. `chosen`: how many spans of how many steps were attended to
    in each way (SpanChoice), by its name. `loaded_bytes`: KV that this client has loaded, by whatever call."""

    messages: int = 0
    spans: int = 0
    query_bytes: int = 0
    result_bytes: int = 0
    failed: int = 0
    chosen: dict[str, int] = field(default_factory=dict)
    loaded_bytes: int = 0


class ShippedCounter:
    """Thread-safe. It may outlive its client, so that what is summed over clients never falls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = ShippedCounts()

    def chose(self, choices: Iterable[SpanChoice]) -> None:
        """Counts what was chosen for the spans of a step."""
        with self._lock:
            for choice, count in Counter(choices).items():
                self._counts.chosen[choice.value] = self._counts.chosen.get(choice.value, 0) + count

    def sent(self, spans: int, query_bytes: int) -> None:
        """Counts one message."""
        with self._lock:
            self._counts.messages += 1
            self._counts.spans += spans
            self._counts.query_bytes += query_bytes

    def received(self, result_bytes: int) -> None:
        """Counts results."""
        with self._lock:
            self._counts.result_bytes += result_bytes

    def failed(self) -> None:
        """Counts what was asked of a shard and brought no results."""
        with self._lock:
            self._counts.failed += 1

    def counts(self) -> ShippedCounts:
        """Returns what was counted so far."""
        with self._lock:
            return replace(self._counts, chosen=dict(self._counts.chosen))
