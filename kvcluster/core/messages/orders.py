"""Orders of the coordinator to a shard, and the shard's acknowledgement (core/order_stream.py).

To add a kind of order: a class here with a `number`, and an alternative of `Order`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvcluster.core.codecs import Codec
from kvcluster.core.ids import BlockHash, NamespaceId, Tenant
from kvcluster.core.messages.common import ShardAddress
from kvcluster.core.messages.shard import NewPage
from kvcluster.core.spec import KVSpec
from kvcluster.core.tiers import INGEST, Tier


@dataclass(frozen=True, slots=True)
class EvictOrder:
    """Condemns every page of these blocks in that tier, and the copies decoded from it. Ends when it is accepted."""

    number: int
    blocks: tuple[tuple[NamespaceId, BlockHash], ...]
    tier: Tier = INGEST


class Move(NamedTuple):
    """Moves a block into tier `to`. With `up` it is promoted: it comes from below, and also stays there. A demoted one
    comes from the tier above and leaves that; `codec` matters if tier `to` takes any codec (tiers.Takes.ENCODED). With
    `keeps`, a demoted block stays where it is if there is no room below, since an open sequence claims it."""

    namespace: NamespaceId
    hash: BlockHash
    to: Tier
    codec: Codec = Codec.RAW
    keeps: bool = False
    up: bool = False


@dataclass(frozen=True, slots=True)
class MoveOrder:
    """Demotes and promotes these blocks. A demoted block leaves its tier even if there is no room below, unless its
    move says that it stays (`keeps`). A promoted one also stays where it was, and moves only if there is room above."""

    number: int
    moves: tuple[Move, ...]


@dataclass(frozen=True, slots=True)
class PullOrder:
    """Fetches these pages of one namespace from `source`, which has them in this codec, and keeps them too, in tier
    `into`. The report stream says which of them arrived."""

    number: int
    source: ShardAddress
    tenant: Tenant
    spec: KVSpec
    pages: tuple[NewPage, ...]
    codec: Codec = Codec.RAW
    into: Tier = INGEST


Order = EvictOrder | MoveOrder | PullOrder


class OrderProgress(NamedTuple):
    """A shard's acknowledgement of its orders: those up to `accepted` have arrived, and have ended except those in
    `running`, ascending. It states the whole state: a repeated one changes nothing, and the next makes up for a lost
    one."""

    accepted: int = 0
    running: tuple[int, ...] = ()

    def ended(self, number: int) -> bool:
        """Whether the order of this number has ended."""
        return number <= self.accepted and number not in self.running


NO_ORDERS = OrderProgress()
"""The progress of a shard that has not accepted any order."""
