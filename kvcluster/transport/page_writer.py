"""The page writer: receives layers into reserved pages of the arena, and verifies each one in place.

It is the receiving half of a store and of a fetch. These pages have no other writer, and no reader before they are
committed, so readers will get the bytes that are verified here. Nothing that the sender claims enters a checksum's
identity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvcluster.core import limits
from kvcluster.core.ids import NamespaceId
from kvcluster.core.messages import PageKey, PageSlot
from kvcluster.errors import ProtocolError
from kvcluster.memory import checksum
from kvcluster.memory.region import PageBytes
from kvcluster.transport.base import Payload, read_whole
from kvcluster.transport.worker_exchange import RecordSink


class _Page:
    """One arriving page: its place, and the layers received so far."""

    __slots__ = ("codec", "identity", "layer_bytes", "layers", "slot", "sums", "wrong")

    def __init__(self, namespace: NamespaceId, slot: PageSlot) -> None:
        self.slot = slot
        self.layers = slot.key.part.layers
        self.layer_bytes = slot.nbytes // self.layers
        self.codec = slot.codec
        self.identity = checksum.identity(namespace, slot.key, slot.codec)
        self.sums: list[int] = []  # of the layers received, as computed by their sender
        self.wrong = False

    def count(self, sums: Sequence[int], computed: tuple[int, ...]) -> None:
        """Counts layers with the sender's `sums`; `computed` are the sums of the bytes that have arrived."""
        self.sums += sums
        if computed != tuple(sums):
            self.wrong = True


class PageWriter(RecordSink):
    """A PageSink over reserved slots, by item. The layers of an item arrive in order."""

    def __init__(self, namespace: NamespaceId, slots: Mapping[int, PageSlot], pages: PageBytes) -> None:
        self._namespace = namespace
        self._slots = slots
        self._bytes = pages
        self._pages: dict[int, _Page] = {}  # those with at least one layer received

    def receive(self, item: int, layer: int, codec_id: int, sums: Sequence[int], data: Payload) -> None:
        """Receives layers into their page. Raises ProtocolError for layers that should not have been sent."""
        page = self._pages.get(item) or self._page(item)
        if codec_id != page.codec:
            return  # the page has changed its tier since, and no room was reserved for its new form: it is not received
        stop, layer_bytes = layer + len(sums), page.layer_bytes
        if layer != len(page.sums) or stop > page.layers or data.nbytes != len(sums) * layer_bytes:
            raise ProtocolError(f"page {item} has {page.layers} layers of {layer_bytes} bytes; other bytes arrived")
        present = data.present
        if present is not None:
            with self._bytes.fill(page.slot, layer * layer_bytes, stop * layer_bytes) as place:
                page.count(sums, checksum.copy_sums(page.identity, layer, len(sums), place, present))
            return
        step = max(1, limits.CHUNK_BYTES // layer_bytes)
        for at in range(0, len(sums), step):
            these = sums[at : at + step]
            start = (layer + at) * layer_bytes
            with self._bytes.fill(page.slot, start, start + len(these) * layer_bytes) as chunk:
                read_whole(data, chunk)
                page.count(these, checksum.layer_sums(page.identity, layer + at, len(these), chunk))

    def written(self, item: int, sums: Sequence[int]) -> None:
        """The worker has written the whole page into its slot, and will not write it again: verifies it."""
        page = self._pages.get(item) or self._page(item)
        if page.sums or len(sums) != page.layers:
            raise ProtocolError(f"page {item} must be written once, with {page.layers} checksums; {len(sums)} arrived")
        page.count(sums, checksum.layer_sums(page.identity, 0, page.layers, self._bytes.read(page.slot)))

    def _page(self, item: int) -> _Page:
        slot = self._slots.get(item)
        if slot is None:
            raise ProtocolError(f"page {item} arrived, but was not requested")
        page = self._pages[item] = _Page(self._namespace, slot)
        return page

    def missing(self) -> int | None:
        """Returns an incomplete item, if there is one."""
        for item in self._slots:
            page = self._pages.get(item)
            if page is None or len(page.sums) < page.layers:
                return item
        return None

    def unfinished(self) -> dict[int, int]:
        """Returns the next layer of each incomplete item."""
        stands = {item: len(self._pages[item].sums) if item in self._pages else 0 for item in self._slots}
        return {item: layer for item, layer in stands.items() if layer < self._slots[item].key.part.layers}

    def verified(self) -> dict[int, bytes]:
        """Returns the packed sums of each complete and correct page, by item."""
        return {
            item: checksum.pack_sums(page.sums)
            for item, page in self._pages.items()
            if len(page.sums) == page.layers and not page.wrong
        }

    def wrong(self) -> tuple[PageKey, ...]:
        """Returns the pages with layers that did not match their checksums."""
        return tuple(self._slots[item].key for item, page in self._pages.items() if page.wrong)
