"""Folders of pods as a kubelet makes them: files of ConfigMaps and Secrets that change at once, empty folders, and
claims."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from itertools import count
from pathlib import Path

_numbers = count()


def write_files(folder: Path, files: Mapping[str, bytes], *, mode: int, group: int) -> None:
    """Makes these the files of a folder, all at the same moment: each is a link through `..data`, which is replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    content = folder / f"..{next(_numbers)}"
    content.mkdir()
    for name, data in files.items():
        file = content / name
        file.write_bytes(data)
        file.chmod(mode)
        os.chown(file, 0, group)
    before = os.readlink(folder / "..data") if (folder / "..data").is_symlink() else ""
    (folder / "..data_tmp").symlink_to(content.name)
    (folder / "..data_tmp").rename(folder / "..data")
    for name in files:
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(Path("..data", name))
    if before:
        shutil.rmtree(folder / before)


def empty_folder(folder: Path, *, mode: int, group: int) -> None:
    """Makes a folder that the group may write, whatever is in it."""
    folder.mkdir(parents=True, exist_ok=True)
    os.chown(folder, 0, group)
    folder.chmod(mode)
