"""Moving a shard's pages between its tiers: each is encoded, decoded or copied, and then verified.

Which pages, and where to, the core has chosen (core/tier_mover.py, core/pin_handler.py); nobody reads the targets and
nobody frees a source before it is answered. What is encoded or decoded is summed where it lies, and is what was
verified, but for what its codec loses; what is copied is verified by the sums that it had.

`move` is never in the way of whoever loads or stores: it runs beside the driver on one thread of a lower priority,
leaves Python to other threads while it encodes, and lets others run after each page. Somebody waits for `stage`.
"""

from __future__ import annotations

import logging
import time
from typing import Protocol

from kvcluster.core.codecs import Codec
from kvcluster.core.messages import Moved, MovePages, PageMove, PageSlot, Stage, Staged
from kvcluster.pages import checksum, codec
from kvcluster.runtime.scrub import matches
from kvcluster.transport.base import Unavailable

log = logging.getLogger(__name__)

NICENESS = 12
"""A fifteenth of the time that others get where processors are short. Who waits for room leaves his own time to it."""


class Places(Protocol):
    """Where pages lie (tier_store.TierStores)."""

    def view(self, slot: PageSlot) -> memoryview | None:
        """Of a page in an addressable tier, where it lies. Raises Unavailable in a shard that is ending."""

    def bytes_of(self, slot: PageSlot) -> memoryview:
        """As `view`; of a page in a store, a copy. Raises OSError where that cannot be read."""

    def read(self, slot: PageSlot, into: memoryview) -> None:
        """Raises OSError."""

    def write(self, move: PageMove, data: memoryview) -> None:
        """Raises OSError."""


def move(order: MovePages, places: Places) -> Moved:
    """Moves what `order` names. In a shard that is ending nothing moves any more."""
    sums: list[bytes | None] = []
    corrupt: list[int] = []
    errors: list[tuple[int, int]] = []
    for index, page in enumerate(order.pages):
        made: bytes | None = None
        try:
            source = places.bytes_of(page.source)
            target = places.view(page.target)
            if target is None:
                sound = matches(page.namespace, page.source, source)
                made = _written(page, source, places) if sound else None
            else:
                made = _moved(page, source, target)
                if page.sampled and made is not None:
                    errors.append((index, _lost(page, source, target)))
                sound = matches(page.namespace, page.source, source)  # afterwards: what is right now was right then
            if not sound:
                corrupt.append(index)
        except OSError as error:
            log.warning("a page of the %s tier cannot be read: %s", page.source.tier.name.lower(), error)
            corrupt.append(index)
        except Unavailable:
            pass
        sums.append(made)
        time.sleep(0)
    return Moved(order.attempt, tuple(sums), tuple(corrupt), tuple(errors))


def stage(order: Stage, places: Places) -> Staged:
    """Reads what `order` names from stores. What is there afterwards is what was committed, or is named as corrupt."""
    corrupt: list[int] = []
    for index, page in enumerate(order.pages):
        try:
            target = places.bytes_of(page.target)
            places.read(page.source, target)
            sound = matches(page.namespace, page.source, target)
        except OSError as error:
            log.warning("a page of the %s tier cannot be read: %s", page.source.tier.name.lower(), error)
            sound = False
        except Unavailable:
            sound = False
        if not sound:
            corrupt.append(index)
    return Staged(order.attempt, tuple(corrupt))


def _written(page: PageMove, source: memoryview, places: Places) -> bytes | None:
    """The packed sums of a page that is in its store now; None where it could not be written."""
    try:
        places.write(page, source)
    except OSError as error:
        log.warning("a page cannot be written to the %s tier: %s", page.target.tier.name.lower(), error)
        return None
    return page.source.sums


def _moved(page: PageMove, source: memoryview, target: memoryview) -> bytes | None:
    """The packed sums of what lies in the target now; None where it cannot be encoded."""
    key, before, after = page.source.key, page.source.codec, page.target.codec
    layers = key.part.layers
    if before is after:
        target[:] = source
    else:
        encodes = before is Codec.RAW
        coder = _coder(page, after if encodes else before)
        if not encodes:
            coder.decode(source, target, layers)
        elif not coder.encode(source, target, layers):
            return None
    identity = checksum.identity(page.namespace, key, after)
    return checksum.pack_sums(checksum.layer_sums(identity, 0, layers, target))


def _lost(page: PageMove, source: memoryview, target: memoryview) -> int:
    """What an encoded page has lost, in millionths."""
    return int(_coder(page, page.target.codec).error(source, target, page.source.key.part.layers) * 1e6)


def _coder(page: PageMove, which: Codec) -> codec.Coder:
    key, spec = page.source.key, page.spec
    return codec.coder(which, spec.groups[key.group], block_tokens=spec.block_tokens, heads=key.part.heads)
