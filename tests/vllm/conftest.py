"""Tiny models that are never run, and clusters checked for leaks at the end, for tests over vLLM's own objects."""

from __future__ import annotations

import os

# Before vLLM is imported, which reads them once: nothing is asked of a network, little is said of a small machine, and
# threads of torch do not wait for one another where tests run on all cores already.
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
import vllm.platforms
from vllm.platforms.cpu import CpuPlatform

if vllm.platforms.current_platform.is_unspecified():  # a release for GPUs, unpacked where there is none
    vllm.platforms._current_platform = CpuPlatform()

import tests.conftest  # its profiles of hypothesis  # noqa: F401
from kvcluster.client.client import Client
from kvcluster.config import ClientConfig
from kvcluster.core.ids import Caller
from kvcluster.core.spec import KVSpec
from kvcluster.engines.vllm import compat, registration, stores
from kvcluster.testing import MemoryCluster
from kvcluster.transport.base import Deadline
from tests.client.build import BOUND_S, DEFAULT, Steps, watched_client
from tests.client.conftest import settle, start  # noqa: F401
from tests.vllm.build import CONV, GEMMA, LLAMA, LLAMA4, MLA, engine_config, format_on_a_gpu, model_folder
from tests.vllm.toy import Engine, Rank
from tests.vllm.twin_toy import TwinRank, twins


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--twin", action="store_true", help="engines whose KV lies in the memory of a twin of a GPU")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--twin"):  # those that start engines
        items[:] = [item for item in items if "bench" in getattr(item, "fixturenames", ())]


@pytest.fixture(scope="session", autouse=True)
def side_by_side() -> Iterator[None]:
    """Toy engines keep K and V of a token side by side, as GPUs do: their heads are too small for a CPU's kernels,
    which test_kv_format.py runs."""
    with patch.object(compat, "kv_format", format_on_a_gpu):
        yield


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers that keep everything."""
    return model_folder(tmp_path_factory.mktemp("models") / "llama", LLAMA)


@pytest.fixture(scope="session")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers with a window and two without."""
    return model_folder(tmp_path_factory.mktemp("models") / "gemma", GEMMA)


@pytest.fixture(scope="session")
def mla(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers that keep a latent."""
    return model_folder(tmp_path_factory.mktemp("models") / "mla", MLA)


@pytest.fixture(scope="session")
def llama4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers that attend in chunks and two that keep everything."""
    return model_folder(tmp_path_factory.mktemp("models") / "llama4", LLAMA4)


@pytest.fixture(scope="session")
def conv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers of short convolutions and two that keep everything."""
    return model_folder(tmp_path_factory.mktemp("models") / "conv", CONV)


class Bench:
    """A cluster in this process, whatever address the connectors are given, and engines over it.

    `steps` are hooks into the exchanges with shards, `on_connect` one into finding the cluster. `callers`: who has
    which token; without one everybody is the tenant `default`.
    """

    def __init__(self, clusters: ExitStack, engines: ExitStack) -> None:
        self._clusters = clusters
        self._engines = engines
        self.clusters: list[MemoryCluster] = []
        self.steps = Steps()
        self.callers: dict[str, Caller] = {}
        self.on_connect: Callable[[KVSpec], None] = lambda spec: None
        self.twin = False
        """Whether KV lies in the memory of a twin, where a test does not say what its workers are."""

    @property
    def cluster(self) -> MemoryCluster:
        if not self.clusters:
            self.start()
        return self.clusters[-1]

    def start(self, **settings: Any) -> MemoryCluster:
        """One of a test's own settings, in place of a shard of 8 MiB."""
        below: dict[str, Any] = {"shards": 1, "ram_bytes": "8MiB"}
        self.clusters.append(self._clusters.enter_context(MemoryCluster(**(below | settings))))
        return self.clusters[-1]

    def connect(
        self, address: str, spec: KVSpec, *, token: str | None, part: Any, reads: str | None, config: ClientConfig
    ) -> Client:
        """In place of kvcluster.connect."""
        self.on_connect(spec)
        caller = self.callers[token] if token else DEFAULT
        client = watched_client(self.cluster, self.steps, spec, caller=caller, part=part, reads=reads, config=config)
        try:
            client.attach(Deadline.after_ms(BOUND_S * 1e3))
        except BaseException:
            client.close()
            raise
        return client

    def token(self, name: str, caller: Caller) -> dict[str, str]:
        """The settings of an engine that shows the token of this caller."""
        self.callers[name] = caller
        path = Path(self._clusters.enter_context(TemporaryDirectory())) / "token"
        path.write_text(name, encoding="ascii")
        return {"token_file": str(path)}

    def engine(
        self,
        model: Path,
        extra: dict[str, Any] | None = None,
        *,
        blocks: int = 160,
        overlap: bool = False,
        at_once: bool = False,
        joined: bool = True,
        rank: Any = None,
        **arguments: Any,
    ) -> Engine:
        """An engine replica whose processes have their clients, where it is `joined`."""
        cluster = self.cluster  # started here, and not by whichever of its threads comes first
        twin = rank is None and self.twin
        if twin:
            rank, extra = partial(TwinRank, warm=True), {"staging_bytes": 1 << 16, **(extra or {})}
        with twins() if twin else nullcontext():
            config = engine_config(model, extra, **arguments)
            engine = Engine(config, blocks=blocks, overlap=overlap, at_once=at_once, rank=rank or Rank)
        self._engines.callback(engine.close)
        if joined:
            engine.join(cluster.wait_until)
        return engine


@contextmanager
def a_bench() -> Iterator[Bench]:
    """Settles the bill of every cluster, once the engines over it are gone."""
    with ExitStack() as clusters, ExitStack() as engines:
        bench = Bench(clusters, engines)
        engines.enter_context(patch.object(registration, "connect", bench.connect))
        yield bench
        engines.close()
        for cluster in bench.clusters:
            settle(cluster)


@pytest.fixture
def stores_have_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine would drop stores of blocks that leave their window: that is right, and another test's claim."""
    monkeypatch.setattr(stores, "_GRACE_NS", 10 * 10**9)


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    with a_bench() as bench:
        bench.twin = request.config.getoption("--twin")
        yield bench
