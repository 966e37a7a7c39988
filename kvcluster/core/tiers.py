"""The tiers of a shard, the fastest first, one row each. No other module names a tier.

A tier is *addressable* if readers read its pages in place, in a region of memory that is the tier's own: a page lies at
its offset in the region of its tier. The pages of any other tier lie in a store (runtime/tier_store.py), of a GPU's
memory or of files: a reader gets a copy of them in the staging tier, and only the shard's own moves write there. A tier
is *on a device* if readers whose blocks lie in the memory of the same device read its pages in place, too. A tier is
*durable* if its pages survive a restart: they are recovered when the shard starts, and a purge erases them from the
store too.

A shard has the tier that workers write into (INGEST), and those others that its configuration gives bytes. Pages are
demoted from each tier into the next one that the shard has, promoted into its first, and evicted only from the last.

To add a tier: a row here, a module with its store, a member of the same name in the wire's enum, and its settings in
config/sections.py (docs/architecture.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Protocol

from kvcluster.config import ShardConfig
from kvcluster.core.allocator import DeviceAllocator
from kvcluster.core.file_allocator import FileAllocator, Owner


class Takes(Enum):
    """The codec of a page in a tier that it is moved into."""

    RAW = "raw"  # decoded
    ENCODED = "encoded"  # in the codec that the order states
    UNCHANGED = "unchanged"  # as in the tier that it leaves


class TierAllocator(Protocol):
    """Allocates ranges of a tier's bytes, by offset. It owns no bytes.

    The invariant: reserved ranges do not overlap, and `used_bytes` is the sum of their size classes.
    """

    @property
    def capacity_bytes(self) -> int: ...

    @property
    def used_bytes(self) -> int: ...

    @property
    def free_bytes(self) -> int:
        """Bytes that are not reserved. A page may still find no room: call `reserve`."""

    def size_class(self, nbytes: int) -> int:
        """Returns the bytes that a page of `nbytes` takes."""

    def reserve(self, nbytes: int, owner: Owner) -> int | None:
        """Reserves a range for that page and returns its offset; None if there is no room for it."""

    def free(self, offset: int, nbytes: int) -> None:
        """Frees the range that `reserve` returned for `nbytes`."""

    def check(self) -> None:
        """Raises AssertionError if the invariant does not hold."""


class StoreAllocator(TierAllocator, Protocol):
    """The allocator of a tier that is not addressable."""

    def adopt(self, offset: int, nbytes: int, owner: Owner) -> bool:
        """Reserves the range in which recovery found that page. Returns False if it cannot lie there."""

    def sparsest(self, nbytes: int, owner: Owner) -> list[tuple[Owner, int]]:
        """Returns the pages, with their offsets, whose eviction makes room for that page, if free space exists but not
        for pages of its kind. [] if eviction does not help, or `reserve` does not need it."""

    def neighbours(self, offset: int) -> list[tuple[Owner, int]]:
        """Returns the pages with their offsets, the one at `offset` included, whose eviction makes room for pages of
        another kind. One of them may be withdrawn, and another have its name."""


@dataclass(frozen=True, slots=True)
class TierSpec:
    """One tier. `medium`: its name in KV events. `nbytes`: returns its configured bytes, 0 for none.

    For a tier that is not addressable, `allocator` makes its allocator from `RecoveredPages.capacity_bytes` and
    `RecoveredPages.file_bytes`, and `store` names the function that opens the store (runtime/tier_store.py, OpenStore).
    That is a name and not an import, since the core does no I/O.
    """

    takes: Takes
    medium: str
    nbytes: Callable[[ShardConfig], int]
    addressable: bool = False
    on_device: bool = False
    durable: bool = False
    allocator: Callable[[int, int], StoreAllocator] | None = None
    store: str = ""


class Tier(IntEnum):
    """Where a page lies. Smaller is faster."""

    spec: TierSpec

    def __new__(cls, rank: int, spec: TierSpec) -> Tier:
        tier = int.__new__(cls, rank)
        tier._value_ = rank
        tier.spec = spec
        return tier

    GPU = (
        0,
        TierSpec(
            *(Takes.RAW, "HBM", lambda config: config.gpu_bytes),
            on_device=True,
            allocator=DeviceAllocator,
            store="kvcluster.runtime.device_pool:open_device_pool",
        ),
    )
    RAM = 1, TierSpec(Takes.RAW, "GPU", lambda config: config.ram_bytes, addressable=True)
    HOST = 2, TierSpec(Takes.ENCODED, "CPU", lambda config: config.host_bytes, addressable=True)
    DISK = (
        3,
        TierSpec(
            *(Takes.UNCHANGED, "STORAGE", lambda config: config.disk_bytes),
            durable=True,
            allocator=FileAllocator,
            store="kvcluster.runtime.disk:open_disk",
        ),
    )


INGEST = Tier.RAM
"""The tier that workers write into, and replicas that lay above it are pulled into. Every shard has it, and its pages
are raw."""

ADDRESSABLE = tuple(tier for tier in Tier if tier.spec.addressable)
"""The tiers that readers read from, and that replicas are pulled into."""

ON_DEVICE = tuple(tier for tier in Tier if tier.spec.on_device)
"""The tiers that readers on the same device read from."""

STAGING = ADDRESSABLE[-1]
"""The tier that holds readers' private copies of pages that are not addressable. It takes every codec."""

READ_ORDER = {tier: rank for rank, tier in enumerate(sorted(Tier, key=lambda tier: (not tier.spec.addressable, tier)))}
"""The rank of each tier for a reader that has the choice: those that it reads in place first."""

STORED = tuple(tier for tier in Tier if not tier.spec.addressable)
"""The tiers whose pages lie in a store."""


def above(tier: Tier, tiers: Sequence[Tier]) -> Tier | None:
    """Returns the tier from which a shard with these `tiers`, the fastest first, demotes pages into `tier`. None for
    the first tier, which pages are promoted into, and for one that it does not have."""
    at = tiers.index(tier) if tier in tiers else 0
    return tiers[at - 1] if at else None
