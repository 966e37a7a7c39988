"""Hosts in network namespaces, on which a cluster runs by the commands that docs/operations.md prints.

`Cluster` is the whole: a network, the files that every host has, and a process of `kvcluster` on each host. The
commands and the settings are read from the document, so that what is printed there is what is tested; only paths, sizes
and the head's address differ.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvcluster.runtime.auth import new_token, token_line
from tests.hosts.netns import Network
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "operations.md"
HOSTS = ("head", "one", "two", "spare", "worker")
_KVCLUSTER = (sys.executable, "-m", "kvcluster.cli.main")
_END_S = 60.0


def printed(starts: str) -> list[str]:
    """The command line of the document that begins with these words, without its comment."""
    (line,) = [line for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if line.startswith(starts)]
    return line.partition("#")[0].split()


def printed_settings() -> str:
    """The settings of several hosts that the document prints."""
    section = DOCUMENT.read_text(encoding="utf-8").partition("## Several hosts")[2]
    found = re.search(r"```toml\n(.*?)```", section, re.DOTALL)
    assert found is not None
    return found[1]


class Cluster:
    """Use as a context manager; leaving it ends every process and takes the hosts away. `more`: TOML after what the
    document prints; `changes`: texts in that to replace. `address`: at which the head is reached; its own by
    default."""

    def __init__(self, more: str = "", changes: Mapping[str, str] | None = None, *, address: str = "") -> None:
        self.network = Network(HOSTS)
        self.address = address or self.network.addresses["head"]
        self.token = new_token()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._more = more
        self._changes = {"20GiB": "64MiB", **(changes or {})}

    def __enter__(self) -> Cluster:
        self.folder = Path(tempfile.mkdtemp(prefix="kvhosts-"))
        try:
            self.network.__enter__()
            (self.folder / "tokens").write_text(token_line(self.token, "ops", operator=True) + "\n", encoding="utf-8")
            (self.folder / "quotas").write_text("# no quota\n", encoding="utf-8")
            (self.folder / "quotas").chmod(0o600)
            secret = self.kvcluster("head", "token", "--secret")
            (self.folder / "secret").write_text(secret, encoding="utf-8")
            (self.folder / "secret").chmod(0o600)
            self._certify()
            self.disk.mkdir()
            self.configure(self._more, self._changes)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.network.close()
        for process in self.processes.values():
            process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _certify(self) -> None:
        """Makes a certificate that all hosts have, for the names of all of them."""
        names = [f"--name={address}" for address in {*self.network.addresses.values(), self.address}]
        command = printed("kvcluster certs issue /safe/kvcluster-ca")[1:]
        at = command.index("--name")
        command[at : at + 2] = names
        self.kvcluster("head", *printed("kvcluster certs init /safe/kvcluster-ca")[1:])
        self.kvcluster("head", *command)

    def renew(self, days: int) -> None:
        """Replaces the certificate of all hosts by one that is valid for so many days."""
        self.kvcluster("head", "certs", "renew", "/etc/kvcluster", "--ca", "/safe/kvcluster-ca", "--days", str(days))

    def configure(self, more: str, changes: Mapping[str, str] | None = None) -> Path:
        """Writes the settings that every host reads."""
        text = printed_settings()
        for old, new in {**self._changes, **(changes or {})}.items():
            assert old in text, f"the document does not print {old!r}"
            text = text.replace(old, new)
        own = re.search(r"\[ray\]\n(.*?)(?=\n\[|\Z)", more, re.DOTALL)
        if own is not None:  # the document has that section, and a file has it once
            more = more.replace(own[0], "", 1)
            text = text.replace("[ray]\n", f"[ray]\n{own[1]}\n", 1)
        path = self.folder / "cluster.toml"
        path.write_text(self._here(text + more), encoding="utf-8")
        return path

    @property
    def disk(self) -> Path:
        """The folder at which each host has a disk of its own."""
        return self.folder / "disk"

    @property
    def environment(self) -> dict[str, str]:
        """That of workers and commands: an operator's token, and the authority of the certificates."""
        return os.environ | {"KVCLUSTER_TOKEN": self.token, "KVCLUSTER_CA_FILE": str(self.folder / "ca.crt")}

    # ---------------------------------------------------------------------------------------- processes

    def up(self, host: str = "head", *more: str, wrapper: Sequence[str] = ()) -> None:
        """Runs the head there."""
        self._run(host, [*printed("kvcluster up --foreground"), *more], wrapper)

    def join(self, host: str, *more: str, wrapper: Sequence[str] = ()) -> None:
        """Makes that host a node."""
        self._run(host, [*printed("kvcluster join"), *more], wrapper)

    def end(self, host: str) -> int:
        """Sends SIGTERM to the command that runs there, and returns its status."""
        process = self.processes[host]
        os.kill(process.pid, signal.SIGTERM)
        return process.wait(_END_S)

    def kill(self, host: str) -> None:
        """Ends every process of that host at once, as a loss of power does."""
        for _ in range(3):
            for pid in self.network.pids(host):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if host in self.processes:
            self.processes[host].wait(_END_S)

    def said(self, host: str) -> str:
        """What the commands of this host have said."""
        path = self.folder / f"{host}.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def wait_said(self, host: str, text: str, timeout_s: float = 90.0) -> None:
        """Waits until the command of that host has said this."""
        try:
            eventually(lambda: text in self.said(host), timeout_s)
        except AssertionError:
            raise AssertionError(f"{host} has not said {text!r}, but: {self.said(host)}") from None

    def kvcluster(self, host: str, *arguments: str, status: int = 0) -> str:
        """Runs a command there and returns what it prints; it must end with this status."""
        done = subprocess.run(
            self.network.command(host, [*_KVCLUSTER, *map(self._here, arguments)]),
            check=False,
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=self.environment,
            timeout=120,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    # ------------------------------------------------------------------------------------------- looking

    def status(self, host: str = "worker") -> dict[str, Any]:
        """The status as that host sees it; {} while there is none."""
        command = printed("kvcluster status --address")[1:]
        done = subprocess.run(
            self.network.command(host, [*_KVCLUSTER, *map(self._here, command), "--json"]),
            check=False,
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=self.environment,
            timeout=60,
        )
        found: dict[str, Any] = json.loads(done.stdout) if done.stdout else {}
        return found

    def shards(self) -> dict[str, str]:
        """The shards that are up, with the host of each; {} while the coordinator does not serve yet."""
        hosts = {address: host for host, address in self.network.addresses.items()}
        status = self.status()
        found = status["shards"] if status.get("state") == "serving" else ()
        return {each["shard"]: hosts[each["address"].rpartition(":")[0]] for each in found if each["state"] == "up"}

    def wait_shards(self, holds: Callable[[dict[str, str]], object], timeout_s: float = 90.0) -> dict[str, str]:
        """Waits until this holds of `shards`, and returns them."""
        found: dict[str, str] = {}

        def look() -> bool:
            nonlocal found
            found = self.shards()
            return bool(holds(found))

        try:
            eventually(look, timeout_s)
        except AssertionError:
            said = "\n".join(f"--- {host}\n{self.said(host)}" for host in HOSTS)
            raise AssertionError(f"in vain: {found}\n{said}") from None
        return found

    def worker(self, host: str, job: str, *arguments: object) -> dict[str, Any]:
        """Runs tests/hosts/worker.py there and returns what it says."""
        command = [sys.executable, "-m", "tests.hosts.worker", f"{self.address}:7070", job, *map(str, arguments)]
        done = subprocess.run(
            self.network.command(host, command),
            check=False,
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=self.environment,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return said

    def _run(self, host: str, command: Sequence[str], wrapper: Sequence[str] = ()) -> None:
        assert command[0] == "kvcluster"
        own = self.folder / "disks" / host
        own.mkdir(parents=True, exist_ok=True)
        argv = [*_own_disk(own, self.disk), *wrapper, *_KVCLUSTER, *map(self._here, command[1:])]
        with (self.folder / f"{host}.log").open("ab") as log:
            self.processes[host] = subprocess.Popen(
                self.network.command(host, argv),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                start_new_session=True,
            )

    def _here(self, text: str) -> str:
        """The text with the paths of this run, and the head's address."""
        text = text.replace("/etc/kvcluster", str(self.folder)).replace("/safe/kvcluster-ca", f"{self.folder}/ca")
        return re.sub(r"\bHEAD\b", self.address, text)


def _own_disk(own: Path, disk: Path) -> list[str]:
    """What runs a command on a host so that it finds `own` at `disk`: each host has its own mounts."""
    return ["sh", "-c", 'mount --bind "$1" "$2" && shift 2 && exec "$@"', "sh", str(own), str(disk)]
