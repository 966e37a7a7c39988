"""Whether engines of one GPU, or of peers, gain by a shard's pool there: `python -m benchmarks.gpu_pool TRACE`.

Each engine has a cache of its own in the GPU's memory, LRU. A request loads from the cluster what its engine does not
have; the rest is computed. Without a pool (`none`) the caches have all of the memory; else the pool of one shard has a
quarter of it, and real cores fill that in simulated time. Counted are blocks, as shares of those asked for: where they
came from, and what was promoted, which costs the link once more. `--fills` instead compares in a plain model what
should fill the pool: loads, stores or both.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter, OrderedDict
from collections.abc import Sequence
from itertools import product, takewhile

from kvcluster import config
from kvcluster.core.ids import BlockHash
from kvcluster.core.messages import LoadGrant, PageKey, PageSlot, Pin, PinGrant, Tier, Unpin
from kvcluster.core.miss import Loss
from kvcluster.replay.core_stepper import build_request
from kvcluster.replay.kernel import MS
from kvcluster.replay.replayed_cluster import TENANT, TraceCluster
from kvcluster.replay.trace_replay import SPEC, Trace, block_hashes, read

POOL_SHARE = 0.25
"""What the pool takes of the memory of the GPUs."""

RAM_SHARE = 0.5
"""The size of RAM, of the bytes of all distinct blocks."""


class EngineCache:
    """What one engine has in the GPU's memory: so many blocks, the last used ones."""

    def __init__(self, blocks: int) -> None:
        self._most = blocks
        self._held: OrderedDict[int, None] = OrderedDict()

    def prefix(self, blocks: Sequence[int]) -> int:
        return len(list(takewhile(self._held.__contains__, blocks)))

    def use(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):  # the ends of prompts leave first
            self._held[block] = None
            self._held.move_to_end(block)
        while len(self._held) > self._most:
            self._held.popitem(last=False)


class Router:
    """Sends requests to engines: with `affinity` to that which last had the most of its prefix, else to any."""

    def __init__(self, engines: int, *, affinity: bool) -> None:
        self._engines, self._affinity = engines, affinity
        self._draw, self._last = random.Random(0), dict[int, int]()

    def engine(self, blocks: Sequence[int]) -> int:
        known = next((self._last[block] for block in reversed(blocks) if block in self._last), None)
        engine = known if self._affinity and known is not None else self._draw.randrange(self._engines)
        self._last.update(dict.fromkeys(blocks, engine))
        return engine


class PooledCluster(TraceCluster):
    """Its one shard has a pool, which readers of these loads read in place."""

    def fetch(self, hashes: Sequence[BlockHash], grant: LoadGrant, first: int) -> Counter[Tier]:
        """Reads the granted blocks from `first` on. Returns their number by the tier that they were read in."""
        keys = tuple(PageKey(block, 0, self.part) for block in hashes[first : grant.blocks])
        if not keys:
            return Counter()
        (shard,) = self._shards.values()
        attempt = self._attempt()
        pin = Pin(attempt, shard.core.state.epoch, keys, Loss.Q4, on_device=True)
        reply = shard.ask_now(build_request(pin, TENANT, self.space))
        assert isinstance(reply, PinGrant)
        shard.submit(build_request(Unpin(attempt), TENANT))
        return Counter(page.tier for page in reply.pages if isinstance(page, PageSlot))


def settings(trace: Trace, pool_blocks: int) -> config.Config:
    page = SPEC.page_bytes(0, SPEC.whole(0))
    ram = max(2, int(RAM_SHARE * trace.distinct)) * page
    shard = {"ram_bytes": ram, "host_bytes": 64 * page, "gpu_bytes": pool_blocks * page, "scrub_bytes": 0}
    return config.load(None, {"shards": 1, "coordinator": {"run_blocks": 2, "host_codec": "raw"}, "shard": shard})


def replay(trace: Trace, engines: int, blocks: int, *, pool: bool, affinity: bool) -> dict[str, float]:
    """Returns the shares. `blocks`: what the memory of all engines holds."""
    pool_blocks = int(POOL_SHARE * blocks) if pool else 0
    cluster = PooledCluster(settings(trace, pool_blocks), SPEC)
    caches = [EngineCache((blocks - pool_blocks) // engines) for _ in range(engines)]
    router = Router(engines, affinity=affinity)
    hash_of = block_hashes(trace, SPEC)
    found: Counter[str] = Counter()
    for request in trace.requests:
        cluster.advance(request.at_ms * MS)
        engine = router.engine(request.ids)
        hashes = [hash_of[block] for block in request.ids]
        own = caches[engine].prefix(request.ids)
        found["own"] += own
        grant = cluster.load(hashes)
        tiers = cluster.fetch(hashes, grant, own)
        found["pool"] += tiers.pop(Tier.GPU, 0)
        found["link"] += tiers.total()
        if grant.blocks < len(hashes):
            cluster.store(hashes, grant.blocks, Loss.EXACT)
        caches[engine].use(request.ids)
    (shard,) = cluster.shards
    found["promoted"] = dict(shard.info().counters)["promoted"]
    return {name: found[name] / trace.asked for name in ("own", "pool", "link", "promoted")}


WINDOW_MS = 60_000


class PlainPool:
    """A pool of so many blocks, by LRU. What comes takes the place of what was not used for WINDOW_MS."""

    def __init__(self, blocks: int) -> None:
        self._most = blocks
        self.held: OrderedDict[int, int] = OrderedDict()  # when each was last used

    def take(self, blocks: Sequence[int], now: int) -> None:
        for block in reversed(blocks):
            if block not in self.held and len(self.held) >= self._most:
                oldest, used = next(iter(self.held.items()))
                if now - used < WINDOW_MS:
                    continue
                del self.held[oldest]
            self.held[block] = now
            self.held.move_to_end(block)


def fill(trace: Trace, engines: int, blocks: int, *, by: str, affinity: bool) -> dict[str, float]:
    """The shares of `replay`, if nothing is ever evicted from RAM and the pool is filled by `loads`, `stores` or
    `both`."""
    pool = PlainPool(int(POOL_SHARE * blocks))
    caches = [EngineCache((blocks - int(POOL_SHARE * blocks)) // engines) for _ in range(engines)]
    router, stored, found = Router(engines, affinity=affinity), set[int](), Counter[str]()
    for request in trace.requests:
        engine = router.engine(request.ids)
        own = caches[engine].prefix(request.ids)
        rest = request.ids[own:]
        loaded = list(takewhile(stored.__contains__, rest))
        near = [block for block in loaded if block in pool.held]
        found.update({"own": own, "pool": len(near), "link": len(loaded) - len(near)})
        pool.take(near if by == "stores" else loaded, request.at_ms)
        pool.take(() if by == "loads" else rest[len(loaded) :], request.at_ms)
        caches[engine].use(request.ids)
        stored.update(request.ids)
    return {name: found[name] / trace.asked for name in ("own", "pool", "link")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", metavar="TRACE", help="a trace as `kvcluster bench trace` takes it")
    parser.add_argument("--engines", type=int, nargs="+", default=[2, 8], metavar="N")
    parser.add_argument("--memory", type=float, nargs="+", default=[0.05, 0.2], metavar="SHARE", help="of all blocks")
    parser.add_argument("--fills", action="store_true", help="compare what fills the pool, in a plain model")
    given = parser.parse_args()
    trace = read(given.trace)
    print("engines  routed by  memory  pool      own   pool  link  promoted")
    for engines, affinity, share in product(given.engines, (False, True), given.memory):
        where = {"engines": engines, "blocks": int(share * trace.distinct), "affinity": affinity}
        for kind in ("loads", "stores", "both") if given.fills else ("none", "quarter"):
            got = fill(trace, by=kind, **where) if given.fills else replay(trace, pool=kind == "quarter", **where)
            figures = "  ".join(f"{value:.3f}" for value in got.values())
            routed = "prefix" if affinity else "chance"
            print(f"{engines:7d}  {routed:9s}  {share:6.2f}  {kind:8s} {figures}", flush=True)


if __name__ == "__main__":
    main()
