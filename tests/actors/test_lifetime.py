"""An embedded cluster lives as long as its block, whatever ends it."""

from __future__ import annotations

import os
import signal
import stat
import tempfile
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import Mock

import pytest
import ray
from ray._private import services

import kvcluster
from kvcluster.actors import cluster
from kvcluster.errors import KVClusterError
from tests.actors.processes import descendants, outcome, said, session, start_worker
from tests.waiting import eventually

pytestmark = pytest.mark.cluster


def test_a_local_cluster_ends_with_its_block_and_with_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    # The process that is killed leaves its folder, so the test removes it. Its name is short, for Ray's sockets in it.
    with TemporaryDirectory(prefix="kv", dir="/tmp", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("TMPDIR", folder)
        _ends_with_its_block_and_with_its_process()
        logs = f"kvcluster-{os.getuid()}"  # they outlive the cluster (runtime/kept_logs.py)
        left = len([path for path in Path(folder).glob("kvcluster-*") if path.name != logs])
        assert left == 2, "the killed one's, of its coordinator and of its Ray: blocks that ended removed theirs"


def test_a_long_name_of_the_folder_for_temporary_files_keeps_no_cluster_from_starting(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[Path] = []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **settings: started.append(Path(settings["_temp_dir"])))
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(cluster, "start", lambda config, detached: Mock())
    with kvcluster.local():
        assert started[0].parent.parent == Path("/tmp")
        assert stat.S_IMODE(started[0].parent.stat().st_mode) == 0o700
    assert not started[0].parent.exists()


def test_a_ray_that_does_not_start_says_what_is_in_its_logs_and_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_gcs_storage", "nonsense")
    monkeypatch.setenv("RAY_gcs_server_port_wait_time_s", "2")
    before = set(descendants(os.getpid()))
    with pytest.raises(KVClusterError, match=r"Ray did not start: .*\ngcs_server: .*storage type: nonsense"):
        kvcluster.local()
    assert set(descendants(os.getpid())) <= before


@pytest.mark.parametrize("hanging", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_a_server_of_ray_that_hangs_is_started_once_more(hanging: int, tmp_path: Path) -> None:
    count, server = tmp_path / "starts", tmp_path / "gcs_server"
    server.write_text(
        f"#!/bin/sh\necho >>{count}\n[ $(wc -l <{count}) -gt {hanging} ] || exec sleep 1000\n"
        f'exec {services.GCS_SERVER_EXECUTABLE} "$@"\n'
    )
    server.chmod(0o700)
    answer = outcome(start_worker("gcs", server, 8 if hanging == 1 else 1))
    assert answer["error"].startswith("Ray did not start") == (hanging == 2)
    assert answer["left"] == [], "processes of a node that did not start, or that has ended"
    assert len(count.read_text().splitlines()) == 2


@pytest.mark.slow
def test_clusters_without_a_block_end_in_any_order_and_with_their_process_at_the_latest() -> None:
    with start_worker("notebook") as worker:
        answer = said(worker)
        assert (answer["blocks"], answer["shown"]) == (8, True), (
            "the second serves when the first, which began, is closed"
        )
        assert worker.wait() == 0
        eventually(lambda: not set(answer["pids"]) & set(session(worker.pid)))


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
