"""A worker process of the benchmark: it serves pages, or loads and stores them, as the process that started it asks.

It runs one driver, which is a module or a Python file (benchmarks/README.md says what it contains). Requests come over
an inherited connection of `multiprocessing`, each the name of a method of `BenchWorker` with its arguments, and each is
answered by {"result": ...} or {"error": text}. The same few lines drive our own transports and every peer, so that all
of them copy from and into the same kind of memory, touched before, and are timed at the same two places. A path that
moves contiguous bytes gathers and scatters the blocks of an engine's memory with torch, in the timed part. This module
imports only the standard library, and layout.py beside it if a layout is asked for: a peer may be installed in another
environment, without kvcluster.

    worker.py FD    FD: the file descriptor of the connection; the process ends when the other end is closed
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

DENSE = "dense"
"""The layout of contiguous pages: those of `Work`."""

_LAYOUT_FILE = pathlib.Path(__file__).with_name("layout.py")
_LIBC = ctypes.CDLL(None)
_NOTHING = memoryview(b"")
_START_S = 60.0
_END_S = 10.0


@dataclass(frozen=True)
class Work:
    """What is moved: `pages` pages of `page_bytes` each, by `clients` processes, of which this is number `client`."""

    page_bytes: int
    pages: int
    clients: int
    client: int = 0
    source: memoryview = _NOTHING
    into: memoryview = _NOTHING

    @property
    def nbytes(self) -> int:
        return self.page_bytes * self.pages

    def page(self, number: int) -> slice:
        """Returns the position of that page in `source` and in `into`."""
        return slice(number * self.page_bytes, (number + 1) * self.page_bytes)

    def clear(self) -> None:
        """Zeroes `into`."""
        self.into[:] = bytes(self.nbytes)

    def same(self) -> bool:
        """Returns whether `into` holds the bytes of `source`."""
        return self.into.cast("Q") == self.source.cast("Q")


class Path:
    """One way to move pages; the base class of what a driver's `connect` returns. A batch is a number that names all of
    a client's pages at once. A driver overrides `store` and `load`, and those
    of the others that it needs."""

    def store(self, batch: int) -> None:
        """Stores `source` under the batch's names, which are new. Returns when the other side has the pages."""

    def load(self, batch: int) -> None:
        """Loads the pages stored under the batch's names into `into`."""

    def load_page(self, batch: int, number: int) -> None:
        """Loads one page of a batch; without an implementation, all of them."""
        self.load(batch)

    def prepare(self, batch: int) -> None:
        """Names or lists the pages of a batch, before the clock starts."""

    def flush(self) -> None:
        """Waits until everything stored can be loaded."""

    def forget(self, batch: int) -> None:
        """Drops the batch, so that its memory can be reused."""

    def close(self) -> None:
        """Closes the path."""

    def in_layout(self, memory: Any, work: Work) -> Path:
        """Returns this path for an engine's memory, a `layout.EngineMemory` whose source holds the bytes of
        `work.source`. By default torch gathers and scatters."""
        return Scattered(self, memory, work)


class Scattered(Path):
    """A path of contiguous bytes for an engine's memory: blocks are gathered before a store and scattered after a
    load."""

    def __init__(self, path: Path, memory: Any, work: Work) -> None:
        self._path = path
        self._memory = memory
        self._work = work

    def prepare(self, batch: int) -> None:
        self._path.prepare(batch)

    def flush(self) -> None:
        self._path.flush()

    def store(self, batch: int) -> None:
        self._memory.source.gather(self._work.source)
        self._path.store(batch)

    def load(self, batch: int) -> None:
        self._path.load(batch)
        self._memory.into.scatter(self._work.into)


class BenchWorker:
    """The methods are the requests. `stack` closes what they opened when the process ends."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._paths: dict[tuple[str, str], Path] = {}  # by path and layout
        self._memories: dict[str, Any] = {}  # by layout: what has `clear` and `same`
        self._purge: Callable[[], object] = lambda: None

    def describe(self, driver: str) -> dict[str, Any]:
        """Returns what a driver offers. Raises what its import raises, for instance if a package is missing."""
        module = load_driver(driver)
        return {"paths": module.PATHS, "rests": getattr(module, "RESTS", False)}

    def serve(self, driver: str, paths: Sequence[str], work: dict[str, Any]) -> dict[str, Any]:
        """Starts a driver's serving side; returns its `at` and `pids`."""
        served = self._stack.enter_context(load_driver(driver).serve(paths, Work(**work)))
        self._purge = served.get("forget", self._purge)
        return {"at": served["at"], "pids": served.get("pids", [])}

    def purge(self) -> None:
        """Has the serving side make room, where it does that itself."""
        self._purge()

    def connect(
        self, driver: str, at: Any, paths: Sequence[str], work: dict[str, Any], layouts: Sequence[str], shape: Any
    ) -> None:
        """Allocates this client's memory, opens the paths, and stores batch 0 by each, from contiguous memory. Later
        requests may name any of `layouts`, which hold pages of this `shape`."""
        plain = Work(**work)
        self._work = replace(plain, source=warm_memory(plain.nbytes), into=warm_memory(plain.nbytes))
        self._work.source[:] = os.urandom(plain.nbytes)
        self._memories = {name: self._memory(name, shape) for name in {DENSE, *layouts}}
        for path in paths:
            opened = self._paths[path, DENSE] = load_driver(driver).connect(path, self._work, at)
            self._stack.callback(opened.close)
            for layout, memory in self._memories.items():
                if layout != DENSE:
                    self._paths[path, layout] = opened.in_layout(memory, self._work)
            self.move("store", path, DENSE, 0)

    def _memory(self, layout: str, shape: Sequence[int]) -> Any:
        """Returns the memory of a layout. Its source has the bytes of `source`."""
        if layout == DENSE:
            return self._work
        module = load_driver(str(_LAYOUT_FILE))
        module.torch.set_num_threads(1)
        memory = module.EngineMemory(layout, shape, self._work.pages)
        memory.source.scatter(self._work.source)
        return memory

    def move(self, operation: str, path: str, layout: str, batch: int) -> tuple[int, int]:
        """Loads or stores a batch. Returns the beginning and the end, in nanoseconds of the clock that all processes of
        a machine share, so that times of clients can be compared."""
        moving = self._paths[path, layout]
        moving.prepare(batch)
        return _timed(getattr(moving, operation), batch)

    def check(self, path: str, layout: str, batch: int) -> None:
        """Raises OSError unless a load brings the stored bytes. Zeroes the memory first, so that no earlier bytes
        remain."""
        self._memories[layout].clear()
        self._work.clear()
        self._paths[path, layout].flush()
        self.move("load", path, layout, batch)
        if not self._memories[layout].same():
            raise OSError("what was loaded is not what was stored")

    def load_pages(self, path: str, count: int) -> list[int]:
        """Times `count` loads of one page of batch 0 each, in nanoseconds."""
        loading = self._paths[path, DENSE]
        loading.prepare(0)
        spans = (_timed(loading.load_page, 0, number % self._work.pages) for number in range(count))
        return [ended - began for began, ended in spans]

    def forget(self, path: str, batch: int) -> None:
        """Drops a batch."""
        self._paths[path, DENSE].forget(batch)


def _timed(act: Callable[..., object], *arguments: object) -> tuple[int, int]:
    began = time.monotonic_ns()
    act(*arguments)
    return began, time.monotonic_ns()


def load_driver(name: str) -> Any:
    """Imports a module by its name, or a file by its path, in which `import worker` means this module."""
    sys.modules["worker"] = sys.modules[__name__]
    file = pathlib.Path(name)
    if file.suffix != ".py":
        return importlib.import_module(name)
    sys.path.append(str(file.parent))  # last, so that it hides no package that the driver needs
    return importlib.import_module(file.stem)


# ------------------------------------------------------------------------------------------- for drivers


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
def running(command: Sequence[str], *, port: int) -> Iterator[int]:
    """Runs a peer's server; yields its process id once it accepts connections on that port. It ends with this process,
    however this ends."""
    output = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the block
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        preexec_fn=_die_with_parent,  # noqa: PLW1509 - it takes no lock that another thread could hold
    )
    try:
        until = time.monotonic() + _START_S
        while not _listens(port):
            if process.poll() is not None or time.monotonic() > until:
                output.seek(0)
                said = output.read().decode(errors="replace").strip().splitlines() or ["it printed nothing"]
                raise OSError(f"{' '.join(command[:4])} is not ready; its status is {process.poll()}: {said[-1]}")
            time.sleep(0.05)
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        output.close()


def _listens(port: int) -> bool:
    with socket.socket() as asking:
        asking.settimeout(1)
        return asking.connect_ex(("127.0.0.1", port)) == 0


def _die_with_parent() -> None:
    pr_set_pdeathsig = 1
    _LIBC.prctl(pr_set_pdeathsig, signal.SIGTERM)


def answer_requests(connection: Connection, target: object) -> None:
    """Calls the methods of `target` that the requests name, until the other end of the connection is closed."""
    with suppress(EOFError):
        while True:
            request, arguments = connection.recv()
            try:
                answer = {"result": getattr(target, request)(**arguments)}
            except Exception as error:
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
            connection.send(answer)


def inherited_connection() -> Connection:
    """Returns the connection whose file descriptor is the last argument of this process."""
    descriptor = int(sys.argv[-1])
    os.set_inheritable(descriptor, False)  # so that processes started here do not keep it open
    return Connection(descriptor)


if __name__ == "__main__":
    with ExitStack() as opened:
        answer_requests(inherited_connection(), BenchWorker(opened))
