"""A chaos run: a cluster under load from two workers, and faults one after the other.

Each fault is done, left for its time, undone; then all has to become well again: the coordinator serves and every shard
is up. What the workers see meanwhile they judge themselves (worker.py). At the end the load stops, and nothing may
be left of it.
"""

from __future__ import annotations

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
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvcluster.config import load
from kvcluster.core.ids import BlockHash
from tests.chaos import victims
from tests.chaos.crew import Crew, older_release
from tests.chaos.faults import BRIEF_S, Fault, Kind, Stage
from tests.chaos.nodes import HEAD, ROOT, SPARE, WORKERS, Nodes
from tests.chaos.observer import BLOCKS
from tests.chaos.report import Report
from tests.chaos.sites import OneHost, Site
from tests.hosts import netns
from tests.waiting import eventually

SHARDS = 3
PLANTED = 3
POOL_BYTES = 64 * 2**20
TIER_BYTES = {"gpu_bytes": 16 * 2**20, "host_bytes": 32 * 2**20, "disk_bytes": 128 * 2**20}
SETTINGS: dict[str, Any] = {
    "shards": SHARDS,
    "shard": {"ram_bytes": POOL_BYTES, **TIER_BYTES, "gpu_device": "twin", "disk_file_bytes": 4 * 2**20},
    # What a killed worker leaves is to be gone before the checks. Pages go down as they are: which bytes are right
    # follows from a block's hash.
    # A context of a sequence lies on several shards.
    "coordinator": {"ticket_ttl_ms": 10_000, "host_codec": "raw", "run_blocks": 8, "promote_loads": 2},
}
OLDER, OLDER_S = "older-0", 5.0
"""A shard of an older release, and how long the load goes on beside it before it is drained."""
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
        self._shards = SHARDS
        self._began = time.monotonic()

    def __enter__(self) -> Run:
        why = netns.missing()
        self._say(f"chaos: {f'one host only, because {why}' if why else 'in network namespaces'}")
        with ExitStack() as house:
            folder = Path(tempfile.mkdtemp(prefix="kvchaos-"))
            house.callback(shutil.rmtree, folder, ignore_errors=True)
            # A shard that restarts on another node finds its disk there, as with a volume that moves with it.
            settings = {**SETTINGS, "shard": {**SETTINGS["shard"], "disk_dir": str(folder / "disks")}}
            self._site: Site = house.enter_context(OneHost(settings) if why else Nodes(settings))
            older = older_release(self._say) if self._site.nodes else None
            self._crew = house.enter_context(Crew(self._site, folder, older, self._random))
            self._older = older
            self.report = Report(self._site.form, self._seed)
            shards = tuple(f"shard-{number}" for number in range(SHARDS))
            self.stage = Stage(
                *(shards, tuple(WORKERS), self._site.hosts, self._site.nodes),
                head_moves=self._site.head_moves,
                older=older is not None,
            )
            self._crew.start()
            self._become_well("start")
            self._crew.await_load()
            self._house = house.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._house.close()

    def inflict(self, faults: Iterable[Fault]) -> None:
        """Does these faults, each when all is well again after the one before."""
        for drawn in faults:
            began, fault = time.monotonic(), self._named(drawn)
            _PERFORM[fault.kind](self, fault)
            self.report.faults[fault.kind.value] += 1
            self._become_well(fault.kind.value)
            self._say(f"{began - self._began:6.1f} s  {fault}; well after {time.monotonic() - began:.1f} s")

    def drain(self) -> None:
        """Lets a shard go as an operator does, under load. On one host it does not come back, so this is the last thing
        that a run does."""
        began, shard = time.monotonic(), self._names()[0]
        self._shards -= not self.stage.nodes
        self._let_go(shard, "shard drained")
        self.report.faults["shard drained"] += 1
        self._become_well("shard drained")
        self._say(f"{began - self._began:6.1f} s  {shard} drained within {time.monotonic() - began:.1f} s")

    def _let_go(self, shard: str, what: str) -> None:
        """Drains a shard. What lay on it must lie elsewhere then: there is room, since all is cleared before."""
        cleared = self._crew.ask("clear", timeout_s=WELL_S)
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
        self.report.took(f"{what}: gone", time.monotonic() - began)
        for each in planted:
            self._must_be_whole(each, what)

    def processes(self) -> dict[int, str]:
        """Every process of the cluster and its workers, by id, with the names of the latter."""
        return dict.fromkeys(self._site.pids(), "") | self._crew.names()

    def finish(self) -> Report:
        """Ends the load, looks at what is left, and returns the report."""
        self.report.wrong += self._crew.end_load()
        self.report.outcomes["pages on twins of GPUs at the end"] = self._crew.ask("on_gpus")["pages"]
        quiet = self._crew.ask("quiet", shards=self._shards, timeout_s=WELL_S)
        if not quiet["ok"]:
            self.report.wrong.append(f"leaked: {quiet['left']}")
        for kind, expected in ((victims.SHARD, self._shards), (victims.COORDINATOR, 1)):
            found = victims.actors(self._site.pids(), kind)
            if len(found) != expected:
                self.report.wrong.append(f"leaked: {len(found)} processes are {kind}, not {expected}")
        self.report.outcomes["workers of an older release"] = self._crew.older_workers
        self.report.read(self._crew.end())
        self.report.seconds = time.monotonic() - self._began
        return self.report

    # -------------------------------------------------------------------------------------------- faults

    def _kill_worker(self, fault: Fault) -> None:
        self._crew.kill_worker(fault.target)

    def _stop_worker(self, fault: Fault) -> None:
        self._stop([self._crew.pid(fault.target)], fault.seconds)

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
        stored = self._crew.ask("fill", nbytes=SHARDS * (POOL_BYTES + TIER_BYTES["host_bytes"]))
        self.report.outcomes["blocks that filled the tiers"] += stored["blocks"]

    def _flip(self, fault: Fault) -> None:
        planted, pid = self._plant(fault.target), self._shard(fault.target)
        flipped_ns = time.monotonic_ns()
        flipped = victims.flip_bits(pid, _hashes(planted), self._random, POOL_BYTES // 2)
        loaded = self._crew.ask("load", number=planted["number"])["blocks"]
        self.report.outcomes["pages with a flipped bit"] += flipped
        self.report.outcomes["blocks of such prompts not loaded"] += BLOCKS - loaded
        self._served("bits flipped, stored again", planted, flipped_ns, storing=True)

    def _kill_replica(self, fault: Fault) -> None:
        planted, pid = self._plant(fault.target, replicas=2), self._shard(fault.target)
        others = [self._shard(name) for name in self._names() if name != fault.target]
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
        cleared = self._crew.ask("clear", timeout_s=WELL_S)
        assert cleared["ok"], f"not cleared within {WELL_S:.0f} s"
        victims.send(self._coordinators(), signal.SIGKILL)
        self._become_well("cache cleared, coordinator killed")
        if found := self._crew.ask("load", number=planted["number"])["blocks"]:
            self.report.wrong.append(f"{found} blocks that were cleared were loaded")

    def _kill_node(self, fault: Fault) -> None:
        planted = self._plant_on(fault.target)
        killed_ns = time.monotonic_ns()
        self._site.kill(fault.target)
        if planted is not None:
            self._served("node killed, stored again", planted, killed_ns, storing=True)

    def _replace_node(self, fault: Fault) -> None:
        """A spare node joins, the node leaves, joins again, and the spare one leaves. What lay there is still found."""
        began = time.monotonic()
        self._site.join(SPARE)
        for leaving, back in ((fault.target, fault.target), (SPARE, "")):
            planted = self._plant_on(leaving)
            self.report.wrong += self._site.leave(leaving)
            if planted is not None:
                self._must_be_whole(planted, "node replaced")
            if back:
                self._site.join(back)
        self.report.took("node replaced, and back", time.monotonic() - began)

    def _lose_head(self, _: Fault) -> None:
        planted = self._plant_on(self.stage.nodes[0]) or self._plant_on(self.stage.nodes[1])
        lost_ns = time.monotonic_ns()
        self._site.move_head()
        if planted is not None:
            self._served("head lost, first hit", planted, lost_ns, storing=False)

    def _older_shard(self, _: Fault) -> None:
        assert self._older is not None
        with self._site.shard_of(self._older, OLDER, load().membership_ttl_ms):
            well = self._crew.ask("well", shards=self._shards + 1, timeout_s=WELL_S)
            assert well["ok"], f"a shard of an older release is not up: {well['left']}"
            _wait(OLDER_S)
            self._let_go(OLDER, "shard of an older release drained")

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
        well = self._crew.ask("well", shards=self._shards, timeout_s=WELL_S)
        self.report.took(f"{after}: all up", well["took_s"])
        assert well["ok"], f"not well {WELL_S:.0f} s after: {after}; {well['left']}"
        self._crew.check()

    def _plant(self, shard: str, replicas: int = 1) -> dict[str, Any]:
        planted: dict[str, Any] = self._crew.ask("plant", shard=shard, replicas=replicas, timeout_s=WELL_S)
        assert planted["ok"], f"no prompt could be stored on {shard or 'any shard'}"
        return planted

    def _plant_on(self, node: str) -> dict[str, Any] | None:
        """As `_plant`, on a shard of that node; None if it has none."""
        pids = set(self._site.pids(node))
        on_it = (name for name in self._names() if self._shard(name) in pids)
        return next((self._plant(name) for name in on_it), None)

    def _must_be_whole(self, planted: dict[str, Any], what: str) -> None:
        if (loaded := self._crew.ask("load", number=planted["number"])["blocks"]) != BLOCKS:
            self.report.wrong.append(f"{BLOCKS - loaded} blocks were lost: {what}")

    def _names(self) -> list[str]:
        """The shards that there are."""
        status = eventually(lambda: self._crew.ask("status"), WELL_S)
        return sorted(shard["shard"] for shard in status["shards"])

    def _named(self, fault: Fault) -> Fault:
        """The fault for a shard that there is."""
        if fault.target not in self.stage.shards:
            return fault
        return replace(fault, target=self._names()[self.stage.shards.index(fault.target)])

    def _served(self, what: str, planted: dict[str, Any], since_ns: int, *, storing: bool) -> None:
        served = self._crew.ask(
            "served", number=planted["number"], since_ns=since_ns, storing=storing, timeout_s=WELL_S
        )
        assert served["ok"], f"not served again within {WELL_S:.0f} s: {what}"
        self.report.took(what, served["took_s"])

    def _shard(self, name: str) -> int:
        """The process of a shard, as soon as the one that the coordinator names is there."""
        return eventually(lambda: self._present_shard(name), WELL_S)

    def _present_shard(self, name: str) -> int:
        """0 where the coordinator does not know yet that this shard is gone."""
        status = self._crew.ask("status")
        known = status["shards"] if status else []
        address = next((shard["address"] for shard in known if shard["shard"] == name), ":0")
        host, _, port = address.rpartition(":")
        on_node = self._site.pids(self._site.node_at(host)) if host else []
        return victims.listener(victims.actors(on_node, victims.SHARD), int(port)) or 0

    def _coordinators(self) -> list[int]:
        return victims.actors(self._site.pids(), victims.COORDINATOR)


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
    Kind.REPLACE_NODE: Run._replace_node,
    Kind.LOSE_HEAD: Run._lose_head,
    Kind.OLDER_SHARD: Run._older_shard,
}


def _hashes(planted: dict[str, Any]) -> list[BlockHash]:
    return [BlockHash(bytes.fromhex(block)) for block in planted["hashes"]]


def _wait(seconds: float) -> None:
    threading.Event().wait(seconds)
