"""The attacks of a tenant that has shards attend: lookups, computes and messages that cost others their time.

attackers.py lists them. They speak to shards over their sockets and gRPC themselves, many exchanges at once.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

import kvcluster
from kvcluster.attention import uses_fused
from kvcluster.config import ClientConfig
from kvcluster.core import limits
from kvcluster.core.attend_work import attend_work
from kvcluster.core.ids import HASH_BYTES, HOLDER_BYTES, Attempt, BlockHash, Holder, SpanId
from kvcluster.core.messages import (
    AttachedShard,
    AttachShard,
    AttendRequest,
    AttendRow,
    RegisterSpans,
    SpanBlocks,
    SpansLacking,
)
from kvcluster.core.position_tree import CUT_TOKENS
from kvcluster.errors import LimitError
from kvcluster.transport.base import Deadline, RefusedByShard
from kvcluster.transport.rpc import Connection
from kvcluster.transport.tcp_pages import TcpPages
from kvcluster.wire.methods import COORDINATOR, SHARD
from kvcluster.wire.shard import query_bytes
from kvcluster.wire.v1 import coordinator_pb2, shard_pb2
from tests.attacks.reach import shows, tcp_pages
from tests.attacks.setting import ATTENDED

if TYPE_CHECKING:
    from tests.attacks.attackers import Target

_AT_ONCE = 16
_PATIENT_MS, _DEADLINE_MS = 60_000, 3_000
_SPANS = limits.PAGES_PER_CALL // limits.BLOCKS_PER_CALL
_CUTS = 64
_CONFIG = ClientConfig(deadline_ms=60_000, connect_ms=60_000)

Act = Callable[[], int]


@dataclass(frozen=True, slots=True)
class _Shard:
    """A shard that this worker has attached to, and the sockets that reach it."""

    attached: AttachedShard
    control: Connection
    paths: tuple[TcpPages, ...]
    holder: Holder

    def register(self, *spans: SpanBlocks) -> None:
        message = RegisterSpans(self.holder, self.attached.epoch, spans)
        self.control.ask(SHARD["RegisterSpans"], message, Deadline.after_ms(_PATIENT_MS), self.attached.namespace)

    def request(self, number: int, *rows: AttendRow) -> AttendRequest:
        return AttendRequest(
            Attempt(self.holder, number), self.attached.epoch, 0, 1, 1, "float32", 1.0, rows, fused=uses_fused()
        )

    def attend(self, number: int, request: AttendRequest, deadline_ms: float) -> Any:
        """Returns the answer to this request, as the attempt of this number. Raises KVClusterError."""
        mine = replace(request, attempt=Attempt(self.holder, number))
        query = memoryview(bytearray(query_bytes(mine)))
        try:
            return self.paths[number % len(self.paths)].attend(mine, query, Deadline.after_ms(deadline_ms)).answer
        except RefusedByShard as refused:
            raise LimitError(refused.refused.detail) from None


@contextmanager
def made_up_spans(target: Target) -> Iterator[Act]:
    """Attends to registered spans of blocks that no shard has, as many as one message may name."""
    with _shards(target) as shards:
        for shard in shards:
            for span in range(_SPANS):
                hashes = tuple(BlockHash(os.urandom(HASH_BYTES)) for _ in range(limits.BLOCKS_PER_CALL))
                shard.register(SpanBlocks(SpanId(span), 0, ATTENDED.whole(0), 0, hashes))
        row = AttendRow(0, 1, tuple(map(SpanId, range(_SPANS))), ((0, 0),))
        with _repeated({shard.control.address: (shard, row) for shard in shards}, _PATIENT_MS) as act:
            yield act


@contextmanager
def long_computes(target: Target) -> Iterator[Act]:
    """Attends of one head of one channel, whose products cost little and whose exponentials take seconds."""
    tokens = list(range(_CUTS * CUT_TOKENS))
    with kvcluster.connect(target.coordinator, ATTENDED, token=target.token, config=_CONFIG) as client:
        client.store(tokens, torch.zeros(_CUTS, 1, 2, CUT_TOKENS, 1, 1, dtype=torch.float16))
        client.flush(deadline_ms=60_000)
        names = client.hashes(tokens)
    with _shards(target) as shards:
        asked: dict[str, tuple[_Shard, AttendRow]] = {}
        for shard in shards:
            shard.register(*(SpanBlocks(SpanId(at), 0, ATTENDED.whole(0), at, (names[at],)) for at in range(_CUTS)))
            every = AttendRow(len(tokens), 0, tuple(map(SpanId, range(_CUTS))), ())
            answer = shard.attend(10**9, shard.request(0, every), _PATIENT_MS)
            lacking = dict(answer.spans) if isinstance(answer, SpansLacking) else {}
            mine = tuple(span for span in every.spans if span not in lacking)
            if mine:
                most = limits.ATTEND_WORK // attend_work(1, len(mine), heads=1, channels=2)
                queries = min(limits.ATTEND_TOKENS, most)
                root = (_CUTS.bit_length() - 1, 0)
                asked[shard.control.address] = shard, AttendRow(len(tokens), queries, mine, (root,) * (most // queries))
        assert asked, "no shard has a block of what was stored"
        with _repeated(asked, _DEADLINE_MS) as act:
            yield act


def long_registrations(target: Target) -> dict[str, tuple[str, Callable[[], bytes]]]:
    """Returns for each shard a registration of 60 MiB, as valid as protobuf has it: numbers of spans that end."""
    ended = _packed(shard_pb2.RegisterSpansRequest, "ended", 60 * 2**20)
    return {address: (SHARD["RegisterSpans"].path, lambda: ended) for address in target.shards}


def long_questions(target: Target) -> dict[str, tuple[str, Callable[[], bytes]]]:
    """Returns for the coordinator a store with as many token ids as a question has bytes."""
    tokens = _packed(coordinator_pb2.PrepareStoreRequest, "tokens", limits.QUESTION_BYTES - 16)
    return {target.coordinator: (COORDINATOR["PrepareStore"].path, lambda: tokens)}


# -------------------------------------------------------------------------------------------- helpers


@contextmanager
def _shards(target: Target) -> Iterator[list[_Shard]]:
    """All shards, to each of which one worker has attached."""
    with ExitStack() as house:
        shards = []
        for address, socket in zip(target.shards, target.sockets, strict=True):
            control = Connection(address, shows(target.token))
            paths = tuple(tcp_pages(socket, target.token) for _ in range(_AT_ONCE))
            for link in (control, *paths):
                house.callback(link.close)
            attached = control.ask(SHARD["Attach"], AttachShard(ATTENDED), Deadline.after_ms(_PATIENT_MS))
            assert isinstance(attached, AttachedShard)
            shards.append(_Shard(attached, control, paths, Holder(os.urandom(HOLDER_BYTES))))
        yield shards


@contextmanager
def _repeated(asked: Mapping[str, tuple[_Shard, AttendRow]], deadline_ms: float) -> Iterator[Act]:
    """Attends to these rows at their shards in turn, _AT_ONCE of them under way at any time."""
    requests = [(shard, shard.request(0, row)) for shard, row in asked.values()]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        under_way: deque[Future[Any]] = deque()
        number = 0

        def act() -> int:
            nonlocal number
            while len(under_way) < _AT_ONCE:
                number += 1
                shard, request = requests[number % len(requests)]
                under_way.append(pool.submit(shard.attend, number, request, deadline_ms))
            under_way.popleft().result()
            return 1

        yield act


def _packed(message: Any, field: str, nbytes: int) -> bytes:
    """Returns a message whose packed field `field` has so many numbers of one byte."""
    tag, length = message.DESCRIPTOR.fields_by_name[field].number << 3 | 2, nbytes
    head = [tag]
    while length >= 128:
        head.append(length & 127 | 128)
        length >>= 7
    return bytes([*head, length]) + bytes(nbytes)
