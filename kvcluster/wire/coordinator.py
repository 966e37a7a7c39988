"""The questions of workers to the coordinator. Its replies are in wire/answers.py.

Nothing else of the envelope (core/messages/common.py) is sent but the namespace, for a question about one: methods.py
sets that field of the message, and the server sets call and tenant.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence

from kvcluster.core import limits
from kvcluster.core.messages import (
    Attach,
    AttachShard,
    Drain,
    EndTicket,
    Explain,
    GetEngines,
    GetNamespaces,
    GetPins,
    GetStatus,
    Need,
    PinBlocks,
    PrepareLoad,
    PrepareStore,
    Probe,
    Purge,
    RegisterEngine,
    RenewTicket,
    SetPolicy,
    SetWeights,
    Siblings,
    SyncTables,
    TableChange,
    UnpinBlocks,
)
from kvcluster.core.spec import check_weights
from kvcluster.errors import ProtocolError, SpecError
from kvcluster.wire.answers import ENGINE, POLICY
from kvcluster.wire.checks import at_most, must
from kvcluster.wire.common import (
    ATTEMPT,
    BLOCKS,
    HASH,
    HOLDER,
    LOSS,
    MESSAGE_BLOCKS,
    NEED,
    NS,
    PLACES,
    SEQUENCES,
    SHARD,
    SPEC,
    TENANT,
)
from kvcluster.wire.fields import (
    NUMBERS,
    PLAIN,
    Columns,
    Interned,
    Maybe,
    Ragged,
    Rows,
    Scalar,
    Struct,
    amount,
    amounts,
    words,
)
from kvcluster.wire.v1 import coordinator_pb2 as pb


def _check_lookup(blocks: int, need: Need) -> None:
    at_most(blocks * sum(part is not None for part in need.parts), limits.PARTS_PER_LOOKUP, "parts in a lookup")


def _check_store(question: PrepareStore) -> None:
    blocks, tokens = len(question.hashes), len(question.tokens)
    at_most(question.first + blocks, limits.TOKENS_PER_SEQUENCE, "blocks in a chain")
    at_most(blocks * len(question.parts), limits.PAGES_PER_CALL, "pages in a store")
    must(not tokens or (blocks and not tokens % blocks), f"{tokens} token ids are not a multiple of {blocks} blocks")


def _decode_tokens(wire: Collection[int]) -> Sequence[int]:
    return array("I", wire) if 0 < len(wire) <= limits.STORE_TOKENS else ()


_TOKENS: Scalar[Sequence[int]] = Scalar(lambda tokens: tokens, _decode_tokens)
"""In an array: a tuple takes nine times as much."""


def _check_purge(question: Purge) -> None:
    # Values longer than a whole spec match none, and a tombstone would carry them to every shard.
    named = (question.model, question.weights, question.adapter)
    size = sum(len(value.encode()) for value in named if value is not None)
    at_most(size, limits.SPEC_BYTES, "bytes of model, weights and adapter")


def _check_weights(question: SetWeights) -> None:
    try:
        check_weights(question.weights)
    except SpecError as error:
        raise ProtocolError(str(error)) from None


def _check_tables(question: SyncTables) -> None:
    must(question.number, "the messages of a holder are numbered from 1 on")
    for change in question.changes:
        blocks = len(change.blocks)
        must(change.private <= blocks, f"{change.private} private blocks are more than all {blocks} of a change")


ATTACH = Struct(pb.AttachRequest, Attach, spec=SPEC, owner=Maybe(TENANT))
ATTACH_SHARD = Struct(pb.AttachRequest, AttachShard, spec=SPEC, owner=Maybe(TENANT))
PREPARE_LOAD = Struct(
    pb.PrepareLoadRequest,
    PrepareLoad,
    lambda question: _check_lookup(len(question.hashes), question.need),
    attempt=ATTEMPT,
    hashes=BLOCKS,
    need=NEED,
    hold=PLAIN,
    awaited=Maybe(PLAIN),
    again=PLAIN,
)
PREPARE_STORE = Struct(
    pb.PrepareStoreRequest,
    PrepareStore,
    _check_store,
    attempt=ATTEMPT,
    first=PLAIN,
    parent=HASH,
    run=HASH,
    hashes=BLOCKS,
    parts=Rows(PLACES, limits.PARTS_PER_BLOCK, "parts in a message"),
    loss=LOSS,
    host=words("a host"),
    tokens=_TOKENS,
)
RENEW_TICKET = Struct(pb.TicketRequest, RenewTicket, attempt=ATTEMPT)
END_TICKET = Struct(pb.TicketRequest, EndTicket, attempt=ATTEMPT)
EXPLAIN = Struct(
    pb.ExplainRequest,
    Explain,
    lambda question: _check_lookup(len(question.hashes), question.need),
    hashes=BLOCKS,
    need=NEED,
)
SIBLINGS = Struct(pb.SiblingsRequest, Siblings)
GET_NAMESPACES = Struct(pb.GetNamespacesRequest, GetNamespaces)
REGISTER_ENGINE = Struct(pb.RegisterEngineRequest, RegisterEngine, info=ENGINE)
GET_ENGINES = Struct(pb.GetEnginesRequest, GetEngines)
SET_WEIGHTS = Struct(
    pb.SetWeightsRequest,
    SetWeights,
    _check_weights,
    model=words("a model"),
    weights=words("weights"),
    engine=words("an engine"),
)
_CHANGES: Columns[TableChange] = Columns(
    pb.TableChanges,
    TableChange,
    sequence=SEQUENCES,
    keep=amounts("blocks to keep", limits.TOKENS_PER_SEQUENCE),
    blocks=Ragged(pb.HashLists, MESSAGE_BLOCKS, limits.BLOCKS_PER_CALL, "block hashes in a message"),
    private=NUMBERS,
    parent=Interned(pb.SequenceTable, SEQUENCES, "a sequence", absent=True),
    closed=NUMBERS,
)
SYNC_TABLES = Struct(
    pb.SyncTablesRequest,
    SyncTables,
    _check_tables,
    holder=HOLDER,
    number=amount("message number"),
    changes=Rows(_CHANGES, limits.SEQUENCES_PER_HOLDER, "changes in a message"),
)
PIN_BLOCKS = Struct(
    pb.PinBlocksRequest,
    PinBlocks,
    lambda question: must(question.replicas, "a pinned block must have at least one replica"),
    hashes=BLOCKS,
    ttl_ns=NS,
    replicas=amount("replicas of a block", limits.REPLICAS),
)
UNPIN_BLOCKS = Struct(pb.UnpinBlocksRequest, UnpinBlocks, hashes=BLOCKS)
GET_PINS = Struct(pb.GetPinsRequest, GetPins, model=Maybe(words("a model")), skip=amount("pinned blocks"))
PURGE = Struct(pb.PurgeRequest, Purge, _check_purge, model=Maybe(PLAIN), weights=Maybe(PLAIN), adapter=Maybe(PLAIN))
DRAIN = Struct(pb.DrainRequest, Drain, shard=SHARD, leaving=PLAIN)
SET_POLICY = Struct(pb.SetPolicyRequest, SetPolicy, settings=POLICY)
PROBE = Struct(pb.ProbeRequest, Probe, number=amount("number of a probe"))
GET_STATUS = Struct(pb.GetStatusRequest, GetStatus)
