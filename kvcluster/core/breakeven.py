"""Break-even: from how many tokens on a load takes less time than computing them.

A load of n tokens takes a fixed time (its round trips) and then its bytes at the link's rate; computing them takes n at
the engine's prefill rate. Both sides are straight lines, but for groups that need their last blocks alone, whose bytes
stop growing: so what a load gains never gains more slowly as n grows, and begins below nothing. Hence there is one
crossing at most: a load that pays, pays for every longer prefix too, and no part of a prefix pays where all of it does
not. `pays` compares integers, so it holds this to the last bit, and `least_tokens` searches with `pays` itself: the
verdict that a person reads and the decision that a connector takes cannot differ.

The prefill rate is one number. Attention makes the later tokens of a long prompt dearer, so a rate that was measured at
short prompts errs towards computing; whoever gives it measures it at the length that matters. What a link's rate is,
this module does not know: it is measured (cli/breakeven.py) or learnt (client/bandwidth.py).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from kvcluster.core import limits
from kvcluster.core.miss import Miss, MissReason
from kvcluster.core.spec import KVSpec, Part
from kvcluster.errors import CallerError

_SECOND_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class LinkRate:
    """How fast loads come over one way: after `fixed_ns`, whatever they carry, `bytes_per_s`, which is at least 1."""

    fixed_ns: int
    bytes_per_s: int

    def __post_init__(self) -> None:
        assert self.fixed_ns >= 0 and self.bytes_per_s >= 1

    @classmethod
    def through(cls, small: tuple[int, int], large: tuple[int, int]) -> LinkRate:
        """From two loads, each its bytes and the nanoseconds that it took.

        Where they cannot be told apart, or noise leaves less than nothing for the fixed time, all of the larger one's
        time is taken for that of its bytes.
        """
        (small_bytes, small_ns), (large_bytes, large_ns) = small, large
        more, longer = large_bytes - small_bytes, large_ns - small_ns
        if more > 0 and longer > 0:
            fixed_ns = small_ns - small_bytes * longer // more
            if fixed_ns >= 0:
                return cls(fixed_ns, max(1, more * _SECOND_NS // longer))
        return cls(0, max(1, large_bytes * _SECOND_NS // max(1, large_ns)))

    def load_ns(self, nbytes: int) -> int:
        """How long a load of so many bytes takes."""
        return self.fixed_ns + -(-nbytes * _SECOND_NS // self.bytes_per_s)


@dataclass(frozen=True, slots=True)
class Breakeven:
    """Loading against computing, for one worker's parts of one spec. `parts` has an entry a group, None for what is not
    loaded here. Raises CallerError for a prefill rate that is no whole number of at least 1.

    Tokens count from where the engine's own KV ends, and whole blocks of them are loaded: what fills none is computed
    either way.
    """

    spec: KVSpec
    parts: Sequence[Part | None]
    prefill_tokens_per_s: int

    def __post_init__(self) -> None:
        assert len(self.parts) == len(self.spec.groups)
        rate = self.prefill_tokens_per_s
        if type(rate) is not int or rate < 1:
            raise CallerError(f"the prefill rate is a whole number of tokens a second, at least 1, not {rate!r}")

    def nbytes(self, tokens: int) -> int:
        """What a load of so many tokens moves."""
        spec, blocks = self.spec, self._blocks(tokens)
        return sum(
            group.reuse.blocks_needed(blocks, spec.block_tokens) * spec.page_bytes(number, part)
            for number, (group, part) in enumerate(zip(spec.groups, self.parts, strict=True))
            if part is not None
        )

    def prefill_ns(self, tokens: int) -> int:
        """How long computing the same tokens takes."""
        return self._blocks(tokens) * self.spec.block_tokens * _SECOND_NS // self.prefill_tokens_per_s

    def pays(self, tokens: int, link: LinkRate) -> bool:
        """Is loading them faster than computing them? Not where both take as long."""
        saved = self._blocks(tokens) * self.spec.block_tokens * _SECOND_NS * link.bytes_per_s
        spent = link.fixed_ns * link.bytes_per_s + self.nbytes(tokens) * _SECOND_NS
        return spent * self.prefill_tokens_per_s < saved  # in seconds / (bytes_per_s * tokens_per_s * 10**9)

    def miss(self, tokens: int, link: LinkRate) -> Miss | None:
        """What a connector answers in place of a load that does not pay; None where it does."""
        if self.pays(tokens, link):
            return None
        load_ms, prefill_ms = link.load_ns(self.nbytes(tokens)) / 1e6, self.prefill_ns(tokens) / 1e6
        detail = f"{tokens:,} tokens load in {load_ms:,.1f} ms and are computed in {prefill_ms:,.1f} ms"
        return Miss(MissReason.SLOWER_THAN_RECOMPUTE, detail)

    def least_tokens(self, link: LinkRate) -> int | None:
        """From how many tokens on a load pays, whole blocks; None where it never does within the longest sequence."""
        step = self.spec.block_tokens
        blocks = range(1, limits.TOKENS_PER_SEQUENCE // step + 1)
        at = bisect_left(blocks, True, key=lambda count: self.pays(count * step, link))
        return blocks[at] * step if at < len(blocks) else None

    def _blocks(self, tokens: int) -> int:
        assert tokens >= 0
        return tokens // self.spec.block_tokens
