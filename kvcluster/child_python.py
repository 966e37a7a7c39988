"""Starts child processes of Python that import nothing from the current directory.

`python -m` and `python -c` look for every module, the standard library's included, in the current directory first, so a
`queue.py` in a folder in which an operator runs a command would run as that operator. `python -P` looks elsewhere, but
exists from Python 3.11 on, and `python -I` loses PYTHONPATH, by which a checkout may be installed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import get_context, resource_tracker
from multiprocessing.context import SpawnContext

# `sys` is built in. With -c the first entry is "", unless PYTHONSAFEPATH or -P has left it out.
_BOOTSTRAP = (
    "import sys; sys.path[:1] == [''] and sys.path.pop(0); import os, runpy; "
    "folder, module = sys.argv[1:3]; del sys.argv[1:3]; folder and os.chdir(folder); "
    "runpy.run_module(module, run_name='__main__', alter_sys=True)"
)


def module_command(module: str, *arguments: str, folder: str = "") -> tuple[str, ...]:
    """Returns the command that runs a module as `python -u -m` does, but imports nothing from the current directory.
    `folder`: becomes the current directory first."""
    return sys.executable, "-u", "-c", _BOOTSTRAP, folder, module, *arguments


def absolute_python_path(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment whose PYTHONPATH names the same folders to a process that runs in another folder. Empty
    entries, which mean the current directory and which `PYTHONPATH=$PYTHONPATH:/folder` leaves, are left out."""
    entries = [os.path.abspath(entry) for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return {**environment, "PYTHONPATH": os.pathsep.join(entries)}


def spawn_context() -> SpawnContext:
    """Returns the context by which `multiprocessing` spawns processes, to be started within `spawning`."""
    with spawning():
        resource_tracker.ensure_running()
    return get_context("spawn")


@contextmanager
def spawning() -> Iterator[None]:
    """Processes that `multiprocessing` spawns within the block import nothing from the current directory. It starts
    them by `python -c`, which does, so the current directory is the standard library's folder meanwhile: this is for a
    command's own process, where no other thread uses relative paths. The children go back to the directory in which
    this process began."""
    before = os.getcwd()
    os.chdir(os.path.dirname(os.__file__))
    try:
        yield
    finally:
        os.chdir(before)
