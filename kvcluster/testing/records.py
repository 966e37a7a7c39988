"""Sources of single records in place of batches of copies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from kvcluster.copies.batch import CopyRecords
from kvcluster.copies.endpoints import CopyEndpoint, cpu_addresses
from kvcluster.transport.base import ExchangeCopies
from kvcluster.transport.exchange_copies import SingleCopies


class RecordSource(ABC):
    """A PageSource that fills one record at a time."""

    @abstractmethod
    def layer_bytes(self, item: int) -> int:
        """As PageSource."""

    @abstractmethod
    def copy(self, item: int, layer: int, layers: int, into: memoryview) -> Sequence[int]:
        """Copies `layers` layers of page `item`, from its layer `layer` on, into `into`. Returns their checksums."""

    @abstractmethod
    def drained(self) -> None:
        """As PageSource."""

    def copies(self, records: CopyRecords, target: CopyEndpoint, keeps: object) -> ExchangeCopies:
        """As PageSource."""
        assert cpu_addresses(target), "pages of a device go through memory of this process"

        def store(at: int) -> None:
            into = target.view(records.offsets[at], records.nbytes[at])
            records.set_sums(at, self.copy(records.items[at], records.layers[at], records.counts[at], into))

        return SingleCopies(store)
