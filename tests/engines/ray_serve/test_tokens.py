"""Text becomes the tokens that the model's own tokenizer makes, up to the number that is needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcluster.engines.ray_serve.prompts import NoTokens, PromptTokenizer, RequestPrompt
from tests.engines.ray_serve.build import BOS, save_tokenizer
from tests.waiting import eventually

TEXT = "Once upon a time. " * 40


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> PromptTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    said: list[str] = []
    tokens = PromptTokenizer(str(folder), said.append)
    tokens.start()
    eventually(lambda: tokens.ready or said)
    assert not said
    return tokens


def test_ids_are_taken_as_they_are_and_cut(tokens: PromptTokenizer) -> None:
    assert tokens.of(RequestPrompt(tokens=[1, 2, 3]), 2) == [1, 2]


def test_text_begins_with_special_tokens_where_the_request_wants_them(tokens: PromptTokenizer) -> None:
    plain = tokens.of(RequestPrompt(text=TEXT, special=False), 10_000)
    assert tokens.of(RequestPrompt(text=TEXT), 10_000) == [BOS, *plain]


def test_the_beginning_of_a_long_text_has_the_tokens_of_the_whole(tokens: PromptTokenizer) -> None:
    whole = tokens.of(RequestPrompt(text=TEXT), 10_000)
    for most in (1, 16, 33, 64):
        assert tokens.of(RequestPrompt(text=TEXT * 50), most) == whole[:most]


def test_a_chat_is_rendered_by_the_models_template(tokens: PromptTokenizer) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    rendered = tokens.of(RequestPrompt(text="<user>Hi<answer>", special=False), 100)
    assert tokens.of(RequestPrompt(messages=messages, special=False), 100) == rendered
    bare = tokens.of(RequestPrompt(text="<user>Hi", special=False), 100)
    told = RequestPrompt(messages=messages, special=False, chat={"add_generation_prompt": False})
    assert tokens.of(told, 100) == bare


def test_a_template_that_refuses_is_no_mistake(tokens: PromptTokenizer) -> None:
    with pytest.raises(NoTokens, match="the chat template cannot render these messages"):
        tokens.of(
            RequestPrompt(messages=[{"role": "user", "content": "Hi"}], chat={"chat_template": "{{ 1 / 0 }}"}), 100
        )


def test_without_a_tokenizer_there_are_no_tokens_and_it_is_said_why(tmp_path: Path) -> None:
    with pytest.raises(NoTokens, match="was given no tokenizer"):
        PromptTokenizer("", print).of(RequestPrompt(text="Hi"), 10)
    said: list[str] = []
    missing = PromptTokenizer(str(tmp_path / "none"), said.append)
    missing.start()
    eventually(lambda: said)
    assert "text prompts are not located: no tokenizer from" in said[0]
    with pytest.raises(NoTokens, match="no tokenizer from"):
        missing.of(RequestPrompt(text="Hi"), 10)
