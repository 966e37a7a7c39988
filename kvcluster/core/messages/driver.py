"""What the driver itself tells a core: time has passed, the process was stalled, a job or a report has ended."""

from __future__ import annotations

from dataclasses import dataclass

from kvcluster.core.codecs import Codec
from kvcluster.core.ids import Attempt, CallId, ShardId
from kvcluster.core.messages.reports import ReportAck
from kvcluster.core.tiers import Tier


@dataclass(frozen=True, slots=True)
class Tick:
    """No message has arrived, but `next_deadline()` has passed."""


@dataclass(frozen=True, slots=True)
class Retell:
    """A subscriber has missed events: publish all blocks again, in later ticks."""


@dataclass(frozen=True, slots=True)
class ScheduleSeen:
    """What the reconciler saw in its last pass (core/shard_scheduler.py). `waiting`: a sentence for each thing that the
    cluster lacks and waits for. `orphans`: volumes that belong to no running shard, each with the name of its node.
    `shards`: those that exist, that are started now, and that are waited for; None if that was not said."""

    waiting: tuple[str, ...] = ()
    orphans: tuple[tuple[ShardId, str], ...] = ()
    shards: frozenset[ShardId] | None = None


@dataclass(frozen=True, slots=True)
class Stalled:
    """This process was stalled for `late_ns`: extend all terms by it, since messages could not arrive."""

    late_ns: int


@dataclass(frozen=True, slots=True)
class ReportAnswered:
    """The coordinator's answer to the report or inventory chunk that was sent last."""

    ack: ReportAck


@dataclass(frozen=True, slots=True)
class ReportFailed:
    """The report sent last was lost, or its answer was."""


@dataclass(frozen=True, slots=True)
class Verified:
    """The shell has read the pages of the Verify of `attempt`; those with the indices `corrupt` did not match."""

    attempt: Attempt
    corrupt: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Moved:
    """The shell has carried out the MovePages of `attempt`. `sums[i]`: the packed per-layer checksums of page i in its
    new place; None if its content cannot be encoded, or could not be written to disk. Pages with the indices `corrupt`
    did not match the checksums that they were committed with. `errors`: for each sampled page its index and its loss,
    in millionths."""

    attempt: Attempt
    sums: tuple[bytes | None, ...]
    corrupt: tuple[int, ...] = ()
    errors: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Staged:
    """The shell has carried out the Stage of `attempt`. Pages with the indices `corrupt` could not be read, or do not
    match what was committed."""

    attempt: Attempt
    corrupt: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TierLost:
    """The store of a tier has failed for good, and `why`: its pages are gone, and nothing can be written there until
    the shard starts again."""

    tier: Tier
    why: str


@dataclass(frozen=True, slots=True)
class SavePages:
    """The shard is to stop: it writes the hottest pages in its memory to its durable store, until the time `until`.
    Answered by PagesSaved. The pages of the RAM tier are encoded in the codec that the coordinator last ordered
    for their namespace, `codec` before it has ordered any; those of the first `raw_blocks` blocks of a sequence are
    not."""

    call: CallId
    until: int
    codec: Codec
    raw_blocks: int


@dataclass(frozen=True, slots=True)
class PagesSaved:
    """What SavePages has written, and what it has left: pages that are lost when the shard ends."""

    pages: int
    nbytes: int
    left_pages: int
    left_bytes: int
