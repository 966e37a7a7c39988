"""What the oracle says of the outcomes of loads and stores."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvcluster.core.miss import Miss
from kvcluster.transfers.transfer import Stored
from tests.fuzz.client.oracle import Prefix, agrees, cut, needed
from tests.fuzz.client.world import Asked, Handed, Held, Holder, Loading, Storing, World, Wrong
from tests.fuzz.memories import UNWRITTEN, Drawn


def check_block(
    world: World,
    holder: Holder,
    asked: Asked,
    group: int,
    path: Prefix,
    memory: Drawn,
    at: int,
    since: int,
    loss: int,
    layers: Sequence[int] | None = None,
) -> None:
    """Raises Wrong unless block `at` of the memory has what that block of the prompt may have, in these layers."""
    part = holder.parts[group]
    assert part is not None
    stored, came = world.oracle.stored(asked.space, path, since), memory.read(at)
    planes = holder.spec.groups[group].planes
    for content in stored:
        right = cut(content.pages[group], part)
        if layers is not None:
            right, shown = [plane[layers] for plane in right], [plane[layers] for plane in came]
        else:
            shown = came
        if all(map(agrees, shown, right, planes, [loss] * len(planes))):
            return
    blank = all(bool((plane == UNWRITTEN).all()) for plane in came)
    raise Wrong(
        f"wrong KV: block {len(path) - 1} of group {group}, {part}, at {at} of {memory.kind} memory, loss {loss}; "
        + ("never stored" if not stored else "nothing was written" if blank else "other bytes")
    )


def check_into(
    world: World,
    holder: Holder,
    asked: Asked,
    into: Sequence[Drawn | None],
    *,
    first: int,
    boundary: int,
    missing: Collection[int] | None,
    since: int,
    loss: int,
) -> None:
    """Checks destinations after a load that ends at `boundary`: every block that a group needs there is right, but for
    those `missing`, and no other byte was written. If it is not known which miss (None), blocks behind may have any."""
    for group, memory in enumerate(into):
        if memory is None:
            continue
        start = max(first, boundary - needed(holder.spec, group, boundary))
        for block in range(start, boundary):
            if not missing or block not in missing:
                check_block(world, holder, asked, group, asked.paths[block], memory, block - first, since, loss)
        whole = missing is None
        for at in range(len(memory.rows)) if whole else range(start - first, boundary - first):
            memory.wipe(at)
    for group, memory in enumerate(into):
        if memory is not None and not memory.untouched():
            raise Wrong(f"group {group}: a byte beside the blocks of {memory.kind} memory was written")
    world.wiped.append(list(into))


def check_loaded(world: World, loading: Loading) -> None:
    """Waits for a load that was begun, and checks what came."""
    loaded = loading.transfer.result()
    held, first, ticket = loading.held, loading.first, loading.held.ticket
    if not first <= loaded.blocks <= ticket.blocks:
        raise Wrong(f"{loaded} of {ticket} from {first} on")
    if (loaded.miss is None) != (not loaded.failed) or (loaded.miss is None) != (loaded.blocks == ticket.blocks):
        raise Wrong(f"{loaded} contradicts itself")
    if loaded.loss > loading.holder.accept:
        raise Wrong(f"{loaded}, but no more than {loading.holder.accept} was accepted")
    count_misses(world, loaded.miss)
    world.tally["blocks loaded"] += loaded.blocks - first
    world.tally[f"loads with loss {loaded.loss.name}"] += loaded.blocks > first
    if is_certain(world, loading) and loaded.miss is not None:
        raise Wrong(f"{loaded}, though nothing was evicted")
    check_into(
        world,
        loading.holder,
        held.asked,
        loading.into,
        first=first,
        boundary=ticket.blocks,
        missing=loaded.failed,
        since=held.since,
        loss=loaded.loss,
    )


def is_certain(world: World, loading: Loading) -> bool:
    """Whether nothing can have come between a load and its ticket."""
    return world.roomy and loading.held.since == world.oracle.since(loading.held.asked.space)


def check_layer(world: World, loading: Loading, layer: tuple[int, int, int]) -> None:
    """Waits for one layer of a load, and checks it in every block."""
    model_layer, group, number = layer
    if not loading.transfer.wait_layer(model_layer):
        if is_certain(world, loading):
            raise Wrong(f"layer {model_layer} did not come")
        return
    world.tally["layers awaited"] += 1
    boundary, memory = loading.held.ticket.blocks, loading.into[group]
    assert memory is not None
    for block in range(max(loading.first, boundary - needed(loading.holder.spec, group, boundary)), boundary):
        check_block(
            world,
            loading.holder,
            loading.held.asked,
            group,
            loading.held.asked.paths[block],
            memory,
            block - loading.first,
            loading.held.since,
            loading.holder.accept,
            [number],
        )


def end_store(world: World, storing: Storing) -> None:
    """Waits for a store that was begun, and notes what every client must find after a flush."""
    before = snapshot(storing.sources)
    stored = storing.transfer.result()
    if before != snapshot(storing.sources):
        raise Wrong("a store wrote to its source")
    note_stored(world, storing.handed, stored, scribbled=storing.scribbled)


def hand(world: World, holder: Holder, asked: Asked, first: int) -> Handed:
    """Takes down that these blocks are handed to a store, before they are."""
    contents = [world.oracle.content(asked.space, path) for path in asked.paths[first:]]
    for content in contents:
        for handed, part in zip(content.handed, holder.parts, strict=True):
            if part is not None and part not in handed:
                handed.append(part)
    return Handed(holder, contents)


def note_stored(world: World, handed: Handed, stored: Stored, *, scribbled: bool = False) -> None:
    """Takes down that these blocks are stored, if they all are."""
    blocks = len(handed.contents)
    count_misses(world, stored.miss)
    world.tally["blocks stored"] += stored.blocks
    world.tally["blocks deduplicated"] += stored.deduplicated
    if stored.blocks + stored.deduplicated + stored.pending > blocks:
        raise Wrong(f"{stored} of {blocks} blocks")
    if stored.miss is None and not stored.pending and not scribbled:
        if stored.blocks + stored.deduplicated != blocks:
            raise Wrong(f"{stored} of {blocks} blocks, without a miss")
        world.unflushed.append(handed)


def check_boundary(world: World, holder: Holder, asked: Asked, blocks: int, what: str) -> None:
    """Raises Wrong unless a cached prefix of so many blocks is possible; and in a roomy world, certain."""
    least = world.oracle.longest(asked.space, asked.paths, holder.parts, known=True) if world.roomy else 0
    most = world.oracle.longest(asked.space, asked.paths, holder.parts, known=False)
    if not least <= blocks <= most:
        raise Wrong(f"{what} found {blocks} blocks of {len(asked.paths)}; expected {least} to {most}")


def snapshot(memories: Sequence[Drawn | None]) -> list[bytes]:
    return [owner.tobytes() for memory in memories if memory is not None for owner in memory.owners]


def count_misses(world: World, miss: Miss | None) -> None:
    if miss is not None:
        world.tally[f"miss {miss.reason.value}"] += 1


def hold(world: World, held: Held) -> None:
    world.tickets.append(held)
    if len(world.tickets) > 6:
        world.tickets.pop(0).ticket.release()
