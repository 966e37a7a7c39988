"""Losses: what the pages in one engine's memory have lost, as far as they came from the cluster.

A page that was loaded after it had gone through a lossy codec lies in the host pool as any other, and what SGLang
computes over it has lost as much. Both may be stored again, and must say so then, else they would pass for exact ones.
SGLang tells the hashes before a page if it is told to (`hicache_storage_pass_prefix_keys`); where it does not,
anything may have been computed over the worst page that was ever loaded.

The book belongs to the host pool and not to the storage, which may be detached and attached again over the same pages.
It forgets the oldest beyond MOST, and then takes every page for as bad as the worst of those.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from itertools import chain
from weakref import WeakKeyDictionary

from kvcluster.core.miss import Loss

MOST = 65_536
"""Pages: at 64 tokens each four million tokens, more than most host pools hold; some ten megabytes of keys."""


class Losses:
    """Of the pages in one host pool, by SGLang's keys. Thread-safe."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._known: dict[str, Loss] = {}  # the oldest first; none of them exact
        self._forgotten = self._worst = Loss.EXACT  # of those that were dropped; and of all that there ever were
        self._lock = threading.Lock()

    def note(self, keys: Iterable[str], loss: Loss) -> None:
        """These pages have lost so much, by themselves or by what they were computed over."""
        if loss is Loss.EXACT:
            return
        with self._lock:
            self._worst = max(self._worst, loss)
            for key in keys:
                self._known[key] = max(loss, self._known.pop(key, loss))
            while len(self._known) > self._most:
                self._forgotten = max(self._forgotten, self._known.pop(next(iter(self._known))))

    def of(self, prefix: Sequence[str] | None, keys: Sequence[str]) -> Loss:
        """The worst that these pages may have lost, which follow those of `prefix`: None where nobody knows it."""
        with self._lock:
            if prefix is None or not self._known:
                return self._worst
            return max(self._known.get(key, self._forgotten) for key in chain(prefix, keys))


_BOOKS: WeakKeyDictionary[object, Losses] = WeakKeyDictionary()


def book_of(pool: object) -> Losses:
    """The book of a host pool, which lives as long as it does."""
    return _BOOKS.setdefault(pool, Losses())
