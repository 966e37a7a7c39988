"""Sizes and memory: the templates compute as the program does."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from kvcluster.actors.node_memory import bytes_for_pools
from kvcluster.config import size
from kvcluster.errors import ConfigError
from tests.chart.checks import quantity
from tests.chart.rendering import ROOT, RenderError, installed, render

_MIB = 2**20
_TEXTS = (
    "20GiB",
    "1.5GiB",
    " 4096MiB ",
    "007GiB",
    "0.1TiB",
    "2000000000",
    "1073741824 b",
    "3.000001gib",
    "5GB",
    "9999999kib",
)


def container_of(values: dict[str, Any]) -> dict[str, Any]:
    (found,) = [
        each
        for each in render(values)
        if each["kind"] == "StatefulSet" and each["metadata"]["name"] == "cache-kvcluster-shard"
    ]
    container: dict[str, Any] = found["spec"]["template"]["spec"]["containers"][0]
    return container


def limit_of(values: dict[str, Any]) -> int:
    return quantity(container_of(values)["resources"]["limits"]["memory"])


@pytest.mark.parametrize("text", [*_TEXTS, 1_234_567_890, 2**34])
def test_a_size_is_read_as_the_program_reads_it(text: str | int) -> None:
    limit, pools = limit_of({"config": {"shard": {"ram_bytes": text}}}), size(text)
    assert bytes_for_pools(limit) >= pools > bytes_for_pools(limit - 3 * _MIB)


@pytest.mark.parametrize("text", ["20 gigs", "1.5", "GiB", "-1GiB", "1e9", "4TB", "20Gi", "", True])
def test_what_is_no_size_is_refused_by_its_name(text: object) -> None:
    with pytest.raises(RenderError, match="ram_bytes"):
        render({"config": {"shard": {"ram_bytes": text}}})
    if text != "1.5":  # the program reads it as a byte, and the chart asks for a unit
        with pytest.raises(ConfigError):
            size(text)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "values",
    [
        {"config": {"shard": {"NAME": "20GiB", "host_bytes": "1GiB"}}},
        {"shards": {"shard": {"NAME": "20GiB"}}},
        {"groups": {"big": {"shard": {"NAME": "20GiB"}}, "small": {}}},
    ],
)
def test_by_its_old_name_ram_bytes_gives_the_same_objects(values: dict[str, Any]) -> None:
    old, new = (render(json.loads(json.dumps(values).replace("NAME", name))) for name in ("device_bytes", "ram_bytes"))
    assert old == new and "device_bytes" not in str(new) and "20GiB" in str(new)
    for name, warns in (("device_bytes", True), ("ram_bytes", False)):
        notes = installed(json.loads(json.dumps(values).replace("NAME", name)))["info"]["notes"]
        assert ("device_bytes is called ram_bytes now" in notes) == warns


@pytest.mark.parametrize("seed", range(8))
def test_limits_of_memory_are_the_least_that_the_program_takes(seed: int) -> None:
    draw = random.Random(seed)
    shards, ram, host = draw.randint(1, 8), draw.randint(4_096, 2**37), draw.choice([0, draw.randint(4_096, 2**38)])
    values = {"shards": {"perPod": shards, "shard": {"ram_bytes": ram, "host_bytes": host}}}
    values["head"] = {"blockBytes": "64MiB"}  # few enough blocks for the head's memory
    limit, pools = limit_of(values), shards * (ram + host)
    assert bytes_for_pools(limit, shards=shards) >= pools > bytes_for_pools(limit - 3 * _MIB, shards=shards)


def test_a_larger_limit_is_taken_and_a_smaller_one_names_what_is_needed() -> None:
    pools = {"shards": {"shard": {"ram_bytes": "8GiB"}}}
    least = limit_of(pools)
    for given, taken in (
        (f"{least // _MIB}Mi", True),
        (f"{least // _MIB - 1}Mi", False),
        ("20Gi", True),
        ("8Gi", False),
    ):
        values = {"shards": {**pools["shards"], "resources": {"limits": {"memory": given}}}}
        if taken:
            assert container_of(values)["resources"]["limits"]["memory"] == given
        else:
            with pytest.raises(RenderError, match=rf"limits.memory is {given}.* need {least // _MIB} Mi"):
                render(values)


def test_the_documented_limit_is_the_computed_one() -> None:
    limit = limit_of({"config": {"shard": {"ram_bytes": "20GiB"}}})
    document = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    assert f"One shard of 20 GiB: {limit // _MIB:,} MiB" in document
