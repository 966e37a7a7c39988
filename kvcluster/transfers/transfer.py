"""A transfer: the caller's handle on a load or store while it is under way on the client's own threads.

Only exchanges touch the caller's memory, each within its own ranges (read_ranges.py), and `result` and `cancel` return
only when all of them have stopped. So it is known exactly what had arrived by then, and reported even if the deadline
passed first. A transport may still read bytes of a source that it was given; a page that changes meanwhile fails its
checksum, and is not committed.

The results of a client's calls are plain, printable values: of a transfer Loaded or Stored, of the other calls Lookup,
Pinned, PinListing and BlockExplanation.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvcluster.core.ids import BlockHash
from kvcluster.core.miss import Loss, Miss, MissReason
from kvcluster.core.spec import KVSpec
from kvcluster.errors import CallerError
from kvcluster.runtime.uninterrupted import uninterrupted
from kvcluster.transfers.deadlines import Wakeup
from kvcluster.transfers.unpicklable import Unpicklable
from kvcluster.transport.base import Deadline
from kvcluster.transport.forks import OwnProcess

R = TypeVar("R")

_GIVEN_UP = Miss(MissReason.DEADLINE, "given up")


class Transfer(Unpicklable, Generic[R]):
    """Progress and outcome of a load or store, whose result is Loaded or Stored. Made by `client.begin_load` and
    `client.begin_store`; safe to use from any thread.

        transfer = client.begin_load(ticket, into)
        transfer.wait_layer(0)                   # layer 0 of every block lies in `into`
        loaded = transfer.result()               # all of it does, as far as `loaded.blocks` says

    A store has no layers to wait for. A forked child cannot use it.
    """

    instead = "use it where it was begun"

    keeps: object = None
    """What must not be collected before this."""

    def __init__(
        self,
        deadline: Deadline,
        cancel: Callable[[Miss], object],
        layer_left: Callable[[int], int] = lambda layer: 0,
        layers: Collection[int] = (),
    ) -> None:
        """`cancel` ends the transfer with a reason; once it has returned, `finish` has been called. `layer_left`
        returns how many pieces of a model layer, one of `layers`, have not arrived; the thread that makes it 0 calls
        `layer_completed`."""
        self._process = OwnProcess()
        self._deadline = deadline
        self._cancel = cancel
        self._layer_left = layer_left
        self._layers = layers
        self._changed = Wakeup()
        self._source_free = False
        self._outcome: R | None = None
        self._error: BaseException | None = None

    # --------------------------------------------------------------------------------------- the caller

    def done(self) -> bool:
        """Whether it has ended, with any outcome."""
        self._check_process()
        return self._ended()

    def layer_done(self, layer: int) -> bool:
        """Whether everything requested of this model layer has arrived and been verified. Raises CallerError for a
        layer that the transfer does not move."""
        return self._layer_left(self._checked(layer)) == 0

    def wait_layer(self, layer: int, deadline_ms: float | None = None) -> bool:
        """Waits until `layer_done(layer)`. Returns False if the transfer ended, or `deadline_ms` passed, without it.
        Raises CallerError as `layer_done`."""
        layer = self._checked(layer)
        deadline = self._deadline if deadline_ms is None else Deadline.after_ms(deadline_ms)
        self._changed.wait_for(lambda: not self._layer_left(layer) or self._ended(), deadline.remaining_s())
        return not self._layer_left(layer)

    def wait_ended(self, deadline: Deadline) -> bool:
        """Waits until it has ended, with any outcome; False if the deadline passes first."""
        self._check_process()
        return self._changed.wait_for(self._ended, deadline.remaining_s())

    def source_free(self) -> bool:
        """Whether the source of a store may be overwritten. True earlier than `done`."""
        self._check_process()
        return self._source_free or self._ended()

    def result(self, deadline_ms: float | None = None) -> R:
        """Waits for the outcome. If the deadline passes first, ends the transfer, and returns what had arrived by then,
        with a miss. If it is interrupted, as by Ctrl-C, it ends the transfer as well.

        Raises CallerError, CredentialError or ProtocolError if the transfer failed for one of these.
        """
        deadline = self._deadline if deadline_ms is None else Deadline.after_ms(deadline_ms)
        try:
            if not self.wait_ended(deadline):
                self._end(Miss(MissReason.DEADLINE))
        except BaseException:
            self._end(_GIVEN_UP)
            raise
        if self._error is not None:
            raise self._error
        assert self._outcome is not None, "a transfer that was ended has an outcome"
        return self._outcome

    def cancel(self) -> None:
        """Ends the transfer: when this returns, the caller's memory is no longer written."""
        self._check_process()
        self._end(_GIVEN_UP)

    def __repr__(self) -> str:
        outcome = self._error if self._outcome is None else self._outcome
        return f"<Transfer {'under way' if outcome is None else repr(outcome)}>"

    # --------------------------------------------------------------------------------- the client's threads

    def layer_completed(self) -> None:
        """Some layer is complete now: wakes threads that wait for one. Must be called without holding a lock."""
        self._changed.notify()

    def drained(self) -> None:
        """The source will not be read any more."""
        self._source_free = True
        self._changed.notify()

    def finish(self, outcome: R | None, error: BaseException | None = None) -> None:
        """Ends the transfer with an outcome, or with the error that `result` raises. Drops `cancel`."""
        self._outcome, self._error = outcome, error
        self._cancel = lambda why: None
        self._changed.notify()

    def _end(self, why: Miss) -> None:
        uninterrupted(lambda call: self._cancel(why), brief=True)

    def _check_process(self) -> None:
        self._process.check("transfer")

    def _checked(self, layer: int) -> int:
        """Returns the number of a layer that the transfer moves. Raises CallerError for any other value."""
        self._check_process()
        if not self._layers:
            raise CallerError("only loads have layers to wait for; a store has source_free() and result()")
        try:
            number = operator.index(layer)
        except TypeError:
            number = None
        if number is None or number not in self._layers:
            raise CallerError(
                f"there is no layer {layer!r} in this load, which moves {len(self._layers)} layers of the model, from "
                f"{min(self._layers)} to {max(self._layers)}"
            )
        return number

    def _ended(self) -> bool:
        return self._outcome is not None or self._error is not None


@dataclass(frozen=True, slots=True)
class Lookup:
    """How much of a prompt is cached: whole blocks from its start. `load_seconds` is an estimate from this client's own
    loads so far, None before the first. `reason`: why the next block missed, None if none is left. `loss`: the worst
    loss of any of these blocks.

        found = client.lookup(token_ids)
        left_to_compute = len(token_ids) - found.tokens
    """

    tokens: int
    blocks: int
    load_seconds: float | None
    reason: Miss | None
    loss: Loss = Loss.EXACT


@dataclass(frozen=True, slots=True)
class Loaded:
    """The outcome of a load.

        loaded = client.begin_load(ticket, out).result()
        first_to_compute = loaded.blocks * spec.block_tokens

    The leading `blocks` blocks are valid in the destination. `nbytes` of KV arrived and were verified, and decoded
    if they were encoded. `loss` is the worst loss of any of it: KV computed over it has the same loss, and must be
    stored with it. `took_ns` is how long the bytes took; 0 if the load was stopped.

    `failed` names, in order, every block of the ticket that is not complete in the destination, and why; all others
    were filled, also those behind a failed one. `miss` is the first of these reasons, None if nothing failed. If a
    group needs only the blocks before the boundary (reuse "window" or "last"), one failed block leaves no usable
    boundary: `blocks` is then the load's `first`, 0 by default.
    """

    blocks: int
    nbytes: int
    miss: Miss | None = None
    failed: Mapping[int, Miss] = field(default_factory=dict)
    loss: Loss = Loss.EXACT
    took_ns: int = field(default=0, compare=False)

    def __repr__(self) -> str:
        failed = f", failed={{{len(self.failed)} blocks}}" if self.failed else ""
        return f"Loaded(blocks={self.blocks}, nbytes={self.nbytes}, miss={self.miss!r}{failed}, loss={self.loss!r})"


@dataclass(frozen=True, slots=True)
class Stored:
    """The outcome of a store. Of the blocks given, it wrote and committed `blocks`; `deduplicated` were cached already;
    another client is writing `pending`. `nbytes` were moved. `miss` is the first reason why any other block was not
    stored.

        stored = client.store(token_ids, kv)
        if stored.miss is not None:
            print("not all of it is stored:", stored.miss)
    """

    blocks: int
    deduplicated: int
    pending: int
    nbytes: int
    miss: Miss | None = None


@dataclass(frozen=True, slots=True)
class Pinned:
    """The leading `blocks` blocks of a prompt, `tokens` tokens, are now pinned (after an unpin: no longer pinned). If
    the prompt has more, the rest is not cached or the share of pins is full. `miss` is the reason why the cluster could
    not be asked, None if it answered."""

    tokens: int
    blocks: int
    miss: Miss | None = None


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """A prefix that is pinned, of a prompt under `spec` of `tenant`. `block` is the hash of its last block, in
    hexadecimal, which names it.

    `blocks` of it are pinned, `tokens` tokens, and take `nbytes` bytes in all tiers of all shards. Before them are
    `first` blocks that are not pinned: 0 unless they were unpinned, or are not cached any more. Another pinned prefix
    has `shared_blocks` of the pinned ones too, so that `nbytes` of several do not add up. In `left_s` seconds the
    first of them may be evicted again. `own` are the hashes of those that no other has, which `unpin` unpins.
    """

    block: str
    tenant: str
    spec: KVSpec
    first: int
    blocks: int
    tokens: int
    shared_blocks: int
    nbytes: int
    left_s: float
    own: tuple[BlockHash, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class PinListing:
    """The pinned prefixes of one listing, by tenant and model. `more_blocks`: pinned blocks beyond
    limits.LISTED_PINNED_BLOCKS, which were not looked at; 0 if the listing is whole.

        for pin in client.pins().pins:
            print(pin.spec.model, pin.tokens, pin.left_s)
    """

    pins: tuple[PinnedPrefix, ...]
    more_blocks: int = 0


@dataclass(frozen=True, slots=True)
class BlockExplanation:
    """One block of an `explain`: where it is, or why it cannot be loaded. `block` counts from the prompt's start;
    `tier` and `shard` are set for a hit, `reason` and `detail` for a miss. As text it is one line.

        print(*client.explain(token_ids), sep="\\n")         # block 0: hit (ram, shard-1)
    """

    block: int
    hit: bool
    tier: str = ""
    shard: str = ""
    reason: MissReason | None = None
    detail: str = ""

    def __str__(self) -> str:
        if self.hit:
            return f"block {self.block}: hit ({self.tier}, {self.shard})"
        assert self.reason is not None
        return f"block {self.block}: miss, {Miss(self.reason, self.detail)}"
