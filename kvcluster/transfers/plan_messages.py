"""Events and effects of the plans of loads and stores (load_plan.py, store_plan.py): what happened, and what to do.

Executors send the events and carry out the effects (load_executor.py, store_executor.py).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvcluster.core.ids import Attempt, NamespaceId
from kvcluster.core.messages import Explained, PageKey, ShardAddress, StoreGrant, WriteRequest, Written
from kvcluster.core.miss import Loss, Miss
from kvcluster.transfers.failover import Question
from kvcluster.transfers.read_ranges import ReadRanges
from kvcluster.transfers.transfer import Loaded, Stored

# ------------------------------------------------------------------------------------------------- both


NEVER_BEGUN = "given up before it began"
"""Why a load or store that was cancelled before its Begin has no outcome."""


@dataclass(frozen=True, slots=True)
class Begin:
    """The plan may use the network now."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """The caller cancels the load or store. `why` becomes the reason of the blocks without an outcome."""

    why: Miss


@dataclass(frozen=True, slots=True)
class PlanTick:
    """The time that `next_deadline` returned has been reached."""


# -------------------------------------------------------------------------------------- events of loads


@dataclass(frozen=True, slots=True)
class ReadEnded:
    """An exchange has ended without being stopped: with an outcome for each of its pieces, or with an error."""

    exchange: int
    outcome: Sequence[Miss | None] = ()
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class ReadStopped:
    """An exchange no longer writes these of its items; None: it writes nothing more, and no ReadEnded will follow."""

    exchange: int
    items: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Answered:
    """The coordinator's answers to the questions of an FindReplicas; fewer answers if it could not be asked."""

    number: int
    answers: Sequence[Explained]


LoadEvent = Begin | ReadEnded | ReadStopped | Answered | Cancel | PlanTick

# ------------------------------------------------------------------------------------- effects of loads


@dataclass(frozen=True, slots=True)
class StartRead:
    """Read the pieces of `ranges` from this shard into their places. `accept`: the worst loss that is accepted."""

    exchange: int
    shard: ShardAddress
    attempt: Attempt
    ranges: ReadRanges
    accept: Loss


@dataclass(frozen=True, slots=True)
class StopRead:
    """Stop writing these items of an exchange, or all of them (None), and send ReadStopped within one chunk."""

    exchange: int
    items: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class FindReplicas:
    """Ask the coordinator these questions, one after the other, until `until_ns`, and send Answered."""

    number: int
    questions: tuple[Question, ...]
    until_ns: int


@dataclass(frozen=True, slots=True)
class ReportCorrupt:
    """Report to a shard that its bytes of these pages did not match here. No answer is expected."""

    shard: ShardAddress
    keys: tuple[PageKey, ...]


@dataclass(frozen=True, slots=True)
class FinishLoad:
    """The outcome, or the error to raise at the caller. The caller's memory is no longer written. `took_ns` of an
    outcome is 0 if the load was stopped."""

    loaded: Loaded | None
    error: BaseException | None = None


LoadEffect = StartRead | StopRead | FindReplicas | ReportCorrupt | FinishLoad

# ------------------------------------------------------------------------------------- events of stores


@dataclass(frozen=True, slots=True)
class StoreGranted:
    """What to write, and in which namespace."""

    namespace: NamespaceId
    grant: StoreGrant


@dataclass(frozen=True, slots=True)
class NotGranted:
    """No grant was received. `asked`: the coordinator was asked, and may have granted something although its answer is
    lost."""

    error: BaseException
    asked: bool


@dataclass(frozen=True, slots=True)
class SourceDrained:
    """An exchange has taken its last byte of the source."""

    exchange: int


@dataclass(frozen=True, slots=True)
class WriteEnded:
    """An exchange has ended, with an outcome for each of its pages or with an error. It has read `nbytes` of the
    source, from the pages `taken`."""

    exchange: int
    nbytes: int
    outcome: Sequence[Written] = ()
    error: BaseException | None = None
    taken: Collection[int] = ()


@dataclass(frozen=True, slots=True)
class WriteStopped:
    """An exchange no longer reads the source. Its WriteEnded follows."""

    exchange: int


@dataclass(frozen=True, slots=True)
class TicketEnded:
    """The coordinator has ended the ticket, or could not be reached."""


StoreEvent = (
    Begin | StoreGranted | NotGranted | SourceDrained | WriteEnded | WriteStopped | TicketEnded | Cancel | PlanTick
)

# ------------------------------------------------------------------------------------ effects of stores


@dataclass(frozen=True, slots=True)
class AskStore:
    """Ask the coordinator what to write, and send StoreGranted or NotGranted."""


@dataclass(frozen=True, slots=True)
class StartWrite:
    """Write these pages to this shard. `blocks`: the block of each page, counted from the first new one."""

    exchange: int
    shard: ShardAddress
    request: WriteRequest
    blocks: Sequence[int]


@dataclass(frozen=True, slots=True)
class StopWrite:
    """Stop reading the source for this exchange, and send WriteStopped within one chunk."""

    exchange: int


@dataclass(frozen=True, slots=True)
class FreeSource:
    """The source may be overwritten."""


@dataclass(frozen=True, slots=True)
class CloseTicket:
    """End this ticket at the coordinator, and send TicketEnded."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class FinishStore:
    """The outcome, or the error to raise at the caller."""

    stored: Stored | None
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class StoreOver:
    """The next store of this client may begin."""


StoreEffect = AskStore | StartWrite | StopWrite | FreeSource | CloseTicket | FinishStore | StoreOver
