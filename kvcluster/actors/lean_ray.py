"""Ray's processes, less those that nothing of a cluster uses.

Beside the processes that run actors, Ray starts on a head the server of its dashboard, even where the dashboard is
switched off, a monitor for its autoscaler, and a server for its remote clients; and on each node one that copies logs
to drivers. They take a third of the CPU time in which a Ray starts, and each waits for the one before. Ray has options
against some of them, and not for every way to start it. So the methods of Ray's node that start them do nothing here. A
method that another release of Ray does not have is left out, and its process then runs as before.

As a program, `python -m kvcluster.actors.lean_ray start ...`, this is Ray's command line without these processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ray._private.node import Node

_UNUSED = ("start_api_server", "start_monitor", "start_ray_client_server", "start_log_monitor")


@contextmanager
def lean_ray() -> Iterator[None]:
    """Within the block, a node of Ray that this process starts has the processes that run actors, and no others."""
    before = {name: vars(Node)[name] for name in _UNUSED if name in vars(Node)}
    for name in before:
        setattr(Node, name, _start_nothing)
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(Node, name, method)


def _start_nothing(node: Node, **options: object) -> None:
    """Takes the place of a method that starts a process."""


if __name__ == "__main__":
    from ray.scripts.scripts import main

    with lean_ray():
        main()
