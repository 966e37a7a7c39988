"""Claims about pieces as columns: the order in which a load reads its pieces, and what it counts by their kinds."""

from __future__ import annotations

import random

from kvcluster.core.groups import Part
from kvcluster.core.ids import HOLDER_BYTES, Attempt, BlockHash, Epoch, Holder, NamespaceId
from kvcluster.core.messages import Need, PageKey, PageWant, Run, ShardAddress, Source, TicketBody, Tier
from kvcluster.core.miss import Loss
from kvcluster.core.spec import KVSpec
from kvcluster.transfers.pieces import Piece, PieceList, layer_counts, plan_pieces, sizes

SPEC = KVSpec.uniform(model="m", weights="w", num_layers=8, num_kv_heads=4, head_dim=8, dtype="float16", block_tokens=2)
WHOLE = SPEC.whole(0)
LOWER, UPPER = Part(0, 4, 0, 4), Part(4, 8, 0, 4)
A, B = (ShardAddress(name, Epoch(1), name, "") for name in "ab")
HASHES = tuple(BlockHash(bytes([number]) * 32) for number in range(6))


def piece(block: int, part: Part, layers: tuple[int, int], heads: tuple[int, int] = (0, 4)) -> Piece:
    return Piece(block, 0, PageWant(PageKey(HASHES[block], 0, part), *layers), *heads)


def source(part: Part, shard: ShardAddress) -> Source:
    return Source(0, part, shard, Tier.RAM, Loss.EXACT)


def some(count: int) -> list[Piece]:
    rng = random.Random(count)
    parts = [(WHOLE, (0, 8)), (WHOLE, (2, 5)), (UPPER, (0, 4))]
    return [piece(rng.randrange(6), *rng.choice(parts), rng.choice([(0, 4), (1, 2)])) for _ in range(count)]


def test_columns_are_the_pieces_that_they_were_made_of() -> None:
    given = some(40)
    columns = PieceList.of(given)
    assert columns == given and list(columns) == given and len(columns) == 40
    assert columns[7] == given[7] and columns[5:30] == given[5:30]
    assert columns.wants == [each.want for each in given] and columns[5:30].wants == [each.want for each in given[5:30]]
    assert PieceList.of(columns) is columns


def test_sizes_and_layers_are_counted_by_kind() -> None:
    given = some(40)
    columns = PieceList.of(given)
    assert sizes(columns, SPEC) == [each.layers * SPEC.layer_bytes(0, each.want.key.part) for each in given]
    layers = [layer for each in given for layer in each.model_layers(SPEC)]
    assert layer_counts(columns, SPEC) == {layer: layers.count(layer) for layer in layers}
    assert layer_counts(columns[:1], SPEC) == dict.fromkeys(given[0].model_layers(SPEC), 1)


def test_a_load_reads_the_pieces_of_a_block_together_and_blocks_in_order() -> None:
    """Also where a block's halves lie in two pages of one shard, and the next run's whole on two shards."""
    halves = ((source(LOWER, A), source(UPPER, A)),)
    apart = ((source(LOWER, B), source(UPPER, A)),)
    body = TicketBody(
        NamespaceId(bytes(32)),
        Attempt(Holder(bytes(HOLDER_BYTES)), 1),
        HASHES[:4],
        Need((WHOLE,)),
        (Run(2, halves), Run(2, apart)),
    )
    assert plan_pieces(body, SPEC, (WHOLE,)) == {
        A: [
            *(piece(block, part, (0, 4)) for block in (0, 1) for part in (LOWER, UPPER)),
            piece(2, UPPER, (0, 4)),
            piece(3, UPPER, (0, 4)),
        ],
        B: [piece(2, LOWER, (0, 4)), piece(3, LOWER, (0, 4))],
    }
