"""A load as a worker does it: the real plan (transfers/load_plan.py), carried out over the simulated network.

An exchange receives a layer at a time under its ranges, as the client's sink does. Some copies take time: a stop that
arrives meanwhile takes effect when they are done, and an exchange that waits for bytes stops at once or a little later.
"""

from __future__ import annotations

from kvcluster.core.messages import Explain, Explained, ReadRequest, Suspect, TicketBody
from kvcluster.core.miss import Miss, MissReason
from kvcluster.memory import checksum
from kvcluster.replay.kernel import MS, TIMED_OUT, Script
from kvcluster.transfers.load_plan import LoadPlan
from kvcluster.transfers.load_progress import LoadProgress
from kvcluster.transfers.pieces import Piece, each, plan_pieces
from kvcluster.transfers.plan_messages import (
    Answered,
    FindReplicas,
    FinishLoad,
    LoadEffect,
    LoadEvent,
    ReadEnded,
    ReadStopped,
    ReportCorrupt,
    StartRead,
    StopRead,
)
from kvcluster.transport.base import Cancelled, PathLost, Streams, Unavailable
from tests.sim import content
from tests.sim.client_process import ClientProcess
from tests.sim.content import Model
from tests.sim.destination import Destination
from tests.sim.plans import SimulatedPlan
from tests.sim.sessions import FINISHED, Layer
from tests.sim.violation import require

PATHS_LOST = 0.5
"""The share of broken connections after which, as far as the client knows, there is another path to the same shard."""

ON_DEVICE = 0.5
"""The share of exchanges whose reader reads a shard's pool on a GPU in place, if there is one."""

COPY_NS = 2 * MS
"""The longest time to copy and verify one chunk, if it takes any time."""


class Load(SimulatedPlan[LoadEvent, LoadEffect]):
    """One load of a ticket. `done` brings its Loaded."""

    def __init__(self, worker: ClientProcess, model: Model, body: TicketBody, give_up: int) -> None:
        self._worker = worker
        self._model = model
        self._body = body
        self._give_up = give_up
        parts = body.need.parts
        pieces = plan_pieces(body, model.spec, parts)
        self._progress = LoadProgress(body, model.spec, pieces)
        self._destination = Destination(model.spec, each(pieces), self._progress)
        plan = LoadPlan(
            self._progress,
            pieces,
            parts,
            worker.policy,
            streams=lambda shard: Streams(1, 2, 2),
            next_attempt=worker.attempt,
            deadline_ns=give_up,
        )
        super().__init__(worker, plan)
        worker.plan_began()
        self._direct = worker.world.later.random() < 0.5  # bytes are written to their place before they are verified
        self._copying: dict[int, None] = {}
        self._starts: dict[int, StartRead] = {}
        self._stops: dict[int, list[StopRead]] = {}  # stops that wait for the copy under way

    def _perform(self, effect: LoadEffect) -> None:
        worker, world = self._worker, self._worker.world
        match effect:
            case StartRead():
                self._destination.take(effect.exchange, effect.ranges.pieces)
                self._starts[effect.exchange] = effect
                worker.kernel.at(worker.kernel.now, worker, worker.start, self._read(effect))
            case StopRead():
                delay_ns = int(COPY_NS * world.later.random()) if world.later.random() < 0.5 else 0
                worker.kernel.at(worker.kernel.now + delay_ns, worker, self._stop, effect)
            case FindReplicas():
                worker.start(self._ask(effect))
            case ReportCorrupt(shard, keys):
                world.count("suspect", "told")
                world.network.ask(
                    worker,
                    world.shard_at(shard.address),
                    self._model.asks(Suspect(shard.epoch, keys), self._model.space),
                )
            case FinishLoad(loaded, error):
                require(error is None, f"a load ends in an error: {error!r}")
                assert loaded is not None
                self._destination.tell(loaded)
                worker.plan_ended()
                self.done.fulfil(loaded)

    def _stop(self, effect: StopRead) -> None:
        if effect.exchange in self._copying:
            self._stops.setdefault(effect.exchange, []).append(effect)
            return
        ranges = self._starts[effect.exchange].ranges
        ranges.stop(effect.items)
        items = range(len(ranges.pieces)) if effect.items is None else effect.items
        self._destination.give_back(effect.exchange, [ranges.pieces[item] for item in items])
        self._worker.world.count("load", "exchange stopped")
        self._deliver(ReadStopped(effect.exchange, effect.items))

    def _ask(self, effect: FindReplicas) -> Script:
        model, answers = self._model, list[Explained]()
        for question in effect.questions:
            told = yield from self._worker.question(
                model,
                Explain(question.hashes, question.need),
                effect.until_ns,
            )
            if not isinstance(told, Explained):
                break
            answers.append(told)
        self._worker.world.count("load", "asked elsewhere")
        self._deliver(Answered(effect.number, answers))

    # ----------------------------------------------------------------------------------------- exchanges

    def _read(self, start: StartRead) -> Script:
        outcome, error = yield from self._exchange(start)
        self._destination.give_back(start.exchange, start.ranges.pieces)
        self._deliver(ReadEnded(start.exchange, outcome, error))

    def _exchange(self, start: StartRead) -> Script:
        """Returns the outcome for each piece, and no error; or an error."""
        worker, ranges = self._worker, start.ranges
        wants = tuple(piece.want for piece in ranges.pieces)
        # In a world whose shards have pools on GPUs, readers that may have opened them.
        here = worker.world.scenario.config.shard.gpu_bytes > 0 and worker.world.later.random() < ON_DEVICE
        request = ReadRequest(self._model.space, start.attempt, start.shard.epoch, wants, start.accept, here)
        opened = yield from worker.open(self._model, start.shard, request, self._give_up)
        if isinstance(opened, Exception):
            return (), opened
        line, head = opened
        error: Exception | None = None
        heard: object = None
        while error is None:
            heard = yield line.down.next(), max(1, self._give_up - worker.now())
            if not isinstance(heard, list):
                error = None if heard is FINISHED else self._broken(heard)
                break
            for layer in heard:
                try:
                    yield from self._take(start, ranges.pieces[layer.item], layer)
                except Cancelled as cancelled:
                    error = cancelled
                    break
        if heard is not FINISHED or worker.world.rng.random() < 0.1:
            line.up.hang_up()
        worker.world.network.close(line)
        return (() if error else tuple(head)), error

    def _broken(self, heard: object) -> Unavailable:
        """Returns the error of a broken connection: the loss of one path to the shard, or of the last one."""
        if heard is TIMED_OUT:
            return Unavailable(Miss(MissReason.DEADLINE, "it broke off"))
        lost = self._worker.world.later.random() < PATHS_LOST
        return (PathLost if lost else Unavailable)(Miss(MissReason.SHARD_LOST, "it broke off"))

    def _take(self, start: StartRead, piece: Piece, layer: Layer) -> Script:
        """Copies one layer to its place."""
        worker, ranges, later = self._worker, start.ranges, self._worker.world.later
        if not ranges.may_write(layer.item, layer.layer, worker.now()):
            return
        key = piece.want.key
        identity = content.identity(self._model.space, key, layer.codec)
        right = checksum.layer_sum(identity, layer.layer, layer.data) == layer.total
        if self._direct and piece.fills == piece.rect:
            self._destination.write(start.exchange, piece, layer.layer, right=right)
        if later.random() < 0.1:
            self._copying[start.exchange] = None
            yield None, int(COPY_NS * later.random())
            del self._copying[start.exchange]
        if right:
            worker.world.oracle.accepted(self._model.space, key, layer, self._body.need.accept)
            self._destination.came(layer.loss)
            self._destination.write(start.exchange, piece, layer.layer, right=True)
            ranges.arrived(layer.item, layer.layer + 1)
            layers = piece.model_layers(self._model.spec)[layer.layer - piece.want.layer_start :][:1]
            if self._progress.arrived({layers: [piece.block]}, len(layer.data)):
                self._destination.check_layers(layers)
        else:
            worker.world.oracle.refused(key, layer)
            ranges.did_not_match(layer.item, layer.layer, layer.layer + 1)
        for stop in self._stops.pop(start.exchange, ()):
            self._stop(stop)
