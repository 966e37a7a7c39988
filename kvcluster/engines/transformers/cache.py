"""A transformers cache that begins with what the cluster holds, and gives back what the model adds.

transformers keeps one tensor `[batch, kv_heads, columns, head_dim]` a layer and plane, and one length for all rows;
padding is on the left. In a row with `padding` columns of it, block i lies at column `padding + i * block_tokens`, so
a block is a strided view of these tensors: it is loaded into its place and stored from it, without another copy. The
model goes on from the column up to which every row is filled.

Two facts decide what may be stored. KV belongs to a row of `sequences` only while the cache's rows are those of its
prompts; so the bookkeeping follows every operation that moves rows, and after `reorder_cache` (beams report other
rows than they leave behind) only the prompts' KV is certain. And the last token has no KV yet.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from kvcluster.client.client import Client
from kvcluster.client.layouts import Paged
from kvcluster.client.results import Loaded, Stored
from kvcluster.client.ticket import Ticket
from kvcluster.client.transfer import Transfer
from kvcluster.config import ClientConfig
from kvcluster.core import limits
from kvcluster.core.ids import BlockHash
from kvcluster.core.miss import Loss, Miss
from kvcluster.engines.transformers.compat import Generation, check_inputs, layers, planes, text_config
from kvcluster.engines.transformers.spec import check_kv, check_spec
from kvcluster.errors import CallerError
from kvcluster.transport.base import Deadline, Unavailable

DEADLINE_MS: float = ClientConfig().deadline_ms
"""Of one `from_inputs` or `save`, however many rows it has."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    """One row of `input_ids`: its columns, of which the first `padding` hold no token, and its full blocks."""

    columns: list[int]
    padding: int
    hashes: list[BlockHash]


class PrefixCache(DynamicCache):
    """A DynamicCache that holds the cached prefix of its prompts. Made by `from_inputs`; `save` stores the rest.

    `cached_tokens` says for each row of the inputs how many of its tokens need no computing, `misses` why the
    cluster had no more of it: None where it had every full block. Rows of one batch go on from one column, so the
    row with the shortest prefix (padding counted) decides for all. `losses` are what the loaded prefixes have lost at
    worst, and so what is computed over them.
    """

    def __init__(self, client: Client, model: PreTrainedModel, prompts: Sequence[_Prompt], salt: bytes) -> None:
        super().__init__(config=text_config(model))
        self.cached_tokens: list[int] = [0] * len(prompts)
        self.misses: list[Miss | None] = [None] * len(prompts)
        self.losses = [Loss.EXACT] * len(prompts)
        self._client = client
        self._salt = salt
        self._prompts = prompts
        self._row_prompts = list(range(len(prompts)))  # which prompt each row of the tensors continues
        self._reordered = False  # rows may continue their prompts in another way than `sequences` will show
        self._shared: set[BlockHash] = set()  # blocks that the cluster has, as far as we know

    @classmethod
    def from_inputs(
        cls,
        client: Client,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        salt: bytes = b"",
        deadline_ms: float = DEADLINE_MS,
    ) -> PrefixCache:
        """Loads the cached prefix of every row; at least one token of each is left to compute.

        `input_ids` and `attention_mask` are integers `[batch, columns]` as `generate` takes them, padded on the left;
        without a mask, padding is told as `generate` tells it, by the pad token. Pass both to `model.generate`
        together with this as `past_key_values`; for beams or several sequences a prompt call
        `batch_repeat_interleave` first. Whoever calls the model without `generate` must count each row's position
        ids from its first token. `salt` keeps apart who must not share. Raises CallerError, before anything moves,
        where the model, its inputs or the client's spec cannot be served; trouble of the cluster is a miss.
        """
        check_spec(client.spec, model)
        paddings = _paddings(model, input_ids, attention_mask)
        check_inputs(model, input_ids)
        deadline = Deadline.after_ms(deadline_ms)
        rows = input_ids.tolist()
        hashes, trouble = _hashes(client, [row[p:] for row, p in zip(rows, paddings, strict=True)], salt, deadline)
        prompts = [_Prompt(*prompt) for prompt in zip(rows, paddings, hashes, strict=True)]
        cache = cls(client, model, prompts, salt)
        if trouble is not None:
            cache.misses = [trouble] * len(prompts)
        else:
            cache._load(model, deadline)
        return cache

    def save(
        self,
        sequences: torch.Tensor,
        *,
        eos_token_id: int | Sequence[int] | None = None,
        deadline_ms: float = DEADLINE_MS,
    ) -> Stored:
        """Stores every full block whose KV is here and that the cluster is not known to have, and waits for it.

        `sequences` are the token ids `[rows, columns]` of the cache's rows, padding and prompt first, as `generate`
        returns them. What follows the first `eos_token_id` behind a prompt is filler and left out. After
        `reorder_cache` (beams) only the prompts' blocks are stored. Raises CallerError where `sequences` does not
        continue these prompts; trouble of the cluster is a Stored with fewer blocks.
        """
        if getattr(sequences, "ndim", 0) != 2:
            raise CallerError("sequences must be token ids [rows, columns], as generate returns them")
        ends = {eos_token_id} if isinstance(eos_token_id, int) else set(eos_token_id or ())
        chains = list(self._chains(sequences.tolist(), ends))
        if self.get_seq_length() > 0:
            check_kv(self, self._client.spec)
        deadline = Deadline.after_ms(deadline_ms)
        hashes, trouble = _hashes(self._client, [tokens for _, _, tokens in chains], self._salt, deadline)
        total = Stored(0, 0, 0, 0, trouble)
        tried, prompts = set(self._shared), self._rows()
        for (row, padding, _), chain in zip(chains, hashes, strict=True):
            first = next((i for i, block in enumerate(chain) if block not in tried), len(chain))
            if new := chain[first:]:
                tried.update(new)
                source = self._pages(row, padding + first * self._client.spec.block_tokens, len(new))
                loss = self.losses[prompts[row]]
                storing = self._client.begin_store(
                    chain, source, first=first, loss=loss, deadline_ms=_rest_ms(deadline)
                )
                stored = storing.result()
                if stored.blocks + stored.deduplicated == len(new):
                    self._shared.update(new)
                total = _sum(total, stored)
        return total

    # --------------------------------------------------------------- what moves rows and columns of the tensors

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        rows = self._rows()
        self._row_prompts = [rows[i] for i in beam_idx.tolist()]
        self._reordered = True
        super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._row_prompts = [prompt for prompt in self._rows() for _ in range(repeats)]
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        rows = self._rows()
        self._row_prompts = [rows[i] for i in torch.arange(len(rows))[indices.cpu()].tolist()]
        super().batch_select_indices(indices)

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        # Rows that hold nothing but their prompts are certain again.
        self._reordered = self._reordered and self.get_seq_length() > self._prompt_columns

    def activate_past_recording(self) -> None:
        """Refuses assisted decoding, which calls this first and then computes the whole prompt over a filled cache."""
        if 0 < self.get_seq_length() < self._prompt_columns:
            raise CallerError("assisted decoding would compute the prompt a second time, behind the KV that is loaded")
        super().activate_past_recording()  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> PrefixCache:
        memo[id(self._client)] = self._client  # a copy is another cache of the same client
        twin: PrefixCache = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__ = copy.deepcopy(self.__dict__, memo)
        return twin

    @property
    def _prompt_columns(self) -> int:
        return len(self._prompts[0].columns)

    def _rows(self) -> list[int]:
        """The prompt of each row. `generate` repeats the rows of an empty cache without a word; the tensors show it."""
        known = len(self._row_prompts)
        rows = planes(layers(self)[0])[0].shape[0] if self.get_seq_length() else known
        repeats, rest = divmod(rows, known)
        if rest or not repeats:
            raise CallerError(f"the cache has {rows} rows, but was made for {known}")
        return [prompt for prompt in self._row_prompts for _ in range(repeats)]

    # ------------------------------------------------------------------------------------- loading and storing

    def _load(self, model: PreTrainedModel, deadline: Deadline) -> None:
        """Fills every layer up to the last column that all rows reach."""
        step = self._client.spec.block_tokens
        with ExitStack() as tickets:
            held: list[Ticket] = []
            for row, prompt in enumerate(self._prompts):
                ticket = self._client.prepare_load(prompt.hashes, deadline_ms=_rest_ms(deadline))
                held.append(tickets.enter_context(ticket))
                self.misses[row] = ticket.miss
                self._shared.update(ticket.hashes)
            columns = self._filled([ticket.blocks for ticket in held])
            wanted = [max(0, -(-(columns - prompt.padding) // step)) for prompt in self._prompts]
            if not any(wanted):
                return
            self._allocate(model, max(p.padding + n * step for p, n in zip(self._prompts, wanted, strict=True)))

            # A hash names all that precedes it: rows that want the same last block want the same blocks, moved once.
            leaders: dict[BlockHash, int] = {}
            transfers: dict[int, Transfer[Loaded]] = {}
            for row in sorted(range(len(wanted)), key=lambda row: -wanted[row]):
                chain = self._prompts[row].hashes[: wanted[row]]
                if chain and chain[-1] not in leaders:
                    leaders.update(dict.fromkeys(chain, row))
                    if len(chain) < held[row].blocks:  # a shorter row decides for all
                        held[row].release()
                        ticket = self._client.prepare_load(chain, deadline_ms=_rest_ms(deadline))
                        held[row] = tickets.enter_context(ticket)
                    into = self._pages(row, self._prompts[row].padding, held[row].blocks)
                    transfers[row] = self._client.begin_load(held[row], into, deadline_ms=_rest_ms(deadline))
            loaded = {row: transfer.result() for row, transfer in transfers.items()}

        for row, blocks in enumerate(wanted):
            if blocks:
                chain = self._prompts[row].hashes[:blocks]
                leader = leaders[chain[-1]]
                outcome = loaded[leader]
                wanted[row] = min(blocks, outcome.blocks)
                self.losses[row] = outcome.loss if wanted[row] else Loss.EXACT
                if wanted[row] < blocks:
                    self.misses[row] = outcome.miss or held[leader].miss
                    self._shared.difference_update(chain[wanted[row] :])
                if leader != row:
                    self._copy(leader, row, wanted[row])
        self._begin_at(model, self._filled(wanted))

    def _filled(self, blocks: Sequence[int]) -> int:
        """Columns that are there in every row with so many blocks, one token a row left to compute."""
        step = self._client.spec.block_tokens
        ends = [prompt.padding + count * step for prompt, count in zip(self._prompts, blocks, strict=True)]
        return min(self._prompt_columns - 1, *ends)

    def _allocate(self, model: PreTrainedModel, columns: int) -> None:
        """Tensors in CPU memory, where blocks arrive. Padding is zeroed: it is masked, but NaN would pass a mask."""
        (group,) = self._client.spec.groups
        like = torch.empty(0, dtype=model.dtype, device=model.device)
        shape = (len(self._prompts), group.heads, columns, group.planes[0].dim)
        for layer in layers(self):
            layer.lazy_initialization(like, like)
            layer.keys, layer.values = torch.empty(shape, dtype=model.dtype), torch.empty(shape, dtype=model.dtype)
            for tensor in planes(layer):
                for row, prompt in enumerate(self._prompts):
                    tensor[row, :, : prompt.padding] = 0

    def _begin_at(self, model: PreTrainedModel, columns: int) -> None:
        """What lies behind `columns` is cut off; where no row has a token left, the cache is as good as new."""
        self.cached_tokens = [max(0, columns - prompt.padding) for prompt in self._prompts]
        for layer in layers(self):
            layer.keys, layer.values = (tensor[:, :, :columns].to(model.device) for tensor in planes(layer))
        if not any(self.cached_tokens):
            self.reset()  # type: ignore[no-untyped-call]

    def _copy(self, leader: int, row: int, blocks: int) -> None:
        tokens = blocks * self._client.spec.block_tokens
        start, source = self._prompts[row].padding, self._prompts[leader].padding
        for layer in layers(self):
            for tensor in planes(layer):
                tensor[row, :, start : start + tokens] = tensor[leader, :, source : source + tokens]

    def _pages(self, row: int, column: int, blocks: int) -> Paged:
        """Blocks of one row from a column on, as views: each plane `[blocks, block_tokens, kv_heads, head_dim]`."""
        step = self._client.spec.block_tokens

        def view(tensor: torch.Tensor) -> torch.Tensor:
            tokens = tensor[row, :, column : column + blocks * step].detach().cpu()
            return tokens.view(tokens.shape[0], blocks, step, tokens.shape[-1]).permute(1, 2, 0, 3)

        return Paged([tuple(view(tensor) for tensor in planes(layer)) for layer in layers(self)], range(blocks))

    def _chains(self, sequences: list[list[int]], ends: set[int]) -> Iterator[tuple[int, int, list[int]]]:
        """Rows of the cache, their padding, and the tokens whose KV they are known to hold."""
        rows, length, width = self._rows(), self.get_seq_length(), self._prompt_columns
        expected = [self._prompts[prompt].columns for prompt in rows]
        heads = [sequence[:width] for sequence in sequences]
        if not all(head in expected for head in heads) if self._reordered else heads != expected:
            raise CallerError(
                f"sequences has {len(sequences)} rows that do not begin with the cache's {len(rows)} prompts, padding "
                "included: give what generate returned for the input_ids that this cache was made from"
            )
        for row, index in enumerate(rows):
            prompt = self._prompts[index]
            if not self._reordered:
                tokens = sequences[row]
                end = next((i + 1 for i in range(width, len(tokens)) if tokens[i] in ends), len(tokens))
                yield row, prompt.padding, tokens[prompt.padding : min(end, length)]
            elif index not in rows[:row]:
                yield row, prompt.padding, prompt.columns[prompt.padding : length]


def _hashes(
    client: Client, rows: Sequence[list[int]], salt: bytes, deadline: Deadline
) -> tuple[list[list[BlockHash]], Miss | None]:
    """Hashes of each row's full blocks, as many as one call takes; all empty where the cluster cannot be asked."""
    try:
        return [
            client.hashes(tokens, salt=salt, deadline_ms=_rest_ms(deadline))[: limits.BLOCKS_PER_CALL]
            for tokens in rows
        ], None
    except Unavailable as trouble:
        return [[] for _ in rows], trouble.miss


def _rest_ms(deadline: Deadline) -> float:
    return deadline.remaining_s() * 1e3


def _paddings(model: PreTrainedModel, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> list[int]:
    """Columns of padding in front of each row. Raises CallerError where the inputs are not what `generate` takes."""
    if getattr(input_ids, "ndim", 0) != 2 or input_ids.is_floating_point() or not input_ids.numel():
        raise CallerError("input_ids must be integers [batch, columns], at least one of each")
    if attention_mask is None:
        attention_mask = Generation(model, {}).attention_mask(input_ids)
    if attention_mask.shape != input_ids.shape:
        raise CallerError(f"attention_mask is {list(attention_mask.shape)}, but input_ids is {list(input_ids.shape)}")
    mask = attention_mask.cpu().long()
    if not bool(((mask == 0) | (mask == 1)).all()) or not bool(mask.any(1).all()):
        raise CallerError("attention_mask must be 0 and 1, with at least one 1 in every row")
    if not bool(mask[:, -1].all()):
        raise CallerError("padding on the right is not served: give the tokenizer padding_side='left'")
    if bool((mask.diff(dim=1) < 0).any()):
        raise CallerError("attention_mask has holes: KV behind a masked token is not that of its prefix")
    return (mask == 0).sum(1).tolist()


def _sum(one: Stored, other: Stored) -> Stored:
    return Stored(
        one.blocks + other.blocks,
        one.deduplicated + other.deduplicated,
        one.pending + other.pending,
        one.nbytes + other.nbytes,
        one.miss or other.miss,
    )
