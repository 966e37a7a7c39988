"""Ray's processes, less those that nothing of a cluster uses.

Beside the processes that run actors, Ray starts on a head the server of its dashboard, even where the dashboard is
switched off, a monitor for its autoscaler, and a server for its remote clients; and on each node one that copies logs
to drivers. They take a third of the CPU time in which a Ray starts, and each waits for the one before. Ray has options
against some of them, and not for every way to start it. So the methods of Ray's node that start them do nothing here. A
method that another release of Ray does not have is left out, and its process then runs as before.

Ray gives its control store (GCS) and its node's manager (raylet) 30 s each to start. Rarely, on a busy machine, one of
them takes longer, or hangs, and logs no error. The node is then started once more. A node that fails to start ends what
it has started, which Ray leaves running.

The control store ends when its Redis does not answer, and Ray then ends the whole node, with the coordinator. Here it
is started again until Redis is back, which has its state, and everything else goes on meanwhile: Ray's nodes wait for
it (own_ray.py). If they have waited too long, the head's own one ends, and the node with it. Without a Redis, its state
is lost with it, and the node ends as Ray does it.

As a program, `python -m kvcluster.actors.lean_ray start ...`, this is Ray's command line without these processes.
"""

from __future__ import annotations

import copy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, TypeAlias

from kvcluster.actors.ray_private import Node, RayParams, ray_constants
from kvcluster.actors.ray_view import errors_in_logs

_Method: TypeAlias = Callable[..., Any]

_UNUSED = ("start_api_server", "start_monitor", "start_ray_client_server", "start_log_monitor")


@contextmanager
def lean_ray() -> Iterator[None]:
    """Within the block, a node of Ray that this process starts has the processes that run actors, and no others."""
    ours: dict[str, Callable[[_Method], _Method]] = {
        **dict.fromkeys(_UNUSED, lambda _: _start_nothing),
        "__init__": _twice,
        "dead_processes": _with_its_control_store,
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


def _twice(start_node: _Method) -> _Method:
    """Returns the constructor of a node, which starts its processes. If that fails it ends them, and starts others once
    unless their logs show why it failed."""

    @wraps(start_node)
    def start(node: Node, ray_params: RayParams, *arguments: Any, **options: Any) -> None:
        given = copy.deepcopy(vars(ray_params))  # the constructor sets the ports that were chosen
        try:
            start_node(node, ray_params, *arguments, **options)
        except Exception:  # Ray has no type of its own for "it does not answer"
            began = _ended(node)
            if not began or errors_in_logs(Path(node.get_temp_dir_path())):
                raise
            vars(ray_params).update(given)
            vars(node).clear()
            try:
                start_node(node, ray_params, *arguments, **options)
            except Exception:
                _ended(node)
                raise

    return start


_Ended: TypeAlias = tuple[str, subprocess.Popen[bytes]]
"""The kind of a process of a node, and the process."""


def _with_its_control_store(dead_processes: Callable[[Node], list[_Ended]]) -> Callable[[Node], list[_Ended]]:
    """Returns the method by which `ray start --block` looks each second for processes that have ended. A control store
    that has failed, but keeps its state in Redis, is started again and is not among them."""

    @wraps(dead_processes)
    def looked(node: Node) -> list[_Ended]:
        dead = dead_processes(node)
        failed = [kind for kind, process in dead if process.returncode not in _TOLD_TO_END]
        if failed != [_CONTROL_STORE] or not node.redis_address:
            return dead
        sys.stderr.write("Ray's control store (GCS) has ended and is started again; its log says why\n")
        node.kill_gcs_server(check_alive=False)
        node.start_gcs_server()
        return dead_processes(node)

    return looked


_CONTROL_STORE = ray_constants.PROCESS_TYPE_GCS_SERVER
_TOLD_TO_END = (0, -signal.SIGTERM, 128 + signal.SIGTERM)


def _ended(node: Node) -> bool:
    """Ends the processes that a node has started. Returns whether there were any."""
    began = bool(vars(node).get("all_processes"))
    if began:
        node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)
    return began


if __name__ == "__main__":
    from ray.scripts.scripts import main

    with lean_ray():
        main()
