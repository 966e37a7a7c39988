"""A sequence: KV that grows token by token, as one tensor for its user, wherever its pages lie.

    with client.sequence(prompt) as seq:         # begins with the cached prefix: seq.length tokens are there already
        seq.append(layer, k, v)                  # [tokens, kv_heads, head_dim], for every layer
        seq.advance(token_ids)                   # now they count
        out = seq.attend(layer, q)               # each token of q sees all up to itself, wherever they lie
        k, v = seq.read(layer, 0, seq.length)
        draft = seq.fork(); seq.truncate(n)

What was appended lies in the resident set of the client, in pages that forks share. Full blocks behind the tail are
sealed and stored in the background, so that other workers find them; then their pages may be used for others, and the
blocks are loaded again when they are read. No step waits for the cluster, unless the resident set is full of blocks
that are not stored yet.

A worker that dies loses what was not sealed. A block that the cluster has lost meanwhile, and that has left the
resident set, is lost too: LostTokens names the first token of it, and `missing` all that has to be computed again.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence as Tokens
from typing import TYPE_CHECKING, Any

from kvcluster.core import limits
from kvcluster.errors import CallerError
from kvcluster.sequences.row_operations import SequenceRow
from kvcluster.sequences.state import SequenceState
from kvcluster.sequences.statistics import AttendExplanation, SequenceUse, sequence_use
from kvcluster.sequences.step_lock import whole
from kvcluster.sequences.window_policy import WindowPolicy
from kvcluster.transfers.layouts import kind_of
from kvcluster.transfers.long_chains import TokenIds
from kvcluster.transfers.unpicklable import Unpicklable
from kvcluster.transport.forks import OwnProcess

if TYPE_CHECKING:
    from torch import Tensor

    from kvcluster.sequences.attend_planner import AttendPlanner
    from kvcluster.sequences.batch_attention import BatchAttention
    from kvcluster.sequences.resources import SequenceResources
    from kvcluster.sequences.runner import SequenceRunner


@whole
class Sequence(Unpicklable):
    """One sequence of a client. Made by `client.sequence`; a context manager. One thread at a time may use a sequence;
    several sequences of one client may be used by several threads. A forked child cannot use it. It keeps its pages
    until it is closed; one that is collected without that is closed then, with a ResourceWarning.

        with client.sequence() as sequence:
            for layer in range(2):
                sequence.append(layer, k, v)                 # [tokens, kv_heads, head_dim]
                seen = sequence.attend(layer, q)             # [tokens, heads, head_dim]
            sequence.advance(token_ids)                      # now these tokens count
    """

    def __init__(self, resources: SequenceResources, state: SequenceState, client: object) -> None:
        """`client` is not collected before this."""
        self.client = client
        self._process = OwnProcess()
        self.resources = resources
        self._state = state
        self._runner = resources.runner
        self._rows = resources.rows
        self._deadline = resources.deadline
        self._attention: BatchAttention | None = None
        self._unclosed = weakref.finalize(self, _abandon, self._process, self._runner, state)
        self._unclosed.atexit = False

    def __repr__(self) -> str:
        return f"<Sequence of {self.length:,} tokens{', closed' if self.closed else ''}>"

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
        """Whether no token counts yet."""
        return not self._state.length

    @property
    def capacity(self) -> int:
        """The most tokens that it may have, or keep if it drops the oldest (`max_tokens`)."""
        return self._state.max_tokens

    @property
    def remaining(self) -> int:
        """The most tokens that may follow the present ones: up to `capacity`, or with `drop_oldest` up to the last
        position."""
        state = self._state
        if state.drop_oldest:
            return limits.TOKENS_PER_SEQUENCE - state.length - state.step
        return state.max_tokens - state.length - state.step

    @property
    def reserved(self) -> int:
        """The number of tokens that can be appended, or written by another writer, without another page."""
        with self._runner.lock:
            return self._state.reserved

    @property
    def positions(self) -> Tensor:
        """The positions of the tokens that are kept, those of the present step included: int64 `[tokens]`, all but the
        `dropped` ones."""
        import torch

        kept = self._state.kept(self._state.length + self._state.step)
        return torch.cat([torch.arange(0), *(torch.arange(span.start, span.stop) for span in kept)])

    @property
    def dropped(self) -> range:
        """The positions that were dropped, to make room: they are not attended to. Empty without `drop_oldest`."""
        return self._state.dropped_tokens

    @property
    def policy(self) -> WindowPolicy:
        """What stays in the resident set, and how. May be set at any time; it applies to tokens that leave the tail
        from then on."""
        return self._state.policy

    @policy.setter
    def policy(self, policy: WindowPolicy) -> None:
        if not isinstance(policy, WindowPolicy):
            raise CallerError(f"policy is {policy!r}; expected a WindowPolicy")
        state = self.checked()
        with self._runner.lock:
            self._runner.machine.set_policy(state, policy)

    @property
    def block_table(self) -> Tensor:
        """The page of `resident_pages` that holds each block, int32, in memory that is never moved and is updated in
        place: negative for a block that is not there as a raw page. What lies behind the last block means nothing."""
        import torch

        return torch.frombuffer(self._state.table.memory, dtype=torch.int32)

    @property
    def resident_pages(self) -> Tensor:
        """The resident set of the client, `[pages, layers, planes, block_tokens, heads, dim]`, in memory that is never
        moved. Only what a sequence has reserved may be written, behind its last token (`mark_written`). Raises
        CallerError if the planes have different dims: then `resident_planes` has them."""
        return self._runner.memory.tensor.detach()  # whatever is written into it makes this alias alone part of a graph

    @property
    def resident_planes(self) -> list[Tensor]:
        """The resident set of the client as a tensor for each plane, `[pages, layers, block_tokens, heads, dim]`, over
        the same memory as `resident_pages`."""
        return [plane.detach() for plane in self._runner.memory.planes]

    @property
    def sealed(self) -> int:
        """The number of tokens whose blocks are sealed: they are stored, or will be."""
        return self._state.sealed * self._state.block_tokens

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._state.closed

    def statistics(self) -> SequenceUse:
        """Returns how many of its tokens are sealed, stored, resident and private."""
        self._process.check("sequence")
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
        state = self.checked()
        values = self._runner.memory.checked(layer, [k] if v is None else [k, v])
        self._rows.append([state], layer, [len(values[0])], values, self._deadline(None))

    def advance(self, token_ids: int | TokenIds) -> None:
        """Makes the tokens of this step count. Blocks whose token ids are given can be found by other workers; if only
        their number is given, they and all blocks after them stay this sequence's own. Blocks that leave the tail are
        encoded, if the policy has a codec for them.

        Raises CallerError if not every layer has appended as many tokens, or for something that is no token id;
        ResidentSetFull. Nothing is changed then.
        """
        state, ids = self.checked(), checked_ids(token_ids)
        self._runner.advance([state], [ids], self._deadline(None))

    def update(self, layer: int, k: Tensor, v: Tensor | None = None) -> list[Tensor]:
        """Appends as `append`, and returns all K and V of the layer, the new tokens included: `[tokens, kv_heads,
        head_dim]` each, copied. After tokens were dropped these are the kept ones, whose positions are `positions`.
        Raises as `append` and `read`. Nothing is changed then."""
        state = self.checked()
        values = self._runner.memory.checked(layer, [k] if v is None else [k, v])
        return self._rows.update([state], layer, [len(values[0])], values, self._deadline(None))[0]

    def reserve(self, tokens: int) -> None:
        """Takes the pages that `tokens` more tokens need, between two steps, so that appending them cannot fail for
        want of room. A fork does not get them, and the first of both that appends to a block that they share needs one
        page more. Raises as `append`."""
        check_number("reserve", tokens)
        self._rows.reserve([self.checked()], [tokens], self._deadline(None))

    def mark_written(self, tokens: int, layer: int | None = None) -> None:
        """Takes the next `tokens` tokens, which another writer has written into reserved pages, as appended: to one
        layer, or by default to all. Then `attend` and `read` see them, and `advance` makes them count.

        The writer, a kernel or a captured graph, finds the page of position p in `block_table` at p // block_tokens,
        and writes its K and V into `resident_pages` at [page, layer, plane, p % block_tokens].

        Raises CallerError as `append`, and for more tokens than are `reserved`. Nothing is changed then.
        """
        check_number("mark_written", tokens)
        self._rows.mark_written([self.checked()], layer, [tokens])

    # ------------------------------------------------------------------------------------ reading and overwriting

    def read(self, layer: int, position: int, tokens: int = 1, *, deadline_ms: float | None = None) -> list[Tensor]:
        """Returns a copy of `tokens` tokens of one layer from `position` on: `[tokens, kv_heads, head_dim]` for each
        plane. Raises CallerError for positions that it does not have; ResidentSetFull; LostTokens."""
        return self._rows.read(layer, [self._row(position, tokens)], self._deadline(deadline_ms))[0]

    def write(self, layer: int, position: int, k: Tensor, v: Tensor | None = None) -> None:
        """Overwrites tokens of one layer from `position` on, as `append`. Their blocks, and all blocks after them, are
        this sequence's own from now on. Raises as `append` and `read`. Nothing is changed then."""
        self.checked()
        values = self._runner.memory.checked(layer, [k] if v is None else [k, v])
        self._rows.write(layer, [self._row(position, len(values[0]))], values, self._deadline(None))

    def load(self, position: int = 0, tokens: int | None = None, *, deadline_ms: float | None = None) -> None:
        """Loads `tokens` tokens from `position` on, by default all behind it, into the resident set, where they stay
        until their pages are needed for others. Raises as `read`."""
        tokens = max(0, self.length - position) if tokens is None else tokens
        self._rows.load([self._row(position, tokens)], self._deadline(deadline_ms))

    def missing(self, *, deadline_ms: float | None = None) -> list[range]:
        """Returns the ranges of positions whose tokens are lost, in order: neither the resident set has them, nor a
        shard that answers. Nothing is loaded. A fork that is truncated to the start of a range may compute it again,
        with its token ids, and `flush`; then this sequence can load it, too. Private tokens have to be truncated.

        Raises Unreachable if the coordinator does not answer by the deadline, or has restarted and does not know all
        blocks by then.
        """
        return self.resources.missing.of([self.checked()], self._deadline(deadline_ms))[0]

    # ----------------------------------------------------------------------------------------------- attention

    def attend(
        self,
        layer: int,
        query: Tensor,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        window: int | None = None,
        sinks: Tensor | None = None,
        latent_values: int | None = None,
        threads: int = 1,
        planner: AttendPlanner | None = None,
        deadline_ms: float | None = None,
    ) -> Tensor:
        """Attends with the last tokens that this layer has, those of the present step included: `query` is
        `[tokens, heads, head_dim]` for the last `tokens` of them, each of which sees all tokens up to itself. Returns
        `[tokens, heads, head_dim]` in the query's dtype, computed in float32.

        Pages are read where they lie: in the resident set, or in shards of this host, raw or encoded. Others are loaded
        into the resident set, and the next layer is on its way while this one is attended to. Blocks without room there
        are streamed: only this layer of them is loaded, in parts, each by a deadline of its own, and nothing is kept.
        The bits of the result do not depend on where pages lie (docs/attention.md).

        With a `planner` (ShipAbsent), spans that a shard has may be attended to there: the query goes to it, and
        results come back, so they need no room here. The bits are the same. If a shard fails, another that has the
        pages is asked, or they are loaded.

        `scale` defaults to head_dim ** -0.5; `softcap`, `window` and learned `sinks`, `[heads]`, are explained there.
        Of a latent plane (MLA) the first `latent_values` channels are the values, so the result has as many.

        Raises CallerError for a query that does not fit; ResidentSetFull if tokens have to be loaded, and there is no
        room for one layer of some 1,024 of them; LostTokens if the cluster has lost some, or they do not arrive by the
        deadline.
        """
        from kvcluster.sequences.batch_attention import BatchAttention, Scores
        from kvcluster.transfers.tensors import as_tensor

        state, query = self.checked(), as_tensor(query, "the query")
        if self._attention is None:
            self._attention = BatchAttention([state], self.resources)
        counts = [len(query)] if query.shape else [0]
        scores = Scores(scale, softcap, window, sinks, latent_values)
        return self._attention.attend(layer, query, counts, scores, threads, self._deadline(deadline_ms), planner)

    def explain_attention(self) -> AttendExplanation:
        """Returns where the spans of the last step that had a planner were attended to, and why: printable."""
        if self._attention is None:
            return AttendExplanation((), "")
        return self._attention.explain()

    # ------------------------------------------------------------------------------------ cutting and sharing

    def truncate(self, tokens: int, *, deadline_ms: float | None = None) -> None:
        """Keeps the first `tokens` tokens, and drops those of the present step. Within the tail nothing but this
        process takes part; a sealed block that is cut is loaded if it has left the resident set. Raises CallerError
        if there are fewer tokens; ResidentSetFull; LostTokens. Nothing is changed then."""
        check_number("truncate", tokens)
        self._rows.truncate([self.checked()], [tokens], self._deadline(deadline_ms))

    def reset(self) -> None:
        """Drops all tokens."""
        self.truncate(0)

    def fork(self) -> Sequence:
        """Returns another sequence with the same tokens, which shares their pages. Either may be changed without a
        change to the other. Raises CallerError in the middle of a step."""
        (child,) = self._rows.fork([self.checked()])
        return Sequence(self.resources, child, self.client)

    def flush(self, *, deadline_ms: float | None = None) -> bool:
        """Seals all full blocks, the tail's included, and waits until they are stored and other workers find them.
        Returns False if the deadline passes first or a store has failed."""
        return self._rows.flush([self.checked()], self._deadline(deadline_ms))

    def close(self) -> None:
        """Ends the sequence; its forks stay open. Blocks that other workers can find stay cached, and are still stored
        if they were sealed; its own are erased. May be called again. In a forked child it does nothing."""
        if not self._process.forked:
            self._unclosed.detach()
            with self._runner.lock:
                self._runner.close_sequences([self._state])

    def __enter__(self) -> Sequence:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------- helpers

    def checked(self) -> SequenceState:
        """Returns its state. Raises CallerError if it is closed, or that of the process from which this one was
        forked."""
        self._process.check("sequence")
        if self._state.closed:
            raise CallerError("this sequence is closed")
        self._runner.lock.check()
        return self._state

    def _row(self, position: int, tokens: int) -> SequenceRow:
        check_number("position", position)
        check_number("tokens", tokens)
        return SequenceRow(self.checked(), range(position, position + tokens))


def _abandon(process: OwnProcess, runner: SequenceRunner, state: SequenceState) -> None:
    """A sequence was collected that was not closed. Its client may have closed it."""
    if not (process.forked or state.closed):
        runner.abandon(state)
        text = f"a sequence of {state.length:,} tokens was not closed: close it, or open it by `with`"
        warnings.warn(text, ResourceWarning, stacklevel=2)


def check_number(what: str, value: Any) -> None:
    """Raises CallerError for what is no number of tokens."""
    if type(value) is not int or value < 0:
        raise CallerError(f"{what} is {value!r} ({kind_of(value)}); expected a number of tokens, 0 or more")


def checked_ids(token_ids: Any) -> int | Tokens[int]:
    """Returns token ids, or their number, as given to `advance`. Raises CallerError for something else."""
    to_list = getattr(token_ids, "tolist", None)
    ids: int | Tokens[int] = token_ids if to_list is None else to_list()
    if isinstance(ids, bool) or (isinstance(ids, int) and ids < 0):
        raise CallerError(f"advance got {ids!r}; expected token ids, or their number")
    return ids
