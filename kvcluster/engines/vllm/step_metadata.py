"""The messages between the two sides of the connector, sent with each step. Plain values, pickled between processes.

The scheduler's side sends orders: a `Step` goes to every worker with each engine step. The workers' side sends reports:
a `StepReport` from every rank returns with the step's output, and all are merged into one. Neither side knows the
other's state except through these messages, so a rank that is slow, or whose client is not connected yet, only shows as
a failed load in a report.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvcluster.core.ids import BlockHash
from kvcluster.core.miss import Loss, Miss

BlockIds = tuple[tuple[int, ...], ...]
"""For each group the engine's own block numbers, one for each block of the range that they belong to; of a store, none
for groups of which nothing is stored."""


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Load the ticket's blocks from number `first` on into these blocks of the engine.

    `layerwise`: within this step's forward pass, which waits for each layer; otherwise beside the forward passes.
    `of_another`: the blocks are those of the tenant that the engine also reads.
    """

    request: str
    adapter: str
    ticket: bytes
    first: int
    into: BlockIds
    layerwise: bool
    deadline_ms: int
    of_another: bool = False


@dataclass(frozen=True, slots=True)
class StoreOrder:
    """After this step's forward pass, store `blocks` blocks of a request's chain from number `first` on.

    `number` is unique among the orders of its scheduler. `tokens` are the token ids of these blocks if the cluster
    wants them for KV events, otherwise ().
    """

    number: int
    request: str
    adapter: str
    first: int
    source: BlockIds
    loss: Loss
    tokens: tuple[int, ...] = ()

    @property
    def blocks(self) -> int:
        return max(map(len, self.source))


@dataclass(frozen=True, slots=True)
class Step:
    """Orders of one engine step. `weights` is the weights id that they hold for, "" while none is known; a step without
    orders may name one that the scheduler's side is only connecting for.

    `chains` extends the hash chain of a request, from a block number on. `written` are blocks of the engine that this
    step gives to a new owner: stores that still read them stop. `gone` are requests that have ended; `held` are those
    among them whose blocks the engine keeps until the workers report that they are no longer read. The step ends when
    every store of the requests `handed_over` has ended, or `handover_ms` has passed. `few_blocks`: the engine has few
    free ones.
    """

    number: int
    weights: str
    chains: tuple[tuple[str, int, tuple[BlockHash, ...]], ...] = ()
    loads: tuple[LoadOrder, ...] = ()
    stores: tuple[StoreOrder, ...] = ()
    written: tuple[int, ...] = ()
    gone: tuple[str, ...] = ()
    held: tuple[str, ...] = ()
    handed_over: tuple[str, ...] = ()
    few_blocks: bool = False


@dataclass(frozen=True, slots=True)
class LoadReport:
    """How a load ended: the first `blocks` of its ticket have their KV, those before `first` included, and `nbytes` of
    KV were verified and written in `took_ns`. `miss` is the reason why no more arrived. The report covers `ranks`
    ranks: each rank may end a load beside the forward passes in a different step. `most_bytes` are those of the rank
    among several that moved the most."""

    blocks: int
    nbytes: int
    took_ns: int
    loss: Loss
    miss: Miss | None
    ranks: int = 1
    most_bytes: int = 0

    @property
    def rank_bytes(self) -> int:
        """The bytes of the rank that moved the most."""
        return self.nbytes if self.ranks == 1 else self.most_bytes

    def with_others(self, other: LoadReport) -> LoadReport:
        """Returns the merged report of more ranks: the fewest blocks, the sum of the bytes, the longest time."""
        return LoadReport(
            min(self.blocks, other.blocks),
            self.nbytes + other.nbytes,
            max(self.took_ns, other.took_ns),
            max(self.loss, other.loss),
            self.miss or other.miss,
            self.ranks + other.ranks,
            max(self.rank_bytes, other.rank_bytes),
        )


@dataclass(slots=True)
class StepReport:
    """What happened at the workers since the previous report. `step` is the last step that they carried out.

    `drained` counts for each store order the ranks that no longer read its source. `stored` and `store_bytes` are pages
    that this engine stored and that became READY, and the bytes transferred for them. `dropped` counts stores that were
    cancelled because their source was given to a new owner; `store_misses` counts the reasons of other failed stores.
    `opened_breakers` counts how often a rank stopped asking a shard, or tried it again in vain. `off` is the reason why
    the rank can load and store nothing any more; "" while it can.
    """

    step: int = 0
    loads: dict[str, LoadReport] = field(default_factory=dict)
    drained: Counter[int] = field(default_factory=Counter)
    stored: int = 0
    store_bytes: int = 0
    dropped: int = 0
    store_misses: Counter[str] = field(default_factory=Counter)
    opened_breakers: int = 0
    off: str = ""

    def refused(self, order: StoreOrder, why: str) -> None:
        """Adds an order of which nothing is stored."""
        self.drained[order.number] += 1
        self.store_misses[why] += 1

    def merge(self, other: StepReport) -> None:
        """Adds another rank's report of the same step."""
        self.step = min(self.step, other.step)
        for request, load in other.loads.items():
            mine = self.loads.get(request)
            self.loads[request] = load if mine is None else mine.with_others(load)
        self.opened_breakers += other.opened_breakers
        self.off = self.off or other.off
        self.add_stores(other)

    def add_stores(self, other: StepReport) -> None:
        """Adds another report's counts of stores."""
        self.drained += other.drained
        self.stored += other.stored
        self.store_bytes += other.store_bytes
        self.dropped += other.dropped
        self.store_misses += other.store_misses

    def __bool__(self) -> bool:
        stores = self.drained or self.stored or self.dropped or self.store_misses
        return bool(self.loads or stores or self.opened_breakers or self.off)
