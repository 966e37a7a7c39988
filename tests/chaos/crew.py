"""The processes of a chaos run that are no part of the cluster: an observer, which is asked, and the workers, which
write down what they saw.

A worker is started with all transports or with gRPC alone, by this release or by an older one, in turns.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvcluster.config import TRANSPORTS
from kvcluster.release import PROTOCOL_VERSION
from tests.chaos.judge import CALLS
from tests.chaos.niceness import WORKER, set_niceness
from tests.chaos.nodes import ROOT, WATCH, WORKERS
from tests.chaos.sites import Site
from tests.compat.releases import environment, installed
from tests.waiting import eventually

OBSERVER = "observer"
WAIT_S = 60.0


class Crew:
    """A context manager; leaving it ends all of them. `older`: an older release for workers, if there is one."""

    def __init__(self, site: Site, folder: Path, older: Path | None, draws: random.Random) -> None:
        self._site, self._folder, self._older, self._draws = site, folder, older, draws
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._journals: list[Path] = []
        self._journal: dict[str, Path] = {}  # the present one of each process
        self.older_workers = 0

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes.values():
            process.kill()
            with process:
                pass

    def start(self) -> None:
        self._start(OBSERVER, WATCH, "tests.chaos.observer")
        for name in WORKERS:
            self._start_worker(name)

    def names(self) -> dict[int, str]:
        """The name of each, by process."""
        return {process.pid: name for name, process in self._processes.items()}

    def pid(self, name: str) -> int:
        return self._processes[name].pid

    def kill_worker(self, name: str) -> None:
        """Kills a worker, and starts another in its place."""
        self._processes[name].kill()
        self._processes[name].wait()
        self._start_worker(name)

    def check(self) -> None:
        """Raises AssertionError if a worker has ended by itself."""
        for name in WORKERS:
            assert self._processes[name].poll() is None, f"worker {name} ended: {self._stderr(name)}"

    def await_load(self) -> None:
        """Waits until every worker, perhaps started a moment ago, is at work."""
        for name in WORKERS:
            eventually(lambda name=name: CALLS in self._journal[name].read_text(encoding="utf-8"), WAIT_S)

    def ask(self, do: str, **words: Any) -> Any:
        """Asks the observer, and returns what it says."""
        observer = self._processes[OBSERVER]
        assert observer.stdin is not None and observer.stdout is not None
        observer.stdin.write(json.dumps({"do": do, **words}) + "\n")
        observer.stdin.flush()
        answer = observer.stdout.readline()
        assert answer, f"the observer ended: {self._stderr(OBSERVER)}"
        return json.loads(answer)

    def end_load(self) -> list[str]:
        """Ends the workers, and says what was wrong with that."""
        self.await_load()
        wrong: list[str] = []
        for name in WORKERS:
            self._processes[name].send_signal(signal.SIGTERM)
        for name in WORKERS:
            try:
                status = self._processes[name].wait(WAIT_S)
            except subprocess.TimeoutExpired:
                status = None
            if status != 0:
                wrong.append(f"worker {name} was told to end; its status is {status}")
        return wrong

    def end(self) -> list[Path]:
        """Ends the observer. Returns what all of them have written down."""
        observer = self._processes[OBSERVER]
        assert observer.stdin is not None
        observer.stdin.close()
        assert observer.wait(WAIT_S) == 0, f"the observer failed: {self._stderr(OBSERVER)}"
        return self._journals

    def _start_worker(self, name: str) -> None:
        before = sum(journal.name.startswith(f"{name}-") for journal in self._journals)
        transports = TRANSPORTS[-1:] if before % 2 else TRANSPORTS
        older = self._older if before % 4 in (2, 3) else None
        seed = str(self._draws.randrange(2**32))
        self._start(name, WORKERS[name], "tests.chaos.worker", seed, ",".join(transports), release=older)
        self.older_workers += older is not None
        set_niceness(self._processes[name].pid, WORKER)

    def _start(self, name: str, host: str, module: str, *arguments: str, release: Path | None = None) -> None:
        journal = self._folder / f"{name}-{len(self._journals)}.jsonl"
        journal.touch()  # it may be killed before it opens it
        self._journals.append(journal)
        self._journal[name] = journal
        command = [sys.executable, *(["-S"] if release else []), "-m", module]
        command += [self._site.address, self._site.token, *arguments, str(journal)]
        env = os.environ | {"MALLOC_ARENA_MAX": "2"}  # as docs/operations.md advises
        if release is not None:  # its folder is the first place for modules, and the tests' the last
            env |= environment(release)
            env["PYTHONPATH"] += f"{os.pathsep}{ROOT}"
        with (self._folder / f"{name}.log").open("w", encoding="utf-8") as log:
            self._processes[name] = subprocess.Popen(
                self._site.command(host, command),
                stdin=subprocess.PIPE if name == OBSERVER else subprocess.DEVNULL,
                stdout=subprocess.PIPE if name == OBSERVER else log,
                stderr=log,
                text=True,
                cwd=release or ROOT,
                env=env,
                start_new_session=True,
            )

    def _stderr(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(encoding="utf-8")


def older_release(say: Callable[[str], object]) -> Path | None:
    """Returns the release of the version of the protocol before ours; None if it cannot be built here."""
    try:
        return installed(PROTOCOL_VERSION - 1)
    except (OSError, subprocess.CalledProcessError) as error:
        say(f"chaos: no older release is mixed in: {error}")
        return None
