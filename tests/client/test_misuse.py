"""Misuse is a CallerError that says what was wrong, before anything is asked or moved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvcluster.client.client import Client
from kvcluster.core import limits
from kvcluster.core.groups import Part
from kvcluster.core.ids import BlockHash
from kvcluster.errors import CallerError, LimitError, ProtocolError, SpecError
from kvcluster.testing import MemoryCluster
from kvcluster.transfers.layouts import Buffers, Paged
from kvcluster.transfers.tickets import Ticket
from kvcluster.transport.base import Deadline
from tests.client.build import (
    BLOCK,
    BOUND_S,
    DIM,
    HEADS,
    LAYERS,
    PAGE_BYTES,
    SPEC,
    Hold,
    Port,
    Steps,
    counters,
    kv,
    prompt,
    room,
    watched_client,
)

TOKENS = prompt(2)
HASH = BlockHash(b"h" * 32)


class Desk:
    """An attached client, and how much it has asked and moved so far."""

    def __init__(self, cluster: MemoryCluster) -> None:
        self._port = Port(cluster)
        self._moves = Hold(at=10**9)
        self._witness = cluster.client(SPEC)
        self.client = watched_client(cluster, Steps(read=self._moves, write=self._moves), port=self._port)
        self.client.attach(Deadline.after_ms(BOUND_S * 1e3))

    def bill(self) -> tuple[int, int, dict[str, Any]]:
        return len(self._port.asked), self._moves.calls, counters(self._witness)

    @contextmanager
    def refuses(self, match: str, kind: type[CallerError] = CallerError) -> Iterator[Client]:
        """The call within is refused with these words, and has no other effect."""
        before = self.bill()
        with pytest.raises(kind, match=match):
            yield self.client
        assert self.bill() == before


@pytest.fixture
def desk(cluster: MemoryCluster) -> Iterator[Desk]:
    """A desk at a cluster that has TOKENS, so that only a refusal keeps bytes from moving."""
    desk = Desk(cluster)
    with desk.client as client:
        assert client.store(TOKENS, kv(2)).blocks == 2
        assert client.flush()
        yield desk


# ---------------------------------------------------------------------------------------------- memory


def pages(count: int, nbytes: int = PAGE_BYTES) -> list[bytearray]:
    return [bytearray(nbytes) for _ in range(count)]


def caches(*shape: int, layers: int = LAYERS) -> list[torch.Tensor]:
    return [torch.zeros(shape) for _ in range(layers)]


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "a dimension too few": (lambda: kv(2)[0], "has shape"),
    "another number of heads": (lambda: kv(2)[..., 1:, :], "has shape"),
    "too few blocks": (lambda: kv(1), "1 blocks"),
    "another dtype": (lambda: kv(2).to(torch.float16), "float16; expected torch.float32"),
    "another device": (lambda: kv(2).to("meta"), "on meta; expected one on cpu or cuda"),
    "a sparse layout": (lambda: torch.zeros(kv(2).shape).to_sparse(), "torch.sparse_coo tensor"),
    "no memory at all": (lambda: "memory", "a str; expected a torch tensor"),
    "none": (lambda: None, "None"),
    "a list for one group": (lambda: [kv(2), kv(2)], "a list of 2, but the spec has 1 group"),
    "buffers of another length": (lambda: Buffers(pages(2, PAGE_BYTES - 1)), "bytes; expected the"),
    "too few buffers": (lambda: Buffers(pages(1)), "1 blocks"),
    "a layer too few": (lambda: Paged.nhd(caches(2, 4, BLOCK, HEADS, DIM, layers=2), [0, 1]), "for each of 3 layers"),
    "a block that the cache lacks": (lambda: Paged.nhd(caches(2, 4, BLOCK, HEADS, DIM), [0, 4]), "block_ids go from"),
    "another layout": (lambda: Paged.nhd(caches(2, 4, HEADS + 1, BLOCK, DIM), [0, 1]), "has shape"),
}
BAD_SOURCE = BAD | {
    "too many blocks": (lambda: kv(3), "3 blocks; expected 2"),
    "too many buffers": (lambda: Buffers(pages(3)), "3 blocks; expected 2"),
}
BAD_DESTINATION = BAD | {
    "watched by autograd": (lambda: torch.zeros(kv(2).shape, requires_grad=True), "requires grad"),
    "an expanded tensor": (lambda: kv(1).expand(kv(2).shape), "uses some memory twice"),
    "read-only buffers": (lambda: Buffers([bytes(PAGE_BYTES)] * 2), "is read-only"),
    "a buffer twice": (lambda: Buffers(pages(1) * 2), "uses some memory twice"),
    "a block twice": (lambda: Paged.nhd(caches(2, 4, BLOCK, HEADS, DIM), [1, 1]), "occurs twice"),
}


@pytest.mark.parametrize("named", BAD_SOURCE)
def test_a_source_that_does_not_fit_is_refused_at_both_levels(desk: Desk, named: str) -> None:
    make, match = BAD_SOURCE[named]
    tokens = prompt(2, seed=1)
    hashes = desk.client.hashes(tokens)
    with desk.refuses(match) as client:
        client.store(tokens, make())
    with desk.refuses(match) as client:
        client.begin_store(hashes, make())


@pytest.mark.parametrize("named", BAD_DESTINATION)
def test_a_destination_that_does_not_fit_is_refused_at_both_levels(desk: Desk, named: str) -> None:
    make, match = BAD_DESTINATION[named]
    with desk.refuses(match) as client:
        client.load(TOKENS, make())
    with desk.client.prepare_load(desk.client.hashes(TOKENS)) as ticket, desk.refuses(match) as client:
        client.begin_load(ticket, make())


def test_a_destination_that_does_not_fit_is_refused_before_the_first_hit(desk: Desk) -> None:
    with desk.refuses("has shape") as client:
        client.load(prompt(2, seed=1), kv(2)[0])


# ---------------------------------------------------------------------------------- tokens, hashes, bounds

CALLS: list[Callable[[Client, Any], Any]] = [
    lambda client, tokens: client.hashes(tokens),
    lambda client, tokens: client.lookup(tokens),
    lambda client, tokens: client.load(tokens, room(2)),
    lambda client, tokens: client.store(tokens, kv(2)),
    lambda client, tokens: client.explain(tokens),
    lambda client, tokens: client.pin(tokens, 60.0),
    lambda client, tokens: client.unpin(tokens),
]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "tokens",
    ["abcdefgh", b"abcdefgh", [1.5] * 8, [-1] * 8, [2**32] * 8, [None] * 8, [[1, 2, 3, 4]] * 2, [True] * 8, None, 7],
    ids=repr,
)
def test_what_are_no_token_ids_is_refused(desk: Desk, call: Callable[[Client, Any], Any], tokens: Any) -> None:
    with desk.refuses("token ids must be") as client:
        call(client, tokens)


@pytest.mark.parametrize("call", CALLS[1:])
def test_more_blocks_than_a_prompt_has_are_refused(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, call: Callable[[Client, Any], Any]
) -> None:
    monkeypatch.setattr(limits, "BLOCKS_PER_PROMPT", 100)
    with desk.refuses("exceeds the limit of 100: give its leading 100 blocks alone", LimitError) as client:
        call(client, [0] * 101 * BLOCK)


BOUNDED: list[Callable[..., Any]] = [
    lambda client, **bound: client.hashes(TOKENS, **bound),
    lambda client, **bound: client.lookup(TOKENS, **bound),
    lambda client, **bound: client.load(TOKENS, room(2), **bound),
    lambda client, **bound: client.store(TOKENS, kv(2), **bound),
    lambda client, **bound: client.explain(TOKENS, **bound),
    lambda client, **bound: client.pin(TOKENS, 60.0, **bound),
    lambda client, **bound: client.unpin(TOKENS, **bound),
]


@pytest.mark.parametrize("call", BOUNDED)
@pytest.mark.parametrize(
    ("deadline_ms", "match"),
    [
        (float("nan"), "deadline_ms=nan is not a number of milliseconds"),
        (float("inf"), "every call ends in time"),
        ("soon", "deadline_ms='soon' is not a number"),
    ],
    ids=repr,
)
def test_a_deadline_that_is_none_is_refused(desk: Desk, call: Callable[..., Any], deadline_ms: Any, match: str) -> None:
    with desk.refuses(match) as client:
        call(client, deadline_ms=deadline_ms)


@pytest.mark.parametrize("ttl_s", [0, -1.0, float("nan"), float("inf"), 10**12, "60", None, True], ids=repr)
def test_a_pin_for_an_impossible_time_is_refused(desk: Desk, ttl_s: Any) -> None:
    with desk.refuses("is not a number of seconds above 0") as client:
        client.pin(TOKENS, ttl_s)


@pytest.mark.parametrize("replicas", [0, -1, 65, 1.5, "2", None, True], ids=repr)
def test_a_pin_on_no_possible_number_of_shards_is_refused(desk: Desk, replicas: Any) -> None:
    with desk.refuses("is not a number of shards from 1 to 64") as client:
        client.pin(TOKENS, 60.0, replicas=replicas)


def test_a_purge_of_nothing_in_particular_is_refused(desk: Desk) -> None:
    with desk.refuses(r"purge names nothing: give one of model, weights, adapter, or call clear\(\)") as client:
        client.purge()
    with desk.refuses("weights is a int; expected the text that the spec has") as client:
        client.purge(model="tiny", weights=7)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", ["text", None, 7], ids=repr)
def test_what_is_no_ticket_is_refused(desk: Desk, bad: Any) -> None:
    with desk.refuses(r"redeemed from bytes\(ticket\)") as client:
        client.redeem(bad)
    with desk.refuses("expected a ticket of prepare_load or redeem") as client:
        client.begin_load(bad, room(2))


@pytest.mark.parametrize("bad", [None, 7, HASH, "text", {HASH: 1}], ids=repr)
def test_what_is_no_list_of_hashes_is_refused(desk: Desk, bad: Any) -> None:
    with desk.refuses("block hashes are a list") as client:
        client.prepare_load(bad)
    with desk.refuses("block hashes are a list") as client:
        client.begin_store(bad, kv(2))


@pytest.mark.parametrize("bad", [b"short", b"h" * 33, "h" * 32, bytearray(32), None, 7], ids=repr)
def test_what_are_no_block_hashes_is_refused(desk: Desk, bad: Any) -> None:
    with desk.refuses("32 bytes each") as client:
        client.prepare_load([HASH, bad])
    with desk.refuses("32 bytes each") as client:
        client.begin_store([HASH, bad], kv(2))


def test_more_hashes_than_a_prompt_has_are_refused(desk: Desk) -> None:
    hashes = [HASH] * (limits.BLOCKS_PER_PROMPT + 1)
    with desk.refuses(f"limit of {limits.BLOCKS_PER_PROMPT}", LimitError) as client:
        client.prepare_load(hashes)
    with desk.refuses(f"limit of {limits.BLOCKS_PER_PROMPT}", LimitError) as client:
        client.begin_store(hashes, kv(1))


@pytest.mark.parametrize("first", [-1, 3, 1.0, None])
def test_a_first_block_beyond_the_hashes_is_refused(desk: Desk, first: Any) -> None:
    with desk.refuses(f"first={first} does not lie within the 2 hashes") as client:
        client.begin_store([HASH, HASH], kv(2), first=first)


# ----------------------------------------------------------------------------------------------- parts


def test_a_ticket_for_less_than_a_clients_part_is_refused(cluster: MemoryCluster, desk: Desk) -> None:
    rank = cluster.client(SPEC, part=Part(0, LAYERS, 0, 2))
    with rank.prepare_load(rank.hashes(TOKENS)) as ticket:
        redeemed = desk.client.redeem(bytes(ticket))
        with desk.refuses("prepared for layers 0:3, heads 0:2 of group 0; this client wants layers 0:3, heads 0:4"):
            desk.client.begin_load(redeemed, room(2))


@pytest.mark.parametrize(
    "cut",
    [
        lambda source: None,
        lambda source: (),
        lambda source: (replace(source, part=Part(0, LAYERS, 0, HEADS - 1)),),
    ],
)
def test_a_ticket_that_does_not_say_where_its_blocks_lie_is_refused(desk: Desk, cut: Callable[[Any], Any]) -> None:
    with desk.client.prepare_load(desk.client.hashes(TOKENS)) as ticket:
        (run,) = ticket.body.runs
        ((source,),) = (sources for sources in run.plan if sources)
        ticket.body = replace(ticket.body, runs=(replace(run, plan=(cut(source),)),))
        before = desk.bill()
        with pytest.raises(ProtocolError, match="does not say where block 0 lies"):
            desk.client.begin_load(ticket, room(2))
        assert desk.bill() == before


BAD_PARTS: list[Any] = [
    Part(0, LAYERS + 1, 0, HEADS),
    Part(0, LAYERS, -1, HEADS),
    Part(2, 1, 0, HEADS),
    Part(0, 0, 0, HEADS),
    {1: Part(0, LAYERS, 0, HEADS)},
]


@pytest.mark.parametrize("part", BAD_PARTS, ids=repr)
def test_a_part_that_the_spec_lacks_is_refused(cluster: MemoryCluster, part: Any) -> None:
    with pytest.raises(SpecError, match=r"does not lie within group 0|group 1 does not exist"):
        cluster.client(SPEC, part=part)


def test_a_client_of_nothing_is_refused(cluster: MemoryCluster) -> None:
    with pytest.raises(CallerError, match="names no group"):
        cluster.client(SPEC, part={})


@pytest.mark.parametrize(
    ("memory", "match"),
    [
        (lambda: kv(2), "a list of 1, but the spec has 2 group"),
        (lambda: [kv(2), None], "for group 1 is None"),
        (lambda: [kv(2)], "a list of 1, but the spec has 2 group"),
        (lambda: [kv(2), kv(2)[..., :-1]], "of group 1 has shape"),
    ],
)
def test_memory_for_other_groups_than_are_moved_is_refused(
    cluster: MemoryCluster, memory: Callable[[], Any], match: str
) -> None:
    (group,) = SPEC.groups
    two = replace(SPEC, groups=(group, replace(group, layers=tuple(layer + LAYERS for layer in group.layers))))
    client = cluster.client(two)
    for call in (client.store, client.load):
        with pytest.raises(CallerError, match=match):
            call(TOKENS, memory())
    assert counters(client)["coordinator"] == dict.fromkeys(counters(client)["coordinator"], 0)


# ---------------------------------------------------------------------------------------------- closed

CLOSED_CALLS: list[Callable[[Client, Ticket], Any]] = [
    lambda client, ticket: client.hashes(TOKENS),
    lambda client, ticket: client.lookup(TOKENS),
    lambda client, ticket: client.load(TOKENS, room(2)),
    lambda client, ticket: client.store(TOKENS, kv(2)),
    lambda client, ticket: client.explain(TOKENS),
    lambda client, ticket: client.pin(TOKENS, 60.0),
    lambda client, ticket: client.unpin(TOKENS),
    lambda client, ticket: client.prepare_load(ticket.hashes),
    lambda client, ticket: client.begin_load(ticket, room(2)),
    lambda client, ticket: client.begin_store(ticket.hashes, kv(2)),
    lambda client, ticket: client.flush(),
    lambda client, ticket: client.status(),
    lambda client, ticket: client.clear(),
    lambda client, ticket: client.purge(model="tiny"),
]


@pytest.mark.parametrize("call", CLOSED_CALLS)
def test_a_closed_client_refuses_every_call(desk: Desk, call: Callable[[Client, Ticket], Any]) -> None:
    ticket = desk.client.prepare_load(desk.client.hashes(TOKENS))
    desk.client.close()
    with desk.refuses("this client is closed; connect again") as client:
        call(client, ticket)
    ticket.release()
    desk.client.close()
