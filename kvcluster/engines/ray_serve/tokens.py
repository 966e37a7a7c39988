"""Converts text to token ids as the engine does, with the model's own tokenizer.

A separate thread loads the tokenizer, since that takes seconds; until then text prompts are not located. Only the part
of a long text that is looked up is tokenised, because tokenising is the router's largest cost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol, cast

from kvcluster.engines.ray_serve.prompts import RequestPrompt
from kvcluster.errors import KVClusterError
from kvcluster.transport.thread_start import start_thread

_CHARACTERS_A_TOKEN = 8
"""Characters taken per token: more than a token has on average in any language."""


class NoTokens(KVClusterError):
    """There is no tokenizer, it is not loaded yet, or its chat template failed."""


class _Tokenizer(Protocol):
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def apply_chat_template(self, conversation: object, **options: object) -> str: ...


class PromptTokenizer:
    """Tokenises the prompts of one model. `start` begins to load the tokenizer."""

    def __init__(self, tokenizer: str, log: Callable[[str], object]) -> None:
        self._name = tokenizer
        self._log = log
        self._loaded: _Tokenizer | None = None
        self._why = "the tokenizer is being loaded" if tokenizer else "the router was given no tokenizer"

    def start(self) -> None:
        if not self._name:
            return
        try:
            start_thread(threading.Thread(target=self._load, name="kvcluster-tokenizer", daemon=True))
        except KVClusterError as error:
            self._not_loaded(str(error))

    @property
    def ready(self) -> bool:
        return self._loaded is not None

    def of(self, prompt: RequestPrompt, most: int) -> list[int]:
        """Returns the first tokens of a prompt, at most `most`. Raises NoTokens."""
        if prompt.tokens is not None:
            return list(prompt.tokens[:most])
        tokenizer = self._loaded
        if tokenizer is None:
            raise NoTokens(self._why)
        text = prompt.text if prompt.text is not None else _rendered(tokenizer, prompt)
        cut = text[: most * _CHARACTERS_A_TOKEN]
        ids = tokenizer.encode(cut, add_special_tokens=prompt.special)
        if len(cut) < len(text):
            del ids[-_CHARACTERS_A_TOKEN:]  # the last tokens may differ from those of the whole text
        return ids[:most]

    def _load(self) -> None:
        try:
            from transformers import AutoTokenizer

            self._loaded = cast(_Tokenizer, AutoTokenizer.from_pretrained(self._name))
        except Exception as error:  # a thread must not die silently
            self._not_loaded(f"{type(error).__name__}: {error}")

    def _not_loaded(self, error: str) -> None:
        self._why = f"no tokenizer from {self._name}: {error}"
        self._log(f"text prompts are not located: {self._why}")


def _rendered(tokenizer: _Tokenizer, prompt: RequestPrompt) -> str:
    options = {"add_generation_prompt": True, **prompt.chat, "tokenize": False}
    try:
        return tokenizer.apply_chat_template(prompt.messages, **options)
    except Exception as error:  # a template may raise any exception
        raise NoTokens(f"the chat template cannot render these messages: {error}") from None
