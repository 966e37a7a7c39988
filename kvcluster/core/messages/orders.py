"""What a coordinator orders a shard to do, and how the shard says how far it is (core/order_stream.py).

A further kind of order is a class here with a `number`, and an alternative of `Order`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvcluster.core.codecs import Codec
from kvcluster.core.ids import BlockHash, NamespaceId, Tenant
from kvcluster.core.messages.common import ShardAddress
from kvcluster.core.messages.shard import NewPage
from kvcluster.core.spec import KVSpec
from kvcluster.core.tiers import FASTEST, Tier


@dataclass(frozen=True, slots=True)
class EvictOrder:
    """Condemn every page of these blocks in that tier, with what was decoded from it. Ends when it is accepted."""

    number: int
    blocks: tuple[tuple[NamespaceId, BlockHash], ...]
    tier: Tier = FASTEST


class Move(NamedTuple):
    """Moves a block into tier `to`. Promoted, it comes into the first tier and stays below too. Demoted, it comes from
    the tier above and leaves that; `codec` counts where the tier takes any (tiers.Takes.ENCODED)."""

    namespace: NamespaceId
    hash: BlockHash
    to: Tier
    codec: Codec = Codec.RAW


@dataclass(frozen=True, slots=True)
class MoveOrder:
    """Demote and promote these blocks. What is demoted leaves its tier, be it that there is no room below; what is
    promoted stays where it was as well, as far as there is room above."""

    number: int
    moves: tuple[Move, ...]


@dataclass(frozen=True, slots=True)
class PullOrder:
    """Fetch these pages of one namespace from `source`, where they are in this codec, and keep them too, in that tier.
    Which of them came is what the report stream says."""

    number: int
    source: ShardAddress
    tenant: Tenant
    spec: KVSpec
    pages: tuple[NewPage, ...]
    codec: Codec = Codec.RAW
    into: Tier = FASTEST


Order = EvictOrder | MoveOrder | PullOrder


class OrderProgress(NamedTuple):
    """A shard's one acknowledgement of its orders: those up to `accepted` have arrived, and have ended but for those in
    `running`, ascending. It tells a state: a repeated one changes nothing, and the next makes good a lost one."""

    accepted: int = 0
    running: tuple[int, ...] = ()

    def ended(self, number: int) -> bool:
        """Has the order of this number ended?"""
        return number <= self.accepted and number not in self.running


NO_ORDERS = OrderProgress()
"""Of a shard that has not been ordered anything yet."""
