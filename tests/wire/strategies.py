"""Strategies for core messages as they may be sent: valid, small, and of every kind."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from kvcluster.core import codecs as core_codecs
from kvcluster.core import limits
from kvcluster.core.codecs import Codec
from kvcluster.core.file_allocator import HEAD_BYTES, Shape
from kvcluster.core.groups import DTYPE_BYTES, LAST, PREFIX, Group, Part, Plane, window
from kvcluster.core.ids import SUM_BYTES, Attempt, CallId, ShardId, Tenant
from kvcluster.core.messages import (
    Attach,
    Attached,
    AttachedShard,
    AttachShard,
    AttendDeclined,
    Attended,
    AttendRequest,
    AttendRow,
    BlockFate,
    BlocksPinned,
    Decision,
    DeclineReason,
    Done,
    Drain,
    EndTicket,
    EngineInfo,
    Engines,
    EvictOrder,
    Explain,
    Explained,
    Findings,
    Flush,
    GetEngines,
    GetNamespaces,
    GetOffers,
    GetPins,
    GetStatus,
    Inventory,
    IssueCredential,
    IssuedCredential,
    LeaveReason,
    Link,
    ListeningPort,
    LoadGrant,
    Move,
    MoveOrder,
    Namespaces,
    Need,
    NewPage,
    Offer,
    Offers,
    Order,
    OrderProgress,
    PageEvent,
    PageKey,
    PageWant,
    PinBlocks,
    PinList,
    PinnedRun,
    Plan,
    PrepareLoad,
    PrepareStore,
    Probe,
    Probed,
    ProbeOrder,
    ProcessFacts,
    PullOrder,
    Purge,
    Purged,
    PurgedEvent,
    ReadRequest,
    Refused,
    RefusedKind,
    Registered,
    RegisterEngine,
    RegisterSpans,
    RemovedEvent,
    RenewTicket,
    Report,
    ReportAck,
    Request,
    Run,
    SetPolicy,
    SetWeights,
    ShardAddress,
    ShardFindings,
    ShardInfo,
    ShardStatus,
    Siblings,
    SiblingSpecs,
    Source,
    SpanBlocks,
    SpanMiss,
    SpansLacking,
    Status,
    StoreGrant,
    StoreRun,
    Suspect,
    SyncTables,
    TableChange,
    TablesSynced,
    TicketBody,
    Tier,
    TierUse,
    Tombstone,
    UnpinBlocks,
    WriteRequest,
    Written,
)
from kvcluster.core.messages.reports import PROOF_BYTES
from kvcluster.core.miss import Loss, Miss, MissReason
from kvcluster.core.shard.disk_recovery import RecoveredPage
from kvcluster.core.spec import KVSpec
from kvcluster.wire.page_files import LIFE_BYTES, Head

hashes: SearchStrategy[Any] = st.binary(min_size=32, max_size=32)
namespaces = hashes
calls = st.integers(0, 2**64 - 1).map(CallId)
tenants = st.text(max_size=20).map(Tenant)
quantities = st.integers(0, 2**62)
epochs: SearchStrategy[Any] = quantities
words = st.text(max_size=20)
losses = st.sampled_from(Loss)
attempts = st.builds(Attempt, holder=st.binary(min_size=16, max_size=16), counter=st.integers(0, 2**64 - 1))
blocks = st.lists(hashes, max_size=70).map(tuple)
depths = st.integers(0, limits.TOKENS_PER_SEQUENCE)
group_numbers = st.integers(0, limits.PARTS_PER_BLOCK - 1)


@st.composite
def _ranges(draw: st.DrawFn) -> tuple[int, int]:
    stop = draw(st.integers(1, 65_535))
    return draw(st.integers(0, stop - 1)), stop


parts = st.builds(lambda layers, heads: Part(*layers, *heads), _ranges(), _ranges())
needs = st.builds(
    Need,
    parts=st.lists(st.none() | parts, max_size=4).map(tuple),
    accept=losses,
    avoid=st.lists(words.map(ShardId), max_size=3).map(tuple),
)
keys = st.builds(PageKey, hash=hashes, group=group_numbers, part=parts)
misses = st.builds(Miss, reason=st.sampled_from(MissReason), detail=words)
refusals = st.builds(Refused, kind=st.sampled_from(RefusedKind), detail=words)
dones = st.builds(Done, ok=st.booleans())
addresses = st.builds(ShardAddress, shard=words, epoch=epochs, address=words, host=words, server_name=words)


@st.composite
def specs(draw: st.DrawFn) -> KVSpec:
    layers = iter(range(1_000_000))
    groups = []
    for _ in range(draw(st.integers(1, 3))):
        opaque = draw(st.booleans())
        heads = draw(st.integers(1, 8))
        dtypes = st.sampled_from([name for name in DTYPE_BYTES if opaque or name != "opaque"])
        names = draw(st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=3, unique=True))
        planes = tuple(Plane(name, heads, draw(st.integers(1, 64)), draw(dtypes)) for name in names)
        planes = tuple(replace(plane, packing=draw(words)) if plane.dtype == "opaque" else plane for plane in planes)
        own = tuple(next(layers) for _ in range(draw(st.integers(1, 5))))
        reuse = draw(st.sampled_from([PREFIX, LAST]) | st.integers(1, 2**32).map(window))
        groups.append(Group(own, planes, reuse))
    return KVSpec(
        model=draw(st.text(min_size=1, max_size=20)),
        weights="sha256:" + draw(words),
        block_tokens=draw(st.integers(1, 4096)),
        groups=tuple(groups),
        adapter=draw(words),
        rope=draw(words),
        extra=tuple(sorted(draw(st.dictionaries(words, words, max_size=3)).items())),
        private=draw(st.booleans()),
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    covers = []
    for group in range(draw(st.integers(0, 3))):
        sources = st.builds(
            Source, group=st.just(group), part=parts, shard=addresses, tier=st.sampled_from(Tier), loss=losses
        )
        covers.append(draw(st.none() | st.lists(sources, max_size=3).map(tuple)))
    return tuple(covers)


runs = st.lists(st.builds(Run, count=st.integers(1, 10), plan=plans()), max_size=5).map(tuple)
load_grants = st.builds(
    lambda found, hold_ns, miss: LoadGrant(sum(run.count for run in found), found, hold_ns, miss),
    runs,
    quantities,
    st.none() | misses,
)
_counts = st.integers(1, 10)
_writes = st.builds(StoreRun, count=_counts, decision=st.just(Decision.WRITE), shard=addresses, miss=st.none() | misses)
_leaves = st.builds(
    StoreRun,
    count=_counts,
    decision=st.sampled_from([decision for decision in Decision if decision is not Decision.WRITE]),
    shard=st.none(),
    miss=st.none() | misses,
)
store_grants = st.builds(StoreGrant, runs=st.lists(_writes | _leaves, max_size=5).map(tuple))
_hits = st.builds(BlockFate, count=_counts, plan=plans(), miss=st.none())
_lacks = st.builds(BlockFate, count=_counts, plan=st.none(), miss=misses)
explanations = st.builds(Explained, fates=st.lists(_hits | _lacks, max_size=5).map(tuple))

codecs = st.sampled_from(Codec)
counters = st.lists(st.tuples(words, st.integers(0, 2**64 - 1)), max_size=4).map(tuple)
process: dict[str, SearchStrategy[Any]] = {
    "node": words,
    "release": words,
    "config_hash": st.text("0123456789abcdef", max_size=16),
    "protocol": st.integers(0, 999_999),
}
infos = st.builds(
    ShardInfo,
    shard=words,
    epoch=epochs,
    address=words,
    host=words,
    capacity_bytes=quantities,
    free_bytes=quantities,
    pages=quantities,
    leases=quantities,
    counters=counters,
    draining=st.booleans(),
    others=st.sets(st.sampled_from([Tier.GPU, Tier.HOST, Tier.DISK])).flatmap(
        lambda tiers: st.tuples(*(st.builds(TierUse, st.just(tier), *[quantities] * 5) for tier in sorted(tiers)))
    ),
    trouble=words,
    writing_bytes=quantities,
    **process,
)
facts = st.builds(
    ProcessFacts,
    pool_bytes=quantities,
    limit_bytes=quantities,
    ports=st.lists(st.builds(ListeningPort, use=words, port=st.integers(0, 65_535), allowed=words), max_size=3).map(
        tuple
    ),
)
findings = st.builds(
    Findings,
    number=quantities,
    facts=facts,
    clock_ns=st.integers(-(2**63), 2**63 - 1),
    clock_error_ns=quantities,
    links=st.lists(st.builds(Link, shard=words, transport=words, trip_ns=quantities, why=words), max_size=3).map(tuple),
)
page_events = st.builds(
    PageEvent,
    namespace=namespaces,
    key=keys,
    parent=hashes,
    depth=depths,
    tier=st.sampled_from(Tier),
    loss=losses,
    codec=codecs,
)
gone_events = st.builds(RemovedEvent, namespace=namespaces, key=keys, corrupt=st.booleans(), tier=st.sampled_from(Tier))
purged_events = st.builds(PurgedEvent, number=quantities)
_filters = st.fixed_dictionaries(
    {"model": st.none() | words, "weights": st.none() | words, "adapter": st.none() | words}
)
tombstones = st.lists(
    st.builds(lambda number, tenant, chosen: Tombstone(number, tenant, **chosen), quantities, tenants, _filters),
    max_size=4,
).map(tuple)
owned_specs = st.lists(st.tuples(tenants, specs()), max_size=2).map(tuple)
evictions = st.builds(
    EvictOrder,
    number=quantities,
    blocks=st.lists(st.tuples(namespaces, hashes), max_size=5).map(tuple),
    tier=st.sampled_from(Tier),
)
moves = st.builds(
    MoveOrder,
    number=quantities,
    moves=st.lists(st.builds(Move, namespaces, hashes, st.sampled_from(Tier), codecs, st.booleans()), max_size=5).map(
        tuple
    ),
)
new_pages = st.lists(st.builds(NewPage, key=keys, parent=hashes, depth=depths, loss=losses), max_size=5).map(tuple)
_kinds = st.sampled_from([(Codec.RAW, Tier.RAM), *((codec, Tier.HOST) for codec in Codec)])
pulls = st.builds(
    lambda kind, **order: PullOrder(**order, codec=kind[0], into=kind[1]),
    _kinds,
    number=quantities,
    source=addresses,
    tenant=tenants,
    spec=specs(),
    pages=new_pages,
)


def _numbered(unnumbered: list[Order], first: int) -> tuple[Order, ...]:
    """By ascending numbers, as they are in one stream."""
    return tuple(replace(order, number=first + 3 * at) for at, order in enumerate(unnumbered))


orders = st.builds(_numbered, st.lists(evictions | moves | pulls, max_size=4), st.integers(1, 2**40))
progress = st.builds(
    lambda running, beyond: OrderProgress(max(running, default=0) + beyond, tuple(sorted(running))),
    st.sets(st.integers(1, 2**40), max_size=4),
    st.integers(0, 2**40),
)

read_requests = st.builds(
    ReadRequest,
    namespace=namespaces,
    attempt=attempts,
    epoch=epochs,
    wants=st.lists(
        keys.flatmap(
            lambda key: st.builds(
                lambda one, other: PageWant(key, min(one, other), max(one, other) + 1),
                st.integers(0, key.part.layers - 1),
                st.integers(0, key.part.layers - 1),
            )
        ),
        max_size=5,
    ).map(tuple),
    accept=losses,
    on_device=st.booleans(),
)
write_requests = st.builds(
    WriteRequest,
    namespace=namespaces,
    attempt=attempts,
    epoch=epochs,
    pages=new_pages,
    wait_ns=quantities,
)
span_blocks = st.builds(
    SpanBlocks,
    span=quantities,
    group=group_numbers,
    part=parts,
    depth=depths,
    hashes=st.lists(hashes, min_size=1, max_size=5).map(tuple),
    accept=losses,
)
attend_rows = st.builds(
    AttendRow,
    position=depths,
    tokens=st.integers(0, 4),
    spans=st.lists(st.integers(0, 9), max_size=4).map(tuple),
    subtrees=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 2**32 - 1)), max_size=4).map(tuple),
)
_finite = st.floats(0, 100, width=32)
attend_requests = st.builds(
    AttendRequest,
    attempt=attempts,
    epoch=epochs,
    layer=st.integers(0, 99),
    heads=st.integers(1, 64),
    dim=st.integers(1, 128),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    scale=_finite,
    rows=st.lists(attend_rows, max_size=4).map(tuple),
    softcap=_finite,
    window=st.integers(0, 2**32 - 1),
    latent_values=st.integers(0, 99),
    fused=st.booleans(),
)
attend_answers = (
    st.builds(Attended, nbytes=st.integers(0, limits.ATTEND_BYTES), loss=losses)
    | st.builds(SpansLacking, spans=st.lists(st.tuples(quantities, st.sampled_from(SpanMiss)), max_size=4).map(tuple))
    | st.builds(AttendDeclined, reason=st.sampled_from(DeclineReason), detail=words)
)
read_heads = st.lists(st.none() | misses, max_size=5)
write_heads = st.lists(st.none() | st.sampled_from(Written), max_size=5)
write_tails = st.lists(st.sampled_from(Written), max_size=5)


@st.composite
def tickets(draw: st.DrawFn) -> TicketBody:
    covered = draw(runs)
    granted = sum(run.count for run in covered)
    found = draw(st.lists(hashes, min_size=granted, max_size=granted))
    need = draw(needs)
    groups = len(need.parts)
    planned = tuple(Run(run.count, (run.plan + (None,) * groups)[:groups]) for run in covered)
    return TicketBody(draw(namespaces), draw(attempts), tuple(found), need, planned)


@st.composite
def page_files(draw: st.DrawFn) -> tuple[Head, dict[int, RecoveredPage]]:
    """The head of a file, and some pages that lie in it, by slot. The file begins at 0."""
    spec = draw(specs())
    group = draw(st.integers(0, len(spec.groups) - 1))
    codec = draw(codecs)
    layers, heads = (
        sorted(draw(st.sets(st.integers(0, most), min_size=2, max_size=2))) for most in spec.whole(group)[1::2]
    )
    part = Part(*layers, *heads)
    shape = Shape(core_codecs.page_bytes(codec, spec, group, part), part.layers)
    room = draw(st.integers(1, 5)) * (shape.slot_bytes + shape.record_bytes) + 4_096
    head = Head(
        draw(st.binary(min_size=LIFE_BYTES, max_size=LIFE_BYTES)), HEAD_BYTES + room, shape, draw(tenants), spec
    )
    found: dict[int, RecoveredPage] = {}
    for slot in draw(st.sets(st.integers(0, head.slots - 1))):
        found[slot] = RecoveredPage(
            namespace=head.namespace,
            key=PageKey(draw(hashes), group, part),
            parent=draw(hashes),
            depth=draw(depths),
            loss=draw(st.sampled_from([loss for loss in Loss if loss >= codec.loss])),
            codec=codec,
            nbytes=shape.nbytes,
            sums=draw(st.binary(min_size=shape.layers * SUM_BYTES, max_size=shape.layers * SUM_BYTES)),
            offset=shape.first_slot(head.slots) + slot * shape.slot_bytes,
        )
    return head, dict(sorted(found.items()))


errors = st.lists(st.tuples(namespaces, quantities), max_size=4).map(tuple)
settings = st.lists(st.tuples(words, words), max_size=4).map(tuple)
_told: dict[str, SearchStrategy[Any]] = {"info": infos, "coordinator": epochs, "specs": owned_specs}

engines = st.builds(
    EngineInfo,
    engine=st.text(min_size=1, max_size=20),
    name=words,
    model=words,
    weights=words,
    facts=st.lists(st.tuples(words, words), max_size=4).map(tuple),
    private=st.booleans(),
    withdrawn=quantities,
    ready=st.booleans(),
)
listed_engines = st.builds(Engines, known=st.lists(st.tuples(engines, quantities), max_size=3).map(tuple))


def _with_tokens(prepare: PrepareStore, block_tokens: int) -> PrepareStore:
    return replace(prepare, tokens=array("I", range(len(prepare.hashes) * block_tokens)) or ())


def _request(questions: SearchStrategy[Any]) -> SearchStrategy[Any]:
    return st.builds(Request, call=calls, tenant=tenants, namespace=st.none(), question=questions)


def _within(questions: SearchStrategy[Any]) -> SearchStrategy[Any]:
    """Asked about a namespace."""
    return st.builds(Request, call=calls, tenant=tenants, namespace=namespaces, question=questions)


sequences: SearchStrategy[Any] = st.binary(min_size=16, max_size=16)
_changes = st.builds(
    lambda change, private: replace(change, private=min(private, len(change.blocks))),
    st.builds(
        TableChange,
        sequence=sequences,
        keep=depths,
        blocks=blocks,
        parent=st.none() | sequences,
        closed=st.booleans(),
    ),
    st.integers(0, 70),
)

COORDINATOR_REQUESTS: dict[str, SearchStrategy[Any]] = {
    "Attach": _request(st.builds(Attach, spec=specs(), owner=st.none() | tenants)),
    "PrepareLoad": _within(
        st.builds(
            PrepareLoad,
            attempt=attempts,
            hashes=blocks,
            need=needs,
            hold=st.booleans(),
            awaited=st.none() | depths,
            again=st.booleans(),
        )
    ),
    "PrepareStore": _within(
        st.builds(
            PrepareStore,
            attempt=attempts,
            first=st.integers(0, limits.TOKENS_PER_SEQUENCE - 100),
            parent=hashes,
            run=hashes,
            hashes=blocks,
            parts=st.lists(st.tuples(group_numbers, parts), max_size=4).map(tuple),
            loss=losses,
            host=words,
        ).flatmap(lambda prepare: st.integers(0, 3).map(lambda count: _with_tokens(prepare, count)))
    ),
    "RenewTicket": _request(st.builds(RenewTicket, attempt=attempts)),
    "EndTicket": _request(st.builds(EndTicket, attempt=attempts)),
    "Explain": _within(st.builds(Explain, hashes=blocks, need=needs)),
    "Siblings": _within(st.builds(Siblings)),
    "GetNamespaces": _request(st.builds(GetNamespaces)),
    "RegisterEngine": _request(st.builds(RegisterEngine, info=engines)),
    "GetEngines": _request(st.builds(GetEngines)),
    "SetWeights": _request(st.builds(SetWeights, model=words, weights=words.map("sha256:{}".format), engine=words)),
    "SyncTables": _within(
        st.builds(
            SyncTables,
            holder=st.binary(min_size=16, max_size=16),
            number=st.integers(1, 2**62),
            changes=st.lists(_changes, max_size=5).map(tuple),
        )
    ),
    "PinBlocks": _within(
        st.builds(PinBlocks, hashes=blocks, ttl_ns=quantities, replicas=st.integers(1, limits.REPLICAS))
    ),
    "UnpinBlocks": _within(st.builds(UnpinBlocks, hashes=blocks)),
    "GetPins": _request(st.builds(GetPins, model=st.none() | words, skip=quantities)),
    "Purge": _request(st.builds(lambda chosen: Purge(**chosen), _filters)),
    "Drain": _request(st.builds(Drain, shard=words, leaving=st.booleans())),
    "Probe": _request(st.builds(Probe, number=quantities)),
    "SetPolicy": _request(st.builds(SetPolicy, settings=settings)),
    "GetStatus": _request(st.builds(GetStatus)),
    "IssueCredential": _request(
        st.builds(
            IssueCredential,
            epoch=epochs,
            proof=st.binary(min_size=PROOF_BYTES, max_size=PROOF_BYTES),
            generation=quantities,
            audience=epochs,
        )
    ),
    "Report": _request(
        st.builds(
            Report,
            **_told,
            first=quantities,
            events=st.lists(page_events | gone_events | purged_events, max_size=6).map(tuple),
            pressure=st.lists(st.tuples(words, quantities), max_size=3).map(tuple),
            orders=progress,
            samples=errors,
            findings=st.none() | findings,
        )
    ),
    "Inventory": _request(
        st.builds(
            Inventory,
            **_told,
            upto=quantities,
            chunk=st.integers(0, 2**32 - 1),
            last=st.booleans(),
            pages=st.lists(page_events, max_size=6).map(tuple),
            tombstones=tombstones,
        )
    ),
    "Ping": _request(st.none()),
}
SHARD_REQUESTS: dict[str, SearchStrategy[Any]] = {
    "Attach": _request(st.builds(AttachShard, spec=specs(), owner=st.none() | tenants)),
    "GetOffers": _request(st.builds(GetOffers)),
    "Flush": _request(st.builds(Flush, wait_ns=quantities)),
    "RegisterSpans": _within(
        st.builds(
            RegisterSpans,
            holder=st.binary(min_size=16, max_size=16),
            epoch=epochs,
            spans=st.lists(span_blocks, max_size=4).map(tuple),
            ended=st.lists(quantities, max_size=4).map(tuple),
        )
    ),
    "Suspect": _within(st.builds(Suspect, epoch=epochs, keys=st.lists(keys, max_size=5).map(tuple))),
    "Ping": _request(st.none()),
}

pinned = st.builds(BlocksPinned, blocks=st.integers(0, limits.BLOCKS_PER_CALL))
acks = st.builds(
    ReportAck,
    epoch=epochs,
    acked=quantities,
    inventory=st.booleans(),
    orders=orders,
    tombstones=tombstones,
    drain=st.booleans(),
    leave=st.none() | st.sampled_from(LeaveReason),
    probe=st.none() | st.builds(ProbeOrder, number=quantities, peers=st.lists(addresses, max_size=3).map(tuple)),
)
_shard_states = st.builds(
    ShardStatus, info=infos, state=words, seen_ns_ago=quantities, restarts=quantities, restarted_ns_ago=quantities
)
_pinned_runs = st.builds(
    PinnedRun,
    tenant=words,
    spec=specs(),
    before=hashes,
    first=st.integers(0, limits.TOKENS_PER_SEQUENCE),
    blocks=blocks.filter(bool),
    block_bytes=quantities,
    left_ns=quantities,
)
COORDINATOR_REPLIES: dict[str, SearchStrategy[Any]] = {
    "Attach": st.builds(
        Attached,
        namespace=namespaces,
        epoch=epochs,
        ticket_ttl_ns=quantities,
        run_blocks=st.integers(1, 2**32 - 1),
        shards=st.lists(addresses, max_size=3).map(tuple),
        wants_tokens=st.booleans(),
        read_only=st.booleans(),
    ),
    "PrepareLoad": load_grants,
    "PrepareStore": store_grants,
    "RenewTicket": dones,
    "EndTicket": dones,
    "Explain": explanations,
    "Siblings": st.builds(SiblingSpecs, specs=st.lists(specs(), max_size=3).map(tuple)),
    "GetNamespaces": st.builds(Namespaces, known=st.lists(st.tuples(specs(), quantities), max_size=3).map(tuple)),
    "RegisterEngine": st.builds(Registered, ttl_ns=quantities, weights=words),
    "GetEngines": listed_engines,
    "SetWeights": listed_engines,
    "SyncTables": st.builds(
        TablesSynced,
        ttl_ns=quantities,
        epoch=epochs,
        reopen=st.lists(sequences, max_size=5).map(tuple),
        refused=st.lists(sequences, max_size=5).map(tuple),
        forgotten=st.booleans(),
    ),
    "PinBlocks": pinned,
    "UnpinBlocks": pinned,
    "GetPins": st.builds(PinList, runs=st.lists(_pinned_runs, max_size=3).map(tuple), next=quantities, more=quantities),
    "Purge": st.builds(Purged, blocks=quantities),
    "Drain": dones,
    "SetPolicy": dones,
    "GetStatus": st.builds(
        Status,
        epoch=epochs,
        state=words,
        uptime_ns=quantities,
        namespaces=quantities,
        blocks=quantities,
        tickets=quantities,
        shards=st.lists(_shard_states, max_size=2).map(tuple),
        counters=counters,
        policy=settings,
        fallen=errors,
        sequences=quantities,
        claimed_blocks=quantities,
        private_blocks=quantities,
        tenant=words,
        waiting=st.lists(words, max_size=3).map(tuple),
        orphans=st.lists(st.tuples(words, words), max_size=3).map(tuple),
        **process,
    ),
    "Probe": st.builds(
        Probed,
        number=quantities,
        running=st.booleans(),
        coordinator=facts,
        shards=st.lists(st.builds(ShardFindings, shard=words, findings=findings), max_size=2).map(tuple),
        silent=st.lists(words, max_size=3).map(tuple),
    ),
    "IssueCredential": st.builds(IssuedCredential, token=words, valid_ns=quantities),
    "Report": acks,
    "Inventory": acks,
    "Ping": st.just(Done()),
}
SHARD_REPLIES: dict[str, SearchStrategy[Any]] = {
    "Attach": st.builds(AttachedShard, namespace=namespaces, epoch=epochs, lease_ttl_ns=quantities),
    "GetOffers": st.builds(
        Offers,
        epoch=epochs,
        offers=st.lists(st.builds(Offer, transport=words, address=words), max_size=4).map(tuple),
        refused=st.lists(st.tuples(words, words), max_size=4).map(tuple),
    ),
    "Flush": dones,
    "Suspect": dones,
    "RegisterSpans": dones,
    "Ping": st.just(Done()),
}
