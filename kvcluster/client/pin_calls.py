"""The calls of the client that pin prompts, unpin them, and list what is pinned."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvcluster.client.pinning import ask_to_pin, list_pins, unpin_prefix
from kvcluster.core.ids import BlockHash
from kvcluster.core.messages import PinBlocks, UnpinBlocks
from kvcluster.core.miss import Miss
from kvcluster.core.spec import KVSpec
from kvcluster.transfers.coordinator_client import CoordinatorClient
from kvcluster.transfers.prompt import Prompt, TokenIds
from kvcluster.transfers.results import PinListing, Pinned, PinnedPrefix
from kvcluster.transfers.validation import check_filters, pin_terms
from kvcluster.transport.base import Deadline


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
        """Ends the pin of a prompt, so that it can be evicted again. Of a PinnedPrefix, which `pins` lists, the blocks
        stay pinned that another pinned prefix has too. Raises CallerError for one of another tenant."""
        if isinstance(prompt, PinnedPrefix):
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
        spec, hashes, miss = self._hash(prompt, deadline)
        if not hashes:
            return Pinned(0, 0, miss)
        return ask_to_pin(self._control, spec, question, hashes, deadline)
