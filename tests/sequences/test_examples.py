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
from tests.sequences.small_spec import small_spec

TEXT = (Path(__file__).parents[2] / "docs" / "sequences.md").read_text()
EXAMPLES = re.findall(r"^#+ ([^\n]*)\n(?:(?!^#).)*?^```python\n(.*?)^```", TEXT, re.M | re.S)
SPEC = small_spec(32, 16)


@pytest.fixture
def cluster(start: Start) -> MemoryCluster:
    return start(shards=2, ram_bytes="8MiB", config={"client": {"resident_bytes": "16MiB"}})


@pytest.mark.parametrize(("heading", "code"), EXAMPLES, ids=[heading for heading, _ in EXAMPLES])
def test_the_example_runs(cluster: MemoryCluster, heading: str, code: str) -> None:
    def kv(tokens: int) -> Tensor:
        return torch.randn(tokens, 2, 32).bfloat16()

    def queries(tokens: int) -> Tensor:
        return torch.randn(tokens, 8, 32)

    with cluster.client(SPEC) as client:
        names = {"client": client, "spec": SPEC, "kv": kv, "queries": queries, "kvcluster": kvcluster}
        run_twice(code, heading, names | {"CallerError": CallerError, "LimitError": LimitError})
        assert client.resident().sequences == 0, "an example closes what it opens"


def test_all_that_users_know_is_shown() -> None:
    assert len(EXAMPLES) == 15
