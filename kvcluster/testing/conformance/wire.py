"""Claims for a transport whose shard is served at an address: what each end does when the other one misbehaves.

A test module inherits WireClaims beside TransportConformance and provides these fixtures. Each is a parametrised list
of malformed input in the bytes of that transport; the claims say what must follow from it.

- `wire`: a Wire. `bad_address`: a string that is not an address of this transport.
- `bad_request`: a function that sends bytes that are not a request to the world's shard and returns the words of the
  refusal; and the pattern that they must match.
- `bad_store`: the same for a store of a Content that becomes malformed after it was granted, or ends too early.
- `cut_store`: a function that begins a store of a Content and stops sending in the middle of it.
- `bad_load_answer`, `bad_store_answer`: a data path to a server that answers with these bytes; for a load also how many
  layers arrive before the answer becomes wrong.
- `refusing`: a data path to a server that refuses every store, and the Refused that it sends.
- `silent`: a data path to a server that accepts connections and never answers, and its address.

NetworkClaims holds in addition if the server copies the bytes into the arena itself: then a stalled worker cannot write
into a page, and the end of its lease frees that page. Over shared memory it can, so the page is kept.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvcluster.core import limits
from kvcluster.core.ids import HOLDER_BYTES, Attempt, Epoch, Holder, Tenant
from kvcluster.core.messages import Refused, Written
from kvcluster.core.miss import MissReason
from kvcluster.core.shard.page import PageState
from kvcluster.errors import ConfigError, CredentialError, ProtocolError
from kvcluster.testing.conformance.content import (
    Content,
    ContentSink,
    ContentSource,
    load,
    page_calls,
    read_begun,
    store,
    stored,
    unavailable,
    write_begun,
)
from kvcluster.testing.conformance.world import BOUND_S, ONE, World, soon
from kvcluster.transport.base import DataPath, Deadline, RefusedByShard, Unavailable
from kvcluster.transport.credentials import Credentials

EVICTED = MissReason.EVICTED

BadRequest = tuple[Callable[[World], str], str]
BadStore = tuple[Callable[[World, Content], str], str]
CutStore = Callable[[World, Content], object]


@dataclass(frozen=True)
class Wire:
    """A transport that is served at an address."""

    client: type[DataPath]
    """Its client side, constructed with an address and Credentials; a class that another process can import."""

    address_form: str
    """The form of an address, as the error about a wrong one gives it."""

    token: Callable[[Tenant], str]
    """Returns the credential of a tenant that the world's server knows."""

    def open(self, address: str, token: str | None) -> DataPath:
        return self.client(address, Credentials(token))  # type: ignore[call-arg]


def unserved(pages: int, layers: int, layer_bytes: int, *, epoch: int = 1) -> Content:
    """Returns content for a shard of another process, whose epoch is given."""
    attempt = Attempt(Holder(os.urandom(HOLDER_BYTES)), 1)
    return Content.of(SimpleNamespace(epoch=Epoch(epoch), attempt=lambda: attempt), pages, layers, layer_bytes)


def store_half(client: type[DataPath], address: str, token: str, epoch: int) -> None:
    """Runs in the worker process that is killed: sends one and a half of three pages, prints a line and waits."""
    content = unserved(3, 2, limits.FRAME_BYTES, epoch=epoch)
    request = content.write_request()

    def wait_half_way() -> None:
        if len(source.copied) == 3:
            os.write(sys.stdout.fileno(), b"half-way\n")
            threading.Event().wait(BOUND_S)

    source = ContentSource(content, request, wait_half_way)
    client(address, Credentials(token)).write(request, source, soon())  # type: ignore[call-arg]


def address_of(world: World) -> str:
    """Returns the address at which the world's server listens."""
    address: str = world.served.address  # type: ignore[attr-defined]
    return address


class WireClaims:
    """Claims about clients and servers that misbehave."""

    # ------------------------------------------------------------------------- what a server does with bad input

    def test_what_is_no_request_is_refused_in_words(self, world: World, bad_request: BadRequest) -> None:
        send, pattern = bad_request
        assert re.search(pattern, send(world))

    def test_nonsense_in_the_middle_of_a_store_ends_it_in_words(self, world: World, bad_store: BadStore) -> None:
        send, pattern = bad_store
        content = Content.of(world, 3, 2, 100)
        transport = world.open()
        transport.attach(content.spec, soon())
        request = content.write_request(keys=content.keys[2:])
        assert transport.write(request, ContentSource(content, request), soon()) == [Written.COMMITTED]
        assert re.search(pattern, send(world, content))
        world.wait_until_unleased()
        assert load(transport, content) == [EVICTED, EVICTED, None]

    def test_a_client_that_stops_sending_anywhere_leaves_nothing_behind(
        self, world: World, cut_store: CutStore
    ) -> None:
        content = Content.of(world, 1, 2, 100)
        world.open().attach(content.spec, soon())
        cut_store(world, content)
        world.wait_until_unleased()
        assert world.host.core.pool.allocator.used_bytes == 0

    def test_a_worker_killed_half_way_leaves_nothing_that_could_be_read(self, world: World, wire: Wire) -> None:
        content = Content.of(world, 3, 2, limits.FRAME_BYTES)
        transport = world.open()
        transport.attach(content.spec, soon())
        arguments = f"{wire.client.__qualname__}, {address_of(world)!r}, {wire.token(ONE)!r}, {world.epoch}"
        script = (
            f"from {__name__} import store_half; from {wire.client.__module__} import {wire.client.__qualname__}; "
            f"store_half({arguments})"
        )
        root = Path(__file__).parents[3]
        with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=root) as worker:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "half-way\n"
            states = world.host.inspect(lambda: [page.state for page in world.host.core.pool.everything()])
            assert states == [PageState.WRITING] * 3
            assert load(transport, content) == [MissReason.PENDING] * 3
            worker.kill()
        world.wait_until_unleased()
        assert world.host.core.pool.allocator.used_bytes == 0
        assert load(transport, content) == [EVICTED] * 3
        store(transport, content)
        assert load(transport, content) == [None] * 3

    def test_a_reader_that_stands_still_loses_its_pins_when_its_lease_ends(self, world: World) -> None:
        transport, content = stored(world)
        reading = read_begun(transport, content)
        world.expire_leases()
        world.wait_until_unleased()
        with pytest.raises(Unavailable):
            reading.finish()

    # ---------------------------------------------------------------------------------------------- credentials

    @pytest.mark.parametrize("wrong", ["", "a guess", "truncated", "padded"])
    def test_without_a_token_that_it_knows_a_shard_moves_nothing(self, world: World, wire: Wire, wrong: str) -> None:
        content = Content.of(world, 1, 1, 100)
        store(world.open(), content)
        known = wire.token(ONE)
        stranger = wire.open(address_of(world), {"truncated": known[:-1], "padded": known + " "}.get(wrong, wrong))
        for call in page_calls(stranger, content):
            with pytest.raises(CredentialError, match="token"):
                call()
        stranger.close()

    # ------------------------------------------------------------------------ what a client does with bad servers

    def test_an_address_that_is_none_is_a_config_error(self, wire: Wire, bad_address: str) -> None:
        with pytest.raises(ConfigError, match=wire.address_form):
            wire.open(bad_address, None)

    def test_silence_is_trouble_by_the_deadline(self, silent: tuple[DataPath, str]) -> None:
        path, address = silent
        for call in page_calls(path, unserved(1, 1, 8), deadline=lambda: Deadline.after_ms(50)):
            with unavailable(MissReason.DEADLINE) as trouble:
                call()
            assert address in str(trouble.value), "the error names the address"

    def test_a_shard_that_answers_a_load_wrongly_is_a_protocol_error(
        self, bad_load_answer: tuple[DataPath, int]
    ) -> None:
        path, layers_before = bad_load_answer
        content = unserved(2, 3, 8)
        request = content.read_request([want._replace(layer_stop=2) for want in content.wants()])
        sink = ContentSink(content, request)
        with pytest.raises(ProtocolError):
            list(path.read(request, sink, soon()))
        assert not sink.got
        assert len(sink.corrupt) == layers_before, "the layers before the error are zeros, which do not verify"

    def test_a_shard_that_answers_a_store_wrongly_is_a_protocol_error(self, bad_store_answer: DataPath) -> None:
        content = unserved(2, 3, 8)
        request = content.write_request()
        with pytest.raises(ProtocolError):
            bad_store_answer.write(request, ContentSource(content, request), soon())

    def test_a_refusal_is_heard_wherever_it_comes(self, refusing: tuple[DataPath, Refused]) -> None:
        path, refused = refusing
        content = unserved(1, 1, 8)
        request = content.write_request()
        with pytest.raises(RefusedByShard) as raised:
            path.write(request, ContentSource(content, request), soon())
        assert raised.value.refused == refused


class NetworkClaims(WireClaims):
    """Claims about servers that copy what arrives into the arena themselves."""

    def test_a_writer_that_stands_still_loses_its_pages_when_its_lease_ends(self, world: World) -> None:
        content = Content.of(world, 2, 2, limits.FRAME_BYTES // 2)
        under_way, pause = write_begun(world, world.open(), content, at=2)
        world.expire_leases()
        world.wait_until_unleased()
        assert world.host.core.pool.allocator.used_bytes == 0
        pause.release()
        with pytest.raises(Unavailable):
            under_way.result(BOUND_S)
