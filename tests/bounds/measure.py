"""Sends the worst of each message to a real cluster, and measures what it takes of the process that reads it.

Memory is the most that was resident while the messages were read, beyond what was resident before; CPU is that of the
whole process. Each way is sent by one sender and then by several at once, beside an honest tenant, whose longest
request of that time is written down, too.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import kvcluster
from kvcluster.core.messages import Attach, Attached, AttachedShard, AttachShard, GetOffers, Offers
from kvcluster.runtime.auth import new_token, token_line
from kvcluster.wire.methods import COORDINATOR, SHARD
from tests.attacks.__main__ import Honest, environment, within_tls
from tests.attacks.attackers import ask
from tests.attacks.setting import TINY
from tests.bounds.messages import MESSAGES, Place
from tests.ports import free_port, metrics_port

AT_ONCE = 8
_TICKS = os.sysconf("SC_CLK_TCK")
_SETTLE_S = 0.3
_AFTER_S = 5.0


@dataclass(slots=True)
class Figures:
    """What one kind of message did. Bytes; milliseconds of CPU for one message; how its ways were answered."""

    name: str
    way: str = ""  # the one that took the most memory
    memory: int = 0
    several: int = 0
    kept: int = 0
    cpu_ms: float = 0.0
    honest_ms: float = 0.0
    answers: dict[str, str] = field(default_factory=dict)


class Bench:
    """A cluster, an honest tenant at work, and a place for the attacker."""

    def __init__(self, place: Place, pids: dict[str, int], honest: Honest) -> None:
        self._place = place
        self.pids = pids
        self.honest = honest

    def address(self, port: str) -> str:
        """Returns where one of handshakes.PORTS is."""
        place = self._place
        return {"tcp": place.shard_socket, "events": place.events.removeprefix("tcp://")}.get(port) or str(
            getattr(place, port)
        )

    def serves(self) -> None:
        """Connects to both gRPC servers and asks them something. Raises KVClusterError or Unavailable if one does not
        answer."""
        ask(self._place.coordinator, self._place.token, COORDINATOR["Attach"], Attach(TINY), Attached)
        ask(self._place.shard, self._place.token, SHARD["GetOffers"], GetOffers(), Offers)

    def measure(self, name: str, *, at_once: int = AT_ONCE) -> Figures:
        """Returns the worst that this message does, of all its ways."""
        message = MESSAGES[name]
        pid = self.pids[message.at]
        found, before, began = Figures(name), resident(pid), time.monotonic()
        for way, send in message.worst(self._place):
            start = _forget_peak(pid)
            cpu = cpu_ms(pid)
            found.answers[way] = send()
            _pause()  # the answer comes before the message's memory is given back
            found.cpu_ms = max(found.cpu_ms, cpu_ms(pid) - cpu)
            one = _peak(pid) - start
            start = _forget_peak(pid)
            with ThreadPoolExecutor(at_once) as senders:
                list(senders.map(lambda _, send=send: send(), range(at_once)))
            several = _peak(pid) - start
            if one > found.memory:
                found.memory, found.way = one, way
            found.several = max(found.several, several)
        ended = time.monotonic()
        while (kept := resident(pid) - before) > 2**20 and time.monotonic() < ended + _AFTER_S:
            _pause()
        found.kept = max(0, kept)
        found.honest_ms = max((sample.ms for sample in self.honest.between(began, ended)), default=0.0)
        return found


@contextmanager
def bench(*, tls: bool = False) -> Iterator[Bench]:
    """A cluster of one shard with tokens of two tenants, one of which is an operator's and the attacker's. With `tls`
    all of it is within TLS, by certificates that are made for it."""
    tokens = {tenant: new_token() for tenant in ("honest", "attacker")}
    lines = [token_line(token, tenant, operator=tenant == "attacker") for tenant, token in tokens.items()]
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        file = Path(folder, "tokens")
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        events = f"tcp://127.0.0.1:{free_port()}"
        metrics = metrics_port(events)
        config = {
            "server": {"token_file": str(file), "transports": ["tcp", "grpc"]},
            "events": {"endpoint": events},
            "metrics": {"port": metrics},
        }
        more, known = within_tls(Path(folder)) if tls else ({}, {})
        with environment(known), kvcluster.local(shards=1, ram_bytes="64MiB", config=config | more) as cluster:
            probed = tuple(f"127.0.0.1:{metrics + at}" for at in range(2))
            honest = Honest(cluster.address, probed, tokens["honest"])
            place = None
            try:
                honest.wait()
                place = _place(cluster.address, tokens["attacker"], events, f"127.0.0.1:{metrics}")
                yield Bench(place, dict(zip(("coordinator", "shard"), cluster.pids(), strict=True)), honest)
            finally:
                honest.end()
                if place is not None:
                    place.close()


def _place(address: str, token: str, events: str, metrics: str) -> Place:
    attached = ask(address, token, COORDINATOR["Attach"], Attach(TINY), Attached)
    shard = attached.shards[0].address
    offers = ask(shard, token, SHARD["GetOffers"], GetOffers(), Offers).offers
    (by_socket,) = (offer.address for offer in offers if offer.transport == "tcp")
    there = ask(shard, token, SHARD["Attach"], AttachShard(TINY), AttachedShard)
    return Place(address, shard, by_socket, events, metrics, token, attached.namespace, there.namespace, there.epoch)


def _pause() -> None:
    threading.Event().wait(_SETTLE_S)


def resident(pid: int) -> int:
    """Returns the resident bytes of a process."""
    return int(_status(pid, "VmRSS")) * 1024


def _peak(pid: int) -> int:
    return int(_status(pid, "VmHWM")) * 1024


def _forget_peak(pid: int) -> int:
    """Sets the peak to what is resident now, and returns that."""
    Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")
    return resident(pid)


def _status(pid: int, name: str) -> str:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith(name + ":"):
            return line.split()[1]
    raise AssertionError(f"/proc/{pid}/status has no {name}")


def cpu_ms(pid: int) -> float:
    """Returns the milliseconds of CPU that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS * 1e3
