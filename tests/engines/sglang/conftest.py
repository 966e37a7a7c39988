"""SGLang from its wheel, clusters in this process, and engine ranks that are ended with their test."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcluster.testing import MemoryCluster
from tests.engines.sglang import pools
from tests.engines.sglang.imported import imported

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="package")
def sglang() -> Iterator[SimpleNamespace]:
    """SGLang's own modules and the engine over them (imported.py). Fails if its wheel is not available."""
    command = [str(ROOT / "tools/sglang_wheel.sh"), str(ROOT / "build/sglang-0.5.23"), sys.executable]
    made = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    if made.returncode:
        pytest.fail(
            "these tests read SGLang 0.5.23 from its wheel, which is not available: they need a package index, or the "
            f"files of `{' '.join(command[:2])}` from a machine that has one. It said:\n{made.stderr}",
            pytrace=False,
        )
    with imported(Path(made.stdout.strip())) as found:
        yield found


@pytest.fixture
def cluster() -> Iterator[MemoryCluster]:
    with MemoryCluster(shards=2, ram_bytes="4MiB") as running:
        yield running
        running.wait_until_idle()  # no ticket or lease is left behind
        running.check()


@pytest.fixture
def attach(sglang: SimpleNamespace, cluster: MemoryCluster) -> Iterator[Callable[..., Any]]:
    """Makes a connected storage over a pool: `attach(pool, rank=0, ranks=1, **settings)`."""
    with ExitStack() as stack:

        def begin(pool: Any, *, connect: Any = None, **settings: Any) -> Any:
            storage = pools.create(sglang, pool, connect or pools.Connect(cluster), **settings)
            stack.callback(storage.close)
            return pools.connected(storage)

        yield begin
