"""The window policy of a sequence: which of its tokens stay in the worker's memory, and when the others leave it."""

from __future__ import annotations

from dataclasses import dataclass

from kvcluster.errors import CallerError


@dataclass(frozen=True, slots=True)
class WindowPolicy:
    """`tail_tokens`: the last tokens of a sequence, which stay in the resident set unsealed, so that drafts can be
    rolled back without any call. `migration_tokens`: blocks before the tail are sealed and stored in batches of at
    least this many tokens. `sink_tokens`: the first tokens of a sequence, which never leave the resident set.

    Raises CallerError for a number that is negative or not an integer.
    """

    tail_tokens: int = 64
    migration_tokens: int = 256
    sink_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("tail_tokens", "migration_tokens", "sink_tokens"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise CallerError(f"{name} is {value!r}; expected a number of tokens, 0 or more")
