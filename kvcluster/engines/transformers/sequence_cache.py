"""A transformers cache whose KV lies in sequences of the cluster (docs/transformers.md).

A context may be many times larger than this process's memory for it.

    with SequenceCache.from_inputs(client, model, input_ids, attention_mask) as cache:
        cache.prefill(model, input_ids, attention_mask)
        with cache.attending(model):
            out = model.generate(input_ids, attention_mask=attention_mask, past_key_values=cache)

Each row of a batch is a `kvcluster.Sequence`: it begins with the cached prefix of its prompt, its full blocks are
stored in the background under their hashes, and what has left the resident set is borrowed or streamed while attention
reads it. Padding has no KV. Rows that beam search repeats are forks, which share what they have in common.

`check_attention` has each layer of a model ask for attention once, before anything starts, so that a model whose
attention cannot be computed over sequences is refused by name, and not in the middle of a generation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import kvcluster.sequences as kv
from kvcluster.client.client import Client
from kvcluster.client.metrics import watch
from kvcluster.engines.transformers.attention_interface import LayerScores, MaskRule, attending
from kvcluster.engines.transformers.cache import DEADLINE_MS
from kvcluster.engines.transformers.compat import check_inputs, prepared_inputs
from kvcluster.engines.transformers.padded_prompt import find_paddings
from kvcluster.engines.transformers.spec import check_spec
from kvcluster.engines.transformers.stepped_cache import SteppedCache, as_rows
from kvcluster.errors import CallerError
from kvcluster.transfers.deadlines import remaining_ms
from kvcluster.transfers.long_chains import Prompt
from kvcluster.transport.base import Deadline


class _Probe(SteppedCache):
    """A cache without KV, whose attention is 0."""

    def append(self, layer: int, key: Tensor, value: Tensor) -> None:
        if key.shape != value.shape:
            raise CallerError(f"layer {layer} has keys {list(key.shape)} and values {list(value.shape)}")

    def compute(self, layer: int, query: Tensor, rule: MaskRule, scores: LayerScores) -> Tensor:
        return torch.zeros_like(query).transpose(1, 2)

    def count(self, columns: int, input_ids: Tensor | None) -> None:
        """Nothing is kept."""


def check_attention(model: PreTrainedModel) -> None:
    """Runs the model on one token. Raises CallerError if a layer of it does not attend through transformers'
    AttentionInterface, or asks for what is not computed over sequences."""
    probe = _Probe(model)
    ids = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    try:
        with torch.no_grad(), attending(model, probe):
            model(input_ids=ids, past_key_values=probe, use_cache=True)
    except CallerError:
        raise
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise CallerError(
            f"{type(model).__name__} cannot generate over sequences: its layers do not attend through transformers' "
            f"AttentionInterface alone ({error})"
        ) from error
    if probe.columns != 1:
        raise CallerError(f"{type(model).__name__} cannot generate over sequences: it does not use the cache")


PREFILL_TOKENS = 512
"""Tokens of a row that one forward pass of a prefill computes at most. More would take more memory, and save little:
each token's attention takes the same time, and the context is streamed once for so many."""

_PREFILL_SHARE = 4
"""A forward pass of a prefill makes at most this part of what the resident set holds: it stays there until the pass is
over, while the context is streamed through the rest."""


class SequenceCache(SteppedCache):
    """Made by `from_inputs`; a context manager, which closes its sequences. `cached_tokens` is for each row of the
    inputs the number of its tokens that need not be computed."""

    def __init__(
        self,
        client: Client,
        model: PreTrainedModel,
        rows: Sequence[tuple[kv.Sequence, int]],
        planner: kv.AttendPlanner | None,
        deadline_ms: float,
    ) -> None:
        super().__init__(model)
        self.cached_tokens = [sequence.length for sequence, _ in rows]
        self._client = client
        self._planner = planner
        self._deadline_ms = deadline_ms
        self._rows = list(rows)  # each with its columns of padding
        self._batch = kv.SequenceBatch([sequence for sequence, _ in rows])
        self._rule: MaskRule | None = None  # the last one that was compared with the padding

    @classmethod
    def from_inputs(
        cls,
        client: Client,
        model: PreTrainedModel,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        salt: bytes = b"",
        policy: kv.WindowPolicy | None = None,
        planner: kv.AttendPlanner | None = None,
        deadline_ms: float = DEADLINE_MS,
    ) -> SequenceCache:
        """Opens a sequence for every row, which begins with its cached prefix; at least one token of each is left to
        compute. Rows continue from one column, so the row with the shortest prefix, padding counted, decides for all.

        `input_ids` and `attention_mask` are as for PrefixCache.from_inputs. `policy` determines what of the sequences
        stays in the resident set, and how; `planner` what is attended to at its shards, by default nothing.
        `deadline_ms` bounds this call, and each load of a later one. Requests share KV only under the same `salt`.

        Raises CallerError, before anything moves, if the model, its inputs or the client's spec are not supported;
        Unreachable if the coordinator has never answered this client.
        """
        check_spec(client.spec, model)
        paddings = find_paddings(model, input_ids, attention_mask)
        check_inputs(model, input_ids)
        check_attention(model)
        watch(client)
        deadline = Deadline.after_ms(deadline_ms)
        with ExitStack() as stack:
            rows: list[tuple[kv.Sequence, int]] = []
            for ids, padding in zip(input_ids.tolist(), paddings, strict=True):
                prompt = Prompt(ids[padding:], salt)
                time_ms, prefetch = remaining_ms(deadline), planner is None
                opened = client.sequence(prompt, policy=policy, prefetch=prefetch, deadline_ms=time_ms)
                rows.append((stack.enter_context(opened), padding))
            columns = min(input_ids.shape[1] - 1, *(padding + sequence.length for sequence, padding in rows))
            for sequence, padding in rows:
                sequence.truncate(max(0, columns - padding), deadline_ms=remaining_ms(deadline))
            cache = cls(client, model, rows, planner, deadline_ms)
            cache.columns = columns
            stack.pop_all()
        return cache

    @contextmanager
    def attending(self, model: PreTrainedModel) -> Iterator[None]:
        """Within the context the model computes its attention with this cache, in this thread. A step that is not
        completed, because of an error, is dropped."""
        with attending(model, self):
            try:
                yield
            finally:
                self.drop_step()

    @torch.no_grad()
    def prefill(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        chunk: int | None = None,
    ) -> None:
        """Computes all columns of the inputs that the cache does not have, but the last, `chunk` at a time: by default
        as many as PREFILL_TOKENS, or fewer if the resident set is small. Raises as Sequence.append and attend."""
        if chunk is None:
            resident = self._client.resident().pages * self._client.spec.block_tokens
            chunk = max(1, min(PREFILL_TOKENS, resident // len(self._rows) // _PREFILL_SHARE))
        with self.attending(model):
            while (first := self.columns) < input_ids.shape[1] - 1:
                stop = min(first + chunk, input_ids.shape[1] - 1)
                model(**prepared_inputs(model, self, input_ids, attention_mask, first, stop))

    def flush(self, *, deadline_ms: float = DEADLINE_MS) -> bool:
        """Waits until all full blocks are stored and other workers find them. Returns False if the deadline passes
        first or a store has failed."""
        deadline = Deadline.after_ms(deadline_ms)
        return all(sequence.flush(deadline_ms=remaining_ms(deadline)) for sequence, _ in self._rows)

    def keep(self, columns: Sequence[int]) -> None:
        """Keeps of each row the full blocks before this column, padding counted: what follows is not stored if it is
        not yet. The cache cannot go on after that."""
        step = self._client.spec.block_tokens
        for (sequence, padding), end in zip(self._rows, columns, strict=True):
            sequence.truncate(min(sequence.length, max(0, end - padding)) // step * step)

    def close(self) -> None:
        """Ends the sequences. What is stored stays cached. May be called again."""
        for sequence, _ in self._rows:
            sequence.close()

    def __enter__(self) -> SequenceCache:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -------------------------------------------------------------------------------- what the model asks

    def append(self, layer: int, key: Tensor, value: Tensor) -> None:
        if len(key) != len(self._rows):
            raise CallerError(f"the model computes {len(key)} rows; the cache has {len(self._rows)}")
        counts = self._counts(key.shape[2])
        self._batch.append(layer, as_rows(key, counts), as_rows(value, counts), tokens=counts)

    def compute(self, layer: int, query: Tensor, rule: MaskRule, scores: LayerScores) -> Tensor:
        self._check(rule)
        rows, heads, columns, _ = query.shape
        counts = self._counts(columns)
        out = self._batch.attend(
            layer,
            as_rows(query, counts),
            tokens=counts,
            scale=scores.scale,
            softcap=scores.softcap,
            window=rule.window,
            sinks=None if scores.sinks is None else scores.sinks.cpu(),
            threads=torch.get_num_threads(),
            planner=self._planner,
            deadline_ms=self._deadline_ms,
        )
        if sum(counts) == rows * columns:
            return out.view(rows, columns, heads, -1).to(query.device)
        whole = out.new_zeros(rows, columns, heads, out.shape[-1])
        for row, part in zip(whole, torch.split(out, counts), strict=True):
            row[columns - len(part) :] = part
        return whole.to(query.device)

    def count(self, columns: int, input_ids: Tensor | None) -> None:
        counts = self._counts(columns)
        if input_ids is None:
            self._batch.advance(counts)
        else:
            ids = input_ids.tolist()
            self._batch.advance([row[columns - count :] for row, count in zip(ids, counts, strict=True)])

    # ------------------------------------------------------------------------------ what moves rows and columns

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._take(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._take([row for row in range(len(self._rows)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        self._take(torch.arange(len(self._rows))[indices.cpu()].tolist())

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last `-tokens_to_remove` columns. Raises CallerError for a positive number."""
        if tokens_to_remove > 0:
            raise CallerError("crop takes the number of tokens to remove as a negative number")
        columns = max(0, self.columns + tokens_to_remove)
        for sequence, padding in self._rows:
            sequence.truncate(min(sequence.length, max(0, columns - padding)), deadline_ms=self._deadline_ms)
        self.columns = columns

    def reset(self) -> None:
        self.crop(-self.columns)

    def drop_step(self) -> None:
        if self.step:
            for sequence, _ in self._rows:
                if not sequence.closed:
                    sequence.truncate(sequence.length)
        super().drop_step()

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceCache:
        raise CallerError("a SequenceCache is not copied: make another from the same inputs, which shares its blocks")

    # ------------------------------------------------------------------------------------------------- helpers

    def _counts(self, columns: int) -> list[int]:
        """Returns how many of the next so many columns hold a token, for each row: the last ones."""
        stop = self.columns + columns
        return [max(0, stop - max(self.columns, padding)) for _, padding in self._rows]

    def _check(self, rule: MaskRule) -> None:
        """Raises CallerError if the mask is not that of the inputs that this cache was made from."""
        if rule is self._rule:
            return
        paddings = [padding for _, padding in self._rows]
        masked = [0] * len(paddings) if rule.mask is None else (~rule.mask).sum(1).tolist()
        expected = [min(padding, self.columns + self.step) for padding in paddings]
        if masked != expected:
            raise CallerError(
                f"attention_mask hides {masked} columns; the inputs of this cache have {expected} of padding: give "
                "the attention_mask that the cache was made with"
            )
        self._rule = rule

    def _take(self, rows: Sequence[int]) -> None:
        """Makes row i what row `rows[i]` is. A row that is taken several times is forked; one that is not is closed."""
        if list(rows) == list(range(len(self._rows))):
            return
        taken: dict[int, None] = {}
        new: list[tuple[kv.Sequence, int]] = []
        with ExitStack() as forks:
            for row in rows:
                sequence, padding = self._rows[row]
                if row in taken:
                    sequence = forks.enter_context(sequence.fork())
                taken[row] = None
                new.append((sequence, padding))
            forks.pop_all()
        for row, (sequence, _) in enumerate(self._rows):
            if row not in taken:
                sequence.close()
        self._rows = new
        self._batch = kv.SequenceBatch([sequence for sequence, _ in new])
