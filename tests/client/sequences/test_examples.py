"""Every example of docs/sequences.md runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kvcluster
from kvcluster.errors import CallerError, LimitError
from kvcluster.testing import MemoryCluster
from tests.client.conftest import Start
from tests.docs.snippets import run_twice

TEXT = (Path(__file__).parents[3] / "docs" / "sequences.md").read_text()
EXAMPLES = re.findall(r"^#+ ([^\n]*)\n(?:(?!^#).)*?^```python\n(.*?)^```", TEXT, re.M | re.S)
SPEC = kvcluster.KVSpec.uniform(
    model="m",
    weights="sha256:1",
    num_layers=2,
    num_kv_heads=2,
    head_dim=32,
    dtype="bfloat16",
    block_tokens=16,
)


@pytest.fixture
def cluster(start: Start) -> MemoryCluster:
    return start(shards=2, device_bytes="8MiB", config={"client": {"resident_bytes": "16MiB"}})


@pytest.mark.parametrize(("heading", "code"), EXAMPLES, ids=[heading for heading, _ in EXAMPLES])
def test_the_example_runs(cluster: MemoryCluster, heading: str, code: str) -> None:
    def kv(tokens: int) -> Tensor:
        return torch.randn(tokens, 2, 32).bfloat16()

    def queries(tokens: int) -> Tensor:
        return torch.randn(tokens, 8, 32)

    with cluster.client(SPEC) as client:
        names = {"client": client, "spec": SPEC, "kv": kv, "queries": queries, "kvcluster": kvcluster}
        run_twice(code, heading, names | {"CallerError": CallerError, "LimitError": LimitError})


def test_all_that_users_know_is_shown() -> None:
    assert len(EXAMPLES) == 10
