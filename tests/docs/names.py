"""The names of settings, by which pages are held to the code."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cache
from typing import Any, get_type_hints

from kvcluster.config import ClientConfig, Config
from kvcluster.config.sections import GroupConfig
from kvcluster.engines.sglang.settings import _OURS
from tests.docs.snippets import vllm_settings


def _fields(section: type, prefix: str = "") -> Iterator[str]:
    hints: dict[str, Any] = get_type_hints(section)
    for field in dataclasses.fields(section):
        yield prefix + field.name
        if dataclasses.is_dataclass(hints[field.name]):
            yield from _fields(hints[field.name], f"{prefix}{field.name}.")


@cache
def cluster_settings() -> set[str]:
    """Returns the keys of a cluster's file, such as shard.ram_bytes."""
    return set(_fields(Config))


@cache
def engine_settings() -> set[str]:
    """Returns the keys of engines, of a client and of a group: those that stand without a section."""
    of = (vllm_settings().ConnectorSettings, ClientConfig, GroupConfig)
    return {field.name for section in of for field in dataclasses.fields(section)} | set(_OURS)
