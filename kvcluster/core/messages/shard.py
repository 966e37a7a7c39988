"""Questions of workers to a shard, and its answers: leases over pages, from their grant to their end."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from kvcluster.core.codecs import Codec
from kvcluster.core.groups import PageKey
from kvcluster.core.ids import Attempt, BlockHash, Epoch, NamespaceId, Tenant
from kvcluster.core.miss import Loss, Miss
from kvcluster.core.spec import KVSpec
from kvcluster.core.tiers import INGEST, Tier
from kvcluster.release import PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class AttachShard:
    """Attaches a worker to a shard by its spec. `owner` as in Attach. Answered by AttachedShard."""

    spec: KVSpec
    owner: Tenant | None = None


@dataclass(frozen=True, slots=True)
class AttachedShard:
    """The namespace of the caller's spec at this shard incarnation, and how long its leases run."""

    namespace: NamespaceId
    epoch: Epoch
    lease_ttl_ns: int


@dataclass(frozen=True, slots=True)
class GetOffers:
    """Asks by which transports the shard moves its pages. Answered by Offers."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A transport that a shard serves, and its address. Only the two ends of that transport interpret `address` and
    `details`; `version` is that of their content, apart from kvcluster's protocol. `protocol_version` is not sent: it
    is that of the answer with the offer, and of connections by it."""

    transport: str
    address: str
    version: int = 0
    details: bytes = b""
    protocol_version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class Offers:
    """The transports that a shard incarnation serves besides gRPC; `refused` has the reasons for the others, by
    transport. `protocol_version` is that of the conversation in which they were sent."""

    epoch: Epoch
    offers: tuple[Offer, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    protocol_version: int = PROTOCOL_VERSION


class PageSlot(NamedTuple):
    """A page under a lease: where its bytes lie in the arena, and what they are. `loss` is the total of all encodings
    that the page went through, including `codec`."""

    key: PageKey
    offset: int
    nbytes: int
    generation: int
    loss: Loss
    sums: bytes = b""
    codec: Codec = Codec.RAW
    tier: Tier = INGEST


@dataclass(frozen=True, slots=True)
class Pin:
    """Grants a lease over these READY pages with at most the loss `accept`. Answered by PinGrant: a page or a Miss for
    each key. `on_device`: the reader reads pages of a tier on a device in place."""

    attempt: Attempt
    epoch: Epoch
    keys: tuple[PageKey, ...]
    accept: Loss = Loss.EXACT
    on_device: bool = False


@dataclass(frozen=True, slots=True)
class PinGrant:
    """For each key a page, or the reason why there is none. The lease ends with Unpin."""

    pages: tuple[PageSlot | Miss, ...]


@dataclass(frozen=True, slots=True)
class Unpin:
    """Ends the lease of the reader of `attempt`. Answered by Done."""

    attempt: Attempt


class NewPage(NamedTuple):
    """A page that a worker wants to write, and the block's place in its chain."""

    key: PageKey
    parent: BlockHash
    depth: int
    loss: Loss = Loss.EXACT


@dataclass(frozen=True, slots=True)
class Reserve:
    """Grants a lease over new pages. Answered by WriteGrant: a page, or why not, for each.

    If there is no room, the shard delays the answer by up to `wait_ns` until the coordinator has made some.
    """

    attempt: Attempt
    epoch: Epoch
    pages: tuple[NewPage, ...]
    wait_ns: int = 0


class Written(Enum):
    """The outcome for one page of a store."""

    COMMITTED = "committed"  # by this attempt
    DUPLICATE = "duplicate"  # the page of another attempt was READY already
    PENDING = "pending"  # another attempt is writing it
    CORRUPT = "corrupt"  # what arrived did not match its checksum
    FULL = "full"
    LOST = "lost"  # the lease had ended, or the shard may not commit


@dataclass(frozen=True, slots=True)
class WriteGrant:
    """For each page a slot to fill, or why it is not to be written. The lease ends with Commit or Abort."""

    pages: tuple[PageSlot | Written, ...]


@dataclass(frozen=True, slots=True)
class Commit:
    """Commits the pages of `attempt` with these indices, which are complete and verified. Answered by CommitGrant.

    `sums[i]` are the packed per-layer checksums of page `indices[i]`. Pages of the attempt that are not named are
    aborted: a commit ends the attempt.
    """

    attempt: Attempt
    indices: tuple[int, ...]
    sums: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class CommitGrant:
    """The outcome for each index of a Commit."""

    pages: tuple[Written, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """The writer of `attempt` has stopped and writes no more. Answered by Done."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Renew:
    """Renews the lease of `attempt`. Answered by Done(False) if it has ended."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Flush:
    """Answered by Done once the coordinator has acknowledged all events so far; Done(False) after `wait_ns`."""

    wait_ns: int


@dataclass(frozen=True, slots=True)
class Suspect:
    """Reports that the bytes of these pages did not match their checksums at a reader. Answered by Done.

    It is a report and not a verdict: the shard reads the pages again, and condemns those that do not match there.
    """

    epoch: Epoch
    keys: tuple[PageKey, ...]
