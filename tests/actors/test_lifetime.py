"""An embedded cluster lives as long as its block, whatever ends it."""

from __future__ import annotations

import os
import signal

import pytest

from tests.actors.processes import said, session, start_worker
from tests.waiting import eventually

pytestmark = pytest.mark.cluster


def test_all_processes_of_a_local_cluster_end_with_its_block() -> None:
    with start_worker("embed") as worker:
        assert said(worker) == {"ours": True, "settings": []}, "it ended by itself"

        assert said(worker)["started"] > 3
        os.killpg(worker.pid, signal.SIGINT)  # as a terminal does: to all that are in the foreground
        assert said(worker) == {"interrupted": True, "settings": []}

        assert said(worker)["started"] > 3
        worker.kill()
        worker.wait()
        eventually(lambda: not session(worker.pid))
