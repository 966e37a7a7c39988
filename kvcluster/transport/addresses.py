"""Addresses of servers, "host:port" as text, and how they are checked."""

from __future__ import annotations

import re

from kvcluster.config.ports import is_loopback
from kvcluster.errors import ConfigError


def host_and_port(host: str, port: int) -> str:
    """Returns the address "host:port", with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


IN_PROCESS = "in-process://"
"""The prefix of addresses of clusters that serve their own process alone (client/in_process.py)."""

_SCHEME = re.compile("[A-Za-z][A-Za-z0-9+.-]*:/{1,3}")
_HOST = re.compile(r"[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+(%[A-Za-z0-9_.-]+)?\]")
_BARE_IPV6 = re.compile("[0-9A-Fa-f.]*(:[0-9A-Fa-f.]*){2,}")


def check_address(address: str) -> None:
    """Raises ConfigError unless this is host:port. The message says what to write instead, where that is known."""
    given: object = address
    if not isinstance(given, str):
        raise ConfigError(f"the address is {given!r}; expected host:port as text, such as '127.0.0.1:7070'")
    if address.startswith(IN_PROCESS):
        raise ConfigError(
            f"{address} is a cluster within the process that started it by kvcluster.local(ray=False), or one that has "
            "ended, and no other process can connect to it: start it by kvcluster.local(ray=True) or `kvcluster up`, "
            "and give that cluster's address"
        )
    if _is_host_and_port(address):
        return
    bare = _SCHEME.sub("", address.strip(), count=1).split("/", 1)[0].rpartition("@")[2]
    host, _, port = bare.rpartition(":")
    if not _is_host_and_port(bare) and _BARE_IPV6.fullmatch(host):
        bare = f"[{host}]:{port}"
    instead = f": write {bare}" if _is_host_and_port(bare) else ", such as 127.0.0.1:7070"
    raise ConfigError(f"{address!r} is not host:port{instead}")


def _is_host_and_port(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return bool(_HOST.fullmatch(host) and re.fullmatch("[0-9]{1,5}", port) and 0 < int(port) < 65_536)


def host_of(address: str) -> str:
    """Returns the host of an address, without the brackets of IPv6."""
    return address.rpartition(":")[0].strip("[]")


def split_address(address: str) -> tuple[str, int]:
    """Returns the host, without the brackets of IPv6, and the port."""
    return host_of(address), int(address.rpartition(":")[2])


def is_on_loopback(address: str) -> bool:
    """Whether only processes of this machine can reach this address."""
    return is_loopback(host_of(address))
