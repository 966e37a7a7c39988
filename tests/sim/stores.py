"""A store as a worker does it: the real plan (transfers/store_plan.py), carried out over the simulated network."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcluster.core import messages
from kvcluster.core.groups import Part
from kvcluster.core.ids import Attempt, BlockHash
from kvcluster.core.messages import PageKey, StoreGrant
from kvcluster.core.miss import Loss, Miss, MissReason
from kvcluster.replay.kernel import MS, TIMED_OUT, Promise, Script
from kvcluster.transfers.plan_messages import (
    AskStore,
    CloseTicket,
    FinishStore,
    FreeSource,
    NotGranted,
    SourceDrained,
    StartWrite,
    StopWrite,
    StoreEffect,
    StoreEvent,
    StoreGranted,
    StoreOver,
    TicketEnded,
    WriteEnded,
    WriteStopped,
)
from kvcluster.transfers.store_executor import StoreProgress, StoreTerms, prepare_store
from kvcluster.transfers.store_plan import StorePlan
from kvcluster.transfers.transfer import Stored
from kvcluster.transport.base import Cancelled, PathLost, Streams, Unavailable
from tests.sim import content
from tests.sim.client_process import ClientProcess
from tests.sim.content import Model
from tests.sim.loads import PATHS_LOST
from tests.sim.memory import flipped
from tests.sim.network import BROKEN
from tests.sim.plans import SimulatedPlan
from tests.sim.sessions import FINISHED, Layer
from tests.sim.violation import require


class Store(SimulatedPlan[StoreEvent, StoreEffect]):
    """One store of the blocks from `first` on. `done` brings its Stored, and `over` comes when the next may begin.
    `holds` says whether the source still has the content of a block; None if the source never changes."""

    def __init__(
        self,
        worker: ClientProcess,
        model: Model,
        hashes: Sequence[BlockHash],
        first: int,
        parts: tuple[tuple[int, Part], ...],
        wait_ns: int,
        give_up: int,
        *,
        start: int = 0,
        loss: Loss = Loss.EXACT,
        holds: Callable[[BlockHash], bool] | None = None,
    ) -> None:
        self.over = Promise()
        self._worker = worker
        self._model = model
        self._give_up = give_up
        new = (block for block in hashes[first - start :] if content.private_holder(block) is None)
        tokens = tuple(token for block in new for token in content.origin(model, block)[1])
        host = f"node-{worker.node}"
        self._terms = StoreTerms(model.spec, hashes, first, parts, loss, tokens, worker.attempt(), wait_ns, start, host)
        self._holds = holds
        plan = StorePlan(
            self._terms,
            StoreProgress(),
            worker.policy,
            streams=lambda shard: Streams(2, 1, 1),
            next_attempt=worker.attempt,
            deadline_ns=give_up,
        )
        super().__init__(worker, plan)
        worker.plan_began()
        self._stopped: dict[int, None] = {}
        self._free = False

    def _perform(self, effect: StoreEffect) -> None:
        worker = self._worker
        match effect:
            case AskStore():
                worker.start(self._ask())
            case StartWrite():
                require(not self._free, "a source is read after it was reported as free")
                worker.kernel.at(worker.kernel.now, worker, worker.start, self._write(effect))
            case StopWrite(exchange):
                self._stopped[exchange] = None
                worker.kernel.at(worker.kernel.now, worker, self._deliver, WriteStopped(exchange))
            case FreeSource():
                self._free = True
            case CloseTicket(attempt):
                worker.start(self._end_ticket(attempt))
            case FinishStore(stored, error):
                require(error is None, f"a store ends in an error: {error!r}")
                assert stored is not None
                self._tell(stored)
            case StoreOver():
                worker.plan_ended()
                self.over.fulfil(None)

    def _tell(self, stored: Stored) -> None:
        require(self._free, "the outcome of a store is reported while its source is read")
        told = stored.blocks + stored.deduplicated + stored.pending
        require(told <= len(self._terms.new), "more blocks are reported as stored than there were")
        if told == len(self._terms.new) and not stored.pending and stored.miss is None:
            oracle = self._worker.world.oracle
            for block in self._terms.new:
                for group, part in self._terms.parts:
                    known = oracle.was_committed(self._model.space, PageKey(block, group, part))
                    whole = stored.deduplicated  # blocks that others stored, perhaps in other parts
                    require(known or bool(whole), "a block is reported as stored that no shard has committed")
        self.done.fulfil(stored)

    def _ask(self) -> Script:
        worker, model, terms = self._worker, self._model, self._terms
        attached = yield from worker.attach(model, self._give_up)
        if attached is None:
            self._deliver(NotGranted(_late("no answer"), asked=False))
            return
        prepare = prepare_store(terms, attached)
        grant = yield from worker.question(model, prepare, self._give_up)
        if isinstance(grant, StoreGrant):
            self._deliver(StoreGranted(model.space, grant))
        else:
            self._deliver(NotGranted(_late("no answer" if grant is None else "refused"), asked=True))

    def _end_ticket(self, attempt: Attempt) -> Script:
        give_up = self._worker.now() + 300 * MS
        yield from self._worker.ask(self._model.asks(messages.EndTicket(attempt)), give_up)
        self._deliver(TicketEnded())

    # ----------------------------------------------------------------------------------------- exchanges

    def _write(self, start: StartWrite) -> Script:
        taken: dict[int, None] = {}
        nbytes, outcome, error = yield from self._exchange(start, taken)
        self._deliver(WriteEnded(start.exchange, nbytes, outcome, error, taken))

    def _exchange(self, start: StartWrite, taken: dict[int, None]) -> Script:
        """Returns the bytes sent, the outcome of each page, and no error; or an error. Adds to `taken` each page of
        which bytes were sent."""
        worker, world = self._worker, self._worker.world
        rng, scenario, request = world.rng, world.scenario, start.request
        opened = yield from worker.open(self._model, start.shard, request, self._give_up)
        if isinstance(opened, Exception):
            return 0, (), opened
        line, head = opened
        breaks_off = world.working and rng.random() < 0.05
        layers = [
            (item, page.key, layer)
            for item, (page, refused) in enumerate(zip(request.pages, head, strict=True))
            if refused is None
            for layer in range(page.key.part.layers)
        ]
        nbytes, stopped = 0, False
        for at in range(0, len(layers), scenario.frame_layers):
            yield None, int(2 * scenario.frame_ns * rng.random())
            stopped = start.exchange in self._stopped
            if breaks_off or stopped or worker.now() >= self._give_up:
                break
            require(not self._free, "a source is read after it was reported as free")
            frame = [self._layer(item, key, layer) for item, key, layer in layers[at : at + scenario.frame_layers]]
            nbytes += sum(len(layer.data) for layer in frame)
            taken.update(dict.fromkeys(layer.item for layer in frame))
            line.up.put(frame)
        broken = breaks_off or stopped or worker.now() >= self._give_up
        if not broken:
            self._deliver(SourceDrained(start.exchange))
        if breaks_off and rng.random() < 0.5:  # it hangs silently
            yield None, 2 * scenario.config.shard.lease_ttl_ms * MS
        line.up.put(BROKEN if broken else FINISHED)
        path_lost = breaks_off and not stopped and world.later.random() < PATHS_LOST
        tail = None if path_lost else (yield line.down.next(), max(1, self._give_up - worker.now()))
        line.up.hang_up()
        world.network.close(line)
        if stopped:
            return nbytes, (), Cancelled(Miss(MissReason.DEADLINE, "given up"))
        if path_lost:  # the shard has not noticed yet
            world.count("store", "path lost")
            return nbytes, (), PathLost(Miss(MissReason.SHARD_LOST, "it broke off"))
        if not isinstance(tail, list):
            return nbytes, (), _late("it broke off") if tail is TIMED_OUT else _lost("it broke off")
        for written in dict.fromkeys(tail):
            world.count("store", written.value)
        return nbytes, tuple(tail), None

    def _layer(self, item: int, key: PageKey, layer: int) -> Layer:
        world = self._worker.world
        require(self._holds is None or self._holds(key.hash), "a page is overwritten while it is stored")
        page = content.content(self._model.space, key, loss=self._terms.loss)
        data = page.layer(layer)
        if world.wire_flips():
            return Layer(item, layer, page.sums[layer], flipped(world.rng, data), sound=False)
        return Layer(item, layer, page.sums[layer], data, sound=True)


def _late(detail: str) -> Unavailable:
    return Unavailable(Miss(MissReason.DEADLINE, detail))


def _lost(detail: str) -> Unavailable:
    return Unavailable(Miss(MissReason.SHARD_LOST, detail))
