"""This release of vLLM accepts our connector; and if it did not, compatibility.py would say so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole, supports_hma
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from kvcluster.engines.vllm import KVClusterConnector
from tests.vllm import compatibility
from tests.vllm.build import engine_config, kv_config
from tests.vllm.conftest import Bench
from tests.vllm.scripted import engine_of


def test_it_fits_this_release() -> None:
    assert list(compatibility.complaints()) == []


def test_it_serves_engines_with_several_block_tables() -> None:
    assert supports_hma(KVClusterConnector)


@pytest.mark.parametrize(
    ("name", "method", "complaint"),
    [
        ("get_num_matched", lambda self: 0, "get_num_matched is no method of vLLM's"),
        ("wait_for_layer_load", lambda self, layer: None, "wait_for_layer_load takes"),
        ("reset_cache", lambda self, force: None, "reset_cache takes"),
    ],
)
def test_what_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch, name: str, method: Any, complaint: str) -> None:
    monkeypatch.setattr(KVClusterConnector, name, method, raising=False)
    assert [one for one in compatibility.complaints() if one.startswith(complaint)]


@pytest.mark.parametrize("where", list(compatibility.FIELDS))
def test_a_field_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    monkeypatch.setitem(compatibility.FIELDS, where, ("gone",))
    assert f"{where.partition(':')[2]} has no gone" in list(compatibility.complaints())


def test_a_method_that_is_new_and_has_to_be_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVClusterConnector, "__abstractmethods__", frozenset({"brand_new"}))
    assert "abstract here: brand_new" in list(compatibility.complaints())


def test_vllm_makes_it_by_the_path_of_its_module(bench: Bench, llama: Path) -> None:
    config = engine_config(llama)
    made = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, kv_config(config))
    assert type(made) is KVClusterConnector
    assert isinstance(made, KVConnectorBase_V1)
    bench.cluster.wait_until(lambda: made._of_scheduler._registration.client is not None)
    made.shutdown()


def test_a_lost_store_is_no_reason_to_compute_an_answer_twice(bench: Bench, llama: Path) -> None:
    engine = engine_of(bench, llama)
    assert engine.scheduler.connector is not None
    assert engine.scheduler.requires_kv_delivery is False
    assert engine.scheduler.connector.get_finished_count() is None, "every rank tells of every request"
