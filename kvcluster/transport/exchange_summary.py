"""What a shard counts and logs of one exchange when it has ended: one load or store of a worker, or one copy from or to
another shard. It is made once an exchange, from whole columns of pages, and not page by page while bytes move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter

from kvcluster.core.ids import Attempt, Tenant
from kvcluster.core.messages import PageSlot, PageWants, SpanMiss, SpanPages, Written
from kvcluster.core.miss import Miss
from kvcluster.core.tiers import INGEST, Tier


class Operation(Enum):
    """What an exchange was for, as the shard that counts it sees it."""

    LOAD = "load"  # a worker read
    STORE = "store"  # a worker wrote
    ATTEND = "attend"  # a worker had the shard attend to spans
    REPLICATE_OUT = "replicate_out"  # another shard read, to make a replica
    REPLICATE_IN = "replicate_in"  # this shard read from another one


class ExchangeResult(Enum):
    """How an exchange ended."""

    DONE = "done"  # whole, though pages of it may have been missing
    REFUSED = "refused"  # nothing was granted
    FAILED = "failed"  # it broke off, or the other side gave up


@dataclass(frozen=True, slots=True)
class ExchangeSummary:
    """One exchange that has ended. `pages` were moved, `nbytes` by the tier that they lie in: zero unless it is DONE.
    `missed`: the number of pages that were not moved, by the reason. `error`: why it is not DONE."""

    operation: Operation
    path: str
    tenant: Tenant
    attempt: Attempt
    result: ExchangeResult
    seconds: float
    pages: int = 0
    nbytes: Mapping[Tier, int] = field(default_factory=dict)
    missed: Mapping[str, int] = field(default_factory=dict)
    error: str = ""


_PLACE = attrgetter("nbytes", "tier")


def read_bytes(wants: PageWants, granted: Mapping[int, PageSlot]) -> dict[Tier, int]:
    """Returns the bytes of the wanted layers of the granted pages (by the index of their want), by tier."""
    kind_of: Sequence[int] = wants.kind_of
    if len(granted) < len(wants):
        kind_of = [kind_of[item] for item in granted]
    moved: dict[Tier, int] = {}
    for (kind, (nbytes, tier)), count in Counter(zip(kind_of, map(_PLACE, granted.values()), strict=True)).items():
        _, part, start, stop = wants.kinds[kind]
        moved[tier] = moved.get(tier, 0) + count * (nbytes // part.layers) * (stop - start)
    return moved


def written_bytes(slots: Collection[PageSlot]) -> dict[Tier, int]:
    """Returns the bytes of whole pages, by tier."""
    moved: dict[Tier, int] = {}
    for (nbytes, tier), count in Counter(map(_PLACE, slots)).items():
        moved[tier] = moved.get(tier, 0) + count * nbytes
    return moved or {INGEST: 0}


GrantedItem = PageSlot | Miss | Written | SpanPages | SpanMiss
"""What a shard grants of one want, page or span, or why not."""


def missed_reads(pages: Sequence[GrantedItem]) -> dict[str, int]:
    """Returns the number of misses by reason."""
    return dict(Counter(page.reason.value for page in pages if isinstance(page, Miss)))


def missed_writes(outcome: Sequence[Written]) -> dict[str, int]:
    """Returns the number of pages that were not committed, by what became of them."""
    counted = {written.value: outcome.count(written) for written in Written if written is not Written.COMMITTED}
    return {name: count for name, count in counted.items() if count}
