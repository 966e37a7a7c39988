"""Opens the sequences of one client: makes their resident set with the first one, and finds the cached prefix of
each."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from kvcluster.client.coordinator_client import CoordinatorClient
from kvcluster.client.prompt import Prompt
from kvcluster.client.sequences.machine import SequenceMachine
from kvcluster.client.sequences.policy import WindowPolicy
from kvcluster.client.sequences.resident_pages import ResidentPages
from kvcluster.client.sequences.runner import SequenceRunner
from kvcluster.client.sequences.sequence import Sequence, random_name
from kvcluster.client.sequences.state import SequenceState
from kvcluster.client.sequences.statistics import ResidentUse
from kvcluster.client.sequences.table_keeper import TableKeeper
from kvcluster.client.tickets import Tickets
from kvcluster.client.transfer_queue import TransferQueue
from kvcluster.client.validation import check_open
from kvcluster.config import ClientConfig
from kvcluster.core import hashing
from kvcluster.core.ids import HASH_BYTES, Holder
from kvcluster.core.miss import Loss
from kvcluster.core.spec import KVSpec, Part
from kvcluster.errors import CallerError, LostTokens, ResidentSetFull
from kvcluster.transport.base import Deadline

_SYNC_INTERVAL_NS = 500_000_000
"""Changes of tables are collected for this long: a worker asks the coordinator twice a second at most."""


class SequenceOpener:
    """Makes the sequences of one client. Thread-safe."""

    def __init__(
        self,
        spec: KVSpec,
        parts: tuple[Part | None, ...],
        control: CoordinatorClient,
        tickets: Tickets,
        transfers: TransferQueue,
        *,
        flush_shards: Callable[[Deadline], bool],
        accept: Loss,
        holder: Holder,
        config: ClientConfig,
        deadline: Callable[[float | None], Deadline],
    ) -> None:
        self._spec = spec
        self._parts = parts
        self._control = control
        self._tickets = tickets
        self._transfers = transfers
        self._flush_shards = flush_shards
        self._accept = accept
        self._holder = holder
        self._config = config
        self._deadline = deadline
        self._lock = threading.Lock()
        self._runner: SequenceRunner | None = None
        self._closed = False

    def open(self, prompt: Prompt, max_tokens: int, policy: WindowPolicy, deadline: Deadline) -> Sequence:
        """As Client.sequence."""
        spec = self._spec
        if prompt.extra_keys or prompt.adapter not in (None, spec.adapter):
            raise CallerError(
                "a sequence takes no extra_keys and no adapter but that of the client's spec: use prepare_load and "
                "begin_store for images, and a client of its own for another adapter"
            )
        namespace = self._control.namespace(spec, deadline)
        runner = self._started(deadline)
        root = hashing.root(namespace, prompt.salt)
        state = SequenceState(random_name(), root, policy, block_tokens=spec.block_tokens, max_tokens=max_tokens)
        ids = prompt.token_ids[:max_tokens]
        hashes = hashing.chain(root, ids, spec.block_tokens)
        losses = runner.find(hashes, deadline) if hashes else []
        tokens, step = hashing.token_bytes(ids), 4 * spec.block_tokens
        cached = [(hashes[at], tokens[at * step : (at + 1) * step], loss) for at, loss in enumerate(losses)]
        with runner.lock:
            runner.machine.open(state, cached)
            runner.keeper.opened(state)
            runner.wake()
        sequence = Sequence(runner, state, self._deadline)
        self._load_prefix(runner, sequence, state, deadline)
        return sequence

    def use(self) -> ResidentUse:
        """Returns what all open sequences take; nothing before the first."""
        runner = self._runner
        if runner is None:
            return ResidentUse(0, 0, 0, 0, 0, 0)
        with runner.lock:
            machine, pages = runner.machine, runner.machine.pages
            return ResidentUse(
                pages.capacity,
                pages.used,
                pages.peak,
                runner.memory.tensor[0].nbytes,
                machine.sequences,
                runner.stores_pending,
            )

    def close(self) -> None:
        """Ends the thread of the sequences. They must not be used any more."""
        with self._lock:
            self._closed = True
            runner = self._runner
        if runner is not None:
            runner.close()

    def _load_prefix(
        self, runner: SequenceRunner, sequence: Sequence, state: SequenceState, deadline: Deadline
    ) -> None:
        """Loads as many of a new sequence's blocks as the resident set has pages that hold no block; the others are
        loaded when they are read. What is lost meanwhile is cut off."""
        with runner.lock:
            free = runner.machine.pages.capacity - runner.machine.pages.used
        try:
            runner.bring(state, range(min(len(state.blocks), free)), deadline)
        except ResidentSetFull:
            pass  # another sequence was faster
        except LostTokens as lost:
            sequence.truncate(lost.position)

    def _started(self, deadline: Deadline) -> SequenceRunner:
        with self._lock:
            check_open(self._closed)
            if self._runner is None:
                self._runner = self._make(deadline)
            return self._runner

    def _make(self, deadline: Deadline) -> SequenceRunner:
        spec, part = self._spec, self._parts[0]
        if len(spec.groups) != 1 or part is None:
            raise CallerError("sequences need a spec with one group of layers, of which this client holds a part")
        try:
            from kvcluster.client.sequences.memory import ResidentMemory
        except ModuleNotFoundError:
            raise CallerError("sequences are kept in torch tensors: install torch") from None
        page_bytes = spec.page_bytes(0, part)
        capacity = self._config.resident_bytes // page_bytes
        if not capacity:
            raise CallerError(
                f"resident_bytes={self._config.resident_bytes} holds no page of {page_bytes} bytes: raise it"
            )
        attached = self._control.attach(spec, deadline)
        machine = SequenceMachine(
            ResidentPages(capacity),
            lambda: os.urandom(HASH_BYTES),
            block_tokens=spec.block_tokens,
            layers=part.layers,
            run_blocks=attached.run_blocks,
        )
        return SequenceRunner(
            spec,
            self._parts,
            machine,
            TableKeeper(self._holder, interval_ns=_SYNC_INTERVAL_NS),
            ResidentMemory(spec, part, capacity),
            control=self._control,
            tickets=self._tickets,
            transfers=self._transfers,
            flush_shards=self._flush_shards,
            accept=self._accept,
            store_ms=self._config.deadline_ms,
        )
