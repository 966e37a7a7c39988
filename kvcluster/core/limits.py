"""Every bound of the system, with its reason. A queue, map or message without a line here is a bug."""

from __future__ import annotations

BLOCKS_PER_CALL = 8_192
"""131,072 tokens of 16-token blocks: the longest context in wide use, in one prepare."""

PARTS_PER_BLOCK = 256
"""Different parts of a namespace at one shard: 16 pipeline ranks times 8 tensor ranks (a model has few more KV heads)
times two groups, or 8 times 8 times 4. What is done to a block is done to each of them."""

PAGE_SIZES = 8_192
"""Sizes of pages of one namespace that are remembered, by part and codec: those of many shards with odd parts."""

PARTS_COMPARED = 2 * PARTS_PER_BLOCK
"""Parts of a group that are looked at for the pages that together hold what a reader wants: those of two layouts."""

PAGES_PER_CALL = BLOCKS_PER_CALL * 8
"""Groups and parts multiply the pages of a call; eight is a hybrid model with four groups under TP 2."""

PARTS_PER_LOOKUP = BLOCKS_PER_CALL * 16
"""Blocks times groups that one lookup asks for: sixteen groups of the longest context."""

COVER_WORK = 131_072
"""What one call may spend on finding the pages that serve its blocks, about half a microsecond each: 32 for a block
that lies unlike the others, one for a copy that is looked at, and one for 4,096 cells of layers and heads that it is
compared by."""

ANCESTORS = 262_144
"""Blocks of a chain that are marked as used when one is added to it: four million tokens of 16-token blocks."""

TICKETS_PER_HOLDER = 256
"""A worker prepares for the requests that it schedules next; engines run a few hundred at once."""

LEASES_PER_HOLDER = 1_024
"""One a transfer and shard; a transfer of TICKETS_PER_HOLDER may touch a few shards."""

HOLDERS = 4_096
"""Workers of a cluster. Beyond it the one longest unheard of is forgotten, which costs it a retry."""

LEASES = 65_536
"""Of all holders of one shard: sixteen for each of as many workers as may be. All may run out in one step."""

TICKETS = 65_536
"""Of all holders, as LEASES. One load more goes without a promise."""

FLUSHES = 4_096
"""Calls that wait at one shard until the coordinator knows all: one a worker. One more is told No at once."""

NAMESPACES_PER_TENANT = 1_024
"""Models times adapters times weights in use by one tenant; `explain` compares with each."""

NAMESPACES = 65_536
"""Of all tenants, at one coordinator and in one message."""

SEQUENCES_PER_HOLDER = 4_096
"""Open sequences of one worker, forks included."""

ENGINES = 4_096
"""Engines that are known to live, of all tenants; one more is served and not listed."""

ENGINE_FACTS = 32
"""What one engine tells of itself."""

LISTED_ENGINES = 256
"""As LISTED_NAMESPACES, of engines."""

LISTED_NAMESPACES = 256
"""In one answer to a person: specs take some hundred bytes each, and nobody reads more."""

TOKENS_PER_SEQUENCE = 16 * 1024 * 1024
"""Above the longest context any published model claims; bounds a block table."""

INVENTORY_CHUNK = 4_096
"""Pages a message of an inventory: about 1 MiB on the wire, under gRPC's default of 4 MiB."""

STREAM_BACKLOG = 65_536
"""Unacknowledged reports of a shard. Beyond it the shard forgets them and offers an inventory."""

REPORTS_PER_MESSAGE = 4_096
"""As INVENTORY_CHUNK."""

EVICTED_FINGERPRINTS = 262_144
"""Cells for evicted blocks whose age `explain` can still tell: 16 bytes each, 4 MiB."""

EVICTIONS_PER_ORDER = 1_024
"""Blocks that one order may condemn, or move to another tier, so that a step of the shard stays short."""

MOVES_PER_ORDER = 2 * EVICTIONS_PER_ORDER
"""As EVICTIONS_PER_ORDER, out of each of two tiers."""

ORDERS_IN_FLIGHT = 16
"""Orders of one shard that have not ended. The coordinator gives one of each kind at a time, for which the shard's last
report is what the next is worked out from; a shard may still be at some that the coordinator has withdrawn."""

MOVED_PAGES = EVICTIONS_PER_ORDER
"""Pages of one batch that changes its tier, as far as whole blocks go: small pages are many in few bytes."""

REPLICAS = 64
"""Shards that one block may lie on: beyond it a copy costs room and spares no reader a wait."""

AVOIDED_SHARDS = 256
"""Shards that one load names as failed. Where more have failed, there is no other replica to find."""

SUSPECTS_PER_CALL = 256
"""Pages that a reader reports at once. Each costs the shard a read of the whole page."""

WAITING_WRITES = 1_024
"""Reservations that wait for room at a shard; one more is answered `full`."""

WAITING_PAGES = PAGES_PER_CALL
"""Pages of all reservations that wait, which a shard looks at for what its coordinator is to make room for."""

PINS_FROM_DISK = 256
"""Loads that wait for pages from disk at one shard. One more is a miss: a second of reading waits already."""

SUSPECTS = 1_024
"""Pages that readers suspect and the shard has yet to read. The round of the scrubber finds what is beyond it."""

BURIED_PAGES = 8_192
"""Pages that a shard condemns in one step because of a purge. It goes on with the next answer of its coordinator."""

TOMBSTONES_PER_TENANT = 64
"""Different purges that are remembered of one tenant. One that covers others takes their place."""

TOMBSTONES = 1_024
"""All of them, in one message."""

PAST_SHARDS = 1_024
"""Shards that are remembered as lost, and as drained. A drained one that is forgotten and speaks is drained again."""

WISHES = 65_536
"""Blocks that are to get another copy: 1,024 hot runs. One more is forgotten, until it is hot again."""

SAMPLES = 256
"""Of what pages lose by their codec, in one report: more than a namespace needs to be judged."""

PROMOTIONS = 4_096
"""Blocks of one shard that wait to be promoted; one more is noticed when it is hot again."""

PULL_PAGES = 1_024
"""Pages that one order has a shard fetch from another."""

PULL_BYTES = 64 * 1024 * 1024
"""As PULL_PAGES: a second of a slow network, so that a shard is soon free for the next order."""

HOT_RUNS = 65_536
"""Runs whose loads are counted within one window; one more is not."""

TOKEN_BLOCKS_REMEMBERED = 65_536
"""Blocks that are being stored, whose token ids wait to be told to outsiders: some 20 MiB with blocks of 16 tokens."""

SPEC_BYTES = 8 * 1024
"""Canonical bytes of a KVSpec: several hundred layers in a dozen groups fit, and a chunk of an inventory in which every
page is of another namespace still fits a message."""

EXPLAINED_NAMESPACES = 16
"""Sibling namespaces that one `explain` rehashes the tokens for: each costs a SHA-256 a block."""

LAYER_BYTES = 32 * 1024 * 1024
"""One layer of a page travels in one frame; with its header it must fit MESSAGE_BYTES."""

MESSAGE_BYTES = 64 * 1024 * 1024
"""What a gRPC endpoint accepts in one message."""

FRAME_BYTES = 1024 * 1024
"""What a sender aims at for one frame of pages: gRPC is fastest between one and two MiB."""

RECORD_BYTES = 512 * 1024
"""What a sender aims at for one run of layers of one page: each costs some microseconds of Python at either end, and
the smaller they are, the sooner the first layers of all pages of a load are there."""

CHUNK_BYTES = 256 * 1024
"""What is copied before it is verified: small enough to be in the cache still."""

STREAM_BYTES = 4 * 1024 * 1024
"""What each of several exchanges with one shard must have to move before a transfer is divided among them: a request, a
lease and its end cost some tenths of a millisecond, which are less than a tenth of moving this much."""

STORES_QUEUED = TICKETS_PER_HOLDER
"""Stores of one client that are under way or wait: one for each request that an engine runs. One more is a miss."""

STORES_QUEUED_BYTES = 4 * 1024 * 1024 * 1024
"""All that they are to move: a few seconds of a fast network. Whoever stores faster than that for long wants to have
its memory back, and not in minutes. One store alone may have more."""

TOKEN_BYTES = 4_096
"""One credential, as it opens a stream: more than any that is made, and little to read from a stranger."""

WORDS_BYTES = 4_096
"""What a stream says of its failure before it ends."""

STREAMS = 256
"""Connections that a shard keeps open besides gRPC's: each has a thread. Two of each of a hundred workers, and more."""

POLICIES = 64
"""Settings of the tiers in one message: many times as many as there are."""

TRANSPORTS = 16
"""What a shard says of, offered or not: four times as many as there are."""

OFFER_BYTES = 64 * 1024
"""What the halves of one transport tell each other before they connect: the metadata of a NIC's agent has some KiB."""

TOKEN_FILE_BYTES = 1024 * 1024
"""Ten thousand credentials."""

# The limits must agree with one another.
assert INVENTORY_CHUNK * SPEC_BYTES * 2 <= MESSAGE_BYTES
assert REPORTS_PER_MESSAGE * SPEC_BYTES * 2 <= MESSAGE_BYTES
assert TOMBSTONES * SPEC_BYTES * 4 <= MESSAGE_BYTES
assert LAYER_BYTES * 2 <= MESSAGE_BYTES
assert TRANSPORTS * OFFER_BYTES <= MESSAGE_BYTES
assert FRAME_BYTES <= LAYER_BYTES
assert BLOCKS_PER_CALL <= PAGES_PER_CALL
assert max(PULL_PAGES, SUSPECTS_PER_CALL) <= PAGES_PER_CALL
assert REPORTS_PER_MESSAGE <= STREAM_BACKLOG
assert ORDERS_IN_FLIGHT * MOVES_PER_ORDER * 128 <= MESSAGE_BYTES
