"""What two sides of a conversation say about their versions of the protocol, and what they agree on."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

import kvcluster
from kvcluster.core.ids import Caller, CallId, Epoch, NamespaceId, Tenant
from kvcluster.core.messages import Attach, Attached, AttachedShard, AttachShard, Offers
from kvcluster.core.miss import OF_CLIENTS
from kvcluster.core.spec import KVSpec
from kvcluster.errors import ProtocolError, VersionError
from kvcluster.release import OLDEST_VERSION, PROTOCOL_VERSION, __version__
from kvcluster.wire.methods import COORDINATOR, SHARD
from kvcluster.wire.versions import (
    FIRST,
    METADATA,
    OURS,
    VERSIONS_KEY,
    Versions,
    agreed_version,
    decode_versions,
    encode_versions,
    versions_in,
)

SPEC = KVSpec.uniform(model="m", weights="sha256:0", num_layers=4, num_kv_heads=2, head_dim=8, dtype="float32")
NAMESPACE = NamespaceId(bytes(32))
RELEASES = [FIRST, *(Versions(newest - 1, newest, f"{newest}.0") for newest in range(2, 7))]
"""The releases of the versions 1 to 6."""


def test_this_release_speaks_two_versions() -> None:
    assert Versions(OLDEST_VERSION, OLDEST_VERSION + 1, __version__) == OURS == versions_in(METADATA)


@pytest.mark.parametrize(("caller", "server"), list(itertools.product(RELEASES, RELEASES)))
def test_releases_next_to_each_other_agree_and_all_others_are_told_which_to_upgrade(
    caller: Versions, server: Versions
) -> None:
    if abs(caller.newest - server.newest) <= 1:
        assert agreed_version(caller=caller, server=server) == min(caller.newest, server.newest)
        return
    older, spoken = ("caller", server.oldest) if caller.newest < server.newest else ("server", caller.oldest)
    with pytest.raises(VersionError, match=f"upgrade the {older} to a release that speaks version {spoken}") as told:
        agreed_version(caller=caller, server=server)
    for side in (caller, server):
        assert str(side) in str(told.value)


def test_a_refusal_names_the_releases_and_the_versions_of_both_sides() -> None:
    with pytest.raises(VersionError) as told:
        agreed_version(caller=FIRST, server=Versions(2, 3, "0.3.0"))
    assert str(told.value) == (
        "the server is kvcluster 0.3.0, which speaks versions 2 to 3 of the protocol, and the caller is a release of "
        "kvcluster that does not name itself, which speaks version 1: upgrade the caller to a release that speaks "
        "version 2"
    )


def test_a_side_that_says_nothing_is_of_version_1() -> None:
    assert versions_in([("user-agent", "grpc-python/1"), ("authorization", "Bearer x")]) == FIRST


def test_of_two_entries_the_first_holds() -> None:
    assert versions_in([(VERSIONS_KEY, "1 2 a"), (VERSIONS_KEY, "7 8 b")]) == Versions(1, 2, "a")


@pytest.mark.parametrize("versions", RELEASES[1:])
def test_versions_arrive_as_they_were_said(versions: Versions) -> None:
    assert decode_versions(encode_versions(versions)) == versions


@pytest.mark.parametrize(
    "value",
    [
        *(
            "",
            "1",
            "1 2",
            "1 2 ",
            " 1 2 a",
            "1  2 a",
            "1 2 a b",
            "-1 2 a",
            "+1 2 a",
            "1.0 2 a",
            "\u0661 2 a",
            "1 2 a\n",
        ),
        *("2 1 a", "0 1 a", "0 0 a", "1 1000000 a", "9" * 5_000 + " 1 a", "1 2 " + "a" * 65, "1 2 [red]", "one two a"),
    ],
)
def test_versions_that_cannot_be_are_refused(value: str) -> None:
    with pytest.raises(ProtocolError, match="does not name versions of kvcluster's protocol") as told:
        decode_versions(value)
    assert not isinstance(told.value, VersionError) and len(str(told.value)) < 300


def test_a_range_that_lies_gives_no_more_than_what_both_speak() -> None:
    assert agreed_version(caller=Versions(1, 999_999, "x"), server=OURS) == PROTOCOL_VERSION
    assert agreed_version(caller=Versions(1, OLDEST_VERSION, "x"), server=OURS) == OLDEST_VERSION


def test_no_server_names_the_reason_that_only_clients_of_this_release_know() -> None:
    """Older releases refuse a reason that they do not know. A coordinator that answers is not lost."""
    package = Path(kvcluster.__file__).parent
    servers = [path for part in ("core", "runtime", "transport", "actors") for path in (package / part).rglob("*.py")]
    for reason in OF_CLIENTS:
        named = {path.name for path in servers if reason.name in path.read_text()}
        assert named == {"miss.py"}


# ------------------------------------------------------------------------------------ versions in messages


def caller(version: int) -> Caller:
    return Caller(Tenant("t"), version=version)


@pytest.mark.parametrize(("table", "question"), [(COORDINATOR, Attach(SPEC)), (SHARD, AttachShard(SPEC))])
def test_a_question_may_be_of_the_agreed_version_or_an_older_one(table, question) -> None:  # type: ignore[no-untyped-def]
    method = table["Attach"]
    for version in range(PROTOCOL_VERSION + 3):
        data = method.encode_request(question, version=version)
        for agreed in (OLDEST_VERSION, PROTOCOL_VERSION):
            if 1 <= version <= agreed:
                assert method.decode_request(data, CallId(1), caller(agreed)).question == question
            else:
                with pytest.raises(VersionError, match=f"a question \\(Attach\\) of version {version} came"):
                    method.decode_request(data, CallId(1), caller(agreed))


ANSWERS = [
    (COORDINATOR["Attach"], Attached(NAMESPACE, Epoch(1), 1, 1)),
    (SHARD["Attach"], AttachedShard(NAMESPACE, Epoch(1), 1)),
    (SHARD["GetOffers"], Offers(Epoch(1))),
]


@pytest.mark.parametrize(("method", "reply"), ANSWERS)
def test_an_answer_is_of_the_agreed_version_and_no_other(method, reply) -> None:  # type: ignore[no-untyped-def]
    for agreed in (OLDEST_VERSION, PROTOCOL_VERSION):
        answered = method.decode_reply(method.encode_reply(reply, agreed), agreed)
        assert answered == reply or answered == Offers(Epoch(1), protocol_version=agreed)
        for other in {0, 1, OLDEST_VERSION, PROTOCOL_VERSION, PROTOCOL_VERSION + 1, 2**32 - 1} - {agreed}:
            with pytest.raises(VersionError, match=f"an answer .* of version {other} came"):
                method.decode_reply(method.encode_reply(reply, other), agreed)
