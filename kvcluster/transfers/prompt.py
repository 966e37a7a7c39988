"""A prompt: everything that identifies the blocks of one sequence within a spec.

Two sequences share a block if all tokens up to its end are the same, and also their salt, their adapter, and the
contents of the images up to there. These travel together through every call, so they are one value. It is checked when
it is made, and it is a copy: an engine that goes on appending to its own list of tokens does not change it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

from kvcluster.core import hashing
from kvcluster.core.ids import BlockHash, NamespaceId
from kvcluster.core.miss import Miss, MissReason
from kvcluster.core.spec import KVSpec
from kvcluster.errors import CallerError
from kvcluster.transfers.validation import check_hashes, kind_of
from kvcluster.transport.base import Unavailable


@runtime_checkable
class TokenArray(Protocol):
    """A one-dimensional array of token ids: numpy's, torch's, or another with these two methods."""

    def __len__(self) -> int: ...

    def tolist(self) -> Any: ...


TokenIds: TypeAlias = Sequence[int] | TokenArray


@dataclass(frozen=True, slots=True, init=False)
class Prompt:
    """The token ids of a sequence, and what else its KV depends on. Every call that takes token ids takes a Prompt.

        prompt = kvcluster.Prompt(token_ids, salt=b"customer 7", extra_keys={0: digest_of_image})
        client.lookup(prompt)

    `token_ids` are integers from 0 to 2**32-1: a list, a tuple, an array, or a one-dimensional numpy array or torch
    tensor. Prompts with different `salt` share no blocks. `adapter` is the content hash of a LoRA, "" for none; None
    means that of the client's spec. `extra_keys` maps the index of a block to the content hash of the images, audio or
    embeddings in it. None of them may be changed later. Raises CallerError if one of them is something else.
    """

    token_ids: Sequence[int]
    salt: bytes = b""
    adapter: str | None = None
    extra_keys: Mapping[int, bytes] | None = None

    def __init__(
        self,
        token_ids: TokenIds,
        salt: bytes = b"",
        adapter: str | None = None,
        extra_keys: Mapping[int, bytes] | None = None,
    ) -> None:
        object.__setattr__(self, "token_ids", hashing.token_array(listed(token_ids)))
        object.__setattr__(self, "salt", salt)
        object.__setattr__(self, "adapter", adapter)
        object.__setattr__(self, "extra_keys", extra_keys)
        if not isinstance(self.salt, bytes):
            raise CallerError(f"salt is {kind_of(self.salt)}; expected bytes: for text give text.encode()")
        if self.adapter is not None and not isinstance(self.adapter, str):
            raise CallerError(f"adapter is {kind_of(self.adapter)}; expected the content hash of a LoRA as text")
        if self.extra_keys is not None:
            object.__setattr__(self, "extra_keys", _checked_keys(self.extra_keys))

    def __hash__(self) -> int:
        keys = None if self.extra_keys is None else tuple(sorted(self.extra_keys.items()))
        return hash((hashing.token_bytes(self.token_ids), self.salt, self.adapter, keys))

    def __repr__(self) -> str:
        more = [name for name in ("salt", "adapter", "extra_keys") if getattr(self, name)]
        return f"Prompt({len(self.token_ids):,} tokens{''.join(f', with {name}' for name in more)})"

    def hashes(self, namespace: NamespaceId, block_tokens: int) -> list[BlockHash]:
        """Returns the hashes of the full blocks within a namespace."""
        return hashing.chain(hashing.root(namespace, self.salt), self.token_ids, block_tokens, self.extra_keys)


def listed(token_ids: TokenIds) -> Sequence[int]:
    """Returns token ids that need not be checked yet as a sequence: arrays and tensors are slow to iterate."""
    given: Any = token_ids
    to_list = getattr(given, "tolist", None)
    ids: Sequence[int] = given if to_list is None else to_list()
    return ids


def as_prompt(given: Prompt | TokenIds) -> Prompt:
    """Returns the prompt itself, or the prompt with these token ids and nothing else. Raises CallerError as Prompt."""
    return given if isinstance(given, Prompt) else Prompt(given)


def _checked_keys(extra_keys: Mapping[int, bytes]) -> dict[int, bytes]:
    given: object = extra_keys
    if not isinstance(given, Mapping):
        raise CallerError(f"extra_keys is {kind_of(given)}; expected a mapping from a block's index to bytes")
    for block, key in extra_keys.items():
        if type(block) is not int or block < 0:
            raise CallerError(f"extra_keys names block {block!r}; expected an index, counted from the prompt's start")
        if not isinstance(key, bytes):
            raise CallerError(f"extra_keys[{block}] is {kind_of(key)}; expected bytes, such as digest() of the image")
        if not key:
            raise CallerError(f"extra_keys[{block}] is empty, which means none: leave the block out")
    return dict(extra_keys)


def known_hashes(
    prompt: Prompt, spec: KVSpec, namespace: Callable[[], NamespaceId]
) -> tuple[list[BlockHash], Miss | None]:
    """Returns the hashes of a prompt's full blocks in the namespace that `namespace` returns; or none, and the miss
    that says why: there is no full block, or it raised Unavailable. Raises LimitError as check_hashes."""
    tokens = len(prompt.token_ids)
    if tokens < spec.block_tokens:
        return [], Miss(MissReason.BELOW_BLOCK, f"{tokens} tokens fill no block of {spec.block_tokens}")
    try:
        hashes = prompt.hashes(namespace(), spec.block_tokens)
    except Unavailable as trouble:
        return [], trouble.miss
    check_hashes(hashes)
    return hashes, None
