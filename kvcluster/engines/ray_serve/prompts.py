"""Finds a request's prompt (token ids, text, or a chat) in the arguments of its deployment, and tokenises it.

Serve's own LLM applications pass vLLM's request objects, or a namespace with the same attributes; a custom deployment
is called with such an object, with a mapping, or with keyword arguments. A wrong guess costs a cache hit and never
changes an answer, because the prompt found here is only used to choose a replica. So unusual requests are not guessed
at: `find` returns the reason.

`PromptTokenizer` tokenises as the engine does, with the model's own tokenizer. A separate thread loads the tokenizer,
since that takes seconds; until then text prompts are not located. Only the part of a long text that is looked up is
tokenised, because tokenising is the router's largest cost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

from kvcluster.errors import KVClusterError
from kvcluster.transport.thread_start import start_thread

_TOKENS = "prompt_token_ids"
_WANTED = ("messages", "prompt", _TOKENS)
_CHAT = ("tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message", "reasoning_effort")
_UNUSUAL = {
    "prompt_embeds": "embeddings",
    "truncate_prompt_tokens": "truncated",
    "lora_request": "adapter",
    "multi_modal_data": "images",
    "mm_processor_kwargs": "images",
}
"""With any of these, a prompt's blocks depend on more, or on less, than its tokens."""


@dataclass(frozen=True, slots=True)
class RequestPrompt:
    """Exactly one of `tokens`, `text` and `messages` is set. `special` is whether the tokenizer adds special tokens to
    the text. `chat` holds the other arguments of the chat template."""

    tokens: Sequence[int] | None = None
    text: str | None = None
    messages: Sequence[Mapping[str, object]] | None = None
    salt: bytes = b""
    special: bool = True
    chat: Mapping[str, object] = field(default_factory=dict)


def find(args: Sequence[object], kwargs: Mapping[str, object]) -> RequestPrompt | str:
    """Returns the prompt of a call, or one word for the reason why it has none to look up."""
    for given in (*args, kwargs):
        if any(_get(given, name) is not None for name in _WANTED):
            return _read(given)
    return "no_prompt"


def _read(given: object) -> RequestPrompt | str:
    for name, why in _UNUSUAL.items():
        if _get(given, name) is not None:
            return why
    salt = _get(given, "cache_salt")
    salted = salt.encode() if isinstance(salt, str) else b""
    special = _get(given, "add_special_tokens")
    messages = _get(given, "messages")
    if messages is not None:
        return _chat(given, messages, salted, special is True)
    prompt = _get(given, _TOKENS)
    if prompt is None:
        prompt = _get(given, "prompt")
    if isinstance(prompt, Mapping):  # vLLM's own form: {"prompt_token_ids": [...]} or {"prompt": "..."}
        return _read(prompt) if any(_get(prompt, name) is not None for name in _WANTED) else "no_prompt"
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            return "batch"
        prompt = prompt[0]
    if isinstance(prompt, str):
        return RequestPrompt(text=prompt, salt=salted, special=special is not False)
    if isinstance(prompt, (list, tuple)) and prompt and type(prompt[0]) is int:
        return RequestPrompt(tokens=prompt, salt=salted)
    return "no_prompt"


def _chat(given: object, messages: object, salt: bytes, special: bool) -> RequestPrompt | str:
    if not isinstance(messages, (list, tuple)) or not messages:
        return "no_prompt"
    plain = []
    for message in messages:
        as_dict = _as_dict(message)
        if as_dict is None:
            return "no_prompt"
        content = _text_of(as_dict.get("content"))
        if content is None:
            return "images"
        plain.append({**as_dict, "content": content})
    chat = {name: value for name in _CHAT if (value := _get(given, name)) is not None}
    more = _get(given, "chat_template_kwargs")
    if isinstance(more, Mapping):
        chat.update(more)
    if "tools" in chat and isinstance(chat["tools"], (list, tuple)):
        chat["tools"] = [_as_dict(tool) for tool in chat["tools"]]
    return RequestPrompt(messages=plain, salt=salt, special=special, chat=chat)


def _text_of(content: object) -> str | None:
    """Returns a message's content as vLLM joins it for templates that take text; None if it is more than text."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, (list, tuple)):
        return None
    parts = [part if isinstance(part, str) else _get(part, "text") for part in content]
    return "\n".join(parts) if all(isinstance(part, str) for part in parts) else None  # type: ignore[arg-type]


def _as_dict(value: object) -> dict[str, object] | None:
    if isinstance(value, Mapping):
        return dict(value)
    dump = getattr(value, "model_dump", None)  # a pydantic object
    return dict(dump(exclude_none=True)) if callable(dump) else None


def _get(given: object, name: str) -> object:
    return given.get(name) if isinstance(given, Mapping) else getattr(given, name, None)


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
