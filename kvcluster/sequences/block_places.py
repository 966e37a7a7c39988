"""Where the stored blocks of a worker's sequences lie: which shard has a page that is exactly this worker's part of a
block. The coordinator is asked once for each block, for all new blocks of a step together (`block_questions`).

What is known may be out of date: a shard that is asked reports that, and then the coordinator is asked again where the
block lies. A block that no shard has as one page, or whose place the coordinator could not report, is not asked for
again for a while. Thread-safe.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from kvcluster.core import limits
from kvcluster.core.groups import Part
from kvcluster.core.ids import BlockHash, ShardId
from kvcluster.core.messages import Explain, Explained, Need, Plan, ShardAddress
from kvcluster.core.miss import Loss
from kvcluster.core.spec import KVSpec
from kvcluster.errors import KVClusterError
from kvcluster.sequences.blocks import SequenceBlock
from kvcluster.sequences.ship_plan import CutBlocks
from kvcluster.transfers.coordinator_client import CoordinatorClient
from kvcluster.transport.base import Deadline


def block_questions(
    specs: Mapping[bool, KVSpec], part: Part, accept: Loss, blocks: Sequence[SequenceBlock], avoid: tuple[ShardId, ...]
) -> Iterator[tuple[KVSpec, Sequence[SequenceBlock], Explain]]:
    """Yields the questions where `part` of these blocks lies, except on the shards in `avoid`: each with its spec, and
    the blocks that it is about. `specs` are those of public and of `private` blocks. A block may have lost as much as
    `accept`, or as it has lost already."""
    for private, spec in specs.items():
        mine = [block for block in blocks if block.private == private]
        for first in range(0, len(mine), limits.BLOCKS_PER_CALL):
            some = mine[first : first + limits.BLOCKS_PER_CALL]
            names = tuple(block.name for block in some if block.name is not None)
            assert len(names) == len(some), "a block without a name lies on no shard"
            need = Need((part,), max(accept, *(block.loss for block in some)), avoid)
            yield spec, some, Explain(names, need)


_AGAIN_NS = 1_000_000_000
"""For this long a block that was not found is not asked for, and a shard that declined is not asked."""

_ASKING_SHARE = 4
"""Asking takes at most 1/4 of the time left: a coordinator that hangs must leave time to go on without it."""


class BlockPlaces:
    """The places of one worker's blocks, of `part` of the spec's only group, with at most the loss `accept`."""

    def __init__(
        self,
        spec: KVSpec,
        part: Part,
        accept: Loss,
        control: CoordinatorClient,
        *,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._specs = {False: spec, True: replace(spec, private=True)}
        self._part = part
        self._accept = accept
        self._control = control
        self._clock = clock
        self._lock = threading.Lock()
        # By the names of blocks, since one that is written again gets another.
        self._places: dict[BlockHash | None, tuple[SequenceBlock, ShardAddress]] = {}
        self._unplaced: dict[BlockHash | None, tuple[SequenceBlock, int]] = {}  # until when they are not looked for
        self._avoided: dict[ShardAddress, int] = {}  # until when they are not asked
        self.version = 0
        """Counts the changes of what `place_of` returns."""

    def place_of(self, cut: CutBlocks) -> ShardAddress | None:
        """Returns the shard that has a cut whole, if one is known."""
        places = {self._shard_at(block): None for block in cut.blocks}
        shard = next(iter(places)) if len(places) == 1 else None
        return None if shard in self._avoided else shard

    def locate(self, cuts: Iterable[CutBlocks], deadline: Deadline) -> None:
        """Asks the coordinator where the blocks of these cuts lie whose places are not known."""
        now = self._clock()
        with self._lock:
            self._pass(now)
            useless = [None, *self._avoided]
            unknown = dict.fromkeys(
                block
                for cut in cuts
                for block in cut.blocks
                if self._shard_at(block) in useless and block.name not in self._unplaced
            )
            avoid = tuple(dict.fromkeys(shard.shard for shard in self._avoided))[: limits.AVOIDED_SHARDS]
        for spec, blocks, question in block_questions(self._specs, self._part, self._accept, [*unknown], avoid):
            self._ask(spec, blocks, question, deadline)

    def lacking(self, cut: CutBlocks) -> None:
        """Records that the shard has declined to attend to this cut: it has removed the pages, they are on disk, or
        have lost too much."""
        until = self._clock() + _AGAIN_NS
        with self._lock:
            for block in cut.blocks:
                self._places.pop(block.name, None)
                self._unplaced[block.name] = block, until
            self.version += 1

    def avoid(self, shard: ShardAddress) -> None:
        """Records that a shard does not answer, or declines: for a while it is not asked, and blocks are placed on
        other shards that have them."""
        with self._lock:
            self._avoided[shard] = self._clock() + _AGAIN_NS
            self.version += 1

    def ask_all(self) -> None:
        """Lets every shard be asked again."""
        with self._lock:
            self._avoided.clear()
            self.version += 1

    def sweep(self) -> None:
        """Forgets blocks that no sequence refers to."""
        with self._lock:
            for known in (self._places, self._unplaced):
                for name in [name for name, (block, _) in known.items() if not block.references]:
                    del known[name]

    # ------------------------------------------------------------------------------------------- helpers

    def _pass(self, now: int) -> None:
        """Forgets the entries whose time is over."""
        over = [name for name, (_, until) in self._unplaced.items() if until <= now]
        again = [shard for shard, until in self._avoided.items() if until <= now]
        for name in over:
            del self._unplaced[name]
        for shard in again:
            del self._avoided[shard]
        self.version += bool(over or again)

    def _ask(self, spec: KVSpec, blocks: Sequence[SequenceBlock], question: Explain, deadline: Deadline) -> None:
        try:
            fates = self._control.ask(Explained, spec, question, deadline.share(_ASKING_SHARE)).fates
        except KVClusterError:
            fates = ()
        plans = [fate.plan for fate in fates for _ in range(fate.count)]
        until = self._clock() + _AGAIN_NS
        with self._lock:
            for at, block in enumerate(blocks):
                shard = self._shard_of(plans[at] if at < len(plans) else None)
                if shard is None:
                    self._unplaced[block.name] = block, until
                else:
                    self._places[block.name] = block, shard
            self.version += 1

    def _shard_at(self, block: SequenceBlock) -> ShardAddress | None:
        known = self._places.get(block.name)
        return known[1] if known is not None else None

    def _shard_of(self, plan: Plan | None) -> ShardAddress | None:
        sources = plan[0] if plan else None
        return sources[0].shard if sources and len(sources) == 1 and sources[0].part == self._part else None
