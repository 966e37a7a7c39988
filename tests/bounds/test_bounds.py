"""No message or port without a row of docs/bounds.md, and no row that says another bound than the code."""

from __future__ import annotations

import pytest

from kvcluster.wire.methods import COORDINATOR, SHARD
from kvcluster.wire.socket_frames import FrameKind
from kvcluster.wire.v1 import shard_pb2
from tests.bounds import handshakes, table
from tests.bounds.filler import fills
from tests.bounds.measure import Figures, bench
from tests.bounds.messages import FOR_SHARDS, FRAMES_WITHOUT_A_ROW, MESSAGES


def test_every_method_and_frame_has_a_row() -> None:
    methods = {*COORDINATOR, *(f"Shard.{name}" for name in (*SHARD, "Read", "Write"))} - FOR_SHARDS
    frames = {f"frame {kind.name}" for kind in FrameKind if kind not in FRAMES_WITHOUT_A_ROW}
    assert methods | frames | {"subscription to KV events", "GET of metrics"} == set(MESSAGES)


@pytest.mark.parametrize("name", MESSAGES)
def test_every_row_is_on_the_page_and_was_measured(name: str) -> None:
    _, sender, nbytes, *measured, held = table.rows()[name]
    message = MESSAGES[name]
    assert (sender, nbytes, held) == (message.sender, table.nbytes(message.nbytes), message.held)
    assert len(measured) == 5
    assert all(float(cell.replace(",", "")) >= 0 for cell in measured)


def test_every_way_of_connecting_to_every_port_is_on_the_page() -> None:
    rows = handshakes.rows()
    assert list(rows) == [(port, way) for port in handshakes.PORTS for way in handshakes.WAYS]
    for (port, _), (_, _, *measured, held) in rows.items():
        assert held == handshakes.PORTS[port].held
        assert len(measured) == 5
        assert all(float(cell.replace(",", "")) >= 0 for cell in measured)


def test_what_is_too_much_of_connections_is_said() -> None:
    port = handshakes.PORTS["tcp"]
    most = handshakes.Cost("tcp", "send nothing", port.most, port.threads, handshakes.KIB * 1_024 * port.most)
    assert not most.failures()
    more = handshakes.Cost("tcp", "send nothing", port.most + 1, port.threads + 1, 100 * 2**20, left=3)
    assert [failure.partition(": ")[2] for failure in more.failures()] == [
        "201 at once",
        "201 threads",
        "100 MiB",
        "3 were open after 20 s",
    ]


def test_a_message_is_filled_at_every_field_that_can_be_long_and_no_further_than_its_bound() -> None:
    full = dict(fills(shard_pb2.RegisterSpansRequest.DESCRIPTOR, 10_000))
    assert {"namespace", "ended", "spans.span", "spans.place.table", "spans.hashes.items"} <= set(full)
    assert all(5_000 < len(data) <= 10_000 for data in full.values())
    parsed = shard_pb2.RegisterSpansRequest.FromString(full["spans.place.table"])
    assert len(parsed.spans.place.table) > 4_000
    assert not parsed.ended


def test_what_is_too_much_is_said() -> None:
    much = Figures("Ping", "valid", 0, table.MEMORY + 1, 0, 1.0, 1.0, {"valid": "OK", "full of it": "INTERNAL"})
    assert table.failures(much) == [
        "Ping: eight at once took 64.0 MiB (valid)",
        "Ping, full of it: answered with INTERNAL",
    ]
    assert not table.failures(Figures("Ping", "valid", 0, 0, 0, 1.0, 1.0, {"valid": "OK"}))


@pytest.mark.nightly
def test_the_worst_of_each_message_is_answered_within_its_memory() -> None:
    with bench() as measuring:
        broken = [failure for name in MESSAGES for failure in table.failures(measuring.measure(name, at_once=2))]
    assert not broken


@pytest.mark.nightly
def test_strangers_who_connect_are_bounded_at_every_port() -> None:
    with bench(tls=True) as measuring:
        costs = [cost for port in handshakes.PORTS for cost in handshakes.measure(measuring, port, many=300)]
    assert not [failure for cost in costs for failure in cost.failures()]
