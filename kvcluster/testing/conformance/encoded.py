"""Claims about encoded pages: they travel encoded, and only to readers that accept their loss."""

from __future__ import annotations

import itertools
import random
import struct
from collections.abc import Sequence

import pytest

from kvcluster.core import limits
from kvcluster.core.codecs import Codec
from kvcluster.core.messages import PageKey, PageWant
from kvcluster.core.miss import Loss, Miss, MissReason
from kvcluster.core.spec import KVSpec
from kvcluster.memory import checksum
from kvcluster.testing.conformance.content import Came, Content, block, read, stored
from kvcluster.testing.conformance.world import World
from kvcluster.transport.base import Transport

LOSSY = [Codec.Q8, Codec.Q4]
SMALL, LARGE = 8, limits.FRAME_BYTES // (2 * 2 * 2 * 64)
"""Tokens of a block. SMALL: several pages fit into a frame. LARGE: a raw layer is one frame."""


def numbers(world: World, pages: int, block_tokens: int = SMALL) -> Content:
    """Returns pages of float16 numbers, which can be encoded."""
    spec = KVSpec.uniform(
        model="conformance",
        weights="sha256:0",
        num_layers=3,
        num_kv_heads=2,
        head_dim=64,
        dtype="float16",
        block_tokens=block_tokens,
    )
    content = Content(world, spec, [PageKey(block(at), 0, spec.whole(0)) for at in range(pages)])
    draw = random.Random(1)
    few = [draw.gauss(0.0, 1.0) for _ in range(64)]
    for key in content.keys:
        count = spec.layer_bytes(0, key.part) // (2 * len(few))
        content.layers[key] = [
            struct.pack(f"{len(few)}e", *(draw.random() + number for number in few)) * count
            for _ in range(key.part.layers)
        ]
    return content


def load(
    transport: Transport, content: Content, wants: Sequence[PageWant] | None = None, accept: Loss = Loss.Q4
) -> tuple[list[Miss | None], Came]:
    """Returns the outcome of a load that accepts that loss, and what arrived."""
    reading = read(transport, content, wants, accept=accept)
    return reading.finish(), reading.sink.came


def committed(world: World, content: Content, wants: Sequence[PageWant], items: Sequence[int] | None = None) -> Came:
    """Returns what the shard holds of these wants, for all items or for some."""
    held: Came = {}
    for item, want in enumerate(wants):
        page = world.page(content.namespace, want.key)
        assert page is not None, "the shard does not hold this page"
        step = page.nbytes // want.key.part.layers
        sums, memory = checksum.unpack_sums(page.sums), world.memory(content.namespace, want.key)
        for layer in range(want.layer_start, want.layer_stop) if items is None or item in items else ():
            held[item, layer] = int(page.codec), sums[layer], bytes(memory[layer * step : (layer + 1) * step])
    return held


def demoted(world: World, codec: Codec, pages: int = 2, *, block_tokens: int = SMALL) -> Content:
    """Stores pages and demotes them to the host tier."""
    _, content = stored(world, numbers(world, pages, block_tokens))
    world.demote(content.namespace, content.keys, codec)
    return content


class EncodedClaims:
    """Claims about pages of the host tier."""

    @pytest.mark.parametrize("codec", LOSSY)
    @pytest.mark.parametrize("block_tokens", [SMALL, LARGE])
    def test_an_encoded_page_travels_encoded_with_the_sums_that_it_was_committed_with(
        self, world: World, codec: Codec, block_tokens: int
    ) -> None:
        content = demoted(world, codec, block_tokens=block_tokens)
        outcome, arrived = load(world.open(), content)
        assert outcome == [None] * 2
        assert {codec_id for codec_id, _, _ in arrived.values()} == {int(codec)}
        assert arrived == committed(world, content, content.wants())
        raw = content.spec.layer_bytes(0, content.keys[0].part)
        assert all(len(data) < raw for _, _, data in arrived.values()), "fewer bytes than were stored"

    @pytest.mark.parametrize("codec", LOSSY)
    @pytest.mark.parametrize("block_tokens", [SMALL, LARGE])
    def test_any_range_of_layers_of_an_encoded_page_can_be_loaded_alone(
        self, world: World, codec: Codec, block_tokens: int
    ) -> None:
        content = demoted(world, codec, block_tokens=block_tokens)
        transport = world.open()
        for start, stop in itertools.combinations(range(4), 2):
            wants = [PageWant(key, start, stop) for key in content.keys]
            outcome, arrived = load(transport, content, wants)
            assert outcome == [None, None]
            assert arrived == committed(world, content, wants)

    def test_what_came_encoded_verifies_as_that_and_as_nothing_else(self, world: World) -> None:
        content = demoted(world, Codec.Q8, 1)
        _, arrived = load(world.open(), content)
        for (item, layer), (_, layer_sum, data) in arrived.items():
            identities = [checksum.identity(content.namespace, content.keys[item], codec) for codec in Codec]
            matches = [checksum.layer_sum(identity, layer, data) == layer_sum for identity in identities]
            assert matches == [codec is Codec.Q8 for codec in Codec]

    def test_raw_and_encoded_pages_travel_in_one_call_each_as_it_lies(self, world: World) -> None:
        transport, content = stored(world, numbers(world, 8))
        for codec, keys in (
            (Codec.Q8, content.keys[1:3]),
            (Codec.Q4, content.keys[4:6]),
            (Codec.RAW, content.keys[6:]),
        ):
            world.demote(content.namespace, keys, codec)
        outcome, arrived = load(transport, content)
        assert outcome == [None] * 8
        raw, q8, q4 = map(int, (Codec.RAW, Codec.Q8, Codec.Q4))
        assert [arrived[item, 0][0] for item in range(8)] == [raw, q8, q8, raw, q4, q4, raw, raw]
        assert arrived == committed(world, content, content.wants())

    @pytest.mark.parametrize("accept", Loss)
    def test_a_reader_that_accepts_less_loss_misses_those_pages_and_gets_the_ones_beside_them(
        self, world: World, accept: Loss
    ) -> None:
        transport, content = stored(world, numbers(world, 5))
        codecs = [Codec.RAW, Codec.Q8, Codec.RAW, Codec.Q4, Codec.RAW]
        for item in (1, 2, 3):
            world.demote(content.namespace, [content.keys[item]], codecs[item])
        outcome, arrived = load(transport, content, accept=accept)
        lossy = {codec: Miss(MissReason.LOSSY, f"only with {codec.name.lower()}") for codec in LOSSY}
        assert outcome == [None if codec.loss <= accept else lossy[codec] for codec in codecs]
        there = [item for item, miss in enumerate(outcome) if miss is None]
        assert arrived == committed(world, content, content.wants(), there)

    def test_a_byte_that_rots_in_an_encoded_page_reaches_the_reader_as_a_checksum_that_fails(
        self, world: World
    ) -> None:
        content = demoted(world, Codec.Q4, 3)
        middle = len(world.memory(content.namespace, content.keys[1])) // 2
        world.spoil(content.namespace, content.keys[1], middle)  # of the second of three layers
        reading = read(world.open(), content, accept=Loss.Q4)
        assert reading.finish() == [None] * 3
        assert reading.sink.corrupt == [(1, 1)]

    def test_what_is_evicted_below_while_it_is_read_arrives_whole(self, world: World) -> None:
        content = demoted(world, Codec.Q8, block_tokens=LARGE)
        expected = committed(world, content, content.wants())
        reading = read(world.open(), content, accept=Loss.Q8)
        next(reading.pieces)
        pool = world.host.core.pool
        world.host.inspect(lambda: list(map(pool.condemn, list(pool.ready()))))
        assert reading.finish() == [None] * 2
        assert reading.sink.came == expected
