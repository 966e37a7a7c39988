"""A worker: what kvcluster/client does, at the level of messages, and an engine that wants something of it.

One script is one call: it has one deadline, asks again where an answer was lost, tries another replica where a read
failed, and ends in an outcome, never in an error. Every byte that it accepts is shown to the oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvcluster.core.ids import Attempt, BlockHash, Holder, NamespaceId, ShardId
from kvcluster.core.messages import (
    Attach,
    Attached,
    AttachedShard,
    AttachShard,
    Decision,
    Done,
    EndTicket,
    Explain,
    Explained,
    LoadGrant,
    Need,
    NewPage,
    PageKey,
    PageWant,
    PrepareLoad,
    PrepareStore,
    ReadRequest,
    Refused,
    RefusedKind,
    RenewTicket,
    ShardAddress,
    StoreGrant,
    Suspect,
    WriteRequest,
    Written,
)
from kvcluster.core.placement import run_start
from kvcluster.core.reasons import Loss
from kvcluster.core.spec import Part
from kvcluster.pages import checksum
from kvcluster.testing.kernel import MS, Clock, Process, Promise, Script
from kvcluster.testing.sim import content
from kvcluster.testing.sim.content import Model
from kvcluster.testing.sim.memory import flipped
from kvcluster.testing.sim.network import BROKEN, Line
from kvcluster.testing.sim.sessions import FINISHED, Layer, Transfer
from kvcluster.testing.sim.shard import ShardProcess

if TYPE_CHECKING:
    from kvcluster.testing.sim.world import World

ROUNDS = 2
"""How often a load asks for replicas of what failed."""

Keys = dict[ShardAddress, list[PageKey]]


@dataclass(slots=True)
class Reading:
    """What came of reading some pages: those that are whole and right, and where others failed."""

    whole: dict[PageKey, None]
    failed: dict[ShardId, None]


class Worker(Process):
    """One incarnation of a client. Its calls run side by side."""

    def __init__(self, world: World, name: str, node: int, clock: Clock, holder: Holder) -> None:
        super().__init__(world.kernel, name, node, clock)
        self.world = world
        self._holder = holder
        self._attempts = 0
        self._asked = 0
        self._asking: dict[int, int] = {}  # since when each question under way was asked
        self.slots: list[Promise] = []
        self._attached: dict[Model, Attached] = {}
        self._attached_shards: dict[tuple[ShardAddress, NamespaceId], None] = {}

    @property
    def idle(self) -> bool:
        """Has every slot ended?"""
        return all(slot.ready for slot in self.slots)

    def attempt(self) -> Attempt:
        self._attempts += 1
        return Attempt(self._holder, self._attempts)

    # ------------------------------------------------------------------------------------------- questions

    def ask(self, build: Callable[..., Any], give_up: int) -> Script:
        """One question to the coordinator; None where no answer comes."""
        promise = self.world.network.ask(self, self.world.coordinator_seen_by(self), build)
        self._asked += 1
        number = self._asked
        self._asking[number] = self.now()
        reply = yield promise, max(1, min(give_up - self.now(), self.world.scenario.patience_ns // 2))
        del self._asking[number]
        return reply if promise.ready and reply is not BROKEN else None

    def unanswered_ns(self) -> int:
        """For how long the coordinator has not answered a question that is under way."""
        return self.now() - next(iter(self._asking.values())) if self._asking else 0

    def question(self, model: Model, build: Callable[..., Any], give_up: int) -> Script:
        """As `ask`, within a namespace: attaches first, and again where it was forgotten; asks once more where the
        answer was lost."""
        reply = None
        for _ in range(4):
            if model not in self._attached:
                attached = yield from self.ask(lambda call: Attach(call, model.tenant, model.spec), give_up)
                if not isinstance(attached, Attached):
                    continue
                self._attached[model] = attached
            reply = yield from self.ask(build, give_up)
            if isinstance(reply, Refused) and reply.kind is RefusedKind.UNKNOWN_NAMESPACE:
                self._attached.pop(model, None)
            elif reply is not None or self.now() >= give_up:
                return reply
        return reply

    def end_ticket(self, attempt: Attempt) -> None:
        """Nobody waits for it; lost, the ticket ends by time."""
        self.world.network.ask(self, self.world.coordinator_seen_by(self), lambda call: EndTicket(call, attempt))

    # ----------------------------------------------------------------------------------------------- loads

    def load(self, model: Model, hashes: Sequence[BlockHash], need: Need, *, wait_ns: int = 0) -> Script:
        """How many leading blocks were loaded. The ticket is kept for `wait_ns` before it is used."""
        give_up = self.now() + self.world.scenario.patience_ns
        ticket = self.attempt()
        grant = yield from self._prepare(model, ticket, hashes, need, give_up, hold=True)
        if not isinstance(grant, LoadGrant):
            self.world.count("load", "no answer" if grant is None else "refused")
            self.end_ticket(ticket)
            return 0
        if wait_ns and grant.hold_ns:
            yield from self._keep(ticket, wait_ns)
            give_up += wait_ns
        wanted = keys_of(model, hashes, need, grant)
        self.world.grants.append((model, dict(wanted), need.accept))
        loaded = yield from self.read_all(model, wanted, need.accept, give_up)
        missing = {key: None for keys in wanted.values() for key in keys if key not in loaded.whole}
        avoided = dict(loaded.failed)
        for _ in range(ROUNDS):
            if not missing or self.now() >= give_up:
                break
            missing = yield from self._elsewhere(model, need, missing, avoided, give_up)
        self.end_ticket(ticket)
        if missing:
            self.world.count("load", "part failed")
            order = {block: at for at, block in enumerate(hashes)}
            return min(order[key.hash] for key in missing)
        reason = grant.miss.reason.value if grant.miss is not None else "all"
        self.world.count("load", reason if not grant.blocks else "hit" if grant.miss is None else "part hit")
        return grant.blocks

    def _elsewhere(
        self, model: Model, need: Need, missing: dict[PageKey, None], avoided: dict[ShardId, None], give_up: int
    ) -> Script:
        """Reads what is missing from other replicas, as client/retry.py plans it; what is missing still. Shards that
        fail are added to `avoided`."""
        wanted: Keys = {}
        places: dict[tuple[BlockHash, int], list[PageKey]] = {}
        for group in dict.fromkeys(key.group for key in missing):
            blocks = tuple(dict.fromkeys(key.hash for key in missing if key.group == group))
            parts = tuple(part if at == group else None for at, part in enumerate(need.parts))
            again = Need(parts, need.accept, tuple(avoided))
            told = yield from self.question(
                model,
                lambda call, asked=blocks, again=again: Explain(call, model.tenant, model.space, asked, again),
                give_up,
            )
            plans = [fate.plan for fate in told.fates for _ in range(fate.count)] if isinstance(told, Explained) else []
            for block, plan in zip(blocks, plans, strict=False):
                for source in plan[group] or () if plan is not None else ():
                    key = PageKey(block, group, source.part)
                    wanted.setdefault(source.shard, []).append(key)
                    places.setdefault((block, group), []).append(key)
        more = yield from self.read_all(model, wanted, need.accept, give_up)
        avoided |= more.failed
        found = [place for place, keys in places.items() if all(key in more.whole for key in keys)]
        return {key: None for key in missing if (key.hash, key.group) not in found}

    def _prepare(
        self, model: Model, attempt: Attempt, hashes: Sequence[BlockHash], need: Need, give_up: int, *, hold: bool
    ) -> Script:
        asked = tuple(hashes)
        return (
            yield from self.question(
                model, lambda call: PrepareLoad(call, model.tenant, model.space, attempt, asked, need, hold), give_up
            )
        )

    def _keep(self, ticket: Attempt, wait_ns: int) -> Script:
        """Renews a ticket until it is used."""
        until = self.now() + wait_ns
        while self.now() < until:
            yield None, 200 * MS
            renewed = yield from self.ask(lambda call: RenewTicket(call, ticket), self.now() + 200 * MS)
            if renewed == Done(False):
                return

    def read_all(self, model: Model, wanted: Keys, accept: Loss, give_up: int) -> Script:
        """Reads from all shards at once."""
        reads = [self.start(self._read(model, shard, keys, accept, give_up)) for shard, keys in wanted.items()]
        reading = Reading({}, {})
        for shard, done in zip(wanted, reads, strict=True):
            whole = yield done, 10 * self.world.scenario.patience_ns
            reading.whole |= whole
            if len(whole) < len(wanted[shard]):
                reading.failed[shard.shard] = None
        return reading

    def _read(self, model: Model, shard: ShardAddress, keys: list[PageKey], accept: Loss, give_up: int) -> Script:
        """The pages that came whole and right. What did not match is reported to the shard."""
        wants = tuple(PageWant(key, 0, key.part.layers) for key in keys)
        request = ReadRequest(model.space, self.attempt(), shard.epoch, wants, accept)
        opened = yield from self._open(model, shard, lambda: request, give_up)
        if opened is None:
            return {}
        line, _ = opened
        arrived = [0] * len(keys)
        suspects: dict[PageKey, None] = {}
        while True:
            heard = yield line.down.next(), max(1, give_up - self.now())
            if not isinstance(heard, list):
                break
            for layer in heard:
                key = keys[layer.item]
                identity = content.identity(model.space, key, layer.codec)
                if checksum.layer_sum(identity, layer.layer, layer.data) != layer.total:
                    self.world.oracle.refused(key, layer)
                    suspects[key] = None
                else:
                    self.world.oracle.accepted(model.space, key, layer, accept)
                    arrived[layer.item] += 1
        if heard is not FINISHED or self.world.rng.random() < 0.1:
            line.up.hang_up()
        self.world.network.close(line)
        if suspects:
            self.world.count("suspect", "told")
            named = tuple(suspects)
            self.world.network.ask(
                self,
                self.world.shard_at(shard.address),
                lambda call: Suspect(call, model.tenant, model.space, shard.epoch, named),
            )
        return {key: None for key, count in zip(keys, arrived, strict=True) if count == key.part.layers}

    # ---------------------------------------------------------------------------------------------- stores

    def store(
        self, model: Model, hashes: Sequence[BlockHash], first: int, parts: tuple[tuple[int, Part], ...], wait_ns: int
    ) -> Script:
        """Stores the blocks from `first` on. True where each of them is stored now, by whomever."""
        give_up = self.now() + self.world.scenario.patience_ns
        ticket = self.attempt()
        parents = (content.root(model), *hashes)
        run_blocks = self.world.scenario.config.coordinator.run_blocks
        new = tuple(hashes[first:])
        tokens = tuple(token for block in new for token in content.origin(model, block)[1])
        grant = yield from self.question(
            model,
            lambda call: PrepareStore(
                *(call, model.tenant, model.space, ticket, first, parents[first], hashes[run_start(first, run_blocks)]),
                new,
                parts,
                host=f"node-{self.node}",
                tokens=tokens if model in self._attached and self._attached[model].wants_tokens else (),
            ),
            give_up,
        )
        if not isinstance(grant, StoreGrant):
            self.world.count("store", "no answer" if grant is None else "refused")
            self.end_ticket(ticket)
            return False
        writes: dict[ShardAddress, list[NewPage]] = {}
        at = first
        done = True
        for run in grant.runs:
            if run.decision is Decision.WRITE:
                assert run.shard is not None
                writes.setdefault(run.shard, []).extend(
                    NewPage(PageKey(hashes[block], group, part), parents[block], block)
                    for block in range(at, at + run.count)
                    for group, part in parts
                )
            else:
                done = done and run.decision is Decision.COMMITTED
                reason = run.miss.reason.value if run.miss is not None else ""
                self.world.count("store", f"{run.decision.value} {reason}".strip())
            at += run.count
        for shard, pages in writes.items():
            outcome = yield from self._write(model, shard, pages, wait_ns, give_up)
            for written in dict.fromkeys(outcome):
                self.world.count("store", written.value)
            done = done and all(written in (Written.COMMITTED, Written.DUPLICATE) for written in outcome)
        self.end_ticket(ticket)
        return done

    def _write(self, model: Model, shard: ShardAddress, pages: list[NewPage], wait_ns: int, give_up: int) -> Script:
        """What became of each page."""
        rng, scenario = self.world.rng, self.world.scenario
        lost = [Written.LOST] * len(pages)
        request = WriteRequest(model.space, self.attempt(), shard.epoch, tuple(pages), wait_ns)
        opened = yield from self._open(model, shard, lambda: request, give_up)
        if opened is None:
            return lost
        line, head = opened
        breaks_off = self.world.working and rng.random() < 0.05
        layers = [
            (item, page.key, layer)
            for item, (page, refused) in enumerate(zip(pages, head, strict=True))
            if refused is None
            for layer in range(page.key.part.layers)
        ]
        for start in range(0, len(layers), scenario.frame_layers):
            yield None, int(2 * scenario.frame_ns * rng.random())
            if breaks_off or self.now() >= give_up:
                break
            line.up.put([self._layer(model, *each) for each in layers[start : start + scenario.frame_layers]])
        if breaks_off and rng.random() < 0.5:  # it hangs, and says nothing to anybody
            yield None, 2 * scenario.config.shard.lease_ttl_ms * MS
        line.up.put(BROKEN if breaks_off else FINISHED)
        tail = yield line.down.next(), max(1, give_up - self.now())
        line.up.hang_up()
        self.world.network.close(line)
        return tail if isinstance(tail, list) else lost

    def _layer(self, model: Model, item: int, key: PageKey, layer: int) -> Layer:
        page = content.content(model.space, key)
        data = page.layer(layer)
        if self.world.wire_flips():
            return Layer(item, layer, page.sums[layer], flipped(self.world.rng, data), sound=False)
        return Layer(item, layer, page.sums[layer], data, sound=True)

    # --------------------------------------------------------------------------------------------- shards

    def attach_shard(self, model: Model, shard: ShardAddress, give_up: int) -> Script:
        """The shard behind an address, if it is the incarnation that was meant and knows the namespace."""
        process = self.world.shard_at(shard.address)
        if (shard, model.space) not in self._attached_shards:
            promise = self.world.network.ask(self, process, lambda call: AttachShard(call, model.tenant, model.spec))
            reply = yield promise, max(1, min(give_up - self.now(), self.world.scenario.patience_ns // 2))
            if not isinstance(reply, AttachedShard) or reply.epoch != shard.epoch:
                return None
            self._attached_shards[shard, model.space] = None
        return process

    def _open(self, model: Model, shard: ShardAddress, build: Callable[[], Any], give_up: int) -> Script:
        """A connection and the head of its answer, for each page None or why not; None where there is neither."""
        for _ in range(2):
            process: ShardProcess | None = yield from self.attach_shard(model, shard, give_up)
            left_ns = give_up - self.now()
            if process is None or left_ns <= 0:
                return None
            opening = Transfer(model.tenant, build(), left_ns)
            line: Line = self.world.network.connect(self, process, process.serve, opening)
            head = yield line.down.next(), left_ns
            if isinstance(head, list):
                return line, head
            line.up.hang_up()
            self.world.network.close(line)
            if not isinstance(head, Refused) or head.kind is not RefusedKind.UNKNOWN_NAMESPACE:
                return None
            self._attached_shards.pop((shard, model.space), None)
        return None


def keys_of(model: Model, hashes: Sequence[BlockHash], need: Need, grant: LoadGrant) -> Keys:
    """Which pages to read where, by the plan of a grant. Of a group that needs only its last blocks, only those before
    the granted boundary are read."""
    total = grant.blocks
    spec = model.spec
    wanted: Keys = {}
    at = 0
    for run in grant.runs:
        for group, part in enumerate(need.parts):
            needed = spec.groups[group].reuse.blocks_needed(total, spec.block_tokens) if part is not None else 0
            for source in run.plan[group] or ():
                for block in range(max(at, total - needed), at + run.count):
                    wanted.setdefault(source.shard, []).append(PageKey(hashes[block], group, source.part))
        at += run.count
    return wanted
