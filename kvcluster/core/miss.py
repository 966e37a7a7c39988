"""Why a block missed, and how much precision its KV has lost: two enums that every answer uses."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum


class Loss(IntEnum):
    """The most lossy codec that a block or its prefix has ever passed through.

        client.lookup(token_ids, accept=kvcluster.Loss.EXACT)        # blocks that were quantised are a miss

    They are ordered: a larger loss is worse.
    """

    EXACT = 0
    Q8 = 1
    Q4 = 2


class MissReason(Enum):
    """Why a block cannot be loaded.

        reasons = {block.reason for block in client.explain(token_ids)}
        kvcluster.MissReason.EVICTED in reasons              # would more memory, or a pin, have helped?

    The values are the words that `explain` prints; docs/client.md says what to do about each.
    """

    NEVER_SEEN = "never_seen"
    EVICTED = "evicted"
    PENDING = "pending"  # another worker is storing it at this moment
    BELOW_BLOCK = "below_block"  # the tokens fill no whole block
    NAMESPACE = "namespace"  # the same tokens are cached, but under another spec; detail names the fields
    PART = "part"  # the block is there, but not all the layers and heads that were asked for
    LOSSY = "lossy"  # only a copy with more loss than the caller accepts
    CORRUPT = "corrupt"  # the bytes did not match their checksum
    SHARD_LOST = "shard_lost"
    REBUILDING = "rebuilding"
    FULL = "full"
    DEADLINE = "deadline"
    SLOWER_THAN_RECOMPUTE = "slower_than_recompute"
    OFF = "off"  # an operator has turned the cache off
    COORDINATOR_LOST = "coordinator_lost"  # it does not answer the client, which alone can name this
    DEVICE_LOST = "device_lost"  # that of the caller's memory has failed, or has no room; only a client can name this


@dataclass(frozen=True, slots=True)
class Miss:
    """A miss as a value.

        miss = client.lookup(token_ids).reason
        print(miss)                                          # never_seen; None if every block is cached

    `reason` is for programs, `detail` for people.
    """

    reason: MissReason
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.reason.value} ({self.detail})" if self.detail else self.reason.value


OF_CLIENTS = (MissReason.COORDINATOR_LOST, MissReason.DEVICE_LOST)
"""Reasons that no server names: older sides would refuse them."""

PURGING = Miss(MissReason.REBUILDING, "the shards are carrying out a purge")
"""Why a block is not stored between a purge and the next report of its shards: a client asks again. And why a store
that was under way then is stopped."""

LEASE_ENDED = Miss(MissReason.DEADLINE, "the lease ended: too slow")
"""Why an exchange is stopped in which nothing has moved for the time of a lease."""

LEAVING = Miss(MissReason.SHARD_LOST, "the shard is leaving")
"""Why exchanges are stopped when an incarnation of a shard ends."""
