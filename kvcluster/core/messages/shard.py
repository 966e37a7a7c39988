"""Worker to shard, and what it answers: leases over pages, from their grant to their end."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from kvcluster.core.codecs import Codec
from kvcluster.core.ids import Attempt, BlockHash, Epoch, NamespaceId
from kvcluster.core.miss import Loss, Miss
from kvcluster.core.page_key import PageKey
from kvcluster.core.spec import KVSpec
from kvcluster.core.tiers import FASTEST, Tier


@dataclass(frozen=True, slots=True)
class AttachShard:
    """A worker names its spec to a shard. Answered by AttachedShard."""

    spec: KVSpec


@dataclass(frozen=True, slots=True)
class AttachedShard:
    """The namespace of the caller's spec at this shard incarnation, and how long its leases run."""

    namespace: NamespaceId
    epoch: Epoch
    lease_ttl_ns: int


@dataclass(frozen=True, slots=True)
class GetOffers:
    """By which transports are your pages moved? Answered by Offers."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A transport that a shard serves, and where. What `address` and `details` mean is for that transport's two halves
    to know; `version` is that of what they say to each other."""

    transport: str
    address: str
    version: int = 0
    details: bytes = b""


@dataclass(frozen=True, slots=True)
class Offers:
    """What a shard incarnation serves beside gRPC, and in `refused`, by transport, why not the rest."""

    epoch: Epoch
    offers: tuple[Offer, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()


class PageSlot(NamedTuple):
    """A page under a lease: where its bytes lie in the arena, and what they are. `loss` is that of all it went through,
    its codec included."""

    key: PageKey
    offset: int
    nbytes: int
    generation: int
    loss: Loss
    sums: bytes = b""
    codec: Codec = Codec.RAW
    tier: Tier = FASTEST


@dataclass(frozen=True, slots=True)
class Pin:
    """Grant a lease over these READY pages, of no more loss than that. Answered by PinGrant, a page or a Miss for each
    key."""

    attempt: Attempt
    epoch: Epoch
    keys: tuple[PageKey, ...]
    accept: Loss = Loss.EXACT


@dataclass(frozen=True, slots=True)
class PinGrant:
    """For each key a page, or the reason why there is none. The lease ends with Unpin."""

    pages: tuple[PageSlot | Miss, ...]


@dataclass(frozen=True, slots=True)
class Unpin:
    """The reader of `attempt` is done. Answered by Done."""

    attempt: Attempt


class NewPage(NamedTuple):
    """A page that a worker wants to write, and the block's place in its chain."""

    key: PageKey
    parent: BlockHash
    depth: int
    loss: Loss = Loss.EXACT


@dataclass(frozen=True, slots=True)
class Reserve:
    """Grant a lease over new pages. Answered by WriteGrant: a page, or why not, for each.

    Where there is no room, the answer waits until `wait_ns` from now for the coordinator to make some.
    """

    attempt: Attempt
    epoch: Epoch
    pages: tuple[NewPage, ...]
    wait_ns: int = 0


class Written(Enum):
    """What became of one page of a store."""

    COMMITTED = "committed"  # by this attempt
    DUPLICATE = "duplicate"  # somebody else's page was READY already
    PENDING = "pending"  # somebody else is writing it
    CORRUPT = "corrupt"  # what arrived did not match its checksum
    FULL = "full"
    LOST = "lost"  # the lease had ended, or the shard may not commit


@dataclass(frozen=True, slots=True)
class WriteGrant:
    """For each page a slot to fill, or why it is not to be written. The lease ends with Commit or Abort."""

    pages: tuple[PageSlot | Written, ...]


@dataclass(frozen=True, slots=True)
class Commit:
    """The pages of `attempt` with these indices are whole and verified. Answered by CommitGrant.

    `sums[i]` are the packed per-layer checksums of page `indices[i]`. Pages of the attempt that are not
    named are aborted: a commit ends the attempt.
    """

    attempt: Attempt
    indices: tuple[int, ...]
    sums: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class CommitGrant:
    """What became of each index of a Commit."""

    pages: tuple[Written, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """The writer of `attempt` has stopped, and writes no more. Answered by Done."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Renew:
    """The holder of `attempt` is alive. Answered by Done(False) where its lease has ended."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Flush:
    """Answered by Done once the coordinator has acknowledged all events so far; Done(False) after `wait_ns`."""

    wait_ns: int


@dataclass(frozen=True, slots=True)
class Suspect:
    """A reader got bytes of these pages that did not match their checksums. Answered by Done.

    It is a report and no verdict: the shard reads the pages again, and condemns those that do not match there.
    """

    epoch: Epoch
    keys: tuple[PageKey, ...]


@dataclass(frozen=True, slots=True)
class Verified:
    """The shell has read the pages of the Verify of `attempt`; those with these indices did not match."""

    attempt: Attempt
    corrupt: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Moved:
    """The shell has carried out the MovePages of `attempt`. `sums[i]`: the packed per-layer checksums of page i as it
    lies in its new place; None where it holds what cannot be encoded, or could not be written to disk. Those at the
    indices `corrupt` did not match the sums that they were committed with. `errors`: for the index of each that was
    sampled, what it lost, in millionths."""

    attempt: Attempt
    sums: tuple[bytes | None, ...]
    corrupt: tuple[int, ...] = ()
    errors: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Staged:
    """The shell has carried out the Stage of `attempt`. Those at the indices `corrupt` could not be read, or are not
    what was committed."""

    attempt: Attempt
    corrupt: tuple[int, ...] = ()
