"""The listing of pins: which blocks users have pinned, some in each answer.

A pin has no record of its own: a namespace has the end of the pin of each block (namespaces.py). So what is listed is
what is spared from eviction now, whatever was evicted, lost or unpinned since it was asked for. A client joins the
runs of all answers to the prompts that they are prefixes of (client/pinning.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from kvcluster.core import limits
from kvcluster.core.coordinator.index import BlockRecord
from kvcluster.core.coordinator.namespaces import CoordinatorNamespace, NamespaceTable
from kvcluster.core.ids import BlockHash
from kvcluster.core.messages import GetPins, PinList, PinnedRun


def list_pins(table: NamespaceTable, spaces: Iterable[CoordinatorNamespace], question: GetPins, now: int) -> PinList:
    """Returns the next pinned blocks of these namespaces, those that `question` asks for."""
    wanted = [space for space in spaces if space.pinned and question.model in (None, space.spec.model)]
    total = sum(len(space.pinned) for space in wanted)
    runs: list[PinnedRun] = []
    skipped = skip = min(question.skip, total)
    looked_at = named = 0
    for space in wanted:
        pins = islice(space.pinned.items(), skip, skip + limits.BLOCKS_PER_CALL - looked_at)
        some = [(block, until) for block, (until, _) in pins]
        skip = max(0, skip - len(space.pinned))
        looked_at += len(some)
        named += bool(some)
        runs += _runs(table, space, some, now)
        if looked_at == limits.BLOCKS_PER_CALL or named == limits.LISTED_NAMESPACES:
            break
    more = total - skipped - looked_at
    return PinList(tuple(runs), skipped + looked_at if more else 0, more)


def _runs(
    table: NamespaceTable, space: CoordinatorNamespace, pinned: Iterable[tuple[BlockHash, int]], now: int
) -> list[PinnedRun]:
    """Returns these blocks without those whose pin has ended, as runs of blocks that are alike."""
    found: list[tuple[BlockRecord, int, int, list[BlockHash]]] = []  # each with its first record
    for block, until in pinned:
        record = space.index.get(block)
        if until <= now or record is None:
            continue
        nbytes = table.bytes_on(record)
        if found and (found[-1][3][-1], *found[-1][1:3]) == (record.parent, nbytes, until):
            found[-1][3].append(block)
        else:
            found.append((record, nbytes, until, [block]))
    return [
        PinnedRun(space.tenant, space.spec, record.parent, record.depth, tuple(blocks), nbytes, until - now)
        for record, nbytes, until, blocks in found
    ]
