"""What transport/sessions.py does, as scripts: one load or one store at a shard, from its lease to its end.

A session takes the lease, moves layers frame by frame, renews with each, and gives the lease back only when it has
stopped moving. Revoked, it does not stop at that instant: a copy that is under way is finished first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvcluster.core.codecs import Codec
from kvcluster.core.ids import Attempt, NamespaceId, Tenant
from kvcluster.core.messages import (
    Abort,
    Commit,
    CommitGrant,
    Done,
    PageKey,
    PageSlot,
    Pin,
    PinGrant,
    ReadRequest,
    Refused,
    RefusedKind,
    Renew,
    Reserve,
    Unpin,
    WriteGrant,
    WriteRequest,
    Written,
)
from kvcluster.core.reasons import Loss, Miss
from kvcluster.testing.kernel import MS, SECOND, TIMED_OUT, Promise, Script
from kvcluster.testing.sim.network import Pipe

if TYPE_CHECKING:
    from kvcluster.testing.sim.shard import ShardProcess

SLOW_NS = 300 * MS
"""Between two frames of a slow reader, on average: his lease runs out now and then."""

FINISHED = object()
"""The last thing that either end of a transfer says."""
REVOKED = object()
"""What a session finds in its inbox when its lease was revoked."""


class Layer(NamedTuple):
    """One layer of a page under way. `sound`: no fault has touched it; this and `loss` its receiver does not get to
    know."""

    item: int
    layer: int
    total: int
    data: bytes
    sound: bool
    codec: Codec = Codec.RAW
    loss: Loss = Loss.EXACT


class Transfer(NamedTuple):
    """The opening of a load or store. Its server gives up after `patience_ns`."""

    tenant: Tenant
    request: ReadRequest | WriteRequest
    patience_ns: int


class Session:
    """A lease and who moves its bytes. `writes` says which way; `pages` is what it may touch, None where refused,
    as long as it is `moving`."""

    def __init__(self, attempt: Attempt, namespace: NamespaceId | None, inbox: Pipe | None, *, writes: bool) -> None:
        self.attempt = attempt
        self.namespace = namespace
        self.writes = writes
        self.pages: list[PageSlot | None] = []
        self.revoked = False
        self.moving = True
        self.stored_at: dict[PageKey, int] = {}  # of a copy: when what it is copied from was stored
        self._inbox = inbox

    def revoke(self) -> None:
        self.revoked = True
        if self._inbox is not None:
            self._inbox.arrive(REVOKED)


def read(shard: ShardProcess, opening: Transfer, up: Pipe, down: Pipe) -> Script:
    """One load."""
    request = opening.request
    assert isinstance(request, ReadRequest)
    give_up = shard.now() + opening.patience_ns
    session = Session(request.attempt, request.namespace, up, writes=False)
    if not shard.begin(session):
        down.put(_busy(request.attempt))
        return
    keys = tuple(want.key for want in request.wants)
    granted = Promise()
    shard.submit(
        lambda call: Pin(call, opening.tenant, request.namespace, request.attempt, request.epoch, keys, request.accept),
        lambda reply: _granted(session, granted, reply),
    )
    grant = yield granted, 5 * SECOND
    if isinstance(grant, Refused):
        shard.finish(session)
        down.put(grant)
        return
    if not isinstance(grant, PinGrant):
        shard.finish(session)
        shard.ask_now(lambda call: Unpin(call, request.attempt))
        return
    down.put([page if isinstance(page, Miss) else None for page in grant.pages])
    rng = shard.world.rng
    layers = [
        (item, slot, layer)
        for item, (slot, want) in enumerate(zip(grant.pages, request.wants, strict=True))
        if isinstance(slot, PageSlot)
        for layer in range(want.layer_start, want.layer_stop)
    ]
    size = shard.world.scenario.frame_layers
    # A reader that takes little at a time: what goes meanwhile goes under his eyes.
    slow = shard.world.working and rng.random() < 0.1
    frame_ns = SLOW_NS if slow else shard.world.scenario.frame_ns
    for start in range(0, len(layers), size):
        heard = yield up.next(), int(frame_ns * 2 * rng.random())
        if heard is not TIMED_OUT or session.revoked or shard.now() > give_up or not _renew(shard, request.attempt):
            break
        down.put([shard.load_layer(item, slot, layer) for item, slot, layer in layers[start : start + size]])
    else:
        down.put(FINISHED)
    if session.revoked:
        yield None, rng.randrange(20 * MS)
    shard.finish(session)
    shard.ask_now(lambda call: Unpin(call, request.attempt))


def write(shard: ShardProcess, opening: Transfer, up: Pipe, down: Pipe) -> Script:
    """One store."""
    request = opening.request
    assert isinstance(request, WriteRequest)
    attempt = request.attempt
    give_up = shard.now() + opening.patience_ns
    session = Session(attempt, request.namespace, up, writes=True)
    if not shard.begin(session):
        down.put(_busy(attempt))
        return
    wait_ns = min(request.wait_ns, opening.patience_ns)
    granted = Promise()
    shard.submit(
        lambda call: Reserve(
            call, opening.tenant, request.namespace, attempt, request.epoch, request.pages, wait_ns=wait_ns
        ),
        lambda reply: _granted(session, granted, reply),
    )
    grant = yield granted, wait_ns + 5 * SECOND
    if isinstance(grant, Refused):
        shard.finish(session)
        down.put(grant)
        return
    if isinstance(grant, WriteGrant):
        down.put([page if isinstance(page, Written) else None for page in grant.pages])
        arrived: dict[int, dict[int, int]] = {}
        while True:
            heard = yield up.next(), max(1, give_up - shard.now())
            if not isinstance(heard, list) or session.revoked or not _renew(shard, attempt):
                break
            for layer in heard:
                slot = grant.pages[layer.item]
                assert isinstance(slot, PageSlot), "a worker sent what was not to be sent"
                shard.store_layer(slot, layer)
                arrived.setdefault(layer.item, {})[layer.layer] = layer.total
        if heard is FINISHED and not session.revoked and _renew(shard, attempt):
            session.moving = False
            outcome = _commit(shard, request, grant, arrived)
            shard.finish(session)
            down.put(outcome)
            return
        if session.revoked:
            yield from _last_copy(shard, grant, up)
    shard.finish(session)
    shard.ask_now(lambda call: Abort(call, attempt))


def _granted(session: Session, granted: Promise, reply: object) -> None:
    if isinstance(reply, WriteGrant | PinGrant):
        session.pages = _slots(reply.pages)
    granted.fulfil(reply)


def _slots(pages: Sequence[object]) -> list[PageSlot | None]:
    return [page if isinstance(page, PageSlot) else None for page in pages]


def _commit(
    shard: ShardProcess, request: WriteRequest, grant: WriteGrant, arrived: dict[int, dict[int, int]]
) -> list[Written]:
    """Verifies what lies in the pages now against the writer's checksums, and commits what matches."""
    verified: dict[int, bytes] = {}
    for item, sums in arrived.items():
        slot = grant.pages[item]
        assert isinstance(slot, PageSlot)
        if len(sums) == slot.key.part.layers:
            packed = shard.verify(request.namespace, slot, [sums[layer] for layer in range(len(sums))])
            if packed is not None:
                verified[item] = packed
    reply = shard.ask_now(lambda call: Commit(call, request.attempt, tuple(verified), tuple(verified.values())))
    assert isinstance(reply, CommitGrant)
    committed = dict(zip(verified, reply.pages, strict=True))
    return [
        page if isinstance(page, Written) else committed.get(item, Written.CORRUPT)
        for item, page in enumerate(grant.pages)
    ]


def _last_copy(shard: ShardProcess, grant: WriteGrant, up: Pipe) -> Script:
    """A copy into the pages that was under way when the lease was revoked: it ends when it ends."""
    heard = yield up.next(), shard.world.rng.randrange(20 * MS)
    for layer in heard if isinstance(heard, list) else ():
        slot = grant.pages[layer.item]
        if isinstance(slot, PageSlot):
            shard.store_layer(slot, layer)


def _renew(shard: ShardProcess, attempt: Attempt) -> bool:
    return shard.ask_now(lambda call: Renew(call, attempt)) == Done(True)


def _busy(attempt: Attempt) -> Refused:
    return Refused(RefusedKind.BAD, f"attempt {attempt} is under way already")
