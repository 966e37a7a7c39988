"""A router's process without room for another thread: it says so, locates nothing by text or host, and tries again."""

from __future__ import annotations

import pytest

from kvcluster.engines.ray_serve import prefix_locator
from kvcluster.engines.ray_serve.prefix_locator import Hosts
from kvcluster.engines.ray_serve.prompts import NoTokens, PromptTokenizer, RequestPrompt
from tests.no_threads import no_room_for_threads
from tests.waiting import eventually


def test_text_has_no_tokens_and_it_is_said_why() -> None:
    said: list[str] = []
    tokens = PromptTokenizer("a model", said.append)
    with no_room_for_threads():
        tokens.start()
    assert "no tokenizer from a model: this process has no room for another thread" in said[0]
    with pytest.raises(NoTokens, match="no room for another thread"):
        tokens.of(RequestPrompt(text="Hi"), 10)


def test_hosts_are_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    found = Hosts(lambda: {"node": "host"}, said.append)
    with no_room_for_threads():
        assert found.of("node") == ""
    assert "no room for another thread" in said[0]
    monkeypatch.setattr(prefix_locator, "_RETRY_S", 0.0)
    eventually(lambda: found.of("node") == "host")
