"""Values that once were taken for something else: each is refused, in words, before anything happens."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

import kvcluster
from kvcluster.core import hashing
from kvcluster.core.groups import Plane, dtype_name
from kvcluster.errors import CallerError, SpecError
from kvcluster.testing import MemoryCluster
from tests.client.build import BLOCK, SPEC, prompt


@pytest.mark.parametrize(
    "weights", ["refs/heads/main", " refs/heads/v1.2", "heads/main", "origin/main", "REFS/heads/x"]
)
def test_a_branch_does_not_pin_the_weights(weights: str) -> None:
    with pytest.raises(SpecError, match="does not pin the weights"):
        dataclasses.replace(SPEC, weights=weights)


def test_a_tag_and_a_digest_pin_the_weights() -> None:
    for weights in ("refs/tags/v1.2", "sha256:9f1c", "origin-of-species@9f1c"):
        assert dataclasses.replace(SPEC, weights=weights).weights == weights


def test_a_key_of_extra_may_not_repeat() -> None:
    with pytest.raises(SpecError, match="without repeats of a key"):
        dataclasses.replace(SPEC, extra=(("a", "b"), ("a", "c")))


def test_an_empty_extra_key_is_refused() -> None:
    with pytest.raises(CallerError, match="is empty"):
        kvcluster.Prompt(prompt(2), extra_keys={0: b""})


def test_a_dtype_in_another_byte_order_is_none_of_ours() -> None:
    other = np.dtype(np.float32).newbyteorder()
    assert dtype_name(np.dtype(np.float32)) == "float32" != dtype_name(other)
    with pytest.raises(SpecError, match="f4"):
        Plane("k", heads=1, dim=4, dtype=other)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [{0: 5, 1: 6}, {1: 2}, {0: "a"}])
def test_a_mapping_is_no_list_of_token_ids(given: Any) -> None:
    with pytest.raises(CallerError, match="token ids must be a flat sequence"):
        hashing.token_array(given)


def test_equal_prompts_have_equal_hashes() -> None:
    one, other = (kvcluster.Prompt(ids, salt=b"s", extra_keys={1: b"x"}) for ids in ([1, 2], np.array([1, 2])))
    assert one == other and hash(one) == hash(other) and {one: 1}[other] == 1
    assert hash(one) != hash(kvcluster.Prompt([1, 2], salt=b"t"))


WRONG: list[dict[str, Any]] = [
    {"window": 2.0},
    {"window": True},
    {"window": 2**70},
    {"window": 0},
    {"scale": "x"},
    {"scale": float("nan")},
    {"scale": True},
    {"softcap": "x"},
    {"softcap": 0},
    {"latent_values": 1.0},
    {"threads": "x"},
    {"threads": 0},
    {"sinks": "x"},
    {"sinks": [0.0]},
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_attend_refuses_wrong_scores_in_words(cluster: MemoryCluster, wrong: dict[str, Any]) -> None:
    with cluster.client(SPEC) as client, client.sequence() as sequence:
        k, v = _tokens(4)
        for layer in range(SPEC.whole(0).layers):
            sequence.append(layer, k, v)
        with pytest.raises(CallerError):
            sequence.attend(0, k, **wrong)
        assert sequence.attend(0, k, scale=np.float32(0.5), window=2**62).shape == k.shape


def test_a_number_of_tokens_advances_all_rows_of_a_batch(cluster: MemoryCluster) -> None:
    with cluster.client(SPEC) as client, client.sequence() as one, client.sequence() as other:
        batch = kvcluster.SequenceBatch([one, other])
        k, v = _tokens(2 * BLOCK)
        for layer in range(SPEC.whole(0).layers):
            batch.append(layer, k, v)
        for wrong in (True, None, 1.5):
            with pytest.raises(CallerError, match="advance got"):
                batch.advance(wrong)  # type: ignore[arg-type]
        batch.advance(BLOCK)
        assert (one.length, other.length) == (BLOCK, BLOCK)


def _tokens(tokens: int) -> list[torch.Tensor]:
    group, whole = SPEC.groups[0], SPEC.whole(0)
    return [torch.ones(tokens, whole.heads, plane.dim, dtype=getattr(torch, plane.dtype)) for plane in group.planes]
