"""Arrivals: layers on their way into reserved pages of the arena, each verified where it has come to lie.

The receiving half of a store and of a fetch. Nobody else writes these pages, and nobody reads them before they are
committed, so what is verified here is what readers will get. Nothing that the sender says of itself enters an identity.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvcluster.core import limits
from kvcluster.core.ids import NamespaceId
from kvcluster.core.messages import PageKey, PageSlot
from kvcluster.errors import ProtocolError
from kvcluster.pages import checksum, codec
from kvcluster.transport.seam import Payload


class Arrivals:
    """A PageSink over slots that were reserved, by item. The layers of an item come in order."""

    def __init__(
        self, namespace: NamespaceId, slots: Mapping[int, PageSlot], view: Callable[[PageSlot], memoryview]
    ) -> None:
        self._slots = slots
        self._view = view
        self._identities = {item: checksum.identity(namespace, slot.key, codec.RAW) for item, slot in slots.items()}
        self._sums: dict[int, list[int]] = {item: [] for item in slots}
        self._wrong: dict[int, None] = {}

    def receive(self, item: int, layer: int, codec_id: int, sums: Sequence[int], data: Payload) -> None:
        """Takes layers into their page. Raises ProtocolError for what was not to be sent."""
        slot = self._slots.get(item)
        if slot is None:
            raise ProtocolError(f"bytes came for page {item}, which was not to be sent")
        if codec_id != codec.RAW:
            raise ProtocolError(f"page {item} came in codec {codec_id:#06x}, for which no room was reserved")
        layers = slot.key.part.layers
        layer_bytes = slot.nbytes // layers
        if layer != len(self._sums[item]) or layer + len(sums) > layers or data.nbytes != len(sums) * layer_bytes:
            raise ProtocolError(f"page {item} has {layers} layers of {layer_bytes} bytes; other bytes came")
        here = self._view(slot)[layer * layer_bytes : layer * layer_bytes + data.nbytes]
        step = len(sums) if data.present is not None else max(1, limits.CHUNK_BYTES // layer_bytes)
        for at in range(0, len(sums), step):
            these = sums[at : at + step]
            chunk = here[at * layer_bytes : (at + len(these)) * layer_bytes]
            came = read_layers(data, self._identities[item], layer + at, len(these), chunk)
            self._count(item, these, came)

    def written(self, item: int, sums: Sequence[int]) -> None:
        """The whole page was written into its slot by somebody who will not write it again."""
        slot = self._slots.get(item)
        if slot is None or self._sums[item] or len(sums) != slot.key.part.layers:
            raise ProtocolError(f"page {item} was said to be written, which was not to be, or not with those layers")
        self._count(item, sums, checksum.layer_sums(self._identities[item], 0, len(sums), self._view(slot)))

    def _count(self, item: int, sums: Sequence[int], came: Sequence[int]) -> None:
        """Layers that should have these sums came with those."""
        self._sums[item].extend(sums)
        if tuple(sums) != came:
            self._wrong[item] = None

    def missing(self) -> int | None:
        """An item that is not whole, if there is one."""
        for item, slot in self._slots.items():
            if len(self._sums[item]) < slot.key.part.layers:
                return item
        return None

    def verified(self) -> dict[int, bytes]:
        """The packed sums of each page that is whole and right, by item."""
        return {
            item: checksum.pack_sums(self._sums[item])
            for item, slot in self._slots.items()
            if len(self._sums[item]) == slot.key.part.layers and item not in self._wrong
        }

    def wrong(self) -> tuple[PageKey, ...]:
        """The pages of which bytes came that were not theirs."""
        return tuple(self._slots[item].key for item in self._wrong)


def read_layers(data: Payload, identity: int, layer: int, layers: int, view: memoryview) -> tuple[int, ...]:
    """The next layers, which are as long as `view`, and the sums of what came. Raises as `read_whole`."""
    here = data.present
    if here is not None and here.nbytes == view.nbytes:
        return checksum.copy_sums(identity, layer, layers, view, here)
    read_whole(data, view)
    return checksum.layer_sums(identity, layer, layers, view)


def read_whole(data: Payload, view: memoryview) -> None:
    """The next `view.nbytes` bytes. Raises Trouble where they do not come."""
    got = data.read_into(view)
    while got < view.nbytes:
        data.wait()
        got += data.read_into(view[got:])
