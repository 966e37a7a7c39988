"""Where a cluster's coordinator keeps what the next one must know: in a folder that lasts as long as the cluster."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import pytest
import ray

import kvcluster
from kvcluster.actors import background, cluster
from kvcluster.actors.background import LocalHead
from kvcluster.actors.coordinator import with_state_dir
from kvcluster.actors.ray_node import RayNode
from kvcluster.config import Config, load


class Started:
    """In place of a cluster that was started: remembers what it was given."""

    address = "127.0.0.1:7070"
    shards = (1,)
    trouble: Mapping[str, str] = MappingProxyType({})

    def __init__(self) -> None:
        self.folders: list[Path] = []

    def start(self, config: Config, *, detached: bool = True) -> Started:
        self.folders.append(Path(config.coordinator.state_dir))
        return self

    def stop(self) -> None:
        assert self.folders[-1].is_dir(), "it outlives the coordinator"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Started:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return Started()


def test_an_embedded_cluster_has_a_folder_until_its_block_ends(
    started: Started, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cluster, "start", started.start)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    for _ in range(2):
        with kvcluster.local():
            assert started.folders[-1].is_dir()
            assert started.folders[-1].parent == tmp_path
    assert len(set(started.folders)) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_background_cluster_has_a_folder_until_it_is_taken_down(
    started: Started, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def start(config: Config, *, detached: bool) -> Started:
        (started.start(config).folders[-1]).mkdir()
        return started

    @contextmanager
    def no_head(config: Config) -> Iterator[LocalHead]:
        yield LocalHead(RayNode(1, tmp_path), "127.0.0.1:6379")

    monkeypatch.setattr(cluster, "start", start)
    monkeypatch.setattr(background, "local_head", no_head)
    background.up(load(overrides={"server": {"port": 7070}}))
    (folder,) = started.folders
    assert folder.parent.parent == tmp_path
    assert folder.is_dir()
    background.down(7070)
    assert not folder.exists()


def test_a_folder_that_the_configuration_names_is_used() -> None:
    named = load(overrides={"coordinator": {"state_dir": "here"}})
    assert with_state_dir(named, Path("there")) == named
    assert with_state_dir(load(), Path("there")).coordinator.state_dir == "there"
