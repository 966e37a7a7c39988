"""An engine replica of the demo, in a process of its own."""

from __future__ import annotations

import sys

from kvcluster.cli.child_process import ChildProcess

_ENGINE = (sys.executable, "-u", "-m", "kvcluster.cli.demo.engine")
_QUIET = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}


def engine_replica(name: str) -> ChildProcess:
    """Starts a replica, whose requests are the methods of engine.Engine."""
    return ChildProcess(_ENGINE, _QUIET, name=name, shown_lines=20, kill_on_error=True)
