"""A probe of the whole cluster, for `kvcluster doctor`: every shard looks at itself and tries every other one.

An operator asks the coordinator (Probe, answered by Probed). The order travels in the answers to reports (ProbeOrder),
and what a shard found in its next reports (Findings), as everything else between the two does. The addresses are those
that the coordinator knows of its members: the question names none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvcluster.core.ids import ShardId
from kvcluster.core.messages.common import ShardAddress


class ListeningPort(NamedTuple):
    """A port on which a process listens. `use`: for what, such as grpc. `allowed`: the range that its configuration
    names, such as "7100-7163"; "" for any."""

    use: str
    port: int
    allowed: str


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """What a process says of the machine or container that it runs in. `pool_bytes`: of its tiers in memory.
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
    more may come. `coordinator`: what the coordinator says of itself."""

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
