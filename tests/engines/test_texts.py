"""Texts and misses that engines make alike."""

from __future__ import annotations

import pytest

from kvcluster.core.miss import Miss, MissReason
from kvcluster.engines.texts import miss_of
from kvcluster.errors import CallerError, Unreachable
from kvcluster.transport.base import Unavailable

LATE = Miss(MissReason.DEADLINE, "the coordinator at a:1 has not answered in time")


@pytest.mark.parametrize(
    ("error", "miss"),
    [
        (Unavailable(LATE), LATE),
        (Unreachable("no server answers at a:1"), Miss(MissReason.COORDINATOR_LOST, "no server answers at a:1")),
        (CallerError("no such block"), Miss(MissReason.SHARD_LOST, "no such block")),
        (OSError("x"), Miss(MissReason.SHARD_LOST, "OSError: x")),
    ],
)
def test_the_miss_of_an_error_keeps_the_reason_that_the_error_has(error: Exception, miss: Miss) -> None:
    assert miss_of(error) == miss
