"""A router's process without room for another thread: it says so, locates nothing by text or host, and tries again."""

from __future__ import annotations

import threading

import pytest

from kvcluster.engines.ray_serve import hosts
from kvcluster.engines.ray_serve.hosts import Hosts
from kvcluster.engines.ray_serve.prompts import RequestPrompt
from kvcluster.engines.ray_serve.tokens import NoTokens, PromptTokenizer
from tests.waiting import eventually


def none(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_text_has_no_tokens_and_it_is_said_why(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    tokens = PromptTokenizer("a model", said.append)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", none)
        tokens.start()
    assert "no tokenizer from a model: this process has no room for another thread" in said[0]
    with pytest.raises(NoTokens, match="no room for another thread"):
        tokens.of(RequestPrompt(text="Hi"), 10)


def test_hosts_are_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    found = Hosts(lambda: {"node": "host"}, said.append)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", none)
        assert found.of("node") == ""
    assert "no room for another thread" in said[0]
    monkeypatch.setattr(hosts, "_RETRY_S", 0.0)
    eventually(lambda: found.of("node") == "host")
