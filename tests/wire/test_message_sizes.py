"""The longest questions that a client asks have no more bytes than a server parses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvcluster.core import limits
from kvcluster.core.groups import Part
from kvcluster.core.ids import (
    HASH_BYTES,
    HOLDER_BYTES,
    Attempt,
    BlockHash,
    Epoch,
    Holder,
    NamespaceId,
    SequenceId,
    SpanId,
)
from kvcluster.core.messages import (
    Explain,
    Need,
    PageKey,
    PinBlocks,
    PrepareLoad,
    PrepareStore,
    RegisterSpans,
    SpanBlocks,
    Suspect,
    SyncTables,
    TableChange,
)
from kvcluster.core.miss import Loss
from kvcluster.wire.methods import COORDINATOR, SHARD, Method

BIG = 2**61
SPACE, HOLDER = NamespaceId(bytes(HASH_BYTES)), Holder(bytes(HOLDER_BYTES))
ATTEMPT = Attempt(HOLDER, BIG)
PART = Part(0, 2**16 - 1, 0, 2**16 - 1)
NEED = Need((PART,) * 16, Loss.Q4, ())


def hashes(count: int) -> tuple[BlockHash, ...]:
    return tuple(BlockHash(at.to_bytes(HASH_BYTES, "big")) for at in range(count))


def prepare_store() -> PrepareStore:
    """With token ids of five bytes each."""
    parts = tuple((group, PART) for group in range(8))
    names = hashes(limits.BLOCKS_PER_CALL)
    return PrepareStore(
        ATTEMPT, 2**23, names[0], names[0], names, parts, Loss.Q4, "h" * 1_024, (2**32 - 1,) * limits.STORE_TOKENS
    )


def register_spans() -> RegisterSpans:
    """As many spans as may be, of four blocks each, while as many end."""
    count = limits.SPANS_PER_CALL
    each = limits.SPAN_BLOCKS_PER_CALL // count
    names = hashes(each)
    spans = tuple(SpanBlocks(SpanId(BIG + at), 1, PART, 2**23, names, Loss.Q4) for at in range(count))
    return RegisterSpans(HOLDER, Epoch(BIG), spans, tuple(SpanId(BIG + at) for at in range(count)))


def sync_tables() -> SyncTables:
    count = limits.SEQUENCES_PER_HOLDER
    ids = [SequenceId(at.to_bytes(16, "big")) for at in range(count)]
    names = hashes(limits.BLOCKS_PER_CALL // count)
    changes = (TableChange(each, 2**23, names, len(names), ids[at - 1], False) for at, each in enumerate(ids))
    return SyncTables(HOLDER, BIG, tuple(changes))


ALL = limits.BLOCKS_PER_CALL
LARGEST: dict[str, tuple[Method, Callable[[], Any]]] = {
    "PrepareLoad": (COORDINATOR["PrepareLoad"], lambda: PrepareLoad(ATTEMPT, hashes(ALL), NEED)),
    "PrepareStore": (COORDINATOR["PrepareStore"], prepare_store),
    "Explain": (COORDINATOR["Explain"], lambda: Explain(hashes(ALL), NEED)),
    "PinBlocks": (COORDINATOR["PinBlocks"], lambda: PinBlocks(hashes(ALL), BIG, 1)),
    "SyncTables": (COORDINATOR["SyncTables"], sync_tables),
    "RegisterSpans": (SHARD["RegisterSpans"], register_spans),
    "Suspect": (
        SHARD["Suspect"],
        lambda: Suspect(Epoch(BIG), tuple(PageKey(each, 9, PART) for each in hashes(limits.SUSPECTS_PER_CALL))),
    ),
}


@pytest.mark.parametrize("name", LARGEST)
def test_the_largest_question_of_a_client_is_short_enough_to_be_parsed(name: str) -> None:
    method, build = LARGEST[name]
    question = build()
    data = method.encode_request(question, SPACE if name != "Suspect" or method._in_namespace else None)
    assert len(data) <= method.most_bytes
    decoded = method.decode_question(data, 3)[1]
    if isinstance(decoded, PrepareStore):  # its token ids are kept as an array
        decoded = replace(decoded, tokens=tuple(decoded.tokens))
    assert decoded == question


def test_only_what_shards_tell_the_coordinator_may_be_long() -> None:
    long = {name for name, method in {**COORDINATOR, **SHARD}.items() if method.most_bytes > limits.QUESTION_BYTES}
    assert long == {"Report", "Inventory"}
