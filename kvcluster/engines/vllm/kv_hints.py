"""Reads the KV hints that a request carries (vLLM's `Request.kv_hints`), and answers each of their actions.

vLLM passes an orchestrator's hints on as they are: an envelope of actions, each with a type, a version and a payload of
whatever shape. vLLM names no types. So here they are checked like anything else from outside: a bounded number of short
texts, a small payload of plain values. Nothing in them makes this module raise.

No action is carried out yet. Each is answered "refused", with the reason, and counted by its kind; the answers are in
the report of the request's answer, so that an orchestrator can tell what it may rely on.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from kvcluster.engines.vllm.compat import as_bytes

KINDS = ("pin", "unpin", "prefetch", "drop")
"""The types of actions that are known by name. All others are of the kind "unknown"."""

UNKNOWN, MALFORMED = "unknown", "malformed"
PROTOCOL_VERSION = "1"

ACTIONS = 16
"""Actions of one request that are answered one by one. The others are counted, and answered together."""

TEXT_BYTES = 128
"""UTF-8 bytes of each text of an envelope or an action: they come back in the answer."""

PAYLOAD_VALUES = 256
"""Values in the payload of one action, keys included, however deep."""

PAYLOAD_BYTES = 4_096
"""Bytes of all texts in the payload of one action."""


@dataclass(frozen=True, slots=True)
class HintAnswer:
    """The answer to one action. `kind` is its type if that is known, otherwise "unknown" or "malformed"."""

    action_id: str
    kind: str
    answer: str

    def plain(self) -> dict[str, str]:
        return {"action_id": self.action_id, "kind": self.kind, "answer": self.answer}


@dataclass(frozen=True, slots=True)
class HintAnswers:
    """The answers to the hints of one request. `more` actions were not looked at."""

    message_id: str
    answers: tuple[HintAnswer, ...]
    more: int = 0

    def counts(self) -> Counter[str]:
        """Returns the number of answers by kind."""
        return Counter([answer.kind for answer in self.answers]) + Counter({MALFORMED: self.more})

    def plain(self) -> dict[str, Any]:
        """Returns what the request's answer reports."""
        told: dict[str, Any] = {"message_id": self.message_id, "answers": [answer.plain() for answer in self.answers]}
        if self.more:
            told["more"] = f"refused: at most {ACTIONS} actions of a request are read; {self.more:,} were not"
        return told


def answer(envelope: Any) -> HintAnswers:
    """Returns the answers to a request's hints, whatever they are."""
    message_id: Any = getattr(envelope, "message_id", None)
    version: Any = getattr(envelope, "protocol_version", None)
    fault = _text_fault(message_id, "message_id") or _text_fault(version, "protocol_version")
    if fault:
        return HintAnswers("", (HintAnswer("", MALFORMED, f"refused: {fault}"),))
    actions = getattr(envelope, "actions", None)
    if not isinstance(actions, (list, tuple)):
        return HintAnswers(message_id, (HintAnswer("", MALFORMED, "refused: actions must be a list"),))
    return HintAnswers(
        message_id, tuple(_answer(action, version) for action in actions[:ACTIONS]), max(0, len(actions) - ACTIONS)
    )


def _answer(action: Any, version: str) -> HintAnswer:
    action_id, kind, of_action = (
        getattr(action, name, None) for name in ("action_id", "action_type", "action_version")
    )
    fault = _text_fault(action_id, "action_id")
    known_id = "" if fault else str(action_id)
    fault = fault or _text_fault(kind, "action_type") or _text_fault(of_action, "action_version")
    fault = fault or _payload_fault(getattr(action, "payload", None))
    if fault:
        return HintAnswer(known_id, MALFORMED, f"refused: {fault}")
    if version != PROTOCOL_VERSION:
        return HintAnswer(known_id, UNKNOWN, f"refused: protocol_version {version!r} is not known")
    if kind not in KINDS:
        return HintAnswer(known_id, UNKNOWN, f"refused: an action of type {kind!r} is not known")
    if of_action != PROTOCOL_VERSION:
        return HintAnswer(known_id, kind, f"refused: version {of_action!r} of {kind} is not known")
    return HintAnswer(known_id, kind, "refused: not carried out yet")


def _text_fault(text: object, name: str) -> str:
    """Returns what is wrong with a text, "" for nothing."""
    if not isinstance(text, str):
        return f"{name} must be a text"
    if not text or len(text) > TEXT_BYTES or len(as_bytes(text)) > TEXT_BYTES:
        return f"{name} must be a text of 1 to {TEXT_BYTES} bytes"
    return "" if text.isprintable() else f"{name} must be printable"


def _payload_fault(payload: object) -> str:
    """Returns what is wrong with a payload, "" for nothing. Looks at no more values than are allowed, and follows no
    depth by recursion."""
    if not isinstance(payload, dict):
        return "payload must be an object"
    values, nbytes, waiting = 0, 0, [payload]
    while waiting:
        value: Any = waiting.pop()
        inner: list[Any] = []
        if isinstance(value, (dict, list, tuple)):
            if len(value) > PAYLOAD_VALUES:
                return f"payload has more than {PAYLOAD_VALUES} values"
            inner = [*value, *value.values()] if isinstance(value, dict) else [*value]
        elif isinstance(value, str):
            nbytes += len(value) if len(value) > PAYLOAD_BYTES else len(as_bytes(value))
        elif not (value is None or isinstance(value, (bool, float)) or (isinstance(value, int) and abs(value) < 2**63)):
            return "payload must hold plain values of JSON"
        values += len(inner)
        if values > PAYLOAD_VALUES or nbytes > PAYLOAD_BYTES:
            return f"payload has more than {PAYLOAD_VALUES} values or {PAYLOAD_BYTES:,} bytes of texts"
        waiting += inner
    return ""
