"""Orders of the coordinator to a shard, the shard's acknowledgement (core/streams.py), and probes of the whole cluster.

To add a kind of order: a class here with a `number`, and an alternative of `Order`.

In a probe, for `kvcluster doctor`, every shard examines itself and tries to reach every other one. An operator asks the
coordinator (Probe, answered by Probed). The order travels in the answers to reports (ProbeOrder), and what a shard
found in its next reports (Findings), as everything else between the two does. The addresses are those that the
coordinator knows of its members: the question names none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvcluster.core.codecs import Codec
from kvcluster.core.ids import BlockHash, NamespaceId, ShardId, Tenant
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
    """Moves a block into tier `to`. With `up` it is promoted from a lower tier, and also stays there. Otherwise it is
    demoted from the tier above and leaves that; `codec` matters if tier `to` takes any codec (tiers.Takes.ENCODED).
    With `keeps`, a demoted block stays where it is if there is no room below, since an open sequence claims it."""

    namespace: NamespaceId
    hash: BlockHash
    to: Tier
    codec: Codec = Codec.RAW
    keeps: bool = False
    up: bool = False


@dataclass(frozen=True, slots=True)
class MoveOrder:
    """Demotes and promotes these blocks. A demoted block leaves its tier even if there is no room below, unless its
    move keeps it (`keeps`). A promoted one also stays where it was, and moves only if there is room above."""

    number: int
    moves: tuple[Move, ...]


@dataclass(frozen=True, slots=True)
class PullOrder:
    """Fetches these pages of one namespace from `source`, which has them in this codec, and keeps them too, in tier
    `into`. The report stream shows which of them arrived."""

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


class ListeningPort(NamedTuple):
    """A port on which a process listens. `use`: for what, such as grpc. `allowed`: the range that its configuration
    names, such as "7100-7163"; "" for any."""

    use: str
    port: int
    allowed: str


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """What a process reports about the machine or container that it runs in. `pool_bytes`: of its tiers in memory.
    `limit_bytes`: the memory of its machine or container; 0 if unknown."""

    pool_bytes: int = 0
    limit_bytes: int = 0
    ports: tuple[ListeningPort, ...] = ()


class Link(NamedTuple):
    """One attempt of a shard to reach another one over a transport. `trip_ns`: the time of a round trip, 0 if it
    failed; `why`: why it failed, "" if it did not."""

    shard: ShardId
    transport: str
    trip_ns: int
    why: str = ""


@dataclass(frozen=True, slots=True)
class Findings:
    """What a shard found in run `number`. `clock_ns`: by how much its clock is ahead of the coordinator's, give or take
    `clock_error_ns`, which is 0 if that is not known."""

    number: int
    facts: ProcessFacts = ProcessFacts()
    clock_ns: int = 0
    clock_error_ns: int = 0
    links: tuple[Link, ...] = ()


@dataclass(frozen=True, slots=True)
class ProbeOrder:
    """Try these other shards, and report what was found under this number."""

    number: int
    peers: tuple[ShardAddress, ...]


@dataclass(frozen=True, slots=True)
class Probe:
    """Asks for what run `number` has found; 0 begins a run, or joins the one under way. Answered by Probed, at once."""

    number: int = 0


class ShardFindings(NamedTuple):
    """What one shard has found."""

    shard: ShardId
    findings: Findings


@dataclass(frozen=True, slots=True)
class Probed:
    """A run of probes, so far: what each shard has found, and those that were asked and have not answered. `running`:
    more may come. `coordinator`: what the coordinator reports about itself."""

    number: int
    running: bool
    coordinator: ProcessFacts
    shards: tuple[ShardFindings, ...]
    silent: tuple[ShardId, ...]


@dataclass(frozen=True, slots=True)
class TryPeers:
    """Effect: carry out this order. Its end is a PeersTried."""

    order: ProbeOrder


@dataclass(frozen=True, slots=True)
class PeersTried:
    """The driver has carried out the last TryPeers."""

    findings: Findings
