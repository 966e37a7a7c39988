"""What the two sides of the connector tell each other, step by step. Plain values, pickled between processes.

The scheduler side orders: a `Step` goes to every worker with each engine step. The worker side reports: a `StepReport`
comes back with the step's output, from every rank, and is merged into one on the way. Neither side knows the other's
state but by these, so that a rank which is slow, or whose client is not connected yet, is a failed load in a report and
nothing else.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvcluster.core.ids import BlockHash
from kvcluster.core.miss import Loss, Miss

BlockIds = tuple[tuple[int, ...], ...]
"""For each group the engine's own block numbers, one a block of the range that they go with."""


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Load the ticket's blocks from number `first` on into these blocks of the engine.

    `layerwise`: within this step's forward pass, which waits for each layer; otherwise beside whatever runs.
    """

    request: str
    adapter: str
    ticket: bytes
    first: int
    into: BlockIds
    layerwise: bool
    deadline_ms: int


@dataclass(frozen=True, slots=True)
class StoreOrder:
    """When this step's forward pass is through, store blocks `first` to `first + len(source[0])` of a request's chain.

    `number` is this order's own among all of its scheduler. `tokens` are the token ids of these blocks where the
    cluster wants them, for KV events.
    """

    number: int
    request: str
    adapter: str
    first: int
    source: BlockIds
    loss: Loss
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """Orders of one engine step. `weights` is the identity that they hold for, "" while none is known.

    `chains` adds to the hash chain of a request, from a block number on. `written` are blocks of the engine that this
    step hands to somebody new: whoever still reads them stops. `gone` are requests of which no more is to come, `held`
    those among them whose blocks the engine keeps until this side says that they are not read any more. The step ends
    when every store of the requests `handed_over` has, or their time is up.
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


@dataclass(frozen=True, slots=True)
class LoadReport:
    """How a load ended: `blocks` of its ticket are there, those before `first` included, and `nbytes` of KV were
    verified and written in `took_ns`. `miss` says why no more came. `ranks` say so together: ranks end a load beside
    the passes in steps of their own."""

    blocks: int
    nbytes: int
    took_ns: int
    loss: Loss
    miss: Miss | None
    ranks: int = 1

    def with_others(self, other: LoadReport) -> LoadReport:
        """The same load, of more ranks: as far as all have it, all of the bytes, the longest time."""
        return LoadReport(
            min(self.blocks, other.blocks),
            self.nbytes + other.nbytes,
            max(self.took_ns, other.took_ns),
            max(self.loss, other.loss),
            self.miss or other.miss,
            self.ranks + other.ranks,
        )


@dataclass(slots=True)
class StepReport:
    """What happened at the workers since their last. `step` is the last that they carried out.

    `drained` counts for each store order the ranks that read its source no more. `stored` and `store_bytes` are pages
    of blocks that became READY by this engine and what was moved for them; `dropped` are stores that came to nothing
    because their source was handed to somebody else; `store_misses` are reasons why others did.
    """

    step: int = 0
    loads: dict[str, LoadReport] = field(default_factory=dict)
    drained: Counter[int] = field(default_factory=Counter)
    stored: int = 0
    store_bytes: int = 0
    dropped: int = 0
    store_misses: Counter[str] = field(default_factory=Counter)

    def merge(self, other: StepReport) -> None:
        """Adds another rank's report of the same step."""
        self.step = min(self.step, other.step)
        for request, load in other.loads.items():
            mine = self.loads.get(request)
            self.loads[request] = load if mine is None else mine.with_others(load)
        self.drained += other.drained
        self.stored += other.stored
        self.store_bytes += other.store_bytes
        self.dropped += other.dropped
        self.store_misses += other.store_misses

    def __bool__(self) -> bool:
        return bool(self.loads or self.drained or self.stored or self.dropped or self.store_misses)
