"""What the doctor makes of what the processes of a cluster say, by values; and how it is shown."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvcluster.cli.cluster_doctor import HERE, judged
from kvcluster.cli.doctor_view import add_diagnosis
from kvcluster.cli.text_page import TextPage
from kvcluster.client.status import status_dict
from kvcluster.core.ids import Epoch, ShardId
from kvcluster.core.messages import (
    Findings,
    Link,
    ListeningPort,
    Probed,
    ProcessFacts,
    ShardFindings,
    ShardInfo,
    ShardStatus,
    Status,
)

GIB = 2**30
FACTS = ProcessFacts(GIB, 8 * GIB, (ListeningPort("grpc", 7100, "7100-7163"), ListeningPort("tcp", 7101, "7100-7163")))
COORDINATOR = ProcessFacts(0, 8 * GIB, (ListeningPort("workers", 7070, "7070"),))
A, B = ShardId("shard-0"), ShardId("shard-1")
TO_A = (Link(A, "grpc", 800_000), Link(A, "tcp", 100_000))
TO_B = (Link(B, "grpc", 900_000), Link(B, "tcp", 200_000))
FINE = {A: Findings(7, FACTS, 300_000, 900_000, TO_B), B: Findings(7, FACTS, 0, 900_000, TO_A)}


def info(name: ShardId, number: int, **more: Any) -> ShardInfo:
    process = {"node": f"n{number}", "release": "0.3.0", "config_hash": "c0ffee", "protocol": 3} | more
    place = f"n{number}@m{number}/1"
    return ShardInfo(name, Epoch(1), f"10.0.0.{number}:7100", place, GIB, GIB, 0, 0, **process)


def status(*shards: ShardInfo, lost: tuple[ShardInfo, ...] = ()) -> dict[str, Any]:
    known = [ShardStatus(shard, "up", 0) for shard in shards] + [ShardStatus(shard, "lost", 0) for shard in lost]
    process = {"node": "n0", "release": "0.3.0", "config_hash": "c0ffee", "protocol": 3}
    return status_dict(Status(Epoch(1), "serving", 1, 0, 0, 0, tuple(known), (), **process))  # type: ignore[arg-type]


def judge(found: dict[ShardId, Findings], seen: dict[str, Any] | None = None) -> dict[str, Any]:
    rows = tuple(ShardFindings(shard, findings) for shard, findings in found.items())
    here = [{"shard": "shard-0", "transports": [{"transport": "grpc", "works": True, "trip_ms": 0.5, "why": None}]}]
    seen = status(info(A, 1), info(B, 2)) if seen is None else seen
    return judged(seen, Probed(7, False, COORDINATOR, rows, ()), here, "10.0.0.9:7070")


def the_problem(found: dict[str, Any]) -> dict[str, Any]:
    (problem,) = found["problems"]
    assert isinstance(problem, dict)
    return problem


def test_a_cluster_in_which_all_is_well_has_no_problem() -> None:
    found = judge(FINE)
    assert found["problems"] == []
    assert [row["process"] for row in found["processes"]] == ["coordinator", "shard-0", "shard-1"]
    assert found["processes"][1]["clock_ms"] == 0.3
    tried = {(pair["source"], pair["target"], pair["transport"]): pair["trip_ms"] for pair in found["pairs"]}
    assert tried == {
        (HERE, "shard-0", "grpc"): 0.5,
        ("shard-0", "shard-1", "grpc"): 0.9,
        ("shard-0", "shard-1", "tcp"): 0.2,
        ("shard-1", "shard-0", "grpc"): 0.8,
        ("shard-1", "shard-0", "tcp"): 0.1,
    }


def test_a_way_that_fails_is_named_with_the_port_to_open() -> None:
    cut = replace(FINE[A], links=(Link(B, "grpc", 0, "no answer within 2 s"),))
    problem = the_problem(judge(FINE | {A: cut}))
    assert problem["severe"]
    assert problem["what"] == (
        "shard-0 (10.0.0.1:7100) does not reach shard-1 (10.0.0.2:7100) over grpc: no answer within 2 s"
    )
    assert "TCP port 7100 from 10.0.0.1 to 10.0.0.2" in problem["advice"]


def test_a_pair_that_fails_both_ways_is_one_problem() -> None:
    cut = {
        A: replace(FINE[A], links=(Link(B, "grpc", 0, "no answer within 2 s"),)),
        B: replace(FINE[B], links=(Link(A, "grpc", 0, "connection refused"),)),
    }
    problem = the_problem(judge(cut))
    assert "shard-0 (10.0.0.1:7100) and shard-1 (10.0.0.2:7100) do not reach each other over grpc" in problem["what"]
    assert "from 10.0.0.1 to 10.0.0.2, and port 7100 from 10.0.0.2 to 10.0.0.1" in problem["advice"]


def test_tcp_that_fails_where_grpc_works_names_the_range() -> None:
    cut = replace(FINE[A], links=(TO_B[0], Link(B, "tcp", 0, "no answer within 2 s")))
    problem = the_problem(judge(FINE | {A: cut}))
    assert "does not reach shard-1 (10.0.0.2:7100) over tcp" in problem["what"]
    assert "server.shard_ports" in problem["advice"]


@pytest.mark.parametrize(
    ("clock_ns", "error_ns", "said"),
    [
        (3_600 * 10**9, 10**6, "n1 (shard-0, 10.0.0.1:7100) is 60.0 min ahead of the coordinator's"),
        (-3_600 * 10**9, 10**6, "is 60.0 min behind the coordinator's"),
        (-1_500_000_000, 10**6, "is 1.5 s behind the coordinator's"),
    ],
)
def test_a_clock_that_is_off_is_named(clock_ns: int, error_ns: int, said: str) -> None:
    off = replace(FINE[A], clock_ns=clock_ns, clock_error_ns=error_ns)
    problem = the_problem(judge(FINE | {A: off}))
    assert not problem["severe"]
    assert said in problem["what"]


def test_where_all_shards_agree_it_is_the_coordinator_s_clock_that_is_off() -> None:
    ahead = {shard: replace(findings, clock_ns=3_600 * 10**9 + n) for n, (shard, findings) in enumerate(FINE.items())}
    problem = the_problem(judge(ahead))
    assert "of n0 (coordinator, 10.0.0.9:7070) is 60.0 min behind that of every shard" in problem["what"]
    apart = {A: ahead[A], B: replace(FINE[B], clock_ns=-3_600 * 10**9)}
    said = [problem["what"] for problem in judge(apart)["problems"]]
    assert [line.rpartition("the coordinator's")[1] for line in said] == ["the coordinator's"] * 2


@pytest.mark.parametrize(("clock_ns", "error_ns"), [(900_000_000, 10**6), (3 * 10**9, 2_500_000_000), (10**12, 0)])
def test_a_clock_within_what_can_be_measured_is_not(clock_ns: int, error_ns: int) -> None:
    off = replace(FINE[A], clock_ns=clock_ns, clock_error_ns=error_ns)
    assert judge(FINE | {A: off})["problems"] == []


def test_a_configuration_or_release_of_its_own_is_named() -> None:
    seen = status(info(A, 1, config_hash="bad"), info(B, 2))
    problem = the_problem(judge(FINE, seen))
    assert problem["what"] == "shard-0 differs: configuration bad, the coordinator c0ffee"


def test_pools_that_do_not_fit_their_machine_are_named_together() -> None:
    tight = replace(FACTS, pool_bytes=4 * GIB)
    found = {A: replace(FINE[A], facts=tight), B: replace(FINE[B], facts=tight)}
    assert judge(found)["problems"] == []  # on machines of their own
    together = status(info(A, 1), replace(info(B, 2), host="n1@m1/1"))
    problem = the_problem(judge(found, together))
    assert "the pools of shard-0, shard-1 on n1 take 8 GiB of 8 GiB of memory" in problem["what"]


def test_a_port_outside_its_range_is_named() -> None:
    outside = replace(FACTS, ports=(ListeningPort("grpc", 9_999, "7100-7163"), ListeningPort("tcp", 4, "0")))
    problem = the_problem(judge(FINE | {A: replace(FINE[A], facts=outside)}))
    assert problem["what"] == "shard-0 listens on port 9999 for grpc, outside 7100-7163"


def test_a_shard_of_an_older_release_is_said_not_to_know() -> None:
    seen = status(info(A, 1), info(B, 2, protocol=0, release=""))
    found = judge({A: replace(FINE[A], links=())}, seen)
    old = next(problem for problem in found["problems"] if "does not know" in problem["what"])
    assert old["what"] == "shard-1 does not know how to try the others: its release is an older one"
    assert not old["severe"]


def test_a_shard_that_is_silent_or_lost_is_severe() -> None:
    silent = the_problem(judge({A: FINE[A]}))
    assert silent["severe"]
    assert silent["what"] == "shard-1 has reported nothing of what it tried"
    lost = the_problem(judge({A: replace(FINE[A], links=())}, status(info(A, 1), lost=(info(B, 2),))))
    assert lost["severe"]
    assert lost["what"].startswith("shard-1 is lost")


def test_a_shard_without_its_disk_tier_is_severe() -> None:
    trouble = "the shard runs without its disk tier: no room"
    problem = the_problem(judge(FINE, status(info(A, 1, trouble=trouble), info(B, 2))))
    assert problem["severe"]
    assert problem["what"] == f"shard-0 is degraded: {trouble}"


def test_what_is_found_is_shown_as_a_table_and_a_matrix() -> None:
    cut = replace(FINE[A], links=(Link(B, "grpc", 0, "no answer within 2 s"),), clock_ns=-(10**13))
    coordinator = {"reachable": True, "protocol_version": 3, "credential": "accepted", "state": "serving"}
    found = {
        "address": "10.0.0.9:7070",
        "coordinator": coordinator | {"apart": [], "why": None},
        "tls": None,
        "shards": [],
        "cluster": judge({**FINE, A: cut}),
        "healthy": True,
        "verdict": "all 2 shard(s) can be reached: 2 by tcp",
    }
    page = TextPage(None, colour=False)
    add_diagnosis(page, found)
    said = str(page)
    rows = {line.split()[0]: line for line in said.splitlines() if line}
    assert "-166.7 min" in said
    assert "workers 7070" in rows["coordinator"]
    assert "grpc fails" in said
    assert "grpc 0.80, tcp 0.10" in said
    assert "what to do: open in the firewalls between them TCP port 7100" in said
