"""An embedded cluster lives as long as its block, whatever ends it."""

from __future__ import annotations

import os
import signal

import pytest

from tests.actors.processes import said, session, start_worker
from tests.waiting import eventually

pytestmark = pytest.mark.cluster


def test_a_local_cluster_ends_with_its_block_and_with_its_process() -> None:
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
