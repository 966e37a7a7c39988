"""Purges on the wire: what a tombstone may name, how much of it, and that nothing else is purged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvcluster.core import limits
from kvcluster.core.ids import Tenant
from kvcluster.core.messages import Purge, Tombstone
from kvcluster.core.spec import KVSpec
from kvcluster.errors import LimitError
from kvcluster.release import PROTOCOL_VERSION
from kvcluster.wire.methods import COORDINATOR
from kvcluster.wire.reports import TOMBSTONES

TENANT = Tenant("t")
PLAIN = KVSpec.uniform(model="m", weights="sha256:0", num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32")
ADAPTED = replace(PLAIN, adapter="a")


def _sent(asked: Purge) -> object:
    """As it arrives."""
    _, arrived = COORDINATOR["Purge"].decode_question(COORDINATOR["Purge"].encode_request(asked), PROTOCOL_VERSION)
    return arrived


def test_more_tombstones_than_are_remembered_are_refused() -> None:
    stones = [Tombstone(number, TENANT) for number in range(limits.TOMBSTONES)]
    assert len(TOMBSTONES.decode(TOMBSTONES.encode(stones))) == limits.TOMBSTONES
    with pytest.raises(LimitError, match="tombstones in a message: 1025 exceeds the limit of 1024"):
        TOMBSTONES.decode(TOMBSTONES.encode([*stones, stones[0]]))


def test_the_filters_of_a_purge_may_be_as_long_as_a_spec_together() -> None:
    longest = Purge("m" * 4_096, "w" * 4_095, "a")
    assert _sent(longest) == longest
    stone = Tombstone(1, TENANT, longest.model, longest.weights, longest.adapter)
    assert TOMBSTONES.decode(TOMBSTONES.encode([stone])) == (stone,)
    with pytest.raises(LimitError, match="bytes of model, weights and adapter: 8193"):
        _sent(Purge("m" * 4_096, "w" * 4_095, "ab"))


@pytest.mark.parametrize(("adapter", "named"), [(None, [True, True]), ("", [True, False]), ("a", [False, True])])
def test_no_adapter_is_not_any_adapter(adapter: str | None, named: list[bool]) -> None:
    asked = Purge(adapter=adapter)
    assert _sent(asked) == asked
    (stone,) = TOMBSTONES.decode(TOMBSTONES.encode([Tombstone(1, TENANT, adapter=adapter)]))
    assert [stone.names(TENANT, spec) for spec in (PLAIN, ADAPTED)] == named


def test_tombstones_name_each_text_once() -> None:
    m: Any = TOMBSTONES.encode([Tombstone(n, Tenant("t"), "model", "weights", "t") for n in range(100)])
    texts = (m.tenant.table, m.model.table, m.weights.table, m.adapter.table)
    assert [list(table) for table in texts] == [["t"], ["model"], ["weights"], ["t"]]
