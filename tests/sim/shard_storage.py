"""The bytes of a simulated shard's pages, in memory and on disk: sent, stored, encoded and verified.

Every byte is real, so a wrong one is found by its checksum, as in a deployment. Which bytes a fault has changed is
recorded (memory.py, disk.py), so that the oracle can tell a fault from a bug. Nothing here takes time, or decides when
a page is read or written: the process does (shard.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from kvcluster.core.codecs import Codec
from kvcluster.core.ids import NamespaceId
from kvcluster.core.messages import Fetch, PageMove, PageSlot, SpanPages, Tier
from kvcluster.core.miss import Loss
from kvcluster.memory import checksum
from tests.sim import content
from tests.sim.disk import SimulatedStore
from tests.sim.memory import Memory, flipped
from tests.sim.sessions import ArrivedSums, Layer
from tests.sim.surroundings import Surroundings
from tests.sim.violation import require


class ShardStorage:
    """The memory and the stores of one shard process, by the slots of pages."""

    def __init__(
        self, world: Surroundings, memory: Mapping[Tier, Memory], stores: Mapping[Tier, SimulatedStore]
    ) -> None:
        self._world = world
        self._memory = memory
        self._stores = stores
        self._verified: dict[SpanPages, None] = {}

    def load_layer(self, item: int, slot: PageSlot, layer: int) -> Layer:
        """Returns what a reader is sent: the bytes of the layer, and the checksum that was committed with them."""
        nbytes = slot.nbytes // slot.key.part.layers
        at = layer * nbytes
        if slot.tier.spec.addressable:
            memory = self._memory[slot.tier]
            data, sound = memory.read(slot.offset + at, nbytes), not memory.is_rotten(slot.offset + at, nbytes)
        else:  # a reader on the same device reads there itself
            there = self._stores[slot.tier].read(slot)
            data = bytes(nbytes) if there is None else there[at : at + nbytes]
            sound = not self._stores[slot.tier].is_rotten(slot)
        if self._world.wire_flips():
            data, sound = flipped(self._world.rng, data), False
        total = checksum.unpack_sums(slot.sums)[layer]
        return Layer(item, layer, total, data, sound, slot.codec, slot.loss)

    def store_layer(self, slot: PageSlot, layer: Layer) -> None:
        """Writes a layer that a writer sent straight into its page."""
        nbytes = slot.nbytes // slot.key.part.layers
        offset = slot.offset + layer.layer * nbytes
        self._memory[slot.tier].write(offset, layer.data)
        if not layer.sound:
            self._memory[slot.tier].spoil(offset, nbytes)

    def verify(self, namespace: NamespaceId, slot: PageSlot, sums: list[int]) -> bytes | None:
        """Returns the packed sums if the page matches them; None if it does not."""
        identity = content.identity(namespace, slot.key, slot.codec)
        if checksum.first_mismatch(identity, 0, sums, self._memory[slot.tier].view(slot)) is not None:
            return None
        return checksum.pack_sums(sums)

    def verified(self, pages: SpanPages) -> bool:
        """Whether the pages of a span match their checksums, which is looked at when they are first used."""
        if pages not in self._verified:
            if not all(self.matches(pages.namespace, slot, self.bytes_of(slot)) for slot in pages.slots):
                return False
            self._verified[pages] = None
        return True

    def verify_copies(self, effect: Fetch, arrived: ArrivedSums) -> tuple[dict[int, bytes], list[int]]:
        """Verifies the pages that have arrived whole. Returns the packed sums of those that match, and the items of
        those that do not."""
        verified: dict[int, bytes] = {}
        suspects: list[int] = []
        for item in arrived.items():
            slot = effect.slots[item]
            sums = arrived.whole(item, slot)
            if sums is not None:
                packed = self.verify(effect.namespace, slot, sums)
                if packed is not None:
                    verified[item] = packed
                else:
                    suspects.append(item)
        return verified, suspects

    def bytes_of(self, slot: PageSlot) -> bytes | None:
        """Returns the bytes of a page, in memory or in a store; None if the store ends before it."""
        tier = slot.tier
        return bytes(self._memory[tier].view(slot)) if tier.spec.addressable else self._stores[tier].read(slot)

    def is_rotten(self, slot: PageSlot) -> bool:
        """Whether a fault has changed any byte of the page."""
        if not slot.tier.spec.addressable:
            return self._stores[slot.tier].is_rotten(slot)
        return self._memory[slot.tier].is_rotten(slot.offset, slot.nbytes)

    def matches(self, namespace: NamespaceId, slot: PageSlot, data: bytes | None) -> bool:
        """Whether these are the bytes that were committed in this slot."""
        identity = content.identity(namespace, slot.key, slot.codec)
        sums = checksum.unpack_sums(slot.sums)
        return data is not None and checksum.first_mismatch(identity, 0, sums, memoryview(data)) is None

    def recode(self, page: PageMove, before: bytes | None) -> bytes | None:
        """Writes the encoded, decoded or copied page to its place in memory. Returns its packed sums, or None if it
        cannot be encoded."""
        encoded = self.encoded(page, before)
        if encoded is None:
            return None
        data, sums = encoded
        self._memory[page.target.tier].write(page.target.offset, data)
        return sums

    def encoded(self, page: PageMove, before: bytes | None) -> tuple[bytes, bytes] | None:
        """Returns the bytes that encoding, decoding or copying makes of a page, and their packed sums; None if it
        cannot be encoded."""
        source, target = page.source, page.target
        fits = target.codec is Codec.RAW or source.codec is target.codec or content.encodable(source.key)
        if not fits or before is None:
            return None
        data = self._recoded(page.namespace, source, target, before)
        identity = content.identity(page.namespace, target.key, target.codec)
        return data, checksum.pack_sums(checksum.layer_sums(identity, 0, target.key.part.layers, memoryview(data)))

    def _recoded(self, namespace: NamespaceId, source: PageSlot, target: PageSlot, before: bytes) -> bytes:
        """Returns what encoding or decoding a page makes of it: correct bytes from correct bytes, and otherwise
        something wrong."""
        recodes = source.codec is not target.codec
        require(
            not recodes or Codec.RAW in (source.codec, target.codec),
            "a page goes from one codec to another",
        )
        # Sequences alone store what was computed over a lossy prefix: raw pages with a loss that were never encoded.
        lossy = source.codec is Codec.RAW and source.loss is not Loss.EXACT
        encoded_before = lossy and namespace not in content.SEQUENCE_SPACES
        require(target.codec is Codec.RAW or not recodes or not encoded_before, "a decoded page is encoded again")
        right = content.content(namespace, source.key, source.codec, source.loss)
        after = content.content(namespace, target.key, target.codec, target.loss)
        return after.data if before == right.data else flipped(self._world.rng, after.data)
