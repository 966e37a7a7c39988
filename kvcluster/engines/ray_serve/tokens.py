"""Text to token ids as the engine makes them, by the model's own tokenizer.

It is loaded on a thread of its own, since that takes seconds; until then text is looked for nowhere. Only the beginning
of a long text is turned into tokens, as much as is looked for, because tokenising is what a router has least time for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol, cast

from kvcluster.engines.ray_serve.prompts import Prompt
from kvcluster.errors import KVClusterError

_CHARACTERS_A_TOKEN = 8
"""More than tokenizers make of a token in any language, on average."""


class NoTokens(KVClusterError):
    """There is no tokenizer, or not yet, or it has no chat template."""


class _Tokenizer(Protocol):
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def apply_chat_template(self, conversation: object, **options: object) -> str: ...


class PromptTokenizer:
    """Of one model. `start` begins to load its tokenizer."""

    def __init__(self, tokenizer: str, log: Callable[[str], object]) -> None:
        self._name = tokenizer
        self._log = log
        self._loaded: _Tokenizer | None = None
        self._why = "the tokenizer is being loaded" if tokenizer else "the router was given no tokenizer"

    def start(self) -> None:
        if self._name:
            threading.Thread(target=self._load, name="kvcluster-tokenizer", daemon=True).start()

    @property
    def ready(self) -> bool:
        return self._loaded is not None

    def of(self, prompt: Prompt, most: int) -> list[int]:
        """The first tokens of a prompt, `most` at most. Raises NoTokens."""
        if prompt.tokens is not None:
            return list(prompt.tokens[:most])
        tokenizer = self._loaded
        if tokenizer is None:
            raise NoTokens(self._why)
        text = prompt.text if prompt.text is not None else _rendered(tokenizer, prompt)
        cut = text[: most * _CHARACTERS_A_TOKEN]
        ids = tokenizer.encode(cut, add_special_tokens=prompt.special)
        if len(cut) < len(text):
            del ids[-_CHARACTERS_A_TOKEN:]  # at the cut they may be others than they would be
        return ids[:most]

    def _load(self) -> None:
        try:
            from transformers import AutoTokenizer

            self._loaded = cast(_Tokenizer, AutoTokenizer.from_pretrained(self._name))
        except Exception as error:  # a thread that dies silently would be a riddle
            self._why = f"no tokenizer from {self._name}: {type(error).__name__}: {error}"
            self._log(f"text is looked for nowhere: {self._why}")


def _rendered(tokenizer: _Tokenizer, prompt: Prompt) -> str:
    options = {"add_generation_prompt": True, **prompt.chat, "tokenize": False}
    try:
        return tokenizer.apply_chat_template(prompt.messages, **options)
    except Exception as error:  # a template raises whatever its author thought of
        raise NoTokens(f"the chat template refused: {error}") from None
