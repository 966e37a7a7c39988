"""Attacks on a real cluster beside an honest tenant: `python -m tests.attacks --minutes 3`. What do they do to it?

Each attack runs for so many minutes, in turns with a control of a sixth of the time: a process that burns as much CPU
as the attacker did, and talks to no cluster. The honest tenant goes on at its own pace meanwhile. Prints a table, and
ends with status 1 if the 99th percentile, hits or stores, or the memory of the cluster are beyond the bounds of
verdict.py.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import kvcluster
from kvcluster.actors.local import LocalCluster
from kvcluster.runtime.auth import new_token, token_line
from kvcluster.transport.credentials import CA_FILE
from tests.attacks.attackers import ATTACKS, BEGUN, look
from tests.attacks.verdict import Outcome, Sample, table
from tests.authority import Authority
from tests.ports import free_port, metrics_port

TURNS = 3
_SHARDS = 2
_NAME = "attacked"
_SETTLE_S = 2.0
_MEMORY_S = 60.0
_BEGIN_S = 60.0
_CONTROL_S = 1.5
_END_S = 20.0
_QUOTAS = """
[tenants.limited]
ram = { limit = "16MiB" }
requests_per_second = 100
bytes_per_second = "8MiB"
"""
_TICKS = os.sysconf("SC_CLK_TCK")
_ROOT = Path(__file__).parents[2]


class Honest:
    """The honest tenant's process, and the samples that it has sent so far."""

    def __init__(self, address: str, metrics: tuple[str, ...], token: str) -> None:
        self.samples: list[Sample] = []
        self._first = threading.Event()
        command = [sys.executable, "-m", "tests.attacks.honest", address, *metrics]
        env = os.environ | {"KVCLUSTER_TOKEN": token}
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=_ROOT, env=env)
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def wait(self) -> None:
        assert self._first.wait(_BEGIN_S), "the honest tenant has not begun"

    def between(self, start: float, stop: float) -> list[Sample]:
        """Returns the requests that began in this time of the monotonic clock."""
        return [sample for sample in self.samples if start <= sample.at < stop]

    def end(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._reading.join(_END_S)
        with self._process:
            self._process.kill()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.samples.append(Sample(**json.loads(line)))
            self._first.set()


class Stage:
    """A cluster, its honest tenant, and what an attacker needs to know."""

    def __init__(self, cluster: LocalCluster, honest: Honest, target: dict[str, Any], limited: str) -> None:
        """`limited`: the token of the tenant with quotas."""
        self._limited = limited
        self._cluster = cluster
        self._honest = honest
        self._target = target

    def play(self, name: str, seconds: float, *, turns: int = TURNS, memory_s: float = _MEMORY_S) -> Outcome:
        """Returns what an attack did in so many seconds, in turns with a control. Memory is given back within
        `memory_s`, or never."""
        attack, pause = ATTACKS[name], threading.Event()
        outcome = Outcome(name, attack.what, limited=attack.limited)
        token = self._limited if attack.limited else self._target["token"]
        before = self._memory()
        peaks = [before]
        for _ in range(turns):
            facts = {**self._target, "token": token if attack.by_tenant else None}
            attacker = _start("tests.attacks.attackers", name)
            assert attacker.stdin is not None
            attacker.stdin.write(json.dumps(facts) + "\n")
            attacker.stdin.close()
            _wait_begun(attacker)
            pause.wait(_SETTLE_S)
            start, burnt = time.monotonic(), _cpu_s(attacker.pid)
            while time.monotonic() < start + seconds / turns:
                pause.wait(min(1.0, seconds / turns))
                peaks.append(self._memory())
            stop, burnt = time.monotonic(), _cpu_s(attacker.pid) - burnt
            said = json.loads(_end(attacker) or "{}")
            outcome.seconds += stop - start
            outcome.done += said.get("done", 0)
            outcome.refused += said.get("refused", 0)
            outcome.cores += burnt / seconds
            pause.wait(2 * _SETTLE_S)
            outcome.attacked += self._honest.between(start, stop)
            outcome.control += self._beside(burnt / (stop - start), max(_CONTROL_S, seconds / turns / 6))
        give_up = time.monotonic() + memory_s
        while sum(after := self._memory()) > 1.05 * sum(before) and time.monotonic() < give_up:
            pause.wait(1.0)
        outcome.memory = sum(before), max(map(sum, peaks)), sum(after)
        most = [max(column) - first for first, column in zip(before, zip(*peaks, strict=True), strict=True)]
        outcome.growth = max(zip(most, ("coordinator", *("shard" for _ in most[1:])), strict=True))
        return outcome

    def _beside(self, cores: float, seconds: float) -> list[Sample]:
        """Returns the honest tenant's requests while as much CPU is burnt."""
        burners = []
        while cores > 0.005:
            burners.append(_start("tests.attacks.burner", f"{min(1.0, cores):.3f}"))
            cores -= 1.0
        pause = threading.Event()
        pause.wait(_SETTLE_S)
        start = time.monotonic()
        pause.wait(seconds)
        stop = time.monotonic()
        for burner in burners:
            with burner:  # closes its pipes
                burner.kill()
        pause.wait(_SETTLE_S)
        return self._honest.between(start, stop)

    def _memory(self) -> list[int]:
        """Returns the resident bytes of the coordinator and of each shard."""
        pages = [int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) for pid in self._cluster.pids()]
        return [count * os.sysconf("SC_PAGESIZE") for count in pages]


@contextmanager
def stage(*, tls: bool = False) -> Iterator[Stage]:
    """A cluster of two shards with tokens of four tenants, one of whom has quotas, and the honest tenant at work. With
    `tls` all of it is within TLS, by certificates that are made for it."""
    tokens = {tenant: new_token() for tenant in ("honest", "attacker", "bystander", "limited")}
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        file = Path(folder, "tokens")
        file.write_text("".join(token_line(token, tenant) + "\n" for tenant, token in tokens.items()), encoding="utf-8")
        quotas = Path(folder, "quotas")
        quotas.write_text(_QUOTAS, encoding="utf-8")
        quotas.chmod(0o600)
        events = f"tcp://127.0.0.1:{free_port()}"
        port = metrics_port(events)
        config: dict[str, Any] = {
            "server": {"token_file": str(file), "quota_file": str(quotas), "transports": ["tcp", "grpc"]},
            "events": {"endpoint": events},
            "metrics": {"port": port},
        }
        more, known = within_tls(Path(folder)) if tls else ({}, {})
        metrics = tuple(f"127.0.0.1:{port + at}" for at in range(1 + _SHARDS))
        with (
            environment(known),
            kvcluster.local(shards=_SHARDS, ram_bytes="64MiB", config=config | more) as cluster,
        ):
            honest = Honest(cluster.address, metrics, tokens["honest"])
            try:
                honest.wait()
                target = look(cluster.address, tokens["attacker"], events, metrics)
                yield Stage(cluster, honest, asdict(target), tokens["limited"])
            finally:
                honest.end()


def within_tls(folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Makes certificates in a folder. Returns what a cluster's configuration says of them, and the environment by which
    others know its authority."""
    files = Authority(folder).issue("node", "coordinator", "shard", cluster=_NAME).files
    security = {"encryption": "tls", "ca_file": files.ca, "cert_file": files.cert, "key_file": files.key}
    return {"name": _NAME, "security": security}, {CA_FILE: files.ca}


@contextmanager
def environment(more: dict[str, str]) -> Iterator[None]:
    """Within the block, processes that start have these variables, too."""
    os.environ.update(more)
    try:
        yield
    finally:
        for name in more:
            del os.environ[name]


def _start(module: str, argument: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", module, argument]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_ROOT)


def _wait_begun(attacker: subprocess.Popen[str]) -> None:
    """Waits until an attacker has done its first act, which some prepare for seconds."""
    assert attacker.stdout is not None
    ready, _, _ = select.select([attacker.stdout], [], [], _BEGIN_S)
    assert ready and attacker.stdout.readline().strip() == BEGUN, "the attacker has not begun"


def _end(process: subprocess.Popen[str]) -> str:
    """Tells a process to end, and returns the last line that it wrote and that was not read; "" if there is none."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
    with process:
        assert process.stdout is not None
        return "".join(process.stdout.readlines()[-1:])


def _cpu_s(pid: int) -> float:
    """Returns the CPU seconds that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.attacks", description="Attacks beside an honest tenant.")
    parser.add_argument(
        "--minutes", type=float, default=3.0, help="of each attack, in turns with a sixth as many of its control (3)"
    )
    parser.add_argument("--only", nargs="+", choices=ATTACKS, default=list(ATTACKS), help="these attacks alone")
    parser.add_argument("--tls", action="store_true", help="a cluster that speaks TLS (default: in the clear)")
    options = parser.parse_args()
    outcomes = []
    with stage(tls=options.tls) as played:
        for name in options.only:
            outcomes.append(played.play(name, options.minutes * 60))
            print(table(outcomes[-1:]), flush=True)
    print("\n" + table(outcomes))
    return int(any(outcome.failures() for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
