"""A prompt is checked when it is made, copies what it is made from, and may stand wherever token ids may."""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import pytest
import torch

import kvcluster
from kvcluster.client.client import Client
from kvcluster.errors import CallerError
from kvcluster.testing import MemoryCluster
from kvcluster.transfers.long_chains import Prompt
from tests.client.build import SPEC, kv, prompt
from tests.client.test_misuse import CALLS

TOKENS = prompt(2, rest=1)
FORMS: list[Callable[[list[int]], Any]] = [
    tuple,
    lambda tokens: array("q", tokens),
    numpy.array,
    lambda tokens: numpy.array(tokens, dtype=numpy.uint32),
    torch.tensor,
    lambda tokens: torch.tensor(tokens, dtype=torch.int32),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("call", CALLS)
def test_every_form_of_the_same_token_ids_has_the_same_answer(
    cluster: MemoryCluster, call: Callable[[Client, Any], Any], form: Callable[[list[int]], Any]
) -> None:
    client = cluster.client(SPEC)
    assert client.store(TOKENS, kv(2)).blocks == 2
    assert client.flush()
    for given in (form(TOKENS), Prompt(TOKENS), Prompt(form(TOKENS))):
        again, expected = call(client, given), call(client, TOKENS)
        assert str(again) == str(expected)


@pytest.mark.parametrize("form", FORMS)
def test_prompts_of_the_same_token_ids_are_equal(form: Callable[[list[int]], Sequence[int]]) -> None:
    assert Prompt(form(TOKENS), b"s") == Prompt(TOKENS, b"s") != Prompt(TOKENS)
    assert all(type(token) is int for token in Prompt(form(TOKENS)).token_ids)


def test_a_prompt_is_a_copy_of_what_it_is_made_from() -> None:
    tokens, keys = list(TOKENS), {0: b"a cat"}
    made = Prompt(tokens, extra_keys=keys)
    tokens.append(7)
    keys[1] = b"a dog"
    assert made == Prompt(TOKENS, extra_keys={0: b"a cat"})


def test_a_prompt_goes_to_another_process() -> None:
    made = kvcluster.Prompt(TOKENS, b"s", "sha256:lora", {0: b"a cat"})
    assert pickle.loads(pickle.dumps(made)) == made


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"token_ids": "text"}, "token ids must be a flat sequence of integers"),
        ({"token_ids": torch.zeros(2, 2, dtype=torch.int64)}, "token ids must be a flat sequence of integers"),
        ({"token_ids": torch.tensor(7)}, "token ids must be a flat sequence of integers from 0 to 2.*, not 7"),
        ({"token_ids": torch.tensor([True, False])}, "token ids must be .*, not True"),
        ({"token_ids": numpy.array([1.0, 2.0])}, "token ids must be .*, not 1.0"),
        ({"salt": "text"}, r"salt is a str; expected bytes: for text give text.encode\(\)"),
        ({"salt": None}, "salt is None; expected bytes"),
        ({"salt": bytearray(b"s")}, "salt is a bytearray"),
        ({"adapter": 7}, "adapter is a int; expected the content hash of a LoRA as text"),
        ({"extra_keys": [b"image"]}, "extra_keys is a list; expected a mapping"),
        ({"extra_keys": {0: "image"}}, r"extra_keys\[0\] is a str; expected bytes"),
        ({"extra_keys": {-1: b"image"}}, "extra_keys names block -1; expected an index"),
        ({"extra_keys": {"0": b"image"}}, "extra_keys names block '0'; expected an index"),
    ],
    ids=repr,
)
def test_a_prompt_with_a_field_of_another_kind_is_refused(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(CallerError, match=match):
        Prompt(**({"token_ids": TOKENS} | fields))
