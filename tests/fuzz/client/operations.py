"""The verbs of a client, each as one drawn operation on a world.

Each has a generator of its own, so that what one draws does not depend on what the cluster answered another."""

from __future__ import annotations

import threading
from collections.abc import Callable
from random import Random

from kvcluster.core.ids import ShardId
from kvcluster.core.miss import Loss
from kvcluster.errors import CallerError
from tests.fuzz.client.checks import (
    check_boundary,
    check_into,
    check_layer,
    check_loaded,
    count_misses,
    end_store,
    hand,
    hold,
    note_stored,
    snapshot,
)
from tests.fuzz.client.oracle import cut, needed
from tests.fuzz.client.world import Asked, Held, Holder, Loading, Storing, World, Wrong, argument
from tests.fuzz.memories import Cell, Drawn, drawn, entangled, unplaced

Operation = Callable[[World, Random], None]


# ------------------------------------------------------------------------------------------------------ stores


def store(world: World, rng: Random) -> None:
    holder = rng.choice(world.holders)
    asked = world.ask(rng, holder)
    sources = filled(world, rng, holder, asked, 0)
    handed, before = hand(world, holder, asked, 0), snapshot(sources)
    note_stored(world, handed, holder.client.store(asked.prompt, argument(sources)))
    if snapshot(sources) != before:
        raise Wrong("a store wrote to its source")


def begin_store(world: World, rng: Random) -> None:
    """Begins one from some block on. It ends later; its source is scribbled over as soon as that is allowed."""
    holder = rng.choice(world.holders)
    asked = world.ask(rng, holder)
    first = rng.randint(0, len(asked.paths))
    sources = filled(world, rng, holder, asked, first)
    handed = hand(world, holder, asked, first)
    hashes = holder.client.hashes(asked.prompt)
    tokens = [token for block in (asked.paths[-1][first:] if asked.paths else ()) for token in block[0]]
    transfer = holder.client.begin_store(
        hashes,
        argument(sources),
        first=first,
        adapter=asked.prompt.adapter,
        token_ids=rng.choice([(), tokens]),
    )
    storing = Storing(transfer, handed, sources)
    world.stores.append(storing)
    if rng.random() < 0.1:
        transfer.cancel()
        world.tally["cancelled"] += 1
    if transfer.source_free() and rng.random() < 0.5:
        scribble(sources)
        storing.scribbled = True
        world.tally["sources overwritten once free"] += 1


def filled(world: World, rng: Random, holder: Holder, asked: Asked, first: int) -> list[Drawn | None]:
    """Draws memory with the KV of a prompt's blocks from `first` on."""
    memories: list[Drawn | None] = []
    for group, cell in enumerate(holder.cells(len(asked.paths) - first)):
        memories.append(None if cell is None else drawn(rng, cell))
        for at, path in enumerate(asked.paths[first:] if cell else ()):
            content = world.oracle.content(asked.space, path)
            memories[-1].write(at, cut(content.pages[group], cell.part))  # type: ignore[union-attr]
    return memories


def scribble(memories: list[Drawn | None]) -> None:
    for memory in memories:
        for owner in memory.owners if memory is not None else ():
            owner[:] = 0xEE


def end_a_store(world: World, rng: Random) -> None:
    at = rng.random()
    if world.stores:
        end_store(world, world.stores.pop(int(at * len(world.stores))))


def flush(world: World, rng: Random) -> None:
    """Afterwards every client finds what was stored."""
    del rng
    while world.stores:
        end_store(world, world.stores.pop(0))
    noted, world.unflushed = world.unflushed, []
    flushed = [holder.client.flush() for holder in world.holders]
    if all(flushed):
        for holder, contents in noted:
            for content in contents:
                for known, part in zip(content.known, holder.parts, strict=True):
                    if part is not None and part not in known:
                        known.append(part)


# ------------------------------------------------------------------------------------------------------- loads


def lookup(world: World, rng: Random) -> None:
    holder = rng.choice(world.holders)
    asked = world.ask(rng, holder)
    accept = rng.choice([None, *Loss])
    found = holder.client.lookup(asked.prompt, accept=accept)
    if found.tokens != found.blocks * holder.spec.block_tokens or found.loss > (
        holder.accept if accept is None else accept
    ):
        raise Wrong(f"{found} of {asked.prompt}, accepting {accept}")
    if (found.reason is None) != (found.blocks == len(asked.paths)) and asked.paths:
        raise Wrong(f"{found} of {len(asked.paths)} blocks")
    count_misses(world, found.reason)
    check_boundary(world, holder, asked, found.blocks, "lookup")


def load(world: World, rng: Random) -> None:
    """The whole call, into memory with room for every block, and often for more than is cached."""
    holder = rng.choice(world.holders)
    asked = world.ask(rng, holder)
    into = destinations(rng, holder, len(asked.paths) + rng.choice([0, 0, 1, 3]))
    since, accept = world.oracle.since(asked.space), rng.choice([None, None, None, *Loss])
    deadline = 0 if rng.random() < 0.03 else None
    tokens = holder.client.load(asked.prompt, argument(into), accept=accept, deadline_ms=deadline)
    blocks, rest = divmod(tokens, holder.spec.block_tokens)
    if rest or blocks > len(asked.paths):
        raise Wrong(f"{tokens} tokens loaded of {asked.prompt}")
    if deadline is None:
        check_boundary(world, holder, asked, blocks, "load")
    world.tally["blocks loaded"] += blocks
    world.tally["loads of a shorter prefix"] += 0 < blocks < len(asked.paths)
    check_into(
        world,
        holder,
        asked,
        into,
        first=0,
        boundary=blocks,
        missing=() if world.roomy and deadline is None else None,
        since=since,
        loss=holder.accept if accept is None else accept,
    )


def prepare(world: World, rng: Random) -> None:
    holder = rng.choice(world.holders)
    asked = world.ask(rng, holder)
    whole = rng.random() < 0.5
    since = world.oracle.since(asked.space)
    hashes = holder.client.hashes(asked.prompt)
    ticket = holder.client.prepare_load(hashes, whole=whole, adapter=asked.prompt.adapter)
    if whole:
        holder_of_all = Holder(
            holder.client, holder.spec, holder.number, holder.tenant, holder.spec.whole_parts(), holder.accept
        )
        check_boundary(world, holder_of_all, asked, ticket.blocks, "prepare_load(whole)")
    else:
        check_boundary(world, holder, asked, ticket.blocks, "prepare_load")
    if ticket.blocks or rng.random() < 0.1:
        hold(world, Held(ticket, asked, holder, whole, since))


def begin_load(world: World, rng: Random) -> None:
    """By a ticket that is held, where it was made or elsewhere; from some block on; with placeholders for what is not
    loaded. It ends at once, or later."""
    which, elsewhere, at = rng.random(), rng.random() < 0.5, rng.random()
    later, cancel, awaited = rng.random() < 0.4, rng.random() < 0.1, rng.random() < 0.5
    other = rng.choice(world.holders)
    if not world.tickets:
        return
    held = world.tickets[int(which * len(world.tickets))]
    holder, ticket = (other if elsewhere else held.holder), held.ticket
    if (holder.number, holder.tenant) != (held.holder.number, held.holder.tenant):
        holder = held.holder
    if elsewhere:
        ticket = holder.client.redeem(bytes(ticket))
        world.tally["tickets redeemed elsewhere"] += 1
    first = int(at * (ticket.blocks + 1))
    into = destinations(rng, holder, ticket.blocks - first + rng.choice([0, 0, 2]))
    for group, memory in enumerate(into):
        skipped = ticket.blocks - first - needed(holder.spec, group, ticket.blocks)
        if memory is not None and skipped > 0 and rng.random() < 0.5:
            unplaced(rng, memory, range(skipped))
            world.tally["placeholders"] += 1
    fits = held.whole or all(
        mine is None or (theirs is not None and theirs.intersect(mine) == mine)
        for mine, theirs in zip(holder.parts, held.holder.parts, strict=True)
    )
    try:
        transfer = holder.client.begin_load(ticket, argument(into), first=first, adapter=held.asked.space.adapter)
    except CallerError:
        if fits:
            raise
        world.tally["tickets of another part refused"] += 1
        return
    if not fits:
        raise Wrong("a ticket was redeemed for more than it was prepared for")
    loading = Loading(transfer, held, holder, first, into)
    layer = rng.choice(holder.layers())
    if cancel and not world.roomy:
        transfer.cancel()  # nothing is written any more
        world.tally["cancelled"] += 1
    if awaited:
        check_layer(world, loading, layer)
    if later:
        world.loads.append(loading)
    else:
        check_loaded(world, loading)


def end_a_load(world: World, rng: Random) -> None:
    at = rng.random()
    if world.loads:
        check_loaded(world, world.loads.pop(int(at * len(world.loads))))


def release(world: World, rng: Random) -> None:
    """Ends a ticket. Loads by it end first: they may lose their blocks otherwise."""
    at = rng.random()
    if world.tickets:
        while world.loads:
            check_loaded(world, world.loads.pop(0))
        world.tickets.pop(int(at * len(world.tickets))).ticket.release()


def destinations(rng: Random, holder: Holder, blocks: int) -> list[Drawn | None]:
    return [None if cell is None else drawn(rng, cell) for cell in holder.cells(blocks)]


# ------------------------------------------------------------------------------------------------- other verbs


def explain(world: World, rng: Random) -> None:
    holder = rng.choice(world.holders)
    asked = world.ask(rng, holder)
    explained = holder.client.explain(asked.prompt)
    hits = [each.block for each in explained if each.hit]
    if len(explained) < len(asked.paths) or any(block >= len(asked.paths) for block in hits):
        raise Wrong(f"{explained} for {len(asked.paths)} blocks")
    since = world.oracle.since(asked.space)
    if any(not world.oracle.stored(asked.space, asked.paths[block], since) for block in hits):
        raise Wrong(f"explain knows blocks that were never stored: {explained}")


def pin(world: World, rng: Random) -> None:
    holder = rng.choice(world.holders)
    asked = world.ask(rng, holder)
    if rng.random() < 0.6:
        pinned = holder.client.pin(asked.prompt, rng.choice([0.05, 60]), replicas=rng.choice([1, 1, 2]))
    else:
        pinned = holder.client.unpin(asked.prompt)
    if pinned.tokens != pinned.blocks * holder.spec.block_tokens or pinned.blocks > len(asked.paths):
        raise Wrong(f"{pinned} of {asked.prompt}")
    world.tally["blocks pinned"] += pinned.blocks


def purge(world: World, rng: Random) -> None:
    """Removes what matches, or all of a tenant, for ever."""
    holder = rng.choice(world.holders)
    kind = rng.choice(["clear", "model", "weights", "adapter"])
    adapter = rng.choice(["", "sha256:a", "sha256:b"])
    world.settle()
    for storing in world.stores:
        end_store(world, storing)
    tenant, spec = holder.tenant, holder.spec
    if kind == "clear":
        holder.client.clear()
        world.oracle.purge(lambda space: space.tenant == tenant)
    elif kind == "model":
        holder.client.purge(model=spec.model)
        world.oracle.purge(lambda space: space.tenant == tenant and world.specs[space.spec].model == spec.model)
    elif kind == "weights":
        holder.client.purge(weights=spec.weights)
        world.oracle.purge(lambda space: space.tenant == tenant and world.specs[space.spec].weights == spec.weights)
    else:
        holder.client.purge(adapter=adapter)
        world.oracle.purge(lambda space: (space.tenant, space.adapter) == (tenant, adapter))


def misuse(world: World, rng: Random) -> None:
    """Destinations of which some layer may lie within another: refused exactly if a byte is used twice, whatever is
    cached; then nothing is written."""
    holder = rng.choice(world.holders)
    asked = world.ask(rng, holder)
    cells = holder.cells(len(asked.paths))
    some = [cell for cell in cells if cell is not None]
    if not asked.paths:
        return
    memories, twice = entangled(rng, some)
    into = iter(memories)
    given = [None if cell is None else next(into) for cell in cells]
    since = world.oracle.since(asked.space)
    try:
        tokens = holder.client.load(asked.prompt, argument(given))
    except CallerError as error:
        if not twice or "twice" not in str(error):
            raise
        if not all(memory.untouched() for memory in memories):
            raise Wrong("memory was written before it was refused") from None
        world.tally["destinations used twice"] += 1
        return
    if twice:
        raise Wrong("a destination that uses memory twice was accepted")
    check_into(
        world,
        holder,
        asked,
        given,
        first=0,
        boundary=tokens // holder.spec.block_tokens,
        missing=() if world.roomy else None,
        since=since,
        loss=holder.accept,
    )


def misfit(world: World, rng: Random) -> None:
    """Memory that does not fit is refused before a byte moves."""
    holder = rng.choice(world.holders)
    asked = world.ask(rng, holder)
    group = rng.choice([at for at, part in enumerate(holder.parts) if part is not None])
    cells = holder.cells(len(asked.paths))
    cell = cells[group]
    assert cell is not None
    if len(asked.paths) < 2:
        return
    kind = rng.choice(["blocks", "layers", "heads", "repeated", "groups"])
    repeated = False
    if kind == "blocks":
        cells[group] = cell._replace(blocks=cell.blocks - 1)
    elif kind == "layers":
        cells[group] = cell._replace(part=cell.part._replace(layer_stop=cell.part.layer_stop + 1))
    elif kind == "heads":
        cells[group] = cell._replace(part=cell.part._replace(head_stop=cell.part.head_stop + 1))
    repeated = kind == "repeated"
    into = [None if each is None else drawn(rng, each) for each in cells]
    if kind in ("layers", "heads") and into[group].kind == "bytes":  # type: ignore[union-attr]
        return  # they may be those of more blocks
    given = argument(into)
    if repeated:
        table = Cell(cell.group, cell.part, cell.block_tokens, 1)
        into[group] = drawn(rng, table, ids=[0])
        memory = into[group]
        assert memory is not None
        if not hasattr(memory.memory, "block_ids"):
            return
        memory.memory = type(memory.memory)(memory.memory.layers, [0] * len(asked.paths))
        given = argument(into)
    elif kind == "groups":
        given = [*(given if isinstance(given, list) else [given]), given]
    try:
        holder.client.load(asked.prompt, given)
    except CallerError:
        if not all(memory is None or memory.untouched() for memory in into):
            raise Wrong("memory was written before it was refused") from None
        world.tally["misfits refused"] += 1
        return
    raise Wrong(f"memory with wrong {kind} was accepted")


# ------------------------------------------------------------------------------------------------------ faults


def break_paths(world: World, rng: Random) -> None:
    """The next stores lose their path, and take another."""
    world.paths.breaks = rng.choice([1, 1, 2])


def together(world: World, rng: Random) -> None:
    """Several threads use the clients at once, some of them one client."""
    failures: list[BaseException] = []

    def use(verb: Operation, rng: Random) -> None:
        try:
            verb(world, rng)
        except BaseException as error:
            failures.append(error)

    verbs = rng.choices([store, load, lookup, prepare], [4, 4, 1, 1], k=rng.choice([2, 2, 3]))
    threads = [threading.Thread(target=use, args=[verb, Random(rng.getrandbits(48))]) for verb in verbs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    world.tally["threads"] += len(threads)
    if failures:
        raise failures[0]


def fault(world: World, rng: Random) -> None:
    """A flipped bit, a lost shard, or a coordinator that starts again; none in a roomy world."""
    kind, bit, at = rng.choice(["bit", "bit", "bit", "shard", "coordinator"]), rng.randrange(2**20), rng.random()
    if not world.faults:
        return
    shards = sorted(world.cluster.shards)
    shard = shards[int(at * len(shards))]
    if kind == "bit":
        try:
            world.cluster.corrupt(shard, bit=bit)
        except LookupError:
            return
    elif kind == "shard":
        if world.doors is not None:
            world.doors.close(shard)
        world.cluster.stop_shard(shard)
        world.cluster.start_shard(int(ShardId(shard).rsplit("-", 1)[1]))
        world.cluster.wait_until_up()
    else:
        world.cluster.stop_coordinator()
        world.cluster.start_coordinator()
        world.cluster.wait_until_up()
    world.tally[f"fault {kind}"] += 1


OPERATIONS: dict[Operation, int] = {
    store: 13,
    begin_store: 8,
    end_a_store: 5,
    flush: 8,
    lookup: 6,
    load: 20,
    prepare: 10,
    begin_load: 16,
    end_a_load: 4,
    release: 1,
    explain: 2,
    pin: 3,
    misuse: 3,
    misfit: 2,
    purge: 1,
    fault: 2,
    break_paths: 2,
    together: 3,
}
"""Each verb, and how often it is drawn beside the others."""
