"""docs/migration.md: every setting of ours that it names exists, and every row says what there is here."""

from __future__ import annotations

import re

import pytest

from tests.docs.names import cluster_settings, engine_settings
from tests.docs.snippets import text_of
from tests.docs.test_commands import options_of

TEXT = text_of("docs/migration.md")
ROWS = [
    [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
    for row in re.findall(r"^\| .* \|$", TEXT, re.MULTILINE)
    if not re.match(r"\| (LMCache|Mooncake) \|", row)
]
OF_VLLM = {"kv_role", "kv_connector_extra_config"}
"""Fields of vLLM's --kv-transfer-config."""


@pytest.mark.parametrize(("theirs", "here", "why"), ROWS, ids=[row[0] for row in ROWS])
def test_each_setting_has_one_of_ours_or_none(theirs: str, here: str, why: str) -> None:
    assert re.search(r"`[^`]+`|quotas", theirs)
    if here in ("none", "the same"):
        return
    names = re.findall(r"`([^`]+)`", here)
    assert names and re.sub(r"`[^`]+`|,|\s", "", here) == ""
    for name in names:
        if name.startswith("kvcluster "):
            words = name.split()[1:]
            assert {word for word in words if word.startswith("--")} <= options_of(words)
        else:
            assert name in cluster_settings() | engine_settings() | OF_VLLM


def test_the_settings_of_a_cluster_in_the_text_exist() -> None:
    for section, key in re.findall(r"`(\w+)\.(\w+)`", TEXT):
        if section in cluster_settings():
            assert f"{section}.{key}" in cluster_settings()


def test_both_are_mapped_to_a_useful_length() -> None:
    lmcache, mooncake = (part.count("\n| `") for part in TEXT.split("\n## Mooncake's settings"))
    assert lmcache > 25 and mooncake > 15
