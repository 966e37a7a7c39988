"""Moving a shard's pages between its tiers: each is encoded, decoded or copied, and then verified where it lay.

Which pages, and where to, the core has chosen (core/mover.py); nobody reads the targets and nobody frees a source
before it is answered. What lies in the target is summed there, and is what was verified, but for what its codec loses.
This is never in the way of whoever loads or stores: it runs beside the driver on one thread of a lower priority, leaves
Python to other threads while it encodes, and lets others run after each page.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kvcluster.core.codecs import Codec
from kvcluster.core.messages import Moved, MovePages, PageMove, PageSlot
from kvcluster.pages import checksum, codec
from kvcluster.runtime.verifying import matches
from kvcluster.transport.seam import Trouble


def move(order: MovePages, view: Callable[[PageSlot], memoryview]) -> Moved:
    """Moves what `order` names. In a shard that is ending nothing moves any more."""
    sums: list[bytes | None] = []
    corrupt: list[int] = []
    errors: list[tuple[int, int]] = []
    for index, page in enumerate(order.pages):
        try:
            source, target = view(page.source), view(page.target)
        except Trouble:
            sums.append(None)
            continue
        sums.append(_moved(page, source, target))
        if page.sampled and sums[index] is not None:
            errors.append((index, _lost(page, source, target)))
        if not matches(page.namespace, page.source, source):  # afterwards: what was right now was right then
            corrupt.append(index)
        time.sleep(0)
    return Moved(order.attempt, tuple(sums), tuple(corrupt), tuple(errors))


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
