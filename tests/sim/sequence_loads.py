"""How a simulated worker finds and loads the blocks of sequences, as sequences/runner.py does."""

from __future__ import annotations

from collections.abc import Sequence

from kvcluster.core.ids import BlockHash
from kvcluster.core.messages import LoadGrant, Need, PrepareLoad, TicketBody
from kvcluster.core.miss import Loss
from kvcluster.replay.kernel import Script
from kvcluster.sequences.blocks import SequenceBlock
from tests.sim import content
from tests.sim.content import Model
from tests.sim.worker import Worker


def find_prefix(worker: Worker, model: Model, names: Sequence[BlockHash]) -> Script:
    """Returns the loss of each leading block of these that the cluster has."""
    ask = PrepareLoad(worker.attempt(), tuple(names), model.need(), hold=False)
    grant = yield from worker.question(model, ask, worker.now() + worker.world.scenario.patience_ns)
    losses: list[Loss] = []
    for run in grant.runs if isinstance(grant, LoadGrant) else ():
        sources = [source for of_group in run.plan if of_group for source in of_group]
        losses += [max((source.loss for source in sources), default=Loss.EXACT)] * run.count
    return losses


def load_blocks(worker: Worker, public: Model, blocks: Sequence[SequenceBlock]) -> Script:
    """Returns how many leading blocks were loaded. `public` is the model of those that are not private."""
    done, give_up = 0, worker.now() + worker.world.scenario.patience_ns
    while done < len(blocks):
        private = blocks[done].private
        count = next((at for at, block in enumerate(blocks[done:]) if block.private != private), len(blocks) - done)
        names = tuple(block.name for block in blocks[done : done + count] if block.name is not None)
        model = content.PRIVATE[public] if private else public
        got = yield from _load_run(worker, model, names, model.need(max(block.loss for block in blocks)), give_up)
        done += got
        if got < count:
            break
    return done


def _load_run(worker: Worker, model: Model, names: tuple[BlockHash, ...], need: Need, give_up: int) -> Script:
    ticket = worker.attempt()
    grant = yield from worker.question(model, PrepareLoad(ticket, names, need, hold=True), give_up)
    got = 0
    if isinstance(grant, LoadGrant) and grant.blocks:
        body = TicketBody(model.space, ticket, names[: grant.blocks], need, grant.runs)
        loaded = yield from worker.redeem(model, body, give_up)
        got = loaded.blocks
    worker.end_ticket(model, ticket)
    return got
