"""The requests of engines: prompts that share a system prompt, conversations that grow, and occasional other calls.

Prompts are drawn unevenly, so that some are hot; a conversation is requested again, longer, by any worker of its
tenant. Each slot of a worker does one thing after another until the world says that work is over.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import accumulate
from typing import Protocol

from kvcluster.core.ids import BlockHash, ShardId
from kvcluster.core.messages import (
    BlocksPinned,
    CoordinatorQuestion,
    Done,
    Drain,
    EngineInfo,
    Explain,
    Explained,
    Flush,
    GetStatus,
    Pin,
    PinBlocks,
    PrepareLoad,
    Purge,
    Purged,
    Refused,
    Registered,
    RegisterEngine,
    Siblings,
    SiblingSpecs,
    Status,
    UnpinBlocks,
)
from kvcluster.core.miss import Loss
from kvcluster.replay.core_stepper import build_request
from kvcluster.replay.kernel import MS, Script
from tests.sim import content
from tests.sim.content import Model
from tests.sim.shard import ShardProcess
from tests.sim.worker import Worker, WorkerSurroundings

CONVERSATIONS = 5
HALVES = 0.7
"""The share of stores in halves, in a scenario with ranks that have half of the heads each."""

REDEEM_NS = 10 * MS
"""The mean time between two tickets of a redeemer."""


class EngineSurroundings(WorkerSurroundings, Protocol):
    """The cluster as engines use it. `names` are the shards that have not left permanently, `shards` has the newest
    process of each, and `told_to_go` are those that an operator has drained."""

    models: list[Model]
    names: list[ShardId]
    shards: dict[ShardId, ShardProcess]
    told_to_go: dict[ShardId, None]
    stranger_rng: random.Random
    grant_rng: random.Random
    train_rng: random.Random


Errand = Callable[[EngineSurroundings, Worker], Script]


def slot(world: EngineSurroundings, worker: Worker) -> Script:
    """Runs one random errand after another."""
    rng = world.rng
    while world.working:
        yield None, int(2 * world.scenario.think_ns * rng.random())
        if world.working:
            name = rng.choices(_NAMES, cum_weights=_WEIGHTS)[0]
            world.journal.add((world.kernel.now, worker.name, name, ()))
            yield from _ERRANDS[name][1](world, worker)


def redeemer(world: EngineSurroundings, worker: Worker) -> Script:
    """Redeems earlier tickets, as another process of the same engine does, while no coordinator answers.

    It begins when the coordinator has not answered for a quarter of the shards' own term, and stops a quarter of a term
    after the term has passed. The end of the term is a critical moment: a shard that grants leases after its term does
    so then.
    """
    term_ns = world.scenario.config.membership_ttl_ms * MS
    first, last = term_ns // 4, term_ns * 5 // 4
    while world.working:
        silent_ns = worker.unanswered_ns()
        soonest = first - silent_ns if silent_ns <= first else 0 if silent_ns < last else first
        yield None, soonest + int(2 * REDEEM_NS * world.rng.random())
        if world.working:
            silent_ns = worker.unanswered_ns()
            if first < silent_ns < last:
                yield from _redeem(world, worker)


def stranger(world: EngineSurroundings, worker: Worker) -> Script:
    """Asks coordinators and shards for blocks of another tenant, by the names that it could know only from that one.
    The oracles judge the answers."""
    rng = world.stranger_rng
    while world.working:
        yield None, int(400 * MS * rng.random())
        shard = world.shards[rng.choice(world.names)]
        if not shard.ready:
            continue
        space, key, _ = rng.choice(list(shard.ready))
        model = content.BY_SPACE[space]
        tenant = content.RED if model.tenant == content.BLUE else content.BLUE
        pin = Pin(worker.attempt(), shard.core.epoch, (key,), Loss.Q4)
        prepare = PrepareLoad(worker.attempt(), (key.hash,), model.need(), hold=True)
        for process, question in ((shard, pin), (world.coordinator_seen_by(worker), prepare)):
            promise = world.network.ask(worker, process, build_request(question, tenant, space))
            reply = yield promise, 200 * MS
            world.count("stranger", "refused" if isinstance(reply, Refused) else "no answer")


def trainer(world: EngineSurroundings, worker: Worker) -> Script:
    """Has one of two engines of a tenant register with one of the versions of their run. What workers ask for does not
    depend on it: they go on asking for every version."""
    rng = world.train_rng
    while world.working:
        yield None, int(800 * MS * rng.random())
        if world.working:
            model = rng.choice(list(content.TRAINED.values()))
            info = EngineInfo(f"engine-{rng.randrange(2)}", "sim", model.spec.model, model.spec.weights)
            give_up = worker.now() + world.scenario.patience_ns
            reply = yield from worker.ask(model.asks(RegisterEngine(info)), give_up)
            world.count("engine", "registered" if isinstance(reply, Registered) else "no answer")


def conversation(world: EngineSurroundings) -> tuple[Model, tuple[BlockHash, ...]]:
    """Draws a model and the first blocks of one of its conversations."""
    rng = world.rng
    model = world.models[int(len(world.models) * rng.random() ** 2)]
    if world.scenario.grants and world.grant_rng.random() < world.scenario.grants:
        model = content.read_by_another(model)
    prompt = int(world.scenario.prompts * rng.random() ** 2)
    number = int(CONVERSATIONS * rng.random() ** 1.5)
    return model, content.chain(model, prompt, number)[: rng.randint(1, content.LONGEST)]


def _request(world: EngineSurroundings, worker: Worker) -> Script:
    """What an engine does with a prompt: loads what is cached, computes the rest, stores it."""
    rng = world.rng
    model, hashes = conversation(world)
    kept_ns = int(1_500 * MS * rng.random()) if rng.random() < 0.2 else 0
    accept = rng.choice((Loss.EXACT, Loss.Q8, Loss.Q4, Loss.Q4))
    half = world.scenario.halves and world.later.random() < world.scenario.half_needs
    need = model.need(accept, half=half)
    loaded = yield from worker.load(model, hashes, need, wait_ns=kept_ns)
    if model.reader is not None:
        world.count("reader", "hit" if loaded else "miss")
    elif loaded < len(hashes) and rng.random() < 0.9:
        # Ranks of several engines: one engine writes in two halves what another writes whole.
        halves = world.scenario.halves and world.later.random() < HALVES
        parts = model.first_half() if half else model.halves() if halves else model.whole()
        wait_ns = rng.choice((0, 200 * MS, 600 * MS))
        yield from worker.store(model, hashes, loaded, parts, wait_ns)


def _redeem(world: EngineSurroundings, worker: Worker) -> Script:
    """Redeems a ticket that another process prepared, perhaps long ago."""
    if world.grants:
        model, body = world.rng.choice(world.grants[-8:])
        loaded = yield from worker.redeem(model, body, worker.now() + world.scenario.patience_ns)
        world.count("redeem", "part failed" if loaded.miss is not None else "hit")


def _question(
    name: str,
    make: Callable[[EngineSurroundings, Worker, Model, tuple[BlockHash, ...]], CoordinatorQuestion],
    reply: type,
    outcome: str,
) -> Errand:
    """Returns an errand that asks the coordinator one question about a conversation, and counts it as `outcome` if the
    answer is a `reply`."""

    def ask(world: EngineSurroundings, worker: Worker) -> Script:
        model, hashes = conversation(world)
        question = make(world, worker, model, hashes)
        answer = yield from worker.question(model, question, worker.now() + world.scenario.patience_ns)
        answered = answer is not None and isinstance(answer, reply)
        world.count(name, outcome if answered else "no answer")

    return ask


def _pin(world: EngineSurroundings, worker: Worker, model: Model, hashes: tuple[BlockHash, ...]) -> PinBlocks:
    rng = world.rng
    return PinBlocks(hashes, rng.choice((100, 500, 1_500)) * MS, rng.choice((1, 1, 2, 3)))


def _status(world: EngineSurroundings, worker: Worker) -> Script:
    reply = yield from worker.ask(build_request(GetStatus(), content.RED), worker.now() + world.scenario.patience_ns)
    world.count("status", "answered" if isinstance(reply, Status) else "no answer")


def _flush(world: EngineSurroundings, worker: Worker) -> Script:
    """Asks a shard whether the coordinator knows everything stored so far."""
    shard = world.shards[world.rng.choice(world.names)]
    wait_ns = world.scenario.patience_ns // 2
    promise = world.network.ask(worker, shard, build_request(Flush(wait_ns), content.RED))
    reply = yield promise, world.scenario.patience_ns
    world.count("flush", "all told" if reply == Done(True) else "not all told" if reply == Done(False) else "no answer")


def _purge(world: EngineSurroundings, worker: Worker) -> Script:
    """Purges one set of weights, or everything of a tenant."""
    model, _ = conversation(world)
    weights = model.spec.weights if world.rng.random() < 0.7 else None
    purge, give_up = Purge(weights=weights), worker.now() + world.scenario.patience_ns
    reply = yield from worker.ask(model.asks(purge), give_up)
    world.count("purge", "purged" if isinstance(reply, Purged) else "no answer")


def _drain(world: EngineSurroundings, worker: Worker) -> Script:
    """An operator drains a shard, but not the last one that is not drained."""
    staying = [name for name in world.names if name not in world.told_to_go]
    if len(staying) > 1:
        shard = world.rng.choice(staying)
        world.told_to_go[shard] = None
        reply = yield from worker.ask(
            build_request(Drain(shard), content.RED), worker.now() + world.scenario.patience_ns
        )
        world.count("drain", "begun" if reply == Done(True) else "not known")


_ERRANDS: dict[str, tuple[int, Errand]] = {
    "request": (100, _request),
    "redeem": (8, _redeem),
    "lookup": (
        5,
        _question(
            "lookup",
            lambda _, worker, model, hashes: PrepareLoad(worker.attempt(), hashes, model.need(), hold=False),
            object,
            "answered",
        ),
    ),
    "pin": (6, _question("pin", _pin, BlocksPinned, "pinned")),
    "unpin": (2, _question("unpin", lambda _, worker, model, hashes: UnpinBlocks(hashes), BlocksPinned, "unpinned")),
    "explain": (
        3,
        _question("explain", lambda _, worker, model, hashes: Explain(hashes, model.need()), Explained, "explained"),
    ),
    "flush": (4, _flush),
    "status": (1, _status),
    "siblings": (1, _question("siblings", lambda *_: Siblings(), SiblingSpecs, "answered")),
    "purge": (2, _purge),
    "drain": (1, _drain),
}
"""What engines do, and how often beside the others."""
_NAMES = list(_ERRANDS)
_WEIGHTS = list(accumulate(weight for weight, _ in _ERRANDS.values()))
