"""Fingerprints the weights of an engine: a text that is equal exactly if the checkpoints are equal.

A hub's snapshot has its commit in its path, which is the fingerprint. Any other checkpoint is read: SHA-256 over the
names and bytes of all its files. That takes about a second per gigabyte, so the digest is cached by each file's path,
size, mtime and inode, in a file that the processes of a host share; one process reads while the others wait for it.

A file that is rewritten in place with its mtime set back would be missed. Weights that change in memory are not seen
here at all: the engine's reset handles those.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvcluster.errors import CallerError

_COMMIT = re.compile(r"[0-9a-f]{40}")
_CHUNK_BYTES = 8 * 2**20
_DOMAIN = b"kvcluster-checkpoint-v1"
_REMEMBERED_IN = "weights.json"
_REMEMBERED = 256
"""Cached fingerprints of one host, including those of adapters."""


def fingerprint(path: str, cache: Path | None = None) -> str:
    """Returns the fingerprint of a checkpoint: a folder, or one file. `cache` is the folder of cached fingerprints, by
    default the user's.

    Raises CallerError if there is nothing to read, or if a file changes while it is read.
    """
    commit = _snapshot(Path(path))
    if commit is not None:
        return f"commit:{commit}"
    files = _files(Path(path))
    cache = cache or _user_cache()
    with _one_at_a_time(cache) as remembered:
        before = _state(files)
        key = json.dumps(before)
        if key not in remembered:
            digest = _read(files)
            if _state(files) != before:
                raise CallerError(f"{path} changed while it was read; start the engine when it is complete")
            remembered[key] = digest
        return remembered[key]


def known_fingerprint(path: str, cache: Path | None = None) -> tuple[str, int]:
    """Returns the fingerprint of a checkpoint if it is known without reading its files, otherwise ""; and the bytes of
    the files. Raises CallerError if there is nothing to read."""
    commit = _snapshot(Path(path))
    files = _files(Path(path))
    nbytes = sum(file.stat().st_size for _, file in files)
    if commit is not None:
        return f"commit:{commit}", nbytes
    return _remembered_in(cache or _user_cache()).get(json.dumps(_state(files)), ""), nbytes


def _snapshot(path: Path) -> str | None:
    """Returns the commit in the path of a hub's snapshot, .../snapshots/<commit>; None for any other path."""
    parts = Path(os.path.abspath(path)).parts
    if len(parts) >= 2 and parts[-2] == "snapshots" and _COMMIT.fullmatch(parts[-1]):
        return parts[-1]
    return None


def _files(path: Path) -> list[tuple[str, Path]]:
    """Returns the files below a path with their relative names, sorted, without hidden ones. Raises CallerError if
    there are none."""
    if path.is_file():
        return [(path.name, path)]
    found: list[tuple[str, Path]] = []
    for folder, folders, names in os.walk(path, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [
            (Path(folder, name).relative_to(path).as_posix(), Path(folder, name))
            for name in names
            if not name.startswith(".")
        ]
    if not found:
        raise CallerError(f"{path} holds no files, so its weights have no fingerprint; give weights='sha256:...'")
    return sorted(found)


def _state(files: list[tuple[str, Path]]) -> list[list[object]]:
    state: list[list[object]] = []
    for name, path in files:
        try:
            status = path.stat()
        except OSError as error:
            raise CallerError(f"cannot read {path}: {error.strerror}") from None
        state.append([name, os.path.realpath(path), status.st_size, status.st_mtime_ns, status.st_ino])
    return state


def _read(files: list[tuple[str, Path]]) -> str:
    digest = hashlib.sha256(_DOMAIN)
    for name, path in files:
        of_file = hashlib.sha256()
        try:
            with path.open("rb") as file:
                while chunk := file.read(_CHUNK_BYTES):
                    of_file.update(chunk)
        except OSError as error:
            raise CallerError(f"cannot read {path}: {error.strerror}") from None
        encoded = name.encode("utf-8", "surrogateescape")
        digest.update(len(encoded).to_bytes(8, "little") + encoded + of_file.digest())
    return "sha256:" + digest.hexdigest()


def _remembered_in(cache: Path) -> dict[str, str]:
    """Returns the cached digests by state; {} if there are none."""
    with suppress(OSError, ValueError):
        read = json.loads((cache / _REMEMBERED_IN).read_text(encoding="utf-8"))
        return read if isinstance(read, dict) else {}
    return {}


def _user_cache() -> Path:
    return Path("~/.cache/kvcluster").expanduser()


@contextmanager
def _one_at_a_time(cache: Path) -> Iterator[dict[str, str]]:
    """Locks the cache and yields its digests by state; digests added meanwhile are written back. If the folder cannot
    be used, yields an empty dict, so that everything is read again."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = os.open(cache / "weights.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:
        yield {}
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        kept, remembered = cache / _REMEMBERED_IN, _remembered_in(cache)
        known = len(remembered)
        yield remembered
        if len(remembered) > known:
            with suppress(OSError):
                new = kept.with_suffix(".new")
                latest = dict(list(remembered.items())[-_REMEMBERED:])
                new.write_text(json.dumps(latest), encoding="utf-8")
                new.replace(kept)
    finally:
        os.close(lock)
