"""Processes of releases (peer.py): started, asked and ended. Every wait has a bound."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from typing_extensions import Self

from tests.compat.releases import environment

PEER = Path(__file__).parent / "peer.py"
BOUND_S = 60.0


class Process:
    """A coordinator or a shard of the release in that folder; its first line is `told`. `wrapper`: a command line that
    runs it elsewhere."""

    def __init__(
        self, release: Path, *arguments: str, wrapper: Sequence[str] = (), env: Mapping[str, str] | None = None
    ) -> None:
        self._process = subprocess.Popen(
            [*wrapper, sys.executable, "-S", str(PEER), *arguments],
            env={**environment(release), **(env or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.told = self._next()
        _is_of(release, self.told)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(BOUND_S)
        finally:
            self._process.kill()
            self._process.wait()
            self._reader.join()

    @property
    def address(self) -> str:
        return str(self.told["address"])

    def look(self) -> dict[str, Any]:
        """Returns what the process says about itself now."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._next()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put("")

    def _next(self) -> dict[str, Any]:
        line = self._lines.get(timeout=BOUND_S)
        assert line, "the process has ended"
        said: dict[str, Any] = json.loads(line)
        return said


class Cluster:
    """A coordinator and shards, each of a release of its own, until the `with` ends."""

    def __init__(self, coordinator: Path, *shards: Path) -> None:
        self._coordinator, self._shards = coordinator, shards
        self._house = ExitStack()
        self.shards: list[Process] = []

    def __enter__(self) -> Self:
        with ExitStack() as house:
            self.coordinator = house.enter_context(Process(self._coordinator, "coordinator", "1"))
            for number, release in enumerate(self._shards):
                shard = Process(release, "shard", f"shard-{number}", self.coordinator.address)
                self.shards.append(house.enter_context(shard))
            self._house = house.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._house.close()

    def states(self) -> dict[str, str]:
        """Returns the states of the shards that the coordinator knows."""
        return {name: shard["state"] for name, shard in self.coordinator.look()["shards"].items()}


def work(release: Path, coordinator: str, transport: str, action: str, seed: int) -> dict[str, Any]:
    """Runs a worker of that release to its end, and returns what it did."""
    command = [sys.executable, "-S", str(PEER), "worker", coordinator, transport, action, str(seed)]
    ran = subprocess.run(
        command, env=environment(release), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=True,
        timeout=2 * BOUND_S,
    )  # fmt: skip
    did: dict[str, Any] = json.loads(ran.stdout)
    _is_of(release, did)
    return did


def _is_of(release: Path, said: dict[str, Any]) -> None:
    assert Path(said["code"]).is_relative_to(release), f"a process of {release.name} runs the code in {said['code']}"
