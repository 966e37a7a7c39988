"""Finds a request's prompt (token ids, text, or a chat) in the arguments of its deployment, whatever they are.

Serve's own LLM applications pass vLLM's request objects, or a namespace with the same attributes; a custom deployment
is called with such an object, with a mapping, or with keyword arguments. A wrong guess costs a cache hit and never
changes an answer, because the prompt found here is only used to choose a replica. So unusual requests are not guessed
at: `find` returns the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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
    """Returns the prompt of a call, or one word that says why it has none to look up."""
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
