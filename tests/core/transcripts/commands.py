"""The language of transcripts: a command is looked up by its actor and verb, and becomes a step of the stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvcluster.core.ids import CLUSTER, Attempt, BlockHash, Epoch, NamespaceId, ShardId, Tenant
from kvcluster.core.messages import (
    Abort,
    Attach,
    AttachShard,
    Commit,
    Decision,
    Drain,
    EndTicket,
    EvictOrder,
    Explain,
    Flush,
    GetStatus,
    Inventory,
    LeaveReason,
    LoadGrant,
    NewPage,
    Order,
    OrderProgress,
    PageEvent,
    PageKey,
    PageSlot,
    Pin,
    PinBlocks,
    PrepareLoad,
    PrepareStore,
    PullOrder,
    Purge,
    PurgedEvent,
    RemovedEvent,
    Renew,
    RenewTicket,
    Report,
    ReportAck,
    ReportAnswered,
    ReportFailed,
    Reserve,
    ShardAddress,
    ShardInfo,
    StoreGrant,
    StreamEvent,
    Suspect,
    SyncTables,
    TableChange,
    Tier,
    Tombstone,
    Unpin,
    UnpinBlocks,
    WriteGrant,
)
from kvcluster.core.miss import Loss
from kvcluster.core.spec import KVSpec
from tests.core.transcripts.names import MS, NEED, PAGE, PRIVATE_SPEC, ROOT, SPEC, TENANT, WHOLE, expand, spec_of
from tests.core.transcripts.stage import Stage

SUMS = b"sums"


@dataclass
class Worker:
    """A client: which attempts it has made, and what it has under way."""

    name: str
    spec: KVSpec = SPEC
    attempts: int = 0
    synced: int = 0
    written: dict[tuple[str, int], list[BlockHash | None]] = field(default_factory=dict)
    attached: list[tuple[str, int, str]] = field(default_factory=list)


@dataclass
class Puppet:
    """A shard that says what the script says: what it would know of itself."""

    pages: int = 4
    held: int = 0
    told: int = 0
    epoch: int = 1


class Words:
    """The words of a command after who and what: blocks, `#attempt`, `name=value`, and others."""

    def __init__(self, words: Sequence[str]) -> None:
        self.options = dict(word.split("=", 1) for word in words if "=" in word)
        self.attempt = next((int(word[1:]) for word in words if word[0] == "#"), None)
        self.rest = expand(word for word in words if "=" not in word and word[0] != "#")

    def number(self, name: str, otherwise: int) -> int:
        return int(self.options.pop(name, otherwise))

    def settings(self) -> dict[str, Any]:
        return {name: float(text) if "." in text else int(text) for name, text in self.options.items()}


class Commands:
    """Runs the commands of one transcript."""

    def __init__(self) -> None:
        self.stage = Stage()
        self._workers: dict[str, Worker] = {}
        self._puppets: dict[str, Puppet] = {}

    def run(self, line: str) -> list[str]:
        """Runs one command; returns its effects as text."""
        words = line.split()
        quiet = words[0] == "quietly"
        self._act(words[quiet:])
        self.stage.settle()
        said = self.stage.said()
        return [] if quiet else said

    def _act(self, words: Sequence[str]) -> None:
        match words:
            case ["start", name, *rest]:
                self._start(name, Words(rest))
            case ["stop", name]:
                self.stage.stop(name)
            case ["wait", ms]:
                self.stage.wait(int(ms))
            case ["lost", "disk"]:
                self.stage.disk = ()
            case ["stall", name, ms]:
                self.stage.stall(name, int(ms))
            case [worker, "at", shard, verb, *rest] if worker[0] == "w":
                self._at_shard(self._worker(worker), shard, verb, Words(rest))
            case [worker, verb, *rest] if worker[0] == "w":
                self._at_coordinator(self._worker(worker), verb, Words(rest))
            case [shard, verb, *rest] if shard[0] == "s":
                self._of_shard(shard, verb, Words(rest))
            case _:
                raise AssertionError("this command is not known")

    def _start(self, name: str, words: Words) -> None:
        epoch = words.number("epoch", 10 if name[0] == "c" else 1)
        if name[0] == "c":
            expected = words.number("expected", 1)
            self.stage.start_coordinator(name, epoch=epoch, expected=expected, **words.settings())
        else:
            self.stage.start_shard(name, epoch=epoch, pages=words.number("pages", 4), **words.settings())

    # ------------------------------------------------------------------------------------------ workers

    def _worker(self, name: str) -> Worker:
        return self._workers.setdefault(name, Worker(name))

    def _attempt(self, worker: Worker, words: Words, *, new: bool) -> Attempt:
        if new and words.attempt is None:
            worker.attempts += 1
        return Attempt(self.stage.names.holder(worker.name), words.attempt or worker.attempts)

    def _namespace(self, worker: Worker, name: str) -> NamespaceId:
        """The worker's namespace, to which it attaches where it has not yet."""
        core = self.stage.process(name).core
        known = (name, core.epoch, f"{worker.spec.weights} {worker.spec.private}")
        if known not in worker.attached:
            worker.attached.append(known)
            kind = Attach if name in self.stage.coordinators else AttachShard
            self.stage.ask(name, worker.name, kind(worker.spec), told=False)
        return self.stage.names.namespace(worker.spec)

    def _blocks(self, words: Words) -> tuple[BlockHash, ...]:
        return tuple(self.stage.names.block(name) for name in words.rest)

    def _at_coordinator(self, worker: Worker, verb: str, words: Words) -> None:
        to = words.options.pop("at", None) or self.stage.latest()
        if verb == "uses":
            worker.spec = PRIVATE_SPEC if words.rest == ["private"] else spec_of(words.rest[0])
            return
        if verb == "table":
            self._table(worker, to, words)
            return
        if verb in ("stores", "loads"):
            (self._stores if verb == "stores" else self._loads)(worker, to, words)
            return
        self._question(worker, to, verb, words)

    def _table(self, worker: Worker, to: str, words: Words) -> None:
        """The next message about a worker's tables, or the one of a number, with one change or none."""
        names, changes = self.stage.names, list[TableChange]()
        if words.rest:
            sequence, blocks = words.rest[0], tuple(map(names.block, words.rest[1:]))
            keep, private = words.number("keep", 0), words.number("private", 0)
            parent, closed = words.options.get("of"), "closed" in words.options
            of = names.sequence(parent) if parent is not None else None
            changes.append(TableChange(names.sequence(sequence), keep, blocks, private, of, closed))
        worker.synced = words.attempt or worker.synced + 1
        message = SyncTables(names.holder(worker.name), worker.synced, tuple(changes))
        namespace = self._namespace(Worker(worker.name), to)
        self.stage.ask(to, f"{worker.name}#{worker.synced}", message, namespace=namespace)

    def _question(self, worker: Worker, to: str, verb: str, words: Words) -> tuple[Attempt, object]:
        """One question to the coordinator, and its answer."""
        namespace = self._namespace(worker, to)
        attempt = self._attempt(worker, words, new=verb in ("load", "store"))
        blocks = () if verb == "drain" else self._blocks(words)
        message: Any
        match verb:
            case "attach":
                message = Attach(worker.spec)
            case "load":
                hold = words.options.get("hold") != "no"
                need = replace(
                    NEED, avoid=tuple(ShardId(name) for name in words.options.get("avoid", "").split(",") if name)
                )
                message = PrepareLoad(attempt, blocks, need, hold)
            case "store":
                first = words.number("first", 0)
                parent = self.stage.names.block(words.options.get("after", ROOT))
                parts = ((0, WHOLE),)
                message = PrepareStore(attempt, first, parent, blocks[0], blocks, parts, host=worker.name)
            case "renew":
                message = RenewTicket(attempt)
            case "end":
                message = EndTicket(attempt)
            case "explain":
                message = Explain(blocks, NEED)
            case "pin":
                ttl, replicas = words.number("ms", 10_000) * MS, words.number("replicas", 1)
                message = PinBlocks(blocks, ttl, replicas)
            case "unpin":
                message = UnpinBlocks(blocks)
            case "purge":
                message = Purge(**words.options)
            case "drain":
                message = Drain(ShardId(words.rest[0]))
            case "status":
                message = GetStatus()
            case _:
                raise AssertionError(f"a worker cannot {verb} at a coordinator")
        asker = self.stage.names.attempt(attempt) if verb in ("load", "store", "renew", "end") else worker.name
        within = namespace if verb in ("load", "store", "explain", "pin", "unpin") else None
        return attempt, self.stage.ask(to, asker, message, blocks, namespace=within)

    def _at_shard(self, worker: Worker, shard: str, verb: str, words: Words) -> object:
        """One question to a shard, and its answer where it comes at once."""
        stage = self.stage
        namespace = self._namespace(worker, shard)
        attempt = self._attempt(worker, words, new=verb in ("pin", "reserve"))
        epoch = Epoch(words.number("epoch", stage.process(shard).core.epoch))
        blocks = self._blocks(words)
        keys = tuple(PageKey(block, 0, WHOLE) for block in blocks)
        message: Any
        match verb:
            case "attach":
                message = AttachShard(worker.spec)
            case "pin":
                message = Pin(attempt, epoch, keys)
            case "reserve":
                worker.written[shard, attempt.counter] = list(blocks)
                wait_ns = words.number("wait", 0) * MS
                message = Reserve(attempt, epoch, self._new_pages(blocks), wait_ns)
            case "commit":
                reserved = worker.written[shard, attempt.counter]
                blocks = blocks or tuple(block for block in reserved if block is not None)
                indices = tuple(reserved.index(block) for block in blocks)
                message = Commit(attempt, indices, (SUMS,) * len(indices))
            case "unpin" | "abort" | "renew":
                message = {"unpin": Unpin, "abort": Abort, "renew": Renew}[verb](attempt)
            case "flush":
                message = Flush(words.number("wait", 0) * MS)
            case "suspect":
                message = Suspect(epoch, keys)
            case _:
                raise AssertionError(f"a worker cannot {verb} at a shard")
        named = verb not in ("attach", "flush", "suspect")
        asker = stage.names.attempt(attempt) if named else worker.name
        within = namespace if verb in ("pin", "reserve", "suspect") else None
        return stage.ask(shard, asker, message, blocks, namespace=within)

    def _new_pages(self, blocks: Sequence[BlockHash]) -> tuple[NewPage, ...]:
        parents = (self.stage.names.block(ROOT), *blocks)
        return tuple(
            NewPage(PageKey(block, 0, WHOLE), parents[depth], depth, Loss.EXACT) for depth, block in enumerate(blocks)
        )

    def _stores(self, worker: Worker, to: str, words: Words) -> None:
        """A store from its beginning to its end."""
        attempt, grant = self._question(worker, to, "store", words)
        assert isinstance(grant, StoreGrant)
        number = f"#{attempt.counter}"
        at = 0
        for run in grant.runs:
            named = words.rest[at : at + run.count]
            at += run.count
            if run.decision is not Decision.WRITE:
                continue
            assert run.shard is not None
            shard = run.shard.shard
            written = self._at_shard(worker, shard, "reserve", Words([number, *named]))
            if isinstance(written, WriteGrant):
                good = [name for name, page in zip(named, written.pages, strict=True) if isinstance(page, PageSlot)]
                self._at_shard(worker, shard, "commit", Words([number, *good]))
                self.stage.settle()
        self.stage.ask(to, worker.name, EndTicket(attempt), told=False)

    def _loads(self, worker: Worker, to: str, words: Words) -> None:
        """A load from its beginning to its end."""
        attempt, grant = self._question(worker, to, "load", words)
        assert isinstance(grant, LoadGrant)
        number = f"#{attempt.counter}"
        wanted: dict[str, list[str]] = {}
        at = 0
        for run in grant.runs:
            for cover in run.plan:
                for source in cover or ():
                    wanted.setdefault(source.shard.shard, []).extend(words.rest[at : at + run.count])
            at += run.count
        for shard, named in wanted.items():
            if shard not in self.stage.shards:
                self.stage.say(f"{shard} does not answer")
                continue
            self._at_shard(worker, shard, "pin", Words([number, *named]))
            self.stage.ask(shard, worker.name, Unpin(attempt), told=False)
            rotten = [name for name in named if self.stage.names.block(name) in self.stage.shards[shard].rotten]
            if rotten:
                self.stage.say(f"{worker.name} gets other bytes than it asked for: {' '.join(rotten)}")
                self._at_shard(worker, shard, "suspect", Words(rotten))
        self.stage.ask(to, worker.name, EndTicket(attempt), told=False)

    # ------------------------------------------------------------------------------------------- shards

    def _of_shard(self, name: str, verb: str, words: Words) -> None:
        stage = self.stage
        if verb == "says":
            self._says(name, words)
            return
        shard = stage.shards[name]
        acts: dict[str, Callable[[], object]] = {
            "hears": lambda: self._hears(name, words),
            "delivers": lambda: stage.deliver(name, heard=words.rest != ["unheard"]),
            "loses": lambda: stage.lose(name),
            "repeats": lambda: stage.repeat(name),
            "rots": lambda: shard.rotten.update(dict.fromkeys(self._blocks(words))),
            "mute": lambda: setattr(shard, "mute", True),
            "speaks": lambda: self._speaks(name),
            "reaches": lambda: setattr(shard, "reaches", words.rest[0]),
        }
        acts[verb]()

    def _speaks(self, name: str) -> None:
        shard = self.stage.shards[name]
        shard.mute = False
        if shard.letter is not None:
            self.stage.deliver(name)

    def _says(self, name: str, words: Words) -> None:
        """A puppet's report, or with `inventory` what it holds."""
        stage, puppet = self.stage, self._puppets.setdefault(name, Puppet())
        epoch = words.number("epoch", puppet.epoch)
        if epoch != puppet.epoch:
            puppet.epoch, puppet.held, puppet.told = epoch, 0, 0
        to = words.options.pop("at", None) or stage.latest()
        coordinator = Epoch(words.number("to", stage.process(to).core.epoch))
        namespace = self._namespace(Worker(name), to)
        specs = ((TENANT, SPEC), (TENANT, PRIVATE_SPEC))
        puppet.pages = words.number("pages", puppet.pages)
        first = words.number("first", puppet.told + 1)
        letter: Report | Inventory
        if words.rest[:1] == ["inventory"]:
            events = [self._event(namespace, f"+{block}") for block in words.rest[1:]]
            puppet.held = len(events)
            puppet.told = words.number("upto", 0)
            pages = tuple(event for event in events if isinstance(event, PageEvent))
            chunk, last = words.number("chunk", 0), "more" not in words.options
            stones = tuple(
                Tombstone(int(number), TENANT) for number in words.options.get("purged", "").split(",") if number
            )
            info = self._info(name, puppet, words)
            letter = Inventory(info, coordinator, puppet.told, chunk, last, pages, specs, stones)
        else:
            events = [self._event(namespace, word) for word in words.rest]
            puppet.held += sum(isinstance(event, PageEvent) for event in events)
            puppet.held -= sum(isinstance(event, RemovedEvent) for event in events)
            puppet.told = first + len(events) - 1
            wants = words.number("wants", 0) * PAGE
            orders = OrderProgress(words.number("accepted", 0))
            info = self._info(name, puppet, words)
            pressure = ((Tenant(TENANT), wants),) if wants else ()
            letter = Report(info, coordinator, first, tuple(events), specs, pressure, orders)
        stage.ask(to, name, letter, tenant=CLUSTER)

    def _info(self, name: str, puppet: Puppet, words: Words) -> ShardInfo:
        free = words.number("free", max(0, puppet.pages - puppet.held)) * PAGE
        address = f"{name}@{puppet.epoch}"
        shard, epoch = ShardId(name), Epoch(puppet.epoch)
        return ShardInfo(shard, epoch, address, name, puppet.pages * PAGE, free, puppet.held, words.number("leases", 0))

    def _event(self, namespace: NamespaceId, word: str) -> StreamEvent:
        """`+a1` a page became READY, `-a1` it is gone, `!a1` it is gone since it was corrupt, `x10` a burial."""
        if word[0] == "x":
            return PurgedEvent(int(word[1:]))
        key = self.stage.names.key(word[1:])
        if word[1] == "p":
            namespace = PRIVATE_SPEC.namespace(TENANT)
        if word[0] == "+":
            before = f"{word[1]}{int(word[2:]) - 1}" if int(word[2:]) > 1 else ROOT
            return PageEvent(namespace, key, self.stage.names.block(before), int(word[2:]) - 1, Tier.RAM, Loss.EXACT)
        return RemovedEvent(namespace, key, corrupt=word[0] == "!")

    def _hears(self, name: str, words: Words) -> None:
        """What comes of a shard's last message, where the script is the coordinator."""
        stage = self.stage
        shard = stage.shards[name]
        shard.letter = None
        if words.rest == ["nothing"]:
            shard.step(ReportFailed())
            return
        namespace = stage.names.namespace(SPEC)
        evict, pull, purge = (words.options.get(option) for option in ("evict", "pull", "purge"))
        orders: list[Order] = []
        if evict is not None:
            number, blocks = evict.split(":")
            named = tuple((namespace, stage.names.block(block)) for block in expand(blocks.split(",")))
            orders.append(EvictOrder(int(number), named))
        if pull is not None:
            number, blocks, of = pull.split(":")
            source = ShardAddress(ShardId(of), Epoch(1), of, of)
            fetched = self._new_pages([stage.names.block(block) for block in expand(blocks.split(","))])
            orders.append(PullOrder(int(number), source, TENANT, SPEC, fetched))
        ack = ReportAck(
            Epoch(words.number("epoch", 10)),
            words.number("acked", 0),
            inventory="inventory" in words.rest,
            orders=tuple(orders),
            tombstones=() if purge is None else (Tombstone(int(purge), Tenant(TENANT)),),
            drain="drain" in words.rest,
            leave=LeaveReason[words.options["leave"].upper()] if "leave" in words.options else None,
        )
        stage.say(f"coordinator -> {name}: {stage.tell.ack(ack)}")
        shard.step(ReportAnswered(ack))
