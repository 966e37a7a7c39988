"""Input from outside is checked for shape and bounds before the core sees it, and refused with an error that names the
field."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from kvcluster.core import limits
from kvcluster.core.codecs import Codec
from kvcluster.core.groups import Part
from kvcluster.core.ids import Attempt, BlockHash, Epoch, Holder, NamespaceId, SequenceId, ShardId, Tenant
from kvcluster.core.messages import (
    Attached,
    AttachedShard,
    BlockFate,
    BlocksPinned,
    Decision,
    Drain,
    EngineInfo,
    Engines,
    EvictOrder,
    Explained,
    Flush,
    GetPins,
    Inventory,
    LeaveReason,
    LoadGrant,
    Move,
    MoveOrder,
    Namespaces,
    Need,
    NewPage,
    Offer,
    Offers,
    OrderProgress,
    PageEvent,
    PageKey,
    PageWant,
    PinBlocks,
    PinList,
    PinnedRun,
    PrepareLoad,
    PrepareStore,
    PullOrder,
    Purge,
    Purged,
    PurgedEvent,
    ReadRequest,
    RegisterEngine,
    RemovedEvent,
    RenewTicket,
    Reply,
    Report,
    ReportAck,
    Run,
    SetPolicy,
    SetWeights,
    ShardAddress,
    ShardInfo,
    ShardStatus,
    SiblingSpecs,
    Source,
    Status,
    StoreGrant,
    StoreRun,
    Suspect,
    SyncTables,
    TableChange,
    TablesSynced,
    Tier,
    TierUse,
    Tombstone,
    WriteRequest,
)
from kvcluster.core.miss import Loss, Miss, MissReason
from kvcluster.core.spec import KVSpec
from kvcluster.errors import KVClusterError, LimitError, ProtocolError, SpecError, VersionError
from kvcluster.release import PROTOCOL_VERSION
from kvcluster.wire import common, reports, shard
from kvcluster.wire.methods import COORDINATOR, SHARD, Method
from kvcluster.wire.v1 import common_pb2, coordinator_pb2, shard_pb2

TENANT = Tenant("t")
BLOCK, NAMESPACE = BlockHash(b"b" * 32), NamespaceId(b"n" * 32)
ATTEMPT = Attempt(Holder(b"h" * 16), 1)
PART = Part(0, 4, 0, 2)
KEY = PageKey(BLOCK, 0, PART)
SPEC = KVSpec.uniform(model="m", weights="sha256:0", num_layers=4, num_kv_heads=2, head_dim=8, dtype="float32")
SHARD_ADDRESS = ShardAddress(ShardId("s"), Epoch(1), "a:1", "h")
SOURCE = Source(0, PART, SHARD_ADDRESS, Tier.RAM, Loss.EXACT)
INFO = ShardInfo(
    *(ShardId("s"), Epoch(1), "a:1", "h", 1, 1, 1, 1, (("commits", 1),)),
    others=(TierUse(Tier.HOST, 1, 1, 1), TierUse(Tier.DISK, 1, 1, 1)),
)
PAGE = PageEvent(NAMESPACE, KEY, BLOCK, 3, Tier.RAM, Loss.EXACT)

LOAD = PrepareLoad(ATTEMPT, (BLOCK,), Need((PART,)))
STORE = PrepareStore(ATTEMPT, 1, BLOCK, BLOCK, (BLOCK,), ((0, PART),))
PIN = PinBlocks((BLOCK,), 1)
SEQUENCE = SequenceId(b"q" * 16)
TABLES = SyncTables(
    Holder(b"h" * 16), 1, (TableChange(SEQUENCE, 0, (BLOCK, BLOCK), 1), TableChange(SEQUENCE, 1, parent=SEQUENCE))
)
PURGE = Purge("m", "sha256:0", "")
EVENTS = (PAGE, RemovedEvent(NAMESPACE, KEY, False), PurgedEvent(1))
REPORT = Report(INFO, Epoch(1), 1, EVENTS, ((TENANT, SPEC),), orders=OrderProgress(5, (2, 5)))
STONES = (Tombstone(1, TENANT), Tombstone(2, TENANT, "m", "m", "m"))
INVENTORY = Inventory(INFO, Epoch(1), 1, 0, True, (PAGE,), tombstones=STONES)
SUSPECT = Suspect(Epoch(1), (KEY,))
READ = ReadRequest(NAMESPACE, ATTEMPT, Epoch(1), (PageWant(KEY, 0, 4),))
WRITE = WriteRequest(NAMESPACE, ATTEMPT, Epoch(1), (NewPage(KEY, BLOCK, 0),))
GRANT = LoadGrant(2, (Run(2, ((SOURCE,),)),), 0, None)
STORED = StoreGrant((StoreRun(1, Decision.WRITE, SHARD_ADDRESS), StoreRun(1, Decision.PENDING)))
EXPLAINED = Explained((BlockFate(1, ((SOURCE,),), None), BlockFate(1, None, Miss(MissReason.FULL))))
ACK = ReportAck(
    Epoch(1),
    1,
    orders=(
        EvictOrder(1, ((NAMESPACE, BLOCK),)),
        MoveOrder(2, (Move(NAMESPACE, BLOCK, Tier.HOST, Codec.Q8),)),
        PullOrder(5, SHARD_ADDRESS, TENANT, SPEC, (NewPage(KEY, BLOCK, 0),)),
    ),
    tombstones=STONES,
    leave=LeaveReason.DRAINED,
)
ENGINE = EngineInfo("e", "host:1", "m", "sha256:1", (("dtype", "float32"),))
STATUS = Status(Epoch(1), "serving", 1, 1, 1, 1, (ShardStatus(INFO, "up", 1, 1, 1),), (("loads", 1),))
PINS = PinList((PinnedRun(TENANT, SPEC, BLOCK, 1, (BLOCK, BLOCK), 1, 1),), 1, 1)


READ_HEAD, WRITE_HEAD = [Miss(MissReason.FULL)] * 2, [None, None]
QUESTIONS: dict[str, tuple[Method, Any, type[Any], NamespaceId | None]] = {
    "load": (COORDINATOR["PrepareLoad"], LOAD, coordinator_pb2.PrepareLoadRequest, NAMESPACE),
    "store": (COORDINATOR["PrepareStore"], STORE, coordinator_pb2.PrepareStoreRequest, NAMESPACE),
    "pin": (COORDINATOR["PinBlocks"], PIN, coordinator_pb2.PinBlocksRequest, NAMESPACE),
    "tables": (COORDINATOR["SyncTables"], TABLES, coordinator_pb2.SyncTablesRequest, NAMESPACE),
    "ticket": (COORDINATOR["RenewTicket"], RenewTicket(ATTEMPT), coordinator_pb2.TicketRequest, None),
    "report": (COORDINATOR["Report"], REPORT, coordinator_pb2.ReportRequest, None),
    "inventory": (COORDINATOR["Inventory"], INVENTORY, coordinator_pb2.InventoryRequest, None),
    "purge": (COORDINATOR["Purge"], PURGE, coordinator_pb2.PurgeRequest, None),
    "policy": (COORDINATOR["SetPolicy"], SetPolicy((("host.codec", "q4"),)), coordinator_pb2.SetPolicyRequest, None),
    "engine": (COORDINATOR["RegisterEngine"], RegisterEngine(ENGINE), coordinator_pb2.RegisterEngineRequest, None),
    "weights": (COORDINATOR["SetWeights"], SetWeights("m", "sha256:1"), coordinator_pb2.SetWeightsRequest, None),
    "pins": (COORDINATOR["GetPins"], GetPins("m", 1), coordinator_pb2.GetPinsRequest, None),
    "drain": (COORDINATOR["Drain"], Drain(ShardId("s")), coordinator_pb2.DrainRequest, None),
    "suspect": (SHARD["Suspect"], SUSPECT, shard_pb2.SuspectRequest, NAMESPACE),
    "flush": (SHARD["Flush"], Flush(1), shard_pb2.FlushRequest, None),
}
EXCHANGES: dict[str, tuple[type[Any], bytes, Callable[[bytes], object]]] = {
    "read": (shard_pb2.ReadRequest, shard.encode_read_request(READ), shard.decode_read_request),
    "write": (shard_pb2.WriteRequest, shard.encode_write_request(WRITE), shard.decode_write_request),
    "read head": (common_pb2.MissTable, shard.encode_read_head(READ_HEAD), shard.decode_read_head),
    "write head": (shard_pb2.WrittenTable, shard.encode_write_head(WRITE_HEAD), shard.decode_write_head),
    "write tail": (shard_pb2.WrittenTable, shard.encode_write_tail([]), shard.decode_write_tail),
}
REPLIES: dict[str, tuple[Method, Reply]] = {
    "attached shard": (SHARD["Attach"], AttachedShard(NAMESPACE, Epoch(1), 1)),
    "offers": (SHARD["GetOffers"], Offers(Epoch(1), (Offer("tcp", "a:1"),), (("shm", "why"),))),
    "attached": (COORDINATOR["Attach"], Attached(NAMESPACE, Epoch(1), 1, 64, (SHARD_ADDRESS,))),
    "grant": (COORDINATOR["PrepareLoad"], GRANT),
    "stored": (COORDINATOR["PrepareStore"], STORED),
    "explained": (COORDINATOR["Explain"], EXPLAINED),
    "ack": (COORDINATOR["Report"], ACK),
    "status": (COORDINATOR["GetStatus"], STATUS),
    "siblings": (COORDINATOR["Siblings"], SiblingSpecs((SPEC,))),
    "pinned": (COORDINATOR["PinBlocks"], BlocksPinned(1)),
    "synced": (COORDINATOR["SyncTables"], TablesSynced(1, Epoch(1), (SEQUENCE,), (SEQUENCE,))),
    "listed pins": (COORDINATOR["GetPins"], PINS),
    "purged": (COORDINATOR["Purge"], Purged(1)),
    "namespaces": (COORDINATOR["GetNamespaces"], Namespaces(((SPEC, 7),))),
    "engines": (COORDINATOR["GetEngines"], Engines(((ENGINE, 7),))),
}


def _question(method: Method, data: bytes) -> tuple[NamespaceId | None, Any]:
    return method.decode_question(data, PROTOCOL_VERSION)


def _start(name: str) -> tuple[Any, Callable[[Any], object]]:
    """A valid message to spoil, and how it is read."""
    if name in QUESTIONS:
        method, question, kind, namespace = QUESTIONS[name]
        data, decode = method.encode_request(question, namespace), partial(_question, method)
    elif name in EXCHANGES:
        kind, data, decode = EXCHANGES[name]  # type: ignore[assignment]
    else:
        method, reply = REPLIES[name]
        kind = coordinator_pb2.CoordinatorReply if method in COORDINATOR.values() else shard_pb2.ShardReply
        data, decode = method.encode_reply(reply), method.decode_reply  # type: ignore[assignment]
    return kind.FromString(data), lambda m: decode(m.SerializeToString())


MANY = limits.BLOCKS_PER_CALL + 1
HUGE = 2**63
NEWER = PROTOCOL_VERSION + 1

SPOILED: list[tuple[str, str, object, type[KVClusterError], str]] = [
    # message, field, what it is set to, the error, what it says
    ("load", "namespace", b"n" * 31, ProtocolError, "a namespace is 32 bytes, not 31"),
    ("load", "namespace", b"", ProtocolError, "a namespace is 32 bytes, not 0"),
    ("load", "attempt", b"h" * 17, ProtocolError, "an attempt is 24 bytes, not 17"),
    ("load", "hashes", b"x" * 33, ProtocolError, "take 32 bytes each; 33 bytes came"),
    ("load", "hashes", bytes(32 * MANY), LimitError, f"block hashes in a call: {MANY} exceeds the limit of {MANY - 1}"),
    ("load", "need.parts", [0, 1, 0], ProtocolError, "take 4 numbers each; 3 came"),
    ("load", "need.parts", [4, 4, 0, 1], ProtocolError, "is not a part"),
    ("load", "need.parts", [0, 1, 2, 1], ProtocolError, "is not a part"),
    ("load", "need.parts", [0, 65_536, 0, 1], ProtocolError, "end at 65535 or before"),
    ("load", "need.parts", [0, 1, 0, 65_536], ProtocolError, "end at 65535 or before"),
    ("load", "need.parts", [0] * 4 * 257, LimitError, "parts in a need: 257 exceeds the limit of 256"),
    ("load", "need.accept", 9, ProtocolError, "Loss 9 is not known here"),
    ("store", "parent", b"", ProtocolError, "a block hash is 32 bytes, not 0"),
    ("store", "run", b"r", ProtocolError, "a block hash is 32 bytes, not 1"),
    ("store", "first", limits.TOKENS_PER_SEQUENCE, LimitError, "blocks in a chain"),
    ("store", "parts", [256, 0, 1, 0, 1], LimitError, "group 256"),
    ("store", "loss", 3, ProtocolError, "Loss 3 is not known here"),
    ("store", "host", "h" * 1_025, LimitError, "characters of a host: 1025"),
    ("load", "need.avoid", ["s"] * 257, LimitError, "shards to avoid: 257 exceeds the limit of 256"),
    ("load", "need.avoid", ["s", "s" * 1_025], LimitError, "characters of a shard's name: 1025"),
    ("pin", "ttl_ns", HUGE, LimitError, "nanoseconds"),
    ("pin", "replicas", 0, ProtocolError, "must have at least one replica"),
    ("pin", "replicas", 65, LimitError, "replicas of a block: 65 exceeds the limit of 64"),
    ("tables", "namespace", b"", ProtocolError, "a namespace is 32 bytes, not 0"),
    ("tables", "holder", b"h" * 15, ProtocolError, "a holder is 16 bytes, not 15"),
    ("tables", "number", 0, ProtocolError, "numbered from 1 on"),
    ("tables", "number", HUGE, LimitError, "message number"),
    ("tables", "changes.sequence", b"q" * 33, ProtocolError, "take 16 bytes each; 33 bytes came"),
    ("tables", "changes.sequence", b"q" * 16, ProtocolError, "lists of changes in a message must be equally long"),
    (
        "tables",
        "changes.sequence",
        bytes(16 * 4_097),
        LimitError,
        "changes in a message: 4097 exceeds the limit of 4096",
    ),
    ("tables", "changes.keep", [0, limits.TOKENS_PER_SEQUENCE + 1], LimitError, "blocks to keep"),
    ("tables", "changes.private", [3, 0], ProtocolError, "3 private blocks are more than all 2 of a change"),
    ("tables", "changes.blocks.counts", [3, 0], ProtocolError, "have 3 items; 2 came"),
    ("tables", "changes.blocks.counts", [MANY, 0], LimitError, f"block hashes in a message: {MANY} exceeds the limit"),
    ("tables", "changes.parent.of", [0, 2], ProtocolError, "refers to a sequence beyond the 2"),
    ("synced", "tables_synced.reopen", b"q", ProtocolError, "take 16 bytes each; 1 bytes came"),
    ("synced", "tables_synced.refused", bytes(16 * 4_097), LimitError, "sequences in a message: 4097"),
    ("synced", "tables_synced.ttl_ns", HUGE, LimitError, "nanoseconds"),
    ("purge", "model", "m" * 8_193, LimitError, "bytes of model, weights and adapter: 8201 exceeds the limit of 8192"),
    ("purge", "weights", "ß" * 4_097, LimitError, "bytes of model, weights and adapter: 8195"),
    ("purge", "adapter", "a" * 8_193, LimitError, "bytes of model, weights and adapter"),
    ("policy", "settings.key", [], ProtocolError, "lists of settings must be equally long"),
    ("policy", "settings.key", ["n" * 1_025], LimitError, "characters of a policy's name"),
    ("policy", "settings.value", ["v" * 1_025], LimitError, "characters of a policy's value"),
    ("engine", "info.engine", "", ProtocolError, "an engine must have an id"),
    ("engine", "info.name", "n" * 1_025, LimitError, "characters of a name: 1025"),
    ("engine", "info.facts.value", [], ProtocolError, "lists of facts must be equally long"),
    ("engine", "info.withdrawn", HUGE, LimitError, "withdrawals"),
    ("weights", "weights", "", ProtocolError, "does not pin the weights"),
    ("weights", "weights", "main", ProtocolError, "does not pin the weights"),
    ("weights", "model", "m" * 1_025, LimitError, "characters of a model: 1025"),
    ("engines", "engines.known.seen_ns_ago", [], ProtocolError, "lists of engines must be equally long"),
    ("pins", "skip", HUGE, LimitError, "pinned blocks: "),
    ("pins", "model", "m" * 1_025, LimitError, "characters of a model: 1025"),
    (
        "listed pins",
        "pins.runs.left_ns",
        [],
        ProtocolError,
        "lists of runs of pinned blocks in a message must be equally",
    ),
    ("listed pins", "pins.runs.block_bytes", [HUGE], LimitError, "bytes of a block: "),
    ("listed pins", "pins.runs.spec.of", [1], ProtocolError, "refers to a spec beyond the 1"),
    ("listed pins", "pins.runs.blocks.counts", [MANY], LimitError, "block hashes in a message: 8193 exceeds"),
    ("listed pins", "pins.more", HUGE, LimitError, "pinned blocks: "),
    ("drain", "shard", "s" * 1_025, LimitError, "characters of a shard's name: 1025"),
    ("suspect", "namespace", b"", ProtocolError, "a namespace is 32 bytes, not 0"),
    ("suspect", "epoch", HUGE, LimitError, "epoch: "),
    ("suspect", "keys.hash.of", [1], ProtocolError, "refers to a hash beyond the 1"),
    (
        "suspect",
        "keys.hash.table",
        bytes(32 * 257),
        LimitError,
        "pages suspected at once: 257 exceeds the limit of 256",
    ),
    ("suspect", "keys.place.of", [1], ProtocolError, "refers to a part beyond the 1"),
    ("ticket", "attempt", b"", ProtocolError, "an attempt is 24 bytes, not 0"),
    ("flush", "wait_ns", HUGE, LimitError, "nanoseconds"),
    ("report", "info.shard", "s" * 1_025, LimitError, "characters of a shard's name"),
    ("report", "info.epoch", HUGE, LimitError, "epoch: "),
    ("report", "info.free_bytes", HUGE, LimitError, "free bytes"),
    ("report", "info.counters.name", ["one", "two"], ProtocolError, r"lists of counters must be equally long"),
    ("report", "info.counters.name", ["n" * 1_025], LimitError, "characters of a counter's name"),
    ("report", "info.node", "n" * 1_025, LimitError, "characters of a node"),
    ("report", "info.release", "r" * 65, LimitError, "characters of a release: 65"),
    ("report", "info.config_hash", "0" * 17, LimitError, "characters of a hash of a configuration: 17"),
    ("report", "info.protocol", 2**32 - 1, LimitError, "version of the protocol: "),
    ("engine", "info.protocol", 2**32 - 1, LimitError, "version of the protocol: "),
    ("report", "info.config_hash", "[red]", ProtocolError, "is not a hash of a configuration"),
    ("report", "coordinator", HUGE, LimitError, "epoch: "),
    ("report", "first", HUGE, LimitError, "stream number: "),
    ("report", "orders.accepted", HUGE, LimitError, "order number: "),
    ("report", "orders.accepted", 4, ProtocolError, "a running order was not accepted"),
    ("report", "orders.running", [5, 3], ProtocolError, "must be ascending"),
    ("report", "orders.running", [0], ProtocolError, "must be ascending, from 1 on"),
    ("report", "orders.running", list(range(1, 18)), LimitError, "running orders: 17 exceeds the limit of 16"),
    ("report", "pressure.nbytes", [HUGE], LimitError, "bytes wanted"),
    ("report", "events.pages.key.hash.table", b"b" * 64, ProtocolError, "lists of pages must be equally long"),
    ("report", "events.pages.key.hash.table", bytes(32 * 4_097), LimitError, "pages: 4097 exceeds the limit of 4096"),
    ("report", "events.kinds", [1], ProtocolError, "must be as long as their kinds say"),
    ("report", "events.kinds", [1, 1, 3], ProtocolError, "must be as long as their kinds say"),
    ("report", "events.kinds", [2, 2, 3], ProtocolError, "must be as long as their kinds say"),
    ("report", "events.kinds", [1, 3, 3], ProtocolError, "must be as long as their kinds say"),
    ("report", "events.kinds", [2] * 4_097, LimitError, "events in a message: 4097 exceeds the limit of 4096"),
    ("report", "events.purges", [], ProtocolError, "must be as long as their kinds say"),
    ("report", "events.purges", [1, 2], ProtocolError, "must be as long as their kinds say"),
    ("report", "events.purges", [HUGE], LimitError, "tombstone number: "),
    ("report", "events.kinds", [1, 7, 3], ProtocolError, "event kind 7 is not known here"),
    ("report", "events.gone.tier", [], ProtocolError, "lists of gone must be equally long"),
    ("report", "events.gone.tier", [5], ProtocolError, "Tier 5 is not known here"),
    ("report", "events.pages.codec", [], ProtocolError, "lists of pages.* must be equally long"),
    ("report", "events.pages.codec", [0x7F01], ProtocolError, "codec 127 version 1 is not known here: upgrade"),
    ("report", "info.others.tier", [], ProtocolError, "lists of tiers must be equally long"),
    ("report", "info.others.tier", [0, 2], ProtocolError, "listed once, the fastest first"),
    ("report", "info.others.tier", [2, 1], ProtocolError, "the fastest first"),
    ("report", "info.others.tier", [2, 2], ProtocolError, "listed once"),
    ("report", "info.others.wanted_bytes", [1], ProtocolError, "lists of tiers must be equally long"),
    ("report", "info.others.wanted_bytes", [1, HUGE], LimitError, "wanted bytes"),
    (
        "report",
        "info.trouble",
        "t" * 1_025,
        LimitError,
        "characters of a shard's trouble: 1025 exceeds the limit of 1024",
    ),
    ("report", "info.others.free_bytes", [HUGE, 1], LimitError, "free bytes"),
    ("report", "events.pages.namespace.table", b"n" * 33, ProtocolError, "take 32 bytes each"),
    ("report", "events.pages.namespace.of", [1], ProtocolError, "refers to a namespace beyond the 1"),
    ("report", "events.pages.key.place.of", [2**32 - 1], ProtocolError, "refers to a part beyond the 1"),
    ("report", "events.pages.parent", b"", ProtocolError, "lists of pages.* must be equally long"),
    ("report", "events.pages.depth", [1, 2], ProtocolError, "lists of pages.* must be equally long"),
    ("report", "events.pages.depth", [limits.TOKENS_PER_SEQUENCE + 1], LimitError, "depth: "),
    ("report", "events.pages.tier", [5], ProtocolError, "Tier 5 is not known here"),
    ("report", "events.pages.loss", [5], ProtocolError, "Loss 5 is not known here"),
    ("report", "specs.tenant", [], ProtocolError, "lists of specs must be equally long"),
    ("report", "specs.tenant", ["t" * 1_025], LimitError, "characters of a tenant's name"),
    ("report", "specs.spec", [b""], SpecError, "model must be named"),
    ("inventory", "pages.tier", [], ProtocolError, "lists of pages.* must be equally long"),
    ("inventory", "tombstones.number", [1], ProtocolError, "lists of tombstones in a message must be equally long"),
    ("inventory", "tombstones.number", [1, HUGE], LimitError, "tombstone number: "),
    ("inventory", "tombstones.tenant.table", [], ProtocolError, "refers to a tenant beyond the 0"),
    ("inventory", "tombstones.tenant.table", ["t" * 1_025], LimitError, "characters of a tenant's name: 1025"),
    ("inventory", "tombstones.model.table", ["m" * 8_193], LimitError, "characters of a tombstone's text: 8193"),
    (
        "inventory",
        "tombstones.model.table",
        ["t"] * 1_025,
        LimitError,
        "tombstones in a message: 1025 exceeds the limit of 1024",
    ),
    ("inventory", "tombstones.tenant.of", [0, 1], ProtocolError, "refers to a tenant beyond the 1"),
    ("inventory", "tombstones.model.of", [0, 3], ProtocolError, "refers to a model beyond"),
    ("inventory", "tombstones.weights.of", [0, 3], ProtocolError, "refers to weights beyond"),
    ("inventory", "tombstones.adapter.of", [0, 3], ProtocolError, "refers to an adapter beyond"),
    ("inventory", "upto", HUGE, LimitError, "stream number: "),
    ("read", "wants.key.hash.of", [1], ProtocolError, "refers to a hash beyond the 1"),
    ("read", "wants.key.place.of", [1], ProtocolError, "refers to a part beyond the 1"),
    ("read", "wants.key.place.table", [], ProtocolError, "lists of pages.* must be equally long"),
    ("read", "wants.layer_stop", [5], ProtocolError, "layers 0:5 were asked for of a page that has 4"),
    ("read", "wants.layer_start", [4], ProtocolError, "layers 4:4 were asked for"),
    ("read", "wants.layer_start", [0, 0], ProtocolError, "lists of pages.* must be equally long"),
    ("read", "epoch", HUGE, LimitError, "epoch: "),
    ("read head", "of", [2], ProtocolError, "refers to a miss beyond the 2"),
    ("read head", "of", [0] * 65_537, LimitError, "pages in a call: 65537 exceeds the limit of 65536"),
    ("write", "pages.parent.of", [7], ProtocolError, "refers to a parent beyond the 1"),
    ("write", "pages.parent.table", b"", ProtocolError, "lists of pages.* must be equally long"),
    ("write", "pages.depth", [limits.TOKENS_PER_SEQUENCE + 1], LimitError, "depth: "),
    ("write", "pages.loss", [8], ProtocolError, "Loss 8 is not known here"),
    ("write", "wait_ns", HUGE, LimitError, "nanoseconds"),
    ("write", "pages.key.hash.table", b"", ProtocolError, "lists of pages in a store must be equally long"),
    ("write head", "table", [7], ProtocolError, "Written 7 is not known here"),
    ("write head", "of", [0] * 65_537, LimitError, "pages in a call: 65537"),
    ("write tail", "table", [0], ProtocolError, "Written 0 is not known here"),
    ("attached shard", "attached.protocol_version", NEWER, VersionError, "an answer .* upgrade this side"),
    ("attached shard", "attached.namespace", b"", ProtocolError, "a namespace is 32 bytes"),
    ("attached shard", "attached.lease_ttl_ns", HUGE, LimitError, "nanoseconds"),
    ("offers", "offers.protocol_version", NEWER, VersionError, "an answer .* upgrade this side"),
    ("offers", "offers.epoch", HUGE, LimitError, "epoch: "),
    (
        "offers",
        "offers.offers.transport",
        ["tcp", "tcp"],
        ProtocolError,
        "lists of transports of a shard must be equally long",
    ),
    ("offers", "offers.offers.address", [], ProtocolError, "lists of transports of a shard must be equally long"),
    ("offers", "offers.offers.address", ["a" * 1_025], LimitError, "characters of an offer: 1025"),
    ("offers", "offers.refused.value", [], ProtocolError, "lists of transports of a shard must be equally long"),
    ("offers", "offers.refused.key", ["t" * 1_025], LimitError, "characters of a transport's name: 1025"),
    ("attached", "attached.protocol_version", NEWER, VersionError, "an answer .* upgrade this side"),
    ("attached", "attached.run_blocks", 0, ProtocolError, "a run must have at least one block"),
    ("attached", "attached.ticket_ttl_ns", HUGE, LimitError, "nanoseconds"),
    ("grant", "load_grant.blocks", 3, ProtocolError, "runs cover 2 blocks instead of 3"),
    ("grant", "load_grant.runs.count", [2, 0], ProtocolError, "a run must have at least one block"),
    ("grant", "load_grant.runs.count", [1, 1], ProtocolError, "lists of runs in a message must be equally long"),
    ("grant", "load_grant.runs.count", [MANY], LimitError, f"blocks in the runs of a message: {MANY}"),
    ("grant", "load_grant.runs.count", [1] * MANY, LimitError, f"runs in a message: {MANY}"),
    ("grant", "load_grant.runs.plan.of", [1], ProtocolError, "refers to a plan beyond the 1"),
    ("grant", "load_grant.hold_ns", HUGE, LimitError, "nanoseconds"),
    ("grant", "load_grant.miss.reason", 0, ProtocolError, "MissReason 0 is not known here"),
    ("grant", "load_grant.miss.reason", 99, ProtocolError, "MissReason 99 is not known here; a newer kvcluster"),
    ("stored", "store_grant.runs.decision", [0, 3], ProtocolError, "Decision 0 is not known here"),
    ("stored", "store_grant.runs.decision", [1, 1], ProtocolError, "a run must name a shard if"),
    ("stored", "store_grant.runs.decision", [3, 3], ProtocolError, "a run must name a shard if"),
    ("stored", "store_grant.runs.shard.of", [2, 0], ProtocolError, "refers to a shard beyond"),
    ("stored", "store_grant.runs.miss.of", [0, 1], ProtocolError, "refers to a miss beyond"),
    ("explained", "explained.fates.plan.of", [0, 0], ProtocolError, "either a plan or a miss"),
    ("explained", "explained.fates.miss.of", [1, 1], ProtocolError, "either a plan or a miss"),
    ("explained", "explained.fates.count", [1], ProtocolError, "lists of fates in a message must be equally long"),
    ("namespaces", "namespaces.known.spec", [b"\n\x01m"], SpecError, "does not pin the weights"),
    ("namespaces", "namespaces.known.blocks", [1, 2], ProtocolError, "namespaces"),
    ("namespaces", "namespaces.known.blocks", [], ProtocolError, "namespaces"),
    ("namespaces", "namespaces.known.blocks", [2**63], LimitError, "blocks"),
    ("siblings", "sibling_specs.specs", [b"\n\x01m"], SpecError, "does not pin the weights"),
    ("siblings", "sibling_specs.specs", [b""] * 17, LimitError, "sibling specs: 17 exceeds the limit of 16"),
    ("pinned", "pinned.blocks", MANY, LimitError, "pinned blocks"),
    ("ack", "report_ack.acked", HUGE, LimitError, "stream number: "),
    ("ack", "report_ack.orders.0.evict.number", HUGE, LimitError, "order number: "),
    ("ack", "report_ack.orders.0.evict.blocks.namespace.of", [1], ProtocolError, "refers to a namespace beyond the 1"),
    (
        "ack",
        "report_ack.orders.0.evict.blocks.hash",
        bytes(32 * 1_025),
        LimitError,
        "blocks in an order: 1025 exceeds the limit of 1024",
    ),
    (
        "ack",
        "report_ack.orders.0.evict.blocks.hash",
        b"",
        ProtocolError,
        "lists of blocks in an order must be equally long",
    ),
    ("ack", "report_ack.orders.0.evict.tier", 5, ProtocolError, "Tier 5 is not known here"),
    ("ack", "report_ack.orders.1.move.number", 1, ProtocolError, "must be ascending"),
    ("ack", "report_ack.orders.0.evict.number", 0, ProtocolError, "must be ascending, from 1 on"),
    ("ack", "report_ack.orders.1.move.number", HUGE, LimitError, "order number: "),
    ("ack", "report_ack.orders.1.move.moves.namespace.of", [1], ProtocolError, "refers to a namespace beyond the 1"),
    (
        "ack",
        "report_ack.orders.1.move.moves.hash",
        bytes(32 * 2_049),
        LimitError,
        "blocks in an order: 2049 exceeds the limit of 2048",
    ),
    ("ack", "report_ack.orders.1.move.moves.to", [], ProtocolError, "lists of blocks in an order must be equally long"),
    ("ack", "report_ack.orders.1.move.moves.to", [5], ProtocolError, "Tier 5 is not known here"),
    ("ack", "report_ack.orders.1.move.moves.codec", [0x0102], ProtocolError, "codec 1 version 2 is not known here"),
    ("ack", "report_ack.orders.2.pull.codec", 0, ProtocolError, "codec 0 version 0 is not known here"),
    (
        "ack",
        "report_ack.orders.2.pull.codec",
        0x0101,
        ProtocolError,
        "encoded pages cannot be pulled into the ram tier",
    ),
    ("ack", "report_ack.orders.2.pull.into", 2, ProtocolError, "pages cannot be pulled into the disk tier"),
    ("ack", "report_ack.orders.2.pull.into", 5, ProtocolError, "Tier 5 is not known here"),
    ("ack", "report_ack.orders.2.pull.number", HUGE, LimitError, "order number: "),
    ("ack", "report_ack.orders.2.pull.source.epoch", HUGE, LimitError, "epoch: "),
    ("ack", "report_ack.orders.2.pull.source.address", "a" * 1_025, LimitError, "characters of an address: 1025"),
    ("ack", "report_ack.orders.2.pull.tenant", "t" * 1_025, LimitError, "characters of a tenant's name: 1025"),
    ("ack", "report_ack.orders.2.pull.spec", b"", SpecError, "model must be named"),
    ("ack", "report_ack.orders.2.pull.pages.key.hash.of", [7], ProtocolError, "refers to a hash beyond the 1"),
    ("ack", "report_ack.orders.2.pull.pages.parent.of", [7], ProtocolError, "refers to a parent beyond the 1"),
    ("ack", "report_ack.tombstones.number", [], ProtocolError, "lists of tombstones in a message must be equally long"),
    ("ack", "report_ack.leave", 9, ProtocolError, "LeaveReason 9 is not known here"),
    ("purged", "purged.blocks", HUGE, LimitError, "purged blocks"),
    ("status", "status.state", "s" * 1_025, LimitError, "characters of a state"),
    ("status", "status.uptime_ns", HUGE, LimitError, "nanoseconds"),
    ("status", "status.counters.value", [], ProtocolError, "lists of counters must be equally long"),
]


@pytest.mark.parametrize(
    ("message", "field", "value", "error", "words"),
    SPOILED,
    ids=[f"{message}.{field} {words[:24]}" for message, field, _, _, words in SPOILED],
)
def test_a_spoiled_field_is_refused_in_words(
    message: str, field: str, value: Any, error: type[KVClusterError], words: str
) -> None:
    spoiled, read = _start(message)
    read(spoiled)  # it is the field alone that is wrong
    *path, last = field.split(".")
    owner = spoiled
    for name in path:
        owner = owner[int(name)] if name.isdigit() else getattr(owner, name)
    if isinstance(value, list):
        del getattr(owner, last)[:]
        getattr(owner, last).extend(value)
    else:
        setattr(owner, last, value)
    with pytest.raises(error, match=words) as raised:
        read(spoiled)
    assert type(raised.value) is error


def test_a_plan_names_sources_of_its_own_groups_only() -> None:
    spoiled, read = _start("grant")
    plans = spoiled.load_grant.runs.plan.table
    plans.counts[:] = [2]
    plans.items.counts[:] = [1, 2]
    with pytest.raises(ProtocolError, match="serves group 1 from sources that do not belong"):
        read(spoiled)
    plans.items.counts[:] = [2, 0]
    read(spoiled)


@pytest.mark.parametrize("counts", [[0], [1], [3]])
def test_plans_have_as_many_sources_as_their_counts_say(counts: list[int]) -> None:
    spoiled, read = _start("grant")
    spoiled.load_grant.runs.plan.table.items.counts[:] = counts
    with pytest.raises((ProtocolError, LimitError), match=r"items; 1 came|exceeds the limit"):
        read(spoiled)


@pytest.mark.parametrize("count", [0, 2])
def test_a_source_is_of_one_part(count: int) -> None:
    spoiled, read = _start("grant")
    sources = spoiled.load_grant.runs.plan.table.items.items
    sources.place[:] = [0, *PART] * count
    with pytest.raises((ProtocolError, LimitError), match=r"must be equally long|exceeds the limit"):
        read(spoiled)


def test_a_plan_has_no_more_groups_and_sources_than_a_block_has_parts() -> None:
    spoiled, read = _start("grant")
    plans = spoiled.load_grant.runs.plan.table
    plans.items.counts[:] = [limits.PARTS_PER_BLOCK + 2]
    with pytest.raises(LimitError, match="sources for one group: 257"):
        read(spoiled)
    plans.counts[:] = [limits.PARTS_PER_BLOCK + 1]
    with pytest.raises(LimitError, match="groups in a plan: 257"):
        read(spoiled)


def test_a_message_has_no_more_plans_and_misses_than_runs() -> None:
    spoiled, read = _start("grant")
    spoiled.load_grant.runs.plan.table.counts[:] = [0] * MANY
    with pytest.raises(LimitError, match=f"runs in a message: {MANY}"):
        read(spoiled)
    spoiled, read = _start("explained")
    misses = spoiled.explained.fates.miss.table
    misses.extend([misses[0]] * limits.BLOCKS_PER_CALL)
    with pytest.raises(LimitError, match=f"fates in a message: {MANY}"):
        read(spoiled)


def test_a_store_asks_for_no_more_pages_than_a_call_may_have() -> None:
    spoiled, read = _start("store")
    spoiled.hashes = bytes(32 * 1_024)
    spoiled.parts[:] = [number for group in range(65) for number in (group, 0, 1, 0, 1)]
    with pytest.raises(LimitError, match="pages in a store: 66560 exceeds the limit of 65536"):
        read(spoiled)


def test_a_lookup_asks_for_a_bounded_number_of_blocks_times_groups() -> None:
    spoiled, read = _start("load")
    spoiled.hashes = bytes(32 * limits.BLOCKS_PER_CALL)
    spoiled.need.parts[:] = [0, 1, 0, 1] * 17
    with pytest.raises(LimitError, match="parts in a lookup: 139264 exceeds the limit of 131072"):
        read(spoiled)


def test_a_read_or_write_of_more_pages_than_a_call_may_have_is_refused() -> None:
    spoiled, read = _start("read")
    _name_more_pages(spoiled.wants.key, limits.READ_PAGES)
    with pytest.raises(LimitError, match="pages in a load: 16385 exceeds the limit of 16384"):
        read(spoiled)
    spoiled, write = _start("write")
    _name_more_pages(spoiled.pages.key, limits.WRITE_PAGES)
    with pytest.raises(LimitError, match="pages in a store: 2049 exceeds the limit of 2048"):
        write(spoiled)


def test_an_order_or_a_suspicion_of_too_many_pages_is_refused() -> None:
    spoiled, read = _start("ack")
    _name_more_pages(spoiled.report_ack.orders[2].pull.pages.key, limits.PULL_PAGES)
    with pytest.raises(LimitError, match="pages in an order: 1025 exceeds the limit of 1024"):
        read(spoiled)
    spoiled, read = _start("suspect")
    _name_more_pages(spoiled.keys, limits.SUSPECTS_PER_CALL)
    with pytest.raises(LimitError, match="pages suspected at once: 257 exceeds the limit of 256"):
        read(spoiled)


def test_an_answer_of_too_many_orders_or_with_one_of_an_unknown_kind_is_refused() -> None:
    spoiled, read = _start("ack")
    for number in range(6, 20):
        spoiled.report_ack.orders.add().evict.number = number
    with pytest.raises(LimitError, match="orders in an answer: 17 exceeds the limit of 16"):
        read(spoiled)
    spoiled, read = _start("ack")
    spoiled.report_ack.orders[1].ClearField("move")
    with pytest.raises(ProtocolError, match="an order is empty, or of a kind that is not known here"):
        read(spoiled)


def test_one_order_may_move_as_much_out_of_two_tiers_as_may_be_evicted_out_of_each() -> None:
    blocks = [BlockHash(number.to_bytes(32, "big")) for number in range(limits.EVICTIONS_PER_ORDER)]
    down = [Move(NAMESPACE, block, to) for to in (Tier.DISK, Tier.HOST) for block in blocks]
    ack = replace(ACK, orders=(MoveOrder(1, tuple(down)),))
    _, read = _start("ack")
    assert read(coordinator_pb2.CoordinatorReply.FromString(COORDINATOR["Report"].encode_reply(ack))) == ack


def test_a_coordinator_that_does_not_say_which_moves_go_up_is_understood() -> None:
    down = Move(NAMESPACE, BlockHash(bytes(32)), Tier.HOST)
    order = MoveOrder(1, (down, down._replace(to=Tier.RAM, up=True)))
    _, read = _start("ack")
    said = COORDINATOR["Report"].encode_reply(replace(ACK, orders=(order,)))
    spoiled = coordinator_pb2.CoordinatorReply.FromString(said)
    assert read(spoiled) == replace(ACK, orders=(order,))
    moves = spoiled.report_ack.orders[0].move.moves
    moves.ClearField("up")
    answer = read(spoiled)
    assert isinstance(answer, ReportAck)
    assert answer.orders == (MoveOrder(1, (down, down._replace(to=Tier.RAM))),)
    moves.up.append(True)
    with pytest.raises(ProtocolError):
        read(spoiled)


def test_what_is_wrong_with_a_shard_is_told_as_far_as_there_is_room() -> None:
    told = replace(REPORT, info=replace(INFO, trouble="ä" * 2_000))
    _, read = _question(COORDINATOR["Report"], COORDINATOR["Report"].encode_request(told))
    assert isinstance(read, Report) and read.info.trouble == "ä" * 1_024


def _name_more_pages(keys: Any, count: int) -> None:
    keys.hash.of[:] = [0] * (count + 1)
    keys.place.of[:] = [0] * (count + 1)


def test_an_acknowledgement_without_a_leave_reason_lets_the_shard_stay() -> None:
    spoiled, read = _start("ack")
    spoiled.report_ack.leave = 0
    answer = read(spoiled)
    assert isinstance(answer, ReportAck) and answer.leave is None


def test_a_member_that_counts_too_much_is_refused() -> None:
    spoiled, read = _start("status")
    spoiled.status.counters.name.extend(["more"] * reports.COUNTERS_PER_PROCESS)
    spoiled.status.counters.value.extend([1] * reports.COUNTERS_PER_PROCESS)
    with pytest.raises(LimitError, match="counters: 257 exceeds the limit of 256"):
        read(spoiled)


# ------------------------------------------------------------------------------ versions, specs, sizes


@pytest.mark.parametrize("table", [COORDINATOR, SHARD])
@pytest.mark.parametrize("theirs", [0, NEWER, 2**32 - 1])
def test_another_version_is_told_both_and_what_to_do(table: Any, theirs: int) -> None:
    # Nothing else of such a message is looked at: the rest may mean anything.
    data = coordinator_pb2.AttachRequest(protocol_version=theirs, spec=b"\xff").SerializeToString()
    older = "this side" if theirs else "the other side"
    with pytest.raises(VersionError, match=f"of version {theirs} came where .*: upgrade {older}"):
        _question(table["Attach"], data)


def test_a_spec_that_cannot_be_is_refused_by_its_own_rules() -> None:
    m = common_pb2.Spec.FromString(common.encode_spec(SPEC))
    m.weights = "main"
    attach = coordinator_pb2.AttachRequest(protocol_version=PROTOCOL_VERSION, spec=m.SerializeToString())
    for table in (COORDINATOR, SHARD):
        with pytest.raises(SpecError, match="does not pin the weights"):
            _question(table["Attach"], attach.SerializeToString())


def test_a_spec_is_measured_before_it_is_read() -> None:
    with pytest.raises(LimitError, match=f"bytes of a spec: {limits.SPEC_BYTES + 1}"):
        common.decode_spec(b"\xff" * (limits.SPEC_BYTES + 1))


def test_the_largest_spec_travels() -> None:
    room = limits.SPEC_BYTES - len(SPEC.canonical())
    spec = KVSpec(SPEC.model, SPEC.weights, SPEC.block_tokens, SPEC.groups, rope="r" * room)
    assert common.decode_spec(common.encode_spec(spec)) == spec


def test_a_spec_that_travelled_names_the_same_namespace() -> None:
    assert common.decode_spec(common.encode_spec(SPEC)).namespace(TENANT) == SPEC.namespace(TENANT)


def test_a_message_is_measured_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    data = COORDINATOR["PrepareLoad"].encode_request(LOAD, NAMESPACE)
    monkeypatch.setattr(COORDINATOR["PrepareLoad"], "most_bytes", len(data) - 1)
    with pytest.raises(LimitError, match=f"PrepareLoadRequest: {len(data)} exceeds the limit of {len(data) - 1}"):
        _question(COORDINATOR["PrepareLoad"], data)


def test_bytes_of_something_else_are_named_so() -> None:
    with pytest.raises(ProtocolError, match=re.escape("these bytes are not a valid PrepareLoadRequest of kvcluster")):
        _question(COORDINATOR["PrepareLoad"], b"GET / HTTP/1.1\r\n")


def test_a_later_peer_may_add_fields() -> None:
    data = COORDINATOR["PrepareLoad"].encode_request(LOAD, NAMESPACE) + b"\xa2\x06\x03new"  # field 100
    assert _question(COORDINATOR["PrepareLoad"], data) == (NAMESPACE, LOAD)


def test_a_run_of_no_pinned_blocks_is_refused() -> None:
    method = COORDINATOR["GetPins"]
    data = method.encode_reply(PinList((PinnedRun(TENANT, SPEC, BLOCK, 1, (), 1, 1),)))
    with pytest.raises(ProtocolError, match="a run of pinned blocks must have at least one"):
        method.decode_reply(data)
