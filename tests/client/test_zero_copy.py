"""Blocks that are read in the shard's own memory: kept while they are borrowed, and never copied."""

from __future__ import annotations

import gc
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcluster import BorrowedBlocks
from kvcluster.client.client import Client
from kvcluster.config import TRANSPORTS, ClientConfig
from kvcluster.core import limits
from kvcluster.core.groups import Group, Part, Plane
from kvcluster.core.ids import (
    CLUSTER,
    HOLDER_BYTES,
    Attempt,
    BlockHash,
    Caller,
    Epoch,
    Holder,
    NamespaceId,
    ShardId,
    Tenant,
)
from kvcluster.core.messages import (
    AttachedShard,
    Offer,
    Offers,
    PageKey,
    PageWant,
    ReadRequest,
    Refused,
    RefusedKind,
    Renew,
    ShardAddress,
)
from kvcluster.core.miss import Miss, MissReason
from kvcluster.core.shard.page import Page, PageState
from kvcluster.core.spec import KVSpec
from kvcluster.errors import CallerError
from kvcluster.replay.core_stepper import build_request
from kvcluster.runtime.auth import DEFAULT_TENANT
from kvcluster.runtime.shard_host import ShardHost
from kvcluster.testing import MemoryCluster
from kvcluster.transfers.layouts import Buffers
from kvcluster.transfers.tensors import page_tensor
from kvcluster.transfers.tickets import Ticket, TicketSeal
from kvcluster.transport.auto import OPENERS, AutoTransport, own_attempts
from kvcluster.transport.base import Deadline, RefusedByShard, Transport
from kvcluster.transport.credentials import ANONYMOUS
from kvcluster.transport.in_process_transport import MemoryTransport
from kvcluster.transport.path_selector import Opener
from kvcluster.transport.process_location import ProcessLocation
from kvcluster.transport.shm_pages import ShmPages, open_path
from kvcluster.transport.shm_server import ShmServer
from kvcluster.transport.shm_views import BorrowedPages
from tests.client.build import BLOCK, BOUND_S, DIM, HEADS, LAYERS, PAGE_BYTES, SPEC, kv, prompt, room, same
from tests.client.conftest import Start

TOKENS = prompt(4)
RIGHT = kv(4)
SHARD = ShardId("shard-0")


class _Control(MemoryTransport):
    """Control of a shard that offers shared memory."""

    name = "grpc"

    def __init__(self, host: ShardHost, address: str) -> None:
        super().__init__(host, Caller(DEFAULT_TENANT))
        self.attaches = 0
        self._offers = Offers(host.core.epoch, (Offer("shm", address),))

    def attach(self, spec: KVSpec, deadline: Deadline, owner: Tenant | None = None) -> AttachedShard:
        self.attaches += 1
        return super().attach(spec, deadline, owner)

    def offers(self, deadline: Deadline) -> Offers:
        return self._offers


class Desk:
    """A cluster whose shards serve shared memory, and clients that take it unless they are told otherwise."""

    def __init__(self, cluster: MemoryCluster, stack: ExitStack) -> None:
        self.cluster = cluster
        self.servers: dict[str, ShmServer] = {}
        self.controls: list[_Control] = []
        for shard, host in cluster.shards.items():
            self.servers[shard] = ShmServer(host, lambda token: Caller(DEFAULT_TENANT))
            stack.callback(self.servers[shard].close)
            self.servers[shard].start()
        self._stack = stack
        self.client = self.connect()

    @property
    def host(self) -> ShardHost:
        return self.cluster.shards[SHARD]

    def connect(
        self,
        spec: KVSpec = SPEC,
        *,
        part: Part | Mapping[int, Part] | None = None,
        takes: tuple[str, ...] = TRANSPORTS,
        path: Opener = open_path,
        **settings: Any,
    ) -> Client:
        def opener(shard: ShardAddress) -> Transport:
            host = self.cluster.shards[shard.shard]
            self.controls.append(_Control(host, self.servers[shard.shard].address))
            openers = {**OPENERS, "shm": path}
            attempts = own_attempts()
            control = self.controls[-1]
            return AutoTransport(
                shard,
                control,
                openers,
                credentials=ANONYMOUS,
                next_attempt=attempts,
                takes=takes,
                location=ProcessLocation("memory"),
            )

        config = ClientConfig(**{"deadline_ms": int(BOUND_S * 1e3), **settings})
        client = Client(self.cluster.port(), opener, spec, part=part, config=config)
        self._stack.callback(client.close)
        return client

    def store(self, tokens: list[int] = TOKENS, source: Any = RIGHT, *, client: Client | None = None) -> None:
        client = client or self.client
        assert client.store(tokens, source).blocks == len(tokens) // BLOCK
        assert client.flush()

    def ticket(self, tokens: list[int] = TOKENS, *, client: Client | None = None, whole: bool = False) -> Ticket:
        client = client or self.client
        ticket = client.prepare_load(client.hashes(tokens), whole=whole)
        self._stack.callback(ticket.release)
        return ticket

    def borrow(self, tokens: list[int] = TOKENS, *, client: Client | None = None) -> BorrowedBlocks:
        client = client or self.client
        return client.borrow(self.ticket(tokens, client=client))

    def page(self, block: int) -> Page:
        """Returns the page of a block of TOKENS."""
        name = self.client.hashes(TOKENS)[block]
        (page,) = [page for page in self.host.core.pool.ready() if page.key.hash == name]
        return page

    def expire_leases(self) -> None:
        """All leases of the shard run out at this moment, and those that are renewed meanwhile too."""
        leases = self.host.core.leases

        def expired() -> bool:
            for lease in leases.all():
                lease.expires_at = 0
            return leases.next_expiry is None

        self.host.inspect(expired)
        unknown = Attempt(Holder(bytes(HOLDER_BYTES)), 1)
        # The driver looks at deadlines only after a step, so give it one: a renewal that changes nothing.
        self.host.ask(build_request(Renew(unknown), CLUSTER), BOUND_S)
        self.cluster.wait_until(lambda: bool(self.host.inspect(expired)))

    def unleased(self) -> bool:
        return not len(self.host.core.leases)


@pytest.fixture
def desk(start: Start) -> Iterator[Desk]:
    """One shard, which has TOKENS."""
    with ExitStack() as stack:
        desk = Desk(start(ram_bytes="1MiB"), stack)
        desk.store()
        yield desk


def data(view: memoryview | None) -> bytes:
    assert view is not None
    return bytes(view)


def tensor(blocks: BorrowedBlocks, block: int) -> torch.Tensor:
    found = blocks.tensor(block)
    assert found is not None
    return found


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())


def mapped(address: int) -> bool:
    """Does something lie there, as this process sees memory?"""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, stop = (int(end, 16) for end in line.split()[0].split("-"))
        if first <= address < stop:
            return True
    return False


# ------------------------------------------------------------------------------------------ what is handed out


def test_what_is_borrowed_has_the_bytes_that_a_load_brings(desk: Desk) -> None:
    loaded = room(4)
    assert desk.client.load(TOKENS, loaded) == len(TOKENS)
    with desk.borrow() as blocks:
        assert blocks.blocks == 4
        for block in range(4):
            assert blocks.why(block) is None
            assert data(blocks.page(block)) == bits(loaded[block])
            borrowed = tensor(blocks, block)
            assert (borrowed.dtype, list(borrowed.shape)) == (torch.float32, [LAYERS, 2, BLOCK, HEADS, DIM])
            assert same(borrowed, RIGHT[block])
        assert blocks.valid()


def test_more_pages_than_an_exchange_may_name_are_borrowed_by_several(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "READ_PAGES", 3)
    with desk.borrow() as blocks:
        assert [blocks.why(block) for block in range(4)] == [None] * 4
        assert all(same(tensor(blocks, block), RIGHT[block]) for block in range(4))
        assert len(desk.host.core.leases) == 2


def test_nothing_is_copied_what_changes_in_the_arena_shows(desk: Desk) -> None:
    with desk.borrow() as blocks:
        view, borrowed = blocks.page(1), tensor(blocks, 1)
        assert view is not None
        before = view[9]
        desk.host.read(desk.page(1).slot())[9] ^= 0xFF
        assert view[9] == before ^ 0xFF
        assert bits(borrowed)[9] == before ^ 0xFF


def test_a_page_cannot_be_written(desk: Desk) -> None:
    with desk.borrow() as blocks:
        view = blocks.page(0)
        assert view is not None and view.readonly
        with pytest.raises(TypeError):
            view[0] = 1


def in_another_process(what: str, address: str, namespace: str, block: str, epoch: int) -> None:
    """Borrows that block there, and does `what` is not to be done."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    want = PageWant(PageKey(BlockHash(bytes.fromhex(block)), 0, SPEC.whole(0)), 0, LAYERS)
    attempt = Attempt(Holder(os.urandom(HOLDER_BYTES)), 1)
    request = ReadRequest(NamespaceId(bytes.fromhex(namespace)), attempt, Epoch(epoch), (want,))
    with ShmPages(address, ANONYMOUS).borrow(request, Deadline.after_ms(BOUND_S * 1e3)) as borrowed:
        found = page_tensor(SPEC, 0, SPEC.whole(0), borrowed.views[0])
        assert found is not None and borrowed.valid(Deadline.after_ms(BOUND_S * 1e3))
        if what == "write":
            print("begins", flush=True)
            found.add_(1.0)
        elif what == "read in a forked child":
            child = os.fork()
            if not child:
                print("begins", flush=True)
                float(found[0, 0, 0, 0, 0])
                os._exit(0)
            _, status = os.waitpid(child, 0)
            assert len(found.tolist()) == LAYERS, "here it is there still"
            os.kill(os.getpid(), os.WTERMSIG(status))


@pytest.mark.parametrize("what", ["write", "read in a forked child"])
def test_what_must_not_be_done_with_a_tensor_ends_the_process_and_spoils_nothing(desk: Desk, what: str) -> None:
    ticket = desk.ticket()
    address, epoch = desk.servers[SHARD].address, int(desk.host.core.epoch)
    arguments = (what, address, ticket.body.namespace.hex(), ticket.hashes[0].hex(), epoch)
    script = f"from {__name__} import in_another_process as f; f(*{arguments!r})"
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, check=False, cwd=root, capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.returncode) == ("begins\n", -signal.SIGSEGV), ended.stderr
    desk.cluster.wait_until(desk.unleased)
    into = room(4)
    assert desk.client.load(TOKENS, into) == len(TOKENS)
    assert same(into, RIGHT)


@pytest.mark.parametrize(("start_", "stop"), [(0, 1), (1, 3), (0, 3)])
def test_a_client_of_some_layers_borrows_these_out_of_whole_pages(desk: Desk, start_: int, stop: int) -> None:
    client = desk.connect(part=Part(start_, stop, 0, HEADS))
    with desk.borrow(client=client) as blocks:
        for block in range(4):
            assert same(tensor(blocks, block), RIGHT[block, start_:stop])
        assert blocks.valid()


def test_a_client_of_some_heads_does_not_find_them_alone_in_whole_pages(desk: Desk) -> None:
    client = desk.connect(part=Part(0, LAYERS, 1, 3))
    with desk.borrow(client=client) as blocks:
        assert [blocks.page(block) for block in range(4)] == [blocks.tensor(block) for block in range(4)] == [None] * 4
        miss = Miss(MissReason.PART, "no single page holds exactly layers 0:3, heads 1:3 of group 0")
        assert [blocks.why(block) for block in range(4)] == [miss] * 4
        assert blocks.valid(), "no lease of it has ended"
    assert desk.unleased()


def test_what_lies_in_several_pages_is_not_put_together(start: Start) -> None:
    with ExitStack() as stack:
        desk = Desk(start(ram_bytes="1MiB"), stack)
        for part in (Part(0, 1, 0, HEADS), Part(1, LAYERS, 0, HEADS)):
            desk.store(source=kv(4, part=part), client=desk.connect(part=part))
        with desk.borrow() as blocks:
            assert blocks.page(0) is None
            why = blocks.why(0)
            assert why is not None and why.reason is MissReason.PART


def test_groups_of_several_kinds_are_borrowed_each_as_it_lies(start: Start) -> None:
    planes = (Plane("k", HEADS, DIM, "float32"), Plane("v", HEADS, DIM, "float32"))
    groups = (Group(layers=(0, 1), planes=planes), Group(layers=(2,), planes=(Plane.opaque("state", 40),)))
    spec = KVSpec(model="mixed", weights="sha256:1", block_tokens=BLOCK, groups=groups)
    with ExitStack() as stack:
        desk = Desk(start(ram_bytes="1MiB"), stack)
        client = desk.connect(spec)
        dense, states = kv(2, part=Part(0, 2, 0, HEADS)), [bytes([i] * 40) for i in (1, 2)]
        desk.store(prompt(2), [dense, Buffers([bytearray(state) for state in states])], client=client)
        with desk.borrow(prompt(2), client=client) as blocks:
            assert same(tensor(blocks, 1), dense[1])
            assert [data(blocks.page(block, 1)) for block in (0, 1)] == states
            with pytest.raises(CallerError, match=r"the planes of group 1 .* are opaque: .* use page\(block\)"):
                blocks.tensor(0, 1)
            assert blocks.valid()
        only = desk.connect(spec, part={0: Part(0, 2, 0, HEADS)})
        with desk.borrow(prompt(2), client=only) as blocks:
            assert same(tensor(blocks, 0), dense[0])
            with pytest.raises(CallerError, match="holds no part of group 1; connect with one that does"):
                blocks.page(0, 1)


# ------------------------------------------------------------------------------------------------- the lease


def test_it_is_renewed_as_long_as_it_is_open(start: Start) -> None:
    with ExitStack() as stack:
        desk = Desk(start(ram_bytes="1MiB", config={"shard": {"lease_ttl_ms": 1_000}}), stack)
        desk.store()
        with desk.borrow() as blocks:
            (lease,) = desk.host.core.leases.all()
            begun = lease.expires_at

            def outlived() -> bool:
                return lease.expires_at > begun + 1_000_000_000

            desk.cluster.wait_until(outlived)
            assert blocks.valid()


def test_borrowed_pages_that_are_evicted_are_not_reused_before_the_end(desk: Desk) -> None:
    pool = desk.host.core.pool
    with desk.borrow() as blocks:
        mine = list(pool.ready())
        desk.host.inspect(lambda: [pool.condemn(page) for page in mine])
        for seed in (7, 8, 9):  # each about as much as there is room for
            desk.client.store(prompt(300, seed), kv(300, seed))
        assert [page.state for page in mine] == [PageState.CONDEMNED] * 4
        assert all(same(tensor(blocks, block), RIGHT[block]) for block in range(4))
        assert blocks.valid()
    desk.cluster.wait_until(desk.unleased)
    assert PageState.CONDEMNED not in [page.state for page in mine]


def test_once_the_shard_has_ended_the_lease_it_is_not_valid_any_more(desk: Desk) -> None:
    with desk.borrow() as blocks:
        assert blocks.valid()
        desk.expire_leases()
        assert not blocks.valid()
        assert not blocks.valid()
        assert len(data(blocks.page(0))) == PAGE_BYTES, "to look at it is no error, only of no worth"
    with desk.borrow() as blocks:
        assert blocks.valid(), "those that are borrowed again are"


def test_of_several_shards_all_have_to_say_that_it_was_valid(start: Start) -> None:
    with ExitStack() as stack:
        desk = Desk(start(shards=2, ram_bytes="1MiB", config={"coordinator": {"run_blocks": 1}}), stack)
        tokens, right = prompt(12, 3), kv(12, 3)
        desk.store(tokens, right)
        with desk.borrow(tokens) as blocks:
            assert all(len(host.core.leases) == 1 for host in desk.cluster.shards.values())
            assert all(same(tensor(blocks, block), right[block]) for block in range(12))
            assert blocks.valid()
            desk.expire_leases()
            assert not blocks.valid()


def test_an_answer_that_does_not_come_in_time_is_none(desk: Desk) -> None:
    with desk.borrow() as blocks:
        assert not blocks.valid(deadline_ms=0)


# --------------------------------------------------------------------------------------------------- the end


def test_at_its_end_everything_is_given_back(desk: Desk) -> None:
    with pytest.raises(KeyError), desk.borrow() as blocks:
        view = blocks.page(0)
        assert len(desk.host.core.leases) == 1
        raise KeyError
    assert view is not None
    with pytest.raises(ValueError, match="released"):
        view[0]
    desk.cluster.wait_until(desk.unleased)
    blocks.close()
    for _ in range(3):  # its connection serves the next
        with desk.borrow() as blocks:
            assert blocks.valid()


def test_a_client_that_is_closed_gives_back_what_it_had_borrowed(desk: Desk) -> None:
    client = desk.connect()
    blocks = desk.borrow(client=client)
    client.close()
    with pytest.raises(CallerError, match="these blocks were released"):
        blocks.page(0)
    desk.cluster.wait_until(desk.unleased)


def test_what_is_dropped_is_given_back_when_it_is_collected(desk: Desk) -> None:
    held, ticket = [], desk.ticket()
    for _ in range(3):
        held.append(desk.client.borrow(ticket))
    view = held[0].page(0)
    assert view is not None and len(desk.host.core.leases) == 3
    with pytest.warns(ResourceWarning, match="4 borrowed blocks were not closed") as warned:
        held.clear()
        gc.collect()
    assert len(warned) == 3
    desk.cluster.wait_until(desk.unleased)
    with pytest.raises(ValueError, match="released"):
        bytes(view)
    with desk.client.borrow(ticket) as blocks:
        assert blocks.why(0) is None and blocks.valid()


def test_what_torch_has_made_of_it_keeps_the_memory_after_the_end(desk: Desk) -> None:
    client = desk.connect()
    with desk.borrow(client=client) as blocks:
        ours = tensor(blocks, 0)
        view = blocks.page(1)
        theirs = torch.frombuffer(view, dtype=torch.float32)
        del view
    client.close()
    del client
    gc.collect()
    for left, right in ((ours, RIGHT[0]), (theirs, RIGHT[1].flatten())):
        assert mapped(left.data_ptr()), "or a look at it would end this process"
        assert same(left, right)
    address = theirs.data_ptr()
    del ours, left
    gc.collect()
    assert mapped(address), "any of them keeps all of it"
    del theirs
    gc.collect()
    assert not mapped(address), "released blocks keep no mapping"
    blocks.close()


# ------------------------------------------------------------------------------------ what cannot be borrowed


def test_blocks_of_a_shard_that_is_reached_otherwise_are_none_and_say_so(desk: Desk) -> None:
    client = desk.connect(takes=("tcp", "grpc"))
    with desk.borrow(client=client) as blocks:
        assert [blocks.page(block) for block in range(4)] == [None] * 4
        left_out = "this client's configuration leaves it out"
        detail = (
            f"the transport in use is grpc, which cannot lend pages; shm: {left_out}; tcp: not offered by the shard"
        )
        miss = Miss(MissReason.SHARD_LOST, f"shard-0 is not reached over shared memory: {detail}")
        assert [blocks.why(block) for block in range(4)] == [miss] * 4
    into = room(4)
    assert client.load(TOKENS, into) == len(TOKENS)


def test_a_transport_that_cannot_lend_at_all_is_such_a_one(desk: Desk) -> None:
    client = desk.cluster.client(SPEC)
    with desk.borrow(client=client) as blocks:
        detail = "shard-0 is not reached over shared memory: the transport in use is memory, which cannot lend pages"
        assert blocks.why(0) == Miss(MissReason.SHARD_LOST, detail)
    assert client.status()["breakers"][SHARD]["failures"] == 0


def test_where_one_shard_lends_and_another_does_not_each_block_is_told_of(start: Start) -> None:
    with ExitStack() as stack:
        desk = Desk(start(shards=2, ram_bytes="1MiB", config={"coordinator": {"run_blocks": 1}}), stack)
        tokens, right = prompt(12, 3), kv(12, 3)
        desk.store(tokens, right)
        desk.servers["shard-1"].close()
        client = desk.connect()
        with desk.borrow(tokens, client=client) as blocks:
            there = [block for block in range(12) if blocks.why(block) is None]
            assert 0 < len(there) < 12
            assert all(same(tensor(blocks, block), right[block]) for block in there)
            assert all(blocks.page(block) is None for block in range(12) if block not in there)
            whys = [str(blocks.why(block)) for block in range(12) if block not in there]
            assert all("shard-1 is not reached over shared memory" in why for why in whys)
            assert blocks.valid()


class _Breaking(ShmPages):
    """A path that breaks when pages are borrowed."""

    def borrow(self, request: ReadRequest, deadline: Deadline) -> BorrowedPages:
        self.close()
        return super().borrow(request, deadline)


def test_a_path_that_fails_says_nothing_of_the_shard_and_is_left_alone(desk: Desk) -> None:
    client = desk.connect(path=lambda offer, token: _Breaking(offer.address, token))
    for words in ("shm: @.* this connection was closed", "in use is grpc, .*; shm: @.* closed; tcp: not offered"):
        with desk.borrow(client=client) as blocks:
            assert blocks.page(0) is None
            miss = blocks.why(0)
            assert miss is not None and miss.reason is MissReason.SHARD_LOST
            assert re.search(words, miss.detail)
    status = client.status()
    assert (status["breakers"][SHARD]["failures"], status["transports"][SHARD]["name"]) == (0, "grpc")
    into = room(4)
    assert client.load(TOKENS, into) == len(TOKENS)


def test_what_a_shard_has_lost_or_spoiled_misses_and_the_rest_is_there(desk: Desk) -> None:
    ticket = desk.ticket()
    pool, (evicted, spoiled) = desk.host.core.pool, (desk.page(1), desk.page(2))
    desk.host.inspect(lambda: pool.condemn(evicted))
    desk.host.read(spoiled.slot())[PAGE_BYTES // 2] ^= 1
    with desk.client.borrow(ticket) as blocks:
        reasons = [miss and miss.reason for miss in map(blocks.why, range(4))]
        assert reasons == [None, MissReason.EVICTED, MissReason.CORRUPT, None]
        assert [blocks.page(block) is None for block in range(4)] == [False, True, True, False]
        assert same(tensor(blocks, 3), RIGHT[3])
        assert blocks.valid()

    def condemned() -> bool:
        return len(desk.host.inspect(lambda: list(pool.ready()))) == 2  # type: ignore[arg-type]

    desk.cluster.wait_until(condemned)


def test_a_deadline_that_has_passed_is_a_miss(desk: Desk) -> None:
    with desk.client.borrow(desk.ticket(), deadline_ms=0) as blocks:
        miss = blocks.why(3)
        assert blocks.page(3) is None and miss is not None and miss.reason is MissReason.DEADLINE


def test_a_ticket_for_nothing_borrows_nothing(desk: Desk) -> None:
    with desk.borrow(prompt(2, 99)) as blocks:
        assert blocks.blocks == 0
        assert blocks.valid()


class _Forgetful(ShmPages):
    """Its shard has forgotten the namespace when it is first asked."""

    forgets = 1

    def borrow(self, request: ReadRequest, deadline: Deadline) -> BorrowedPages:
        if self.forgets:
            self.forgets -= 1
            raise RefusedByShard(Refused(RefusedKind.UNKNOWN_NAMESPACE, "attach first"))
        return super().borrow(request, deadline)


def test_a_namespace_that_the_shard_forgot_is_named_to_it_again(desk: Desk) -> None:
    client = desk.connect(path=lambda offer, token: _Forgetful(offer.address, token))
    with desk.borrow(client=client) as blocks:
        assert same(tensor(blocks, 0), RIGHT[0])
    assert desk.controls[-1].attaches == 2


# --------------------------------------------------------------------------------------------------- misuse


def test_misuse_is_said_in_words(desk: Desk) -> None:
    ticket: Any = b"no ticket"
    with pytest.raises(CallerError, match="expected a ticket of prepare_load or redeem, not a bytes"):
        desk.client.borrow(ticket)
    with desk.borrow() as blocks:
        for block in (-1, 4, True, "0"):
            wrong: Any = block
            for ask in (blocks.page, blocks.tensor, blocks.why):
                with pytest.raises(CallerError, match=f"no block {block!r}; the ticket has 4"):
                    ask(wrong)
        with pytest.raises(CallerError, match="there is no group 1; the spec has 1"):
            blocks.page(0, 1)
        with pytest.raises(CallerError, match="not a number of milliseconds"):
            blocks.valid(deadline_ms=float("nan"))
        assert blocks.valid()
    for use in (lambda: blocks.page(0), lambda: blocks.tensor(0), blocks.valid, blocks.__enter__):
        with pytest.raises(CallerError, match="released: use them within the `with` block"):
            use()
    desk.client.close()
    with pytest.raises(CallerError, match="closed; connect again"):
        desk.client.borrow(ticket=Ticket(blocks_of(desk), TicketSeal(None)))


def blocks_of(desk: Desk) -> Any:
    return desk.ticket(client=desk.connect()).body


def test_a_ticket_for_less_than_this_clients_part_is_refused(desk: Desk) -> None:
    ticket = desk.ticket(client=desk.connect(part=Part(0, 1, 0, HEADS)))
    with pytest.raises(CallerError, match="Prepare it with a client that holds both"):
        desk.client.borrow(ticket)
    assert desk.unleased()
