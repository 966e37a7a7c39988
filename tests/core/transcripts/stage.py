"""Runs a transcript: real cores in processes of testing/kernel.py, driven by the script.

Mail arrives at once and in order, pages are read and fetched in no time, and ticks come when they are due while time
passes. Time passes in `wait` and `stall` only.

    start c1 [epoch=10] [expected=1] [SETTING=...]      start s1 [pages=4] [epoch=1] [SETTING=...]
    stop c1    stall s1 3000    wait 500    lost disk    at once; a process stands still; time passes; tombstones go
    quietly COMMAND                                     the same, and nothing is told of it

    w1 load a1..a3 | store | explain | pin | unpin      a worker asks the coordinator. `#2` names an attempt, which is
       | renew | end | purge | drain s1 | status        else a new one or, of what ends one, the last
    w1 table q1 a1 p1 [keep=0] [private=1]              a worker tells what became of a sequence: how many blocks it
       [of=q0] [closed=1]                               keeps, and those that follow; or nothing, to renew its lease
    w1 at s1 pin a1 | unpin | reserve | commit          a worker asks a shard
       | abort | renew | flush | suspect
    w1 stores a1 a2    w1 loads a1 a2                   all of it: prepare, move, end

    s1 rots a1           a page's bytes are no longer what was committed
    s1 reaches c2        which coordinator its mail goes to: the last that was started, if nothing is said
    s1 mute              its mail stays where it is, until `s1 delivers`, `s1 delivers unheard` (the answer is lost),
                         `s1 loses`, or `s1 repeats` what was delivered last; `s1 speaks` ends that

A block is a letter and a number; `a1..a3` are three. A worker that `uses private` stores private pages; a puppet's `p1`
is one. With room everywhere `a` goes to s1, `b` to s2, `d` to s3. A shard
without a core is a puppet that says what the script says (`s1 says +a1 -a2`); one without a coordinator hears what the
script says (`s1 hears acked=1`). Mail that tells nothing new is not told. A worker attaches by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvcluster.config import CoordinatorConfig, ShardConfig
from kvcluster.core.coordinator.coordinator import Coordinator
from kvcluster.core.ids import CLUSTER, Attempt, BlockHash, Epoch, NamespaceId, ShardId, Tenant
from kvcluster.core.invariants import check_coordinator, check_shard
from kvcluster.core.messages import (
    Abort,
    Commit,
    Effect,
    Fetch,
    Inventory,
    Leave,
    PageKey,
    PageSlot,
    Persist,
    Pin,
    PinGrant,
    Reply,
    Report,
    ReportAck,
    ReportAnswered,
    ReportFailed,
    Revoke,
    Send,
    ShardAddress,
    Tick,
    Tombstone,
    Unpin,
    Verified,
    Verify,
)
from kvcluster.core.shard.shard import Shard
from kvcluster.replay.core_stepper import CoreProcess, build_request
from kvcluster.replay.kernel import MS, Clock, Kernel
from tests.core.transcripts.names import PAGE, TENANT, Names
from tests.core.transcripts.telling import NO_NEWS, Teller

MEMBERSHIP_MS = 2_000
COORDINATOR: dict[str, Any] = {
    "ticket_ttl_ms": 3_000,
    "hold_ms": 1_000,
    "run_blocks": 4,
    "rebuild_grace_ms": 1_000,
    "sequence_ttl_ms": 3_000,
    "private_grace_ms": 4_000,
    "low_free": 0.0,
    "high_free": 0.0,
}
SHARD: dict[str, Any] = {"lease_ttl_ms": 2_000, "scrub_bytes": 0}
"""Settings of a transcript that names none: short times, and no room is made and nothing read again unasked."""


class StagedCore(CoreProcess):
    """A process that runs a coordinator or a shard. The stage performs its effects."""

    def __init__(self, stage: Stage, name: str, core: Coordinator | Shard) -> None:
        super().__init__(stage.kernel, name, 0, Clock(0, 0), core, stall_ns=0)
        self._stage = stage

    def perform(self, effect: Effect) -> None:
        self._stage.perform(self.name, effect)


class StagedCoordinator(StagedCore):
    core: Coordinator


class StagedShard(StagedCore):
    """A shard incarnation, and its mail."""

    core: Shard

    def __init__(self, stage: Stage, name: str, core: Shard, address: ShardAddress) -> None:
        super().__init__(stage, name, core)
        self.address = address
        self.letter: Report | Inventory | None = None
        self.delivered: Report | Inventory | None = None
        self.reaches: str | None = None
        self.mute = False
        self.told: tuple[object, object] = (NO_NEWS, None)
        self.rotten: dict[BlockHash, None] = {}


class Stage:
    """The processes of one transcript, on simulated time."""

    def __init__(self) -> None:
        self.names = Names()
        self.tell = Teller(self.names)
        self.kernel = Kernel()
        self.coordinators: dict[str, StagedCoordinator] = {}
        self.shards: dict[str, StagedShard] = {}
        self.disk: tuple[Tombstone, ...] = ()
        self._alone = True  # until there is a coordinator, whose part the script plays
        self._lines: list[str] = []
        self._clock = False

    # ------------------------------------------------------------------------------------ what is told

    def say(self, line: str) -> None:
        """A line of the transcript."""
        self._lines.append(f"at {self.kernel.now // MS}: {line}" if self._clock else line)

    def said(self) -> list[str]:
        """Returns the lines since the last call."""
        lines, self._lines = self._lines, []
        return lines

    # ------------------------------------------------------------------------------------- who is there

    def start_coordinator(self, name: str, *, epoch: int, expected: int, **settings: Any) -> None:
        self._alone = False
        core = Coordinator(
            Epoch(epoch),
            CoordinatorConfig(**{**COORDINATOR, **settings}),
            membership_ttl_ms=MEMBERSHIP_MS,
            expected=expected,
            now=self.kernel.now,
            tombstones=self.disk,
        )
        self.coordinators[name] = StagedCoordinator(self, name, core)
        self.coordinators[name].start_driver()

    def start_shard(self, name: str, *, epoch: int, pages: int, **settings: Any) -> None:
        """A new incarnation. One of that name that is there already lives on as `NAME-old`."""
        if name in self.shards:
            old = self.shards.pop(name)
            old.name = f"{name}-old"
            self.shards[old.name] = old
        config = ShardConfig(ram_bytes=pages * PAGE, extent_bytes=PAGE, **{**SHARD, **settings})
        shard, at = ShardId(name), Epoch(epoch)
        core = Shard(shard, at, config, membership_ttl_ms=MEMBERSHIP_MS, address=f"{name}@{epoch}", host=name)
        self.names.shard(shard, at)
        self.shards[name] = StagedShard(self, name, core, ShardAddress(shard, at, f"{name}@{epoch}", name))
        self.shards[name].step(Tick())

    def stop(self, name: str) -> None:
        """The process is gone, without a message."""
        self.process(name).kill()
        (self.coordinators if name in self.coordinators else self.shards).pop(name)

    def process(self, name: str) -> StagedCoordinator | StagedShard:
        """The coordinator or the shard of that name."""
        return self.coordinators[name] if name in self.coordinators else self.shards[name]

    def latest(self) -> str:
        """The coordinator that was started last."""
        return next(reversed(self.coordinators), "no coordinator")

    # ------------------------------------------------------------------------------------------- steps

    def ask(
        self,
        name: str,
        asker: str,
        question: Any,
        blocks: Sequence[BlockHash] = (),
        *,
        tenant: Tenant = TENANT,
        namespace: NamespaceId | None = None,
        told: bool = True,
    ) -> Reply | None:
        """Asks a core and tells the answer when it comes; the reply, where that is at once."""
        process = self.process(name)
        replies: list[Reply] = []

        def answered(reply: Reply) -> None:
            replies.append(reply)
            if told and asker:
                self.say(f"{process.name} -> {asker}: {self.tell.reply(question, blocks, reply)}")

        process.submit(build_request(question, tenant, namespace), answered)
        return replies[0] if replies else None

    def settle(self) -> None:
        """Does all that follows at this instant: mail is carried, pages are read and fetched."""
        self.kernel.settle()
        for coordinator in self.coordinators.values():
            check_coordinator(coordinator.core)
        for shard in self.shards.values():
            check_shard(shard.core)

    def wait(self, passed_ms: int) -> None:
        """Lets time pass. Events meanwhile are written with their time."""
        self._clock = True
        self.kernel.run(self.kernel.now + passed_ms * MS)
        self.settle()
        self._clock = False

    def stall(self, name: str, late_ms: int) -> None:
        """A process stands still. What is sent to it meanwhile arrives when it goes on."""
        process = self.process(name)
        process.stop()
        self.kernel.run(self.kernel.now + late_ms * MS)
        process.resume()

    def perform(self, name: str, effect: Effect) -> None:
        match effect:
            case Revoke(attempt, _):
                self.say(f"{name}: the lease of {self.names.attempt(attempt)} is revoked")
            case Leave(reason, for_good):
                self.say(f"{name} leaves{' permanently' if for_good else ''}: {reason}")
                self._soon(name, lambda: self.stop(name))
            case Persist(tombstones):
                self.disk = tombstones
                self.say(f"{name} keeps on disk: {'; '.join(map(self.tell.stone, tombstones))}")
            case Send(message):
                self.shards[name].letter = message
                self._soon(name, lambda: self._carry(name))
            case Verify(attempt, _, slots):
                self.say(f"{name} reads again: {self.tell.blocks(slots)}")
                self._soon(name, lambda: self._verified(name, attempt, slots))
            case Fetch():
                self._soon(name, lambda: self._fetch(name, effect))

    def _soon(self, name: str, act: Callable[[], None]) -> None:
        """Has a process do this at this instant, after what was to be done before."""
        self.kernel.at(self.kernel.now, self.process(name), act)

    # -------------------------------------------------------------------------------------------- mail

    def _carry(self, name: str) -> None:
        """The mail of a shard, unless it is mute."""
        shard = self.shards[name]
        if shard.letter is None or shard.mute:
            return
        coordinator = self.coordinators.get(shard.reaches or self.latest())
        if self._alone:
            self.say(f"{name} -> coordinator: {self.tell.letter(shard.letter)}")
        elif coordinator is None:
            self.lose(name)
        elif coordinator.stopped:
            self._soon(coordinator.name, lambda: self._carry(name))
        else:
            self.deliver(name)

    def deliver(self, name: str, *, heard: bool = True) -> None:
        """A shard's message arrives, and so does the answer, where that is `heard`."""
        shard = self.shards[name]
        letter, shard.letter = shard.letter, None
        assert letter is not None, "there is no mail"
        shard.delivered = letter
        ack = self._post(name, letter)
        if heard:
            shard.step(ReportAnswered(ack))
        else:
            self.say(f"{name} does not hear the answer")
            shard.step(ReportFailed())

    def lose(self, name: str) -> None:
        self.shards[name].letter = None
        self.shards[name].step(ReportFailed())

    def repeat(self, name: str) -> None:
        """The network delivers what it has delivered before; no caller waits for the answer."""
        letter = self.shards[name].delivered
        assert letter is not None
        self._post(name, letter)

    def _post(self, name: str, letter: Report | Inventory) -> ReportAck:
        to = self.shards[name].reaches or self.latest()
        place = len(self._lines)
        ack = self.ask(to, "", letter, tenant=CLUSTER)
        assert isinstance(ack, ReportAck)
        later, self._lines[place:] = self._lines[place:], []
        said, heard = self.tell.substance(letter), self.tell.substance(ack)
        before = self.shards[name].told
        news = isinstance(letter, Inventory) or letter.events or said != before[0]
        if news or ack.inventory or ack.leave or ack.epoch != letter.coordinator:
            news = True
            self.say(f"{name} -> {to}: {self.tell.letter(letter)}")
        self._lines += later
        if news or heard != before[1]:
            self.say(f"{to} -> {name}: {self.tell.ack(ack)}")
        self.shards[name].told = (said, heard)
        return ack

    # ------------------------------------------------------------------------------------ what shells do

    def _verified(self, name: str, attempt: Attempt, slots: Sequence[PageSlot]) -> None:
        shard = self.shards[name]
        corrupt = tuple(at for at, slot in enumerate(slots) if slot.key.hash in shard.rotten)
        self.say(f"{name} finds corrupt: {self.tell.blocks([slots[at] for at in corrupt])}")
        shard.step(Verified(attempt, corrupt))

    def _fetch(self, name: str, fetch: Fetch) -> None:
        """Pages go from shard to shard, as a worker's would; what is rotten or gone does not arrive."""
        source = fetch.source.shard
        self.say(f"{name} fetches from {source}: {self.tell.blocks(fetch.slots)}")
        arrived = []
        if source in self.shards:
            asker, keys = self.names.attempt(fetch.attempt), [slot.key for slot in fetch.slots]
            pinned = self.shard_pin(source, asker, fetch.attempt, fetch.namespace, keys)
            rotten = self.shards[source].rotten
            arrived = [at for at, slot in enumerate(pinned) if slot is not None and slot.key.hash not in rotten]
            self.ask(source, asker, Unpin(fetch.attempt), tenant=CLUSTER, told=False)
        message = Commit(fetch.attempt, tuple(arrived), (b"sums",) * len(arrived))
        end = message if arrived else Abort(fetch.attempt)
        self.say(f"{name} keeps: {self.tell.blocks([fetch.slots[at] for at in arrived])}")
        self.ask(name, "", end, tenant=CLUSTER, told=False)

    def shard_pin(
        self, shard: str, asker: str, attempt: Attempt, namespace: NamespaceId, keys: Sequence[PageKey]
    ) -> list[PageSlot | None]:
        """One shard asks another for pages, with the cluster's own credential."""
        pin = Pin(attempt, self.shards[shard].core.epoch, tuple(keys))
        grant = self.ask(shard, asker, pin, [key.hash for key in keys], tenant=CLUSTER, namespace=namespace)
        assert isinstance(grant, PinGrant)
        return [page if isinstance(page, PageSlot) else None for page in grant.pages]
