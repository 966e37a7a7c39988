"""Every bound of the system, with its reason. A queue, map or message without a line here is a bug."""

from __future__ import annotations

BLOCKS_PER_CALL = 8_192
"""131,072 tokens in blocks of 16, in one message: what a step of the coordinator may take. A client asks about longer
prompts in several messages."""

BLOCKS_PER_PROMPT = 16 * BLOCKS_PER_CALL
"""Two million tokens in blocks of 16: the blocks of one prompt, or of one ticket. Half of what all tickets of a tenant
alone may name (TICKET_PAGES)."""

PARTS_PER_BLOCK = 256
"""Different parts of a namespace at one shard: 16 pipeline ranks times 8 tensor ranks (a model has few more KV heads)
times two groups, or 8 times 8 times 4. An operation on a block is applied to each of them."""

PAGE_SIZES = 32_768
"""Cached page sizes of all namespaces, by part and codec, some 300 bytes each. If there are more, all are dropped, and
computed again when they are needed."""

PARTS_COMPARED = 2 * PARTS_PER_BLOCK
"""Parts of a group that are searched for pages that together hold what a reader needs: those of two layouts."""

PAGES_PER_CALL = BLOCKS_PER_CALL * 8
"""Groups and parts multiply the pages of a call; eight is a hybrid model with four groups under TP 2."""

READ_PAGES = 16_384
"""Pages of one exchange that loads, which a step looks up whether or not the shard has them: a quarter of a million
tokens in blocks of 16. A client divides larger loads."""

WRITE_PAGES = 2_048
"""Pages of one exchange that stores: to reserve so many takes a shard some 30 ms, in which it serves no other call. A
client divides larger stores."""

PARTS_PER_LOOKUP = BLOCKS_PER_CALL * 16
"""Blocks times groups of one lookup: sixteen groups of the longest context."""

COVER_WORK = 131_072
"""Units of work, about half a microsecond each, that one call may spend to find the pages that serve its blocks: 32 for
a block whose placement differs from the others, one for each replica that is examined, and one for 4,096 cells of
layers and heads by which it is compared."""

ANCESTORS = 262_144
"""Blocks of a chain that are marked as used when a block is appended to it: four million tokens in blocks of 16."""

TICKETS_PER_HOLDER = 256
"""A worker prepares for the requests that it schedules next; engines run a few hundred at once."""

LEASES_PER_HOLDER = 1_024
"""One lease per transfer and shard. A holder has up to TICKETS_PER_HOLDER transfers, each on a few shards."""

TICKET_PAGES = 524_288
"""Blocks and pages that tickets name, some 150 bytes each, of which a tenant alone may have half: those of 512 requests
of 512 blocks that are on their way at once. Beyond that loads get no ticket, and stores are refused."""

HOLDERS = 8_192
"""Workers of a cluster, of which a tenant alone may have half (tenant_shares.py): 4,096. One more is refused."""

LEASES = 16 * HOLDERS
"""Leases of all holders of one shard, by shares of tenants. All may expire in one step."""

TICKETS = 16 * HOLDERS
"""Tickets of all holders, as LEASES. A load beyond it gets no ticket, so its blocks are not protected from eviction."""

FLUSHES = 4_096
"""Flush calls waiting at one shard for the coordinator to acknowledge all events: one per worker. One more is answered
Done(False) at once."""

NAMESPACES_PER_TENANT = 1_024
"""Models times adapters times weights that one tenant uses; `explain` compares with each."""

NAMESPACES = 65_536
"""Namespaces of all tenants, at one coordinator and in one message."""

SEQUENCES_PER_HOLDER = 4_096
"""Open sequences of one worker, forks included; and changes of their tables in one message."""

SEQUENCES = 64 * HOLDERS
"""Open sequences of all holders, by shares of tenants."""

TABLE_BLOCKS = 4_194_304
"""Blocks in the tables of all sequences, those that forks share counted once: 64 million tokens in blocks of 16, and
half a GiB of memory."""

ANSWERED_SEQUENCES = 64
"""Sequences that an answer names which is kept with the lease of its holder, some 60 bytes each. If a longer one is
lost, the holder sends all its tables again."""

UNSTORED_TABLE_BLOCKS = BLOCKS_PER_PROMPT
"""Blocks in the tables of one tenant beyond twice those that shards have of it: one sequence of the greatest length,
and some 26 MiB. Tables of blocks that no shard has protect nothing; a change that exceeds this is refused."""

RELEASED_PER_STEP = 8_192
"""Blocks of closed or truncated tables that one step releases: as many as one message may add."""

GRACES_PER_STEP = 4_096
"""Unclaimed private blocks whose grace may end in one step."""

ENGINES_BYTES = 8 * 1024 * 1024
"""Bytes of the listed live engines of all tenants, by shares of tenants: 3,000 engines of a tenant alone that report as
much as vLLM does. One more is served but not listed."""

ENGINE_FACTS = 32
"""Facts that one engine reports about itself."""

ENGINE_BYTES = 8 * 1024
"""UTF-8 bytes of all that one engine reports about itself: ten times as much as vLLM does."""

LISTED_ENGINES = 256
"""As LISTED_NAMESPACES, of engines."""

LISTED_PINNED_BLOCKS = BLOCKS_PER_PROMPT
"""Pinned blocks that a client asks for to list the pins of its tenant: some 50 MiB of it, and sixteen questions."""

LISTED_NAMESPACES = 256
"""Namespaces in one listing for an operator: a spec takes some hundred bytes, and a longer list is not readable."""

TOKENS_PER_SEQUENCE = 16 * 1024 * 1024
"""Above the longest context any published model claims; bounds a block table."""

INVENTORY_CHUNK = 4_096
"""Pages per message of an inventory: about 1 MiB on the wire, under gRPC's default limit of 4 MiB."""

STREAM_BACKLOG = 65_536
"""Unacknowledged events of a shard. Beyond it the shard drops them and sends an inventory."""

REPORTS_PER_MESSAGE = 4_096
"""As INVENTORY_CHUNK."""

EVICTED_FINGERPRINTS = 262_144
"""Cells for evicted blocks whose eviction time `explain` can still report: 16 bytes each, 4 MiB."""

ORPHANS = 262_144
"""Blocks whose predecessor was lost and that are still to be made cold. Of more, the oldest stay as they are."""

ORPHANS_PER_STEP = 1_024
"""Of these, as many as one report makes cold: a few milliseconds."""

EVICTIONS_PER_ORDER = 1_024
"""Blocks that one order may evict, or move to another tier, so that a step of the shard stays short."""

MOVES_PER_ORDER = 2 * EVICTIONS_PER_ORDER
"""EVICTIONS_PER_ORDER from each of two tiers."""

ORDERS_IN_FLIGHT = 16
"""Unfinished orders of one shard. The coordinator gives one of each kind at a time, because it computes the next one
from the shard's last report; a shard may still be executing some that the coordinator has withdrawn."""

MOVED_PAGES = EVICTIONS_PER_ORDER
"""Pages of one batch that changes its tier, rounded up to whole blocks: many small pages fit in few bytes."""

REPLICAS = 64
"""Replicas of one block: beyond it another replica takes space and makes no read faster."""

AVOIDED_SHARDS = 256
"""Shards that one load names as failed. If more have failed, no other replica is left to find."""

SUSPECTS_PER_CALL = 256
"""Pages that a reader reports in one call. Each costs the shard a read of the whole page."""

WAITING_WRITES = 2_048
"""Reservations that wait for space at a shard, by shares of tenants. One more does not wait: it is answered `full`."""

WAITING_PAGES = 2 * PAGES_PER_CALL
"""Pages of all waiting reservations, by shares of tenants: a shard goes through them to compute how much space it
lacks."""

PINS_FROM_DISK = 512
"""Loads that wait for pages from disk at one shard, by shares of tenants. One more is a miss: about a second of reads
is queued already."""

SPANS_PER_HOLDER = 32_768
"""Registered spans of one worker: 16 million tokens, if each is a cut of 512."""

SPAN_BLOCKS = 1_048_576
"""Blocks of all registered spans of a shard, by shares of tenants: 16 million tokens in blocks of 16, at some 300 bytes
a block. A span beyond it is refused, and its pages are loaded instead."""

SPANS_PER_CALL = 8_192
"""Spans that one message registers, ends or attends to: four million tokens at one shard, if each is a cut."""

SPAN_BLOCKS_PER_CALL = PAGES_PER_CALL // 2
"""Blocks of the spans of one message: one MiB of hashes, half of what a call to a shard may have. A worker registers
the spans of a longer sequence in several messages."""

SPAN_LOOKUPS = BLOCKS_PER_CALL
"""Blocks of spans that one step looks up, found or not: some 15 ms. A compute over more of them takes several steps, in
between which others have their turn."""

SPAN_IDLE_NS = 60_000_000_000
"""How long a shard keeps the spans of a worker that names none. A worker that returns later registers them again."""

ATTEND_ROWS = 1_024
"""Sequences of a batch that attend in one message."""

ATTEND_TOKENS = 4_096
"""Query tokens of one message: twice the chunk of a prefill that engines use."""

ATTEND_NAMES = 65_536
"""Spans that all rows of one message name, each as often as rows share it: eight rows of SPANS_PER_CALL."""

ATTEND_SUBTREES = 65_536
"""Results of one message: 128 sequences of a quarter of a million tokens, of which a shard has every other cut."""

ATTEND_BYTES = 32 * 1024 * 1024
"""Bytes of the query of one message, and of its results."""

ATTEND_WORK = 2**37
"""Multiplications of one message (core/attend_work.py): three seconds of a fast core. A worker divides what takes
more."""

ATTEND_PIECE_WORK = 2**29
"""Multiplications of one piece of a compute: some 12 milliseconds of a fast core. Between two pieces its deadline is
looked at, and another tenant has its turn."""

ATTENDS_WAITING = 64
"""Computes that wait or are under way at one shard, by shares of tenants. One more is declined: its worker loads the
pages, which is faster than waiting for so many."""

SUSPECTS = 1_024
"""Pages that readers suspect and the shard has not read again yet. The scrubber's regular round covers any others."""

PURGED_PAGES_PER_STEP = 8_192
"""Pages that a shard condemns in one step because of a purge. It continues with the coordinator's next answer."""

TOMBSTONES_PER_TENANT = 64
"""Different purges that are kept for one tenant. One that covers others replaces them."""

TOMBSTONES = 1_024
"""Tombstones of all tenants, which travel in one message."""

PAST_SHARDS = 1_024
"""Shards that are remembered as lost, as drained, and as restarted. A forgotten drained shard that reports again is
drained again."""

PROBED_SHARDS = 256
"""Shards that try one another in one probe of the cluster: 65,280 pairs, of which a person reads those that fail."""

PROBE_LINKS = 2 * PROBED_SHARDS
"""Attempts that one shard reports: two transports each."""

SCHEDULE_LINES = 64
"""Things that the cluster waits for, and volumes without a shard, that the status shows of each: people read them."""

REPLICA_REQUESTS = 65_536
"""Blocks that wait for another replica: 1,024 hot runs. One more is dropped, until it is hot again."""

SAMPLES = 256
"""Samples of the codec error of pages in one report: more than are needed to judge a namespace."""

PROMOTIONS = 4_096
"""Blocks of one shard that wait to be promoted. One more is dropped, until it is hot again, or read again."""

WANTED_ON_DEVICE = EVICTIONS_PER_ORDER
"""Blocks for the pool on a device in one report: as many as one order brings there. One more is dropped, until it is
read again."""

PULL_PAGES = 1_024
"""Pages that a shard fetches from another for one order."""

PULL_BYTES = 64 * 1024 * 1024
"""Bytes of one such order: a second on a slow network, so that a shard is soon free for the next order."""

HOT_RUNS = 65_536
"""Runs whose loads are counted within one window. Further runs are not counted."""

STORE_TOKENS = 32 * BLOCKS_PER_CALL
"""Token ids of one message, for KV events, which take a coordinator some ten milliseconds to read. A client names fewer
blocks in each message if theirs are more. Of a message with more, no token ids are kept."""

TOKEN_MEMORY_BYTES = 32 * 1024 * 1024
"""Bytes of the token ids of blocks being stored, for KV events, by shares of tenants: a tenant alone has those of half
a million tokens in blocks of 16, or of four million in blocks of 4,096."""

TOKENS_KEPT_NS = 30_000_000_000
"""How long they wait for the commit of their block, which most often arrives within a second."""

SPEC_BYTES = 8 * 1024
"""Canonical bytes of a KVSpec: several hundred layers in a dozen groups fit, and a chunk of an inventory in which every
page is of another namespace still fits a message."""

EXPLAINED_NAMESPACES = 16
"""Sibling namespaces that one `explain` rehashes the tokens for: each costs a SHA-256 a block."""

LAYER_BYTES = 32 * 1024 * 1024
"""One layer of a page travels in one frame; with its header it must fit MESSAGE_BYTES."""

MESSAGE_BYTES = 64 * 1024 * 1024
"""The largest message that the coordinator accepts of a shard, and a client of a server."""

QUESTION_BYTES = 2 * 1024 * 1024
"""The largest question of a worker that names blocks, to the coordinator or a shard: to parse one takes some 10 ms, in
which Python does nothing else. A client asks in several messages: BLOCKS_PER_CALL hashes are 256 KiB, STORE_TOKENS
token ids 1.25 MiB at most, and SPAN_BLOCKS_PER_CALL hashes of spans 1 MiB."""

SMALL_QUESTION_BYTES = 64 * 1024
"""The largest question that names no blocks, or few: a spec of SPEC_BYTES, or SUSPECTS_PER_CALL pages."""

DECODED_AT_ONCE_BYTES = 16 * 1024
"""The longest body of a socket's frame that is decoded at once: a quarter of a millisecond. A longer one is decoded in
its tenant's turn, as every question is."""

BODY_BYTES = 4 * 1024 * 1024
"""The body of a frame of a stream, and the largest message that a shard accepts over gRPC: PAGES_PER_CALL wants of 45
bytes, or the headers of a frame of pages. The bytes of pages follow the frame, into their final memory. GRANT alone has
more, from a shard to its worker."""

SMALL_BODY_BYTES = 64 * 1024
"""A body or query up to this is not charged to its tenant: all connections together hold 32 MiB of such."""

BODIES_BYTES = 64 * 1024 * 1024
"""Bodies within an exchange that are arriving at one listener, by shares of tenants. A further one waits."""

REQUESTS_BYTES = 128 * 1024 * 1024
"""Requests at one listener from their first byte to the end of their exchange, with the queries and results of Attends,
by shares of tenants: two of ATTEND_BYTES of a tenant alone. A further request waits, a further query is declined."""

FRAME_BYTES = 1024 * 1024
"""Target size of one frame of pages: gRPC is fastest between one and two MiB."""

CUT_BYTES = 2 * 1024 * 1024
"""A larger frame of pages over gRPC, which has one layer of a page, is sent in messages of at most this size."""

RECORD_BYTES = 512 * 1024
"""Target size of one run of layers of one page. Each run costs some microseconds of Python at either end; the smaller
they are, the sooner the first layers of all pages of a load arrive."""

CHUNK_BYTES = 256 * 1024
"""Bytes that are copied before they are verified: few enough to still be in the CPU cache."""

STREAM_BYTES = 4 * 1024 * 1024
"""A transfer with one shard is split into several exchanges only if each moves at least this much. A request, a lease
and its end cost some tenths of a millisecond, less than a tenth of the time that moving this much takes."""

WIDE_STREAM_BYTES = 16 * 1024 * 1024
"""Of more than two exchanges each moves at least this much. On a machine of 16 processors two exchanges load 32 MiB
faster than eight, and four load 1 GiB 1.7 times as fast as two (docs/measurements.md)."""

STORES_QUEUED = TICKETS_PER_HOLDER
"""Stores of one client that are running or queued: one per request that an engine runs. One more is a miss."""

STORES_QUEUED_BYTES = 4 * 1024 * 1024 * 1024
"""Total bytes of these stores: a few seconds on a fast network. A worker that stores faster than that for long needs
its memory back sooner than a longer queue could release it. A single store may be larger."""

TOKEN_BYTES = 4_096
"""One credential, as sent at the start of a stream: longer than any that is issued, and cheap to read from an
unauthenticated peer."""

WORDS_BYTES = 4_096
"""The error message that a stream sends before it ends."""

STREAMS = 512
"""Connections that a shard keeps open besides those of gRPC, by shares of tenants; each has a thread. Two for each of a
hundred workers of a tenant alone, and some more."""

STREAMS_UNKNOWN = 64
"""Connections whose credential has not arrived yet. It follows within a round trip, so more than these are
strangers'."""

CONNECTIONS = 4_096
"""gRPC connections to one server: one for each worker of half of HOLDERS. One more is closed."""

CALLS_PER_CONNECTION = 1_024
"""gRPC calls under way on one connection, which is one worker's. A further one waits at the worker."""

CALLS_WAITING = 1_024
"""gRPC calls of one tenant that wait for one of its threads at one server: its workers make a few each. One more is
refused."""

EVENT_PEERS = 128
"""Connections to a port of KV events, by shares of the addresses that they come from: 64 subscribers of one machine.
One more is closed, or takes the place of one that has sent nothing."""

SUBSCRIPTIONS = 64
"""Topics that one connection subscribes to; a prefix names many."""

SUBSCRIBED_BYTES = 64 * 1024
"""Bytes of these: 8 MiB of all connections."""

POLICIES = 64
"""Settings of the tiers in one message: many times the number that exist."""

TRANSPORTS = 16
"""Transports that a shard lists, offered or refused: four times the number that exist."""

OFFER_BYTES = 64 * 1024
"""Details of an offer, which both ends of a transport exchange before they connect: the metadata of a NIC's agent takes
some KiB."""

TOKEN_FILE_BYTES = 1024 * 1024
"""Ten thousand credentials."""

SHARD_CREDENTIALS = 16_384
"""Incarnations of shards to which the coordinator has issued credentials: more than start within the time of one."""

CERTIFICATE_FILE_BYTES = 1024 * 1024
"""A file of authorities, or of a certificate and its chain: all public authorities are 250 KiB."""

QUOTA_FILE_BYTES = 1024 * 1024
"""The quotas of QUOTA_TENANTS tenants, with all keys."""

QUOTA_TENANTS = 4_096
"""Tenants with quotas of their own. All others have those of [default]."""

FLOORS_SHARE = 0.8
"""The most of a tier that the floors of a quota file protect together, as coordinator.tenant_floor may: what is left
must suffice for the tenants that have none."""

AUDIT_LINES = 4_096
"""Lines of the audit log that wait to be written, some 300 bytes each. Of more, the number is recorded."""

AUDIT_FILE_BYTES = 64 * 1024 * 1024
"""An audit log of this size is renamed, in place of the one before: 200,000 calls of operators."""

LISTED_TENANTS = 1_024
"""Tenants in one listing of their use beside their quotas: some 200 KiB; further ones are left out."""

RATED_TENANTS = 16_384
"""Tenants whose rate a server remembers, some 200 bytes each: more than a token file has room for."""

TRACE_WAITING_TOKENS = 4_000_000
"""Tokens of requests that wait in an observing engine to be hashed: 32 MB of lists, and some seconds of a thread."""

TRACE_BYTES, LEAST_TRACE_BYTES = 64 * 2**20, 8 * 2**20
"""A trace and its older half: by default some eight million blocks, and never so few that they are minutes of a busy
engine."""

TRACE_FILES = 64
"""Files of a folder of traces: a few for each process of a host, with those of processes that have ended."""

# The limits must agree with one another.
assert INVENTORY_CHUNK * SPEC_BYTES * 2 <= MESSAGE_BYTES
assert REPORTS_PER_MESSAGE * SPEC_BYTES * 2 <= MESSAGE_BYTES
assert TOMBSTONES * SPEC_BYTES * 4 <= MESSAGE_BYTES
assert LAYER_BYTES * 2 <= MESSAGE_BYTES
assert BLOCKS_PER_CALL * 32 + 2 * STORE_TOKENS * 3 <= QUESTION_BYTES
assert BLOCKS_PER_CALL * 32 + STORE_TOKENS * 5 <= QUESTION_BYTES
assert SPAN_BLOCKS_PER_CALL * 32 + SPANS_PER_CALL * 32 <= QUESTION_BYTES
assert SUSPECTS_PER_CALL * 45 + SPEC_BYTES * 4 <= SMALL_QUESTION_BYTES
assert PAGES_PER_CALL * 45 + 4_096 <= BODY_BYTES
assert STREAMS * SMALL_BODY_BYTES <= 32 * 1024 * 1024
assert ENGINE_BYTES * LISTED_ENGINES * 2 <= MESSAGE_BYTES
assert 4 * BODY_BYTES <= BODIES_BYTES
assert 2 * (ATTEND_BYTES + BODY_BYTES) <= REQUESTS_BYTES
assert TRANSPORTS * OFFER_BYTES <= MESSAGE_BYTES
assert FRAME_BYTES <= LAYER_BYTES
assert FRAME_BYTES <= CUT_BYTES <= BODY_BYTES
assert BLOCKS_PER_CALL <= PAGES_PER_CALL
assert BLOCKS_PER_PROMPT * 2 <= TICKET_PAGES // 2
assert SPANS_PER_CALL <= SPANS_PER_HOLDER
assert SPAN_BLOCKS_PER_CALL <= SPAN_BLOCKS // 2
assert ATTEND_BYTES <= MESSAGE_BYTES
assert max(PULL_PAGES, SUSPECTS_PER_CALL) <= READ_PAGES
assert PARTS_PER_BLOCK <= WRITE_PAGES <= READ_PAGES <= PAGES_PER_CALL
assert REPORTS_PER_MESSAGE <= STREAM_BACKLOG
assert ORDERS_IN_FLIGHT * MOVES_PER_ORDER * 128 <= MESSAGE_BYTES
