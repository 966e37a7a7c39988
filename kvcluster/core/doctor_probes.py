"""Probes of the whole cluster, for `kvcluster doctor`: the coordinator has one run at a time, a shard one order.

A run asks every member that knows of probes. Its order is repeated in the answers to a shard's reports until a report
contains what the shard found, so a lost answer loses nothing. A run ends when every member has answered or was removed,
or when its time is over; its findings are kept until the next run begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvcluster.core import limits
from kvcluster.core.ids import Epoch, ShardId
from kvcluster.core.messages import (
    Effect,
    Findings,
    PeersTried,
    Probed,
    ProbeOrder,
    ProcessFacts,
    ShardAddress,
    ShardFindings,
    TryPeers,
)

RUN_NS = 20_000_000_000
"""A run ends after this time: what a shard may take to try its peers (runtime/peer_probe.py), and some reports."""

SINCE_VERSION = 3
"""The version of the protocol that introduced probes. A shard of an older version is not asked."""


class ProbeRuns:
    """The coordinator's side. `facts`: what its process reports about itself."""

    def __init__(self) -> None:
        self.facts = ProcessFacts()
        self._number = 0
        self._ends_at = 0
        self._asked: dict[ShardId, ShardAddress] = {}
        self._found: dict[ShardId, Findings] = {}

    def ask(self, number: int, epoch: Epoch, members: Sequence[tuple[ShardAddress, int]], now: int) -> Probed | None:
        """Returns what run `number` has found so far; None if there is no such run. 0 begins a run, or joins the one
        that is under way. `members`: their addresses, and the newest version of the protocol that each speaks."""
        there = {address.shard: address for address, _ in members}
        if number == 0 and not self._running(there, now):
            known = sorted((address for address, version in members if version >= SINCE_VERSION), key=_by_name)
            self._asked = {address.shard: address for address in known[: limits.PROBED_SHARDS]}
            self._found = {}
            self._number = max(self._number, epoch) + 1  # above those of earlier coordinators, which shards remember
            self._ends_at = now + RUN_NS
        if number not in (0, self._number):
            return None
        silent = tuple(shard for shard in self._asked if shard not in self._found)
        found = tuple(ShardFindings(shard, findings) for shard, findings in self._found.items())
        return Probed(self._number, self._running(there, now), self.facts, found, silent)

    def order_for(self, shard: ShardId, epoch: Epoch, now: int) -> ProbeOrder | None:
        """Returns the order that this incarnation has not answered yet; None if there is none."""
        asked = self._asked.get(shard)
        if asked is None or asked.epoch != epoch or shard in self._found or now >= self._ends_at:
            return None
        return ProbeOrder(self._number, tuple(peer for peer in self._asked.values() if peer.shard != shard))

    def take(self, shard: ShardId, findings: Findings | None) -> None:
        """Takes what a shard reports. That of another run is dropped."""
        if findings is not None and findings.number == self._number and shard in self._asked:
            self._found[shard] = findings

    def _running(self, there: Iterable[ShardId], now: int) -> bool:
        return now < self._ends_at and any(shard in self._asked and shard not in self._found for shard in there)


class ProbeTaker:
    """A shard's side. `findings`: for its reports; None if the coordinator waits for none."""

    def __init__(self) -> None:
        self._number = 0
        self._trying = False
        self.findings: Findings | None = None

    def heed(self, order: ProbeOrder | None) -> list[Effect]:
        """Begins what an answer of the coordinator orders, unless it is under way or done. Returns the effects."""
        if order is None or order.number != self._number:
            self.findings = None
        if order is None or order.number == self._number or self._trying:
            return []
        self._number, self._trying = order.number, True
        return [TryPeers(order)]

    def tried(self, m: PeersTried) -> None:
        self._trying = False
        self.findings = m.findings


def _by_name(address: ShardAddress) -> ShardId:
    return address.shard
