"""Runs the rounds: in each round every path loads and stores, one after another, so that noise of the machine affects
all paths alike. Whole calls and peers do it once in each layout; floors and transports move contiguous pages.

Before each load and each store the CPU caches are filled with other data. A load or store of a path is timed from the
start of its first client to the end of its last one, and the CPU time of the clients and of their servers is measured
around it. The order rotates by one each round. The first round warms up; in the first and the last round, loaded
bytes are compared with the stored ones. A peer that fails is left out and the reason reported; a path of our own that
fails, or loads wrong bytes, ends the run.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from benchmarks.rounds import latency_ms, sweep_caches
from benchmarks.specs import BY_PAGE_BYTES, model_of, page_name, page_shape
from benchmarks.transfer.layout import suits
from benchmarks.transfer.processes import OWN_PYTHON, cpu_ns
from benchmarks.transfer.worker import DENSE
from kvcluster.cli.child_process import ChildError, ChildProcess
from kvcluster.cli.figures import progress
from kvcluster.runtime.malloc_env import ENVIRONMENT

LOAD, STORE = "load", "store"
FLOOR, TRANSPORT, WHOLE, PEER = "floor", "transport", "whole", "peer"
PAGES_AT_ONCE = 20

RATIOS = {
    "of_memcpy": "memcpy",
    "of_checked_copy": "memcpy + xxh3",
    "of_raw_tcp_1": "raw TCP x1",
    "of_raw_tcp_2": "raw TCP x2",
}
"""For each ratio, the baseline by whose rate it divides: at the same page size, operation and number of clients. The
baseline is dense."""


@dataclass(frozen=True)
class BenchDriver:
    """What one server process and its clients run. `name`: a module, or a peer's file. `level`: FLOOR, TRANSPORT, WHOLE
    or PEER. `paths`: for each path what it goes `over`, and a `note`. `command` starts its processes. `rests`: they are
    stopped between their rounds, since they would use CPU time while they wait.

    Paths of one of our own drivers share a server. Each path of a peer is a driver: the threads of one would take CPU
    time from another.
    """

    name: str
    level: str
    paths: Mapping[str, Mapping[str, str]]
    command: tuple[str, ...] = OWN_PYTHON
    rests: bool = False


@dataclass(frozen=True)
class TransferPlan:
    """What is measured. `layouts`: those of whole calls and peers. `moved_bytes`: bytes per client in each load and in
    each store. `single_pages`: loads of one page for each latency."""

    drivers: Sequence[BenchDriver]
    layouts: Sequence[str]
    sizes: Sequence[int]
    clients: Sequence[int]
    rounds: int
    moved_bytes: int
    single_pages: int


@dataclass
class Figures:
    """The results. `left_out`: the reason why a path was left out, by path."""

    paths: list[dict[str, Any]] = field(default_factory=list)
    latencies: list[dict[str, Any]] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)


def run(plan: TransferPlan) -> Figures:
    """Measures everything, one page size after the other. Raises ChildError if a path of our own fails."""
    figures = Figures()
    for page_bytes in plan.sizes:
        with ExitStack() as stack:
            rounds = _Rounds(plan, page_bytes, figures.left_out)
            progress(f"{page_name(page_bytes)}: starting")
            rounds.start(stack)
            for clients in plan.clients:
                progress(f"{page_name(page_bytes)}: {clients} client(s), {plan.rounds} rounds")
                figures.paths += rounds.run(clients)
            figures.latencies += rounds.single_pages()
    return figures


class _System:
    """The running processes of a driver: its server, and its clients with the paths open."""

    def __init__(self, driver: BenchDriver, work: Mapping[str, int], layouts: Sequence[str], stack: ExitStack) -> None:
        self.driver = driver
        self.layouts = layouts
        self._server = stack.enter_context(ChildProcess(driver.command, ENVIRONMENT))
        shared: dict[str, Any] = {"driver": driver.name, "paths": list(driver.paths)}
        served = self._server.ask("serve", work=work, **shared)
        self._pids = [self._server.pid, *served["pids"]]
        self._clients = [stack.enter_context(ChildProcess(driver.command)) for _ in range(work["clients"])]
        shape = page_shape(BY_PAGE_BYTES[work["page_bytes"]])
        for number, client in enumerate(self._clients):
            mine = {**work, "client": number}
            client.send("connect", at=served["at"], work=mine, layouts=layouts, shape=shape, **shared)
        for client in self._clients:
            client.answer()
        for path in driver.paths:
            for layout in layouts:
                self._each(self._clients, "check", path=path, layout=layout, batch=0)
        self._resting = [self._server, *self._clients] if driver.rests else []
        self._stop()

    def round(
        self, path: str, layout: str, clients: int, batch: int, *, compare: bool
    ) -> Iterator[tuple[str, int, int]]:
        """Loads batch 0 and stores `batch`; yields for each its name, duration and CPU time in nanoseconds."""
        taking_part = self._clients[:clients]
        pids = [*self._pids, *(client.pid for client in taking_part)]
        with self._awake():
            for operation, of_batch in ((LOAD, 0), (STORE, batch)):
                sweep_caches()
                before_ns = sum(map(cpu_ns, pids))
                moved = {"path": path, "layout": layout, "batch": of_batch}
                spans = self._each(taking_part, "move", operation=operation, **moved)
                used_ns = sum(map(cpu_ns, pids)) - before_ns
                yield operation, max(ended for _, ended in spans) - min(began for began, _ in spans), used_ns
                if compare:
                    self._each(taking_part, "check", **moved)
            self._server.ask("purge")
            self._each(taking_part, "forget", path=path, batch=batch)

    def load_pages(self, path: str) -> list[int]:
        """Returns the nanoseconds of some loads of one page by the first client."""
        times: list[int] = self._clients[0].ask("load_pages", path=path, count=PAGES_AT_ONCE)
        return times

    @contextmanager
    def _awake(self) -> Iterator[None]:
        for process in self._resting:
            process.resume()
        try:
            yield
        finally:
            self._stop()

    def _stop(self) -> None:
        for process in self._resting:
            process.stop()

    def _each(self, clients: Sequence[ChildProcess], request: str, **arguments: Any) -> list[Any]:
        for client in clients:
            client.send(request, **arguments)
        return [client.answer() for client in clients]


class _Rounds:
    """The rounds of one page size. `left_out` gets the peers that fail."""

    def __init__(self, plan: TransferPlan, page_bytes: int, left_out: dict[str, str]) -> None:
        self._plan = plan
        self._left_out = left_out
        pages = max(1, plan.moved_bytes // page_bytes)
        self._work = {"page_bytes": page_bytes, "pages": pages, "clients": max(plan.clients)}
        self._systems: dict[str, _System] = {}  # by path

    def start(self, stack: ExitStack) -> None:
        """Starts servers and clients; every client of every path stores the batch that it will load."""
        for driver in self._plan.drivers:
            names = ", ".join(driver.paths)
            if names not in self._left_out:
                with self._leaving_out(names, driver):
                    system = _System(driver, self._work, self._layouts(driver), stack)
                    self._systems |= dict.fromkeys(driver.paths, system)

    def run(self, clients: int) -> list[dict[str, Any]]:
        """Runs all rounds with `clients` clients and returns the rows."""
        spans_ns: dict[tuple[str, str, str], list[int]] = defaultdict(list)
        cpu: dict[tuple[str, str, str], int] = defaultdict(int)
        last, batches = self._plan.rounds, count(1)
        for number in range(last + 1):
            turns = self._turns()
            start = number % max(1, len(turns))
            for path, layout in turns[start:] + turns[:start]:
                if path not in self._systems:  # it has failed in this round
                    continue
                system = self._systems[path]
                with self._leaving_out(path, system.driver):
                    compare = number in (0, last)
                    for operation, span_ns, used_ns in system.round(
                        path, layout, clients, next(batches), compare=compare
                    ):
                        if number:
                            spans_ns[path, layout, operation].append(span_ns)
                            cpu[path, layout, operation] += used_ns
        return self._rows(clients, {key: statistics.median(of) for key, of in spans_ns.items()}, cpu)

    def _rows(
        self, clients: int, span_ns: Mapping[tuple[str, str, str], float], cpu: Mapping[tuple[str, str, str], int]
    ) -> list[dict[str, Any]]:
        """Returns the figures of the paths that were not left out, in the order of the plan."""
        page_bytes = self._work["page_bytes"]
        pages = self._work["pages"] * clients
        moved, model = pages * page_bytes, model_of(page_bytes)
        tokens = pages * BY_PAGE_BYTES[page_bytes].block_tokens
        return [
            {
                "page_bytes": page_bytes,
                "clients": clients,
                "level": self._systems[path].driver.level,
                "path": path,
                "layout": layout,
                "operation": operation,
                "ms": took / 1e6,
                "gb_per_s": moved / took,
                "tokens_per_s": tokens / took * 1e9 if model else None,
                "gb_per_cpu_s": moved * self._plan.rounds / used if (used := cpu[path, layout, operation]) else None,
                **{key: span_ns[floor, DENSE, operation] / took for key, floor in RATIOS.items()},
                **self._systems[path].driver.paths[path],
            }
            for path, layout in self._turns()
            for operation in (LOAD, STORE)
            for took in (span_ns[path, layout, operation],)
        ]

    def _turns(self) -> list[tuple[str, str]]:
        return [(path, layout) for path, system in self._systems.items() for layout in system.layouts]

    def _layouts(self, driver: BenchDriver) -> list[str]:
        """Returns the layouts in which the paths of a driver are measured."""
        if driver.level in (FLOOR, TRANSPORT):
            return [DENSE]
        planes = page_shape(BY_PAGE_BYTES[self._work["page_bytes"]])[1]
        return [layout for layout in self._plan.layouts if suits(layout, planes)]

    def single_pages(self) -> list[dict[str, Any]]:
        """Returns the latencies of loads of one page, for the paths that can load a single page."""
        systems = {path: s for path, s in self._systems.items() if s.driver.level == TRANSPORT or path == "raw TCP x1"}
        times: dict[str, list[float]] = defaultdict(list)
        for _ in range(0, self._plan.single_pages, PAGES_AT_ONCE):
            for path, system in systems.items():
                with self._leaving_out(path, system.driver):
                    times[path] += [ns / 1e9 for ns in system.load_pages(path)]
        return [
            {"page_bytes": self._work["page_bytes"], "path": path, "loads": len(of), **latency_ms(of)}
            for path, of in times.items()
        ]

    @contextmanager
    def _leaving_out(self, path: str, driver: BenchDriver) -> Iterator[None]:
        """If the block raises ChildError: leaves out a peer; for a path of our own, raises it with the path's name."""
        try:
            yield
        except ChildError as error:
            if driver.level != PEER:
                raise ChildError(f"{path}: {error}") from error
            self._systems.pop(path, None)
            self._left_out[path] = str(error)
