"""The load plan: what one load does next, from a ticket's pieces to its outcome. Pure: `step(event, now) -> effects`.

A load reads from several shards by exchanges, each of which owns its ranges of the caller's memory (read_ranges.py)
until it has ended or is stopped. Pieces that an exchange does not bring are read from other shards within the same
deadline (failover.py). So are the pieces of an exchange that has been silent for a while; if no other shard has them,
that exchange goes on. Layers that do not match their checksums are read from another shard too, and reported to their
shard.

    NEW --Begin--> RUNNING --all arrived, or no other replica is left--> ENDED
                      |---Cancel, an error, the deadline---> STOPPING --every exchange has stopped--> ENDED

An event that names an exchange or a question which is over changes nothing: answers may be late. An executor sends one
ReadEnded for each StartRead that it was not told to stop as a whole, and one ReadStopped for each StopRead, within one
chunk. Only executors count how far the load has come (load_progress.py); the plan reads it there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from kvcluster.core import limits
from kvcluster.core.groups import Part
from kvcluster.core.ids import Attempt
from kvcluster.core.messages import ShardAddress
from kvcluster.core.miss import Loss, Miss, MissReason
from kvcluster.core.tiers import INGEST
from kvcluster.transfers.failover import Alternatives, Failover, OpenQuestions
from kvcluster.transfers.load_progress import LoadProgress
from kvcluster.transfers.pieces import Piece, PieceList, sizes, split_among_exchanges
from kvcluster.transfers.plan_messages import (
    NEVER_BEGUN,
    Answered,
    Begin,
    Cancel,
    FindReplicas,
    FinishLoad,
    LoadEffect,
    LoadEvent,
    PlanTick,
    ReadEnded,
    ReadStopped,
    ReportCorrupt,
    StartRead,
    StopRead,
)
from kvcluster.transfers.read_ranges import ReadRanges
from kvcluster.transfers.shard_health import SILENT_SHARE, AskAgain, Permit, ShardHealth
from kvcluster.transport.base import Streams

READERS = 32
"""Exchanges by which a client reads at once: sixteen shards with two streams each."""

_LATE = Miss(MissReason.DEADLINE)


class _LoadState(Enum):
    NEW = "new"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"


class LoadPlan:
    """Plans one load. `pieces` are those of the ticket (pieces.plan_pieces), `progress` counts them.

    `streams` returns how many parallel exchanges are fastest with a shard; `next_attempt` names each exchange, since a
    shard keeps one lease per attempt. `on_device`: the memory that is filled is a device's.
    """

    def __init__(
        self,
        progress: LoadProgress,
        pieces: Mapping[ShardAddress, Sequence[Piece]],
        parts: Sequence[Part | None],
        health: ShardHealth,
        *,
        streams: Callable[[ShardAddress], Streams],
        next_attempt: Callable[[], Attempt],
        deadline_ns: int,
        on_device: bool = False,
    ) -> None:
        self._pieces = pieces
        self._progress = progress
        self._health = health
        self._streams = streams
        self._on_device = on_device
        self._next_attempt = next_attempt
        self._deadline_ns = deadline_ns
        self._decodes = any(
            source.loss is Loss.Q4 and source.tier > INGEST
            for run in progress.body.runs
            for group in run.plan
            for source in group or ()
        )
        self._failover = Failover(progress, parts, deadline_ns)
        self._began_ns = 0
        self._patience_ns = 0
        self._numbers = itertools.count(1)
        self._exchanges: dict[int, ReadExchange] = {}
        self._state = _LoadState.NEW
        self._why = Miss(MissReason.SHARD_LOST)  # the reason of blocks without a recorded failure
        self._error: BaseException | None = None

    @property
    def ended(self) -> bool:
        return self._state is _LoadState.ENDED

    def next_deadline(self) -> int | None:
        """Returns when the next PlanTick is due; None if none would change anything."""
        if self._state in (_LoadState.STOPPING, _LoadState.ENDED):
            return None
        patience = [
            each.ranges.last_arrival_ns + self._patience_ns for each in self._exchanges.values() if not each.hedged
        ]
        return min([self._deadline_ns, *patience])

    def step(self, event: LoadEvent, now: int) -> list[LoadEffect]:
        """Applies an event, and returns the effects to carry out. `now` never decreases."""
        effects: list[LoadEffect] = []
        if self._state is _LoadState.ENDED:
            return effects
        match event:
            case Begin():
                assert self._state is _LoadState.NEW, "a load begins once"
                self._state = _LoadState.RUNNING
                self._began_ns = now
                self._patience_ns = max(0, self._deadline_ns - now) // SILENT_SHARE
                effects += self._start(self._pieces, now) if now < self._deadline_ns else self._stop(_LATE)
            case ReadEnded():
                effects += self._read_ended(event, now)
            case ReadStopped():
                effects += self._read_stopped(event, now)
            case Answered():
                effects += self._answered(event, now)
            case Cancel(why):
                effects += self._stop(why if self._state is not _LoadState.NEW else Miss(why.reason, NEVER_BEGUN))
            case PlanTick():
                if now >= self._deadline_ns:
                    effects += self._stop(_LATE)
                elif self._state is _LoadState.RUNNING:
                    effects += self._hedge(now)
        if self._state is not _LoadState.NEW and not self._exchanges and not self._failover.asking:
            effects.append(self._outcome(now))
            self._state = _LoadState.ENDED
        return effects

    def _outcome(self, now: int) -> FinishLoad:
        if self._error is not None:
            return FinishLoad(None, self._error)
        loaded = self._progress.loaded(self._why)
        return FinishLoad(
            loaded if self._state is _LoadState.STOPPING else replace(loaded, took_ns=max(1, now - self._began_ns))
        )

    # ----------------------------------------------------------------------------------------- starting

    def _start(
        self, pieces: Mapping[ShardAddress, Sequence[Piece]], now: int, *, reattached: bool = False
    ) -> list[LoadEffect]:
        """Starts exchanges that read these pieces. For shards that may not be asked, looks for other replicas."""
        effects: list[LoadEffect] = []
        spare = READERS - len(self._exchanges)
        for shard, its_pieces in pieces.items():
            of_shard = PieceList.of(its_pieces)
            most = min(self._fastest(self._streams(shard)), spare // len(pieces))
            for run in split_among_exchanges(sizes(of_shard, self._progress.spec), most, limits.READ_PAGES):
                share = of_shard[run.start : run.stop]
                permit = self._health.permit(shard, now)
                if isinstance(permit, Miss):
                    effects += self._look(shard, [(rest, permit) for rest in share], [], now)
                    continue
                number, ranges = next(self._numbers), ReadRanges(share, now=now, deadline_ns=self._deadline_ns)
                self._exchanges[number] = ReadExchange(number, shard, ranges, permit, reattached)
                effects.append(StartRead(number, shard, self._next_attempt(), ranges, self._progress.loss))
        return effects

    def _fastest(self, streams: Streams) -> int:
        if self._on_device:
            return streams.device
        return streams.decoding if self._decodes else streams.loads

    # --------------------------------------------------------------------------------- what did not come

    def _read_ended(self, event: ReadEnded, now: int) -> list[LoadEffect]:
        exchange = self._exchanges.pop(event.exchange, None)
        if exchange is None:
            return []
        verdict = self._health.ended(exchange.permit, event.error, now, reattached=exchange.reattached)
        if self._state is _LoadState.STOPPING:
            return self._report(exchange)
        if isinstance(verdict, BaseException):
            self._error = verdict
            return [*self._report(exchange), *self._stop(self._why)]
        effects = self._hand_over(exchange, now)  # the items that it was told to stop: it has stopped now
        effects += self._report(exchange)
        if isinstance(verdict, AskAgain):
            return effects + self._ask_again(exchange, verdict, now)
        gone: list[tuple[Piece, Miss]] = []
        lossy: list[tuple[Piece, Miss]] = []
        for item, rest in exchange.missing():
            outcome = event.outcome[item] if event.outcome else None
            why = exchange.ranges.why(item) or verdict or outcome
            why = why or Miss(MissReason.SHARD_LOST, "the shard sent less than it promised")
            # A page that was quantised further since the ticket was made is still on that shard, at a worse loss.
            has_lost_more = outcome is not None and outcome.reason is MissReason.LOSSY
            (lossy if has_lost_more else gone).append((rest, why))
        return effects + self._look(exchange.shard, gone, lossy, now)

    def _ask_again(self, exchange: ReadExchange, verdict: AskAgain, now: int) -> list[LoadEffect]:
        """Reads the rest from the same shard, except for pieces that arrived from there and did not verify."""
        missing = [(rest, exchange.ranges.why(item)) for item, rest in exchange.missing()]
        again = [rest for rest, why in missing if why is None]
        wrong = [(rest, why) for rest, why in missing if why is not None]
        effects = self._look(exchange.shard, wrong, [], now)
        return effects + self._start({exchange.shard: again}, now, reattached=verdict.reattached) if again else effects

    def _look(
        self,
        shard: ShardAddress,
        gone: Sequence[tuple[Piece, Miss]],
        lossy: Sequence[tuple[Piece, Miss]],
        now: int,
    ) -> list[LoadEffect]:
        """Asks for other replicas of these pieces (Failover.lost)."""
        return _asking(self._failover.lost(shard, gone, lossy, now))

    def _answered(self, event: Answered, now: int) -> list[LoadEffect]:
        answered = self._failover.answered(event.number, event.answers)
        if answered is None:
            return []
        asked, found = answered
        if asked.silent is not None:
            exchange = self._exchanges.get(asked.silent)
            return [] if exchange is None else self._take_away(exchange, found)
        return self._start(self._failover.replace(asked.rests, found), now)

    def _report(self, exchange: ReadExchange) -> list[LoadEffect]:
        """Reports to the shard which of its pages did not match their checksums here."""
        ranges = exchange.ranges
        keys = dict.fromkeys(ranges.pieces[item].want.key for item in ranges.corrupt if item not in ranges.unreadable)
        return [ReportCorrupt(exchange.shard, tuple(keys)[: limits.SUSPECTS_PER_CALL])] if keys else []

    # ------------------------------------------------------------------------------------ silent shards

    def _hedge(self, now: int) -> list[LoadEffect]:
        """Asks for other replicas of what silent exchanges have not brought."""
        effects: list[LoadEffect] = []
        for exchange in list(self._exchanges.values()):
            if not exchange.hedged and exchange.ranges.last_arrival_ns + self._patience_ns <= now:
                exchange.hedged = True
                rests = [rest for _, rest in exchange.missing()]
                effects += _asking(self._failover.silent(exchange.shard, rests, exchange.number, now))
        return effects

    def _take_away(self, exchange: ReadExchange, found: Alternatives) -> list[LoadEffect]:
        """Stops a silent exchange for the items that other shards have; it goes on with its other items."""
        items: dict[int, bool] = {}
        for item, rest in exchange.missing():
            items[item] = items.get(item, True) and self._failover.covers(rest, found)
        taken = tuple(item for item, elsewhere in items.items() if elsewhere)
        if not taken:
            return []
        exchange.stopping = taken, found
        return [StopRead(exchange.number, None if len(taken) == len(items) else taken)]

    def _read_stopped(self, event: ReadStopped, now: int) -> list[LoadEffect]:
        exchange = self._exchanges.get(event.exchange)
        if exchange is None:
            return []
        if event.items is not None:
            return self._hand_over(exchange, now) if self._state is _LoadState.RUNNING else []
        del self._exchanges[event.exchange]
        if self._state is _LoadState.STOPPING:
            self._health.gave_up(exchange.permit)
            return self._report(exchange)
        self._health.failed(exchange.permit, _silent(exchange.shard), now)
        return [*self._report(exchange), *self._hand_over(exchange, now)]

    def _hand_over(self, exchange: ReadExchange, now: int) -> list[LoadEffect]:
        """Starts other exchanges for the items that this one has stopped."""
        if exchange.stopping is None:
            return []
        (items, found), exchange.stopping = exchange.stopping, None
        rests = [rest for item in items for rest in exchange.ranges.left(item)]
        exchange.handed_over.update(dict.fromkeys(items))
        for rest in rests:
            self._progress.failed(rest.block, _silent(exchange.shard))
        return self._start(self._failover.replace(rests, found), now)

    # ----------------------------------------------------------------------------------------- stopping

    def _stop(self, why: Miss) -> list[LoadEffect]:
        if self._state is _LoadState.STOPPING:
            return []
        self._state = _LoadState.STOPPING
        self._why = why
        self._failover.stop()
        return [StopRead(number, None) for number in self._exchanges]


def _asking(asked: OpenQuestions | None) -> list[LoadEffect]:
    return [] if asked is None else [FindReplicas(asked.number, asked.questions, asked.until_ns)]


def _silent(shard: ShardAddress) -> Miss:
    return Miss(MissReason.DEADLINE, f"{shard.shard} is silent")


@dataclass(eq=False, slots=True)
class ReadExchange:
    """One read that is under way. `handed_over`: the items that other exchanges bring. `stopping`: the items that it
    was told to stop, and their other replicas."""

    number: int
    shard: ShardAddress
    ranges: ReadRanges
    permit: Permit
    reattached: bool
    hedged: bool = False
    handed_over: dict[int, None] = field(default_factory=dict)
    stopping: tuple[tuple[int, ...], Alternatives] | None = None

    def missing(self) -> list[tuple[int, Piece]]:
        """Returns the pieces that it still has to bring, by item."""
        items = (item for item in self.ranges.unfinished() if item not in self.handed_over)
        return [(item, rest) for item in items for rest in self.ranges.left(item)]
