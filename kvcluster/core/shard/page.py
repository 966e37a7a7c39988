"""A page of a shard: which block it holds, where it lies, and in what state.

    FREE -reserve-> WRITING -commit-> READY -condemn-> CONDEMNED -last unpin-> FREE
                    WRITING -abort--> FREE
    a private copy: WRITING -lend-> CONDEMNED

A free page is not an object: it is space in the allocator. The invariant that matters: bytes of a page are given to a
reader only in READY, are written only in WRITING, and are freed only when no pin is left. A condemned page keeps its
bytes for its current readers, and new readers do not find it. Each reservation gets a new generation, which is never
reused. A page owns no bytes; the pool (pool.py) finds it, pins it and changes its state.
"""

from __future__ import annotations

from enum import Enum

from kvcluster.core.codecs import Codec
from kvcluster.core.ids import NamespaceId
from kvcluster.core.messages import NewPage, PageEvent, PageSlot, Tier
from kvcluster.core.tiers import INGEST


class PageState(Enum):
    """The state of a page; see the module's diagram."""

    __hash__ = object.__hash__  # Enum's own is a Python function, and every change of a page's state looks its state up

    WRITING = "writing"
    READY = "ready"
    CONDEMNED = "condemned"
    FREE = "free"


class PageAction(Enum):
    """The actions that change a page's state."""

    __hash__ = object.__hash__  # as of PageState

    COMMIT = "commit"
    ABORT = "abort"
    LEND = "lend"
    CONDEMN = "condemn"
    LAST_UNPIN = "last_unpin"


TRANSITIONS: dict[tuple[PageState, PageAction], PageState] = {
    (PageState.WRITING, PageAction.COMMIT): PageState.READY,
    (PageState.WRITING, PageAction.ABORT): PageState.FREE,
    (PageState.WRITING, PageAction.LEND): PageState.CONDEMNED,
    (PageState.READY, PageAction.CONDEMN): PageState.CONDEMNED,
    (PageState.CONDEMNED, PageAction.LAST_UNPIN): PageState.FREE,
}


class IllegalTransition(AssertionError):
    """An action that the page's state does not allow: a bug of this package, never a caller's error."""


class Page:
    """A reservation: where the page lies and what it holds."""

    __slots__ = (
        *("codec", "decoded", "depth", "generation", "key", "loss", "nbytes", "offset", "parent", "pins"),
        *("space", "state", "stays_raw", "sums", "tier", "used"),
    )

    def __init__(
        self,
        space: NamespaceId,
        new: NewPage,
        *,
        offset: int,
        nbytes: int,
        generation: int,
        tier: Tier = INGEST,
        codec: Codec = Codec.RAW,
    ) -> None:
        self.space = space
        self.key, self.parent, self.depth, self.loss = new
        self.offset = offset
        self.nbytes = nbytes
        self.generation = generation
        self.tier = tier
        self.codec = codec
        self.decoded = False  # from a twin below, or copied from such a page: not kept without one, nor encoded again
        self.stays_raw = False  # its bytes cannot be encoded
        self.state = PageState.WRITING
        self.pins = 0
        self.sums = b""
        self.used = 0  # when a worker last stored or pinned it, as PagePool.use counts; 0 before this incarnation

    def slot(self) -> PageSlot:
        """Returns the description of the page for the holder of a lease."""
        return PageSlot(
            self.key, self.offset, self.nbytes, self.generation, self.loss, self.sums, self.codec, self.tier
        )

    def new(self) -> NewPage:
        """Returns the page as a writer requests it."""
        return NewPage(self.key, self.parent, self.depth, self.loss)

    def event(self) -> PageEvent:
        """Returns the event that reports the page to the coordinator."""
        return PageEvent(self.space, self.key, self.parent, self.depth, self.tier, self.loss, self.codec)

    def act(self, action: PageAction) -> None:
        """Changes the state. Raises IllegalTransition if it does not allow that action."""
        after = TRANSITIONS.get((self.state, action))
        if after is None:
            raise IllegalTransition(f"{action.value} of a page that is {self.state.value}")
        self.state = after
