"""What all sequences of one client share, and how it is made with the first of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

from kvcluster.config import ClientConfig, size
from kvcluster.core.codecs import Codec
from kvcluster.core.groups import Group, Part
from kvcluster.core.ids import HASH_BYTES, Attempt
from kvcluster.core.messages import TablesSynced
from kvcluster.core.miss import Loss
from kvcluster.core.spec import KVSpec
from kvcluster.errors import CallerError
from kvcluster.sequences.open_sequences import OpenSequences
from kvcluster.sequences.resident_pages import ResidentPages
from kvcluster.sequences.row_operations import RowOperations
from kvcluster.sequences.runner import SealedStores, SequenceRunner
from kvcluster.sequences.statistics import ResidentUse, ShippedCounter
from kvcluster.sequences.table_keeper import TableKeeper
from kvcluster.transfers.coordinator_client import CoordinatorClient
from kvcluster.transfers.deadlines import OTHER_MS
from kvcluster.transfers.shard_connections import ShardConnections
from kvcluster.transfers.tickets import Tickets
from kvcluster.transfers.transfer_queue import TransferQueue
from kvcluster.transfers.zero_copy import Borrower
from kvcluster.transport.base import Deadline

if TYPE_CHECKING:
    from kvcluster.sequences.loads import SequenceLoads
    from kvcluster.sequences.missing_tokens import MissingTokens
    from kvcluster.sequences.remote_attention import RemoteAttention
    from kvcluster.sequences.resident_memory import ResidentMemory

_SYNC_INTERVAL_NS = 500_000_000
"""Changes of tables are collected for this long: a worker sends at most two messages a second to the coordinator."""


@dataclass(frozen=True)
class SequenceResources:
    """`part`: what of the group this client holds. `deadline` makes that of one call out of its `deadline_ms`."""

    runner: SequenceRunner
    rows: RowOperations
    loads: SequenceLoads
    remote: RemoteAttention
    missing: MissingTokens
    group: Group
    part: Part
    deadline: Callable[[float | None], Deadline]


def sequence_resources(
    now: Deadline,
    counter: ShippedCounter,
    *,
    spec: KVSpec,
    parts: tuple[Part | None, ...],
    control: CoordinatorClient,
    tickets: Tickets,
    transfers: TransferQueue,
    borrower: Borrower,
    accept: Loss,
    shards: ShardConnections,
    next_attempt: Callable[[], Attempt],
    config: ClientConfig,
    deadline: Callable[[float | None], Deadline],
) -> SequenceResources:
    """Returns the resources of one client's sequences, for which it asks the coordinator until the deadline `now`.
    `counter` counts what they ship. Raises CallerError if sequences cannot have this spec, or no page fits into
    `resident_bytes`, or without torch; as CoordinatorClient.attach."""
    part = parts[0]
    if part is None or len(spec.groups) != 1:
        raise CallerError("sequences need a spec with one group of layers, of which this client holds a part")
    try:
        from kvcluster.sequences.loads import SequenceLoads
        from kvcluster.sequences.missing_tokens import MissingTokens
        from kvcluster.sequences.remote_attention import RemoteAttention
        from kvcluster.sequences.resident_memory import ResidentMemory
    except ModuleNotFoundError:
        raise CallerError("sequences are kept in torch tensors: install torch") from None
    memory = ResidentMemory(spec, part, _capacity(config.resident_bytes, spec.page_bytes(0, part)))
    machine = _machine(memory, spec, part, control.attach(spec, now).run_blocks)
    remote = RemoteAttention(spec, part, accept, counter, shards=shards, control=control, next_attempt=next_attempt)
    loads_of = partial(
        SequenceLoads, spec, parts, tickets=tickets, transfers=transfers, borrower=borrower, accept=accept
    )
    keeper, store_ms = TableKeeper(next_attempt().holder, interval_ns=_SYNC_INTERVAL_NS), config.deadline_ms or OTHER_MS
    stores = SealedStores(spec, parts, memory, control=control, transfers=transfers, store_ms=store_ms)
    runner = SequenceRunner(
        *(machine, memory, keeper, stores),
        sync=partial(control.ask, TablesSynced, spec),
        flush_shards=shards.flush,
        loads_of=loads_of,
        sweep=remote.sweep,
    )
    search = MissingTokens(spec, part, accept, runner, control=control, shards=shards, next_attempt=next_attempt)
    loads = cast("SequenceLoads", runner.loads)
    return SequenceResources(
        runner, RowOperations(runner, loads), loads, remote, search, spec.groups[0], part, deadline
    )


def resident_pages(memory: ResidentMemory) -> ResidentPages:
    """Returns the numbers of the pages and slots of this memory."""
    sizes: dict[Codec, int] = {codec: nbytes for codec, nbytes in memory.stride_bytes.items() if codec is not Codec.RAW}
    return ResidentPages(memory.capacity, memory.stride_bytes[Codec.RAW], sizes, memory.unback)


def _machine(memory: ResidentMemory, spec: KVSpec, part: Part, run_blocks: int) -> OpenSequences:
    sizes = {"block_tokens": spec.block_tokens, "layers": part.layers, "run_blocks": run_blocks}
    return OpenSequences(resident_pages(memory), _random_id, **sizes)


def unused_set(spec: KVSpec, parts: tuple[Part | None, ...], resident_bytes: int | str) -> ResidentUse:
    """Returns the resident set of a client before its first sequence; without pages if it can have none."""
    part = parts[0]
    if part is None or len(spec.groups) != 1:
        return ResidentUse()
    page_bytes = spec.page_bytes(0, part)
    pages = size(resident_bytes) // page_bytes
    return ResidentUse(pages, pages_available=pages, page_bytes=page_bytes, block_tokens=spec.block_tokens)


def _random_id() -> bytes:
    return os.urandom(HASH_BYTES)


def _capacity(resident_bytes: int | str, page_bytes: int) -> int:
    nbytes = size(resident_bytes)
    if nbytes < page_bytes:
        raise CallerError(f"resident_bytes={resident_bytes} holds no page of {page_bytes} bytes: raise it")
    return nbytes // page_bytes
