"""What a transport carries between a worker and a shard: one load or one store, and tickets between workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, overload

from kvcluster.core.columns import ColumnSequence, make_rows
from kvcluster.core.groups import PageKey, Part
from kvcluster.core.ids import Attempt, BlockHash, Epoch, NamespaceId
from kvcluster.core.messages.common import Need, Run
from kvcluster.core.messages.shard import NewPage
from kvcluster.core.miss import Loss


class PageWant(NamedTuple):
    """Layers `layer_start` to `layer_stop` of a page, counted from the page's own first layer."""

    key: PageKey
    layer_start: int
    layer_stop: int


class WantKind(NamedTuple):
    """What the wants of many blocks have in common: group and part of the pages, and the layers of them."""

    group: int
    part: Part
    layer_start: int
    layer_stop: int


class PageWants(ColumnSequence[PageWant]):
    """Wants as columns: want i is of the block `hashes[i]` and of the kind `kinds[kind_of[i]]`."""

    __slots__ = ("hashes", "kind_of", "kinds")

    def __init__(self, hashes: Sequence[BlockHash], kind_of: Sequence[int], kinds: Sequence[WantKind]) -> None:
        self.hashes = hashes
        self.kind_of = kind_of
        self.kinds = kinds

    @classmethod
    def of(cls, wants: Sequence[PageWant]) -> PageWants:
        """Returns these wants as columns; `wants` itself if it has them already."""
        if isinstance(wants, PageWants):
            return wants
        numbers: dict[WantKind, int] = {}
        kind_of = [
            numbers.setdefault(WantKind(key.group, key.part, start, stop), len(numbers)) for key, start, stop in wants
        ]
        return cls([key.hash for key, _, _ in wants], kind_of, list(numbers))

    def __len__(self) -> int:
        return len(self.hashes)

    @overload
    def __getitem__(self, at: int) -> PageWant: ...

    @overload
    def __getitem__(self, at: slice) -> PageWants: ...

    def __getitem__(self, at: int | slice) -> PageWant | PageWants:
        if isinstance(at, slice):
            return PageWants(self.hashes[at], self.kind_of[at], self.kinds)
        group, part, start, stop = self.kinds[self.kind_of[at]]
        return PageWant(PageKey(self.hashes[at], group, part), start, stop)

    def keys(self) -> list[PageKey]:
        """Returns the key of each wanted page."""
        groups, parts = ([kind[field] for kind in self.kinds] for field in (0, 1))
        kind_of = self.kind_of
        return make_rows(PageKey, self.hashes, [groups[kind] for kind in kind_of], [parts[kind] for kind in kind_of])

    def select(self, items: Sequence[int]) -> PageWants:
        """Returns the wants with these indices, which are ascending."""
        if len(items) == len(self):
            return self
        return PageWants([self.hashes[item] for item in items], [self.kind_of[item] for item in items], self.kinds)


class NewPages(ColumnSequence[NewPage]):
    """New pages as columns: page i is of the block `hashes[i]`, and its group and part are `places[place_of[i]]`."""

    __slots__ = ("depths", "hashes", "losses", "parents", "place_of", "places")

    def __init__(
        self,
        hashes: Sequence[BlockHash],
        place_of: Sequence[int],
        places: Sequence[tuple[int, Part]],
        parents: Sequence[BlockHash],
        depths: Sequence[int],
        losses: Sequence[Loss],
    ) -> None:
        self.hashes = hashes
        self.place_of = place_of
        self.places = places
        self.parents = parents
        self.depths = depths
        self.losses = losses

    @classmethod
    def of(cls, pages: Sequence[NewPage]) -> NewPages:
        """Returns these pages as columns; `pages` itself if it has them already."""
        if isinstance(pages, NewPages):
            return pages
        numbers: dict[tuple[int, Part], int] = {}
        place_of = [numbers.setdefault((page.key.group, page.key.part), len(numbers)) for page in pages]
        hashes, parents = [page.key.hash for page in pages], [page.parent for page in pages]
        depths, losses = [page.depth for page in pages], [page.loss for page in pages]
        return cls(hashes, place_of, list(numbers), parents, depths, losses)

    def __len__(self) -> int:
        return len(self.hashes)

    @overload
    def __getitem__(self, at: int) -> NewPage: ...

    @overload
    def __getitem__(self, at: slice) -> NewPages: ...

    def __getitem__(self, at: int | slice) -> NewPage | NewPages:
        if isinstance(at, slice):
            return self.select(range(len(self))[at])
        key = PageKey(self.hashes[at], *self.places[self.place_of[at]])
        return NewPage(key, self.parents[at], self.depths[at], self.losses[at])

    def select(self, items: Sequence[int]) -> NewPages:
        """Returns the pages with these indices, which are ascending."""
        if len(items) == len(self):
            return self
        hashes, parents = [self.hashes[item] for item in items], [self.parents[item] for item in items]
        place_of, depths = [self.place_of[item] for item in items], [self.depths[item] for item in items]
        return NewPages(hashes, place_of, self.places, parents, depths, [self.losses[item] for item in items])


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Pin these pages, send these layers of them, unpin: one exchange of a transport. Pages that have lost more than
    `accept` are a miss. `on_device`: the reader has opened the shard's pool on a device, and reads pages there too."""

    namespace: NamespaceId
    attempt: Attempt
    epoch: Epoch
    wants: Sequence[PageWant]
    accept: Loss = Loss.EXACT
    on_device: bool = False


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """Reserve these pages, take their bytes, verify and commit them: one exchange of a transport."""

    namespace: NamespaceId
    attempt: Attempt
    epoch: Epoch
    pages: Sequence[NewPage]
    wait_ns: int = 0


@dataclass(frozen=True, slots=True)
class TicketBody:
    """All that another process with the same credential needs to redeem a ticket.

    `hashes` are those of the granted blocks; `runs` cover them; `need` is the need that was prepared.
    """

    namespace: NamespaceId
    attempt: Attempt
    hashes: tuple[BlockHash, ...]
    need: Need
    runs: tuple[Run, ...]

    @property
    def loss(self) -> Loss:
        """The highest loss that any of these blocks had when the load was prepared."""
        sources = (source for run in self.runs for of_group in run.plan for source in of_group or ())
        return max((source.loss for source in sources), default=Loss.EXACT)
