"""Records how lossy the pages in one engine's host pool are, if they were loaded from the cluster.

A page that was loaded after a lossy codec is in the host pool like any other, and KV that SGLang computes over it has
the same loss. Both may be stored again and must then carry that loss, otherwise they would be taken for exact. SGLang
passes the hashes before a page if it is configured to (`hicache_storage_pass_prefix_keys`); if it does not, any page
may have been computed over the worst page that was ever loaded.

The record belongs to the host pool and not to the storage backend, which may be detached and attached again over the
same pages. Beyond MOST pages it drops the oldest, and then treats every unknown page as the worst of those dropped.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from itertools import chain
from weakref import WeakKeyDictionary

from kvcluster.core.miss import Loss

MOST = 65_536
"""Pages: at 64 tokens each four million tokens, more than most host pools hold; about ten megabytes of keys."""


class LossyPages:
    """The losses of the pages in one host pool, by SGLang's keys. Thread-safe."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._known: dict[str, Loss] = {}  # the oldest first; none of them exact
        self._forgotten = self._worst = Loss.EXACT  # the worst of the dropped pages, and of all pages
        self._lock = threading.Lock()

    def add(self, keys: Iterable[str], loss: Loss) -> None:
        """Records the loss of these pages, from their own codec or from the KV that they were computed over."""
        if loss is Loss.EXACT:
            return
        with self._lock:
            self._worst = max(self._worst, loss)
            for key in keys:
                self._known[key] = max(loss, self._known.pop(key, loss))
            while len(self._known) > self._most:
                self._forgotten = max(self._forgotten, self._known.pop(next(iter(self._known))))

    def worst(self, prefix: Sequence[str] | None, keys: Sequence[str]) -> Loss:
        """Returns the worst loss that these pages may have. `prefix` are the keys before them, None if not known."""
        with self._lock:
            if prefix is None or not self._known:
                return self._worst
            return max(self._known.get(key, self._forgotten) for key in chain(prefix, keys))


_BY_POOL: WeakKeyDictionary[object, LossyPages] = WeakKeyDictionary()


def lossy_pages_of(pool: object) -> LossyPages:
    """Returns the losses of a host pool, which are kept for as long as the pool exists."""
    return _BY_POOL.setdefault(pool, LossyPages())
