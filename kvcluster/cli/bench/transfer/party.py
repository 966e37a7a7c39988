"""A worker process of the benchmark: it serves pages, or loads and stores them, on command.

It runs one driver, which is a module or a Python file (benchmarks/README.md says what it contains), and exchanges lines
of JSON with the process that started it. The same few lines drive our own transports and every peer, so that all of
them copy from and into the same kind of memory, touched before, and are timed at the same two places. It imports only
the standard library: a peer may be installed in another environment, without kvcluster.

    party.py probe DRIVER    what it offers, and why it cannot be run here
    party.py serve           {work}                  <- {"at", "pids"};  then "forget" and "end"
    party.py client          {work}                  <- {};  then "open", "load", "store", "check", "pages", "forget"
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import mmap
import os
import random
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import IO, Any, Protocol

_COMPARED_BYTES = 2**20
_START_S = 60.0
_END_S = 10.0


@dataclass(frozen=True)
class Work:
    """What is moved: `pages` pages of `page_bytes` each, by `clients` processes, of which this is number `client`."""

    page_bytes: int
    pages: int
    clients: int
    client: int = 0
    source: memoryview = field(default_factory=lambda: memoryview(b""))
    into: memoryview = field(default_factory=lambda: memoryview(b""))

    @property
    def nbytes(self) -> int:
        return self.page_bytes * self.pages

    def page(self, number: int) -> slice:
        """Returns the position of that page in `source` and in `into`."""
        return slice(number * self.page_bytes, (number + 1) * self.page_bytes)


class Path(Protocol):
    """One way to move pages. A batch is a number that names all of a client's pages at once."""

    def store(self, batch: int) -> None:
        """Stores `source` under the batch's names, which are new. Returns when the other side has the pages."""

    def load(self, batch: int) -> None:
        """Loads the pages stored under the batch's names into `into`."""

    def forget(self, batch: int) -> None:
        """Drops the batch, so that its memory can be reused."""

    def close(self) -> None: ...


class _Voice:
    """Writes lines of JSON to the original standard output, and redirects other prints: a library that prints must not
    be taken for an answer."""

    def __init__(self) -> None:
        self._out: IO[str] = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", closefd=False)  # keeps output before a crash

    def say(self, **answer: Any) -> None:
        self._out.write(json.dumps(answer) + "\n")
        self._out.flush()


def load_driver(name: str) -> Any:
    """Imports a module by its name, or a file by its path, in which `import party` means this module."""
    sys.modules["party"] = sys.modules[__name__]
    if not name.endswith(".py"):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location("driver", name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["driver"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def warm_memory(nbytes: int) -> memoryview:
    """Returns anonymous memory in whole pages of the system, all of which have been touched."""
    view = memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    for at in range(0, nbytes, mmap.PAGESIZE):
        view[at] = 1
    return view


def free_port() -> int:
    """Returns a free TCP port of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@contextmanager
def running(command: Sequence[str], *, ready: Callable[[], bool]) -> Iterator[int]:
    """Runs a peer's server; yields its process id once it is `ready`. It ends with this process, however this ends."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=2,
        preexec_fn=_die_with_parent,  # noqa: PLW1509 - a party that starts a server has no other thread yet
    )
    try:
        until = time.monotonic() + _START_S
        while not ready():
            if process.poll() is not None or time.monotonic() > until:
                raise OSError(f"{command[0]} is not ready; its status is {process.poll()}")
            time.sleep(0.05)
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def listens(port: int) -> bool:
    """Returns whether a server accepts connections on that port."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def _die_with_parent() -> None:
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


class _Client:
    """A client: its memory, and its open paths."""

    def __init__(self, work: dict[str, Any]) -> None:
        plain = Work(**work)
        source, into = warm_memory(plain.nbytes), warm_memory(plain.nbytes)
        draw = random.Random(plain.client)
        for at in range(0, plain.nbytes, _COMPARED_BYTES):
            here = source[at : at + _COMPARED_BYTES]
            here[:] = draw.randbytes(here.nbytes)
        self._work = Work(**work, source=source, into=into)
        self._paths: dict[str, Path] = {}

    def open(self, driver: str, path: str, at: Any) -> dict[str, Any]:
        self._paths[path] = load_driver(driver).connect(path, self._work, at)
        return {}

    def load(self, path: str, batch: int) -> dict[str, Any]:
        return _timed(self._path(path, batch).load, batch)

    def store(self, path: str, batch: int) -> dict[str, Any]:
        return _timed(self._path(path, batch).store, batch)

    def forget(self, path: str, batch: int) -> dict[str, Any]:
        self._paths[path].forget(batch)
        return {}

    def check(self, path: str, batch: int) -> dict[str, Any]:
        """Returns whether a load brings the stored bytes. Zeroes the memory first, so that no earlier bytes remain."""
        getattr(self._paths[path], "flush", lambda: None)()
        work, zeros = self._work, bytes(_COMPARED_BYTES)
        pieces = [slice(at, min(at + _COMPARED_BYTES, work.nbytes)) for at in range(0, work.nbytes, _COMPARED_BYTES)]
        for piece in pieces:
            work.into[piece] = zeros[: piece.stop - piece.start]
        self._path(path, batch).load(batch)
        return {"same": all(bytes(work.into[piece]) == bytes(work.source[piece]) for piece in pieces)}

    def pages(self, path: str, batch: int, count: int) -> dict[str, Any]:
        """Times `count` loads of one page each."""
        load_page = self._path(path, batch).load_page  # type: ignore[attr-defined]
        times = []
        for number in range(count):
            began = time.perf_counter_ns()
            load_page(batch, number % self._work.pages)
            times.append(time.perf_counter_ns() - began)
        return {"ns": times}

    def close(self) -> None:
        for path in self._paths.values():
            path.close()

    def _path(self, path: str, batch: int) -> Path:
        """Returns a path, after its `prepare(batch)` if it has one, before the clock starts."""
        opened = self._paths[path]
        getattr(opened, "prepare", lambda batch: None)(batch)
        return opened


def _timed(move: Callable[[int], None], batch: int) -> dict[str, Any]:
    """Times a move on the clock that all processes of a machine share, so that times of clients can be compared."""
    began = time.monotonic_ns()
    move(batch)
    return {"began": began, "ended": time.monotonic_ns()}


def _probe(voice: _Voice, name: str) -> None:
    try:
        driver = load_driver(name)
        voice.say(paths=driver.PATHS, missing=driver.missing(), rests=getattr(driver, "RESTS", False))
    except Exception as error:
        voice.say(paths={}, rests=False, missing=f"{type(error).__name__}: {error}")


def _serve(voice: _Voice, driver: str, paths: list[str], work: dict[str, Any]) -> None:
    with ExitStack() as house:
        served = house.enter_context(load_driver(driver).serve(paths, Work(**work)))
        voice.say(at=served["at"], pids=served["pids"])
        for line in sys.stdin:
            if json.loads(line)["do"] == "end":
                break
            served.get("forget", lambda: None)()
            voice.say()
    voice.say()


def _client(voice: _Voice, work: dict[str, Any]) -> None:
    client = _Client(work)
    voice.say()
    for line in sys.stdin:
        order = json.loads(line)
        do = order.pop("do")
        if do == "end":
            client.close()
            voice.say()
            return
        try:
            voice.say(**getattr(client, do)(**order))
        except Exception as error:
            traceback.print_exc()
            voice.say(error=f"{type(error).__name__}: {error}")


def main() -> None:
    """Runs the role that the command line names, until the end of standard input."""
    voice = _Voice()
    role = sys.argv[1]
    if role == "probe":
        _probe(voice, sys.argv[2])
        return
    try:
        first = json.loads(sys.stdin.readline())
        if role == "serve":
            _serve(voice, **first)
        else:
            _client(voice, **first)
    except Exception as error:
        traceback.print_exc()
        voice.say(error=f"{type(error).__name__}: {error}")
        sys.exit(1)


if __name__ == "__main__":
    main()
