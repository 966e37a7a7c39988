"""Where a transcript is played: real cores under a clock and a mail that the script moves.

    start c1 [epoch=10] [expected=1] [SETTING=...]      start s1 [pages=4] [epoch=1] [SETTING=...]
    stop c1    stall s1 3000    wait 500    lost disk    at once; a process stood still; time passes; tombstones go
    quietly COMMAND                                     the same, and nothing is told of it

    w1 load a1..a3 | store | explain | pin | unpin      a worker asks the coordinator. `#2` names an attempt, which is
       | renew | end | purge | drain s1 | status        else a new one or, of what ends one, the last
    w1 at s1 pin a1 | unpin | reserve | commit          a worker asks a shard
       | abort | renew | flush | suspect
    w1 stores a1 a2    w1 loads a1 a2                   all of it: prepare, move, end

    s1 rots a1           a page's bytes are no longer what was committed
    s1 reaches c2        which coordinator its mail goes to: the last that was started, if nothing is said
    s1 mute              its mail stays where it is, until `s1 delivers`, `s1 delivers unheard` (the answer is lost),
                         `s1 loses`, or `s1 repeats` what was delivered last; `s1 speaks` ends that

A block is a letter and a number; `a1..a3` are three. With room everywhere `a` goes to s1, `b` to s2, `d` to s3. A shard
without a core is a puppet that says what the script says (`s1 says +a1 -a2`); one without a coordinator hears what the
script says (`s1 hears acked=1`). Mail that tells nothing new is not told. A worker attaches by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from kvcluster.config import CoordinatorConfig, ShardConfig
from kvcluster.core.coordinator import Coordinator
from kvcluster.core.ids import CLUSTER, Attempt, BlockHash, CallId, Epoch, NamespaceId, ShardId
from kvcluster.core.invariants import check_coordinator, check_shard
from kvcluster.core.messages import (
    Abort,
    Answer,
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
    Stalled,
    Tick,
    Tombstone,
    Unpin,
    Verified,
    Verify,
)
from kvcluster.core.shard import Shard
from tests.core.transcripts.names import MS, PAGE, Names
from tests.core.transcripts.telling import NO_NEWS, Teller

MEMBERSHIP_MS = 2_000
COORDINATOR: dict[str, Any] = {
    "ticket_ttl_ms": 3_000,
    "hold_ms": 1_000,
    "run_blocks": 4,
    "rebuild_grace_ms": 1_000,
    "low_free": 0.0,
    "high_free": 0.0,
}
SHARD: dict[str, Any] = {"lease_ttl_ms": 2_000, "scrub_bytes": 0}
"""Settings of a transcript that names none: short times, and no room is made and nothing read again unasked."""

Core = Coordinator | Shard


class Box:
    """A shard incarnation, and its mail."""

    def __init__(self, core: Shard, address: ShardAddress) -> None:
        self.core = core
        self.address = address
        self.letter: Report | Inventory | None = None
        self.delivered: Report | Inventory | None = None
        self.reaches: str | None = None
        self.mute = False
        self.told: tuple[object, object] = (NO_NEWS, None)
        self.rotten: dict[BlockHash, None] = {}


class Stage:
    """The cores of one transcript. `line` is what came of the last command."""

    def __init__(self) -> None:
        self.names = Names()
        self.tell = Teller(self.names)
        self.now = 0
        self.coordinators: dict[str, Coordinator] = {}
        self.boxes: dict[str, Box] = {}
        self.disk: tuple[Tombstone, ...] = ()
        self._alone = True  # until there is a coordinator, whose part the script plays
        self._calls = 0
        self._asked: dict[CallId, tuple[str, object, Sequence[BlockHash]]] = {}
        self._todo: deque[Callable[[], None]] = deque()
        self._lines: list[str] = []
        self._clock = False

    # ------------------------------------------------------------------------------------ what is told

    def say(self, line: str) -> None:
        """A line of the transcript."""
        self._lines.append(f"at {self.now // MS}: {line}" if self._clock else line)

    def said(self) -> list[str]:
        """The lines since the last time."""
        lines, self._lines = self._lines, []
        return lines

    # ------------------------------------------------------------------------------------- who is there

    def start_coordinator(self, name: str, *, epoch: int, expected: int, **settings: Any) -> None:
        self._alone = False
        config = CoordinatorConfig(**{**COORDINATOR, **settings})
        self.coordinators[name] = Coordinator(
            Epoch(epoch),
            config,
            membership_ttl_ms=MEMBERSHIP_MS,
            expected=expected,
            now=self.now,
            tombstones=self.disk,
        )

    def start_shard(self, name: str, *, epoch: int, pages: int, **settings: Any) -> None:
        """A new incarnation. One of that name that is there already lives on as `NAME-old`."""
        if name in self.boxes:
            self.boxes[f"{name}-old"] = self.boxes.pop(name)
        config = ShardConfig(device_bytes=pages * PAGE, extent_bytes=PAGE, **{**SHARD, **settings})
        shard, at = ShardId(name), Epoch(epoch)
        core = Shard(shard, at, config, membership_ttl_ms=MEMBERSHIP_MS, address=f"{name}@{epoch}", host=name)
        self.names.shard(shard, at)
        self.boxes[name] = Box(core, ShardAddress(shard, at, f"{name}@{epoch}", name))
        self.step(name, Tick())

    def stop(self, name: str) -> None:
        """It is gone, without a word."""
        (self.coordinators if name in self.coordinators else self.boxes).pop(name)

    def core(self, name: str) -> Core:
        return self.coordinators[name] if name in self.coordinators else self.boxes[name].core

    def latest(self) -> str:
        """The coordinator that was started last."""
        return next(reversed(self.coordinators), "nobody")

    # ------------------------------------------------------------------------------------------- steps

    def call(self, asker: str, message: object, blocks: Sequence[BlockHash]) -> CallId:
        """A number for a question, and who wants the answer."""
        self._calls += 1
        call = CallId(self._calls)
        self._asked[call] = (asker, message, blocks)
        return call

    def ask(
        self, name: str, asker: str, message: Any, blocks: Sequence[BlockHash] = (), *, told: bool = True
    ) -> Reply | None:
        """Asks a core; the reply, where it comes at once."""
        call = self.call(asker if told else "", message, blocks)
        effects = self.step(name, replace(message, call=call))
        return next((effect.reply for effect in effects if isinstance(effect, Answer) and effect.call == call), None)

    def step(self, name: str, message: Any) -> list[Effect]:
        """Steps a core and does what it says."""
        core = self.core(name)
        effects: list[Effect] = core.step(message, self.now)
        for effect in effects:
            self._perform(name, effect)
        return effects

    def settle(self) -> None:
        """Does all that follows: mail is carried, pages are read and fetched."""
        for _ in range(10_000):
            if not self._todo:
                break
            self._todo.popleft()()
        else:
            raise AssertionError("it goes on without end")
        for coordinator in self.coordinators.values():
            check_coordinator(coordinator)
        for box in self.boxes.values():
            check_shard(box.core)

    def wait(self, passed_ms: int) -> None:
        """Time passes. What happens meanwhile is told with its time."""
        until = self.now + passed_ms * MS
        self._clock = True
        for _ in range(10_000):
            due = [(at, name) for name in self._everybody() if (at := self.core(name).next_deadline()) is not None]
            at, name = min(due, default=(until + 1, ""))
            if at > until:
                break
            self.now = max(self.now, at)
            self.step(name, Tick())
            self.settle()
        else:
            raise AssertionError("ticks without end")
        self.now = until
        self._clock = False

    def stall(self, name: str, late_ms: int) -> None:
        """A process stood still, and says so to its core before anything else."""
        self.now += late_ms * MS
        self.step(name, Stalled(late_ms * MS))

    def _everybody(self) -> list[str]:
        return [*self.coordinators, *self.boxes]

    def _perform(self, name: str, effect: Effect) -> None:
        match effect:
            case Answer(call, reply):
                asker, question, blocks = self._asked.pop(call)
                if asker:
                    self.say(f"{name} -> {asker}: {self.tell.reply(question, blocks, reply)}")
            case Revoke(attempt):
                self.say(f"{name}: the lease of {self.names.attempt(attempt)} is revoked")
            case Leave(reason, for_good):
                self.say(f"{name} leaves{' for good' if for_good else ''}: {reason}")
                self._todo.append(lambda: self.stop(name))
            case Persist(tombstones):
                self.disk = tombstones
                self.say(f"{name} keeps on disk: {'; '.join(map(self.tell.stone, tombstones))}")
            case Send(message):
                self.boxes[name].letter = message
                self._todo.append(lambda: self._carry(name))
            case Verify(attempt, _, slots):
                self.say(f"{name} reads again: {self.tell.blocks(slots)}")
                self._todo.append(lambda: self._verified(name, attempt, slots))
            case Fetch():
                self._todo.append(lambda: self._fetch(name, effect))

    # -------------------------------------------------------------------------------------------- mail

    def _carry(self, name: str) -> None:
        """The mail, as long as nobody stands in its way."""
        box = self.boxes.get(name)
        if box is None or box.letter is None or box.mute:
            return
        if self._alone:
            self.say(f"{name} -> coordinator: {self.tell.letter(box.letter)}")
        elif (box.reaches or self.latest()) not in self.coordinators:
            self.lose(name)
        else:
            self.deliver(name)

    def deliver(self, name: str, *, heard: bool = True) -> None:
        """A shard's message arrives, and so does the answer, where that is `heard`."""
        box = self.boxes[name]
        letter, box.letter = box.letter, None
        assert letter is not None, "there is no mail"
        box.delivered = letter
        ack = self._post(name, letter)
        if heard:
            self.step(name, ReportAnswered(ack))
        else:
            self.say(f"{name} does not hear the answer")
            self.step(name, ReportFailed())

    def lose(self, name: str) -> None:
        self.boxes[name].letter = None
        self.step(name, ReportFailed())

    def repeat(self, name: str) -> None:
        """The network delivers what it has delivered before; nobody waits for the answer."""
        letter = self.boxes[name].delivered
        assert letter is not None
        self._post(name, letter)

    def _post(self, name: str, letter: Report | Inventory) -> ReportAck:
        to = self.boxes[name].reaches or self.latest()
        place = len(self._lines)
        ack = self.ask(to, "", letter)
        assert isinstance(ack, ReportAck)
        later, self._lines[place:] = self._lines[place:], []
        said, heard = self.tell.substance(letter), self.tell.substance(ack)
        before = self.boxes[name].told
        news = isinstance(letter, Inventory) or letter.events or said != before[0]
        if news or ack.inventory or ack.leave or ack.epoch != letter.coordinator:
            news = True
            self.say(f"{name} -> {to}: {self.tell.letter(letter)}")
        self._lines += later
        if news or heard != before[1]:
            self.say(f"{to} -> {name}: {self.tell.ack(ack)}")
        self.boxes[name].told = (said, heard)
        return ack

    # ------------------------------------------------------------------------------------ what shells do

    def _verified(self, name: str, attempt: Attempt, slots: Sequence[PageSlot]) -> None:
        if name in self.boxes:
            rotten = self.boxes[name].rotten
            corrupt = tuple(at for at, slot in enumerate(slots) if slot.key.hash in rotten)
            told = self.tell.blocks([slots[at] for at in corrupt])
            self.say(f"{name} finds corrupt: {told}")
            self.step(name, Verified(attempt, corrupt))

    def _fetch(self, name: str, fetch: Fetch) -> None:
        """Pages go from shard to shard, as a worker's would; what is rotten or gone does not arrive."""
        source = fetch.source.shard
        self.say(f"{name} fetches from {source}: {self.tell.blocks(fetch.slots)}")
        arrived = []
        if source in self.boxes:
            asker, keys = self.names.attempt(fetch.attempt), [slot.key for slot in fetch.slots]
            pinned = self.shard_pin(source, asker, fetch.attempt, fetch.namespace, keys)
            rotten = self.boxes[source].rotten
            arrived = [at for at, slot in enumerate(pinned) if slot is not None and slot.key.hash not in rotten]
            self.ask(source, asker, Unpin(CallId(0), fetch.attempt), told=False)
        message = Commit(CallId(0), fetch.attempt, tuple(arrived), (b"sums",) * len(arrived))
        end = message if arrived else Abort(CallId(0), fetch.attempt)
        self.say(f"{name} keeps: {self.tell.blocks([fetch.slots[at] for at in arrived])}")
        self.ask(name, "", end, told=False)

    def shard_pin(
        self, shard: str, asker: str, attempt: Attempt, namespace: NamespaceId, keys: Sequence[PageKey]
    ) -> list[PageSlot | None]:
        """One shard asks another for pages, with the cluster's own credential."""
        pin = Pin(CallId(0), CLUSTER, namespace, attempt, self.boxes[shard].core.epoch, tuple(keys))
        grant = self.ask(shard, asker, pin, [key.hash for key in keys])
        assert isinstance(grant, PinGrant)
        return [page if isinstance(page, PageSlot) else None for page in grant.pages]
