"""Which folders Ray adds to the import path of a job's actors: those from which its driver imports, and no other.

Ray puts the driver's current directory first, whether or not the driver itself imports from there, so that a `queue.py`
in the folder in which an operator runs `kvcluster up` would run in every actor.
"""

from __future__ import annotations

import os
import sys

from ray.job_config import JobConfig


class OwnPaths(JobConfig):
    """A job whose actors import from the driver's script and current directory only if the driver does."""

    def __init__(self) -> None:
        folders = (os.path.dirname(os.path.realpath(sys.argv[0])), os.getcwd())
        known = {os.path.abspath(entry) for entry in sys.path}
        super().__init__(_py_driver_sys_path=[folder for folder in dict.fromkeys(folders) if folder in known])

    def _runtime_env_has_working_dir(self) -> bool:
        """Ray asks this to decide whether to add both folders itself, and nothing else."""
        return True
