"""The tiers of a shard, the fastest first: what each is, in one row. No other module names one.

A tier is *addressable* where a reader is given its pages where they lie; such tiers share the shard's arena, one behind
the other. The pages of any other tier lie in a store (runtime/tier_store.py): a reader gets a copy of them in the
staging tier, and nothing but a demotion writes there. A tier is *durable* where its pages survive a restart: they are
recovered when the shard starts, and what is purged is erased there too.

A shard has the first tier, and of the others those that its configuration gives bytes. Pages are demoted from each into
the next one that the shard has, and promoted into the first; only from the last they are evicted.

To add a tier: a row here, a module with its store, a member of the same name in the wire's enum, and its settings in
config.py (docs/architecture.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Protocol

from kvcluster.config import ShardConfig
from kvcluster.core.file_allocator import FileAllocator, Owner


class Takes(Enum):
    """In which codec a page lies in a tier that it is moved into."""

    RAW = "raw"  # decoded
    ENCODED = "encoded"  # as the order says
    UNCHANGED = "unchanged"  # as it lay in the tier that it comes from


class TierAllocator(Protocol):
    """Gives out ranges of a tier's bytes, by offset. It owns no bytes.

    The invariant: reserved ranges do not overlap, and `used_bytes` is the sum of their size classes.
    """

    @property
    def capacity_bytes(self) -> int: ...

    @property
    def used_bytes(self) -> int: ...

    @property
    def free_bytes(self) -> int:
        """What is not reserved. A single page may find less: ask `reserve`."""

    def size_class(self, nbytes: int) -> int:
        """The bytes that a page of `nbytes` takes."""

    def reserve(self, nbytes: int, owner: Owner) -> int | None:
        """The offset of a range for that page; None where there is no room for it."""

    def free(self, offset: int, nbytes: int) -> None:
        """Gives back what `reserve` returned for `nbytes`."""

    def check(self) -> None:
        """Raises AssertionError where the invariant does not hold."""


class StoreAllocator(TierAllocator, Protocol):
    """The allocator of a tier that is not addressable."""

    def adopt(self, offset: int, nbytes: int, owner: Owner) -> bool:
        """Reserves the range in which that page was found. False where it cannot lie there."""

    def sparsest(self, nbytes: int, owner: Owner) -> list[tuple[Owner, int]]:
        """Where there is room, but not for that page: the pages, with their offsets, whose eviction makes room for it.
        [] where eviction makes none, or `reserve` needs none."""


@dataclass(frozen=True, slots=True)
class TierSpec:
    """One tier. `medium`: what KV events call it. `nbytes`: how much of it a configuration asks for, 0 for none.

    Of a tier that is not addressable, `allocator` makes its allocator out of what its store has found
    (Found.capacity_bytes, Found.file_bytes), and `store` is where the function lies that opens the store
    (runtime/tier_store.py, OpenStore). It is named and not imported, since the core knows no I/O.
    """

    takes: Takes
    medium: str
    nbytes: Callable[[ShardConfig], int]
    addressable: bool = False
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

    DEVICE = 0, TierSpec(Takes.RAW, "GPU", lambda config: config.device_bytes, addressable=True)
    HOST = 1, TierSpec(Takes.ENCODED, "CPU", lambda config: config.host_bytes, addressable=True)
    DISK = (
        2,
        TierSpec(
            *(Takes.UNCHANGED, "STORAGE", lambda config: config.disk_bytes),
            durable=True,
            allocator=FileAllocator,
            store="kvcluster.runtime.disk:open_disk",
        ),
    )


FASTEST = Tier.DEVICE
"""The tier that workers write into. Every shard has it, and its pages are raw."""

ADDRESSABLE = tuple(tier for tier in Tier if tier.spec.addressable)
"""The tiers that readers are shown, and that replicas come into."""

STAGING = ADDRESSABLE[-1]
"""The tier in which a reader's private copies of pages lie that are not addressable: it takes every codec."""

STORED = tuple(tier for tier in Tier if not tier.spec.addressable)
"""The tiers whose pages lie in a store."""


def above(tier: Tier, tiers: Sequence[Tier]) -> Tier | None:
    """The tier from which a shard that has these `tiers`, the fastest first, demotes pages into `tier`. None for the
    first, and for one that it does not have."""
    at = tiers.index(tier) if tier in tiers else 0
    return tiers[at - 1] if at else None
