"""Ray's processes, less those that nothing of a cluster uses.

Beside the processes that run actors, Ray starts on a head the server of its dashboard, even where the dashboard is
switched off, a monitor for its autoscaler, and a server for its remote clients; and on each node one that copies logs
to drivers. They take a third of the CPU time in which a Ray starts, and each waits for the one before. Ray has options
against some of them, and not for every way to start it. So the methods of Ray's node that start them do nothing here. A
method that another release of Ray does not have is left out, and its process then runs as before.

Rarely, on a busy machine, the server of Ray's control store (GCS) neither listens nor says why. It is then started once
more. What a node had started when it fails to start is ended, which Ray does not do.

As a program, `python -m kvcluster.actors.lean_ray start ...`, this is Ray's command line without these processes.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TypeAlias

from ray._private.node import Node
from ray._private.ray_constants import PROCESS_TYPE_GCS_SERVER

_Method: TypeAlias = Callable[..., None]

_UNUSED = ("start_api_server", "start_monitor", "start_ray_client_server", "start_log_monitor")


@contextmanager
def lean_ray() -> Iterator[None]:
    """Within the block, a node of Ray that this process starts has the processes that run actors, and no others."""
    ours: dict[str, Callable[[_Method], _Method]] = {
        **dict.fromkeys(_UNUSED, lambda _: _start_nothing),
        "start_gcs_server": _twice,
        "start_head_processes": _or_end,
        "start_ray_processes": _or_end,
    }
    before = {name: vars(Node)[name] for name in ours if name in vars(Node)}
    for name, method in before.items():
        setattr(Node, name, ours[name](method))
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(Node, name, method)


def _start_nothing(node: Node, **options: object) -> None:
    """Takes the place of a method that starts a process."""


def _twice(start_gcs_server: _Method) -> _Method:
    """Returns the method that starts the control store's server, and starts another one if the first neither listens in
    time nor has ended by itself."""

    @wraps(start_gcs_server)
    def start(node: Node) -> None:
        try:
            start_gcs_server(node)
        except Exception:  # Ray has no type of its own for "it does not listen"
            servers = node.all_processes.get(PROCESS_TYPE_GCS_SERVER)
            if not servers or servers[0].process.poll() not in (None, -signal.SIGKILL):
                raise
            node.kill_gcs_server(check_alive=False)
            start_gcs_server(node)

    return start


def _or_end(start_processes: _Method) -> _Method:
    """Returns the method that starts processes of a node, and ends all that the node has if one of them fails."""

    @wraps(start_processes)
    def start(node: Node) -> None:
        try:
            start_processes(node)
        except BaseException:
            node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)
            raise

    return start


if __name__ == "__main__":
    from ray.scripts.scripts import main

    with lean_ray():
        main()
