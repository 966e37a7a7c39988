"""A transformers cache that starts with the prefix that the cluster holds, and stores what the model adds.

transformers keeps one tensor `[batch, kv_heads, columns, head_dim]` per layer and plane, and one length for all rows;
padding is on the left. In a row with `padding` columns of it, block i starts at column `padding + i * block_tokens`, so
a block is a strided view of these tensors: it is loaded into it and stored from it without another copy. The model
continues from the column up to which every row is filled.

Two facts decide what may be stored. KV belongs to a row of `sequences` only while the cache's rows are those of its
prompts; so the bookkeeping follows every operation that moves rows, and after `reorder_cache` (beam search returns
other rows than it leaves in the cache) only the prompts' KV is certain. And the last token has no KV yet.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from kvcluster.client.client import Client
from kvcluster.client.metrics import watch
from kvcluster.core import limits
from kvcluster.core.ids import BlockHash
from kvcluster.core.miss import Loss, Miss
from kvcluster.engines.transformers.compat import check_full_attention, check_inputs, layers, planes, text_config
from kvcluster.engines.transformers.padded_prompt import PaddedPrompt, find_paddings
from kvcluster.engines.transformers.spec import check_kv, check_spec
from kvcluster.engines.transformers.staged_load import load_staged
from kvcluster.errors import CallerError
from kvcluster.transfers.deadlines import OTHER_MS, remaining_ms
from kvcluster.transfers.layouts import Paged
from kvcluster.transfers.long_chains import Prompt
from kvcluster.transfers.tickets import Ticket
from kvcluster.transfers.transfer import Loaded, Stored
from kvcluster.transport.base import Deadline, Unavailable

DEADLINE_MS: float = OTHER_MS
"""Deadline of one `from_inputs` or `save` in milliseconds, however many rows it has."""


class PrefixCache(DynamicCache):
    """A DynamicCache that holds the cached prefix of its prompts. Made by `from_inputs`; `save` stores the rest.

    For each row of the inputs, `cached_tokens` is the number of its tokens that need not be computed, and `misses`
    holds the reason why the cluster had no more: None if it had every full block. Rows of one batch continue from one
    column, so the row with the shortest prefix (padding counted) decides for all. `losses` are the worst losses of the
    loaded prefixes, and so of the KV that is computed over them.
    """

    def __init__(self, client: Client, model: PreTrainedModel, prompts: Sequence[PaddedPrompt], salt: bytes) -> None:
        super().__init__(config=text_config(model))
        self.cached_tokens: list[int] = [0] * len(prompts)
        self.misses: list[Miss | None] = [None] * len(prompts)
        self.losses = [Loss.EXACT] * len(prompts)
        self._client = client
        self._salt = salt
        self._prompts = prompts
        self._row_prompts = list(range(len(prompts)))  # which prompt each row of the tensors continues
        self._reordered = False  # rows may continue their prompts with other tokens than `sequences` will show
        self._shared: set[BlockHash] = set()  # blocks that the cluster is known to have

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
        without a mask, padding is found by the pad token, as `generate` does. Pass both to `model.generate` together
        with this cache as `past_key_values`; for beams or several sequences per prompt call `batch_repeat_interleave`
        first. Callers that run the model without `generate` must count each row's position ids from its first token.
        Requests share KV only under the same `salt`. Raises CallerError, before anything moves, if the model, its
        inputs or the client's spec are not supported; a failure of the cluster is a miss.
        """
        check_spec(client.spec, model)
        check_full_attention(model)
        paddings = find_paddings(model, input_ids, attention_mask)
        check_inputs(model, input_ids)
        watch(client)
        deadline = Deadline.after_ms(deadline_ms)
        rows = input_ids.tolist()
        hashes, trouble = _hashes(client, [row[p:] for row, p in zip(rows, paddings, strict=True)], salt, deadline)
        prompts = [PaddedPrompt(*prompt) for prompt in zip(rows, paddings, hashes, strict=True)]
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
        """Stores every full block in this cache that the cluster is not known to have, and waits for the stores.

        `sequences` are the token ids `[rows, columns]` of the cache's rows, padding and prompt first, as `generate`
        returns them. Tokens after the first `eos_token_id` behind a prompt are filler and are not stored. After
        `reorder_cache` (beams) only the prompts' blocks are stored. Raises CallerError if `sequences` does not
        continue these prompts; a failure of the cluster shows as a Stored with fewer blocks.
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
                    chain, source, first=first, loss=loss, deadline_ms=remaining_ms(deadline)
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
        # Rows that hold only their prompts are certain again.
        self._reordered = self._reordered and self.get_seq_length() > self._prompt_columns

    def activate_past_recording(self) -> None:
        """Raises CallerError if the cache holds part of the prompts: assisted decoding calls this first, and then
        computes the whole prompt behind that part."""
        if 0 < self.get_seq_length() < self._prompt_columns:
            raise CallerError(
                "assisted decoding would compute the prompt a second time behind the loaded KV; use model.generate "
                "without the prefix cache"
            )
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
        """Returns the prompt's index for each row. `generate` repeats the rows of an empty cache without notice, so the
        number of repeats is derived from the tensors."""
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
                ticket = self._client.prepare_load(prompt.hashes, deadline_ms=remaining_ms(deadline))
                held.append(tickets.enter_context(ticket))
                self.misses[row] = ticket.miss
                self._shared.update(ticket.hashes)
            columns = self._filled([ticket.blocks for ticket in held])
            wanted = [max(0, -(-(columns - prompt.padding) // step)) for prompt in self._prompts]
            if not any(wanted):
                return
            self._allocate(model, max(p.padding + n * step for p, n in zip(self._prompts, wanted, strict=True)))

            # A hash covers all tokens before it: rows with the same last block have the same blocks, loaded once.
            leaders: dict[BlockHash, int] = {}
            outcomes: dict[int, Callable[[], Loaded]] = {}
            for row in sorted(range(len(wanted)), key=lambda row: -wanted[row]):
                chain = self._prompts[row].hashes[: wanted[row]]
                if chain and chain[-1] not in leaders:
                    leaders.update(dict.fromkeys(chain, row))
                    if len(chain) < held[row].blocks:  # a shorter row decides for all
                        held[row].release()
                        ticket = self._client.prepare_load(chain, again=True, deadline_ms=remaining_ms(deadline))
                        held[row] = tickets.enter_context(ticket)
                    outcomes[row] = self._begin_load(row, held[row], model, deadline)
            loaded = {row: outcome() for row, outcome in outcomes.items()}

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
        """Returns the number of columns that are filled in every row if row i has `blocks[i]` blocks, with at least one
        token per row left to compute."""
        step = self._client.spec.block_tokens
        ends = [prompt.padding + count * step for prompt, count in zip(self._prompts, blocks, strict=True)]
        return min(self._prompt_columns - 1, *ends)

    def _begin_load(self, row: int, ticket: Ticket, model: PreTrainedModel, deadline: Deadline) -> Callable[[], Loaded]:
        """Loads a ticket's blocks into a row, or begins to. Returns a function that waits for the outcome."""
        if is_staged(model.device, self._client):
            loaded = load_staged(self._client, ticket, model.device, partial(self._place, row), deadline)
            return lambda: loaded
        into = self._pages(row, self._prompts[row].padding, ticket.blocks)
        return self._client.begin_load(ticket, into, deadline_ms=remaining_ms(deadline)).result

    def _allocate(self, model: PreTrainedModel, columns: int) -> None:
        """Allocates the layers where blocks arrive. Zeroes the padding: it is masked, but a mask does not stop NaN."""
        (group,) = self._client.spec.groups
        like = torch.empty(0, dtype=model.dtype, device=model.device)
        shape = (len(self._prompts), group.heads, columns, group.planes[0].dim)
        for layer in layers(self):
            layer.lazy_initialization(like, like)
            layer.keys, layer.values = (new_plane(shape, like) for _ in range(2))
            for tensor in planes(layer):
                for row, prompt in enumerate(self._prompts):
                    tensor[row, :, : prompt.padding] = 0

    def _place(self, row: int, first: int, blocks: torch.Tensor) -> None:
        """Copies blocks, `[blocks, layers, planes, block_tokens, kv_heads, head_dim]` on the model's device, into the
        columns of a row, the first of them behind `first` others."""
        count, _, _, step, heads, dim = blocks.shape
        start = self._prompts[row].padding + first * step
        for number, layer in enumerate(layers(self)):
            for plane, tensor in enumerate(planes(layer)):
                columns = tensor[row, :, start : start + count * step].view(heads, count, step, dim)
                columns.copy_(blocks[:, number, plane].permute(2, 0, 1, 3))

    def _begin_at(self, model: PreTrainedModel, columns: int) -> None:
        """Cuts the cache off behind `columns` and moves it to the model's device. Resets it if no row keeps a token."""
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
        """Returns blocks of one row from a column on as views: each plane `[blocks, block_tokens, kv_heads,
        head_dim]`."""
        step = self._client.spec.block_tokens

        def view(tensor: torch.Tensor) -> torch.Tensor:
            tokens = tensor[row, :, column : column + blocks * step].detach()
            if is_staged(tensor.device, self._client):
                tokens = tokens.cpu()
            return tokens.view(tokens.shape[0], blocks, step, tokens.shape[-1]).permute(1, 2, 0, 3)

        return Paged([tuple(view(tensor) for tensor in planes(layer)) for layer in layers(self)], range(blocks))

    def _chains(self, sequences: list[list[int]], ends: set[int]) -> Iterator[tuple[int, int, list[int]]]:
        """Yields rows of the cache, their padding, and the tokens whose KV they are known to hold."""
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


def is_staged(device: torch.device, client: Client) -> bool:
    """Whether KV on this device is moved through host memory (loads by staged_load.py): the device is not the CPU, nor
    one whose tensors the client takes."""
    served = client.takes_device_tensors and device.type == "cuda"
    return device.type != "cpu" and not served


def new_plane(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Returns memory for one plane of a layer, on the device of `like`."""
    return torch.empty(shape, dtype=like.dtype, device=like.device)


def _hashes(
    client: Client, rows: Sequence[list[int]], salt: bytes, deadline: Deadline
) -> tuple[list[list[BlockHash]], Miss | None]:
    """Returns the hashes of each row's full blocks, at most BLOCKS_PER_PROMPT; all empty, with the miss, if the cluster
    does not answer."""
    try:
        return [
            client.hashes(Prompt(tokens, salt), deadline_ms=remaining_ms(deadline))[: limits.BLOCKS_PER_PROMPT]
            for tokens in rows
        ], None
    except Unavailable as trouble:
        return [[] for _ in rows], trouble.miss


def _sum(one: Stored, other: Stored) -> Stored:
    return Stored(
        one.blocks + other.blocks,
        one.deduplicated + other.deduplicated,
        one.pending + other.pending,
        one.nbytes + other.nbytes,
        one.miss or other.miss,
    )
