"""Hints that requests carry: each action is answered, whatever it is, and the answer is seen and counted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

from kvcluster.engines.vllm import kv_hints
from kvcluster.engines.vllm.kv_hints import (
    ACTIONS,
    KINDS,
    MALFORMED,
    PAYLOAD_BYTES,
    PAYLOAD_VALUES,
    TEXT_BYTES,
    UNKNOWN,
)
from tests.client.build import prompt
from tests.vllm.build import BLOCK
from tests.vllm.conftest import Bench

NOT_YET = "refused: not carried out yet"


def action(**fields: Any) -> KvHintAction:
    return KvHintAction(**({"action_id": "a", "action_type": "pin", "action_version": "1", "payload": {}} | fields))


def envelope(*actions: Any, **fields: Any) -> KvHintsEnvelope:
    return KvHintsEnvelope(**({"protocol_version": "1", "message_id": "m", "actions": list(actions)} | fields))


def only(hints: object) -> tuple[str, str]:
    """Kind and answer of the only action."""
    (found,) = kv_hints.answer(hints).answers
    return found.kind, found.answer


@pytest.mark.parametrize("kind", KINDS)
def test_actions_that_are_known_are_not_carried_out_yet(kind: str) -> None:
    assert only(envelope(action(action_type=kind, payload={"ttl_s": 60}))) == (kind, NOT_YET)


def test_answers_name_their_action_and_message() -> None:
    answers = kv_hints.answer(envelope(action(action_id="one"), action(action_id="two", action_type="teleport")))
    assert answers.plain() == {
        "message_id": "m",
        "answers": [
            {"action_id": "one", "kind": "pin", "answer": NOT_YET},
            {
                "action_id": "two",
                "kind": UNKNOWN,
                "answer": "refused: an action of type 'teleport' is not known",
            },
        ],
    }


@pytest.mark.parametrize(
    ("hints", "kind", "answer"),
    [
        (envelope(action(), protocol_version="2"), UNKNOWN, "protocol_version '2' is not known"),
        (envelope(action(action_version="2")), "pin", "version '2' of pin is not known"),
        (
            envelope(action(action_type="x" * (TEXT_BYTES + 1))),
            MALFORMED,
            "action_type must be a text of 1 to 128 bytes",
        ),
        (envelope(action(action_id="é" * TEXT_BYTES)), MALFORMED, "action_id must be a text of 1 to 128 bytes"),
        (envelope(action(action_version="")), MALFORMED, "action_version must be a text of 1 to 128 bytes"),
        (envelope(action(action_id="a\nb")), MALFORMED, "action_id must be printable"),
        (envelope(action(payload=None)), MALFORMED, "payload must be an object"),
        (envelope(action(payload={"a": b"1"})), MALFORMED, "payload must hold plain values of JSON"),
        (envelope(action(payload={"a": 2**70})), MALFORMED, "payload must hold plain values of JSON"),
        (envelope(action(payload={"a": list(range(PAYLOAD_VALUES))})), MALFORMED, "payload has more than"),
        (envelope(action(payload={"a": "x" * PAYLOAD_BYTES})), MALFORMED, "payload has more than"),
        (envelope("pin"), MALFORMED, "action_id must be a text"),
        (envelope(actions=7), MALFORMED, "actions must be a list"),
        (envelope(message_id=None), MALFORMED, "message_id must be a text"),
        (7, MALFORMED, "message_id must be a text"),
    ],
)
def test_what_is_unknown_or_malformed_is_refused_with_the_reason(hints: object, kind: str, answer: str) -> None:
    found = only(hints)
    assert found[0] == kind
    assert found[1].startswith(f"refused: {answer}")


def test_a_payload_is_as_large_as_allowed_and_as_deep() -> None:
    deep: dict[str, Any] = {}
    for _ in range(PAYLOAD_VALUES // 2 - 1):
        deep = {"a": deep}
    assert only(envelope(action(payload=deep)))[1] == NOT_YET
    for _ in range(100_000):
        deep = {"a": deep}
    assert only(envelope(action(payload=deep)))[0] == MALFORMED
    itself: dict[str, Any] = {}
    itself["a"] = itself
    assert only(envelope(action(payload=itself)))[0] == MALFORMED


def test_of_too_many_actions_the_first_are_answered_and_the_rest_counted() -> None:
    answers = kv_hints.answer(envelope(*[action()] * 1_000_000))
    assert len(answers.answers) == ACTIONS
    assert answers.counts() == {"pin": ACTIONS, MALFORMED: 1_000_000 - ACTIONS}
    assert answers.plain()["more"].startswith("refused: at most 16 actions")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_nothing_makes_it_raise(value: Any) -> None:
    for hints in (value, envelope(value), envelope(action(payload=value)), envelope(action(action_type=value))):
        answers = kv_hints.answer(hints).answers
        assert all(one.answer.startswith("refused: ") for one in answers)
    assert kv_hints.answer(SimpleNamespace(message_id=value, protocol_version=value, actions=value))


# ------------------------------------------------------------------------------------------------------ an engine


def test_an_engine_answers_in_its_report_and_counts_once(bench: Bench, llama: Path) -> None:
    engine = bench.engine(llama, {"report": True})
    hints = envelope(action(action_id="one"), action(action_id="two", action_type="teleport"))
    engine.add("hinted", prompt(4, 1, block_tokens=BLOCK), kv_hints=hints)
    engine.add("plain", prompt(4, 2, block_tokens=BLOCK))
    engine.run()
    engine.drain()
    assert engine.params["hinted"]["kvcluster"]["hints"] == kv_hints.answer(hints).plain()
    assert "computed_tokens" in engine.params["hinted"]["kvcluster"]
    assert "hints" not in engine.params["plain"]["kvcluster"]
    assert engine.counts["refused_pin_hints"] == engine.counts["refused_unknown_hints"] == 1
    assert not engine.side._hints


def test_without_a_report_they_are_counted_all_the_same(bench: Bench, llama: Path) -> None:
    engine = bench.engine(llama)
    engine.add("hinted", prompt(4, 1, block_tokens=BLOCK), kv_hints=envelope(action()))
    engine.run()
    engine.drain()
    assert "hinted" not in engine.params
    assert engine.counts["refused_pin_hints"] == 1


def test_a_request_that_runs_without_the_cluster_is_answered_too(bench: Bench, llama: Path) -> None:
    engine = bench.engine(llama, {"report": True, "weights": "run:one"}, load_format="dummy", joined=False)
    engine.add("hinted", prompt(4, 1, block_tokens=BLOCK), kv_hints=envelope(action()))
    engine.add("gone", prompt(4, 2, block_tokens=BLOCK), max_tokens=9, kv_hints=envelope(action()))
    engine.step()
    engine.abort("gone")
    engine.run("hinted")
    assert engine.params["hinted"]["kvcluster"]["hints"]["answers"][0]["answer"] == NOT_YET
    assert not engine.side._hints
