"""Pins: protecting the cached prefix of a prompt from eviction, ending that, and listing what is pinned.

The coordinator lists runs of pinned blocks, each with the hash before it (core/coordinator/admin_handler.py). Here they
are joined: a block that no pinned block follows ends a pinned prefix, which reaches back as far as blocks are pinned.
Prefixes may share their first blocks. `PinCalls` has the client's calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvcluster.core import limits
from kvcluster.core.ids import BlockHash, Tenant
from kvcluster.core.messages import BlocksPinned, GetPins, PinBlocks, PinList, PinnedRun, UnpinBlocks
from kvcluster.core.miss import Miss
from kvcluster.core.spec import KVSpec
from kvcluster.errors import CallerError
from kvcluster.transfers.coordinator_client import CoordinatorClient
from kvcluster.transfers.layouts import check_filters, pin_terms
from kvcluster.transfers.long_chains import Prompt, TokenIds, in_messages
from kvcluster.transfers.transfer import PinListing, Pinned, PinnedPrefix
from kvcluster.transport.base import Deadline, Unavailable


def ask_to_pin(
    control: CoordinatorClient,
    spec: KVSpec,
    question: Callable[[tuple[BlockHash, ...]], PinBlocks | UnpinBlocks],
    hashes: Sequence[BlockHash],
    deadline: Deadline,
) -> Pinned:
    """Returns how many leading blocks are pinned, or no longer pinned, and the miss if the coordinator does not answer.
    `question` returns the message about some consecutive blocks."""
    blocks, miss = 0, None
    try:
        for some in in_messages(hashes):
            asked = question(some)
            answered = control.ask(BlocksPinned, spec, asked, deadline).blocks
            blocks += answered
            if isinstance(asked, PinBlocks) and answered < len(some):
                break  # the next is not cached, or the share is full
    except Unavailable as trouble:
        miss = trouble.miss
    return Pinned(blocks * spec.block_tokens, blocks, miss)


def unpin_prefix(control: CoordinatorClient, prefix: PinnedPrefix, deadline: Deadline) -> Pinned:
    """Unpins those blocks of a prefix that no other pinned prefix has. Raises CallerError if it is of another
    tenant."""
    try:
        space = control.namespace(prefix.spec, deadline)
    except Unavailable as trouble:
        return Pinned(0, 0, trouble.miss)
    if space != prefix.spec.namespace(Tenant(prefix.tenant)):
        raise CallerError(f"the pin is of tenant {prefix.tenant!r}: unpin it with a token of that tenant")
    return ask_to_pin(control, prefix.spec, UnpinBlocks, prefix.own, deadline)


def list_pins(control: CoordinatorClient, model: str | None, deadline: Deadline) -> PinListing:
    """Returns the pinned prefixes that this credential may see. Raises Unreachable if the coordinator does not
    answer."""
    runs: list[PinnedRun] = []
    asked = GetPins(model)
    while True:
        answer = control.require(PinList, asked, deadline, "is the cluster up?")
        runs += answer.runs
        asked = GetPins(model, answer.next)
        if not answer.next or asked.skip >= limits.LISTED_PINNED_BLOCKS:
            return PinListing(tuple(pinned_prefixes(runs)), answer.more)


def pinned_prefixes(runs: Iterable[PinnedRun]) -> list[PinnedPrefix]:
    """Returns the prefixes that these runs are parts of, by tenant and model, the largest first."""
    spaces: dict[tuple[Tenant, KVSpec], list[PinnedRun]] = {}
    for run in runs:  # a tenant may store under any hashes, another's too
        spaces.setdefault((run.tenant, run.spec), []).append(run)
    found = [prefix for some in spaces.values() for prefix in _PinnedTree(some).prefixes()]
    return sorted(found, key=lambda each: (each.tenant, each.spec.model, -each.nbytes, each.block))


class _Reach(NamedTuple):
    """What is pinned of a prefix before one of its runs begins: the depth of the first block, and all up to there."""

    first: int
    nbytes: int
    left_ns: int


class _PinnedTree:
    """Runs of pinned blocks of one namespace, joined. Each run, and each block, is looked at a few times."""

    def __init__(self, runs: Iterable[PinnedRun]) -> None:
        self._runs = sorted(runs, key=lambda run: run.first)
        self._place = {block: (run, at) for run in self._runs for at, block in enumerate(run.blocks)}
        self._following = Counter(run.before for run in self._runs)  # runs that begin behind a block
        self._reach: dict[BlockHash, _Reach] = {}  # by the first block of a run
        for run in self._runs:
            before = self._before(run)
            reach = _Reach(run.first, 0, run.left_ns)
            if before is not None:
                earlier, at = before
                first, nbytes, left_ns = self._reach[earlier.blocks[0]]
                reach = _Reach(first, nbytes + (at + 1) * earlier.block_bytes, min(left_ns, run.left_ns))
            self._reach[run.blocks[0]] = reach

    def prefixes(self) -> Iterator[PinnedPrefix]:
        for run in self._runs:
            if not self._following[run.blocks[-1]]:
                first, nbytes, left_ns = self._reach[run.blocks[0]]
                own = tuple(self._own(run))
                blocks = run.first + len(run.blocks) - first
                yield PinnedPrefix(
                    block=run.blocks[-1].hex(),
                    tenant=run.tenant,
                    spec=run.spec,
                    first=first,
                    blocks=blocks,
                    tokens=blocks * run.spec.block_tokens,
                    shared_blocks=blocks - len(own),
                    nbytes=nbytes + len(run.blocks) * run.block_bytes,
                    left_s=left_ns / 1e9,
                    own=own[::-1],
                )

    def _before(self, run: PinnedRun) -> tuple[PinnedRun, int] | None:
        """Returns the run, and the place in it, of the block before a run; None if that is not pinned."""
        found = self._place.get(run.before)
        return found if found is not None and found[0].first + found[1] + 1 == run.first else None

    def _own(self, run: PinnedRun) -> Iterator[BlockHash]:
        """Yields the blocks of the prefix that ends with this run, from its end on, as far as no other has them."""
        found: tuple[PinnedRun, int] | None = (run, len(run.blocks) - 1)
        while found is not None:
            run, at = found
            if self._following[run.blocks[at]] + (at + 1 < len(run.blocks)) > 1:
                return
            yield run.blocks[at]
            found = (run, at - 1) if at else self._before(run)


class PinCalls:
    """A part of Client."""

    _control: CoordinatorClient

    if TYPE_CHECKING:

        def _call(self, deadline_ms: float | None) -> Deadline: ...

        def _hash(
            self, prompt: Prompt | TokenIds, deadline: Deadline
        ) -> tuple[KVSpec, list[BlockHash], Miss | None]: ...

    def pin(
        self,
        prompt: Prompt | TokenIds,
        ttl_s: float,
        *,
        replicas: int = 1,
        deadline_ms: float | None = None,
    ) -> Pinned:
        """Protects the cached prefix of a prompt from eviction for `ttl_s` seconds, within the share of the cache that
        pins may take, and keeps it on `replicas` shards, or on fewer if fewer have room."""
        ttl_ns, replicas = pin_terms(ttl_s, replicas)
        return self._pin(lambda hashes: PinBlocks(hashes, ttl_ns, replicas), prompt, deadline_ms)

    def unpin(self, prompt: Prompt | TokenIds | PinnedPrefix, *, deadline_ms: float | None = None) -> Pinned:
        """Ends the pin of a prompt, so that it can be evicted again. Of a PinnedPrefix, which `pins` lists, blocks that
        another pinned prefix has too stay pinned. Raises CallerError for one of another tenant."""
        if isinstance(prompt, PinnedPrefix):
            self._control.check_may_store()
            return unpin_prefix(self._control, prompt, self._call(deadline_ms))
        return self._pin(UnpinBlocks, prompt, deadline_ms)

    def pins(self, *, model: str | None = None, deadline_ms: float | None = None) -> PinListing:
        """Returns which prefixes are pinned, of this model or of all: those of this credential's tenant, for an
        operator's those of all tenants. A prefix that is pinned or unpinned meanwhile may be missing, or listed in
        parts. Raises Unreachable if the coordinator does not answer."""
        if model is not None:
            check_filters(model=model)
        return list_pins(self._control, model, self._call(deadline_ms))

    def _pin(
        self,
        question: Callable[[tuple[BlockHash, ...]], PinBlocks | UnpinBlocks],
        prompt: Prompt | TokenIds,
        deadline_ms: float | None,
    ) -> Pinned:
        deadline = self._call(deadline_ms)
        self._control.check_may_store()
        spec, hashes, miss = self._hash(prompt, deadline)
        if not hashes:
            return Pinned(0, 0, miss)
        return ask_to_pin(self._control, spec, question, hashes, deadline)
