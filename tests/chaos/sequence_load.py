"""The sequences of a worker: opened, grown, forked, cut, overwritten, attended to and closed, in a random order.

What each holds is known (known_kv.py), so every read and every result of attention is compared with it to the last bit,
wherever the pages lay. A typed error that says that something is lost or full is a miss, and is counted; the sequence
has to be as it was then. Lost tokens are computed again in a fork, or truncated.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

import kvcluster
from kvcluster.client import Client
from kvcluster.errors import LostTokens, ResidentSetFull, Unreachable
from tests.chaos.content import PAGE_BYTES
from tests.chaos.judge import Caller, Journal
from tests.chaos.known_kv import (
    BLOCK_TOKENS,
    LAYERS,
    KnownText,
    drawn_kv,
    drawn_query,
    expected,
    known_prompt,
)

T = TypeVar("T")
RESIDENT_PAGES = 30
"""No more than one context: whatever else is open has to leave."""

SEQUENCE_CONFIG = {"resident_bytes": RESIDENT_PAGES * PAGE_BYTES}
_PROMPTS = 12
_TOKENS = 28 * BLOCK_TOKENS
"""Of a prompt: three and a half of the cuts that are shipped."""

_MOST_TOKENS = 32 * BLOCK_TOKENS
_OPEN = 3
_OTHER_MS = 10_000
"""What has no deadline of its own has that of the client's configuration."""

_STREAMED = 6
"""A call that streams has its deadline for each piece of the context: one for each half of its scratch pages, which are
a quarter of the resident set; one to borrow; and one to wait for room."""

MISSES = (LostTokens, ResidentSetFull, Unreachable)
"""What a call may raise: it says what is lost, full, or does not answer."""


class DrawnPlanner:
    """Chooses for each span by its positions and rows, the same each time."""

    name = "mixed"

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def choose(self, step: kvcluster.StepFacts) -> list[kvcluster.SpanChoice]:
        choices = list(kvcluster.SpanChoice)
        return [random.Random(f"{self._seed} {span.start} {span.rows}").choice(choices) for span in step.spans]


class OnePlanner:
    """Chooses the same for all spans."""

    def __init__(self, choice: kvcluster.SpanChoice) -> None:
        self.name = choice.name.lower()
        self._choice = choice

    def choose(self, step: kvcluster.StepFacts) -> list[kvcluster.SpanChoice]:
        return [self._choice for _ in step.spans]


@dataclass(eq=False)
class OpenSequence:
    """A sequence and what it holds. `private` is the first position that no fork can compute again."""

    sequence: kvcluster.Sequence
    text: KnownText
    private: int = _MOST_TOKENS


class SequenceLoad:
    """The sequences of one thread. `client` has SEQUENCE_SPEC and SEQUENCE_CONFIG."""

    def __init__(self, client: Client, journal: Journal, call: Caller, seed: int) -> None:
        self._client = client
        self._journal = journal
        self._caller = call
        self._random = random.Random(seed)
        self._open: list[OpenSequence] = []
        self._lost: dict[OpenSequence, int] = {}
        self._shipped = 0
        self._last: deque[str] = deque(maxlen=12)

    def step(self) -> None:
        """One operation."""
        if not self._open:
            self._begin()
            return
        what: Callable[[OpenSequence], object] = self._random.choices(
            [
                *(self._grow, self._attend, self._batch_step, self._fork, self._truncate, self._read),
                *(self._write, self._flush, self._missing, self._close),
            ],
            (30, 25, 10, 6, 6, 10, 2, 6, 4, 6),
        )[0]
        what(self._random.choice(self._open))
        for one in [*self._lost]:
            self._mend(one)
        shipped = self._client.shipped().messages
        self._journal.count("queries sent to shards", shipped - self._shipped)
        self._shipped = shipped
        for one in self._open:
            if one.sequence.length != len(one.text):
                self._wrong(f"a sequence of {one.sequence.length} tokens has to have {len(one.text)}")

    # ------------------------------------------------------------------------------------------ operations

    def _begin(self) -> None:
        """Opens a prompt, and computes what is not cached of it."""
        tokens = self._random.randint(1, _TOKENS)
        text = known_prompt(self._random.randrange(_PROMPTS), _TOKENS).cut(tokens)
        opened = self._call(
            "open", 2_000, lambda: self._client.sequence(text.tokens, max_tokens=_MOST_TOKENS, deadline_ms=2_000)
        )
        if opened is None:
            return
        cached = opened.length
        self._journal.count("sequence tokens that were cached", cached)
        self._journal.count("sequence tokens that were not", tokens - cached)
        if cached > tokens or cached % BLOCK_TOKENS:
            self._wrong(f"{cached} of {tokens} tokens were cached")
        one = OpenSequence(opened, text.cut(cached))
        self._open.append(one)
        while len(one.text) < tokens:
            more = text.tokens[len(one.text) : min(tokens, len(one.text) + 512)]
            if not self._grown(one, more, known=True):
                break

    def _grow(self, one: OpenSequence) -> None:
        """A step of a few tokens, or of one, whose ids are known or only their number."""
        count = min(self._random.choice((1, 1, 1, 5, 90)), _MOST_TOKENS - len(one.text))
        if count:
            ids = [self._random.randrange(2**31) for _ in range(count)]
            self._grown(one, ids, known=self._random.random() < 0.9)

    def _grown(self, one: OpenSequence, ids: tuple[int, ...] | list[int], *, known: bool) -> bool:
        """Every layer appends, and perhaps attends, then the tokens count. Returns whether they do."""
        begun, text = len(one.text), one.text.extended(ids)
        attends = self._random.random() < 0.5
        for layer in range(LAYERS):
            k, v = (text.plane(layer, plane, begun, len(text)) for plane in (0, 1))
            done = self._done("append", _OTHER_MS, lambda: one.sequence.append(layer, k, v))  # noqa: B023
            if not done or (attends and not self._attended(one, text, layer, min(4, len(ids)))):
                self._drop_step(one)
                return False
        if not self._done("advance", _OTHER_MS, lambda: one.sequence.advance(list(ids) if known else len(ids))):
            self._drop_step(one)
            return False
        if not known:
            one.private = min(one.private, begun // BLOCK_TOKENS * BLOCK_TOKENS)
        one.text = text
        return True

    def _attend(self, one: OpenSequence) -> None:
        """The last tokens attend once more."""
        if len(one.text):
            self._attended(
                one, one.text, self._random.randrange(LAYERS), self._random.randint(1, min(4, len(one.text)))
            )

    def _attended(self, one: OpenSequence, text: KnownText, layer: int, tokens: int) -> bool:
        """Attends with the last tokens. Returns whether there was a result."""
        query, window = drawn_query(self._random, tokens), self._random.choice((None, None, None, 700))
        planner, deadline_ms = self._planner(), self._random.choice((500, 2_000))
        out = self._call(
            f"attend, {planner.name if planner else 'no planner'}",
            _STREAMED * deadline_ms,
            lambda: one.sequence.attend(layer, query, window=window, planner=planner, deadline_ms=deadline_ms),
            lost=one,
        )
        if out is not None:
            self._compare("attend", out, expected(text, layer, query, window))
        return out is not None

    def _batch_step(self, _: OpenSequence) -> None:
        """A token of each sequence, in one call."""
        rows = [one for one in self._open if len(one.text) < _MOST_TOKENS]
        if not rows:
            return
        ids = [self._random.randrange(2**31) for _ in rows]
        texts = [one.text.extended([token]) for one, token in zip(rows, ids, strict=True)]
        batch, planner = kvcluster.SequenceBatch([one.sequence for one in rows]), self._planner()
        for layer in range(LAYERS):
            k, v = (
                torch.cat([each.plane(layer, plane, len(each) - 1, len(each)) for each in texts]) for plane in (0, 1)
            )
            query = drawn_query(self._random, len(rows))
            if not self._done("append of a batch", _OTHER_MS, lambda: batch.append(layer, k, v)):  # noqa: B023
                break
            out = self._call(
                f"attend of a batch, {planner.name if planner else 'no planner'}",
                _STREAMED * 2_000,
                lambda: batch.attend(layer, query, planner=planner, deadline_ms=2_000),  # noqa: B023
            )
            if out is None:
                self._lost.update((one, len(one.text)) for one in rows)
                break
            each = [expected(text, layer, query[at : at + 1], None) for at, text in enumerate(texts)]
            self._compare("attend of a batch", out, torch.cat(each))
        else:
            if self._done("advance of a batch", _OTHER_MS, lambda: batch.advance([[token] for token in ids])):
                for one, text in zip(rows, texts, strict=True):
                    one.text = text
                return
        for one in rows:
            self._drop_step(one)

    def _fork(self, one: OpenSequence) -> None:
        if len(self._open) >= _OPEN:
            self._close(self._random.choice([other for other in self._open if other is not one]))
        forked = self._call("fork", _OTHER_MS, one.sequence.fork)
        if forked is not None:
            self._open.append(OpenSequence(forked, one.text, one.private))

    def _truncate(self, one: OpenSequence) -> None:
        back = self._random.choice((3, 40, 600))
        self._cut(one, max(0, len(one.text) - self._random.randint(0, back)))

    def _read(self, one: OpenSequence) -> None:
        if not len(one.text):
            return
        layer, first = self._random.randrange(LAYERS), self._random.randrange(len(one.text))
        tokens = self._random.randint(1, min(400, len(one.text) - first))
        planes = self._call("read", 2_000, lambda: one.sequence.read(layer, first, tokens, deadline_ms=2_000), lost=one)
        for plane, values in enumerate(planes or ()):
            self._compare("read", values, one.text.plane(layer, plane, first, first + tokens))

    def _write(self, one: OpenSequence) -> None:
        """Overwrites tokens near the end."""
        tokens = min(len(one.text), 5)
        first, layer = len(one.text) - tokens, self._random.randrange(LAYERS)
        kv = drawn_kv(self._random, tokens)
        k, v = kv[:, 0].contiguous(), kv[:, 1].contiguous()
        if tokens and self._done("write", _OTHER_MS, lambda: one.sequence.write(layer, first, k, v), lost=one):
            one.text = one.text.overwritten(layer, first, kv)
            one.private = min(one.private, first // BLOCK_TOKENS * BLOCK_TOKENS)

    def _flush(self, one: OpenSequence) -> None:
        flushed = self._call("flush of a sequence", 2_000, lambda: one.sequence.flush(deadline_ms=2_000))
        if flushed is not None:
            self._journal.count("flush of a sequence: " + ("all is stored" if flushed else "not all"))

    def _missing(self, one: OpenSequence) -> None:
        """Computes again what is lost."""
        missing = self._call("missing", _OTHER_MS, lambda: one.sequence.missing(deadline_ms=_OTHER_MS))
        for lost in missing or ():
            if not 0 <= lost.start < lost.stop <= len(one.text):
                self._wrong(f"{lost} is missing of {len(one.text)} tokens")
            self._journal.count("sequence tokens that were missing", len(lost))
            if lost.stop > one.private:
                self._cut(one, min(lost.start, len(one.text)))
                return
            if not self._computed_again(one, lost):
                return

    def _close(self, one: OpenSequence) -> None:
        self._open.remove(one)
        self._done("close", 2_000, one.sequence.close)

    # --------------------------------------------------------------------------------------------- helpers

    def _computed_again(self, one: OpenSequence, lost: range) -> bool:
        """Computes a range of tokens in a fork, and stores it. Returns whether that was done."""
        fork = self._call("fork", _OTHER_MS, one.sequence.fork)
        if fork is None:
            return False
        again = OpenSequence(fork, one.text)
        try:
            done = self._cut(again, lost.start)
            for first in range(lost.start, lost.stop, 512):
                ids = one.text.tokens[first : min(lost.stop, first + 512)]
                done = done and len(again.text) == first and self._grown(again, ids, known=True)
            flushed = done and self._call("flush of a sequence", 2_000, lambda: fork.flush(deadline_ms=2_000))
            self._journal.count("lost range: " + ("computed again" if flushed else "not computed again"))
            return bool(flushed)
        finally:
            self._done("close", 2_000, fork.close)

    def _drop_step(self, one: OpenSequence) -> None:
        """Drops the tokens of a step that did not come to its end."""
        if not self._cut(one, len(one.text)) and one in self._open:
            self._close(one)

    def _cut(self, one: OpenSequence, tokens: int) -> bool:
        """Truncates a sequence. Returns whether that was done."""
        if not self._done("truncate", 2_000, lambda: one.sequence.truncate(tokens, deadline_ms=2_000), lost=one):
            return False
        one.text = one.text.cut(tokens)
        if tokens <= one.private:
            one.private = _MOST_TOKENS
        return True

    def _mend(self, one: OpenSequence) -> None:
        """Truncates a sequence to its first lost token, or computes again what is lost."""
        position = self._lost.pop(one, None)
        if position is None or one not in self._open:
            return
        if self._random.random() < 0.3:
            self._cut(one, min(position, len(one.text)))
        else:
            self._missing(one)

    def _call(
        self, name: str, deadline_ms: float, call: Callable[[], T], *, lost: OpenSequence | None = None
    ) -> T | None:
        """Returns what a call returns; None if it was a miss, or raised what it must not. The sequence that has `lost`
        tokens then is mended after this operation."""

        def tried() -> tuple[T | None, Exception | None]:
            try:
                return call(), None
            except MISSES as error:
                return None, error

        self._last.append(name)
        returned, miss = self._caller(name, deadline_ms, tried) or (None, None)
        if miss is not None:
            self._journal.count(f"{name}: {type(miss).__name__}")
            if isinstance(miss, LostTokens) and lost is not None:
                self._lost[lost] = miss.position
        elif returned is not None:
            self._journal.count(name)
        return returned

    def _done(
        self, name: str, deadline_ms: float, call: Callable[[], object], *, lost: OpenSequence | None = None
    ) -> bool:
        """As `_call` for one that returns nothing. Returns whether it returned."""

        def called() -> bool:
            call()
            return True

        return bool(self._call(name, deadline_ms, called, lost=lost))

    def _compare(self, what: str, found: Tensor, right: Tensor) -> None:
        self._journal.count("numbers of sequences compared", right.numel())
        if not torch.equal(found, right):
            differ = int((found != right).sum()) if found.shape == right.shape else -1
            self._wrong(f"{what}: {differ} of {right.numel()} numbers are wrong")

    def _wrong(self, what: str) -> None:
        self._journal.wrong(f"{what}; the last operations: {', '.join(self._last)}")

    def _planner(self) -> Any:
        ship, fetch, local = kvcluster.SpanChoice.SHIP, kvcluster.SpanChoice.FETCH, kvcluster.SpanChoice.LOCAL
        return self._random.choice(
            (None, OnePlanner(ship), OnePlanner(ship), OnePlanner(fetch), OnePlanner(local))
            + (DrawnPlanner(self._random.randrange(2**32)),) * 2
        )
