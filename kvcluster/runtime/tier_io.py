"""Moving a shard's pages between its tiers: each is encoded, decoded or copied, and then verified.

The core has chosen which pages, and where to (core/shard/tier_mover.py, core/shard/pin_handler.py); until it is
answered no target is read and no source is freed. An encoded or decoded page gets checksums of its new bytes, which
derive from the verified source, except for what the codec loses; a copied page is verified against the checksums that
it had.

`move` does not get in the way of loads and stores: it runs beside the driver on one thread of a lower priority,
releases Python's lock while it encodes, and yields after each page. `stage` runs while a reader waits for it.
"""

from __future__ import annotations

import logging
import time

from kvcluster.core.codecs import Codec
from kvcluster.core.messages import Moved, MovePages, PageMove, Stage, Staged
from kvcluster.memory import checksum, codec
from kvcluster.runtime.scrub import matches
from kvcluster.runtime.tier_store import TierBytes
from kvcluster.transport.base import Unavailable

log = logging.getLogger(__name__)

NICENESS = 12
"""Niceness of the thread: about a fifteenth of a normal thread's CPU time under contention. A caller that waits for
room leaves its own CPU time to this thread."""


def move(order: MovePages, places: TierBytes) -> Moved:
    """Moves the pages that `order` names. In a shard that is ending nothing is moved any more."""
    sums: list[bytes | None] = []
    corrupt: list[int] = []
    errors: list[tuple[int, int]] = []
    for index, page in enumerate(order.pages):
        made: bytes | None = None
        try:
            source = places.read(page.source)
            recodes = page.source.codec is not page.target.codec
            if page.target.tier.spec.addressable:
                with places.fill(page.target) as target:
                    made = _moved(page, source, target)
                    if page.sampled and made is not None:
                        errors.append((index, _lost(page, source, target)))
                # Verified afterwards: sound now means sound then.
                sound = matches(page.namespace, page.source, source) if recodes else made == page.source.sums
            elif recodes:
                sound, made = _encoded_and_written(page, source, places)
            else:
                sound = matches(page.namespace, page.source, source)
                made = _written(page, source, places) if sound else None
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


def stage(order: Stage, places: TierBytes) -> Staged:
    """Reads the pages that `order` names from stores. Every page afterwards holds what was committed, or is named as
    corrupt."""
    corrupt: list[int] = []
    for index, page in enumerate(order.pages):
        try:
            with places.fill(page.target) as target:
                places.read_into(page.source, target)
                sound = matches(page.namespace, page.source, target)
        except OSError as error:
            log.warning("a page of the %s tier cannot be read: %s", page.source.tier.name.lower(), error)
            sound = False
        except Unavailable:
            sound = False
        if not sound:
            corrupt.append(index)
    return Staged(order.attempt, tuple(corrupt))


def _encoded_and_written(page: PageMove, source: memoryview, places: TierBytes) -> tuple[bool, bytes | None]:
    """Writes a page to its store in the codec of its target. Returns whether the source is sound, and the packed
    checksums of the encoded page; None if it cannot be encoded or written."""
    encoded = memoryview(bytearray(page.target.nbytes))
    sums = _moved(page, source, encoded)
    if not matches(page.namespace, page.source, source):  # verified afterwards, as above
        return False, None
    if sums is None:
        return True, None
    return True, _written(page._replace(source=page.source._replace(sums=sums)), encoded, places)


def _written(page: PageMove, source: memoryview, places: TierBytes) -> bytes | None:
    """Writes a page to its store and returns its packed checksums; None if it could not be written."""
    try:
        places.write(page, source)
    except OSError as error:
        log.warning("a page cannot be written to the %s tier: %s", page.target.tier.name.lower(), error)
        return None
    return page.source.sums


def _moved(page: PageMove, source: memoryview, target: memoryview) -> bytes | None:
    """Fills the target and returns its packed checksums; None if the page cannot be encoded."""
    key, before, after = page.source.key, page.source.codec, page.target.codec
    layers, identity = key.part.layers, checksum.identity(page.namespace, page.source.key, after)
    if before is after:
        return checksum.pack_sums(checksum.copy_sums(identity, 0, layers, target, source))
    encodes = before is Codec.RAW
    coder = _coder(page, after if encodes else before)
    if not encodes:
        coder.decode(source, target, layers)
    elif not coder.encode(source, target, layers):
        return None
    return checksum.pack_sums(checksum.layer_sums(identity, 0, layers, target))


def _lost(page: PageMove, source: memoryview, target: memoryview) -> int:
    """Returns the error of an encoded page, in millionths."""
    return int(_coder(page, page.target.codec).error(source, target, page.source.key.part.layers) * 1e6)


def _coder(page: PageMove, which: Codec) -> codec.Coder:
    key, spec = page.source.key, page.spec
    return codec.coder(which, spec.groups[key.group], block_tokens=spec.block_tokens, heads=key.part.heads)
