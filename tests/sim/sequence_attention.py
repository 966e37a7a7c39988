"""A user that attends to its sequences at the shards that have them, and grows, forks and cuts them meanwhile.

What is under test is real: which cuts go where (ship_plan.py), what shards are told (remote_spans.py), what counts as a
step (remote_attention.py), and at the shard its registry and its sessions. Scaled down are positions: one token here
stands for many, so that two blocks are a cut. Attention itself is not computed. Judged is what it would have been
computed from: each block that is attended to, once, with the bytes of what was appended.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, cast

from kvcluster.core.ids import BlockHash, SpanId
from kvcluster.core.messages import (
    AttendRequest,
    AttendRow,
    Done,
    Explain,
    Explained,
    RegisterSpans,
    ShardAddress,
    SpanMiss,
    SpansLacking,
)
from kvcluster.core.miss import Loss
from kvcluster.core.position_tree import CUT_TOKENS, Subtree
from kvcluster.replay.core_stepper import build_request
from kvcluster.replay.kernel import MS, Script
from kvcluster.sequences.attend_planner import SpanChoice
from kvcluster.sequences.block_table import ABSENT
from kvcluster.sequences.blocks import SequenceBlock
from kvcluster.sequences.remote_attention import ShardFailure, ShardResults, Shipment
from kvcluster.sequences.remote_spans import RemoteSpans
from kvcluster.sequences.ship_plan import (
    AskedRow,
    CutBlocks,
    SeenBlocks,
    ShardSpan,
    ShipPlan,
    shard_spans,
    ship_plan,
    shippable_cuts,
)
from kvcluster.sequences.state import SequenceState
from kvcluster.transport.base import Deadline
from tests.sim import content
from tests.sim.network import Line
from tests.sim.sequence_worker import OpenSequence, SequenceWorker
from tests.sim.sessions import SessionRequest, SpanRead
from tests.sim.violation import require

CUT_BLOCKS = 2
MOST_TRIES = 3


class _ScaledState(NamedTuple):
    """A sequence whose tokens stand for so many positions that CUT_BLOCKS blocks are a cut."""

    state: SequenceState

    @property
    def block_tokens(self) -> int:
        return CUT_TOKENS // CUT_BLOCKS

    @property
    def blocks(self) -> list[SequenceBlock]:
        return self.state.blocks

    @property
    def encoded(self) -> int:
        return self.state.encoded

    @property
    def table(self) -> Any:
        return self.state.table


class SpanResult(NamedTuple):
    """In place of a Partial: what a shard has read for a subtree."""

    subtree: Subtree
    pages: list[SpanRead]


class Attender:
    """The remote attention of one worker."""

    def __init__(self, world: Any, worker: SequenceWorker) -> None:
        self._world = world
        self._worker = worker
        self._rng = world.attention_rng
        self._part = worker.model.whole()[0][1]
        self._spans = RemoteSpans(worker.holder, self._part, Loss.Q4)

    def attend(self, sequence: OpenSequence) -> Script:
        """Attends to all of a sequence, and judges what it was computed from."""
        state, step = sequence.state, self._worker.block_tokens
        stop = state.blocks_for(state.length)
        ranges = range(min(stop, state.dropped.start)), range(state.dropped.stop, stop)
        depths = tuple(each for each in ranges if each)
        scaled = cast(SequenceState, _ScaledState(state))
        seen = SeenBlocks(scaled, depths, state.length * (CUT_TOKENS // CUT_BLOCKS // step), 1)
        avoided: dict[ShardAddress, None] = {}
        for _ in range(MOST_TRIES):
            cuts = list(shippable_cuts(seen))
            places = yield from self._places(cuts, avoided)
            spans = shard_spans([cuts], partial(_place_of, places))
            plan = ship_plan([seen], spans, self._choices(spans))
            if not plan.asks:
                self._world.count("attend", "all local")
                return
            shipment = Shipment(len(plan.asks))
            coded = {depth for depth, entry in enumerate(state.table) if entry < ABSENT}
            for shard, rows in plan.asks.items():
                answer = yield from self._ask(shard, rows)
                if isinstance(answer, ShardFailure):
                    avoided[shard] = None
                shipment.take(answer)
            if shipment.wait(Deadline(0)):  # every shard has answered
                self._judge(sequence, seen, plan, shipment)
                self._judge_precision(plan, shipment, coded)
                self._world.count("attend", "merged")
                return
        self._world.count("attend", "given up")

    # ------------------------------------------------------------------------------------------- helpers

    def _choices(self, spans: Sequence[ShardSpan]) -> list[SpanChoice]:
        """Ships whatever may be shipped, or what is not resident."""
        keep = self._rng.random() < 0.2
        return [SpanChoice.LOCAL if keep and span.cuts[0].resident else SpanChoice.SHIP for span in spans]

    def _places(self, cuts: Sequence[CutBlocks], avoided: dict[ShardAddress, None]) -> Script:
        """Returns where blocks lie, as the coordinator says."""
        places: dict[SequenceBlock, ShardAddress] = {}
        for private in (False, True):
            blocks = [block for cut in cuts for block in cut.blocks if block.private == private]
            if not blocks:
                continue
            model = content.PRIVATE[self._worker.model] if private else self._worker.model
            names = tuple(BlockHash(block.name) for block in blocks if block.name is not None)
            ask = Explain(names, model.need())
            answer = yield from self._worker.question(model, ask, self._worker.now() + self._patience)
            fates = answer.fates if isinstance(answer, Explained) else ()
            plans = [fate.plan for fate in fates for _ in range(fate.count)]
            for block, found in zip(blocks, plans, strict=False):
                sources = found[0] if found else None
                if sources and len(sources) == 1 and sources[0].part == self._part:
                    places[block] = sources[0].shard
        return {block: shard for block, shard in places.items() if shard not in avoided}

    @property
    def _patience(self) -> int:
        return int(self._world.scenario.patience_ns)

    def _ask(self, shard: ShardAddress, rows: Sequence[AskedRow]) -> Script:
        """Asks one shard for what it has of the row, in one message or in several. Returns its results, or that it has
        failed."""
        (row,) = rows
        give_up = self._worker.now() + self._patience // 2
        answers: list[ShardResults | ShardFailure] = []
        for part in _messages(row) if self._rng.random() < 0.5 else [row]:
            answers.append((yield from self._ask_part(shard, part, give_up)))
            if isinstance(answers[-1], ShardFailure):
                break
        if len(answers) > 1:
            self._world.count("attend", "asked in parts")
        return ShardResults.gathered(answers)

    def _ask_part(self, shard: ShardAddress, row: AskedRow, give_up: int) -> Script:
        worker, world = self._worker, self._world
        for _ in range(2):
            named = tuple(self._spans.named(shard, cut) for cut in row.cuts)
            for private, message in self._spans.messages(shard):
                if not (yield from self._register(shard, message, private=private, give_up=give_up)):
                    return ShardFailure()
            subtrees = tuple((subtree.level, subtree.index) for subtree in row.subtrees)
            asked = AttendRow(0, 1, named, subtrees)
            request = AttendRequest(worker.attempt(), shard.epoch, 0, 1, 8, "float32", 1.0, (asked,))
            process, left_ns = world.shard_at(shard.address), give_up - worker.now()
            if process is None or left_ns <= 0:
                return ShardFailure()
            opening = SessionRequest(worker.model.caller, request, left_ns)
            line: Line = world.network.connect(worker, process, process.serve, opening)
            answer = yield line.down.next(), left_ns
            line.up.hang_up()
            world.network.close(line)
            if isinstance(answer, list):
                loss = max(read.slot.loss for read in answer)
                return ShardResults([(row.row, cast(Any, _by_subtree(row, named, answer)))], loss)
            if not isinstance(answer, SpansLacking):
                world.count("attend", "no answer")
                return ShardFailure()
            world.count("attend", answer.spans[0][1].value)
            if any(why is not SpanMiss.UNKNOWN for _, why in answer.spans):
                return ShardFailure(lost=row.cuts[0].cut)
            self._spans.forget(shard)
        return ShardFailure()

    def _register(self, shard: ShardAddress, message: RegisterSpans, *, private: bool, give_up: int) -> Script:
        worker, world = self._worker, self._world
        model = content.PRIVATE[worker.model] if private else worker.model
        if (yield from worker.attach_shard(model, shard, give_up)) is not None:
            return False
        build = build_request(message, model.tenant, model.space)
        promise = world.network.ask(worker, world.shard_at(shard.address), build)
        reply = yield promise, max(1, give_up - worker.now())
        if reply == Done():
            self._spans.registered(shard, message)
            return True
        worker.forget_shard(model, shard)
        return False

    def _judge(self, sequence: OpenSequence, seen: SeenBlocks, plan: ShipPlan, shipment: Shipment) -> None:
        """Each block is attended to in one place, and what a shard has read of it is what was appended."""
        step, model = self._worker.block_tokens, self._worker.model
        times: dict[int, int] = {}
        (local,) = plan.local
        for subtree in local.subtrees:
            for depths in local.depths:
                for depth in depths:
                    if subtree.start <= depth * (CUT_TOKENS // CUT_BLOCKS) < subtree.stop:
                        times[depth] = times.get(depth, 0) + 1
        asked = {cut.cut: cut for rows in plan.asks.values() for row in rows for cut in row.cuts}
        for result in cast("list[SpanResult]", shipment.results.get(0, [])):
            reads = iter(result.pages)
            first, last = result.subtree.start // CUT_TOKENS, result.subtree.stop // CUT_TOKENS
            for cut in range(first, last):
                for block in asked[cut].blocks:
                    read = next(reads, None)
                    times[block.depth] = times.get(block.depth, 0) + 1
                    require(read is not None, "a result is merged that lacks a block")
                    assert read is not None
                    self._judge_page(sequence, block.depth, read, step, model)
            require(next(reads, None) is None, "a result is merged that has blocks of others")
        attended = {depth: 1 for depths in seen.depths for depth in depths}
        require(times == attended, "a block is attended to twice, or not at all")

    def _judge_precision(self, plan: ShipPlan, shipment: Shipment, coded: set[int]) -> None:
        """A result is made of what the sequence has: raw blocks, with no more loss than is accepted, or than they have
        here; and its loss is reported. `coded`: the depths that the sequence had encoded when it was planned."""
        worst = Loss.EXACT
        asked = {cut.cut: cut for rows in plan.asks.values() for row in rows for cut in row.cuts}
        for here in asked.values():
            shipped = coded.isdisjoint(block.depth for block in here.blocks)
            require(shipped, "a shard attends to blocks that the sequence has in encoded form")
        for result in cast("list[SpanResult]", shipment.results.get(0, [])):
            reads = iter(result.pages)
            for cut in range(result.subtree.start // CUT_TOKENS, result.subtree.stop // CUT_TOKENS):
                here = asked[cut]
                accepted = here.loss if here.held else max(here.loss, Loss.Q4)
                for read in (next(reads) for _ in here.blocks):
                    worst = max(worst, read.slot.loss)
                    require(read.slot.loss <= accepted, "a shard attends to a page with more loss than is accepted")
        if worst is not Loss.EXACT:
            self._world.count("attend", "with loss")
        require(shipment.loss is worst, "the loss of a step is not that of the pages that it was computed from")

    def _judge_page(self, sequence: OpenSequence, depth: int, read: SpanRead, step: int, public: content.Model) -> None:
        key = read.slot.key
        model = content.PRIVATE[public] if content.private_holder(key.hash) is not None else public
        values = self._world.sequence_oracle.content_of(model.space, key.hash)
        expected = tuple(sequence.values[depth * step : (depth + 1) * step])
        require(values == expected, "a result is merged of a block that the sequence no longer has")
        right = content.content(model.space, key, read.slot.codec, read.slot.loss).data
        require(not read.sound or read.data == right, "a shard attends to bytes that are not those of the page")


def attender(world: Any, worker: SequenceWorker) -> Script:
    """Uses sequences until the world says that work is over, and closes them."""
    rng, attends, mine = world.attention_rng, Attender(world, worker), list[OpenSequence]()
    worker.users += 1
    while world.working:
        yield None, int(40 * MS * rng.random())
        if not mine:
            sequence = yield from worker.open_sequence([1 + rng.randrange(3)] * 7, max_tokens=64)
            mine.append(sequence)
        one = rng.choice(mine)
        kind = rng.random()
        world.journal.add((world.kernel.now, worker.name, "attender", (int(100 * kind),)))
        if kind < 0.4:
            count = min(rng.choice((2, 4, 6) if one.state.drop_oldest else (4, 6, 8)), 56 - one.state.length)
            tokens = [200 + rng.randrange(3)] * max(0, count)
            if not tokens or not (yield from worker.append(one, tokens, with_ids=rng.random() < 0.9)):
                mine.remove(one)
                worker.close(one)
        elif kind < 0.48:  # what is here is then attended to with no more loss there
            kept = (depth for depth in range(one.state.sealed) if depth not in one.state.dropped)
            lost = yield from worker.bring(one, islice(kept, 6))
            if lost is not None and lost >= 0:
                mine.remove(one)
                worker.close(one)
        elif kind < 0.85:
            yield from attends.attend(one)
        elif kind < 0.92:
            keep, gone = rng.randrange(one.state.length + 1), one.state.dropped_tokens
            yield from worker.truncate(one, gone.stop if keep in gone[1:] else keep)
        elif kind < 0.96 and len(mine) < 3:
            mine.append(worker.fork(one))
        else:
            mine.remove(one)
            worker.close(one)
    for sequence in mine:
        worker.close(sequence)
    worker.users -= 1


def _place_of(places: dict[SequenceBlock, ShardAddress], cut: CutBlocks) -> ShardAddress | None:
    found = {places.get(block): None for block in cut.blocks}
    return next(iter(found)) if len(found) == 1 else None


def _messages(row: AskedRow) -> list[AskedRow]:
    """Divides what a row wants into a message for each cut, as if no more had room in one."""
    return [AskedRow(row.row, (cut,), (Subtree(0, cut.cut),)) for cut in row.cuts]


def _by_subtree(row: AskedRow, named: Sequence[SpanId], reads: Sequence[SpanRead]) -> list[SpanResult]:
    """Returns what was read for each subtree: that of the spans of its cuts."""
    of_span: dict[SpanId, list[SpanRead]] = {}
    for read in reads:
        of_span.setdefault(read.span, []).append(read)
    span_of = dict(zip((cut.cut for cut in row.cuts), named, strict=True))
    return [
        SpanResult(
            subtree,
            [
                read
                for cut in range(subtree.start // CUT_TOKENS, subtree.stop // CUT_TOKENS)
                for read in of_span.get(span_of[cut], [])
            ],
        )
        for subtree in row.subtrees
    ]
