"""The folder in which a user's commands keep what later commands find: records of clusters, Ray's sockets, and logs."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from kvcluster.errors import ConfigError


def user_folder() -> Path:
    """Returns the folder of this user's clusters. Its files say which processes to end, so only this user may write to
    it. Raises ConfigError if others may."""
    folder = Path(tempfile.gettempdir()) / f"kvcluster-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o022:
        raise ConfigError(f"others may write to {folder}; remove it, or set TMPDIR to a folder of your own")
    return folder
