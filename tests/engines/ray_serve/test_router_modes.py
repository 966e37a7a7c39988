"""What the router hands Serve in each of its modes; what it asks and counts is the same in "on" and "observe"."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvcluster.engines.ray_serve import settings
from kvcluster.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore")  # of Ray Serve, when it is imported

GIVEN = {"address": "head:7070", "model": "llama"}
NEAR, ANY = "the replica of the prefix", "one that Serve would choose"


class Located:
    """A router whose prefixes are always found, and which records whether it was asked."""

    def __init__(self, mode: str) -> None:
        from kvcluster.engines.ray_serve.router import KVClusterRouter

        self.asked = 0
        self.router = KVClusterRouter.__new__(KVClusterRouter)
        self.router._settings = settings.parse_settings(GIVEN | {"mode": mode})
        self.router._preferred = self._preferred  # type: ignore[method-assign]
        self.router.power_of_two = self._ranks  # type: ignore[method-assign]

    async def _preferred(self, replicas: Any, request: Any) -> Any:
        self.asked += 1
        return [NEAR]

    async def _ranks(self, replicas: Any, request: Any) -> Any:
        return [[ANY]]

    def choose(self) -> Any:
        return asyncio.run(self.router.choose_replicas([], object()))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mode", "ranks", "asked"), [("on", [[NEAR], [ANY]], 1), ("observe", [[ANY]], 1), ("off", [[ANY]], 0)]
)
def test_only_mode_on_changes_where_requests_go(mode: str, ranks: list[list[str]], asked: int) -> None:
    located = Located(mode)
    assert (located.choose(), located.asked) == (ranks, asked)


def test_a_mode_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="mode must be one of on, observe, off, not 'of'"):
        settings.parse_settings(GIVEN | {"mode": "of"})
