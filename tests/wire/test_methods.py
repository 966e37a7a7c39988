"""Every question and answer arrives as it was sent, through the tables that servers and clients use."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from kvcluster.config import CoordinatorConfig
from kvcluster.core import limits
from kvcluster.core.coordinator.coordinator import Coordinator
from kvcluster.core.coordinator.coordinator_state import UNKNOWN
from kvcluster.core.groups import Part
from kvcluster.core.ids import Attempt, BlockHash, Caller, CallId, Epoch, Holder, NamespaceId, ShardId, Tenant
from kvcluster.core.messages import (
    Answer,
    AttachedShard,
    BlocksPinned,
    Decision,
    Done,
    GetStatus,
    LeaveReason,
    LoadGrant,
    Need,
    Offer,
    Offers,
    PageEvent,
    PageKey,
    PrepareLoad,
    RefusedKind,
    Report,
    Request,
    Run,
    ShardAddress,
    ShardInfo,
    Siblings,
    Source,
    Tier,
    Written,
)
from kvcluster.core.miss import Loss, MissReason
from kvcluster.errors import CallerError, LimitError, ProtocolError, VersionError
from kvcluster.release import PROTOCOL_VERSION
from kvcluster.wire import answers, common, reports, shard
from kvcluster.wire.methods import COORDINATOR, SHARD, Method, VersionQuestion
from kvcluster.wire.v1 import common_pb2, coordinator_pb2, shard_pb2
from tests.wire import strategies as of

CALL, TENANT = CallId(7), Tenant("t")
SERVICES: list[tuple[Mapping[str, Method], Mapping[str, SearchStrategy[Any]], Mapping[str, SearchStrategy[Any]]]] = [
    (COORDINATOR, of.COORDINATOR_REQUESTS, of.COORDINATOR_REPLIES),
    (SHARD, of.SHARD_REQUESTS, of.SHARD_REPLIES),
]
METHODS = [
    pytest.param(method, questions[name], answers[name], id=method.path)
    for table, questions, answers in SERVICES
    for name, method in table.items()
]


def _same(one: object, other: object) -> bool:
    """Equal, and of the same types all the way down: a tuple equals a Part, and 0 equals Loss.EXACT."""
    return one == other and repr(one) == repr(other)


@pytest.mark.parametrize(("method", "questions", "answers"), METHODS)
@given(data=st.data())
def test_a_question_arrives_as_it_was_asked(
    method: Method, questions: SearchStrategy[Any], answers: SearchStrategy[Any], data: st.DataObject
) -> None:
    asked = data.draw(questions)
    sent = method.encode_request(asked.question, asked.namespace)
    assert _same(method.decode_request(sent, asked.call, Caller(asked.tenant)), asked)


@pytest.mark.parametrize(("method", "questions", "answers"), METHODS)
@given(data=st.data())
def test_an_answer_arrives_as_it_was_given(
    method: Method, questions: SearchStrategy[Any], answers: SearchStrategy[Any], data: st.DataObject
) -> None:
    given_ = data.draw(answers | of.refusals)
    assert _same(method.decode_reply(method.encode_reply(given_)), given_)


@given(asked=of.COORDINATOR_REQUESTS["PrepareLoad"], tenant=of.tenants, call=of.calls)
def test_neither_tenant_nor_call_travels(asked: Request[PrepareLoad], tenant: Tenant, call: CallId) -> None:
    method = COORDINATOR["PrepareLoad"]
    data = method.encode_request(asked.question, asked.namespace)
    assert method.decode_request(data, call, Caller(tenant)) == Request(call, tenant, asked.namespace, asked.question)


@pytest.mark.parametrize("name", ["PrepareLoad", "PrepareStore", "Explain", "Siblings", "PinBlocks", "UnpinBlocks"])
@given(data=st.data())
def test_a_question_that_travels_with_a_namespace_is_held_to_those_of_its_tenant(
    name: str, data: st.DataObject
) -> None:
    asked = data.draw(of.COORDINATOR_REQUESTS[name])
    core = Coordinator(Epoch(1), CoordinatorConfig(), membership_ttl_ms=1, expected=1, now=0)
    assert core.step(asked, 0) == [Answer(asked.call, UNKNOWN)]


def test_an_answer_to_another_question_is_refused() -> None:
    data = COORDINATOR["PinBlocks"].encode_reply(BlocksPinned(3))
    with pytest.raises(ProtocolError, match="PrepareLoad was answered by BlocksPinned, not LoadGrant"):
        COORDINATOR["PrepareLoad"].decode_reply(data)


@pytest.mark.parametrize("method", [COORDINATOR["RenewTicket"], SHARD["Flush"]])
def test_an_answer_of_an_unknown_kind_is_refused(method: Method) -> None:
    later = b"\xa2\x06\x00"  # field 100, empty
    for data in (b"", later):
        with pytest.raises(ProtocolError, match="not known here"):
            method.decode_reply(data)


def test_answering_or_asking_the_wrong_thing_is_our_own_mistake() -> None:
    mistakes: list[Callable[[], object]] = [
        lambda: COORDINATOR["PrepareLoad"].encode_reply(Done()),
        lambda: COORDINATOR["PrepareLoad"].encode_request(None, NamespaceId(bytes(32))),
        lambda: COORDINATOR["Siblings"].encode_request(Siblings()),
        lambda: COORDINATOR["GetStatus"].encode_request(GetStatus(), NamespaceId(bytes(32))),
        lambda: COORDINATOR["Ping"].encode_request(GetStatus()),
        lambda: SHARD["Ping"].encode_reply(BlocksPinned(1)),
        lambda: answers.REPLY.encode(AttachedShard(NamespaceId(bytes(32)), Epoch(1), 1)),
        lambda: shard.REPLY.encode(BlocksPinned(1)),
    ]
    for mistake in mistakes:
        with pytest.raises(AssertionError):
            mistake()


def test_a_ping_asks_nothing_and_costs_nothing() -> None:
    for table in (COORDINATOR, SHARD):
        ping = table["Ping"]
        assert ping.encode_request(None) == b"" and len(ping.encode_reply(Done())) == 4
        with pytest.raises(ProtocolError, match="not a valid PingRequest"):
            ping.decode_request(b"x", CALL, Caller(TENANT))


def test_versions_are_compared_of_a_question_that_names_nothing() -> None:
    question, asked = VersionQuestion(), COORDINATOR["Attach"]
    with pytest.raises(CallerError, match="model must be named"):
        asked.decode_request(question.encode_request(None), CALL, Caller(TENANT))
    newer = coordinator_pb2.AttachRequest(protocol_version=PROTOCOL_VERSION + 1).SerializeToString()
    with pytest.raises(VersionError, match="upgrade this side"):
        asked.decode_request(newer, CALL, Caller(TENANT))


def _sent(reply: Offers) -> object:
    return SHARD["GetOffers"].decode_reply(SHARD["GetOffers"].encode_reply(reply))


def test_a_shard_speaks_of_a_bounded_number_of_transports() -> None:
    offers = tuple(Offer(f"t{number}", "", number, bytes(number)) for number in range(limits.TRANSPORTS))
    reply = Offers(Epoch(1), offers)
    assert _sent(reply) == reply
    large = Offer("t", "", details=bytes(limits.OFFER_BYTES + 1))
    with pytest.raises(LimitError, match="bytes of an offer's details"):
        _sent(Offers(Epoch(1), (large,)))
    with pytest.raises(LimitError, match="transports of a shard: 17 exceeds the limit of 16"):
        _sent(Offers(Epoch(1), offers, (("one more", "why"),)))


# ------------------------------------------------------------------------------- what the bytes cost


def _grant(blocks: int) -> LoadGrant:
    """As of a cluster of two shards that take turns, 64 blocks each; every run has a plan object of its own."""
    runs = []
    for run in range(blocks // 64):
        shard_ = ShardAddress(ShardId(f"shard-{run % 2}"), Epoch(1_700_000_000_000_000_000), "10.0.0.1:7071", "a-host")
        part = Part(0, 32, 0, 8)
        runs.append(Run(64, ((Source(0, part, shard_, Tier.RAM, Loss.EXACT),),)))
    return LoadGrant(blocks, tuple(runs), 1, None)


def test_plans_travel_once_and_are_built_once() -> None:
    method = COORDINATOR["PrepareLoad"]
    data = method.encode_reply(_grant(8_192))
    assert len(data) < 600
    grant = method.decode_reply(data)
    assert isinstance(grant, LoadGrant)
    assert len({id(run.plan) for run in grant.runs}) == 2


def test_a_hash_costs_its_32_bytes() -> None:
    hashes = tuple(BlockHash(os.urandom(32)) for _ in range(512))
    need = Need((Part(0, 32, 0, 8),))
    attempt = Attempt(Holder(bytes(16)), 2**40)
    load = PrepareLoad(attempt, hashes, need)
    assert len(COORDINATOR["PrepareLoad"].encode_request(load, NamespaceId(bytes(32)))) < 32 * 512 + 128


def test_a_reported_page_costs_its_two_hashes_and_little_else() -> None:
    hashes = [BlockHash(os.urandom(32)) for _ in range(4_096)]
    part = Part(0, 32, 0, 8)
    events = tuple(
        PageEvent(NamespaceId(bytes(32)), PageKey(block, 0, part), hashes[i - 1], i, Tier.RAM, Loss.EXACT)
        for i, block in enumerate(hashes)
    )
    info = ShardInfo(ShardId("s"), Epoch(1), "a:1", "h", 1, 1, 1, 1)
    report = Report(info, Epoch(1), 1, events)
    assert len(COORDINATOR["Report"].encode_request(report)) / len(events) < 73


def test_events_of_one_namespace_and_part_share_them() -> None:
    page = PageEvent(
        NamespaceId(b"n" * 32), PageKey(BlockHash(bytes(32)), 0, Part(0, 1, 0, 1)), BlockHash(bytes(32)), 0,
        Tier.RAM, Loss.EXACT,
    )  # fmt: skip
    info = ShardInfo(ShardId("s"), Epoch(1), "a:1", "h", 1, 1, 1, 1)
    method = COORDINATOR["Report"]
    data = method.encode_request(Report(info, Epoch(1), 1, (page, page)))
    report = method.decode_request(data, CALL, Caller(TENANT)).question
    assert isinstance(report, Report)
    one, other = report.events
    assert isinstance(one, PageEvent) and isinstance(other, PageEvent)
    assert one.namespace is other.namespace and one.key.part is other.key.part


# --------------------------------------------------------------------------- the proto files and we


@pytest.mark.parametrize(
    ("table", "service"),
    [
        (COORDINATOR, coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"]),
        (SHARD, shard_pb2.DESCRIPTOR.services_by_name["Shard"]),
    ],
)
def test_the_tables_are_the_services_of_the_proto_files(table: Mapping[str, Method], service: Any) -> None:
    assert {method.path for method in table.values()} == {f"/{service.full_name}/{rpc.name}" for rpc in service.methods}
    assert [method.name for method in table.values()] == list(table)


@pytest.mark.parametrize(
    ("codec", "ours", "theirs"),
    [
        (common.LOSS, Loss, common_pb2.Loss),
        (common.TIER, Tier, common_pb2.Tier),
        (common.REASON, MissReason, common_pb2.MissReason),
        (common.REFUSED_KIND, RefusedKind, common_pb2.RefusedKind),
        (answers.DECISION, Decision, coordinator_pb2.Decision),
        (shard.WRITTEN, Written, shard_pb2.Written),
        (reports.LEAVE_REASON, LeaveReason, coordinator_pb2.LeaveReason),
    ],
)
def test_every_value_of_an_enum_travels_but_unspecified(codec: Any, ours: Any, theirs: Any) -> None:
    known = {name: number for name, number in theirs.items() if not name.endswith("_UNSPECIFIED")}
    assert sorted(codec.decode_all(known.values()), key=list(ours).index) == list(ours)
    for number in {1_000} if codec is reports.LEAVE_REASON else {0, 1_000} - set(known.values()):
        with pytest.raises(ProtocolError, match=f"{ours.__name__} {number} is not known here"):
            codec.decode(number)


def _repeated_messages(kind: Any) -> Iterator[str]:
    message: Any = getattr(_module(kind), kind.name)()
    for field in kind.fields:
        if field.message_type is not None:
            if hasattr(getattr(message, field.name), "extend"):
                yield f"{kind.name}.{field.name}"
            else:
                yield from _repeated_messages(field.message_type)


def _module(kind: Any) -> Any:
    modules = (common_pb2, coordinator_pb2, shard_pb2)
    return next(module for module in modules if module.DESCRIPTOR.name == kind.file.name)


def test_requests_hold_no_repeated_messages() -> None:
    files = (coordinator_pb2.DESCRIPTOR, shard_pb2.DESCRIPTOR)
    requests = [kind for file in files for name, kind in file.message_types_by_name.items() if name.endswith("Request")]
    assert len(requests) == 30
    assert [found for kind in requests for found in _repeated_messages(kind)] == []
    assert list(_repeated_messages(common_pb2.Spec.DESCRIPTOR)) == ["Spec.groups"], "the check sees"


def test_generated_code_imports_under_the_installed_protobuf_without_a_warning() -> None:
    root = Path(__file__).parents[2]
    code = "import kvcluster.wire.methods, kvcluster.wire.frames; print('fine')"
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("fine\n", "")
