"""The store job: from the caller's memory to committed pages on the shards that the coordinator chose."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from kvcluster.client.control import NO_CALL, Control
from kvcluster.client.results import Stored
from kvcluster.client.shards import Shards
from kvcluster.client.transfer import Transfer
from kvcluster.core.ids import Attempt, NamespaceId
from kvcluster.core.messages import (
    Decision,
    Done,
    EndTicket,
    NewPage,
    PageKey,
    PrepareStore,
    ShardAddress,
    StoreGrant,
    WriteRequest,
    Written,
)
from kvcluster.core.reasons import Miss, MissReason
from kvcluster.core.spec import KVSpec
from kvcluster.errors import KVClusterError
from kvcluster.pages import checksum
from kvcluster.pages.codec import RAW
from kvcluster.transport.seam import Deadline, Trouble

if TYPE_CHECKING:  # it imports torch, which a client without tensors need not have
    from kvcluster.client.memory import Bound

_FAREWELL_MS = 1_000
"""A store whose own time is up has all the more reason to say so; nobody waits for it but the next store."""

_MISSES = {
    Written.CORRUPT: Miss(MissReason.CORRUPT, "what arrived did not match its checksum"),
    Written.FULL: Miss(MissReason.FULL),
    Written.LOST: Miss(MissReason.SHARD_LOST, "the shard could not commit"),
}


class _Source:
    """Gathers the pages that one shard takes, and their checksums."""

    def __init__(
        self,
        spec: KVSpec,
        namespace: NamespaceId,
        pages: Sequence[NewPage],
        blocks: Sequence[int],
        source: Bound,
        transfer: Transfer[Stored],
        is_last: bool,
    ) -> None:
        self._spec = spec
        self._namespace = namespace
        self._pages = pages
        self._blocks = blocks
        self._source = source
        self._transfer = transfer
        self._is_last = is_last
        self.nbytes = 0

    def layer_bytes(self, item: int) -> int:
        key = self._pages[item].key
        return self._spec.layer_bytes(key.group, key.part)

    def send(self, item: int, layer: int, layers: int) -> tuple[Sequence[int], memoryview]:
        key = self._pages[item].key
        first = key.part.layer_start + layer
        with self._transfer.gate():
            self._transfer.check()
            data = self._source.get(self._blocks[item], key.group, first, first + layers)
            identity = checksum.identity(self._namespace, key, RAW)
            sums = checksum.layer_sums(identity, layer, layers, data)
        self.nbytes += data.nbytes
        return sums, data

    def drained(self) -> None:
        if self._is_last:
            self._transfer.drained()


def store(
    control: Control,
    shards: Shards,
    spec: KVSpec,
    prepare: PrepareStore,
    source: Bound,
    transfer: Transfer[Stored],
    attempt: Attempt,
    wait_ns: int,
    deadline: Deadline,
    tally: Tally,
) -> Stored:
    """Asks what to write, writes it shard by shard, and says what became of each block; `tally` knows how far it is.

    `prepare.attempt` names the ticket, `attempt` the leases at shards.
    """
    namespace = control.namespace(spec, deadline)
    by_shard: dict[ShardAddress, list[int]] | None = None  # unknown: a grant may be out there whose answer was lost
    try:
        by_shard = tally.sort(control.ask(StoreGrant, spec, prepare, deadline))
        for number, (shard, blocks) in enumerate(by_shard.items(), 1):
            pages, of_block = _pages(prepare, blocks)
            request = WriteRequest(namespace, attempt, shard.epoch, pages, wait_ns)
            gather = _Source(spec, namespace, pages, of_block, source, transfer, number == len(by_shard))
            try:
                outcome = shards.write(shard, spec, request, gather, deadline)
            except Trouble as trouble:
                tally.missed(trouble.miss)
            else:
                tally.count(of_block, outcome)
            tally.nbytes += gather.nbytes
    finally:
        if by_shard != {}:
            _end_ticket(control, prepare.attempt)
    return tally.stored()


class Tally:
    """What became of the blocks so far. Filled by the storing thread; what stands there is true at every moment."""

    def __init__(self) -> None:
        self.blocks = self.deduplicated = self.pending = self.nbytes = 0
        self._miss: Miss | None = None

    def missed(self, miss: Miss) -> None:
        """The first reason is the one told."""
        self._miss = self._miss or miss

    def count(self, of_block: Sequence[int], outcome: Sequence[Written]) -> None:
        """A block counts by the worst that happened to its pages."""
        fates: dict[int, set[Written]] = {}
        for block, written in zip(of_block, outcome, strict=True):
            fates.setdefault(block, set()).add(written)
        for fate in fates.values():
            failed = next((written for written in _MISSES if written in fate), None)
            if failed is not None:
                self.missed(_MISSES[failed])
            elif Written.PENDING in fate:
                self.pending += 1
            elif Written.COMMITTED in fate:
                self.blocks += 1
            else:
                self.deduplicated += 1

    def sort(self, grant: StoreGrant) -> dict[ShardAddress, list[int]]:
        """The blocks that each shard is to get. The others are counted."""
        by_shard: dict[ShardAddress, list[int]] = {}
        at = 0
        for run in grant.runs:
            if run.decision is Decision.WRITE:
                assert run.shard is not None
                by_shard.setdefault(run.shard, []).extend(range(at, at + run.count))
            elif run.decision is Decision.COMMITTED:
                self.deduplicated += run.count
            elif run.decision is Decision.PENDING:
                self.pending += run.count
            elif run.miss is not None:
                self.missed(run.miss)
            at += run.count
        return by_shard

    def stored(self) -> Stored:
        return Stored(self.blocks, self.deduplicated, self.pending, self.nbytes, self._miss)

    def so_far(self, why: Miss) -> Stored:
        """The outcome where it goes no further for that reason."""
        return Stored(self.blocks, self.deduplicated, self.pending, self.nbytes, self._miss or why)


def _pages(prepare: PrepareStore, blocks: Sequence[int]) -> tuple[tuple[NewPage, ...], list[int]]:
    """The pages of these blocks, and for each the block that it belongs to."""
    pages: list[NewPage] = []
    of_block: list[int] = []
    for block in blocks:
        parent = prepare.hashes[block - 1] if block else prepare.parent
        for group, part in prepare.parts:
            key = PageKey(prepare.hashes[block], group, part)
            pages.append(NewPage(key, parent, prepare.first + block, prepare.loss))
            of_block.append(block)
    return tuple(pages), of_block


def _end_ticket(control: Control, attempt: Attempt) -> None:
    """Lets others write what this attempt did not, and its own client in another attempt. Lost, it ends by time."""
    with suppress(Trouble, KVClusterError):
        control.say(Done, EndTicket(NO_CALL, attempt), Deadline.after_ms(_FAREWELL_MS))
