"""The prompt is found in the arguments of any call of a deployment; unusual arguments are named and left alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

from kvcluster.engines.ray_serve.prompts import RequestPrompt, find

IDS = [5, 6, 7]


class Request(BaseModel):
    """A request as Serve's LLM applications pass it on."""

    prompt: Any = None
    messages: Any = None
    cache_salt: str | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    tools: Any = None
    chat_template_kwargs: Any = None


def of(given: object) -> RequestPrompt | str:
    return find([given, SimpleNamespace(headers={})], {})


@pytest.mark.parametrize("wrap", [lambda fields: Request(**fields), lambda f: SimpleNamespace(**f), dict])
def test_objects_namespaces_and_mappings_are_read_alike(wrap: Any) -> None:
    assert of(wrap({"prompt": IDS, "cache_salt": "mine"})) == RequestPrompt(tokens=IDS, salt=b"mine")
    assert of(wrap({"prompt": "Once"})) == RequestPrompt(text="Once")
    assert of(wrap({"messages": [{"role": "user", "content": "Hi"}]})) == RequestPrompt(
        messages=[{"role": "user", "content": "Hi"}], special=False
    )


def test_keyword_arguments_and_the_forms_of_vllm_are_understood() -> None:
    assert find([], {"prompt": IDS}) == RequestPrompt(tokens=IDS)
    assert find([], {"prompt_token_ids": IDS}) == RequestPrompt(tokens=IDS)
    assert of({"prompt": {"prompt_token_ids": IDS}}) == RequestPrompt(tokens=IDS)
    assert of({"prompt": ["Once"]}) == RequestPrompt(text="Once")
    assert of({"prompt": [IDS]}) == RequestPrompt(tokens=IDS)


def test_what_is_no_single_text_is_left_alone_by_name() -> None:
    assert of({"prompt": ["Once", "Twice"]}) == "batch"
    assert of({"prompt": [IDS, IDS]}) == "batch"
    assert of({"prompt": IDS, "truncate_prompt_tokens": 2}) == "truncated"
    assert of({"prompt": IDS, "lora_request": object()}) == "adapter"
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    assert of({"messages": [{"role": "user", "content": [image]}]}) == "images"
    for nothing in (
        {"prompt": []},
        {"prompt": 3},
        {"messages": []},
        {"messages": [3]},
        {"prompt": {"x": 1}},
        7,
        "text",
    ):
        assert of(nothing) == "no_prompt"
    assert find([], {}) == "no_prompt"


def test_a_chat_is_handed_to_its_template_as_vllm_would() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    found = of(
        Request(
            messages=[{"role": "user", "content": parts}, {"role": "assistant", "content": None}],
            tools=[{"type": "function"}],
            chat_template_kwargs={"enable_thinking": False},
            add_special_tokens=True,
        )
    )
    assert isinstance(found, RequestPrompt)
    assert found.messages is not None
    assert [message["content"] for message in found.messages] == ["one\ntwo", ""]
    assert found.chat == {"tools": [{"type": "function"}], "enable_thinking": False}
    assert found.special


def test_completions_take_special_tokens_unless_told_otherwise_and_chats_do_not() -> None:
    told = of(Request(prompt="Once", add_special_tokens=False))
    assert isinstance(told, RequestPrompt)
    assert not told.special
    assert RequestPrompt(text="Once").special
