"""Runs the turns: in each turn every path loads and stores, one path after another, so that noise of the machine
affects all paths alike.

Before each load and each store the CPU caches are filled with other data: an engine does not find its pages there, and
no path may profit from what the path before has touched. A turn of a path is timed from the start of its first client
to the end of its last one, and the CPU time of the clients and of their servers is measured around it. The order
rotates by one path each turn. The first turn warms up; in the first and the last turn, loaded bytes are compared with
the stored ones. A peer that fails is left out and the reason reported; a path of our own that fails, or loads wrong
bytes, ends the run.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from xxhash import xxh3_64_intdigest

from kvcluster.cli.bench.transfer.party import Work, warm_memory
from kvcluster.cli.bench.transfer.processes import OWN_PYTHON, CpuClock, PartyError, PartyProcess, python_of

LOAD, STORE = "load", "store"
FLOOR, TRANSPORT, WHOLE, PEER = "floor", "transport", "whole", "peer"
CHUNK_OF_PAGES = 20


@dataclass(frozen=True)
class Lane:
    """One path of one driver, which is a row of the table. `level`: FLOOR, TRANSPORT, WHOLE or PEER. `rests`: its
    processes are stopped between its turns, since they would use CPU time while they wait."""

    driver: str
    path: str
    level: str
    over: str
    note: str
    rests: bool = False


@dataclass(frozen=True)
class TurnsPlan:
    """What is measured. `moved_bytes`: bytes per client in each load and each store. `swept_bytes`: bytes of other data
    that are read before each of them, to fill the CPU caches."""

    lanes: Sequence[Lane]
    sizes: Sequence[int]
    clients: Sequence[int]
    rounds: int
    moved_bytes: int
    swept_bytes: int
    single_pages: int
    peer_python: str
    say: Callable[[str], None] = lambda line: None


@dataclass
class Figures:
    """The results. `left_out`: the reason why a path was left out, by path."""

    paths: list[dict[str, Any]] = field(default_factory=list)
    latencies: list[dict[str, Any]] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)


@dataclass
class _Samples:
    """The samples of one lane, operation and number of clients."""

    span_ns: list[int] = field(default_factory=list)
    cpu_ns: int = 0


def run(plan: TurnsPlan) -> Figures:
    """Measures everything, one page size after the other. Raises PartyError if a path of our own fails."""
    figures = Figures()
    for page_bytes in plan.sizes:
        with ExitStack() as house:
            stage = _Stage(plan, page_bytes, figures, house)
            plan.say(f"{page_bytes >> 10} KiB: starting {len(plan.lanes)} paths")
            stage.start()
            for clients in plan.clients:
                plan.say(f"{page_bytes >> 10} KiB: {clients} client(s), {plan.rounds} turns")
                figures.paths += stage.turns(clients)
            figures.latencies += stage.single_pages()
    return figures


class _Stage:
    """The parties of one page size, and their turns."""

    def __init__(self, plan: TurnsPlan, page_bytes: int, figures: Figures, house: ExitStack) -> None:
        self._plan = plan
        self._figures = figures
        self._house = house
        self._work = Work(page_bytes, max(1, plan.moved_bytes // page_bytes), max(plan.clients))
        self._lanes: list[Lane] = [lane for lane in plan.lanes if lane.path not in figures.left_out]
        self._servers: dict[Lane, PartyProcess] = {}
        self._served: dict[Lane, dict[str, Any]] = {}  # each server's first answer
        self._serving: dict[Lane, list[CpuClock]] = {}
        self._clients: dict[Lane, list[tuple[PartyProcess, CpuClock]]] = {}
        self._batches = count(1)
        self._scratch = warm_memory(plan.swept_bytes)

    def start(self) -> None:
        """Starts servers and clients; every client of every path stores the batch that it will load."""
        for lane in list(self._lanes):
            with self._blaming(lane):
                self._serve(lane)
        # Our own paths share a process per client; each peer path has its own, in the peers' environment.
        ours = self._start_clients(OWN_PYTHON)
        for lane in list(self._lanes):
            with self._blaming(lane):
                self._open(lane, self._start_clients(self._python(lane)) if lane.level == PEER else ours)
        for lane in self._lanes:
            with self._blaming(lane), self._awake(lane):
                """From here on its processes rest, if they are of that kind."""

    def turns(self, clients: int) -> list[dict[str, Any]]:
        """Runs all turns with `clients` clients and returns the rows."""
        samples: dict[tuple[Lane, str], _Samples] = defaultdict(_Samples)
        rounds = self._plan.rounds
        for turn in range(rounds + 1):
            start = turn % max(1, len(self._lanes))
            for lane in [*self._lanes[start:], *self._lanes[:start]]:
                with self._blaming(lane), self._awake(lane):
                    compare = turn in (0, rounds)
                    for operation, span_ns, cpu_ns in self._turn(lane, clients, compare):
                        if turn:
                            samples[lane, operation].span_ns.append(span_ns)
                            samples[lane, operation].cpu_ns += cpu_ns
        return self._rows(clients, samples)

    def single_pages(self) -> list[dict[str, Any]]:
        """Returns the latencies of loads of one page, for the paths that can load a single page."""
        times: dict[Lane, list[int]] = defaultdict(list)
        lanes = [lane for lane in self._lanes if lane.level == TRANSPORT or lane.path == "raw TCP x1"]
        for _ in range(0, self._plan.single_pages, CHUNK_OF_PAGES):
            for lane in lanes:
                with self._blaming(lane):
                    got = self._clients[lane][0][0].ask(do="pages", path=lane.path, batch=0, count=CHUNK_OF_PAGES)
                    times[lane] += got["ns"]
        return [
            {
                "page_bytes": self._work.page_bytes,
                "path": lane.path,
                "loads": len(of),
                "p50_ms": statistics.median(of) / 1e6,
                "p99_ms": statistics.quantiles(of, n=100)[98] / 1e6,
            }
            for lane, of in times.items()
        ]

    # -------------------------------------------------------------------------------------------- parts

    def _turn(self, lane: Lane, number: int, compare: bool) -> Iterator[tuple[str, int, int]]:
        """Yields each operation with its duration and CPU time in nanoseconds."""
        clients = [client for client, _ in self._clients[lane][:number]]
        clocks = [*self._serving[lane], *(clock for _, clock in self._clients[lane][:number])]
        batch = next(self._batches)
        for operation, of_batch in ((LOAD, 0), (STORE, batch)):
            self._sweep()
            before = sum(clock.now_ns() for clock in clocks)
            answers = self._each(clients, do=operation, path=lane.path, batch=of_batch)
            cpu_ns = sum(clock.now_ns() for clock in clocks) - before
            span_ns = max(answer["ended"] for answer in answers) - min(answer["began"] for answer in answers)
            yield operation, span_ns, cpu_ns
            if compare:
                self._check(lane, clients, of_batch)
        self._servers[lane].ask(do="forget")
        self._each(clients, do="forget", path=lane.path, batch=batch)

    def _sweep(self) -> None:
        xxh3_64_intdigest(self._scratch)

    def _check(self, lane: Lane, clients: Sequence[PartyProcess], batch: int) -> None:
        if not all(answer["same"] for answer in self._each(clients, do="check", path=lane.path, batch=batch)):
            raise PartyError("what was loaded is not what was stored")

    def _each(self, clients: Sequence[PartyProcess], **order: Any) -> list[dict[str, Any]]:
        for client in clients:
            client.send(order)
        return [client.answer() for client in clients]

    @contextmanager
    def _awake(self, lane: Lane) -> Iterator[None]:
        """Wakes the processes of a path that rests, for the duration of the block."""
        resting = [self._servers[lane], *(client for client, _ in self._clients[lane])] if lane.rests else []
        for process in resting:
            process.wake()
        try:
            yield
        finally:
            for process in resting:
                process.rest()

    def _serve(self, lane: Lane) -> None:
        """Starts the server of a path unless it runs. Paths of one of our own drivers share a server. Peer paths do
        not: the threads of one would take CPU time from another."""
        if lane in self._servers:
            return
        together = [each for each in self._lanes if each == lane or (lane.level != PEER and each.driver == lane.driver)]
        first = {"driver": lane.driver, "paths": [each.path for each in together], "work": self._told()}
        server = self._house.enter_context(PartyProcess(self._python(lane), "serve", first))
        served = server.answer()
        for each in together:
            self._servers[each], self._served[each] = server, served

    def _start_clients(self, python: Sequence[str]) -> list[PartyProcess]:
        works = [{"work": self._told() | {"client": number}} for number in range(self._work.clients)]
        clients = [self._house.enter_context(PartyProcess(python, "client", work)) for work in works]
        for client in clients:
            client.answer()
        return clients

    def _open(self, lane: Lane, clients: list[PartyProcess]) -> None:
        served = self._served[lane]
        self._each(clients, do="open", driver=lane.driver, path=lane.path, at=served["at"])
        self._each(clients, do="store", path=lane.path, batch=0)
        self._check(lane, clients, 0)
        self._serving[lane] = [CpuClock(pid) for pid in (self._servers[lane].pid, *served["pids"])]
        self._clients[lane] = [(client, CpuClock(client.pid)) for client in clients]

    def _python(self, lane: Lane) -> tuple[str, ...]:
        return python_of(lane.driver, self._plan.peer_python)

    def _told(self) -> dict[str, int]:
        return {"page_bytes": self._work.page_bytes, "pages": self._work.pages, "clients": self._work.clients}

    def _blaming(self, lane: Lane) -> _Blaming:
        return _Blaming(self._lanes, lane, self._figures.left_out)

    def _rows(self, clients: int, samples: dict[tuple[Lane, str], _Samples]) -> list[dict[str, Any]]:
        moved = self._work.nbytes * clients
        # Paths that were left out half-way have no rows; the others keep the order of the plan.
        taken = [(lane, operation) for lane in self._lanes for operation in (LOAD, STORE)]
        rates = {
            (lane.path, operation): moved / statistics.median(samples[lane, operation].span_ns)
            for lane, operation in taken
        }
        rows = []
        for lane, operation in taken:
            rate, of = rates[lane.path, operation], samples[lane, operation]
            rows.append(
                {
                    "page_bytes": self._work.page_bytes,
                    "clients": clients,
                    "level": lane.level,
                    "path": lane.path,
                    "over": lane.over,
                    "operation": operation,
                    "gb_per_s": rate,
                    "gb_per_cpu_s": moved * len(of.span_ns) / of.cpu_ns if of.cpu_ns else None,
                    **{key: rate / rates[path, operation] for key, path in RATIOS.items()},
                    "note": lane.note,
                }
            )
        return rows


class _Blaming:
    """Handles PartyError within its block: leaves out a peer that failed; for one of our own paths, adds its name to
    the error and raises it."""

    def __init__(self, lanes: list[Lane], lane: Lane, left_out: dict[str, str]) -> None:
        self._lanes = lanes
        self._lane = lane
        self._left_out = left_out

    def __enter__(self) -> None:
        """Does nothing; the work is in `__exit__`."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, PartyError):
            return False
        if self._lane.level != PEER:
            raise PartyError(f"{self._lane.path}: {error}") from error
        self._lanes.remove(self._lane)
        self._left_out[self._lane.path] = str(error)
        return True


RATIOS = {
    "of_memcpy": "memcpy",
    "of_checked_copy": "memcpy + xxh3",
    "of_raw_tcp_1": "raw TCP x1",
    "of_raw_tcp_2": "raw TCP x2",
}
"""For each ratio, the baseline by whose rate it divides: at the same page size, operation and number of clients."""
