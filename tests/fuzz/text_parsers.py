"""The readers of files, settings and arguments that operators write and engines pass.

Files are real ones, without a place in any folder: what is read is what an operator's file would be read as.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache

from kvcluster import config
from kvcluster.core import hashing, limits
from kvcluster.core.ids import HASH_BYTES, NamespaceId, Tenant
from kvcluster.core.messages import Tombstone
from kvcluster.errors import CallerError, ConfigError, CredentialError, ProtocolError
from kvcluster.runtime import auth, tombstones
from kvcluster.transport.addresses import check_address
from kvcluster.wire import versions
from tests.fuzz.contract import Parser, trees
from tests.fuzz.trees import Kind, Node, fields, words

_CONFIGURATIONS = (
    b"",
    b"shards = 2\n[shard]\nram_bytes = '1GiB'\nlease_ttl_ms = 10_000\n",
    b'[server]\nhost = "0.0.0.0" # all of them\nport = 7070\ninsecure = true\n[security]\nencryption = "none"\n',
    b"client = { deadline_ms = 0x10, connect_ms = 1 }\nmembership_ttl_ms = 5000\n",
    b'coordinator.hold_ms = 0\ncoordinator.high_free = 1e-1\n"stall_ms" = 500\n',
    b"[server]\nhost = '''::1'''\ntoken_file = \"\"\"a\\u00e9\n\"\"\"\n",
    b"[shard]\nscrub_bytes = 0b101\nextent_bytes = '4 KiB'\n",
)
_CONFIGURATION_WORDS = (
    "[ ]] = . { } inf nan -1 1e999 0x 1_0 true false 1979-05-27 12:60 2000-01-01T00:00:00+23:59 "
    '\'\' """ \\u shard client. '
    f"99999999999999999999 1e-400 0o777777777777777777777777 KiB 0.9 _ms {'[' * 1_500} {'{a=' * 1_500}"
)
_SIZES = (b"1GiB", b" 512 MiB ", b"4096", b"0.5tib", b"1.25 KB")
_SIZE_WORDS = "GiB kib TB . 0 -1 1e9 999999999999 b"
_TOKENS = (
    f"sha256:{'0a' * 32}  team-a\n# a comment\n\nsha256:{'1b' * 32}\tteam.b_2\r\n".encode(),
    f"sha256:{'c3' * 32} x".encode(),
)
_TOKEN_WORDS = f"sha256: {'f' * 64} operator - . #"
_ADDRESSES = (b"127.0.0.1:7070", b"[::1]:1", b"kvcluster-coordinator.default.svc:65535", b"localhost:80")
_VERSIONS = (b"1 2 0.2.0.dev0", b"2 3 1.0", b"4 5 2.0+local", b"1 1 0.1")
_HASHES = (bytes([32]) + bytes(32), (bytes([16]) + b"h" * 16) * 3, bytes([255]) + bytes(255))

_STONES = (
    (),
    (Tombstone(1, Tenant("t")),),
    (Tombstone(7, Tenant("é"), model="m", weights="sha256:1"), Tombstone(8, Tenant(""), adapter="")),
)
_STONE_WORDS = '"number" "tenant" "model": null true [] {} , : 1e9 NaN -1 "\\ud800" 0'

_NAMESPACE = NamespaceId(bytes(HASH_BYTES))
_KNOWN = auth.Authenticator({auth.digest("known"): Tenant("t")}, "internal")


@cache
def _file() -> int:
    return os.memfd_create("kvcluster-fuzz")


def _path_of(data: bytes) -> str:
    """A file that holds this, until the next is asked for."""
    file = _file()
    os.ftruncate(file, 0)
    os.pwrite(file, data, 0)
    return f"/proc/self/fd/{file}"


def _read_tokens(data: bytes) -> object:
    return auth.authenticator(config.Config(server=config.ServerConfig(token_file=_path_of(data))), "internal")


def _read_foreign(data: bytes) -> object:
    """An engine's own hashes, each as long as the byte before it says, the last as long as there are bytes."""
    found = []
    while data:
        found.append(data[1 : 1 + data[0]])
        data = data[1 + data[0] :]
    return hashing.foreign(_NAMESPACE, found)


def _foreign(data: bytes) -> Node:
    nodes = []
    while data:
        nodes.append(Node(Kind.MANY, children=[*fields(data, (1,)), Node(Kind.BYTES, data[1 : 1 + data[0]])]))
        data = data[1 + data[0] :]
    return Node(Kind.MANY, children=nodes)


def _read_resealed(data: bytes) -> object:
    """Tombstones whose digest is right, whatever they are."""
    return tombstones.parse(_sealed(data))


def _sealed(body: bytes) -> bytes:
    head = tombstones.unparse(1, ()).split(b" ")[:3]
    return b" ".join([*head, hashlib.sha256(head[2] + b"\n" + body).hexdigest().encode()]) + b"\n" + body


def _text(
    name: str, read: Callable[[bytes], object], inputs: Sequence[bytes], raises: type[Exception], more: str = ""
) -> Parser:
    return Parser(name, read, lambda: trees(inputs, words), (raises,), words=more.encode().split())


def _said(data: bytes) -> versions.Versions:
    return versions.versions_in([(versions.VERSIONS_KEY, data.decode("latin-1"))])


def text_parsers() -> Iterator[Parser]:
    """All of them."""
    yield _text(
        "configuration",
        lambda data: config.load(_path_of(data)),
        _CONFIGURATIONS,
        ConfigError,
        _CONFIGURATION_WORDS,
    )
    yield _text("size", lambda data: config.size(data.decode("utf-8", "replace")), _SIZES, ConfigError, _SIZE_WORDS)
    tokens = _text("token file", _read_tokens, _TOKENS, ConfigError, _TOKEN_WORDS)
    yield replace(tokens, memory=tokens.memory + limits.TOKEN_FILE_BYTES)  # which it reads at once
    files = [tombstones.unparse(3, stones) for stones in _STONES]
    yield _text("tombstones", tombstones.parse, files, ValueError, _STONE_WORDS)
    bodies = [file.split(b"\n", 1)[1] for file in files]
    yield _text("tombstones, resealed", _read_resealed, bodies, ValueError, _STONE_WORDS)
    # What gRPC hands on of a header is text of one byte a character.
    known = (b"known", b"internal")
    yield _text("bearer token", lambda data: _KNOWN.caller(data.decode("latin-1")), known, CredentialError)
    yield _text("versions", _said, _VERSIONS, ProtocolError, "0 1 2 3 999999 9999999 -1 1e9")
    yield _text(
        "address", lambda data: check_address(data.decode("utf-8", "replace")), _ADDRESSES, ConfigError, ": 65536"
    )
    yield Parser("foreign hashes", _read_foreign, lambda: trees(_HASHES, _foreign), (CallerError,))
