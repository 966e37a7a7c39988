"""Plans stepped by hand: tickets of small specs, and executors whose every event a test delivers itself.

The clock is `now`, an integer that a test sets. DEADLINE and the share of it after which a shard is silent are small.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeVar

from kvcluster.core.groups import Part
from kvcluster.core.ids import HASH_BYTES, Attempt, BlockHash, Epoch, Holder, NamespaceId, ShardId
from kvcluster.core.messages import (
    BlockFate,
    Explained,
    Need,
    Refused,
    RefusedKind,
    Run,
    ShardAddress,
    Source,
    TicketBody,
    Tier,
)
from kvcluster.core.miss import Loss, Miss, MissReason
from kvcluster.transfers.load_plan import LoadPlan
from kvcluster.transfers.load_progress import LoadProgress
from kvcluster.transfers.pieces import plan_pieces
from kvcluster.transfers.plan_messages import (
    Answered,
    Begin,
    FindReplicas,
    FinishLoad,
    LoadEffect,
    LoadEvent,
    ReadEnded,
    ReadStopped,
    StartRead,
    StopRead,
)
from kvcluster.transfers.shard_health import SILENT_SHARE, ShardHealth
from kvcluster.transfers.transfer import Loaded
from kvcluster.transport.base import RefusedByShard, Streams, Unavailable
from tests.client.build import HEADS, LAYERS, SPEC

Effect = TypeVar("Effect")

DEADLINE = 400
PATIENCE = DEADLINE // SILENT_SHARE
"""Of a load that begins at 0."""
BREAKER_NS = 1_000_000

A, B, C, D = (ShardAddress(ShardId(name), Epoch(1), name) for name in "abcd")
WHOLE = Part(0, LAYERS, 0, HEADS)
HASHES = [BlockHash(bytes([number]) * HASH_BYTES) for number in range(64)]
SPACE = NamespaceId(bytes(HASH_BYTES))
HOLDER = Holder(bytes(16))
LOST = Miss(MissReason.SHARD_LOST, "it broke off")
EVICTED = Miss(MissReason.EVICTED)
LATE = Miss(MissReason.DEADLINE)
GIVEN_UP = Miss(MissReason.DEADLINE, "given up")


def refused(kind: RefusedKind) -> RefusedByShard:
    """Returns what an exchange raises if its shard refuses it so."""
    return RefusedByShard(Refused(kind, "in these words"))


def source(shard: ShardAddress, part: Part = WHOLE, *, loss: Loss = Loss.EXACT, tier: Tier = Tier.RAM) -> Source:
    """A page of the only group."""
    return Source(0, part, shard, tier, loss)


def policy(failures: int = 3) -> ShardHealth:
    """Breakers that stay open for BREAKER_NS."""
    return ShardHealth(breaker_failures=failures, breaker_ms=BREAKER_NS // 1_000_000)


def one(effects: Sequence[object], kind: type[Effect]) -> Effect:
    """The only effect, which is of that kind."""
    (effect,) = effects
    assert isinstance(effect, kind), effect
    return effect


def answer(ask: FindReplicas, *shards: ShardAddress) -> Answered:
    """All blocks lie on these shards as well; on none where there are none."""
    fate = BlockFate(1, (tuple(map(source, shards)),), None) if shards else BlockFate(1, None, EVICTED)
    return Answered(ask.number, [Explained((fate,) * len(question.blocks)) for question in ask.questions])


class SteppedLoad:
    """A load plan, with the memory that its exchanges would fill. Each block of the ticket is given by its sources."""

    def __init__(
        self,
        *blocks: Sequence[Source],
        accept: Loss = Loss.EXACT,
        streams: Streams | None = None,
        shards: ShardHealth | None = None,
        on_device: bool = False,
    ) -> None:
        runs = tuple(Run(1, (tuple(sources),)) for sources in blocks)
        attempts = (Attempt(HOLDER, number) for number in itertools.count(1))
        body = TicketBody(SPACE, next(attempts), tuple(HASHES[: len(blocks)]), Need((WHOLE,), accept), runs)
        pieces = plan_pieces(body, SPEC, (WHOLE,))
        self.now = 0
        self.policy = shards or policy()
        self.progress = LoadProgress(body, SPEC, pieces)
        self.pieces = pieces
        self.plan = LoadPlan(
            self.progress,
            pieces,
            (WHOLE,),
            self.policy,
            streams=lambda shard: streams or Streams(),
            next_attempt=lambda: next(attempts),
            deadline_ns=DEADLINE,
            on_device=on_device,
        )

    def step(self, event: LoadEvent, now: int | None = None) -> list[LoadEffect]:
        """Returns the plan's effects at that time, by default the last one."""
        self.now = self.now if now is None else now
        return self.plan.step(event, self.now)

    def begin(self) -> list[StartRead]:
        """The first exchanges, where it wants nothing else."""
        effects = self.step(Begin())
        starts = [effect for effect in effects if isinstance(effect, StartRead)]
        assert starts == effects
        return starts

    def bring(self, start: StartRead, item: int, *, corrupt: Sequence[int] = (), stop: int = LAYERS) -> None:
        """Layers of an item come, as far as it is to bring them: the next ones, before `stop`. Some are corrupt."""
        ranges, piece = start.ranges, start.ranges.pieces[item]
        for layer in range(piece.want.layer_start, min(stop, piece.want.layer_stop)):
            assert ranges.may_write(item, layer, self.now)
            if layer in corrupt:
                ranges.did_not_match(item, layer, layer + 1)
            else:
                ranges.arrived(item, layer + 1)
                self.progress.arrived({piece.cut(layer, layer + 1).model_layers(SPEC): [piece.block]}, 1)

    def finish(self, start: StartRead, *outcome: Miss | None) -> list[LoadEffect]:
        """Its exchange ends; by default all its items come before."""
        if not outcome:
            for item in range(len(start.ranges.pieces)):
                self.bring(start, item)
        return self.step(ReadEnded(start.exchange, outcome or (None,) * len(start.ranges.pieces)))

    def fail(self, start: StartRead, error: BaseException | None = None) -> list[LoadEffect]:
        """Its exchange ends by that error, by default a broken connection."""
        return self.step(ReadEnded(start.exchange, error=error or Unavailable(LOST)))

    def stopped(self, stop: StopRead) -> list[LoadEffect]:
        """Delivers the event that an exchange has stopped, as it was told to."""
        return self.step(ReadStopped(stop.exchange, stop.items))


def outcome_of(effects: Sequence[object]) -> Loaded:
    """Returns the outcome of a load whose only effect ends it, without an error."""
    loaded = one(effects, FinishLoad).loaded
    assert loaded is not None
    return loaded
