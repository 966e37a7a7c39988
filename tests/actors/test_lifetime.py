"""An embedded cluster lives as long as its block, whatever ends it."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from kvcluster.actors.local import _private_folder
from tests.actors.processes import said, session, start_worker
from tests.waiting import eventually

pytestmark = pytest.mark.cluster


def test_a_local_cluster_ends_with_its_block_and_with_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    # The process that is killed leaves its folder, so the test removes it. Its name is short, for Ray's sockets in it.
    with TemporaryDirectory(prefix="kv", dir="/tmp", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("TMPDIR", folder)
        _ends_with_its_block_and_with_its_process()
        assert len(list(Path(folder).glob("kvcluster-*"))) == 1, "blocks that ended removed theirs"


def test_a_long_name_of_the_folder_for_temporary_files_keeps_no_cluster_from_starting(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("long" * 10)))
    with _private_folder() as folder:
        assert Path(folder).parent == Path("/tmp")
    monkeypatch.setattr(tempfile, "tempdir", "/var/tmp")
    with _private_folder() as folder:
        assert Path(folder).parent == Path("/var/tmp")


def _ends_with_its_block_and_with_its_process() -> None:
    with start_worker("embed") as worker:
        try:
            assert said(worker) == {"ours": True, "settings": []}, "the block ended by itself"

            assert said(worker)["started"] > 3
            os.killpg(worker.pid, signal.SIGINT)  # as a terminal does: to all that are in the foreground
            assert said(worker) == {"interrupted": True, "settings": []}

            actors = said(worker)["pids"]
            assert len(actors) == 2
            worker.kill()
            eventually(lambda: not set(actors) & set(session(worker.pid)))
        finally:
            # Ray's own agents look for a Ray that was killed for a minute.
            for pid in session(worker.pid):
                os.kill(pid, signal.SIGKILL)
