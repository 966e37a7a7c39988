"""A network of our own: a switch and hosts, each a network namespace, and links that can be cut one way.

Nothing of the machine's own network is touched. The switch is a namespace too, so that neither the machine's addresses
nor its packet filters have a part in it; no host has a way out. A link is cut by a rule at the host that is to
hear no more, so that packets vanish silently, as on a broken network. Needs root, iproute2 and iptables.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_PREFIX = "kvchaos"
_SWITCH = "switch"
_NOWHERE = "10.203.0.254"
_NEW_NET = 0x40000000
"""CLONE_NEWNET, which setns(2) compares the file with."""


def missing() -> str:
    """Why there can be no such network on this machine; "" where there can."""
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    for tool in ("ip", "iptables"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed (iproute2, iptables)"
    probe = f"{_PREFIX}{os.getpid()}-probe"
    try:
        _run("ip", "netns", "add", probe)
    except subprocess.CalledProcessError as error:
        return f"no network namespace can be made: {error.stderr.strip()}"
    try:
        _run("ip", "netns", "exec", probe, "iptables", "-A", "INPUT", "-s", "10.203.0.1", "-j", "DROP")
        return ""
    except subprocess.CalledProcessError as error:
        return f"no packet can be dropped: {error.stderr.strip()}"
    finally:
        _run("ip", "netns", "del", probe)


class Network:
    """Hosts by name, all on one switch. A context manager; leaving it ends every process on it."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self.addresses = {host: f"10.203.0.{number}" for number, host in enumerate(hosts, 1)}
        self._moved: dict[str, str] = {}  # further addresses, with the host that has each

    def __enter__(self) -> Network:
        _sweep()
        try:
            _run("ip", "netns", "add", _name(_SWITCH))
            _run("ip", "-n", _name(_SWITCH), "link", "add", "br0", "type", "bridge")
            _run("ip", "-n", _name(_SWITCH), "link", "set", "br0", "up")
            for host, address in self.addresses.items():
                _run("ip", "netns", "add", _name(host))
                cable = ("link", "add", host, "type", "veth", "peer", "name", "eth0", "netns", _name(host))
                _run("ip", "-n", _name(_SWITCH), *cable)
                _run("ip", "-n", _name(_SWITCH), "link", "set", host, "master", "br0", "up")
                _run("ip", "-n", _name(host), "addr", "add", f"{address}/24", "dev", "eth0")
                _run("ip", "-n", _name(host), "link", "set", "eth0", "up")
                _run("ip", "-n", _name(host), "link", "set", "lo", "up")
                # As on real machines there is a way out, by which a process finds its own address. It leads nowhere.
                _run("ip", "-n", _name(host), "route", "add", "default", "via", _NOWHERE)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends every process of every host, and takes the hosts away."""
        _remove([_name(host) for host in (*self.addresses, _SWITCH)])

    def command(self, host: str, argv: Sequence[str]) -> list[str]:
        """A command line that runs `argv` on that host."""
        return ["ip", "netns", "exec", _name(host), *argv]

    def pids(self, host: str) -> list[int]:
        """Every process of that host."""
        return _pids(_name(host))

    def within(self, host: str, call: Callable[[], T]) -> T:
        """Returns what `call` returns, on a thread whose sockets are those of that host. They stay there: a socket that
        it returns is one of that host."""
        with ThreadPoolExecutor(1, initializer=_enter, initargs=(_name(host),)) as thread:
            return thread.submit(call).result()

    def move(self, address: str, host: str) -> None:
        """Gives that further address to this host alone, as the address of a service moves."""
        for each in self.addresses:
            subprocess.run(
                ["ip", "-n", _name(each), "addr", "del", f"{address}/24", "dev", "eth0"],
                check=False,
                capture_output=True,
            )
        _run("ip", "-n", _name(host), "addr", "add", f"{address}/24", "dev", "eth0")
        self._moved[address] = host
        for each in self.addresses:
            subprocess.run(["ip", "-n", _name(each), "neigh", "flush", "to", address], check=False, capture_output=True)

    def cut(self, sender: str, hearer: str) -> None:
        """Nothing that `sender` sends reaches `hearer` any more; the other way is as it was."""
        self._rule("-A", sender, hearer)

    def heal(self, sender: str, hearer: str) -> None:
        """Undoes one such cut."""
        self._rule("-D", sender, hearer)

    def _rule(self, change: str, sender: str, hearer: str) -> None:
        further = (address for address, host in self._moved.items() if host == sender)
        for address in (self.addresses[sender], *further):
            rule = ("-s", address, "-j", "DROP")
            _run("ip", "netns", "exec", _name(hearer), "iptables", "--wait", change, "INPUT", *rule)


def _enter(name: str) -> None:
    """Moves this thread into a network namespace. Python has os.setns from 3.12 on."""
    with Path("/run/netns", name).open("rb") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NEW_NET):
            raise OSError(ctypes.get_errno(), f"no thread can enter the network namespace {name}")


def _name(host: str) -> str:
    return f"{_PREFIX}{os.getpid()}-{host}"


def _sweep() -> None:
    """Removes what a run left that was killed outright."""
    for name in _run("ip", "netns", "list").split():
        owner = name.removeprefix(_PREFIX).partition("-")[0]
        if name.startswith(_PREFIX) and owner.isdigit() and not Path("/proc", owner).exists():
            _remove([name])


def _remove(names: Sequence[str]) -> None:
    for name in names:
        if Path("/run/netns", name).exists():
            while pids := _pids(name):  # they may be starting others
                for pid in pids:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            _run("ip", "netns", "del", name)


def _pids(name: str) -> list[int]:
    return [int(pid) for pid in _run("ip", "netns", "pids", name).split()]


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
