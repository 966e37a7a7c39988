"""A prompt, and chains of more blocks than one message may name.

`Prompt` is everything that identifies the blocks of one sequence within a spec. Two sequences share a block if all
tokens up to its end are the same, and also their salt, their adapter, and the contents of the images up to there. These
travel together through every call, so they are one value. It is checked when it is made, and it is a copy: an engine
that goes on appending to its own list of tokens does not change it.

A chain of more than limits.BLOCKS_PER_CALL blocks is asked about in several messages. If every group needs its whole
prefix, how far the chain can be restored is asked message by message, each for the blocks behind those of the one
before. Groups of windows and of last blocks need more: a boundary in one message may need blocks of another. For them
each group is asked about by itself, the boundary is found here by the coordinator's rule (core/coordinator/index.py),
and then exactly the blocks that each group needs are prepared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

from kvcluster.core import hashing, limits
from kvcluster.core.groups import Reuse
from kvcluster.core.ids import Attempt, BlockHash, NamespaceId
from kvcluster.core.messages import BlockFate, Explain, Explained, LoadGrant, Need, PrepareLoad, Run, Source
from kvcluster.core.miss import Miss, MissReason
from kvcluster.core.spec import KVSpec
from kvcluster.errors import CallerError
from kvcluster.transfers.coordinator_client import CoordinatorClient, NothingStored
from kvcluster.transfers.layouts import check_hashes, kind_of
from kvcluster.transport.base import Deadline, RateLimited, Unavailable

T = TypeVar("T")
Cover = tuple[Source, ...] | None
"""The sources of one group of a block."""

_TRIES = 3
"""How often a boundary is looked for: its blocks may be evicted after the question and before they are granted."""


def in_messages(items: Sequence[T]) -> Iterator[tuple[T, ...]]:
    """Divides the blocks of a chain into as many as one message may name each."""
    step = limits.BLOCKS_PER_CALL
    return (tuple(items[start : start + step]) for start in range(0, len(items), step))


def fates_of(
    control: CoordinatorClient, spec: KVSpec, need: Need, hashes: Sequence[BlockHash], deadline: Deadline
) -> Iterator[BlockFate]:
    """Yields the fates of these blocks, in order; each message is sent when its first fate is asked for. Raises as
    CoordinatorClient.ask."""
    for some in in_messages(hashes):
        yield from control.ask(Explained, spec, Explain(some, need), deadline).fates


@dataclass(slots=True)
class ChainGrant:
    """What was granted of a chain: its leading `blocks`, by `runs`, and the attempts that hold them, each with its
    time. `answered`: whether the coordinator answered at all."""

    blocks: int = 0
    runs: list[Run] = field(default_factory=list)
    miss: Miss | None = None
    holds: list[tuple[Attempt, int]] = field(default_factory=list)
    answered: bool = False


class ChainPreparer:
    """Asks how far one chain can be loaded, in as many messages as it takes, each like `question` but for the attempt
    and the hashes. `end` gives up an attempt's hold."""

    def __init__(
        self,
        control: CoordinatorClient,
        spec: KVSpec,
        question: PrepareLoad,
        deadline: Deadline,
        *,
        next_attempt: Callable[[], Attempt],
        end: Callable[[Attempt], object],
    ) -> None:
        self._control = control
        self._spec = spec
        self._question = question
        self._need = question.need
        self._deadline = deadline
        self._next_attempt = next_attempt
        self._end = end

    def prepare(self, hashes: Sequence[BlockHash]) -> ChainGrant:
        """Returns what was granted. If the coordinator stops answering, that is what was granted until then, with the
        miss. If anything else is raised, nothing is held."""
        granted = ChainGrant()
        try:
            if len(hashes) <= limits.BLOCKS_PER_CALL or all(
                self._reuses(group).kind == "prefix" for group in self._groups
            ):
                self._prefix(granted, hashes, self._need)
            else:
                self._mixed(granted, hashes)
        except (RateLimited, NothingStored) as trouble:  # by a coordinator that answers
            granted.miss, granted.answered = trouble.miss, granted.answered or self._control.is_attached(self._spec)
        except Unavailable as trouble:
            granted.miss = trouble.miss
        except BaseException:
            self._give_up(granted)
            raise
        return granted

    @property
    def _groups(self) -> list[int]:
        """The groups of the need, those that need their whole prefix first."""
        needed = [group for group, part in enumerate(self._need.parts) if part is not None]
        return sorted(needed, key=lambda group: self._reuses(group).kind != "prefix")

    def _reuses(self, group: int) -> Reuse:
        return self._spec.groups[group].reuse

    def _prefix(self, granted: ChainGrant, hashes: Sequence[BlockHash], need: Need) -> None:
        """Prepares as many leading blocks of these as can be, and adds them."""
        for some in in_messages(hashes) if hashes else [()]:  # no block is a question, too: whether it answers
            attempt = self._next_attempt()
            awaited = self._question.awaited
            awaited = None if awaited is None else max(0, awaited - granted.blocks)
            question = replace(self._question, attempt=attempt, hashes=some, need=need, awaited=awaited)
            grant = self._control.ask(LoadGrant, self._spec, question, self._deadline)
            granted.answered = True
            granted.blocks += grant.blocks
            granted.runs += grant.runs
            granted.miss = grant.miss
            if grant.hold_ns:
                granted.holds.append((attempt, grant.hold_ns))
            if grant.blocks < len(some):
                return

    def _mixed(self, granted: ChainGrant, hashes: Sequence[BlockHash]) -> None:
        for _ in range(_TRIES):
            blocks, granted.miss = self._boundary(hashes)
            granted.answered = True
            covers: list[list[Cover]] = [[None] * blocks for _ in self._need.parts]
            complete = all(self._of_group(granted, group, hashes[:blocks], covers[group]) for group in self._groups)
            if complete:
                plans = zip(*covers, strict=True)
                granted.blocks = blocks
                granted.runs = [Run(sum(1 for _ in alike), plan) for plan, alike in groupby(plans)]
                return
            self._give_up(granted)

    def _of_group(self, granted: ChainGrant, group: int, hashes: Sequence[BlockHash], covers: list[Cover]) -> bool:
        """Prepares what one group needs of these blocks to go on behind them, and fills in where it lies. Returns False
        if some of it has been evicted meanwhile."""
        first = len(hashes) - self._reuses(group).blocks_needed(len(hashes), self._spec.block_tokens)
        found = ChainGrant(holds=granted.holds)
        self._prefix(found, hashes[first:], self._need_of(group))
        for run in found.runs:
            covers[first : first + run.count] = [run.plan[group]] * run.count
            first += run.count
        if first < len(hashes):
            granted.miss = found.miss
        return first == len(hashes)

    def _boundary(self, hashes: Sequence[BlockHash]) -> tuple[int, Miss | None]:
        """Returns the longest boundary that all groups can be restored to, and why not one block more."""
        misses: dict[int, list[Miss | None]] = {}
        served: dict[int, list[bool]] = {}
        for group in self._groups:
            served[group], misses[group] = [], []
            for fate in fates_of(self._control, self._spec, self._need_of(group), hashes, self._deadline):
                served[group] += [fate.plan is not None] * fate.count
                misses[group] += [fate.miss] * fate.count
                if fate.plan is None and self._reuses(group).kind == "prefix":
                    hashes = hashes[: len(served[group]) - fate.count + 1]  # no boundary lies beyond this block
                    break
        best, tails = 0, dict.fromkeys(served, 0)
        for at in range(len(hashes)):
            for group, of_group in served.items():
                tails[group] = tails[group] + 1 if of_group[at] else 0
            if all(
                tail >= self._reuses(group).blocks_needed(at + 1, self._spec.block_tokens)
                for group, tail in tails.items()
            ):
                best = at + 1
        why = (of_group[best] for of_group in misses.values() if best < len(of_group))
        return best, next((miss for miss in why if miss is not None), None)

    def _need_of(self, group: int) -> Need:
        parts = (part if at == group else None for at, part in enumerate(self._need.parts))
        return Need(tuple(parts), self._need.accept, self._need.avoid)

    def _give_up(self, granted: ChainGrant) -> None:
        for attempt, _ in granted.holds:
            self._end(attempt)
        granted.holds.clear()


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
    with the reason: there is no full block, or it raised Unavailable. Raises LimitError as check_hashes."""
    tokens = len(prompt.token_ids)
    if tokens < spec.block_tokens:
        return [], Miss(MissReason.BELOW_BLOCK, f"{tokens} tokens fill no block of {spec.block_tokens}")
    try:
        hashes = prompt.hashes(namespace(), spec.block_tokens)
    except Unavailable as trouble:
        return [], trouble.miss
    check_hashes(hashes)
    return hashes, None
