"""The deadline of a call for which its caller gives none, and the configuration none either.

It fits what the call is worth. A load is worth the time in which its tokens could be computed, and a question before it
far less: an engine waits for both, and computes where they are a miss. Nothing waits for a store in this way.

    QUESTION_MS               hashes, lookup, prepare_load, the questions of a load
    QUESTION_MS + 1 ms a MB   the bytes of a load
                + 0.2 ms a block
    OTHER_MS                  everything else: stores, flush, sequences, pins, explain, status, clear, purge
"""

from __future__ import annotations

from kvcluster.transfers.validation import check_deadline_ms
from kvcluster.transport.base import Deadline

QUESTION_MS = 1_000
"""A coordinator answers within a few milliseconds, and one whose process was held up for as long as it may be
(Config.stall_ms) still answers in time."""

LOAD_BYTES_PER_MS = 1_000_000
"""Slower loads do not pay: of a model with 128 KiB of KV a token, such as llama-3-8b, 1 GB/s are 7,600 tokens/s, which
one GPU computes as well."""

LOAD_BLOCKS_PER_MS = 5
"""A block costs a load time of its own, however small it is. To compute one of 16 tokens in that time takes 80,000
tokens/s."""

OTHER_MS = 10_000
"""Time for what is done beside requests: a store waits in line, then for room (ClientConfig.store_wait_ms)."""


def call_deadline(configured_ms: float, deadline_ms: float | None, default_ms: float = OTHER_MS) -> Deadline:
    """Returns the deadline of a call that begins now: `deadline_ms` if its caller gives it, otherwise that of the
    configuration, `default_ms` if that has 0. Raises CallerError as check_deadline_ms."""
    default_ms = configured_ms or default_ms
    return Deadline.after_ms(default_ms if deadline_ms is None else check_deadline_ms(deadline_ms))


def load_ms(nbytes: int, blocks: int) -> float:
    """Returns the deadline of loading so many bytes in so many blocks, in milliseconds."""
    return QUESTION_MS + nbytes / LOAD_BYTES_PER_MS + blocks / LOAD_BLOCKS_PER_MS


def remaining_ms(deadline: Deadline) -> float:
    """Returns the time that is left, as the `deadline_ms` of a call that is part of another."""
    return deadline.remaining_s() * 1e3
