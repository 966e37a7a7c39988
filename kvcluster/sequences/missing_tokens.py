"""Which tokens of sequences are lost: the resident set does not have their blocks, and no shard that answers does.

The coordinator says where blocks lie. It learns of a killed shard only when that shard's reports stop, so each shard
that it names is asked whether it is still there; blocks of one that is not are looked for on others. If no other has
them, the coordinator is asked again until it knows, since it would take a block that is stored meanwhile for one that
the cluster has. A block that was stored a moment ago may not have been reported yet: the shards that were written to
report before it counts as lost. A coordinator that has just restarted does not know all blocks yet: it is asked again
until it does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from kvcluster.core import limits
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
from kvcluster.sequences.block_questions import block_questions
from kvcluster.sequences.blocks import SequenceBlock
from kvcluster.sequences.runner import SequenceRunner
from kvcluster.sequences.state import SequenceState
from kvcluster.transfers.coordinator_client import CoordinatorClient
from kvcluster.transfers.shard_connections import ShardConnections
from kvcluster.transport.base import Deadline, RefusedByShard, Unavailable

_PAUSE_S = 0.05
"""Between two questions to a coordinator that does not answer, or does not know all blocks yet."""

_LAST_S = 4 * _PAUSE_S
"""With less time than this left nothing is asked again: what is known by then is the answer."""

_UNDECIDED = (MissReason.REBUILDING, MissReason.PENDING)
"""The coordinator does not know these blocks yet; another worker stores them; or it does not know yet that the shard
which had them is gone."""

_PING_SHARE = 4
"""A shard has 1/4 of the time left to show that it is there."""


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
        with self._runner.lock:  # what was brought back meanwhile is there
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
        """Looks for the blocks that were not found so far: where the coordinator says, or on other shards if those do
        not answer."""
        believed = self._look(search, [*search.lost], (), deadline)
        gone = -1
        while believed and len(search.gone) > gone:
            gone = len(search.gone)
            avoid = tuple(dict.fromkeys(shard.shard for shard in search.gone))[: limits.AVOIDED_SHARDS]
            self._look(search, believed, avoid, deadline)
            believed = [block for block in believed if block in search.lost]
        search.lost.update(dict.fromkeys(believed, MissReason.PENDING))

    def _look(
        self, search: _Search, blocks: Sequence[SequenceBlock], avoid: tuple[ShardId, ...], deadline: Deadline
    ) -> list[SequenceBlock]:
        """Asks where these blocks lie, but on shards to `avoid`. Those on shards that answer are found. Returns those
        on shards that do not."""
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
        """Asks the coordinator, and yields what it says of each block, and the spec that names its namespace."""
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
