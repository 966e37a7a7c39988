"""Every example of docs/client.md runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy
import pytest
import torch

import kvcluster
from kvcluster.client.client import Client
from tests.client.conftest import Start
from tests.docs.snippets import Snippet, run_twice, snippets_of

EXAMPLES = snippets_of("docs/client.md", "python")
SPEC = kvcluster.KVSpec.uniform(
    model="llama-3-8b",
    weights="sha256:9f1c",
    num_layers=32,
    num_kv_heads=8,
    head_dim=128,
    dtype=torch.bfloat16,
    block_tokens=16,
)
TOKENS = list(range(64))
SHAPE = (4, 32, 2, 16, 8, 128)


@pytest.fixture
def names(start: Start, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The names that examples use, over a cluster within this process."""
    cluster = start(ram_bytes="64MiB")

    real = kvcluster.local

    def local(**settings: Any) -> kvcluster.LocalCluster:
        return real(**{**settings, "ray": False})  # on Ray: tests/actors

    def connect(address: str, spec: kvcluster.KVSpec) -> Client:
        return cluster.client(spec)

    monkeypatch.setattr(kvcluster, "connect", connect)
    monkeypatch.setattr(kvcluster, "local", local)
    with cluster.client(SPEC) as client, ExitStack() as stack:
        client.store(TOKENS, torch.randn(SHAPE).bfloat16())
        assert client.flush()
        prompt = kvcluster.Prompt([*TOKENS, *range(64 + 9 * 16)], salt=b"of this prompt alone")
        ticket = stack.enter_context(client.prepare_load(client.hashes(TOKENS)))
        yield {
            "kvcluster": kvcluster,
            "numpy": numpy,
            "spec": SPEC,
            "client": client,
            "token_ids": TOKENS,
            "prompt": prompt,
            "digest": b"sha256",
            "kv": torch.randn(SHAPE).bfloat16(),
            "out": torch.empty(SHAPE, dtype=torch.bfloat16),
            "into": torch.empty((17, *SHAPE[1:]), dtype=torch.bfloat16),
            "source": torch.randn((5, *SHAPE[1:])).bfloat16(),
            "ticket": ticket,
            "q": torch.randn(1, 8, 128),
            "attend": lambda query, pages: query,
            "recompute": lambda: None,
        }


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_the_example_runs(names: dict[str, Any], example: Snippet) -> None:
    run_twice(example.code, str(example), names)


def test_all_examples_are_found() -> None:
    assert len(EXAMPLES) == 5
