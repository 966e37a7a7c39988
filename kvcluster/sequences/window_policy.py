"""The window policy of a sequence: which of its tokens stay in the worker's memory, and when the others leave it."""

from __future__ import annotations

from dataclasses import dataclass

from kvcluster.core.codecs import Codec
from kvcluster.errors import CallerError


@dataclass(frozen=True, slots=True)
class WindowPolicy:
    """What of a sequence stays in the worker's memory, and how.

        policy = kvcluster.WindowPolicy(tail_tokens=128, codec="q8")
        with client.sequence(token_ids, policy=policy) as sequence:
            print(sequence.statistics())

    `tail_tokens`: the last tokens of a sequence, which stay in the resident set unsealed, so that drafts can be
    rolled back without any call. `migration_tokens`: blocks before the tail are sealed and stored in batches of at
    least this many tokens. `sink_tokens`: the first tokens of a sequence, which never leave the resident set.
    `codec`: how blocks are encoded in the resident set when they leave the tail, "raw" (not at all), "q8" or "q4";
    sinks never are. The cluster gets them as they were before.

    Raises CallerError for a number that is negative or not an integer, or another codec.
    """

    tail_tokens: int = 64
    migration_tokens: int = 256
    sink_tokens: int = 0
    codec: str = "raw"

    def __post_init__(self) -> None:
        for name in ("tail_tokens", "migration_tokens", "sink_tokens"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise CallerError(f"{name} is {value!r}; expected a number of tokens, 0 or more")
        codec: object = self.codec
        if not isinstance(codec, str) or codec not in _CODECS:
            raise CallerError(f"codec is {codec!r}; expected one of {', '.join(_CODECS)}")

    @property
    def coding(self) -> Codec:
        """The codec."""
        return _CODECS[self.codec]


_CODECS = {codec.name.lower(): codec for codec in Codec}
