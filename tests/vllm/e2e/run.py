"""What the checks share: a cluster, engines in the other environment, prompts, and the table of results."""

from __future__ import annotations

import json
import os
import pickle
import random
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcluster.cli.weights import read_namespaces
from kvcluster.config import ClientConfig
from kvcluster.core.spec import KVSpec
from kvcluster.transfers.coordinator_client import GrpcPort
from kvcluster.transport.rpc import Connection
from tests.chaos.sites import OneHost
from tests.ports import event_endpoints

ROOT = Path(__file__).parents[3]
QUIET = Path(__file__).parent / "quiet"
BLOCK = 32
ENGINE_S = 600.0
"""How long one engine's job may take before it is ended."""

SETTINGS: dict[str, Any] = {
    "shards": 2,
    "shard": {"ram_bytes": "256MiB"},
    "coordinator": {"hot_replicas": 1},  # one page a block, so that all can be counted
}
PATIENT = {"lookup_ms": 5_000, "handover_ms": 10_000}
"""What is found must not depend on how busy this machine is."""

CLIENT = ClientConfig(deadline_ms=10_000)
"""The same for clients of the checks' own."""

ALWAYS = 1
"""A prefill rate at which every load pays: these models compute faster than anything is loaded."""


@dataclass
class Table:
    """Rows of what was seen: what, the figure, and whether it is as it must be."""

    rows: list[tuple[str, str, bool]] = field(default_factory=list)

    def add(self, what: str, seen: str, ok: bool) -> None:
        self.rows.append((what, seen, ok))
        print(f"{'ok ' if ok else 'BAD'}  {what}: {seen}", flush=True)

    @property
    def ok(self) -> bool:
        return bool(self.rows) and all(ok for _, _, ok in self.rows)

    def text(self) -> str:
        width = max((len(what) for what, _, _ in self.rows), default=0)
        return "\n".join(f"{'ok ' if ok else 'BAD'}  {what:<{width}}  {seen}" for what, seen, ok in self.rows)


@dataclass
class House:
    """Where everything is. `python` is the engines' own."""

    python: Path
    folder: Path
    site: OneHost
    table: Table
    events: tuple[str, str] = ("", "")
    specs: list[KVSpec] = field(default_factory=list)

    def namespaces(self) -> list[KVSpec]:
        """What the cluster knows of."""
        with closing(Connection(self.site.address)) as connection:
            return [spec for spec, _ in read_namespaces(GrpcPort(connection), 10_000)]

    @property
    def spec(self) -> KVSpec:
        """What engines with this house's connector cache under, as the last one told it."""
        return self.specs[-1]

    @property
    def surroundings(self) -> dict[str, str]:
        """Variables of every engine's environment: where it leaves its sockets behind, and quiet/."""
        path = [str(QUIET), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {"VLLM_RPC_BASE_PATH": str(self.folder), "PYTHONPATH": os.pathsep.join(path)}

    def model(self, name: str) -> str:
        return str(self.folder / "models" / name)

    def connector(self, **settings: Any) -> dict[str, Any]:
        """A connector's extra config for this cluster."""
        token = self.folder / "token"
        token.write_text(self.site.token, encoding="utf-8")
        given = {"address": self.site.address, "report": True, "prefill_tokens_per_s": ALWAYS} | PATIENT | settings
        return given | ({"token_file": str(token)} if self.site.token else {})

    def run(self, job: dict[str, Any], *, environment: dict[str, str] | None = None) -> dict[str, Any]:
        """Runs one engine's job to its end. Raises AssertionError with what it said where it fails."""
        return self.wait(self.begin(job, environment=environment))

    def begin(self, job: dict[str, Any], *, environment: dict[str, str] | None = None) -> Running:
        """Starts one engine's job."""
        with tempfile.NamedTemporaryFile("w", dir=self.folder, suffix=".job", delete=False) as file:
            json.dump(job | {"out": file.name + ".out"}, file)
        with open(file.name + ".txt", "wb") as said:
            process = subprocess.Popen(
                [str(self.python), "-m", "tests.vllm.e2e.engine", file.name],
                cwd=ROOT,
                env=os.environ | self.surroundings | (environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return Running(process, Path(file.name))

    def wait(self, running: Running) -> dict[str, Any]:
        try:
            code = running.process.wait(ENGINE_S)
        except subprocess.TimeoutExpired:
            running.process.kill()
            code = running.process.wait()
        said = Path(f"{running.job}.txt").read_text(encoding="utf-8", errors="replace")
        assert code == 0, f"the engine ended with {code}:\n{said[-6000:]}"
        answers: dict[str, Any] = json.loads(Path(f"{running.job}.out").read_text(encoding="utf-8"))
        if "spec" in answers:
            self.specs.append(pickle.loads(bytes.fromhex(answers["spec"])))
        return answers | {"said": said, "kv": f"{running.job}.out.kv"}


@dataclass
class Running:
    """An engine's job under way."""

    process: subprocess.Popen[bytes]
    job: Path


@contextmanager
def house(environment: Path, table: Table, *, published: bool = True) -> Iterator[House]:
    """A cluster on this host, which publishes KV events or not, and the models; all of it goes at the end."""
    python = environment / "bin" / "python"
    events = event_endpoints() if published else ("", "")
    settings = SETTINGS | {"events": {"endpoint": events[0], "replay": events[1]}}
    with tempfile.TemporaryDirectory(prefix="kve2e-") as folder, OneHost(settings) as site:
        made = subprocess.run(
            [str(python), "-m", "tests.vllm.e2e.models", f"{folder}/models"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert made.returncode == 0, made.stderr[-4000:]
        yield House(python, Path(folder), site, table, events)


# ------------------------------------------------------------------------------------------------------- prompts


def prompts(count: int, seed: int, *, shared: int = 3, longest: int = 400) -> list[list[int]]:
    """Token ids: three of four begin with a piece of one of `shared` texts, the others with nothing in common."""
    rng = random.Random(seed)
    texts = [tokens(rng, longest) for _ in range(shared)]
    made = []
    for number in range(count):
        head = rng.choice(texts)[: rng.randrange(2 * BLOCK, longest)] if number % 4 else []
        made.append(head + tokens(rng, rng.randrange(5, 3 * BLOCK)))
    return made


def tokens(rng: random.Random, count: int) -> list[int]:
    """Ids that begin no text and end none."""
    return [rng.randrange(256) for _ in range(count)]


# ---------------------------------------------------------------------------------------------------- comparisons


def answers(outcome: dict[str, Any], number: int = 0) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = outcome["rounds"][number]["answers"]
    return found


def differences(mine: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]]) -> int:
    """Requests of which any id or logprob differs in the least."""
    assert len(mine) == len(expected)
    return sum(one["choices"] != other["choices"] for one, other in zip(mine, expected, strict=True))


ROUNDING = 1e-3
"""More than rounding makes of a logprob of these models, and less than any wrong page does."""


def apart(mine: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]]) -> tuple[int, float]:
    """Returns how many requests differ in an id, and the largest difference of two logprobs of the others."""
    both = [(one["choices"][0], other["choices"][0]) for one, other in zip(mine, expected, strict=True)]
    alike = [(one, other) for one, other in both if one["ids"] == other["ids"]]
    logprobs = [abs(a - b) for one, other in alike for a, b in zip(one["logprobs"], other["logprobs"], strict=True)]
    return len(both) - len(alike), max(logprobs, default=0.0)


def least_distinct(outputs: Sequence[dict[str, Any]]) -> int:
    return min(len(set(choice["ids"])) for one in outputs for choice in one["choices"])


def loaded(outputs: Sequence[dict[str, Any]]) -> int:
    """Requests for which something was loaded."""
    return sum(1 for one in outputs if one["report"] and one["report"]["loaded_tokens"])


def eventually(condition: Any, seconds: float, what: str) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"not within {seconds} s: {what}"
        threading.Event().wait(0.1)
