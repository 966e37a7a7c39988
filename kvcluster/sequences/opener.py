"""Opens the sequences of one client, each with its cached prefix."""

from __future__ import annotations

import threading
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import replace
from typing import TYPE_CHECKING

from kvcluster.core import hashing
from kvcluster.core.ids import BlockHash
from kvcluster.core.miss import Loss
from kvcluster.core.spec import KVSpec
from kvcluster.errors import CallerError, LostTokens, ResidentSetFull
from kvcluster.sequences.resources import SequenceResources
from kvcluster.sequences.sequence import Sequence
from kvcluster.sequences.state import SequenceState, random_name
from kvcluster.sequences.statistics import ResidentUse, ShippedCounter, ShippedCounts, resident_use
from kvcluster.sequences.window_policy import WindowPolicy
from kvcluster.transfers.coordinator_client import CoordinatorClient
from kvcluster.transfers.layouts import check_open
from kvcluster.transfers.long_chains import Prompt
from kvcluster.transport.base import Deadline

if TYPE_CHECKING:
    from kvcluster.sequences.loads import SequenceLoads


class SequenceOpener:
    """Opens the sequences of one client. `make` returns what they share, `unused` is their resident set until then.
    Thread-safe."""

    def __init__(
        self,
        spec: KVSpec,
        control: CoordinatorClient,
        make: Callable[[Deadline, ShippedCounter], SequenceResources],
        unused: ResidentUse,
    ) -> None:
        self._spec = spec
        self._control = control
        self._make = make
        self._unused = unused
        self.counter = ShippedCounter()
        self._lock = threading.Lock()
        self._resources: SequenceResources | None = None
        self._closed = False

    def open(
        self,
        prompt: Prompt,
        max_tokens: int,
        policy: WindowPolicy,
        deadline: Deadline,
        *,
        drop_oldest: bool,
        publish: bool,
        prefetch: bool,
        client: object,
    ) -> Sequence:
        """As Client.sequence, for a sequence that keeps its client."""
        spec = self._spec
        if prompt.extra_keys or prompt.adapter not in (None, spec.adapter):
            raise CallerError(
                "a sequence takes no extra_keys and no adapter but that of the client's spec: use prepare_load and "
                "begin_store for images, and a client of its own for another adapter"
            )
        namespace = self._control.namespace(spec, deadline)
        self._control.check_may_store()
        resources = self._started(deadline)
        runner, loads = resources.runner, resources.loads
        root = hashing.root(namespace, prompt.salt)
        state = SequenceState(
            random_name(),
            root,
            policy,
            block_tokens=spec.block_tokens,
            max_tokens=max_tokens,
            drop_oldest=drop_oldest,
            publish=publish,
        )
        cached = _cached(root, prompt.token_ids[:max_tokens], spec.block_tokens, loads, deadline)
        with runner.lock:
            runner.start()
            runner.machine.open(state, cached)
            runner.keeper.opened(state)
            runner.wake()
        sequence = Sequence(resources, state, client)
        try:
            if prefetch:
                state.loss = max(state.loss, loads.provide(state.blocks, deadline, lend=True, only_free=True))
        except LostTokens as lost:  # since they were found
            sequence.truncate(lost.position)
        except BaseException:
            sequence.close()
            raise
        return sequence

    def prewarm(self, tokens: int, deadline: Deadline) -> None:
        """As Client.prewarm_resident."""
        runner, needed = self._started(deadline).runner, -(-tokens // self._spec.block_tokens)
        with runner.lock:
            pages = runner.machine.pages
            if needed > pages.capacity:
                raise CallerError(
                    f"{tokens} tokens take {needed} pages, and the resident set has {pages.capacity}: open the client "
                    "with a larger resident_bytes"
                )
            runner.memory.touch(pages.prewarm(needed))
            if pages.backed < needed:
                raise ResidentSetFull(
                    f"there is memory for {pages.backed} of {needed} pages: encoded pages have taken the rest"
                )

    def use(self) -> ResidentUse:
        """Returns how large the resident set is, and what all open sequences take."""
        if self._resources is None:
            return self._unused
        runner, loads = self._resources.runner, self._resources.loads
        with runner.lock:
            runner.close_abandoned()
            borrowed, waiting = len(loads.absent.lent), runner.stores_pending
            return resident_use(runner.machine, borrowed, waiting, self._spec.block_tokens)

    def shipped(self) -> ShippedCounts:
        """Returns what was sent to shards and received from them; nothing before the first sequence."""
        loaded = 0 if self._resources is None else self._resources.loads.loaded_bytes
        return replace(self.counter.counts(), loaded_bytes=loaded)

    def end(self) -> None:
        """Closes all sequences. Returns at once: the caller then ends what the thread waits for, and calls `close`."""
        with self._lock:
            self._closed = True
            resources = self._resources
        if resources is not None:
            resources.runner.end()

    def close(self) -> None:
        """As `end`; then ends the threads, and frees the resident set when nothing reads it."""
        self.end()
        if self._resources is not None:
            self._resources.runner.close()
            self._resources.remote.close()

    def _started(self, deadline: Deadline) -> SequenceResources:
        with self._lock:
            check_open(self._closed)
            if self._resources is None:
                self._resources = self._make(deadline, self.counter)
            return self._resources


def _cached(
    root: BlockHash, ids: Tokens[int], block_tokens: int, loads: SequenceLoads, deadline: Deadline
) -> list[tuple[BlockHash, bytes, Loss]]:
    """Returns the leading blocks of these tokens that the cluster has: the hash, the tokens and the loss of each."""
    hashes = hashing.chain(root, ids, block_tokens)
    losses = loads.find(hashes, deadline) if hashes else []
    tokens, step = hashing.token_bytes(ids), 4 * block_tokens
    return [(hashes[at], tokens[at * step : (at + 1) * step], loss) for at, loss in enumerate(losses)]
