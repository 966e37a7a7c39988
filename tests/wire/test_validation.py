"""Input from outside is checked for shape and bounds before the core sees it, and refused with an error that names the
field."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvcluster.core import limits
from kvcluster.core.codecs import Codec
from kvcluster.core.ids import Attempt, BlockHash, Epoch, Holder, NamespaceId, ShardId, Tenant
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
    GoneEvent,
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
    PrepareLoad,
    PrepareStore,
    PullOrder,
    Purge,
    Purged,
    PurgedEvent,
    ReadRequest,
    RegisterEngine,
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
    Tier,
    TierUse,
    Tombstone,
    WriteRequest,
)
from kvcluster.core.miss import Loss, Miss, MissReason
from kvcluster.core.spec import KVSpec, Part
from kvcluster.errors import KVClusterError, LimitError, ProtocolError, SpecError
from kvcluster.wire import answers, common, coordinator, engines, reports, shard
from kvcluster.wire.methods import COORDINATOR, SHARD
from kvcluster.wire.v1 import common_pb2, coordinator_pb2, shard_pb2

TENANT = Tenant("t")
BLOCK, NAMESPACE = BlockHash(b"b" * 32), NamespaceId(b"n" * 32)
ATTEMPT = Attempt(Holder(b"h" * 16), 1)
PART = Part(0, 4, 0, 2)
KEY = PageKey(BLOCK, 0, PART)
SPEC = KVSpec.uniform(model="m", weights="sha256:0", num_layers=4, num_kv_heads=2, head_dim=8, dtype="float32")
SHARD_ADDRESS = ShardAddress(ShardId("s"), Epoch(1), "a:1", "h")
SOURCE = Source(0, PART, SHARD_ADDRESS, Tier.DEVICE, Loss.EXACT)
INFO = ShardInfo(
    *(ShardId("s"), Epoch(1), "a:1", "h", 1, 1, 1, 1, (("commits", 1),)),
    below=(TierUse(Tier.HOST, 1, 1, 1), TierUse(Tier.DISK, 1, 1, 1)),
)
PAGE = PageEvent(NAMESPACE, KEY, BLOCK, 3, Tier.DEVICE, Loss.EXACT)

LOAD = PrepareLoad(ATTEMPT, (BLOCK,), Need((PART,)))
STORE = PrepareStore(ATTEMPT, 1, BLOCK, BLOCK, (BLOCK,), ((0, PART),))
PIN = PinBlocks((BLOCK,), 1)
PURGE = Purge("m", "sha256:0", "")
EVENTS = (PAGE, GoneEvent(NAMESPACE, KEY, False), PurgedEvent(1))
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
STATUS = Status(Epoch(1), "serving", 1, 1, 1, 1, (ShardStatus(INFO, "up", 1),), (("loads", 1),))


def _valid(kind: type[Any], encoded: bytes, decode: Callable[[bytes], object]) -> tuple[Any, Callable[[Any], object]]:
    """A valid message to spoil, and how it is read."""
    return kind.FromString(encoded), lambda m: decode(m.SerializeToString())


def _start(name: str) -> tuple[Any, Callable[[Any], object]]:
    c, s = coordinator_pb2, shard_pb2
    reply = answers.decode_reply
    match name:
        case "load":
            return _valid(
                c.PrepareLoadRequest, coordinator.encode_prepare_load(LOAD, NAMESPACE), coordinator.decode_prepare_load
            )
        case "store":
            data = coordinator.encode_prepare_store(STORE, NAMESPACE)
            return _valid(c.PrepareStoreRequest, data, coordinator.decode_prepare_store)
        case "pin":
            return _valid(
                c.PinBlocksRequest, coordinator.encode_pin_blocks(PIN, NAMESPACE), coordinator.decode_pin_blocks
            )
        case "ticket":
            data = coordinator.encode_ticket_end(RenewTicket(ATTEMPT))
            return _valid(c.TicketRequest, data, coordinator.decode_renew_ticket)
        case "report":
            return _valid(c.ReportRequest, reports.encode_report(REPORT), reports.decode_report)
        case "inventory":
            return _valid(c.InventoryRequest, reports.encode_inventory(INVENTORY), reports.decode_inventory)
        case "purge":
            return _valid(c.PurgeRequest, coordinator.encode_purge(PURGE), coordinator.decode_purge)
        case "policy":
            data = coordinator.encode_set_policy(SetPolicy((("host.codec", "q4"),)))
            return _valid(c.SetPolicyRequest, data, coordinator.decode_set_policy)
        case "engine":
            data = engines.encode_register_engine(RegisterEngine(ENGINE))
            return _valid(c.RegisterEngineRequest, data, engines.decode_register_engine)
        case "weights":
            data = engines.encode_set_weights(SetWeights("m", "sha256:1"))
            return _valid(c.SetWeightsRequest, data, engines.decode_set_weights)
        case "drain":
            data = coordinator.encode_drain(Drain(ShardId("s")))
            return _valid(c.DrainRequest, data, coordinator.decode_drain)
        case "suspect":
            return _valid(s.SuspectRequest, shard.encode_suspect(SUSPECT, NAMESPACE), shard.decode_suspect)
        case "flush":
            return _valid(s.FlushRequest, shard.encode_flush(Flush(1)), shard.decode_flush)
        case "read":
            return _valid(s.ReadRequest, shard.encode_read_request(READ), shard.decode_read_request)
        case "write":
            return _valid(s.WriteRequest, shard.encode_write_request(WRITE), shard.decode_write_request)
        case "read head":
            return _valid(s.ReadHead, shard.encode_read_head([Miss(MissReason.FULL)]), shard.decode_read_head)
        case "write head":
            return _valid(s.WriteHead, shard.encode_write_head([None]), shard.decode_write_head)
        case "write tail":
            return _valid(s.WriteTail, shard.encode_write_tail([]), shard.decode_write_tail)
        case "attached shard":
            data = shard.encode_reply(AttachedShard(NAMESPACE, Epoch(1), 1))
            return _valid(s.ShardReply, data, shard.decode_reply)
        case "offers":
            offers = Offers(Epoch(1), (Offer("tcp", "a:1"),), (("shm", "why"),))
            return _valid(s.ShardReply, shard.encode_reply(offers), shard.decode_reply)
        case "attached":
            attached = Attached(NAMESPACE, Epoch(1), 1, 64, (SHARD_ADDRESS,))
            return _valid(c.CoordinatorReply, answers.encode_reply(attached), reply)
        case _:
            replies: dict[str, Reply] = {
                "grant": GRANT,
                "stored": STORED,
                "explained": EXPLAINED,
                "ack": ACK,
                "status": STATUS,
            }
            replies |= {"siblings": SiblingSpecs((SPEC,)), "pinned": BlocksPinned(1), "purged": Purged(1)}
            replies |= {"namespaces": Namespaces(((SPEC, 7),)), "engines": Engines(((ENGINE, 7),))}
            return _valid(c.CoordinatorReply, answers.encode_reply(replies[name]), reply)


MANY = limits.BLOCKS_PER_CALL + 1
HUGE = 2**63

SPOILED: list[tuple[str, str, object, type[KVClusterError], str]] = [
    # message, field, what it is set to, the error, what it says
    ("load", "namespace", b"n" * 31, ProtocolError, "a namespace is 32 bytes, not 31"),
    ("load", "namespace", b"", ProtocolError, "a namespace is 32 bytes, not 0"),
    ("load", "holder", b"h" * 17, ProtocolError, "a holder is 16 bytes, not 17"),
    ("load", "hashes", b"x" * 33, ProtocolError, "take 32 bytes each; 33 bytes came"),
    ("load", "hashes", bytes(32 * MANY), LimitError, f"block hashes in a call: {MANY} exceeds the limit of {MANY - 1}"),
    ("load", "need.groups", 257, LimitError, "groups in a need: 257 exceeds the limit of 256"),
    ("load", "need.groups", 0, ProtocolError, "group 0 of a need of 0 groups"),
    ("load", "need.parts", [0, 0, 1, 0, 1] * 2, ProtocolError, "each at most once, in ascending order"),
    ("load", "need.parts", [0, 0, 1, 0], ProtocolError, "five numbers each; 4 came"),
    ("load", "need.parts", [0, 4, 4, 0, 1], ProtocolError, "is not a part"),
    ("load", "need.parts", [0, 0, 1, 2, 1], ProtocolError, "is not a part"),
    ("load", "need.parts", [0, 0, 65_536, 0, 1], ProtocolError, "end at 65535 or before"),
    ("load", "need.parts", [0, 0, 1, 0, 65_536], ProtocolError, "end at 65535 or before"),
    ("load", "need.parts", [0, 0, 1, 0, 1] * 257, LimitError, "parts in a message: 257 exceeds the limit of 256"),
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
    ("purge", "model", "m" * 8_193, LimitError, "bytes of model, weights and adapter: 8201 exceeds the limit of 8192"),
    ("purge", "weights", "ß" * 4_097, LimitError, "bytes of model, weights and adapter: 8195"),
    ("purge", "adapter", "a" * 8_193, LimitError, "bytes of model, weights and adapter"),
    ("policy", "names", [], ProtocolError, "lists of settings must be equally long"),
    ("policy", "names", ["n" * 1_025], LimitError, "characters of a policy's name"),
    ("policy", "values", ["v" * 1_025], LimitError, "characters of a policy's value"),
    ("engine", "engine.engine", "", ProtocolError, "an engine must have an id"),
    ("engine", "engine.name", "n" * 1_025, LimitError, "characters of a name: 1025"),
    ("engine", "engine.fact_values", [], ProtocolError, "lists of facts must be equally long"),
    ("engine", "engine.withdrawn", HUGE, LimitError, "withdrawals"),
    ("weights", "weights", "", ProtocolError, "does not pin the weights"),
    ("weights", "weights", "main", ProtocolError, "does not pin the weights"),
    ("weights", "model", "m" * 1_025, LimitError, "characters of a model: 1025"),
    ("engines", "engines.seen_ns_ago", [], ProtocolError, "lists of engines must be equally long"),
    ("drain", "shard", "s" * 1_025, LimitError, "characters of a shard's name: 1025"),
    ("suspect", "namespace", b"", ProtocolError, "a namespace is 32 bytes, not 0"),
    ("suspect", "epoch", HUGE, LimitError, "epoch: "),
    ("suspect", "keys.hashes", b"", ProtocolError, "refers to a hash beyond the 0"),
    ("suspect", "keys.hashes", bytes(32 * 513), LimitError, "hashes in a table: 513 exceeds the limit of 512"),
    ("suspect", "keys.part_of", [1], ProtocolError, "refers to a part beyond the 1"),
    ("ticket", "holder", b"", ProtocolError, "a holder is 16 bytes, not 0"),
    ("flush", "wait_ns", HUGE, LimitError, "nanoseconds"),
    ("report", "info.shard", "s" * 1_025, LimitError, "characters of a shard's name"),
    ("report", "info.epoch", HUGE, LimitError, "epoch: "),
    ("report", "info.free_bytes", HUGE, LimitError, "free bytes"),
    ("report", "info.counters.names", ["one", "two"], ProtocolError, r"lists of counters must be equally long"),
    ("report", "info.counters.names", ["n" * 1_025], LimitError, "characters of a counter's name"),
    ("report", "coordinator", HUGE, LimitError, "epoch: "),
    ("report", "first", HUGE, LimitError, "stream number: "),
    ("report", "orders.accepted", HUGE, LimitError, "order number: "),
    ("report", "orders.accepted", 4, ProtocolError, "a running order was not accepted"),
    ("report", "orders.running", [5, 3], ProtocolError, "must be ascending"),
    ("report", "orders.running", [0], ProtocolError, "must be ascending, from 1 on"),
    ("report", "orders.running", list(range(1, 18)), LimitError, "running orders: 17 exceeds the limit of 16"),
    ("report", "pressure_bytes", HUGE, LimitError, "bytes wanted"),
    ("report", "events.hashes", b"b" * 32, ProtocolError, "lists of events must be equally long"),
    ("report", "events.hashes", bytes(32 * 4_097), LimitError, "events in a message: 4097 exceeds the limit of 4096"),
    ("report", "events.kinds", [1], ProtocolError, "lists of events must be equally long"),
    ("report", "events.kinds", [1, 1, 4], ProtocolError, "lists of pages must be equally long"),
    ("report", "events.kinds", [2, 3, 4], ProtocolError, "lists of pages must be equally long"),
    ("report", "events.kinds", [1, 4, 4], ProtocolError, "lists of events must be equally long"),
    ("report", "events.kinds", [2] * 4_097, LimitError, "events in a message: 4097 exceeds the limit of 4096"),
    ("report", "events.purges", [], ProtocolError, "lists of purges must be equally long"),
    ("report", "events.purges", [1, 2], ProtocolError, "lists of purges must be equally long"),
    ("report", "events.purges", [HUGE], LimitError, "tombstone number: "),
    ("report", "events.kinds", [1, 7, 4], ProtocolError, "event kind 7 is not known here"),
    ("report", "events.gone_tiers", [], ProtocolError, "lists of pages that are gone must be equally long"),
    ("report", "events.gone_tiers", [5], ProtocolError, "Tier 5 is not known here"),
    ("report", "events.codecs", [], ProtocolError, "lists of pages must be equally long"),
    ("report", "events.codecs", [0x7F01], ProtocolError, "codec 127 version 1 is not known here: upgrade"),
    ("report", "info.below", [], ProtocolError, "lists of tiers must be equally long"),
    ("report", "info.below", [0, 2], ProtocolError, "listed once, the fastest first"),
    ("report", "info.below", [2, 1], ProtocolError, "the fastest first"),
    ("report", "info.below", [2, 2], ProtocolError, "listed once"),
    ("report", "info.below_wanted_bytes", [1], ProtocolError, "lists of tiers must be equally long"),
    ("report", "info.below_wanted_bytes", [1, HUGE], LimitError, "wanted bytes"),
    (
        "report",
        "info.trouble",
        "t" * 1_025,
        LimitError,
        "characters of a shard's trouble: 1025 exceeds the limit of 1024",
    ),
    ("report", "info.below_free_bytes", [HUGE, 1], LimitError, "free bytes"),
    ("report", "events.namespaces", b"n" * 33, ProtocolError, "take 32 bytes each"),
    ("report", "events.namespace_of", [0, 1], ProtocolError, "refers to a namespace beyond the 1"),
    ("report", "events.part_of", [0, 2**32 - 1], ProtocolError, "refers to a part beyond the 1"),
    ("report", "events.parents", b"", ProtocolError, "lists of pages must be equally long"),
    ("report", "events.depths", [1, 2], ProtocolError, "lists of pages must be equally long"),
    ("report", "events.depths", [limits.TOKENS_PER_SEQUENCE + 1], LimitError, "depth: "),
    ("report", "events.tiers", [5], ProtocolError, "Tier 5 is not known here"),
    ("report", "events.losses", [5], ProtocolError, "Loss 5 is not known here"),
    ("report", "specs.tenants", [], ProtocolError, "lists of specs must be equally long"),
    ("report", "specs.tenants", ["t" * 1_025], LimitError, "characters of a tenant's name"),
    ("report", "specs.specs", [b""], SpecError, "model must be named"),
    ("inventory", "pages.kinds", [2], ProtocolError, "lists of pages must be equally long"),
    ("inventory", "tombstones.numbers", [1], ProtocolError, "lists of tombstones must be equally long"),
    ("inventory", "tombstones.numbers", [1, HUGE], LimitError, "tombstone number: "),
    ("inventory", "tombstones.texts", [], ProtocolError, "refers to a tenant beyond the 0"),
    ("inventory", "tombstones.texts", ["t" * 1_025, "m"], LimitError, "characters of a tenant's name: 1025"),
    ("inventory", "tombstones.texts", ["t", "m" * 8_193], LimitError, "characters of a tombstone's text: 8193"),
    ("inventory", "tombstones.texts", ["t"] * 4_097, LimitError, "texts of tombstones: 4097 exceeds the limit of 4096"),
    ("inventory", "tombstones.tenant_of", [0, 2], ProtocolError, "refers to a tenant beyond the 2"),
    ("inventory", "tombstones.model_of", [0, 3], ProtocolError, "refers to a model beyond"),
    ("inventory", "tombstones.weights_of", [0, 3], ProtocolError, "refers to weights beyond"),
    ("inventory", "tombstones.adapter_of", [0, 3], ProtocolError, "refers to an adapter beyond"),
    ("inventory", "upto", HUGE, LimitError, "stream number: "),
    ("read", "keys.hash_of", [1], ProtocolError, "refers to a hash beyond the 1"),
    ("read", "keys.part_of", [1], ProtocolError, "refers to a part beyond the 1"),
    ("read", "keys.part_of", [], ProtocolError, "lists of pages must be equally long"),
    ("read", "layer_stops", [5], ProtocolError, "layers 0:5 were asked for of a page that has 4"),
    ("read", "layer_starts", [4], ProtocolError, "layers 4:4 were asked for"),
    ("read", "layer_starts", [0, 0], ProtocolError, "lists of pages must be equally long"),
    ("read", "epoch", HUGE, LimitError, "epoch: "),
    ("read head", "miss_of", [2], ProtocolError, "refers to a miss beyond the 2"),
    ("read head", "miss_of", [0] * 65_537, LimitError, "pages in a call: 65537 exceeds the limit of 65536"),
    ("write", "pages.parent_of", [7], ProtocolError, "refers to a parent beyond the 1"),
    ("write", "pages.parent_of", [], ProtocolError, "lists of pages must be equally long"),
    ("write", "pages.depths", [limits.TOKENS_PER_SEQUENCE + 1], LimitError, "depth: "),
    ("write", "pages.losses", [8], ProtocolError, "Loss 8 is not known here"),
    ("write", "wait_ns", HUGE, LimitError, "nanoseconds"),
    ("write", "pages.keys.hashes", b"", ProtocolError, "refers to a hash beyond the 0"),
    ("write head", "outcomes", [7], ProtocolError, "Written 7 is not known here"),
    ("write head", "outcomes", [0] * 65_537, LimitError, "pages in a call: 65537"),
    ("write tail", "outcomes", [0], ProtocolError, "Written 0 is not known here"),
    ("attached shard", "attached.protocol_version", 2, ProtocolError, "version 1 .* version 2"),
    ("attached shard", "attached.namespace", b"", ProtocolError, "a namespace is 32 bytes"),
    ("attached shard", "attached.lease_ttl_ns", HUGE, LimitError, "nanoseconds"),
    ("offers", "offers.protocol_version", 2, ProtocolError, "version 1 .* version 2"),
    ("offers", "offers.epoch", HUGE, LimitError, "epoch: "),
    ("offers", "offers.transports", ["tcp", "tcp"], ProtocolError, "lists of offers must be equally long"),
    ("offers", "offers.addresses", [], ProtocolError, "lists of offers must be equally long"),
    ("offers", "offers.addresses", ["a" * 1_025], LimitError, "characters of an offer: 1025"),
    ("offers", "offers.reasons", [], ProtocolError, "lists of refusals must be equally long"),
    ("offers", "offers.refused", ["t" * 1_025], LimitError, "characters of a transport's name: 1025"),
    ("attached", "attached.protocol_version", 2, ProtocolError, "version 1 .* version 2"),
    ("attached", "attached.run_blocks", 0, ProtocolError, "a run must have at least one block"),
    ("attached", "attached.ticket_ttl_ns", HUGE, LimitError, "nanoseconds"),
    ("grant", "load_grant.blocks", 3, ProtocolError, "runs cover 2 blocks instead of 3"),
    ("grant", "load_grant.runs.counts", [2, 0], ProtocolError, "a run must have at least one block"),
    ("grant", "load_grant.runs.counts", [1, 1], ProtocolError, "lists of runs must be equally long"),
    ("grant", "load_grant.runs.counts", [MANY], LimitError, f"blocks in the runs of a message: {MANY}"),
    ("grant", "load_grant.runs.counts", [1] * MANY, LimitError, f"runs in a message: {MANY}"),
    ("grant", "load_grant.runs.plan_of", [1], ProtocolError, "refers to a plan beyond the 1"),
    ("grant", "load_grant.hold_ns", HUGE, LimitError, "nanoseconds"),
    ("grant", "load_grant.miss.reason", 0, ProtocolError, "MissReason 0 is not known here"),
    ("grant", "load_grant.miss.reason", 99, ProtocolError, "MissReason 99 is not known here; a newer kvcluster"),
    ("stored", "store_grant.decisions", [0, 3], ProtocolError, "Decision 0 is not known here"),
    ("stored", "store_grant.decisions", [1, 1], ProtocolError, "a run must name a shard if"),
    ("stored", "store_grant.decisions", [3, 3], ProtocolError, "a run must name a shard if"),
    ("stored", "store_grant.shard_of", [2, 0], ProtocolError, "refers to a shard beyond"),
    ("stored", "store_grant.miss_of", [0, 1], ProtocolError, "refers to a miss beyond"),
    ("explained", "explained.plan_of", [0, 0], ProtocolError, "either a plan or a miss"),
    ("explained", "explained.miss_of", [1, 1], ProtocolError, "either a plan or a miss"),
    ("explained", "explained.counts", [1], ProtocolError, "lists of fates must be equally long"),
    ("namespaces", "namespaces.specs", [b"\n\x01m"], SpecError, "does not pin the weights"),
    ("namespaces", "namespaces.specs", [b""] * 2, ProtocolError, "namespaces"),
    ("namespaces", "namespaces.blocks", [], ProtocolError, "namespaces"),
    ("namespaces", "namespaces.blocks", [2**63], LimitError, "blocks"),
    ("siblings", "sibling_specs.specs", [b"\n\x01m"], SpecError, "does not pin the weights"),
    ("siblings", "sibling_specs.specs", [b""] * 17, LimitError, "sibling specs: 17 exceeds the limit of 16"),
    ("pinned", "pinned.blocks", MANY, LimitError, "pinned blocks"),
    ("ack", "report_ack.acked", HUGE, LimitError, "stream number: "),
    ("ack", "report_ack.orders.0.number", HUGE, LimitError, "order number: "),
    ("ack", "report_ack.orders.0.evict.namespace_of", [1], ProtocolError, "refers to a namespace beyond the 1"),
    (
        "ack",
        "report_ack.orders.0.evict.hashes",
        bytes(32 * 1_025),
        LimitError,
        "blocks in an order: 1025 exceeds the limit of 1024",
    ),
    ("ack", "report_ack.orders.0.evict.hashes", b"", ProtocolError, "lists of an order must be equally long"),
    ("ack", "report_ack.orders.0.evict.tier", 5, ProtocolError, "Tier 5 is not known here"),
    ("ack", "report_ack.orders.1.number", 1, ProtocolError, "must be ascending"),
    ("ack", "report_ack.orders.0.number", 0, ProtocolError, "must be ascending, from 1 on"),
    ("ack", "report_ack.orders.1.number", HUGE, LimitError, "order number: "),
    ("ack", "report_ack.orders.1.move.namespace_of", [1], ProtocolError, "refers to a namespace beyond the 1"),
    (
        "ack",
        "report_ack.orders.1.move.hashes",
        bytes(32 * 2_049),
        LimitError,
        "blocks in an order: 2049 exceeds the limit of 2048",
    ),
    ("ack", "report_ack.orders.1.move.to", [], ProtocolError, "lists of an order must be equally long"),
    ("ack", "report_ack.orders.1.move.to", [5], ProtocolError, "Tier 5 is not known here"),
    ("ack", "report_ack.orders.1.move.codecs", [0x0102], ProtocolError, "codec 1 version 2 is not known here"),
    ("ack", "report_ack.orders.2.pull.codec", 0, ProtocolError, "codec 0 version 0 is not known here"),
    (
        "ack",
        "report_ack.orders.2.pull.codec",
        0x0101,
        ProtocolError,
        "encoded pages cannot be pulled into the device tier",
    ),
    ("ack", "report_ack.orders.2.pull.into", 2, ProtocolError, "pages cannot be pulled into the disk tier"),
    ("ack", "report_ack.orders.2.pull.into", 5, ProtocolError, "Tier 5 is not known here"),
    ("ack", "report_ack.orders.2.number", HUGE, LimitError, "order number: "),
    ("ack", "report_ack.orders.2.pull.source.epoch", HUGE, LimitError, "epoch: "),
    ("ack", "report_ack.orders.2.pull.source.address", "a" * 1_025, LimitError, "characters of an address: 1025"),
    ("ack", "report_ack.orders.2.pull.tenant", "t" * 1_025, LimitError, "characters of a tenant's name: 1025"),
    ("ack", "report_ack.orders.2.pull.spec", b"", SpecError, "model must be named"),
    ("ack", "report_ack.orders.2.pull.pages.keys.hash_of", [7], ProtocolError, "refers to a hash beyond the 1"),
    ("ack", "report_ack.orders.2.pull.pages.parent_of", [7], ProtocolError, "refers to a parent beyond the 1"),
    ("ack", "report_ack.tombstones.numbers", [], ProtocolError, "lists of tombstones must be equally long"),
    ("ack", "report_ack.leave", 9, ProtocolError, "LeaveReason 9 is not known here"),
    ("purged", "purged.blocks", HUGE, LimitError, "purged blocks"),
    ("status", "status.state", "s" * 1_025, LimitError, "characters of a state"),
    ("status", "status.uptime_ns", HUGE, LimitError, "nanoseconds"),
    ("status", "status.counters.values", [], ProtocolError, "lists of counters must be equally long"),
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


def test_an_inventory_speaks_of_pages_that_are_there() -> None:
    spoiled, read = _start("inventory")
    report, _ = _start("report")
    spoiled.pages.CopyFrom(report.events)
    with pytest.raises(ProtocolError, match="only pages that exist"):
        read(spoiled)


def test_a_plan_names_sources_of_its_own_groups_only() -> None:
    spoiled, read = _start("grant")
    covers = spoiled.load_grant.runs.plans.plans[0].groups
    covers[0].absent = True
    with pytest.raises(ProtocolError, match="serves group 0 from sources that do not belong"):
        read(spoiled)
    covers[0].absent = False
    covers.add(sources=[0])
    with pytest.raises(ProtocolError, match="serves group 1 from sources that do not belong"):
        read(spoiled)


@pytest.mark.parametrize("count", [0, 2])
def test_a_source_is_of_one_part(count: int) -> None:
    spoiled, read = _start("grant")
    part = spoiled.load_grant.runs.plans.sources[0].part
    part[:] = [0, *PART] * count
    with pytest.raises(ProtocolError, match="the part of a source takes five numbers"):
        read(spoiled)


def test_a_plan_has_no_more_groups_and_sources_than_a_block_has_parts() -> None:
    spoiled, read = _start("grant")
    plan = spoiled.load_grant.runs.plans.plans[0]
    plan.groups[0].sources.extend([0] * limits.PARTS_PER_BLOCK)
    with pytest.raises(LimitError, match="sources for one group: 257"):
        read(spoiled)
    del plan.groups[0].sources[1:]
    plan.groups.extend([common_pb2.Cover(absent=True)] * limits.PARTS_PER_BLOCK)
    with pytest.raises(LimitError, match="groups in a plan: 257"):
        read(spoiled)


def test_a_message_has_no_more_plans_sources_and_misses_than_blocks_and_pages() -> None:
    for name, field, table in (
        ("grant", "plans", "load_grant.runs.plans"),
        ("grant", "sources", "load_grant.runs.plans"),
        ("explained", "misses", "explained"),
    ):
        spoiled, read = _start(name)
        owner = spoiled
        for step in table.split("."):
            owner = getattr(owner, step)
        entries = getattr(owner, field)
        entries.extend([entries[0]] * limits.PAGES_PER_CALL)
        with pytest.raises(LimitError, match=f"{field} in a message"):
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
    spoiled.need.groups = 17
    spoiled.need.parts[:] = [number for group in range(17) for number in (group, 0, 1, 0, 1)]
    with pytest.raises(LimitError, match="parts in a lookup: 139264 exceeds the limit of 131072"):
        read(spoiled)


def test_a_read_or_write_of_more_pages_than_a_call_may_have_is_refused() -> None:
    for name in ("read", "write"):
        spoiled, read = _start(name)
        _name_more_pages(spoiled.keys if name == "read" else spoiled.pages.keys, limits.PAGES_PER_CALL)
        with pytest.raises(LimitError, match="pages in a call: 65537"):
            read(spoiled)


def test_an_order_or_a_suspicion_of_too_many_pages_is_refused() -> None:
    spoiled, read = _start("ack")
    _name_more_pages(spoiled.report_ack.orders[2].pull.pages.keys, limits.PULL_PAGES)
    with pytest.raises(LimitError, match="pages in an order: 1025 exceeds the limit of 1024"):
        read(spoiled)
    spoiled, read = _start("suspect")
    _name_more_pages(spoiled.keys, limits.SUSPECTS_PER_CALL)
    with pytest.raises(LimitError, match="pages suspected at once: 257 exceeds the limit of 256"):
        read(spoiled)


def test_an_answer_of_too_many_orders_or_with_one_of_an_unknown_kind_is_refused() -> None:
    spoiled, read = _start("ack")
    for number in range(6, 20):
        spoiled.report_ack.orders.add(number=number).evict.SetInParent()
    with pytest.raises(LimitError, match="orders in an answer: 17 exceeds the limit of 16"):
        read(spoiled)
    spoiled, read = _start("ack")
    spoiled.report_ack.orders[1].ClearField("move")
    with pytest.raises(ProtocolError, match="kind of order is not known here; a newer kvcluster"):
        read(spoiled)


def test_one_order_may_move_as_much_out_of_two_tiers_as_may_be_evicted_out_of_each() -> None:
    blocks = [BlockHash(number.to_bytes(32, "big")) for number in range(limits.EVICTIONS_PER_ORDER)]
    down = [Move(NAMESPACE, block, to) for to in (Tier.DISK, Tier.HOST) for block in blocks]
    ack = replace(ACK, orders=(MoveOrder(1, tuple(down)),))
    _, read = _start("ack")
    assert read(coordinator_pb2.CoordinatorReply.FromString(answers.encode_reply(ack))) == ack


def test_what_is_wrong_with_a_shard_is_told_as_far_as_there_is_room() -> None:
    told = replace(REPORT, info=replace(INFO, trouble="ä" * 2_000))
    read = reports.decode_report(reports.encode_report(told))
    assert read.info.trouble == "ä" * 1_024


def _name_more_pages(keys: Any, count: int) -> None:
    keys.hash_of.extend([0] * count)
    keys.part_of.extend([0] * count)


def test_an_acknowledgement_without_a_leave_reason_lets_the_shard_stay() -> None:
    spoiled, read = _start("ack")
    spoiled.report_ack.leave = 0
    answer = read(spoiled)
    assert isinstance(answer, ReportAck) and answer.leave is None


def test_a_member_that_counts_too_much_is_refused() -> None:
    spoiled, read = _start("status")
    spoiled.status.counters.names.extend(["more"] * reports.COUNTERS)
    spoiled.status.counters.values.extend([1] * reports.COUNTERS)
    with pytest.raises(LimitError, match="counters: 257 exceeds the limit of 256"):
        read(spoiled)


# ------------------------------------------------------------------------------ versions, specs, sizes


@pytest.mark.parametrize("table", [COORDINATOR, SHARD])
@pytest.mark.parametrize("theirs", [0, 2])
def test_another_version_is_told_both_and_what_to_do(table: Any, theirs: int) -> None:
    # Nothing else of such a message is looked at: the rest may mean anything.
    data = coordinator_pb2.AttachRequest(protocol_version=theirs, spec=b"\xff").SerializeToString()
    words = f"version 1 of kvcluster's protocol, the other side version {theirs}: install the same release"
    with pytest.raises(ProtocolError, match=words):
        table["Attach"].decode_question(data)


def test_a_spec_that_cannot_be_is_refused_by_its_own_rules() -> None:
    m = common_pb2.Spec.FromString(common.encode_spec(SPEC))
    m.weights = "main"
    attach = coordinator_pb2.AttachRequest(protocol_version=1, spec=m.SerializeToString())
    for table in (COORDINATOR, SHARD):
        with pytest.raises(SpecError, match="does not pin the weights"):
            table["Attach"].decode_question(attach.SerializeToString())


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
    monkeypatch.setattr(limits, "MESSAGE_BYTES", len(data) - 1)
    with pytest.raises(LimitError, match=f"message bytes: {len(data)} exceeds the limit of {len(data) - 1}"):
        COORDINATOR["PrepareLoad"].decode_question(data)


def test_bytes_of_something_else_are_named_so() -> None:
    with pytest.raises(ProtocolError, match=re.escape("these bytes are not a valid PrepareLoadRequest of kvcluster")):
        COORDINATOR["PrepareLoad"].decode_question(b"GET / HTTP/1.1\r\n")


def test_a_later_peer_may_add_fields() -> None:
    data = COORDINATOR["PrepareLoad"].encode_request(LOAD, NAMESPACE) + b"\xa2\x06\x03new"  # field 100
    assert COORDINATOR["PrepareLoad"].decode_question(data) == (NAMESPACE, LOAD)
