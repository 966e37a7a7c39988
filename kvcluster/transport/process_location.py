"""Where this process runs (core/placement.py): its machine, and the places in which it sees the local sockets of
others, which are its network namespace and, where one is named, a socket directory (local_sockets.py)."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from functools import cache

from kvcluster.core.placement import host_text
from kvcluster.errors import ConfigError
from kvcluster.transport.local_sockets import SocketDirectory, machine

SOCKET_DIR = "KVCLUSTER_SOCKET_DIR"
"""The variable of the environment that names the socket directory of a worker, unless its settings do."""

_NAMESPACE = "/proc/self/ns/net"


@dataclass(frozen=True, slots=True)
class ProcessLocation:
    """Where a process runs. `host`: the text of core/placement.py. `socket_dir`: the directory in which it sees the
    sockets of others, "" for none; `sockets`: that directory, open. `why_not`: why the one that was named is not
    used."""

    host: str
    socket_dir: str = ""
    why_not: str = ""
    sockets: SocketDirectory | None = field(default=None, compare=False)

    def socket_path(self, name: str) -> str:
        """Returns the path of a shard's socket, which is one of the open directory as long as this object lives. Raises
        ConfigError if this process has no socket directory, or the name is not one of a file in it."""
        if self.sockets is None:
            raise ConfigError(
                f"the shard's socket lies in a directory of its node: {self.why_not or f'name it in {SOCKET_DIR}'}"
            )
        if "/" in name or "\0" in name or name in ("", ".", ".."):
            raise ConfigError(f"the shard names its socket {name!r}, which is not the name of a file")
        return self.sockets.path_of(name)


def locate(socket_dir: str = "") -> ProcessLocation:
    """Returns the location of this worker. `socket_dir`: of its settings; "" for that in KVCLUSTER_SOCKET_DIR. One that
    cannot be used is left out, since pages can be had in another way."""
    return _located(socket_dir or os.environ.get(SOCKET_DIR, ""), serving=False)


def locate_server(socket_dir: str) -> ProcessLocation:
    """Returns the location of this shard, whose socket is in `socket_dir`, or has an abstract name if that is "" or the
    directory cannot be used. As a worker it sees the sockets of other shards there."""
    return _located(socket_dir, serving=True)


def _located(path: str, *, serving: bool) -> ProcessLocation:
    if not path:
        return ProcessLocation(here())
    try:
        sockets = SocketDirectory(path, serving=serving)
    except ConfigError as error:
        return ProcessLocation(here(), why_not=str(error))
    return ProcessLocation(f"{here()}/{sockets.identity}", path, sockets=sockets)


@cache
def here() -> str:
    """Returns this process's place without a socket directory. The machine is identified by the kernel's boot id, which
    containers share; where that cannot be read, by the host's name."""
    name = socket.gethostname()
    try:
        return host_text(name, machine() or name, str(os.stat(_NAMESPACE).st_ino))
    except OSError:
        return host_text(name, name, "")
