"""A page that changes its tier while a path breaks: the rest of it comes as it lies then, and no record is of both."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing

import pytest

from kvcluster.core import limits
from kvcluster.core.codecs import Codec
from kvcluster.core.messages import PageWant, ReadRequest
from kvcluster.core.reasons import Loss, Miss, MissReason
from kvcluster.testing.conformance import World, open_world
from kvcluster.testing.conformance.content import Content, store
from kvcluster.testing.conformance.encoded import committed, load, numbers
from kvcluster.transport.seam import Deadline, PageSink
from tests.transport.frail import Ways, broken
from tests.transport.peers import InProcess

PAGES = 3


@pytest.fixture
def world() -> Iterator[World]:
    with open_world(InProcess) as world:
        yield world


@pytest.fixture
def stored(world: World) -> Content:
    """Raw pages, each a record."""
    content = numbers(world, PAGES)
    store(world.open(), content)
    return content


def page_bytes(content: Content) -> int:
    return content.spec.page_bytes(0, content.keys[0].part)


def ways_that_break(world: World, content: Content, after: int, codec: Codec) -> Ways:
    """The first path breaks after so many bytes, and all pages go down before the next one is tried."""
    ways = Ways(world)
    ways.shm.read_bytes, ways.shm.breaks_in_wait = after, True
    ways.shm.on_break = lambda: world.demote(content.namespace, content.keys, codec)
    return ways


def ways_that_end(world: World, then: Callable[[], object]) -> Ways:
    """The first path breaks after its first frame, between two records; then something happens."""
    ways, inner = Ways(world), world.open()

    def read(request: ReadRequest, sink: PageSink, deadline: Deadline) -> Generator[None, None, list[Miss | None]]:
        with closing(inner.read(request, sink, deadline)) as pieces:
            if request.wants:  # it is no trial
                next(pieces)
                then()
                raise broken()
            return (yield from pieces)

    ways.shm.read = read  # type: ignore[method-assign]
    return ways


@pytest.mark.parametrize("codec", [Codec.Q8, Codec.Q4])
def test_what_goes_down_before_the_next_path_comes_over_that_encoded(
    world: World, stored: Content, codec: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "FRAME_BYTES", 1)
    raw = committed(world, stored, stored.wants(), [0])
    ways = ways_that_end(world, lambda: world.demote(stored.namespace, stored.keys, codec))
    outcome, came = load(ways.choice, stored)
    assert outcome == [None] * PAGES
    assert came == {**raw, **committed(world, stored, stored.wants(), [1, 2])}
    assert [came[item, 0][0] for item in range(PAGES)] == [int(Codec.RAW), int(codec), int(codec)]


@pytest.mark.parametrize("up", [False, True])
def test_the_layers_of_a_page_may_come_raw_over_one_path_and_encoded_over_the_next(
    world: World, stored: Content, up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "FRAME_BYTES", 1)
    monkeypatch.setattr(limits, "RECORD_BYTES", 1)
    keys = stored.keys[:1]
    wants = [PageWant(keys[0], 0, 3)]
    if up:
        world.demote(stored.namespace, keys, Codec.Q8)
        ways = ways_that_end(world, lambda: world.promote(stored.namespace, keys))
    else:
        ways = ways_that_end(world, lambda: world.demote(stored.namespace, keys, Codec.Q8))
    before = committed(world, stored, wants)
    outcome, came = load(ways.choice, stored, wants)
    assert outcome == [None]
    assert came == {**committed(world, stored, wants), (0, 0): before[0, 0]}
    raw, encoded = int(Codec.RAW), int(Codec.Q8)
    assert [came[0, layer][0] for layer in range(3)] == ([encoded, raw, raw] if up else [raw, encoded, encoded])


@pytest.mark.parametrize("codec", [Codec.Q8, Codec.Q4])
def test_a_record_that_breaks_is_not_made_whole_with_bytes_of_another_codec(
    world: World, stored: Content, codec: Codec
) -> None:
    ways = ways_that_break(world, stored, page_bytes(stored) + 100, codec)
    outcome, came = load(ways.choice, stored)
    assert outcome == [None, Miss(MissReason.EVICTED, "it has changed its tier"), None]
    assert sorted({item for item, _ in came}) == [0, 2]
    assert came[2, 0][0] == codec


def test_what_goes_down_meanwhile_is_not_brought_to_who_accepts_no_loss(world: World, stored: Content) -> None:
    ways = ways_that_break(world, stored, page_bytes(stored) + 100, Codec.Q8)
    raw = committed(world, stored, stored.wants(), [0])
    outcome, came = load(ways.choice, stored, accept=Loss.EXACT)
    lossy = Miss(MissReason.LOSSY, "only with q8")
    assert (outcome, came) == ([None, lossy, lossy], raw)


def test_a_page_that_comes_up_while_its_record_is_brought_again_is_a_miss(world: World, stored: Content) -> None:
    world.demote(stored.namespace, stored.keys[:1], Codec.Q8)
    ways = Ways(world)
    ways.shm.read_bytes, ways.shm.breaks_in_wait = 100, True
    ways.shm.on_break = lambda: world.promote(stored.namespace, stored.keys[:1])
    outcome, came = load(ways.choice, stored)
    assert outcome == [Miss(MissReason.EVICTED, "it has changed its tier"), None, None]
    assert sorted({item for item, _ in came}) == [1, 2]
