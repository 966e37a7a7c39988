"""A sequence: KV that grows token by token, as one tensor for its user, whatever lies where.

    seq = client.sequence(prompt)            # begins with the cached prefix: seq.length tokens are there already
    seq.append(layer, k, v)                  # [tokens, kv_heads, head_dim], for every layer
    seq.advance(token_ids)                   # now they count
    k, v = seq.read(layer, 0, seq.length)
    draft = seq.fork(); seq.truncate(n); seq.close()

What was appended lies in the resident set of the client, in pages that forks share. Full blocks behind the tail are
sealed and stored in the background, so that other workers find them; then their pages may be used for others, and the
blocks come back when they are read. Nothing of a step waits for the cluster, unless the resident set is full of
blocks that are not stored yet.

A worker that dies loses what was not sealed. A block that the cluster has lost meanwhile, and that has left the
resident set, is lost too: LostTokens says from which token on the sequence has to be computed again.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from typing import TYPE_CHECKING, Any, TypeVar

from kvcluster.client.sequences.runner import SequenceRunner
from kvcluster.client.sequences.state import SequenceState
from kvcluster.client.sequences.statistics import SequenceUse, sequence_use
from kvcluster.client.validation import kind_of
from kvcluster.core.ids import SEQUENCE_BYTES, SequenceId
from kvcluster.errors import CallerError
from kvcluster.transport.base import Deadline

if TYPE_CHECKING:
    from torch import Tensor

R = TypeVar("R")


def random_name() -> SequenceId:
    """Returns a new name for a sequence."""
    return SequenceId(os.urandom(SEQUENCE_BYTES))


class Sequence:
    """One sequence of a client. Made by `client.sequence`; a context manager. One thread at a time may use a sequence;
    several sequences of one client may be used by several threads."""

    def __init__(
        self, runner: SequenceRunner, state: SequenceState, deadline: Callable[[float | None], Deadline]
    ) -> None:
        self._runner = runner
        self._state = state
        self._deadline = deadline

    # ---------------------------------------------------------------------------------------- what it is

    @property
    def length(self) -> int:
        """The number of tokens that count: `advance` has confirmed them, or they were cached."""
        return self._state.length

    @property
    def position(self) -> int:
        """The position of the next token."""
        return self._state.length

    @property
    def is_empty(self) -> bool:
        return not self._state.length

    @property
    def capacity(self) -> int:
        """The most tokens that it may have (`max_tokens`)."""
        return self._state.max_tokens

    @property
    def sealed(self) -> int:
        """The number of tokens whose blocks are sealed: they are stored, or will be."""
        return self._state.sealed * self._state.block_tokens

    @property
    def closed(self) -> bool:
        return self._state.closed

    def statistics(self) -> SequenceUse:
        """Returns how many of its tokens are sealed, stored, resident and private."""
        with self._runner.lock:
            return sequence_use(self._state)

    # ------------------------------------------------------------------------------------------ growing

    def append(self, layer: int, k: Tensor, v: Tensor | None = None) -> None:
        """Appends tokens to one layer: `k` and `v`, `[tokens, kv_heads, head_dim]` of the spec's dtype; `v` is left out
        if the spec has one plane. Every layer appends as many, once; then `advance` makes them count.

        Raises CallerError for tensors that do not fit, or a second append of a layer in one step; LimitError beyond
        `capacity`; ResidentSetFull if the resident set has no page and gets none by the deadline. Nothing is changed
        then.
        """
        state, values = self._checked(), [k] if v is None else [k, v]
        runner = self._runner
        with runner.lock:
            tokens = runner.memory.checked(layer, values)
            runs, copies = self._room(lambda: runner.machine.begin_step(state, layer, tokens))
            runner.memory.copy(copies)
            runner.memory.write(layer, runs, values)

    def advance(self, token_ids: int | Tokens[int]) -> None:
        """Makes the tokens of this step count. Blocks whose token ids are given can be found by other workers; if only
        their number is given, they and all blocks after them stay this sequence's own.

        Raises CallerError if not every layer has appended as many tokens, or for something that is no token id.
        """
        state = self._checked()
        to_list = getattr(token_ids, "tolist", None)
        ids = token_ids if to_list is None else to_list()
        if isinstance(ids, bool) or (isinstance(ids, int) and ids < 0):
            raise CallerError(f"advance got {ids!r}; expected token ids, or their number")
        with self._runner.lock:
            if self._runner.machine.advance(state, ids):
                self._runner.keeper.sealed(state)
                self._runner.wake()

    def update(self, layer: int, k: Tensor, v: Tensor | None = None) -> list[Tensor]:
        """Appends as `append`, and returns all K and V of the layer, the new tokens included: `[length, kv_heads,
        head_dim]` each, copied."""
        self.append(layer, k, v)
        return self.read(layer, 0, self._state.length + self._state.step)

    def reserve(self, tokens: int) -> None:
        """Takes the pages that `tokens` more tokens need, so that appending them cannot fail for want of room. Raises
        as `append`."""
        state = self._checked()
        _check_number("reserve", tokens)
        with self._runner.lock:
            self._runner.memory.copy(self._room(lambda: self._runner.machine.reserve(state, tokens)))

    # ------------------------------------------------------------------------------------ reading and overwriting

    def read(self, layer: int, position: int, tokens: int = 1, *, deadline_ms: float | None = None) -> list[Tensor]:
        """Returns a copy of `tokens` tokens of one layer from `position` on: `[tokens, kv_heads, head_dim]` for each
        plane. Raises CallerError for positions that it does not have; ResidentSetFull; LostTokens."""
        state = self._checked()
        self._check_range(layer, position, tokens, state.length + (state.step if layer in state.appended else 0))
        self._bring(position, tokens, deadline_ms)
        with self._runner.lock:
            return self._runner.memory.read(layer, self._runner.machine.runs(state, position, tokens))

    def write(self, layer: int, position: int, k: Tensor, v: Tensor | None = None) -> None:
        """Overwrites tokens of one layer from `position` on, as `append`. Their blocks, and all blocks after them, are
        this sequence's own from now on. Raises as `append` and `read`."""
        state, values = self._checked(), [k] if v is None else [k, v]
        runner = self._runner
        tokens = runner.memory.checked(layer, values)
        self._check_range(layer, position, tokens, state.length)
        if not tokens:
            return
        self._bring(position, state.length - position, None)
        with runner.lock:
            copies = self._room(lambda: runner.machine.own(state, position))
            runner.memory.copy(copies)
            runner.memory.write(layer, runner.machine.runs(state, position, tokens), values)
            runner.keeper.cut(state)
            runner.wake()

    # ------------------------------------------------------------------------------------ cutting and sharing

    def truncate(self, tokens: int, *, deadline_ms: float | None = None) -> None:
        """Keeps the first `tokens` tokens, and drops those of the present step. Within the tail nothing but this
        process takes part; a sealed block that is cut is loaded if it has left the resident set. Raises CallerError
        if there are fewer tokens; ResidentSetFull; LostTokens. Nothing is changed then."""
        state, runner = self._checked(), self._runner
        _check_number("truncate", tokens)
        with runner.lock:
            cut = runner.machine.unsealed_by(state, tokens) if tokens <= state.length else []
        if cut:
            runner.bring(state, [block.depth for block in cut], self._deadline(deadline_ms))
        with runner.lock:
            runner.memory.copy(self._room(lambda: runner.machine.truncate(state, tokens)))
            runner.keeper.cut(state)
            runner.wake()

    def reset(self) -> None:
        """Drops all tokens."""
        self.truncate(0)

    def fork(self) -> Sequence:
        """Returns another sequence with the same tokens, which shares their pages. Either may be changed without a
        change to the other. Raises CallerError in the middle of a step."""
        state, runner = self._checked(), self._runner
        with runner.lock:
            child = runner.machine.fork(state, random_name())
            runner.keeper.opened(child, state)
            runner.wake()
        return Sequence(runner, child, self._deadline)

    def flush(self, *, deadline_ms: float | None = None) -> bool:
        """Seals all full blocks, the tail's included, and waits until they are stored and other workers find them.
        Returns False if the deadline comes first or a store has failed."""
        state, runner, deadline = self._checked(), self._runner, self._deadline(deadline_ms)
        with runner.lock:
            if runner.machine.seal(state, all_full=True):
                runner.keeper.sealed(state)
            stored = runner.wait_for_stores(lambda: runner.machine.is_stored(state), deadline)
        return runner.flush_shards(deadline) and stored

    def close(self) -> None:
        """Ends the sequence; its forks stay open. Blocks that other workers can find stay cached, and are still stored
        if they were sealed; its own are erased. May be called again."""
        with self._runner.lock:
            if not self._state.closed:
                self._runner.keeper.closed(self._state)
                self._runner.machine.close(self._state)
                self._runner.wake()

    def __enter__(self) -> Sequence:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------- helpers

    def _checked(self) -> SequenceState:
        if self._state.closed:
            raise CallerError("this sequence is closed")
        return self._state

    def _room(self, call: Callable[[], R]) -> R:
        return self._runner.with_room(call, self._deadline(None))

    def _bring(self, position: int, tokens: int, deadline_ms: float | None) -> None:
        if tokens:
            block_tokens = self._state.block_tokens
            span = range(position // block_tokens, (position + tokens - 1) // block_tokens + 1)
            if self._state.absent(span):
                self._runner.bring(self._state, span, self._deadline(deadline_ms))

    def _check_range(self, layer: int, position: int, tokens: int, length: int) -> None:
        _check_number("position", position)
        _check_number("tokens", tokens)
        self._runner.memory.check_layer(layer)
        if position + tokens > length:
            raise CallerError(f"tokens {position} to {position + tokens} are not all there: layer {layer} has {length}")


def _check_number(what: str, value: Any) -> None:
    if type(value) is not int or value < 0:
        raise CallerError(f"{what} is {value!r} ({kind_of(value)}); expected a number of tokens, 0 or more")
