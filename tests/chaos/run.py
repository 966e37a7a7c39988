"""A chaos run: a cluster under load from two workers, and faults one after the other.

Each fault is done, left for its time, undone; then all has to become well again: the coordinator serves and every shard
is up. What the workers see meanwhile they judge themselves (worker.py). At the end the load stops, and nothing may
be left of it.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvcluster.config import TRANSPORTS
from kvcluster.core.ids import BlockHash
from tests.chaos import victims
from tests.chaos.faults import BRIEF_S, Fault, Kind, Stage
from tests.chaos.niceness import WORKER, set_niceness
from tests.chaos.observer import BLOCKS
from tests.chaos.report import Report
from tests.chaos.sites import HEAD, ROOT, WORKERS, Nodes, OneHost, Site
from tests.chaos.worker import CALLS
from tests.hosts import netns
from tests.waiting import eventually

OBSERVER = "observer"
SHARDS = 3
PLANTED = 3
POOL_BYTES = 64 * 2**20
BELOW_BYTES = {"host_bytes": 32 * 2**20, "disk_bytes": 128 * 2**20}
SETTINGS: dict[str, Any] = {
    "shards": SHARDS,
    "shard": {"device_bytes": POOL_BYTES, **BELOW_BYTES, "disk_file_bytes": 4 * 2**20},
    # What a killed worker leaves is to be gone before the checks. Pages go down as they are: which bytes are right
    # follows from a block's hash.
    "coordinator": {"ticket_ttl_ms": 10_000, "host_codec": "raw"},
}
REPLICA_S = 10.0
"""A copy is made when a shard has room for it, and none is promised."""
WELL_S = 60.0
"""A bound on what hangs; how long it took is in the report."""


class Run:
    """One run. A context manager; leaving it ends all that it started."""

    def __init__(self, seed: int, say: Callable[[str], object] = print) -> None:
        self._random = random.Random(seed)
        self._seed = seed
        self._say = say
        self._house = ExitStack()
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._journals: list[Path] = []
        self._journal: dict[str, Path] = {}  # the present one of each process
        self._shards = SHARDS
        self._began = time.monotonic()

    def __enter__(self) -> Run:
        why = netns.missing()
        self._say(f"chaos: {f'one host only, because {why}' if why else 'in network namespaces'}")
        with ExitStack() as house:
            self._folder = Path(tempfile.mkdtemp(prefix="kvchaos-"))
            house.callback(shutil.rmtree, self._folder, ignore_errors=True)
            # A shard that restarts on another node finds its disk there, as with a volume that moves with it.
            settings = {**SETTINGS, "shard": {**SETTINGS["shard"], "disk_dir": str(self._folder / "disks")}}
            self._site: Site = house.enter_context(OneHost(settings) if why else Nodes(settings))
            house.callback(self._end_processes)
            self.report = Report(self._site.form, self._seed)
            shards = tuple(f"shard-{number}" for number in range(SHARDS))
            self.stage = Stage(shards, tuple(WORKERS), self._site.hosts, self._site.nodes)
            self._start(OBSERVER, HEAD, "tests.chaos.observer")
            for name in WORKERS:
                self._start_worker(name)
            self._become_well("start")
            self._await_load()
            self._house = house.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._house.close()

    def inflict(self, faults: Iterable[Fault]) -> None:
        """Does these faults, each when all is well again after the one before."""
        for fault in faults:
            began = time.monotonic()
            _PERFORM[fault.kind](self, fault)
            self.report.faults[fault.kind.value] += 1
            self._become_well(fault.kind.value)
            self._say(f"{began - self._began:6.1f} s  {fault}; well after {time.monotonic() - began:.1f} s")

    def drain(self, shard: str) -> None:
        """Lets a shard go as an operator does, under load. What lay on it must lie elsewhere then: there is room,
        since all was cleared before. It does not come back, so this is the last thing that a run does."""
        cleared = self._ask("clear", timeout_s=WELL_S)
        assert cleared["ok"], f"not cleared within {WELL_S:.0f} s"
        planted = [self._plant(shard) for _ in range(PLANTED)]
        began = time.monotonic()
        command = [sys.executable, "-m", "kvcluster.cli.main", "drain", shard, "--address", self._site.address]
        env = os.environ | ({"KVCLUSTER_TOKEN": self._site.token} if self._site.token else {})
        command = self._site.command(HEAD, command)
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, cwd=ROOT, timeout=2 * WELL_S, env=env
        )
        assert done.returncode == 0, f"{shard} was not drained: {done.stdout}{done.stderr}"
        self._shards -= 1
        self.report.faults["shard drained"] += 1
        self.report.took("shard drained: gone", time.monotonic() - began)
        for each in planted:
            if (loaded := self._ask("load", number=each["number"])["blocks"]) != BLOCKS:
                self.report.wrong.append(f"{BLOCKS - loaded} blocks were lost with a shard that was drained")
        self._become_well("shard drained")
        self._say(f"{began - self._began:6.1f} s  {shard} drained within {time.monotonic() - began:.1f} s")

    def processes(self) -> dict[int, str]:
        """Every process of the cluster and its workers, by id, with the names of the latter."""
        named = {process.pid: name for name, process in self._processes.items()}
        return dict.fromkeys(self._site.pids(), "") | named

    def finish(self) -> Report:
        """Ends the load, looks at what is left, and returns the report."""
        self._await_load()
        for name in WORKERS:
            self._processes[name].send_signal(signal.SIGTERM)
        for name in WORKERS:
            try:
                status = self._processes[name].wait(WELL_S)
            except subprocess.TimeoutExpired:
                status = None
            if status != 0:
                self.report.wrong.append(f"worker {name} was told to end; its status is {status}")
        quiet = self._ask("quiet", shards=self._shards, timeout_s=WELL_S)
        if not quiet["ok"]:
            self.report.wrong.append(f"leaked: {quiet['left']}")
        for kind, expected in ((victims.SHARD, self._shards), (victims.COORDINATOR, 1)):
            found = victims.actors(self._site.pids(), kind)
            if len(found) != expected:
                self.report.wrong.append(f"leaked: {len(found)} processes are {kind}, not {expected}")
        self._ask_to_end()
        self.report.read(self._journals)
        self.report.seconds = time.monotonic() - self._began
        return self.report

    # -------------------------------------------------------------------------------------------- faults

    def _kill_worker(self, fault: Fault) -> None:
        victims.send([self._processes[fault.target].pid], signal.SIGKILL)
        self._processes[fault.target].wait()
        self._start_worker(fault.target)

    def _stop_worker(self, fault: Fault) -> None:
        self._stop([self._processes[fault.target].pid], fault.seconds)

    def _kill_shard(self, fault: Fault) -> None:
        planted, pid = self._plant(fault.target), self._shard(fault.target)
        killed_ns = time.monotonic_ns()
        victims.send([pid], signal.SIGKILL)
        self._served("shard killed, stored again", planted, killed_ns, storing=True)

    def _stop_shard(self, fault: Fault) -> None:
        self._stop([self._shard(fault.target)], fault.seconds)

    def _kill_coordinator(self, _: Fault) -> None:
        planted = self._plant("")
        killed_ns = time.monotonic_ns()
        victims.send(self._coordinators(), signal.SIGKILL)
        self._served("coordinator killed, first hit", planted, killed_ns, storing=False)

    def _stop_coordinator(self, fault: Fault) -> None:
        self._stop(self._coordinators(), fault.seconds)

    def _fill(self, _: Fault) -> None:
        stored = self._ask("fill", nbytes=SHARDS * (POOL_BYTES + BELOW_BYTES["host_bytes"]))
        self.report.outcomes["blocks that filled the tiers"] += stored["blocks"]

    def _flip(self, fault: Fault) -> None:
        planted, pid = self._plant(fault.target), self._shard(fault.target)
        flipped_ns = time.monotonic_ns()
        flipped = victims.flip_bits(pid, _hashes(planted), self._random, POOL_BYTES // 2)
        loaded = self._ask("load", number=planted["number"])["blocks"]
        self.report.outcomes["pages with a flipped bit"] += flipped
        self.report.outcomes["blocks of such prompts not loaded"] += BLOCKS - loaded
        self._served("bits flipped, stored again", planted, flipped_ns, storing=True)

    def _kill_replica(self, fault: Fault) -> None:
        planted, pid = self._plant(fault.target, replicas=2), self._shard(fault.target)
        others = [self._shard(name) for name in self.stage.shards if name != fault.target]
        try:
            blocks = _hashes(planted)
            eventually(lambda: any(victims.holds(other, blocks, POOL_BYTES // 2) for other in others), REPLICA_S)
        except AssertionError:
            self.report.outcomes["replicas not made in time"] += 1
            return
        _wait(1.0)  # what lies there is committed, and told, a moment later
        killed_ns = time.monotonic_ns()
        victims.send([pid], signal.SIGKILL)
        self._served("replicated shard killed, first hit", planted, killed_ns, storing=False)
        eventually(lambda: self._shard(fault.target) != pid, WELL_S)

    def _purge(self, _: Fault) -> None:
        planted = self._plant("")
        cleared = self._ask("clear", timeout_s=WELL_S)
        assert cleared["ok"], f"not cleared within {WELL_S:.0f} s"
        victims.send(self._coordinators(), signal.SIGKILL)
        self._become_well("cache cleared, coordinator killed")
        if found := self._ask("load", number=planted["number"])["blocks"]:
            self.report.wrong.append(f"{found} blocks that were cleared were loaded")

    def _kill_node(self, fault: Fault) -> None:
        planted = self._plant_on(fault.target)
        killed_ns = time.monotonic_ns()
        victims.send(self._site.pids(fault.target), signal.SIGKILL)
        if planted is not None:
            self._served("node killed, stored again", planted, killed_ns, storing=True)

    def _stop_node(self, fault: Fault) -> None:
        self._stop(self._site.pids(fault.target), fault.seconds)
        self._expect_to_end(fault, fault.target)

    def _cut_one_way(self, fault: Fault) -> None:
        self._cut([(fault.target, fault.hearer)], fault.seconds)
        self._expect_to_end(fault, fault.target, fault.hearer)

    def _cut_both_ways(self, fault: Fault) -> None:
        self._cut([(fault.target, fault.hearer), (fault.hearer, fault.target)], fault.seconds)
        self._expect_to_end(fault, fault.target, fault.hearer)

    def _cut_off(self, fault: Fault) -> None:
        others = [host for host in self.stage.hosts if host != fault.target]
        cuts = [(fault.target, other) for other in others] + [(other, fault.target) for other in others]
        self._cut(cuts, fault.seconds)
        self._expect_to_end(fault, HEAD, fault.target)

    # ------------------------------------------------------------------------------------------- helpers

    def _stop(self, pids: list[int], seconds: float) -> None:
        victims.send(pids, signal.SIGSTOP)
        try:
            _wait(seconds)
        finally:
            victims.send(pids, signal.SIGCONT)

    def _cut(self, cuts: list[tuple[str, str]], seconds: float) -> None:
        for sender, hearer in cuts:
            self._site.link(sender, hearer, cut=True)
        _wait(seconds)
        for sender, hearer in cuts:
            self._site.link(sender, hearer, cut=False)

    def _expect_to_end(self, fault: Fault, *hosts: str) -> None:
        """A node that Ray has given up ends itself when it learns of it, which may be a moment later."""
        given_up = fault.seconds > BRIEF_S[1] and (HEAD in hosts or fault.kind is Kind.STOP_NODE)
        for node in (host for host in hosts if host in self.stage.nodes and given_up):
            self._site.await_end(node)

    def _become_well(self, after: str) -> None:
        """Brings lost nodes back, and waits until the coordinator serves and every shard is up."""
        self.report.wrong += [f"leaked by a lost node: {left}" for left in self._site.mend()]
        well = self._ask("well", shards=self._shards, timeout_s=WELL_S)
        self.report.took(f"{after}: all up", well["took_s"])
        assert well["ok"], f"not well {WELL_S:.0f} s after: {after}; {well['left']}"
        for name in WORKERS:
            assert self._processes[name].poll() is None, f"worker {name} ended: {self._stderr(name)}"

    def _await_load(self) -> None:
        """Waits until every worker, perhaps started a moment ago, is at work."""
        for name in WORKERS:
            eventually(lambda name=name: CALLS in self._journal[name].read_text(encoding="utf-8"), WELL_S)

    def _plant(self, shard: str, replicas: int = 1) -> dict[str, Any]:
        planted: dict[str, Any] = self._ask("plant", shard=shard, replicas=replicas, timeout_s=WELL_S)
        assert planted["ok"], f"no prompt could be stored on {shard or 'any shard'}"
        return planted

    def _plant_on(self, node: str) -> dict[str, Any] | None:
        """As `_plant`, on a shard of that node; None if it has none."""
        pids = set(self._site.pids(node))
        on_it = (name for name in self.stage.shards if self._shard(name) in pids)
        return next((self._plant(name) for name in on_it), None)

    def _served(self, what: str, planted: dict[str, Any], since_ns: int, *, storing: bool) -> None:
        served = self._ask("served", number=planted["number"], since_ns=since_ns, storing=storing, timeout_s=WELL_S)
        assert served["ok"], f"not served again within {WELL_S:.0f} s: {what}"
        self.report.took(what, served["took_s"])

    def _shard(self, name: str) -> int:
        """The process of a shard, as soon as the one that the coordinator names is there."""
        return eventually(lambda: self._present_shard(name), WELL_S)

    def _present_shard(self, name: str) -> int:
        """0 where the coordinator does not know yet that this shard is gone."""
        status = self._ask("status")
        known = status["shards"] if status else []
        address = next((shard["address"] for shard in known if shard["shard"] == name), ":0")
        host, _, port = address.rpartition(":")
        on_node = self._site.pids(self._site.node_at(host)) if host else []
        return victims.listener(victims.actors(on_node, victims.SHARD), int(port)) or 0

    def _coordinators(self) -> list[int]:
        return victims.actors(self._site.pids(), victims.COORDINATOR)

    def _start_worker(self, name: str) -> None:
        # By the fastest ways there are, and every other time by gRPC alone.
        before = sum(journal.name.startswith(f"{name}-") for journal in self._journals)
        transports = TRANSPORTS[-1:] if before % 2 else TRANSPORTS
        seed = str(self._random.randrange(2**32))
        self._start(name, WORKERS[name], "tests.chaos.worker", seed, ",".join(transports))
        set_niceness(self._processes[name].pid, WORKER)

    def _start(self, name: str, host: str, module: str, *arguments: str) -> None:
        journal = self._folder / f"{name}-{len(self._journals)}.jsonl"
        journal.touch()  # it may be killed before it opens it
        self._journals.append(journal)
        self._journal[name] = journal
        command = [sys.executable, "-m", module, self._site.address, self._site.token, *arguments, str(journal)]
        with (self._folder / f"{name}.log").open("w", encoding="utf-8") as log:
            self._processes[name] = subprocess.Popen(
                self._site.command(host, command),
                stdin=subprocess.PIPE if name == OBSERVER else subprocess.DEVNULL,
                stdout=subprocess.PIPE if name == OBSERVER else log,
                stderr=log,
                text=True,
                cwd=ROOT,
                env=os.environ | {"MALLOC_ARENA_MAX": "2"},  # as docs/operations.md advises
                start_new_session=True,
            )

    def _ask(self, do: str, **words: Any) -> Any:
        observer = self._processes[OBSERVER]
        assert observer.stdin is not None and observer.stdout is not None
        observer.stdin.write(json.dumps({"do": do, **words}) + "\n")
        observer.stdin.flush()
        answer = observer.stdout.readline()
        assert answer, f"the observer ended: {self._stderr('observer')}"
        return json.loads(answer)

    def _ask_to_end(self) -> None:
        observer = self._processes[OBSERVER]
        assert observer.stdin is not None
        observer.stdin.close()
        assert observer.wait(WELL_S) == 0, f"the observer failed: {self._stderr('observer')}"

    def _stderr(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(encoding="utf-8")

    def _end_processes(self) -> None:
        for process in self._processes.values():
            process.kill()
            with process:
                pass


_PERFORM: dict[Kind, Callable[[Run, Fault], None]] = {
    Kind.KILL_WORKER: Run._kill_worker,
    Kind.STOP_WORKER: Run._stop_worker,
    Kind.KILL_SHARD: Run._kill_shard,
    Kind.STOP_SHARD: Run._stop_shard,
    Kind.KILL_COORDINATOR: Run._kill_coordinator,
    Kind.STOP_COORDINATOR: Run._stop_coordinator,
    Kind.FILL: Run._fill,
    Kind.FLIP: Run._flip,
    Kind.KILL_REPLICA: Run._kill_replica,
    Kind.PURGE: Run._purge,
    Kind.KILL_NODE: Run._kill_node,
    Kind.STOP_NODE: Run._stop_node,
    Kind.CUT_ONE_WAY: Run._cut_one_way,
    Kind.CUT_BOTH_WAYS: Run._cut_both_ways,
    Kind.CUT_OFF: Run._cut_off,
}


def _hashes(planted: dict[str, Any]) -> list[BlockHash]:
    return [BlockHash(bytes.fromhex(block)) for block in planted["hashes"]]


def _wait(seconds: float) -> None:
    threading.Event().wait(seconds)
