"""One layer of a step: its query as it is sent to shards, and loads of that layer alone.

`layer_query` and `split_asks` make the messages that are sent to shards, within the limits.

`LayerLoads` loads single layers of absent blocks into scratch pages, where they stay for one call of attention. A
ticket names where blocks lie, for all layers and for every step that reads them; so the tickets used last are kept, and
the coordinator is asked again only when other blocks are absent or a load has failed. They hold no lease: blocks of
open sequences are not evicted (ADR 47).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from kvcluster.attention import PageLayout, Scoring
from kvcluster.attention.span_results import pack_query, result_bytes
from kvcluster.core import limits
from kvcluster.core.attend_work import attend_work
from kvcluster.core.groups import Part
from kvcluster.core.ids import BlockHash
from kvcluster.core.miss import Loss, Miss, MissReason
from kvcluster.core.position_tree import Subtree
from kvcluster.core.spec import KVSpec
from kvcluster.errors import LostTokens
from kvcluster.sequences.blocks import SequenceBlock
from kvcluster.sequences.scratch_pages import ScratchPages
from kvcluster.sequences.ship_plan import AskedRow, SeenBlocks
from kvcluster.sequences.step_lock import StepLock, StepTurn
from kvcluster.transfers.bound_memory import bind
from kvcluster.transfers.deadlines import remaining_ms
from kvcluster.transfers.tickets import Ticket
from kvcluster.transfers.transfer import Loaded, Transfer
from kvcluster.transfers.transfer_queue import TransferQueue
from kvcluster.transport.base import Deadline


class LayerQuery(NamedTuple):
    """The query of one layer of a step: `data` is `[tokens, heads, dim]` of `dtype`, `starts` and `positions` say for
    each row where its tokens begin there, and at which position; the last of `starts` is the number of tokens."""

    layer: int
    data: memoryview
    heads: int
    dim: int
    value_dim: int
    dtype: str
    starts: Sequence[int]
    positions: Sequence[int]
    scoring: Scoring
    latent_values: int

    def tokens(self, row: int) -> int:
        return self.starts[row + 1] - self.starts[row]

    def of_rows(self, rows: Sequence[int]) -> memoryview:
        """Returns the bytes of the query tokens of these rows."""
        if list(rows) == list(range(len(self.starts) - 1)):
            return self.data
        each = self.data.nbytes // max(1, self.starts[-1])
        return memoryview(b"".join(self.data[each * self.starts[row] : each * self.starts[row + 1]] for row in rows))


def layer_query(
    layer: int, query: Tensor, rows: Sequence[SeenBlocks], layout: PageLayout, scoring: Scoring
) -> LayerQuery | None:
    """Returns the query `[tokens, heads, dim]` of these rows as it is sent; None if it does not fit the pages or the
    limits. Then attention in this process computes it, or raises."""
    fits = query.dim() == 3 and query.is_floating_point() and query.shape[2] == layout.key.dim
    if not fits or not query.shape[1] or query.shape[1] % layout.heads or len(query) > limits.ATTEND_TOKENS:
        return None
    dtype, data = pack_query(query)
    made = LayerQuery(
        layer,
        data,
        query.shape[1],
        query.shape[2],
        layout.value_dim,
        dtype,
        [0, *itertools.accumulate(row.queries for row in rows)],
        [row.visible - row.queries for row in rows],
        scoring,
        layout.latent_values or 0,
    )
    return made if _may_ship(made) else None


def split_asks(rows: Sequence[AskedRow], query: LayerQuery) -> list[list[AskedRow]]:
    """Divides what is asked of one shard into messages within the limits: a single one, except for long prompts."""
    if _fits(rows, query):
        return [list(rows)]
    parts: list[list[AskedRow]] = []
    for row in rows:
        for mine in _by_subtrees(row, query):
            last = parts[-1] if parts else []
            if last and last[-1].row == row.row:
                before = last[-1]
                grown = [*last[:-1], AskedRow(row.row, before.cuts + mine.cuts, before.subtrees + mine.subtrees)]
            else:
                grown = [*last, mine]
            if last and _fits(grown, query):
                parts[-1] = grown
            else:
                parts.append([mine])
    return parts


def _may_ship(query: LayerQuery) -> bool:
    """Whether a query of this size may be sent at all: it, and the smallest result of any of its rows, are within the
    limits."""
    rows = range(len(query.starts) - 1)
    most = max((query.tokens(row) for row in rows), default=0)
    return (
        query.data.nbytes <= limits.ATTEND_BYTES
        and result_bytes(most, query.heads, query.value_dim) <= limits.ATTEND_BYTES
        and _work(query, most, 1) <= limits.ATTEND_WORK
    )


def _by_subtrees(row: AskedRow, query: LayerQuery) -> Iterator[AskedRow]:
    """Yields what a row wants, one subtree at a time; a subtree that is too large for a message is divided into
    halves."""
    left = list(reversed(row.subtrees))
    while left:
        subtree = left.pop()
        cuts = tuple(cut for cut in row.cuts if subtree.contains(Subtree(0, cut.cut)))
        mine = AskedRow(row.row, cuts, (subtree,))
        if subtree.level and not _fits([mine], query):
            first = Subtree(subtree.level - 1, 2 * subtree.index)
            left += [Subtree(first.level, first.index + 1), first]
        else:
            yield mine


def _fits(rows: Sequence[AskedRow], query: LayerQuery) -> bool:
    """Whether one message takes what these rows ask for."""
    tokens = [query.tokens(row.row) for row in rows]
    names = sum(len(row.cuts) for row in rows)
    results = sum(len(row.subtrees) * count for row, count in zip(rows, tokens, strict=True))
    work = sum(_work(query, count, len(row.cuts)) for row, count in zip(rows, tokens, strict=True))
    return (
        len(rows) <= limits.ATTEND_ROWS
        and sum(tokens) <= limits.ATTEND_TOKENS
        and names <= limits.SPANS_PER_CALL
        and result_bytes(results, query.heads, query.value_dim) <= limits.ATTEND_BYTES
        and work <= limits.ATTEND_WORK
    )


def _work(query: LayerQuery, tokens: int, cuts: int) -> int:
    return attend_work(tokens, cuts, heads=query.heads, channels=query.dim + query.value_dim)


_TRIES = 3
"""Failed loads in a row after which blocks count as lost."""

_TICKETS = 64
"""Lists of blocks whose tickets are kept. A call has one for each part of the context that fits a buffer; for each part
beyond this number, the coordinator is asked again, which takes less time than the load."""

BlockRun = tuple[KVSpec, Sequence[SequenceBlock], Ticket]
"""Blocks of one namespace, and the ticket that names where they lie."""


class LayerLoads:
    """The loads of single layers of `part`, for the sequences of one client. `find` returns where absent blocks lie, or
    raises LostTokens; `lost` makes that error. Thread-safe."""

    def __init__(
        self,
        transfers: TransferQueue,
        part: Part,
        *,
        find: Callable[[Sequence[SequenceBlock], Deadline], list[BlockRun]],
        lost: Callable[[SequenceBlock, Miss], LostTokens],
        lock: StepLock,
    ) -> None:
        self._transfers = transfers
        self._part = part
        self._find = find
        self.lost = lost
        self.turn = StepTurn(lock, "another thread streams blocks through scratch pages")
        """A call holds it from when it takes scratch pages until it has freed them: there may be no room for those of
        two calls, and their loads would only wait for each other."""
        self._lock = threading.Lock()
        # By the names of blocks, since one that is written again gets another; those used last are the last.
        self._runs: dict[tuple[BlockHash | None, ...], list[BlockRun]] = {}

    def begin(
        self, blocks: Sequence[SequenceBlock], layer: int, into: ScratchPages, buffer: int, deadline: Deadline
    ) -> LayerLoad:
        """Begins to load a layer of these blocks, in their order, into the first slots of a buffer. Raises LostTokens
        if the cluster has lost one of them."""
        return LayerLoad(self, tuple(blocks), layer, into, buffer, deadline)

    def runs(self, blocks: tuple[SequenceBlock, ...], deadline: Deadline) -> list[BlockRun]:
        """Returns where these blocks lie. Raises LostTokens."""
        names = tuple(block.name for block in blocks)
        with self._lock:
            known = self._runs.pop(names, None)
        runs = self._find(blocks, deadline) if known is None else known
        with self._lock:
            kept = [(key, of_key) for key, of_key in self._runs.items() if of_key[0][1][0].references]
            self._runs = dict([*kept[-_TICKETS + 1 :], (names, runs)])
        return runs

    def forget(self, blocks: tuple[SequenceBlock, ...]) -> None:
        """Has the coordinator asked again where these blocks lie."""
        with self._lock:
            self._runs.pop(tuple(block.name for block in blocks), None)

    def transfer(
        self, run: BlockRun, layer: int, into: ScratchPages, buffer: int, first: int, deadline: Deadline
    ) -> Transfer[Loaded]:
        """Begins one load into a buffer, from its slot `first` on."""
        spec, blocks, ticket = run
        start = self._part.layer_start + layer
        parts = (self._part._replace(layer_start=start, layer_stop=start + 1),)
        bound = bind(into.paged(buffer, first, len(blocks)), spec, parts, len(blocks), writable=True)
        return self._transfers.load(ticket.body, 0, bound, spec, deadline, parts=parts)


class LayerLoad:
    """One layer of some blocks on its way into a buffer of scratch pages. Made by LayerLoads.begin. The pages may be
    used for something else after `wait` or `cancel`."""

    def __init__(
        self,
        loads: LayerLoads,
        blocks: tuple[SequenceBlock, ...],
        layer: int,
        into: ScratchPages,
        buffer: int,
        deadline: Deadline,
    ) -> None:
        self._loads = loads
        self._blocks = blocks
        self._layer = layer
        self._into = into
        self._buffer = buffer
        self._under_way: list[tuple[BlockRun, Transfer[Loaded]]] = []
        self._begin(deadline)

    def wait(self, deadline: Deadline) -> Loss:
        """Waits until all of it is there, and returns the worst loss. What fails is loaded again; raises LostTokens if
        that fails too."""
        failures = 0
        while True:
            loss, lost = Loss.EXACT, list[SequenceBlock]()
            for (_, blocks, _), transfer in self._under_way:
                loaded = transfer.result(remaining_ms(deadline))
                loss = max(loss, loaded.loss)
                lost += blocks[loaded.blocks :]
            if not lost:
                return loss
            failures += 1
            self._loads.forget(self._blocks)
            if failures == _TRIES:
                raise self._loads.lost(lost[0], Miss(MissReason.DEADLINE, "its loads failed"))
            self._begin(deadline)

    def cancel(self) -> None:
        """Ends the load: when this returns, nothing is written any more."""
        for _, transfer in self._under_way:
            transfer.cancel()

    def _begin(self, deadline: Deadline) -> None:
        self._under_way, first = [], 0
        try:
            for run in self._loads.runs(self._blocks, deadline) if self._blocks else ():
                transfer = self._loads.transfer(run, self._layer, self._into, self._buffer, first, deadline)
                self._under_way.append((run, transfer))
                first += len(run[1])
        except BaseException:
            self.cancel()
            raise
