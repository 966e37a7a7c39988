"""One episode: a spec, clients whose resident set is too small, open sequences, and the texts that they must hold.

An operation has a seed of its own and draws what it needs from the present state, so a script of which operations were
left out is still a script. Everything that a verb calls goes through `attempt`, which knows what may be raised.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, TypeVar
from unittest.mock import patch

import torch

import kvcluster
from kvcluster.client.client import Client
from kvcluster.core.ids import BlockHash, Caller, ShardId
from kvcluster.core.messages import ShardAddress, WriteRequest, Written
from kvcluster.errors import CallerError, KVClusterError, LostTokens, ResidentSetFull
from kvcluster.runtime.auth import DEFAULT_TENANT
from kvcluster.sequences import runner
from kvcluster.testing import MemoryCluster
from kvcluster.transport.base import Deadline, PageSource, Transport
from kvcluster.transport.in_process_transport import MemoryTransport
from tests.client.test_zero_copy import Desk
from tests.fuzz.sequences import judging
from tests.fuzz.sequences.model import Contents, Published, Text, Window

R = TypeVar("R")

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
BOUND_S = 30.0
REPORTS = {"shard": {"report_interval_ms": 400}}
"""Whoever needs what shards have done has them report: a flush."""
MOST_OPEN = 6
TEXTS_KEPT = 40


class Finding(AssertionError):
    """The product did something else than its documents say."""


class World:
    """A cluster of two shards, which serve memory to some clients and shared memory to others. Of the former the next
    `scant` stores find room for some of their pages alone. `worn`: a shard was killed, so that the servers of shared
    memory are not those of the present shards."""

    def __init__(self) -> None:
        self.stack = ExitStack()
        self.stack.enter_context(patch.object(runner, "_RETRY_S", 0.01))
        self.cluster = self.stack.enter_context(MemoryCluster(shards=2, ram_bytes="64MiB", config=REPORTS))
        self.desk = Desk(self.cluster, self.stack)
        self.scant = 0
        self.worn = False

    def connect(self, spec: kvcluster.KVSpec, nbytes: int, *, lends: bool) -> Client:
        if lends:
            return self.desk.connect(spec, deadline_ms=0, resident_bytes=nbytes)
        config = replace(self.cluster.config.client, resident_bytes=nbytes)
        return Client(self.cluster.port(), self._open, spec, config=config)

    def _open(self, shard: ShardAddress) -> Transport:
        self.cluster.opener()(shard)  # raises if there is no such shard
        return ScantTransport(self, self.cluster.shards[shard.shard], Caller(DEFAULT_TENANT))

    def kill(self, number: int) -> None:
        """Ends a shard as a crash would, and starts it again."""
        self.worn = True
        self.cluster.stop_shard(ShardId(f"shard-{number}"))
        self.cluster.start_shard(number)
        self.cluster.wait_until_up()

    def restart(self) -> None:
        """Ends the coordinator, and starts another."""
        self.cluster.stop_coordinator()
        self.cluster.start_coordinator()
        self.report()
        self.cluster.wait_until_up()

    def report(self) -> None:
        """Has all shards report now, instead of within their interval."""
        for host in self.cluster.shards.values():
            sender = host.core.state.report_sender
            host.inspect(lambda sender=sender: setattr(sender, "_next_report", 0))  # type: ignore[misc]
            MemoryTransport(host, Caller(DEFAULT_TENANT)).flush(Deadline.after_ms(BOUND_S * 1e3))

    def public_blocks(self, spec: kvcluster.KVSpec) -> set[BlockHash]:
        """Returns the names of the blocks that shards have in the namespace of a spec."""
        namespace = self.desk.client._control.namespace(spec, Deadline.after_ms(BOUND_S * 1e3))
        found: set[BlockHash] = set()
        for host in self.cluster.shards.values():
            pool = host.core.pool
            host.inspect(lambda pool=pool: found.update(p.key.hash for p in pool.ready() if p.space == namespace))  # type: ignore[misc]
        return found

    def close(self) -> None:
        self.stack.close()


class ScantTransport(MemoryTransport):
    """Reaches a shard that at times has room for the first pages of a store alone."""

    def __init__(self, world: World, *given: Any) -> None:
        super().__init__(*given)
        self._world = world

    def write(self, request: WriteRequest, source: PageSource, deadline: Deadline) -> list[Written]:
        pages, kept = len(request.pages), len(request.pages)
        if self._world.scant:
            self._world.scant -= 1
            kept //= 2
        some = replace(request, pages=request.pages.select(range(kept)))
        written = super().write(some, source, deadline) if kept else []
        return [*written, *[Written.FULL] * (pages - kept)]


@dataclass(frozen=True)
class Profile:
    """What an episode is about. `long` contexts have spans that can be shipped; in a `lossy` one the cluster loses
    blocks; in a `racing` one operations do not wait until what they sealed is stored."""

    layers: int
    heads: int
    dim: int
    v_dim: int
    dtype: str
    block: int
    pages: int
    long: bool
    lossy: bool
    racing: bool
    lends: bool
    codecs: tuple[str, ...]
    alphabet: int

    @staticmethod
    def drawn(rng: Random) -> Profile:
        long = rng.random() < 0.12
        coded = rng.random() < (0.2 if long else 0.4)
        layers = 2 if long else rng.choice((1, 2, 2, 3))
        block = 16 if long else rng.choice((1, 2, 3, 4, 4, 5, 8, 8, 16))
        dim = rng.choice((8, 16, 32)) if coded else 8
        return Profile(
            layers=layers,
            heads=1 if long else rng.choice((1, 2)),
            dim=dim,
            v_dim=rng.choice((8, 16, 32)) if rng.random() < 0.25 else dim,
            dtype=rng.choice(tuple(DTYPES)),
            block=block,
            pages=rng.choice((50, 160)) if long else rng.randint(5, 24),
            long=long,
            lossy=rng.random() < 0.08,
            racing=rng.random() < 0.15,
            lends=rng.random() < 0.7,
            codecs=("raw", "q8", "q4") if coded else ("raw",),
            alphabet=rng.choice((2, 3, 1_000)),
        )


@dataclass(eq=False)
class Live:
    """An open sequence, and what it must hold."""

    name: str
    sequence: kvcluster.Sequence
    text: Text
    client: int


@dataclass
class Tally:
    """Counts calls of each public verb, and what happened."""

    verbs: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0


class Episode:
    def __init__(self, world: World, profile: Profile, tally: Tally, weights: str) -> None:
        self.world, self.profile, self.tally = world, profile, tally
        self.dims = profile.dim, profile.v_dim
        planes = [
            kvcluster.Plane(name, profile.heads, dim, profile.dtype) for name, dim in zip("kv", self.dims, strict=True)
        ]
        groups = (kvcluster.Group(tuple(range(profile.layers)), tuple(planes)),)
        self.spec = kvcluster.KVSpec("fuzzed", weights, profile.block, groups)
        self.dtype = DTYPES[profile.dtype]
        self.contents = Contents(profile.layers, profile.heads, self.dims, self.dtype, seed=profile.dim)
        self.clients: dict[int, Client] = {}
        self.live: list[Live] = []
        self.last: Live | None = None  # operations often go on with one sequence
        self.texts: list[Text] = []  # of sequences that were closed, too
        self.published: dict[int, Published] = {}
        self.hashes: dict[BlockHash, None] = {}  # of the blocks that were advanced under ids
        self.stored: dict[int, None] = {}
        self.log: list[str] = []
        self.opened = 0
        self.refused_in_a_row = 0
        self.lost = False  # blocks were purged, or a shard was killed
        self.crowded = False  # several threads use the clients
        self._counted: dict[int, dict[str, Any]] = {}

    # ------------------------------------------------------------------------------------------------ parts

    @property
    def block(self) -> int:
        return self.profile.block

    def client(self, number: int) -> Client:
        if number not in self.clients:
            nbytes = self.profile.pages * self.spec.block_bytes
            self.clients[number] = self.world.connect(self.spec, nbytes, lends=self.profile.lends)
        return self.clients[number]

    def pick(self, rng: Random, *, idle: bool = False) -> Live | None:
        """Returns an open sequence; if `idle`, one that is not in the middle of a step."""
        among = [live for live in self.live if not idle or live.text.step is None]
        if self.last in among and rng.random() < 0.5:
            return self.last
        self.last = rng.choice(among) if among else None
        return self.last

    def policy(self, rng: Random, codecs: Sequence[str] = ()) -> tuple[kvcluster.WindowPolicy, Window]:
        block, codec = self.block, rng.choice(codecs or self.profile.codecs)
        tail = rng.choice((0, 0, 1, block, block + 1, 3 * block))
        batch = rng.choice((0, block, block, 2 * block, 4 * block + 1))
        sinks = rng.choice((0, 0, 0, 1, block, block + 2))
        policy = kvcluster.WindowPolicy(tail_tokens=tail, migration_tokens=batch, sink_tokens=sinks, codec=codec)
        return policy, Window(tail, sinks, codec, batch)

    def planes(self, kv: torch.Tensor) -> list[torch.Tensor]:
        """Returns K and V of `[2, ..., dim]`, each of its own dim, as arguments."""
        return [plane[..., :dim] for plane, dim in zip(kv, self.dims, strict=True)]

    def joined(self, planes: Sequence[torch.Tensor]) -> torch.Tensor:
        """The inverse."""
        if self.dims[0] == self.dims[1]:
            return torch.stack([*planes])
        return torch.stack([torch.nn.functional.pad(plane, (0, max(self.dims) - plane.shape[-1])) for plane in planes])

    def resident_planes(self, sequence: kvcluster.Sequence) -> list[torch.Tensor]:
        """Returns the resident set of a client as `[pages, layers, block_tokens, heads, dim]` for K and for V."""
        if self.dims[0] == self.dims[1]:
            return [sequence.resident_pages[:, :, plane] for plane in range(2)]
        return sequence.resident_planes

    def prompt(self, origin: int, ids: list[int]) -> kvcluster.Prompt:
        """Returns the prompt whose tokens are named from `origin` on."""
        return kvcluster.Prompt(ids, salt=b"" if origin == 1 else b"salt %d" % origin)

    def has_room(self, live: Live, more: int = 0) -> bool:
        """Whether all sequences of this client fit the resident set together, so that it cannot be full."""
        if len(self.profile.codecs) > 1:
            return False
        block = self.block
        need = [
            -(-(each.text.length + max(each.text.held, len(each.text.step.ids) if each.text.step else 0)) // block)
            for each in self.live
            if each.client == live.client
        ]
        return sum(need) + 2 * len(need) + -(-more // block) + 2 <= self.profile.pages

    # ------------------------------------------------------------------------------------------------ calls

    def attempt(
        self,
        verb: str,
        what: str,
        call: Callable[[], R],
        *,
        may: tuple[type[Exception], ...] = (),
        must: type[Exception] | tuple[type[Exception], ...] | None = None,
    ) -> tuple[bool, R | None]:
        """Returns whether the call succeeded, and its result. It has to raise `must`, or may raise one of `may`."""
        self.tally.verbs[verb] += 1
        self.log.append(what)
        began = time.perf_counter()
        try:
            result = call()
        except KVClusterError as error:
            self.tally.slowest = max(self.tally.slowest, time.perf_counter() - began)
            name = type(error).__name__
            self.log[-1] += f"  # {name}"
            if must is not None and isinstance(error, must):
                self.tally.events["refused"] += 1
                self.tally.events[f"refused {verb}"] += 1
            elif isinstance(error, may):
                self.tally.events[name] += 1
                self.refused_in_a_row += 1
            else:
                raise Finding(f"{what} raised {error!r}") from error
            return False, None
        self.tally.slowest = max(self.tally.slowest, time.perf_counter() - began)
        if must is not None:
            raise Finding(f"{what} was accepted")
        self.refused_in_a_row = 0
        return True, result

    def full(self, live: Live, more: int = 0) -> tuple[type[Exception], ...]:
        """What a call that needs pages may raise."""
        return () if not self.crowded and self.has_room(live, more) else (ResidentSetFull,)

    def absent(self, live: Live, more: int = 0) -> tuple[type[Exception], ...]:
        """What a call that needs blocks may raise."""
        return (*self.full(live, more), LostTokens) if self.lost else self.full(live, more)

    # ----------------------------------------------------------------------------------------------- checks

    def fail(self, live: Live, what: str) -> None:
        raise Finding(f"{live.name} ({live.text.length} tokens): {what}")

    def check_numbers(self, live: Live) -> None:
        """Lengths and places are those of the text."""
        sequence, text = live.sequence, live.text
        sealed, use = sequence.sealed, sequence.statistics()
        expected = (text.length, text.length, not text.length, text.max_tokens, False)
        found = (sequence.length, sequence.position, sequence.is_empty, sequence.capacity, sequence.closed)
        if found != expected:
            self.fail(live, f"length, position, is_empty, capacity, closed are {found}; expected {expected}")
        if sequence.dropped != text.dropped and (sequence.dropped or text.dropped):
            self.fail(live, f"dropped is {sequence.dropped}; expected {text.dropped}")
        step = len(text.step.ids) if text.step is not None else 0
        kept = [at for at in range(text.length + step) if at not in text.dropped]
        if sequence.positions.tolist() != kept:
            self.fail(live, f"positions are {sequence.positions.tolist()}; expected {kept}")
        if use.tokens != text.length or use.dropped != len(text.dropped) or use.resident > text.length:
            self.fail(live, f"statistics are {use}")
        # Another thread may seal blocks that this one shares; no other makes fewer of them.
        if not sealed <= use.sealed <= sequence.sealed <= text.length or use.sealed % self.block:
            self.fail(live, f"sealed is {sealed}, {use.sealed}, {sequence.sealed}")
        if not self.crowded and sealed != sequence.sealed:
            self.fail(live, f"sealed is {sealed}, then {sequence.sealed}")
        if use.resident < text.length - len(text.dropped):
            self.tally.events["evicted"] += 1
        if use.encoded:
            self.tally.events["encoded"] += 1

    def note_dropped(self, live: Live, before: range, count: int) -> None:
        """Takes what was dropped to make room for `count` more tokens into the text, if it is what should be."""
        text, now = live.text, live.sequence.dropped
        if now == before or not (now or before):
            return
        kept_before, kept = (text.length + count - len(dropped) for dropped in (before, now))
        sinks = -(-text.window.sinks // self.block) * self.block
        right = text.drop_oldest and now.start == (before.start if before else sinks) and now.stop % self.block == 0
        right = right and now.stop <= text.length and kept_before > text.max_tokens >= kept
        if not right or kept <= text.max_tokens - text.max_tokens // 16 - self.block:
            self.fail(live, f"dropped {before} -> {now} for {count} tokens, max_tokens={text.max_tokens}")
        text.dropped, text.public, text.pure = now, -1, min(text.pure, now.start)
        self.tally.events["dropped"] += 1

    def read(self, live: Live, layer: int, position: int, tokens: int) -> bool:
        """Reads and compares. Returns False if there was no room, or the cluster has lost it."""
        text = live.text
        done, got = self.attempt(
            "read",
            f"{live.name}.read({layer}, {position}, {tokens})",
            lambda: live.sequence.read(layer, position, tokens),
            may=self.absent(live),
        )
        if not done:
            return False
        values, expected = self.joined(got), text.layer(layer)[:, position : position + tokens]
        if values.dtype != expected.dtype or values.shape != expected.shape or values.requires_grad:
            self.fail(live, f"read {values.dtype} {tuple(values.shape)}; expected {tuple(expected.shape)}")
        if wrong := judging.wrong_values(self, text, layer, position, values):
            self.fail(live, f"read({layer}, {position}, {tokens}): {wrong}")
        return True

    def settle(self, live: Live) -> bool:
        """Reads what may have been encoded since. Returns False if it cannot be read now."""
        text = live.text
        if text.doubtful is None:
            return True
        assert text.bound is not None and text.encoded is not None
        text.doubtful[text.dropped.start : text.dropped.stop] = False
        for depth in sorted({position // self.block for position in text.doubtful.nonzero().flatten().tolist()}):
            first = depth * self.block
            stop = min(first + self.block, text.length)
            before = text.kv[:, :, first:stop]
            if not all(self.read(live, layer, first, stop - first) for layer in range(self.profile.layers)):
                return False
            if torch.equal(before, text.kv[:, :, first:stop]):
                text.encoded[first:stop] = False  # its batch is not full yet
            text.doubtful[first:stop] = False
            text.bound[:, :, first:stop] = 0
        return True

    def unchanged(self, live: Live, rng: Random) -> None:
        """What raised has changed nothing: the numbers, what layers have of the step, and some block."""
        self.check_numbers(live)
        text = live.text
        if not self.settle(live):
            return
        for layer in range(self.profile.layers):
            there = text.layer(layer).shape[1]
            if there > text.length:
                self.read(live, layer, text.length, there - text.length)
            with_more = Finding(f"{live.name}: layer {layer} has more than {there} tokens")
            try:
                live.sequence.read(layer, there, 1)
            except CallerError:
                with_more = None  # type: ignore[assignment]
            if with_more:
                raise with_more
            depths = [depth for depth in range(-(-text.length // self.block)) if depth * self.block not in text.dropped]
            if depths:
                first = rng.choice((depths[-1], rng.choice(depths))) * self.block
                self.read(live, layer, first, min(self.block, text.length - first))

    # -------------------------------------------------------------------------------------------- bookkeeping

    def versions(self, text: Text, depth: int) -> list[torch.Tensor]:
        """Returns the values, `[layers, 2, block_tokens, heads, dim]`, that blocks have under the name of this one, or
        had when it had one."""
        if depth < len(text.under):
            return self.published[text.under[depth]].versions
        return text.others.get(depth, [])

    def lose_names(self, text: Text, depth: int) -> None:
        """Blocks from this depth on are about to lose their names: they may go on to hold what is known under these."""
        for at in range(depth, len(text.under)):
            first = at * self.block
            own = text.kv[:, :, first : first + self.block]
            others = [version for version in self.versions(text, at) if not torch.equal(version, own)]
            if others:
                text.others[at] = others

    def know_end(self, live: Live) -> None:
        """Reads what is left of a block that was cut, if it may be another version: it may soon have a name again.
        Closes the sequence if there is no room to read it."""
        text = live.text
        depth = text.length // self.block
        if depth not in text.others:
            return
        first = depth * self.block
        if all(self.read(live, layer, first, text.length - first) for layer in range(self.profile.layers)):
            text.others.pop(depth, None)
        else:
            self.forget(live)
            self.attempt("close", f"{live.name}.close()", live.sequence.close)

    def may_publish(self, text: Text) -> None:
        """The step is about to be advanced under its ids: blocks that it makes full may be read by others at once."""
        step, first = text.step, text.pure // self.block
        assert step is not None
        if text.pure < text.length or text.local:
            return
        assert text.doubtful is None or not text.doubtful[first * self.block :].any()
        names, kv = text.names + step.names, torch.cat([text.kv[:, :, first * self.block :], step.kv], 2)
        for at, values in enumerate(kv.split(self.block, 2)):
            stop = (first + at + 1) * self.block
            if stop <= len(names):
                self.published.setdefault(names[stop - 1], Published()).add(values)

    def published_now(self, text: Text, pure_before: int) -> None:
        """Blocks that became full under their ids may be found by others from now on."""
        if text.pure // self.block > pure_before // self.block:
            hashes = self.client(0).hashes(self.prompt(text.origin, text.ids[: text.pure]))
            self.hashes.update(dict.fromkeys(hashes[pure_before // self.block :]))
        for depth in range(pure_before // self.block, text.pure // self.block):
            stop = (depth + 1) * self.block
            self.published[text.names[stop - 1]].exact |= text.lossy_from is None or text.lossy_from >= stop

    def forget(self, live: Live) -> None:
        self.live.remove(live)
        self.texts = [*self.texts[-TEXTS_KEPT:], live.text]

    def wait_for_stores(self) -> None:
        for client in self.clients.values():
            self.wait_until(lambda client=client: not client.resident().blocks_waiting)  # type: ignore[misc]

    def wait_for_tables(self) -> None:
        """Waits until the coordinator knows the tables of all sequences as they are, and which are closed."""
        for client in self.clients.values():
            opened = client._sequences._resources
            if opened is not None:
                keeper = opened.runner.keeper
                with opened.runner.lock:  # else the message would come later: within half a second
                    keeper._next_at = 0
                    opened.runner.wake()
                self.wait_until(lambda keeper=keeper: not keeper._changed and keeper._under_way is None)  # type: ignore[misc]

    def unclaimed(self) -> int:
        """Returns the number of private blocks of this episode that are recorded, that no table names, and that are not
        kept for a worker to claim them."""
        state = self.world.cluster.coordinator_core().state

        def count() -> int:
            spaces = [space for space in state.namespaces if space.spec.weights == self.spec.weights]
            records = [record for space in spaces if space.spec.private for record in space.index]
            names = [(record.space, record.hash) for record in records]
            return sum(not state.tables.claims(*name) and not state.eraser.in_grace(name) for name in names)

        return self.world.cluster.running_coordinator().inspect(count)

    def wait_until(self, holds: Callable[[], bool]) -> None:
        try:
            self.world.cluster.wait_until(holds, BOUND_S)
        except TimeoutError as error:
            uses = [client.resident() for client in self.clients.values()]
            raise Finding(f"not all is stored and free after {BOUND_S} s: {uses}") from error

    def count_events(self) -> None:
        """Counts what clients have done beyond memory, since the last call."""
        for number, client in self.clients.items():
            shipped, use = client.shipped(), client.resident()
            now = {
                "shipped": shipped.messages,
                "fetched": shipped.chosen.get("fetch", 0) + shipped.chosen.get("ship_and_fetch", 0),
                "loaded": shipped.loaded_bytes,
                "lent": use.borrowed_pages,
            }
            before = self._counted.get(number, {})
            for event, count in now.items():
                self.tally.events[event] += count > before.get(event, 0)
            self._counted[number] = now

    def end(self, *, patient: bool) -> None:
        """Closes all sequences: no page is left in use, once loads have ended if it is `patient`."""
        for live in self.live:
            live.sequence.close()
        self.wait_for_stores()
        strangers = self.world.public_blocks(self.spec) - self.hashes.keys()
        if strangers:
            raise Finding(f"{len(strangers)} blocks are published under ids that were never advanced in this order")
        for client in self.clients.values():
            loads = client.shipped().loaded_bytes > 0
            if patient or not loads:  # a store that has ended gives its page back on a thread of the client
                self.wait_until(lambda client=client: not client.resident().pages_used)  # type: ignore[misc]
            use = client.resident()
            if loads:  # a load that began before the end may still have its pages
                use = replace(use, pages_used=0)
            if use.sequences or use.encoded_pages or use.pages_used:
                raise Finding(f"all sequences are closed, and the resident set has {use}")

    def close(self) -> None:
        for client in self.clients.values():
            client.close()
