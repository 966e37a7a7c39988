"""Chains of more blocks than one message may name (limits.BLOCKS_PER_CALL), asked about in several messages.

How far a chain can be restored is asked message by message, each for the blocks behind those of the one before, if
every group needs its whole prefix. Groups of windows and of last blocks need more: a boundary in one message may need
blocks of another. For them each group is asked about by itself, the boundary is found here by the coordinator's rule
(core/coordinator/index.py), and then exactly the blocks that each group needs are prepared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TypeVar

from kvcluster.core import limits
from kvcluster.core.groups import Reuse
from kvcluster.core.ids import Attempt, BlockHash
from kvcluster.core.messages import BlockFate, Explain, Explained, LoadGrant, Need, PrepareLoad, Run, Source
from kvcluster.core.miss import Miss
from kvcluster.core.spec import KVSpec
from kvcluster.transfers.coordinator_client import CoordinatorClient
from kvcluster.transport.base import Deadline, Unavailable

T = TypeVar("T")
Cover = tuple[Source, ...] | None
"""The sources of one group of a block."""

_TRIES = 3
"""How often a boundary is looked for whose blocks may be evicted between the question and their promise."""


def in_messages(items: Sequence[T]) -> Iterator[tuple[T, ...]]:
    """Divides the blocks of a chain into as many as one message may name each."""
    step = limits.BLOCKS_PER_CALL
    return (tuple(items[start : start + step]) for start in range(0, len(items), step))


def fates_of(
    control: CoordinatorClient, spec: KVSpec, need: Need, hashes: Sequence[BlockHash], deadline: Deadline
) -> Iterator[BlockFate]:
    """Yields the fates of these blocks, in order; each message is sent when its first fate is asked for. Raises as
    CoordinatorClient.ask."""
    for some in in_messages(hashes):
        yield from control.ask(Explained, spec, Explain(some, need), deadline).fates


@dataclass(slots=True)
class ChainGrant:
    """What was granted of a chain: its leading `blocks`, by `runs`, and the attempts that hold them, each with its
    time. `answered`: whether the coordinator answered at all."""

    blocks: int = 0
    runs: list[Run] = field(default_factory=list)
    miss: Miss | None = None
    holds: list[tuple[Attempt, int]] = field(default_factory=list)
    answered: bool = False


class ChainPreparer:
    """Asks how far one chain can be loaded, in as many messages as it takes. `end` gives up an attempt's hold."""

    def __init__(
        self,
        control: CoordinatorClient,
        spec: KVSpec,
        need: Need,
        deadline: Deadline,
        *,
        hold: bool,
        awaited: int | None = None,
        again: bool = False,
        next_attempt: Callable[[], Attempt],
        end: Callable[[Attempt], object],
    ) -> None:
        self._control = control
        self._spec = spec
        self._need = need
        self._deadline = deadline
        self._hold = hold
        self._awaited = awaited
        self._again = again
        self._next_attempt = next_attempt
        self._end = end

    def prepare(self, hashes: Sequence[BlockHash]) -> ChainGrant:
        """Returns what was granted: as much as is known, and the miss, if the coordinator stops answering. If anything
        else is raised, nothing is held."""
        granted = ChainGrant()
        try:
            if len(hashes) <= limits.BLOCKS_PER_CALL or all(
                self._reuses(group).kind == "prefix" for group in self._groups
            ):
                self._prefix(granted, hashes, self._need)
            else:
                self._mixed(granted, hashes)
        except Unavailable as trouble:
            granted.miss = trouble.miss
        except BaseException:
            self._give_up(granted)
            raise
        return granted

    @property
    def _groups(self) -> list[int]:
        """The groups of the need, those that need their whole prefix first."""
        needed = [group for group, part in enumerate(self._need.parts) if part is not None]
        return sorted(needed, key=lambda group: self._reuses(group).kind != "prefix")

    def _reuses(self, group: int) -> Reuse:
        return self._spec.groups[group].reuse

    def _prefix(self, granted: ChainGrant, hashes: Sequence[BlockHash], need: Need) -> None:
        """Prepares as many leading blocks of these as can be, and adds them."""
        for some in in_messages(hashes) if hashes else [()]:  # no block is a question, too: whether it answers
            attempt = self._next_attempt()
            awaited = None if self._awaited is None else max(0, self._awaited - granted.blocks)
            question = PrepareLoad(attempt, some, need, self._hold, awaited, self._again)
            grant = self._control.ask(LoadGrant, self._spec, question, self._deadline)
            granted.answered = True
            granted.blocks += grant.blocks
            granted.runs += grant.runs
            granted.miss = grant.miss
            if grant.hold_ns:
                granted.holds.append((attempt, grant.hold_ns))
            if grant.blocks < len(some):
                return

    def _mixed(self, granted: ChainGrant, hashes: Sequence[BlockHash]) -> None:
        for _ in range(_TRIES):
            blocks, granted.miss = self._boundary(hashes)
            granted.answered = True
            covers: list[list[Cover]] = [[None] * blocks for _ in self._need.parts]
            complete = all(self._of_group(granted, group, hashes[:blocks], covers[group]) for group in self._groups)
            if complete:
                plans = zip(*covers, strict=True)
                granted.blocks = blocks
                granted.runs = [Run(sum(1 for _ in alike), plan) for plan, alike in groupby(plans)]
                return
            self._give_up(granted)

    def _of_group(self, granted: ChainGrant, group: int, hashes: Sequence[BlockHash], covers: list[Cover]) -> bool:
        """Prepares what one group needs of these blocks to go on behind them, and fills in where it lies. Returns False
        if some of it has been evicted meanwhile."""
        first = len(hashes) - self._reuses(group).blocks_needed(len(hashes), self._spec.block_tokens)
        found = ChainGrant(holds=granted.holds)
        self._prefix(found, hashes[first:], self._need_of(group))
        for run in found.runs:
            covers[first : first + run.count] = [run.plan[group]] * run.count
            first += run.count
        if first < len(hashes):
            granted.miss = found.miss
        return first == len(hashes)

    def _boundary(self, hashes: Sequence[BlockHash]) -> tuple[int, Miss | None]:
        """Returns the longest boundary that all groups can be restored to, and why not one block more."""
        misses: dict[int, list[Miss | None]] = {}
        served: dict[int, list[bool]] = {}
        for group in self._groups:
            served[group], misses[group] = [], []
            for fate in fates_of(self._control, self._spec, self._need_of(group), hashes, self._deadline):
                served[group] += [fate.plan is not None] * fate.count
                misses[group] += [fate.miss] * fate.count
                if fate.plan is None and self._reuses(group).kind == "prefix":
                    hashes = hashes[: len(served[group]) - fate.count + 1]  # no boundary lies beyond this block
                    break
        best, tails = 0, dict.fromkeys(served, 0)
        for at in range(len(hashes)):
            for group, of_group in served.items():
                tails[group] = tails[group] + 1 if of_group[at] else 0
            if all(
                tail >= self._reuses(group).blocks_needed(at + 1, self._spec.block_tokens)
                for group, tail in tails.items()
            ):
                best = at + 1
        why = (of_group[best] for of_group in misses.values() if best < len(of_group))
        return best, next((miss for miss in why if miss is not None), None)

    def _need_of(self, group: int) -> Need:
        parts = (part if at == group else None for at, part in enumerate(self._need.parts))
        return Need(tuple(parts), self._need.accept, self._need.avoid)

    def _give_up(self, granted: ChainGrant) -> None:
        for attempt, _ in granted.holds:
            self._end(attempt)
        granted.holds.clear()
