"""Checks of the arguments of a call, made before the client asks or moves anything.

Every check raises CallerError (SpecError, LimitError), which says what was given and what to give instead. A wrong
argument is wrong with or without a cluster, so no check here asks one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from kvcluster.core import hashing, limits
from kvcluster.core.groups import Part
from kvcluster.core.ids import HASH_BYTES, BlockHash
from kvcluster.core.miss import Loss
from kvcluster.core.spec import KVSpec
from kvcluster.errors import CallerError, LimitError

MAX_SECONDS = 10 * 365 * 86_400
"""Longer than any time that makes sense, and it fits the wire in nanoseconds."""


def check_connect(spec: object, token: object) -> None:
    """Checks what a client is made from."""
    if not isinstance(spec, KVSpec):
        raise CallerError(f"spec is {kind_of(spec)}; expected a KVSpec, such as kvcluster.KVSpec.uniform(model=...)")
    if token is not None and not isinstance(token, str):
        raise CallerError(f"token is {kind_of(token)}; expected the credential as text, or None")


def check_open(closed: bool) -> None:
    """Refuses a call of a closed client."""
    if closed:
        raise CallerError("this client is closed; connect again")


def check_hashes(hashes: Sequence[BlockHash]) -> None:
    """Checks a chain of block hashes. Raises LimitError if it exceeds limits.BLOCKS_PER_PROMPT."""
    given: object = hashes
    if not isinstance(given, (list, tuple)):
        raise CallerError(f"block hashes are a list, not {kind_of(given)}; make them with client.hashes(...)")
    if len(hashes) > limits.BLOCKS_PER_PROMPT:
        raise LimitError(
            f"a prompt of {len(hashes)} blocks exceeds the limit of {limits.BLOCKS_PER_PROMPT}: give its leading "
            f"{limits.BLOCKS_PER_PROMPT} blocks alone, or use a spec of larger block_tokens"
        )
    if any(type(block) is not bytes or len(block) != HASH_BYTES for block in hashes):
        raise CallerError("block hashes are 32 bytes each; make them with client.hashes(...) or hashing.foreign")


def check_first(first: int, hashes: Sequence[BlockHash]) -> None:
    """Checks the index in its chain at which a load or store begins."""
    if type(first) is not int or not 0 <= first <= len(hashes):
        raise CallerError(f"first={first!r} does not lie within the {len(hashes)} hashes")


def check_tokens_of(token_ids: Sequence[int], blocks: int, block_tokens: int) -> None:
    """Checks that there are no token ids, or exactly those of `blocks` full blocks."""
    hashing.token_bytes(token_ids)
    if len(token_ids) and len(token_ids) != blocks * block_tokens:
        raise CallerError(f"{len(token_ids)} token ids are not those of {blocks} blocks of {block_tokens} tokens")


def check_loss(loss: Loss) -> Loss:
    """Checks that `loss` is a Loss, and returns it."""
    given: object = loss
    if not isinstance(given, Loss):
        names = ", ".join(f"Loss.{one.name}" for one in Loss)
        raise CallerError(f"{loss!r} is no loss; pass one of {names} of kvcluster.Loss")
    return loss


def pin_terms(ttl_s: float, replicas: int) -> tuple[int, int]:
    """Checks the terms of a pin. Returns its time in nanoseconds and the number of shards."""
    if not _is_number(ttl_s) or not 0 < ttl_s <= MAX_SECONDS:
        raise CallerError(f"ttl_s={ttl_s!r} is not a number of seconds above 0 and up to {MAX_SECONDS}")
    if type(replicas) is not int or not 1 <= replicas <= limits.REPLICAS:
        raise CallerError(f"replicas={replicas!r} is not a number of shards from 1 to {limits.REPLICAS}")
    return int(ttl_s * 1e9), replicas


def check_tokens(name: str, tokens: int) -> int:
    """Returns a number of tokens. Raises CallerError if no sequence can have that many."""
    if type(tokens) is not int or not 1 <= tokens <= limits.TOKENS_PER_SEQUENCE:
        raise CallerError(f"{name} is {tokens!r}; expected 1 to {limits.TOKENS_PER_SEQUENCE}")
    return tokens


def check_deadline_ms(deadline_ms: float) -> float:
    """Returns the deadline of a call, 0.0 for a negative one: such a call ends at once, with a miss. Raises CallerError
    if it is no number, or longer than MAX_SECONDS."""
    if not _is_number(deadline_ms) or not deadline_ms <= MAX_SECONDS * 1e3:
        raise CallerError(f"deadline_ms={deadline_ms!r} is not a number of milliseconds; every call ends in time")
    return max(0.0, deadline_ms)


def check_filters(**filters: str | None) -> None:
    """Checks that a purge names at least one field, and each as text."""
    if all(value is None for value in filters.values()):
        raise CallerError(
            f"purge names nothing: give one of {', '.join(filters)}, or call clear() to remove everything"
        )
    for name, value in filters.items():
        if value is not None and not isinstance(value, str):
            raise CallerError(f"{name} is {kind_of(value)}; expected the text that the spec has")


def parts_of(spec: KVSpec, part: Part | Mapping[int, Part] | None) -> tuple[Part | None, ...]:
    """Returns the part that a worker holds of each group of the spec; None for groups left out."""
    if part is None:
        return spec.whole_parts()
    by_group = part if isinstance(part, Mapping) else dict.fromkeys(range(len(spec.groups)), part)
    for of_group in by_group.values():
        given: object = of_group
        if not isinstance(given, tuple) or len(given) != len(Part._fields):
            raise CallerError(f"part is {kind_of(given)}; expected a Part, or a mapping from groups to Parts")
    if not by_group:
        raise CallerError("part names no group; leave it out to hold everything")
    for group, of_group in by_group.items():
        spec.check_part(group, Part(*of_group))
    return tuple(Part(*by_group[group]) if group in by_group else None for group in range(len(spec.groups)))


def kind_of(value: object) -> str:
    """Returns the type of a wrong argument, for a message."""
    return "None" if value is None else f"a {type(value).__name__}"


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
