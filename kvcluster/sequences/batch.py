"""A batch of sequences: a step of all of them in one call, as engines decode.

batch = SequenceBatch([first, second])
batch.append(layer, k, v)                # one token of each, or `tokens` of them, row after row
out = batch.attend(layer, q)             # pages that rows share are read once
batch.advance([[5], [9]])
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Tokens
from typing import TYPE_CHECKING

from kvcluster.errors import CallerError
from kvcluster.sequences.row_operations import SequenceRow
from kvcluster.sequences.sequence import Sequence, check_number, checked_ids
from kvcluster.sequences.state import SequenceState
from kvcluster.sequences.statistics import AttendExplanation
from kvcluster.sequences.step_lock import whole
from kvcluster.transfers.layouts import kind_of
from kvcluster.transfers.long_chains import TokenIds
from kvcluster.transfers.unpicklable import Unpicklable

if TYPE_CHECKING:
    from torch import Tensor

    from kvcluster.sequences.attend_planner import AttendPlanner
    from kvcluster.sequences.batch_attention import BatchAttention


@whole
class SequenceBatch(Unpicklable):
    """A step of several sequences in one call each.

        with client.sequence() as first, client.sequence() as second:
            batch = kvcluster.SequenceBatch([first, second])
            for layer in range(2):
                batch.append(layer, k, v)                    # one row after another, equally many tokens of each
            batch.advance([token_ids[:32], token_ids[32:]])

    Different sequences of one client, as the rows of each call. One thread at a time may use it or any of its
    sequences. Raises CallerError for no sequence, one twice, or sequences of two clients."""

    def __init__(self, sequences: Tokens[Sequence]) -> None:
        self.sequences = tuple(sequences)
        if not self.sequences or any(not isinstance(sequence, Sequence) for sequence in self.sequences):
            raise CallerError("a batch needs at least one sequence, each made by client.sequence")
        self._resources = self.sequences[0].resources
        if any(sequence.resources is not self._resources for sequence in self.sequences):
            raise CallerError("the sequences of a batch must be of one client")
        if len(dict.fromkeys(self.sequences)) < len(self.sequences):
            raise CallerError("a sequence is named twice in one batch: fork it")
        self._runner = self._resources.runner
        self._rows = self._resources.rows
        self._attention: BatchAttention | None = None

    def __repr__(self) -> str:
        return f"<SequenceBatch of {len(self)} sequences>"

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each row that count."""
        return [sequence.length for sequence in self.sequences]

    def __enter__(self) -> SequenceBatch:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes all of its sequences."""
        for sequence in self.sequences:
            sequence.close()

    def append(self, layer: int, k: Tensor, v: Tensor | None = None, *, tokens: Tokens[int] | None = None) -> None:
        """As Sequence.append for each row: `k` and `v` are `[tokens, kv_heads, head_dim]` with the tokens of all rows,
        one row after another: `tokens[i]` of row i, by default equally many. If it raises, no row has changed."""
        states, values = self._states(), self._runner.memory.checked(layer, [k] if v is None else [k, v])
        counts = self._counts(len(values[0]), tokens)
        self._rows.append(states, layer, counts, values, self._resources.deadline(None))

    def reserve(self, tokens: int | Tokens[int]) -> None:
        """As Sequence.reserve for each row: `tokens` more tokens of each, or `tokens[i]` of row i. If it raises, no row
        has changed."""
        self._rows.reserve(self._states(), self._of_each("tokens", tokens), self._resources.deadline(None))

    def mark_written(self, tokens: int | Tokens[int], layer: int | None = None) -> None:
        """As Sequence.mark_written for each row: `tokens` tokens of each, or `tokens[i]` of row i. If it raises, no row
        has changed."""
        self._rows.mark_written(self._states(), layer, self._of_each("tokens", tokens))

    def advance(self, token_ids: int | Tokens[int | TokenIds]) -> None:
        """As Sequence.advance for each row: the token ids, or the number of tokens, of row i are `token_ids[i]`; one
        number is that of each row. If it raises, no row has changed."""
        states = self._states()
        rows = [token_ids] * len(states) if isinstance(token_ids, int) else token_ids
        if not isinstance(rows, Iterable):
            raise CallerError(f"advance got {kind_of(rows)}; expected the token ids of each row, or a number of tokens")
        ids = [checked_ids(each) for each in rows]
        if len(ids) != len(states):
            raise CallerError(f"advance got {len(ids)} rows; the batch has {len(states)}")
        self._runner.advance(states, ids, self._resources.deadline(None))

    def update(
        self, layer: int, k: Tensor, v: Tensor | None = None, *, tokens: Tokens[int] | None = None
    ) -> list[list[Tensor]]:
        """As Sequence.update for each row: appends as `append`, and returns what each row keeps of the layer. If it
        raises, no row has changed."""
        states, values = self._states(), self._runner.memory.checked(layer, [k] if v is None else [k, v])
        counts = self._counts(len(values[0]), tokens)
        return self._rows.update(states, layer, counts, values, self._resources.deadline(None))

    def read(
        self,
        layer: int,
        position: int | Tokens[int],
        tokens: int | Tokens[int] = 1,
        *,
        deadline_ms: float | None = None,
    ) -> list[list[Tensor]]:
        """As Sequence.read for each row: `tokens` tokens from `position` on, the same for all rows or one number for
        each."""
        return self._rows.read(layer, self._ranges(position, tokens), self._resources.deadline(deadline_ms))

    def write(
        self,
        layer: int,
        position: int | Tokens[int],
        k: Tensor,
        v: Tensor | None = None,
        *,
        tokens: Tokens[int] | None = None,
    ) -> None:
        """As Sequence.write for each row, from `position` on, or `position[i]` of row i: `k` and `v` are as in
        `append`. If it raises, no row has changed."""
        values = self._runner.memory.checked(layer, [k] if v is None else [k, v])
        rows = self._ranges(position, self._counts(len(values[0]), tokens))
        self._rows.write(layer, rows, values, self._resources.deadline(None))

    def load(
        self,
        position: int | Tokens[int] = 0,
        tokens: int | Tokens[int] | None = None,
        *,
        deadline_ms: float | None = None,
    ) -> None:
        """As Sequence.load for each row: by default all tokens from `position` on. Blocks that rows share are loaded
        once, and all are there together."""
        starts = self._of_each("position", position)
        if tokens is None:
            tokens = [max(0, row.length - start) for row, start in zip(self.sequences, starts, strict=True)]
        self._rows.load(self._ranges(starts, tokens), self._resources.deadline(deadline_ms))

    def truncate(self, tokens: int | Tokens[int], *, deadline_ms: float | None = None) -> None:
        """As Sequence.truncate for each row: to `tokens` tokens, or row i to `tokens[i]`. If it raises, no row has
        changed."""
        counts = self._of_each("tokens", tokens)
        self._rows.truncate(self._states(), counts, self._resources.deadline(deadline_ms))

    def reset(self) -> None:
        """Drops all tokens of all rows."""
        self.truncate(0)

    def fork(self) -> SequenceBatch:
        """Returns a batch of forks of all rows. Raises CallerError in the middle of a step; then there are none."""
        client = self.sequences[0].client
        return SequenceBatch([Sequence(self._resources, child, client) for child in self._rows.fork(self._states())])

    def flush(self, *, deadline_ms: float | None = None) -> bool:
        """As Sequence.flush for all rows together."""
        return self._rows.flush(self._states(), self._resources.deadline(deadline_ms))

    def attend(
        self,
        layer: int,
        query: Tensor,
        *,
        tokens: Tokens[int] | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        window: int | None = None,
        sinks: Tensor | None = None,
        latent_values: int | None = None,
        threads: int = 1,
        planner: AttendPlanner | None = None,
        deadline_ms: float | None = None,
    ) -> Tensor:
        """As Sequence.attend for each row: `query` is `[tokens, heads, head_dim]` with the tokens of all rows, one row
        after another: `tokens[i]` of row i, by default equally many."""
        from kvcluster.sequences.batch_attention import BatchAttention, Scores
        from kvcluster.transfers.tensors import as_tensor

        query = as_tensor(query, "the query")
        states = self._states()
        if self._attention is None:
            self._attention = BatchAttention(states, self._resources)
        counts = self._counts(len(query), tokens)
        scores = Scores(scale, softcap, window, sinks, latent_values)
        deadline = self._resources.deadline(deadline_ms)
        return self._attention.attend(layer, query, counts, scores, threads, deadline, planner)

    def explain_attention(self) -> AttendExplanation:
        """As Sequence.explain_attention, for all rows."""
        if self._attention is None:
            return AttendExplanation((), "")
        return self._attention.explain()

    def missing(self, *, deadline_ms: float | None = None) -> list[list[range]]:
        """As Sequence.missing for each row. Blocks that rows share are looked for once."""
        states = self._states()
        return self._resources.missing.of(states, self._resources.deadline(deadline_ms))

    def _states(self) -> list[SequenceState]:
        return [sequence.checked() for sequence in self.sequences]

    def _of_each(self, what: str, given: int | Tokens[int]) -> list[int]:
        """Returns a number for each row: the same one, or those given. Raises CallerError for others."""
        numbers = [given] * len(self) if isinstance(given, int) else list(given)
        if len(numbers) != len(self):
            raise CallerError(f"{what} has {len(numbers)} numbers; the batch has {len(self)} rows")
        for number in numbers:
            check_number(what, number)
        return numbers

    def _ranges(self, position: int | Tokens[int], tokens: int | Tokens[int]) -> list[SequenceRow]:
        starts, counts = self._of_each("position", position), self._of_each("tokens", tokens)
        each = zip(self._states(), starts, counts, strict=True)
        return [SequenceRow(state, range(start, start + count)) for state, start, count in each]

    def _counts(self, total: int, tokens: Tokens[int] | None) -> list[int]:
        rows = len(self.sequences)
        if tokens is None:
            if total % rows:
                raise CallerError(f"{total} tokens are not equally many for {rows} rows: name the `tokens` of each")
            return [total // rows] * rows
        counts = list(tokens)
        if len(counts) != rows or sum(counts) != total or any(type(count) is not int or count < 0 for count in counts):
            raise CallerError(f"tokens is {counts}; expected {rows} numbers that add up to {total}")
        return counts
