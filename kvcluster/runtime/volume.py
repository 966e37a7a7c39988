"""Which shard a folder on disk belongs to: a file in it names the cluster, the group and the shard.

A shard claims its folder before it opens the disk tier there (runtime/disk.py). The folder of another cluster or group
is refused by name, that of another user altogether (private_files.py); one from before there were such files is taken
over.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from kvcluster.core.ids import ShardId
from kvcluster.errors import ConfigError
from kvcluster.runtime.private_files import locked, open_folder, read_file, replace_file

_NAME = "identity.json"
_MOST_BYTES = 4_096


class Identity(NamedTuple):
    """The owner of a volume."""

    cluster: str
    group: str
    shard: ShardId


def claim_volume(disk_dir: str, owner: Identity) -> None:
    """Writes the identity into the shard's folder below `disk_dir`, which is made if it is missing. Raises ConfigError
    if the folder belongs to another cluster or group, or cannot be used."""
    folder = Path(disk_dir) / owner.shard
    try:
        os.close(open_folder(folder, make=True))
    except OSError as error:
        raise _unusable(folder, error) from None
    found = read_identity(folder)
    if found == owner:
        return
    if found is not None:
        raise ConfigError(
            f"{folder} is the volume of {found.shard} in group {found.group} of cluster {found.cluster!r}, not of "
            f"{owner.shard} in group {owner.group} of cluster {owner.cluster!r}: give another shard.disk_dir or name, "
            "or remove that folder if its pages are not needed"
        )
    try:
        with locked(folder, make=False) as opened:
            replace_file(folder / _NAME, json.dumps(owner._asdict(), indent=1).encode(), opened)
    except OSError as error:
        raise _unusable(folder, error) from None


def _unusable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(f"shard.disk_dir: {folder} cannot be used: {error.strerror or error}")


def read_identity(folder: Path) -> Identity | None:
    """Returns the owner of this folder; None if it has none yet. Raises ConfigError if its file cannot be read."""
    path = folder / _NAME
    try:
        opened = open_folder(folder, make=False)
        try:
            values: Any = json.loads(read_file(opened, _NAME, _MOST_BYTES))
        finally:
            os.close(opened)
        return Identity(str(values["cluster"]), str(values["group"]), ShardId(str(values["shard"])))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{path}, which says whose volume this is, cannot be read: {error!r}. Remove that file to let the "
            "next shard of this name take the folder over"
        ) from None


def volumes_in(disk_dir: str, cluster: str, group: str) -> list[ShardId]:
    """Returns the shards of that cluster and group whose volumes lie below `disk_dir` on this machine."""
    found: list[ShardId] = []
    try:
        folders = sorted(entry.path for entry in os.scandir(disk_dir) if entry.is_dir(follow_symlinks=False))
    except OSError:
        return found
    for folder in folders:
        try:
            owner = read_identity(Path(folder))
        except ConfigError:
            continue  # the shard that would take this folder reports it when it starts
        if owner is not None and owner[:2] == (cluster, group) and Path(folder).name == owner.shard:
            found.append(owner.shard)
    return found
