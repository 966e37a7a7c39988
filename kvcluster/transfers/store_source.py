"""The source of one exchange of a store: it gathers layers from the caller's memory and computes their checksums.

It reads under its gate, and no more once it is stopped. Pages, or what a stream sends, are filled by batches of copies,
which the first executor that accepts them carries out in slices (copy_executor.py).
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Sequence
from itertools import compress

from kvcluster.copies.batch import (
    CopyBatch,
    CopyDirection,
    CopyEndpoint,
    CopyItems,
    CopyRecords,
    CopyStatus,
    RunRecords,
)
from kvcluster.core.ids import NamespaceId
from kvcluster.core.messages import NewPage, NewPages
from kvcluster.core.miss import Miss, MissReason
from kvcluster.core.spec import KVSpec
from kvcluster.memory import checksum
from kvcluster.transfers.bound_memory import BoundMemory
from kvcluster.transfers.python_verified_copies import BatchCopies, PythonCopies
from kvcluster.transport.base import Cancelled, Deadline, ExchangeCopies

_DONE = int(CopyStatus.DONE)
_GIVEN_UP = Miss(MissReason.DEADLINE, "given up")


class StoreSource:
    """The PageSource of one exchange with one shard. Page `item` is of block `blocks[item]`, in the numbering of
    `memory`, which is that of the sequence. `on_drained` is called when the path has read its last byte."""

    def __init__(
        self,
        spec: KVSpec,
        namespace: NamespaceId,
        pages: Sequence[NewPage],
        blocks: Sequence[int],
        memory: BoundMemory,
        deadline: Deadline,
        on_drained: Callable[[], object],
    ) -> None:
        self._namespace = namespace
        self._pages = NewPages.of(pages)
        self._memory = memory
        self._deadline = deadline
        self._on_drained = on_drained
        self._items = _items(self._pages, blocks, memory)
        self._layer_bytes = [spec.layer_bytes(group, part) for group, part in self._pages.places]
        self._gate = threading.Lock()
        self._cancel = array("I", [0])
        self.nbytes = 0
        self.taken: dict[int, None] = {}  # the items of which anything was read

    def layer_bytes(self, item: int) -> int:
        """As PageSource."""
        return self._layer_bytes[self._pages.place_of[item]]

    def stop(self) -> None:
        """Stops reading the caller's memory. Waits for the chunk in progress."""
        self._cancel[0] = 1
        with self._gate:
            """From here on nothing more is read."""

    def drained(self) -> None:
        """As PageSource."""
        self._on_drained()

    # ------------------------------------------------------------------------------------ batches of copies

    def copies(self, records: CopyRecords, target: CopyEndpoint, keeps: object) -> ExchangeCopies:
        """As PageSource."""
        batch = CopyBatch(
            CopyDirection.STORE,
            self._memory.endpoint,
            target,
            records,
            self._items,
            self._identities(records),
            bytearray(len(records)),
            self._cancel,
            bytearray(len(self._pages)),
            self._deadline.at_ns,
            keeps=(keeps, self._memory),
        )
        return BatchCopies(batch, PythonCopies(self._memory), self.run)

    def run(self, batch: CopyBatch, run: RunRecords, start: int, stop: int) -> None:
        """Carries out some records of a batch. Raises Cancelled if they were stopped, and Unavailable if the deadline
        has passed."""
        with self._gate:
            self._check()
            self.taken.update(dict.fromkeys(batch.records.items[start:stop]))
            run(start, stop)
            is_done = [status == _DONE for status in batch.status[start:stop]]
            self.nbytes += sum(compress(batch.records.nbytes[start:stop], is_done))
        if not all(is_done):
            self._deadline.check()
            raise Cancelled(_GIVEN_UP)

    def _identities(self, records: CopyRecords) -> array[int]:
        pages = self._pages
        hashes = [pages.hashes[item] for item in records.items]
        places = [pages.places[pages.place_of[item]] for item in records.items]
        return checksum.identities(self._namespace, hashes, places, records.codecs)

    def _check(self) -> None:
        if self._cancel[0]:
            raise Cancelled(_GIVEN_UP)


def _items(pages: NewPages, blocks: Sequence[int], memory: BoundMemory) -> CopyItems:
    """Returns one row for each page of an exchange, with all its heads."""
    of_place = [(group, *part, part.head_start, part.head_stop) for group, part in pages.places]
    groups, *bounds = ([row[field] for row in of_place] for field in range(7))
    columns = (array("I", [column[number] for number in pages.place_of]) for column in bounds)
    rows = array("I", [block - memory.first for block in blocks])
    return CopyItems(memory.geometries(), array("I", [groups[number] for number in pages.place_of]), rows, *columns)
