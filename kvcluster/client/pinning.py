"""Pins: protecting the cached prefix of a prompt from eviction, and ending that."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcluster.client.coordinator_client import CoordinatorClient
from kvcluster.client.long_chains import in_messages
from kvcluster.client.results import Pinned
from kvcluster.core.ids import BlockHash
from kvcluster.core.messages import BlocksPinned, PinBlocks, UnpinBlocks
from kvcluster.core.spec import KVSpec
from kvcluster.transport.base import Deadline, Unavailable


def ask_to_pin(
    control: CoordinatorClient,
    spec: KVSpec,
    question: Callable[[tuple[BlockHash, ...]], PinBlocks | UnpinBlocks],
    hashes: Sequence[BlockHash],
    deadline: Deadline,
) -> Pinned:
    """Returns how many leading blocks are pinned, or no longer pinned, and the miss if the coordinator does not answer.
    `question` returns the message about some consecutive blocks."""
    blocks, miss = 0, None
    try:
        for some in in_messages(hashes):
            asked = question(some)
            answered = control.ask(BlocksPinned, spec, asked, deadline).blocks
            blocks += answered
            if isinstance(asked, PinBlocks) and answered < len(some):
                break  # the next is not cached, or the share is full
    except Unavailable as trouble:
        miss = trouble.miss
    return Pinned(blocks * spec.block_tokens, blocks, miss)
