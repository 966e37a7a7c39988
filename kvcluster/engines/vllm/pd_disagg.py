"""Prefill/decode disaggregation: what the prefill server puts into its answer, and what the decode server waits for.

A proxy sends the request to the prefill server with `{"do_remote_decode": true}` in `kv_transfer_params` and
`max_tokens` 1. That server answers when the prompt's blocks are committed, or after a bounded time, and reports how
many were stored. The proxy passes these parameters to the decode server, which loads the blocks by their content like
any others: it does not need the prefill server's address, nor that it still runs. The promised number only makes the
decode server wait a short time if it finds fewer blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcluster.core import limits
from kvcluster.core.ids import BlockHash

PAUSE_NS = 20_000_000
"""Time between two lookups of a request whose blocks were promised but are not found yet."""


def is_asked(params: Mapping[str, Any]) -> bool:
    """Whether another server will continue from this request."""
    return bool(params.get("do_remote_decode"))


def promise(chain: list[BlockHash], blocks: int) -> dict[str, Any]:
    """Returns the `kv_transfer_params` of the answer: `blocks` leading blocks of the prompt were stored."""
    tip = chain[blocks - 1].hex() if blocks else ""
    return {"do_remote_prefill": True, "do_remote_decode": False, "kvcluster": {"blocks": blocks, "tip": tip}}


def promised(params: Mapping[str, Any]) -> int:
    """Returns the number of leading blocks that another server has promised; 0 if there is no valid promise."""
    given = params.get("kvcluster")
    blocks = given.get("blocks") if isinstance(given, Mapping) and params.get("do_remote_prefill") else 0
    return blocks if type(blocks) is int and 0 <= blocks <= limits.BLOCKS_PER_PROMPT else 0
