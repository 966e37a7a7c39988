"""Which tokens of sequences are lost: the resident set does not have their blocks, and no shard that answers does.

`MissingTokens` searches. The coordinator reports where blocks lie. It learns of a killed shard only when that shard's
reports stop, so each shard that it names is asked whether it is up; blocks of one that does not answer are looked for
on others. If no other has them, the coordinator is asked again until it knows of the failure: until then it would take
a block that is stored again for one that the cluster still has. A block that was stored a moment ago may not have been
reported yet: the shards that were written to are asked to report before it counts as lost. A coordinator that has just
restarted does not know all blocks yet: it is asked again until it does.

`AbsentBlocks` keeps the absent blocks of one client's sequences that can be attended to nevertheless: in pages borrowed
from shards of this host, or in pages of the resident set into which they are being loaded. It performs no I/O. A block
is kept until no sequence refers to it or the resident set has it; then `sweep` removes it. What is removed may be in
use, so the caller sweeps only while nothing reads (SequenceRunner.reading).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from kvcluster.core import limits
from kvcluster.core.codecs import Codec
from kvcluster.core.groups import Part
from kvcluster.core.ids import Attempt, ShardId
from kvcluster.core.messages import (
    BlockFate,
    Explained,
    RefusedKind,
    ShardAddress,
)
from kvcluster.core.miss import Loss, MissReason
from kvcluster.core.spec import KVSpec
from kvcluster.errors import KVClusterError, Unreachable
from kvcluster.sequences.block_places import block_questions
from kvcluster.sequences.blocks import PageNumber, SequenceBlock
from kvcluster.sequences.runner import SequenceRunner
from kvcluster.sequences.state import SequenceState
from kvcluster.transfers.coordinator_client import CoordinatorClient
from kvcluster.transfers.shard_connections import ShardConnections
from kvcluster.transfers.tickets import Ticket
from kvcluster.transfers.transfer import Loaded, Transfer
from kvcluster.transfers.zero_copy import BorrowedBlocks
from kvcluster.transport.base import Deadline, RefusedByShard, Unavailable

_PAUSE_S = 0.05
"""The pause between two questions to a coordinator that does not answer, or does not know all blocks yet."""

_LAST_S = 4 * _PAUSE_S
"""With less time than this left, nothing is asked again: the result is what is known then."""

_UNDECIDED = (MissReason.REBUILDING, MissReason.PENDING)
"""The coordinator does not know these blocks yet; another worker stores them; or it does not know yet that their shard
has failed."""

_PING_SHARE = 4
"""A shard has 1/4 of the time left to answer."""


@dataclass
class _Search:
    """`lost`: the blocks that were not found so far, and why. `shards`: whether each that was asked answers."""

    lost: dict[SequenceBlock, MissReason]
    shards: dict[ShardAddress, bool] = field(default_factory=dict)

    @property
    def gone(self) -> list[ShardAddress]:
        return [shard for shard, there in self.shards.items() if not there]


class MissingTokens:
    """The search for one client's blocks, of `part` of the spec's only group, with at most the loss `accept`.
    Thread-safe."""

    def __init__(
        self,
        spec: KVSpec,
        part: Part,
        accept: Loss,
        runner: SequenceRunner,
        *,
        control: CoordinatorClient,
        shards: ShardConnections,
        next_attempt: Callable[[], Attempt],
    ) -> None:
        self._specs = {False: spec, True: replace(spec, private=True)}
        self._part = part
        self._accept = accept
        self._runner = runner
        self._control = control
        self._shards = shards
        self._next_attempt = next_attempt

    def of(self, states: Sequence[SequenceState], deadline: Deadline) -> list[list[range]]:
        """Returns for each sequence the ranges of positions whose tokens are lost, in order. Raises Unreachable if the
        coordinator does not answer, or does not know all blocks by the deadline."""
        with self._runner.lock:
            absent = [_absent(state) for state in states]
        try:
            lost = self._lost(dict.fromkeys(block for of_state in absent for block in of_state), deadline)
        except Unavailable as error:
            raise Unreachable(f"the coordinator does not answer: {error.miss}; ask again for what is missing") from None
        with self._runner.lock:  # some may have been loaded meanwhile
            return [_ranges(state, [block.depth for block in _absent(state) if block in lost]) for state in states]

    # ------------------------------------------------------------------------------------------- helpers

    def _lost(self, blocks: dict[SequenceBlock, None], deadline: Deadline) -> dict[SequenceBlock, MissReason]:
        """Returns those of these absent blocks that no shard has. Raises Unavailable and Unreachable."""
        search, flushed = _Search(dict.fromkeys(blocks, MissReason.NEVER_SEEN)), False
        while search.lost:
            left = len(search.lost)
            try:
                self._ask(search, deadline)
            except Unavailable:
                if deadline.remaining_s() < _LAST_S:
                    raise
                threading.Event().wait(_PAUSE_S)
                continue
            if len(search.lost) < left:
                continue  # one answer need not cover all blocks
            undecided = any(reason in _UNDECIDED for reason in search.lost.values())
            if (flushed and not undecided) or deadline.remaining_s() < _LAST_S:
                break
            if not flushed:
                self._runner.flush_shards(deadline.share(2))
                flushed = True
            else:
                threading.Event().wait(_PAUSE_S)
        if MissReason.REBUILDING in search.lost.values():
            raise Unreachable("the coordinator has restarted and has not heard of all shards yet; ask again")
        return search.lost

    def _ask(self, search: _Search, deadline: Deadline) -> None:
        """Looks for the blocks that were not found so far: on the shards that the coordinator names, then on others if
        those do not answer."""
        believed = self._look(search, [*search.lost], (), deadline)
        unreachable = -1
        while believed and len(search.gone) > unreachable:
            unreachable = len(search.gone)
            avoid = tuple(dict.fromkeys(shard.shard for shard in search.gone))[: limits.AVOIDED_SHARDS]
            self._look(search, believed, avoid, deadline)
            believed = [block for block in believed if block in search.lost]
        search.lost.update(dict.fromkeys(believed, MissReason.PENDING))

    def _look(
        self, search: _Search, blocks: Sequence[SequenceBlock], avoid: tuple[ShardId, ...], deadline: Deadline
    ) -> list[SequenceBlock]:
        """Asks where these blocks lie, except on the shards in `avoid`. Blocks on shards that answer count as found.
        Returns those on shards that do not answer."""
        believed: list[SequenceBlock] = []
        for block, fate, spec in self._fates(blocks, avoid, deadline):
            if fate.plan is None:
                search.lost[block] = fate.miss.reason if fate.miss is not None else MissReason.NEVER_SEEN
            elif all(self._is_there(search, shard, spec, deadline) for shard in _shards(fate)):
                del search.lost[block]
            else:
                believed.append(block)
        return believed

    def _fates(
        self, blocks: Sequence[SequenceBlock], avoid: tuple[ShardId, ...], deadline: Deadline
    ) -> Iterator[tuple[SequenceBlock, BlockFate, KVSpec]]:
        """Asks the coordinator, and yields each block with its fate, and the spec of its namespace."""
        for spec, some, question in block_questions(self._specs, self._part, self._accept, blocks, avoid):
            fates = self._control.ask(Explained, spec, question, deadline).fates
            each = [fate for fate in fates for _ in range(fate.count)]
            yield from ((block, fate, spec) for block, fate in zip(some, each, strict=False))

    def _is_there(self, search: _Search, shard: ShardAddress, spec: KVSpec, deadline: Deadline) -> bool:
        """Whether this incarnation of a shard answers. Each is asked once."""
        known = search.shards.get(shard)
        if known is None:
            known = search.shards[shard] = self._answers(shard, spec, deadline)
        return known

    def _answers(self, shard: ShardAddress, spec: KVSpec, deadline: Deadline) -> bool:
        namespace = self._control.namespace(spec, deadline)
        try:
            self._shards.ping(
                shard, spec, namespace, self._next_attempt(), (0, self._part), deadline.share(_PING_SHARE)
            )
        except RefusedByShard as refused:
            return refused.refused.kind is not RefusedKind.STALE
        except KVClusterError:
            return False
        return True


def _absent(state: SequenceState) -> list[SequenceBlock]:
    return [state.blocks[depth] for depth in state.absent(range(len(state.table))) if depth not in state.dropped]


def _shards(fate: BlockFate) -> Iterable[ShardAddress]:
    return dict.fromkeys(source.shard for of_group in fate.plan or () for source in of_group or ())


def _ranges(state: SequenceState, depths: Sequence[int]) -> list[range]:
    """Returns the positions of these blocks, given in order, as few ranges as possible."""
    found: list[range] = []
    for depth in depths:
        positions = range(depth * state.block_tokens, (depth + 1) * state.block_tokens)
        if found and found[-1].stop == positions.start:
            positions = range(found.pop().start, positions.stop)
        found.append(positions)
    return found


class LentPage(NamedTuple):
    """The page of a block in the memory of a shard, which `memory` keeps mapped."""

    memory: Tensor
    codec: Codec
    loan: BorrowedBlocks


@dataclass(eq=False)
class BlockFetch:
    """A load of blocks into these pages of the resident set. `ticket` keeps them from eviction until then."""

    blocks: Sequence[SequenceBlock]
    pages: Sequence[PageNumber]
    transfer: Transfer[Loaded]
    ticket: Ticket


class AbsentBlocks:
    """`generation` counts how often blocks were removed: addresses that were asked for before may be wrong."""

    def __init__(self) -> None:
        self.generation = 0
        self.lent: dict[SequenceBlock, LentPage] = {}
        self.fetched: dict[SequenceBlock, tuple[PageNumber, BlockFetch]] = {}
        self.fetches: dict[BlockFetch, None] = {}
        self._loans: dict[BorrowedBlocks, None] = {}

    def lend(self, blocks: Sequence[SequenceBlock], loan: BorrowedBlocks) -> list[SequenceBlock]:
        """Adds those of these blocks, the first of the loan's, that are available in place. Returns the others."""
        others = []
        for at, block in enumerate(blocks):
            found = loan.coded_page(at)
            if found is None:
                others.append(block)
            else:
                # A view of its own: torch references the view object, and no other code can release this one.
                memory = torch.frombuffer(memoryview(found[0]), dtype=torch.uint8)
                self.lent[block] = LentPage(memory, found[1], loan)
        if len(others) < len(blocks):
            self._loans[loan] = None
        return others

    def fetch(self, fetch: BlockFetch) -> None:
        """Adds the blocks of a load that was begun."""
        self.fetches[fetch] = None
        for block, page in zip(fetch.blocks, fetch.pages, strict=True):
            self.fetched.setdefault(block, (page, fetch))  # another thread may have begun the same

    def fetch_ended(self, fetch: BlockFetch) -> None:
        """Removes the blocks of a load."""
        for block in fetch.blocks:
            if block in self.fetched and self.fetched[block][1] is fetch:
                del self.fetched[block]
        del self.fetches[fetch]
        self.generation += 1

    def lost(self, loan: BorrowedBlocks) -> None:
        """Removes the blocks of a loan that is not valid any more."""
        self._remove([block for block, page in self.lent.items() if page.loan is loan])

    def sweep(self) -> list[BorrowedBlocks]:
        """Removes borrowed blocks that no sequence refers to, or that the resident set has. Returns the loans of which
        no block is left: the caller closes them."""
        self._remove([block for block in self.lent if not block.references or block.page is not None])
        used = {page.loan: None for page in self.lent.values()}
        ended = [loan for loan in self._loans if loan not in used]
        for loan in ended:
            del self._loans[loan]
        return ended

    def _remove(self, blocks: Sequence[SequenceBlock]) -> None:
        for block in blocks:
            del self.lent[block]
        self.generation += bool(blocks)
