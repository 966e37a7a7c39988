"""KVClusterStorage: SGLang's storage interface over a kvcluster client.

SGLang calls from its own threads: one asks how much of a prompt is cached (`batch_exists`), one loads it into the host
pool in batches of pages (`batch_get_v1`), one stores computed pages (`batch_set_v1`). With `"interface_v1": 1` SGLang
names slots of the host pool, and bytes move directly from and to that memory; otherwise it passes a copy of each page
as a flat tensor (`batch_get`, `batch_set`). Both are the same pages.

SGLang's keys are chained SHA-256 digests in hexadecimal, rooted in what separates requests (adapter, salt). They are
bound to the namespace here, so that a key of another model, dtype, layout or tenant matches nothing.

The constructor and the registration raise for mistakes in the configuration, which stops the engine's start. After that
only two things raise: `clear`, which must not report success falsely, and the methods of pools that were refused. Every
other failure is logged and is a miss, and SGLang computes.

`LossyPages` records the loss of the pages in one engine's host pool that were loaded from the cluster. A page that was
loaded after a lossy codec is in the host pool like any other, and KV that SGLang computes over it has the same loss.
Both may be stored again and must then carry that loss, otherwise they would be taken for exact. SGLang passes the
hashes before a page if it is configured to (`hicache_storage_pass_prefix_keys`); if it does not, any page may have been
computed over the worst page that was ever loaded. The record belongs to the host pool and not to the storage backend,
which may be detached and attached again over the same pages. Beyond MOST pages it drops the oldest, and then treats
every unknown page as the worst of those dropped.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch

import kvcluster
import kvcluster.engines.sglang.compat as compat
from kvcluster.client.client import Client
from kvcluster.core import hashing, limits
from kvcluster.core.ids import BlockHash
from kvcluster.core.miss import Loss
from kvcluster.engines.sglang.layouts import HostPoolLayout
from kvcluster.engines.sglang.lazy_client import ClientCall, LazyClient
from kvcluster.engines.sglang.observer import StorageObserver
from kvcluster.engines.sglang.settings import SHARED_MEDIA, parse_settings
from kvcluster.errors import CallerError, KVClusterError, Unreachable
from kvcluster.transfers.deadlines import remaining_ms
from kvcluster.transfers.layouts import Buffers, Paged
from kvcluster.transport.base import Deadline

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


_log = logging.getLogger(__name__)

_MEDIA = (
    "this model takes images, sound or video, which SGLang's keys of pages do not tell apart with certainty: the hash "
    "of an image has 64 bits and leaves out its shape, and a request may bring its own (mm_hashes), so KV of one image "
    "could be loaded for another, by every engine of the cluster. Serve the model without this storage backend, or, if "
    f'that cannot happen with your requests, give "multimodal": "{SHARED_MEDIA}" (docs/sglang.md, Identity)'
)

T = TypeVar("T")
Lie = Callable[[int, int], list[Buffers | Paged]]
"""Returns the memory of a call's pages from one index up to another."""


class KVClusterStorage(compat.HiCacheStorage):  # type: ignore[misc]
    """The class that SGLang's `dynamic` storage backend loads by the keys `module_path` and `class_name`.

    `storage_config` is SGLang's, with our settings in its extra config (settings.py); `options` may hold `connect`,
    which replaces `kvcluster.connect`. Raises ConfigError or CallerError (SpecError) if they cannot be used.
    """

    def __init__(self, storage_config: object, options: Mapping[str, object] | None = None) -> None:
        with compat.supported_release():
            self._rank = compat.rank(storage_config)
            self._settings = parse_settings(compat.extra_config(storage_config), compat.model_name(storage_config))
        self.mem_pool_host: object = None
        self._connect: Callable[..., Client] = (options or {}).get("connect", kvcluster.connect)  # type: ignore[assignment]
        self._client: LazyClient | None = None
        self._layout: HostPoolLayout | None = None
        self._lossy_pages = LossyPages()
        self._observer: StorageObserver | None = None

    # ------------------------------------------------------------------------- methods that may stop the engine's start

    def register_mem_pool_host(self, mem_pool_host: object) -> None:
        """Makes the spec of this host pool's pages, and begins to connect. Raises CallerError if it has no valid
        spec."""
        self.close()
        self.mem_pool_host = mem_pool_host
        if self._settings.mode == "off":
            return
        with compat.supported_release():
            pool, memory = compat.describe(mem_pool_host), compat.PoolMemory(mem_pool_host)
            layout = self._layout = HostPoolLayout(pool, memory, self._rank, self._settings, compat.version())
            media = compat.serves_media()
        if media and self._settings.multimodal != SHARED_MEDIA:
            self._layout = None
            raise CallerError(_MEDIA)
        self._lossy_pages = lossy_pages_of(mem_pool_host)
        settings = self._settings
        if settings.mode == "observe":
            if self._rank.tp_rank == 0:  # SGLang calls all ranks for the same pages
                self._observer = StorageObserver(settings, layout.spec, layout.parts, compat.version(), _log.warning)
            return

        def connect() -> Client:
            return self._connect(
                settings.address, layout.spec, token=settings.token, part=layout.parts, config=settings.client
            )

        self._client = LazyClient(connect, retry_ms=settings.retry_ms)
        self._client.start()

    def register_mem_host_pool_v2(self, host_pool: object, host_pool_name: object) -> None:
        """Does nothing for the pool that is already registered. Raises CallerError for any other pool."""
        if host_pool is not self.mem_pool_host:
            self.close()
            raise _second_pool(host_pool_name)

    def batch_exists_v2(self, keys: Sequence[str], pool_transfers: object = None, extra_info: object = None) -> object:
        """Raises CallerError: SGLang calls it only for second pools."""
        raise _second_pool(_names(pool_transfers))

    def batch_get_v2(self, transfers: object, extra_info: object = None) -> object:
        """As `batch_exists_v2`."""
        raise _second_pool(_names(transfers))

    def batch_set_v2(self, transfers: object, extra_info: object = None) -> object:
        """As `batch_exists_v2`."""
        raise _second_pool(_names(transfers))

    # ------------------------------------------------------------------------------- pages in the host pool (v1)

    def batch_exists(self, keys: Sequence[str], extra_info: object = None) -> int:
        """Returns the number of leading pages that can be loaded."""
        if self._observer is not None:
            self._observer.asked(keys, compat.prefix_keys(extra_info))
        return self._guard("a lookup", 0, lambda call: self._find(call, keys))

    def batch_get_v1(self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: object = None) -> list[bool]:
        """Loads pages into their slots of the host pool. Returns for each page whether it was loaded; pages behind a
        missing page count as missing, because a prefix cannot use them."""
        loaded = self._guard("a load", 0, lambda call: self._load(call, keys, self._slots(keys, host_indices)))
        return [number < loaded for number in range(len(keys))]

    def batch_set_v1(self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: object = None) -> list[bool]:
        """Stores pages from their slots of the host pool. Returns for each page whether it is in the cluster, or
        another client is storing it. All entries are equal: the cluster reports on a batch as a whole, so if one page
        was not stored, all are False. In other modes than "on" nothing is stored, and all are True: of a page that is
        not stored, SGLang would log a warning."""
        if self._settings.mode != "on":
            return [self._observe_store(keys, compat.prefix_keys(extra_info))] * len(keys)
        stored = self._rank.writer and self._guard(
            "a store",
            False,
            lambda call: self._store(call, keys, self._slots(keys, host_indices), compat.prefix_keys(extra_info)),
        )
        return [stored] * len(keys)

    # ------------------------------------------------------------------------------------------ pages as flat tensors

    def exists(self, key: str) -> bool:
        """Returns whether this page can be loaded."""
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: object = None, target_sizes: object = None) -> torch.Tensor | None:
        """Does `batch_get` for one page."""
        targets = None if target_location is None else [target_location]
        return self.batch_get([key], targets)[0]

    def batch_get(
        self, keys: Sequence[str], target_locations: Sequence[object] | None = None, target_sizes: object = None
    ) -> list[torch.Tensor | None]:
        """Loads pages into flat tensors, or into new ones if none are given, and returns them; None for a page that was
        not loaded and for all behind it."""
        targets: list[torch.Tensor] = []

        def load(call: ClientCall) -> int:
            given = target_locations or [self._pages.blank() for _ in keys]
            targets.extend(given)  # type: ignore[arg-type]
            return self._load(call, keys, self._flat(keys, given, writable=True))

        loaded = self._guard("a load", 0, load)
        return [targets[number] if number < loaded else None for number in range(len(keys))]

    def set(self, key: str, value: object = None, target_location: object = None, target_sizes: object = None) -> bool:
        """Does `batch_set` for one page, which is `value`, or the tensor at `target_location` if that is None."""
        return self.batch_set([key], [target_location if value is None else value])

    def batch_set(
        self,
        keys: Sequence[str],
        values: Sequence[object] | None = None,
        target_locations: Sequence[object] | None = None,
        target_sizes: object = None,
    ) -> bool:
        """Stores flat tensors, `values` or those at `target_locations`. Returns one result for all, as
        `batch_set_v1`."""
        if self._settings.mode != "on":
            return self._observe_store(keys, None)
        given = (target_locations if values is None else values) or []
        return self._rank.writer and self._guard(
            "a store",
            False,
            lambda call: self._store(call, keys, self._flat(keys, given, writable=False), None),
        )

    # ------------------------------------------------------------------------------------------------ the others

    def clear(self) -> None:
        """Purges every page of this model and these weights, of all engines of this credential. Raises Unreachable if
        the purge is not confirmed; SGLang then reports that the storage was not cleared."""
        if self._settings.mode != "on":
            return  # it holds nothing
        connected = self._client.connected() if self._client is not None else None
        if connected is None or self._layout is None:
            raise Unreachable(
                f"there is no connection to {self._settings.address}, so nothing was purged; try again when it answers"
            )
        spec = self._layout.spec
        connected.client.purge(model=spec.model, weights=spec.weights)

    def close(self) -> None:
        """Closes the connection; every later call is a miss. May be called again."""
        client, self._client = self._client, None
        if client is not None:
            client.close()
        observer, self._observer = self._observer, None
        if observer is not None:
            observer.close()

    # --------------------------------------------------------------------------------------------------- helpers

    def _observe_store(self, keys: Sequence[str], prefix: Sequence[str] | None) -> bool:
        if self._observer is not None and self._rank.writer:
            self._observer.stored(keys, prefix)
        return True

    @property
    def _pages(self) -> HostPoolLayout:
        assert self._layout is not None, "a client comes after its layout"
        return self._layout

    def _guard(self, what: str, otherwise: T, work: Callable[[ClientCall], T]) -> T:
        """Returns the result of `work`; `otherwise` if no call can be made now, or if `work` raises."""
        client = self._client
        if client is None:
            return otherwise
        with client.call() as call:
            if call is None:
                return otherwise
            try:
                return work(call)
            except CallerError as error:
                client.tell(f"{what} failed, and is a miss: {error}")
            except KVClusterError as error:  # the coordinator refuses this client, or is another one
                call.failure = str(error)
            except Exception as error:  # a bug of ours must not end one of SGLang's threads
                client.tell(f"{what} failed, and is a miss: {error!r}", trace=True)
        return otherwise

    def _find(self, call: ClientCall, keys: Sequence[str]) -> int:
        deadline, found = Deadline.after_ms(self._settings.lookup_ms), 0
        for start, stop in _pieces(len(keys)):
            hashes = _hashes(call, keys[start:stop])
            with call.client.prepare_load(hashes, deadline_ms=remaining_ms(deadline)) as ticket:
                call.heard(ticket)
                found += ticket.blocks
            if found < stop:
                break
        return found

    def _load(self, call: ClientCall, keys: Sequence[str], memory_of: Lie) -> int:
        deadline, done = Deadline.after_ms(self._settings.client.deadline_ms), 0
        for start, stop in _pieces(len(keys)):
            hashes = _hashes(call, keys[start:stop])
            into = memory_of(start, stop)  # so that a caller's mistake shows even if no page is cached
            # SGLang looks pages up before it loads them, and that lookup was counted.
            with call.client.prepare_load(hashes, again=True, deadline_ms=remaining_ms(deadline)) as ticket:
                call.heard(ticket)
                if not ticket.blocks:
                    break
                loaded = call.client.begin_load(ticket, into, deadline_ms=remaining_ms(deadline)).result()
            # Record the loss before SGLang knows of these pages, and so before anything is computed over them.
            self._lossy_pages.add(keys[start : start + loaded.blocks], loaded.loss)
            done += loaded.blocks
            if done < stop:
                break
        return done

    def _store(self, call: ClientCall, keys: Sequence[str], memory_of: Lie, prefix: Sequence[str] | None) -> bool:
        deadline = Deadline.after_ms(self._settings.client.deadline_ms)
        for start, stop in _pieces(len(keys)):
            before = None if prefix is None else [*prefix, *keys[:start]]
            some = keys[start:stop]
            # From the hashes before these the cluster knows where the blocks belong in a sequence, for placement
            # and eviction.
            known = before if before is not None and len(before) + len(some) <= limits.BLOCKS_PER_PROMPT else []
            loss = self._lossy_pages.worst(before, some)
            stored = call.client.begin_store(
                _hashes(call, [*known, *some]),
                memory_of(start, stop),
                first=len(known),
                loss=loss,
                deadline_ms=remaining_ms(deadline),
            ).result()
            self._lossy_pages.add(some, loss)
            there = stored.blocks + stored.deduplicated + stored.pending
            call.answered = call.answered or there > 0  # a failed store does not show whether the coordinator answers
            if there < len(some):
                if self._client is not None:
                    self._client.tell(f"only {there} of {len(some)} pages were stored: {stored.miss}")
                return False
        return True

    def _slots(self, keys: Sequence[str], host_indices: torch.Tensor) -> Lie:
        step = self._pages.spec.block_tokens
        if len(host_indices) != len(keys) * step:
            raise CallerError(f"{len(host_indices)} slots were given for {len(keys)} pages of {step} tokens")
        return lambda start, stop: self._pages.in_pool(host_indices[start * step : stop * step])

    def _flat(self, keys: Sequence[str], pages: Sequence[object], *, writable: bool) -> Lie:
        if len(pages) != len(keys):
            raise CallerError(f"{len(pages)} tensors were given for {len(keys)} pages")
        return lambda start, stop: self._pages.flat(pages[start:stop], writable=writable)


def _hashes(call: ClientCall, keys: Sequence[str]) -> list[BlockHash]:
    try:
        digests = [bytes.fromhex(key) for key in keys]
    except ValueError:
        raise CallerError(
            "a page's key is not hexadecimal; only the page hashes that SGLang makes are supported"
        ) from None
    return hashing.foreign(call.namespace, digests)


def _pieces(pages: int) -> list[tuple[int, int]]:
    """Splits a call's pages into ranges of at most BLOCKS_PER_CALL."""
    step = limits.BLOCKS_PER_CALL
    return [(start, min(start + step, pages)) for start in range(0, pages, step)]


def _names(transfers: object) -> str:
    given = transfers if isinstance(transfers, (list, tuple)) else []
    return ", ".join(str(getattr(transfer, "name", transfer)) for transfer in given) or "without a name"


def _second_pool(name: object) -> CallerError:
    return CallerError(
        f"SGLang keeps more than one host pool for this model (here {name}: a sliding window, recurrent state, an "
        "indexer or a separate draft model), but kvcluster stores only pages of full attention: start without the "
        "option that needs that pool, such as --speculative-algorithm, or without this storage backend"
    )
