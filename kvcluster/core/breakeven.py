"""Break-even: the number of tokens from which on loading takes less time than computing.

A load of n tokens takes a fixed time (its round trips) plus its bytes at the link's rate; computing them takes n at the
engine's prefill rate. Both are straight lines, except for groups that need only their last blocks, whose bytes stop
growing: so the gain of a load starts below zero and never grows more slowly as n grows. Hence there is at most one
crossing: a load that pays, pays for every longer prefix too, and no part of a prefix pays if all of it does not. `pays`
compares integers, so this holds exactly, and `least_tokens` searches with `pays` itself: the printed verdict and the
decision of a connector cannot differ.

The prefill rate is one number. Attention makes the later tokens of a long prompt more expensive, so a rate that was
measured with short prompts errs towards computing; measure it at the length that matters. This module does not know the
rate of a link: it is measured (cli/breakeven.py) or learnt (transfers/bandwidth.py).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from kvcluster.core import limits
from kvcluster.core.groups import Part
from kvcluster.core.miss import Miss, MissReason
from kvcluster.core.spec import KVSpec
from kvcluster.errors import CallerError

_SECOND_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class LinkRate:
    """Speed of loads over one path: `fixed_ns` for any load, then `bytes_per_s`, which is at least 1."""

    fixed_ns: int
    bytes_per_s: int

    def __post_init__(self) -> None:
        assert self.fixed_ns >= 0 and self.bytes_per_s >= 1

    @classmethod
    def through(cls, small: tuple[int, int], large: tuple[int, int]) -> LinkRate:
        """Computes the rate from two loads, each given as its bytes and the nanoseconds that it took.

        If the two cannot be told apart, or noise makes the fixed time negative, the whole time of the larger load is
        attributed to its bytes.
        """
        (small_bytes, small_ns), (large_bytes, large_ns) = small, large
        more, longer = large_bytes - small_bytes, large_ns - small_ns
        if more > 0 and longer > 0:
            fixed_ns = small_ns - small_bytes * longer // more
            if fixed_ns >= 0:
                return cls(fixed_ns, max(1, more * _SECOND_NS // longer))
        return cls(0, max(1, large_bytes * _SECOND_NS // max(1, large_ns)))

    def load_ns(self, nbytes: int) -> int:
        """Returns the nanoseconds that a load of `nbytes` takes."""
        return self.fixed_ns + -(-nbytes * _SECOND_NS // self.bytes_per_s)


@dataclass(frozen=True, slots=True)
class Breakeven:
    """Compares loading with computing, for one worker's parts of one spec. `parts` has an entry per group, None for a
    group that is not loaded here. Raises CallerError if the prefill rate is not an integer of at least 1.

    Tokens count from the end of the engine's own KV, and whole blocks of them are loaded: tokens that do not fill a
    block are computed either way.
    """

    spec: KVSpec
    parts: Sequence[Part | None]
    prefill_tokens_per_s: int

    def __post_init__(self) -> None:
        assert len(self.parts) == len(self.spec.groups)
        rate = self.prefill_tokens_per_s
        if type(rate) is not int or rate < 1:
            raise CallerError(f"the prefill rate must be a whole number of tokens a second, at least 1, not {rate!r}")

    def nbytes(self, tokens: int) -> int:
        """Returns the bytes that a load of `tokens` tokens moves at most: in groups that attend in chunks, it depends
        on where the tokens begin."""
        spec, blocks = self.spec, self._blocks(tokens)
        return sum(
            group.reuse.most_needed(blocks, spec.block_tokens) * spec.page_bytes(number, part)
            for number, (group, part) in enumerate(zip(spec.groups, self.parts, strict=True))
            if part is not None
        )

    def prefill_ns(self, tokens: int) -> int:
        """Returns the nanoseconds that computing the same tokens takes."""
        return self._blocks(tokens) * self.spec.block_tokens * _SECOND_NS // self.prefill_tokens_per_s

    def pays(self, tokens: int, link: LinkRate) -> bool:
        """Whether loading them is faster than computing them; False if both take the same time."""
        saved = self._blocks(tokens) * self.spec.block_tokens * _SECOND_NS * link.bytes_per_s
        spent = link.fixed_ns * link.bytes_per_s + self.nbytes(tokens) * _SECOND_NS
        return spent * self.prefill_tokens_per_s < saved  # in seconds / (bytes_per_s * tokens_per_s * 10**9)

    def miss(self, tokens: int, link: LinkRate) -> Miss | None:
        """Returns the miss with which a connector replaces a load that does not pay; None if it pays."""
        if self.pays(tokens, link):
            return None
        load_ms, prefill_ms = link.load_ns(self.nbytes(tokens)) / 1e6, self.prefill_ns(tokens) / 1e6
        detail = f"{tokens:,} tokens load in {load_ms:,.1f} ms and are computed in {prefill_ms:,.1f} ms"
        return Miss(MissReason.SLOWER_THAN_RECOMPUTE, detail)

    def least_tokens(self, link: LinkRate) -> int | None:
        """Returns the least number of tokens, in whole blocks, for which a load pays; None if it never does within
        limits.TOKENS_PER_SEQUENCE."""
        step = self.spec.block_tokens
        blocks = range(1, limits.TOKENS_PER_SEQUENCE // step + 1)
        at = bisect_left(blocks, True, key=lambda count: self.pays(count * step, link))
        return blocks[at] * step if at < len(blocks) else None

    def _blocks(self, tokens: int) -> int:
        assert tokens >= 0
        return tokens // self.spec.block_tokens
