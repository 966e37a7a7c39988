"""Memory of the card that one process exports by a POSIX descriptor and another maps read-only: does it read the bytes,
is a write refused, and does the memory come back after either has been killed?

    exported.py DEVICE                    the step
    exported.py exporter|importer FD      a process of it; FD: a socket over which descriptors go
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from typing import Any

from benchmarks.gpu_steps.driver import Driver, DriverError
from benchmarks.gpu_steps.rows import row

NBYTES = 4 * 2**30
WORD = 0x5EEDC0DE
BOUND_S = 20.0


def exporter(peer: socket.socket) -> None:
    driver = Driver()
    driver.retain_context()
    size = driver.shared_bytes(0, NBYTES)
    handle = driver.create_shared(0, size)
    address = driver.map_shared(0, handle, size, writable=True)
    driver.fill(address, WORD, size // 4)
    fd = driver.export_shared(handle)
    socket.send_fds(peer, [str(size).encode()], [fd])
    peer.recv(1)


def importer(peer: socket.socket) -> None:
    driver = Driver()
    driver.retain_context()
    data, fds, _, _ = socket.recv_fds(peer, 64, 1)
    size = int(data)
    handle = driver.import_shared(fds[0])
    os.close(fds[0])
    try:
        address, access = driver.map_shared(0, handle, size, writable=False), "read-only"
    except DriverError as error:
        address = driver.map_shared(0, handle, size, writable=True)
        access = f"writable, since read-only was refused: {error}"
    peer.send(f"{access}|{driver.read(address + size - 4096, 4096) == WORD.to_bytes(4, 'little') * 1024}".encode())
    while command := peer.recv(64):
        if command == b"read":
            peer.send(str(driver.read(address, 4096) == WORD.to_bytes(4, "little") * 1024).encode())
        if command == b"write":
            try:
                driver.fill(address, 1, 1024)
                peer.send(b"was written")
            except DriverError as error:
                peer.send(f"refused: {error}".encode())


def started(role: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(BOUND_S)
    command = [sys.executable, "-m", "benchmarks.gpu_steps.exported", role, str(theirs.fileno())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    theirs.close()
    return process, ours


def kill(process: subprocess.Popen[Any]) -> None:
    process.kill()
    process.wait()


def until_back(driver: Driver, free: int) -> float | str:
    """Seconds until nearly as much memory is free as `free`."""
    began = time.monotonic()
    while time.monotonic() - began < BOUND_S:
        if driver.free_bytes() >= free - 2**28:
            return round(time.monotonic() - began, 3)
        time.sleep(0.01)
    return f"not within {BOUND_S:.0f} s"


def main() -> None:
    driver = Driver()
    driver.retain_context()
    free = driver.free_bytes()
    for first in ("exporter", "importer"):
        one, to_exporter = started("exporter")
        two, to_importer = started("importer")
        try:
            size, fds, _, _ = socket.recv_fds(to_exporter, 64, 1)
            socket.send_fds(to_importer, [size], fds)
            os.close(fds[0])  # a descriptor that stays open would keep the memory
            access, same = to_importer.recv(512).decode().split("|")
            row("imported", killed_first=first, how=access, right=same == "True")
            if first == "exporter":
                kill(one)
                to_importer.send(b"read")
                row(
                    "read after the exporter was killed",
                    killed_first=first,
                    how="",
                    right=to_importer.recv(64) == b"True",
                )
                row("memory still taken, GiB", value=(free - driver.free_bytes()) / 2**30)
                to_importer.send(b"write")
                row("a write by the importer", value=to_importer.recv(512).decode())
                kill(two)
            else:
                kill(two)
                row("memory still taken, GiB", value=(free - driver.free_bytes()) / 2**30)
                kill(one)
            back = until_back(driver, free)
            row("memory is back after the second was killed, s", value=back, right=not isinstance(back, str))
        finally:
            kill(one)
            kill(two)
            to_exporter.close()
            to_importer.close()


if __name__ == "__main__":
    if len(sys.argv) == 2:
        main()
    else:
        {"exporter": exporter, "importer": importer}[sys.argv[1]](
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, fileno=int(sys.argv[2]))
        )
